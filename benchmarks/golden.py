"""Freeze what the project computes, so that a change of the code can show that it changed nothing
else.

    python benchmarks/golden.py --record FILE      run every case in this checkout and write what came out
    python benchmarks/golden.py --against FILE     run every case again and compare with what was written
    python benchmarks/golden.py --list             name the cases

A case is a run of a recipe, of the command line, of AdaptiveLoop or of an example. What it gives is
kept in two parts. `numbers` must be equal to the last bit, and so may only come from what is
deterministic: losses, rates, rows, counted peaks, digests of weights, exit statuses, keys and
values that an error names. A name that begins with "~" holds figures that gloo's threads may raise
a little, and is compared within :data:`TOLERANCE`. `words` are messages with times, paths and ids
taken out: where they differ that is told, and is no failure.

Model, tokenizer and data are made here, of nothing but a seed. What the code calls its keys,
recipes and files stands in :data:`SPELLINGS`, so that the script runs before and after a renaming.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(sys.executable).parent
TOLERANCE = 0.03
TIMEOUT = 300.0

# --- how the code spells it

# Each as it was before the renaming, and as it is after.
SPELLINGS: dict[str, tuple[str, str]] = {
    "schedules": (
        "adaptive_batch.growth",
        "adaptive_batch.schedules",
    ),  # components of growth and of schedules
    "loop": ("adaptive_batch.loop", "adaptive_batch"),  # where AdaptiveLoop is imported from
    "training": ("adaptive_full_finetune", "adaptive_full_finetune"),  # recipes
    "search": ("adaptive_probe", "adaptive_probe"),
    "estimate": ("adaptive_probe", "adaptive_estimate"),
    "preview": ("plan_only", "preview"),  # keys
    "search_lengths": ("probe.sequence_lengths", "probe.sequence_lengths"),
    "assumed_maximum": ("probe.assumed_maximum", "probe.assumed_maximum"),
    "estimate_devices": ("probe.plan_for", "estimate.devices"),
    "estimate_lengths": ("probe.sequence_lengths", "estimate.sequence_lengths"),
    "estimate_changes": ("probe.plan_changes", "estimate.changes"),
    "estimate_ranks": ("probe.plan_world_size", "estimate.world_size"),
    "record_file": ("run.jsonl", "run.jsonl"),  # files in {output_dir}/adaptive_batch
    "search_file": ("probe.json", "probe.json"),
    "estimate_file": ("plan.json", "estimate.json"),
    "demo_config": ("demo_cpu", "demo_cpu"),  # shipped configurations
    "real_config": ("llama3_2_1B", "llama3_2_1B"),
}
IS_NEW = (ROOT / "adaptive_batch" / "schedules.py").exists() or (
    ROOT / "adaptive_batch" / "schedules"
).is_dir()
HAS_ESTIMATE = (ROOT / "recipes" / "adaptive_estimate.py").exists()
SAY = {
    name: spelled[HAS_ESTIMATE if name.startswith(("estimate", "preview")) else IS_NEW]
    for name, spelled in SPELLINGS.items()
}

# Keys in the files that a run writes; the first that is there counts.
STEP_FIGURES: dict[str, tuple[str, ...]] = {
    "step": ("step",),
    "epoch": ("epoch",),
    "position": ("position",),
    "rows": ("rows",),
    "asked": ("asked",),
    "loss": ("loss",),
    "lr": ("lr",),
    "grad_norm": ("grad_norm",),
    "batch_size": ("batch_size",),
    "micro_batches": ("micro_batches",),
    "padding_fraction": ("padding_fraction",),
    "samples_seen": ("samples_seen",),
    "tokens_seen": ("tokens_seen",),
    "oom_count": ("oom_count",),
    "loss_per_full_batch": ("loss_per_full_batch",),
    "gradient_noise_scale": ("gradient_noise_scale",),
}
DIGESTED = ("rows", "loss_per_full_batch")  # kept as a digest, for they are long
# Numbers under these keys depend on the moment or the machine.
PASSING = re.compile(
    r"(^|_)(time|seconds?|format|version|available|free|port|pid|cores|run|host)(_|$)"
)

# --- model, tokenizer, data

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MODEL = {
    "vocab_size": 272,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 64,
}
NUM_ROWS = 32

CONFIG = """
data_dir: ???
output_dir: ???
model: {_component_: torchtune.models.qwen2.qwen2}
tokenizer:
  _component_: torchtune.models.qwen2.qwen2_tokenizer
  path: ${data_dir}/base/vocab.json
  merges_file: ${data_dir}/base/merges.txt
  special_tokens_path: ${data_dir}/base/tokenizer.json
  max_seq_len: ${model.max_seq_len}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: ${data_dir}/base
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: QWEN2
resume_from_checkpoint: False
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: ${data_dir}/train.jsonl
  cache_dir: ${data_dir}/cache
  split: train
  column_map: {input: question, output: answer}
  train_on_input: False
  packed: False
seed: 7
shuffle: True
epochs: 1
max_steps_per_epoch: null
batch_size: 4
gradient_accumulation_steps: 1
optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 1e-2}
optimizer_in_bwd: False
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
device: cpu
enable_activation_checkpointing: False
enable_activation_offloading: False
dtype: fp32
clip_grad_norm: null
compile: False
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
  filename: log.txt
log_every_n_steps: 1
log_peak_memory_stats: False
"""


def make_base(folder: Path) -> None:
    """Make data, a tokenizer of bytes and a model with random weights, the same each time."""
    from datasets import load_dataset
    from omegaconf import OmegaConf
    from safetensors.torch import save_file
    from torchtune.models.qwen2 import qwen2
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
    from torchtune.models.qwen2._tokenizer import bytes_to_unicode

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 6))) for _ in range(40)]
    rows = [
        {
            "question": " ".join(draw.choices(words, k=1)),
            "answer": " ".join(draw.choices(words, k=draw.randint(1, 9))),
        }
        for _ in range(NUM_ROWS)
    ]
    for name, part in (("train", rows), ("held_out", rows[:10])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        load_dataset(
            "json",
            data_files=str(folder / f"{name}.jsonl"),
            cache_dir=str(folder / "cache"),
            split="train",
        )
    base = folder / "base"
    base.mkdir()
    (base / "vocab.json").write_text(
        json.dumps({byte: id for id, byte in enumerate(bytes_to_unicode().values())})
    )
    (base / "merges.txt").write_text("#version: 0.2\n")
    special = [{"id": 256 + number, "content": token} for number, token in enumerate(SPECIAL)]
    (base / "tokenizer.json").write_text(json.dumps({"added_tokens": special}))
    dimensions = {
        "num_attention_heads": MODEL["num_heads"],
        "num_key_value_heads": MODEL["num_kv_heads"],
        "hidden_size": MODEL["embed_dim"],
        "tie_word_embeddings": False,
    }
    (base / "config.json").write_text(json.dumps(dimensions))
    model = qwen2(**MODEL)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(".bias"):
                parameter.normal_(0, 0.1, generator=generator)
    save_file(
        qwen2_tune_to_hf(model.state_dict()), base / "model.safetensors", metadata={"format": "pt"}
    )
    config = OmegaConf.merge(OmegaConf.create(CONFIG), {"data_dir": str(folder), "model": MODEL})
    OmegaConf.save(config, folder / "small.yaml")


# What runs name by dotted paths, as `golden.four_more`.


def four_more(epoch: int, batch_size: int) -> int:
    """Grow by four rows in each epoch but the first."""
    return 4 if epoch else 0


def raises(epoch: int, batch_size: int) -> int:
    """Fail, as a user's function may."""
    raise KeyError("no such stage")


def eight_after_five_steps(progress: Any) -> int:
    """Give a schedule of the user's."""
    return 8 if progress.steps >= 5 else 4


def scarce(*, rows_fit: int, on_rank: int | None = None, **dimensions: Any) -> nn.Module:
    """Build the model, which runs out of memory where more rows than `rows_fit` are trained at
    once.
    """
    from torchtune.models.qwen2 import qwen2

    model = qwen2(**dimensions)

    def check(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = arguments[0] if arguments else named["tokens"]
        here = on_rank is None or int(os.environ.get("RANK", "0")) == on_rank
        if here and module.training and tokens.device.type != "meta" and len(tokens) > rows_fit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(check, with_kwargs=True)
    return model


# --- running


@dataclass
class Ended:
    """How the processes of one command ended.

    Attributes:
        statuses: of each rank.
        stdout: of the first rank.
        stderr: of the first rank, without progress bars.
        folder: where it wrote.
        ranks: how many there were.
    """

    statuses: list[int]
    stdout: str
    stderr: str
    folder: Path
    ranks: int = 1


@dataclass
class Place:
    """Where one case runs, and what it gives.

    Attributes:
        base: what :func:`make_base` has made.
        folder: of the case alone.
        numbers, words: the two parts of what the case gives.
    """

    base: Path
    folder: Path
    numbers: dict[str, Any] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    _count: int = 0

    # --- commands

    def fresh(self) -> Path:
        """Make an empty folder."""
        self._count += 1
        folder = self.folder / f"run{self._count}"
        folder.mkdir()
        return folder

    def recipe(
        self,
        *overrides: str,
        recipe: str = "training",
        config: str | None = None,
        folder: Path | None = None,
        ranks: int = 1,
        expect: int | None = 0,
    ) -> Ended:
        """Run `tune run RECIPE --config CONFIG key=value ...`; of several ranks each as torchrun
        starts it.

        Args:
            overrides: key=value.
            recipe: a name of :data:`SPELLINGS`.
            config: in place of the small configuration.
            folder: the output_dir; None for a fresh one.
            ranks: processes.
            expect: the exit status; None for any.
        """
        folder = folder or self.fresh()
        arguments = [
            "--config",
            config or str(self.base / "small.yaml"),
            f"output_dir={folder}",
            *overrides,
        ]
        name = SAY[recipe]
        if ranks == 1:
            command = ["tune", "run", name, *arguments]
            ended = self._ended(
                [self._fork(lambda: _run_path(SCRIPTS / "tune", command), folder, "0", {})], folder
            )
        else:
            with _reserved_port() as port:
                common = {
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_RESTART_COUNT": "0",
                    "TORCHELASTIC_RUN_ID": folder.name,
                }
                started = [
                    self._fork(
                        lambda: _run_module(name, [name, *arguments]),
                        folder,
                        str(rank),
                        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                    for rank in range(ranks)
                ]
                ended = self._ended(started, folder)
        if expect is not None and any(status != expect for status in ended.statuses):
            raise AssertionError(
                f"exit statuses {ended.statuses}, not {expect}, of"
                f" {arguments}:\n{ended.stderr[-3000:]}"
            )
        return ended

    def module(self, name: str, *arguments: str) -> Ended:
        """Run `python -m NAME ARGUMENTS`."""
        folder = self.fresh()
        return self._ended(
            [self._fork(lambda: _run_module(name, [name, *arguments]), folder, "0", {})], folder
        )

    def script(self, path: Path, *, ranks: int = 1) -> Ended:
        """Run a Python file, on several ranks as torchrun would."""
        folder = self.fresh()
        with _reserved_port() as port:
            common = {
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
            }
            own = [
                (
                    {**common, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    if ranks > 1
                    else {}
                )
                for rank in range(ranks)
            ]
            started = [
                self._fork(lambda: _run_path(path, [str(path)]), folder, str(rank), own[rank])
                for rank in range(ranks)
            ]
            ended = self._ended(started, folder)
        if any(ended.statuses):
            raise AssertionError(
                f"exit statuses {ended.statuses} of {path.name}:\n{ended.stderr[-3000:]}"
            )
        return ended

    def _fork(
        self, run: Callable[[], None], folder: Path, name: str, environment: dict[str, str]
    ) -> tuple[int, Path]:
        """Start a process that has everything imported already."""
        printed = self.folder / f"{folder.name}-{self._count}-{name}"
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process:
            return process, printed
        status = 1
        try:
            for number, stream in ((1, "out"), (2, "err")):
                file = os.open(f"{printed}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, number)
            os.environ.update(environment)
            os.chdir(self.folder)
            torch.set_num_threads(1)
            try:
                run()
                status = 0
            except SystemExit as ended:
                if isinstance(ended.code, str):
                    print(ended.code, file=sys.stderr)
                status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _ended(self, started: Sequence[tuple[int, Path]], folder: Path) -> Ended:
        statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process, _ in started]
        first = started[0][1]
        out, err = (
            Path(f"{first}.{stream}").read_text(errors="replace") for stream in ("out", "err")
        )
        lines = [
            line for line in re.split(r"[\n\r]", err) if not re.search(r"\d+%\||\d+/\d+ \[", line)
        ]
        return Ended(statuses, out, "\n".join(lines), folder, len(started))

    # --- what is kept

    def keep_run(self, ended: Ended, name: str = "") -> None:
        """Keep the steps, decisions, weights and search of a run of training."""
        prefix = f"{name}." if name else ""
        ours = ended.folder / "adaptive_batch"
        records = [
            json.loads(line) for line in (ours / SAY["record_file"]).read_text().splitlines()
        ]
        steps = [record for record in records if "loss" in record]
        decisions = [record for record in records if "loss" not in record]
        for figure, keys in STEP_FIGURES.items():
            values = [next((step[key] for key in keys if key in step), None) for step in steps]
            if any(value is not None for value in values):
                self.numbers[prefix + figure] = (
                    digest(values) if figure in DIGESTED else compact(values)
                )
        if (
            ended.ranks > 1
        ):  # how many trials there were depends on peaks that gloo's threads may raise
            decisions = [
                {
                    key: value
                    for key, value in record.items()
                    if key not in ("trials", "out_of_memory")
                }
                for record in decisions
            ]
        decided = [[number for number in sorted_numbers(record) if number] for record in decisions]
        self.numbers[prefix + "decisions"] = [numbers for numbers in decided if numbers]
        self.words[prefix + "messages"] = [
            self.plain(record.get("message", ""), ended) for record in decisions
        ]
        weights = sorted(
            ended.folder.glob("epoch_*"), key=lambda path: int(path.name.partition("_")[2])
        )
        if weights:
            self.numbers[prefix + "weights"] = digest_of_weights(weights[-1])
        if (ours / SAY["search_file"]).exists():
            self.keep_search(ended, name)

    def keep_search(self, ended: Ended, name: str = "") -> None:
        """Keep what a search for the bound has found."""
        prefix = f"{name}." if name else ""
        found = json.loads((ended.folder / "adaptive_batch" / SAY["search_file"]).read_text())
        keep = ("max_batch_size", "batch_size", "sequence_length", "from_cache")
        self.numbers[prefix + "bound"] = [
            found[key] for key in (*keep, "resident_bytes", "budget_bytes")
        ]
        trials = found["trials"]
        if ended.ranks == 1:
            self.numbers[prefix + "bytes_per_row"] = found["bytes_per_row"]
            self.numbers[prefix + "trials"] = [
                [trial[key] for key in ("batch_size", "fits", "peak_bytes", "optimizer_peak_bytes")]
                for trial in trials
            ]
        else:
            peaks = [
                trial["peak_bytes"]
                for trial in trials
                if trial["batch_size"] == found["max_batch_size"]
            ]
            self.numbers["~" + prefix + "peak_at_bound"] = peaks[-1:]

    def keep_estimate(self, ended: Ended, name: str = "") -> None:
        """Keep the numbers of an estimate, whatever the file calls them: of each device, length and
        change.
        """
        prefix = f"{name}." if name else ""
        found = json.loads((ended.folder / "adaptive_batch" / SAY["estimate_file"]).read_text())
        parts = [
            [sorted_numbers(entry) for entry in value]
            for value in found.values()
            if isinstance(value, list)
        ]
        for number, part in enumerate(part for part in parts if any(part)):
            self.numbers[f"{prefix}part {number + 1}"] = part
        self.numbers[prefix + "scalars"] = sorted_numbers(
            {k: v for k, v in found.items() if not isinstance(v, list)}
        )
        self.words[prefix + "printed"] = self.plain(ended.stdout, ended).splitlines()

    def keep_text(self, ended: Ended, name: str = "") -> None:
        """Keep a printed table: its numbers, whatever stands between them, and its text."""
        prefix = f"{name}." if name else ""
        text = self.plain(ended.stdout, ended)
        self.numbers[prefix + "status"] = ended.statuses
        self.numbers[prefix + "printed"] = numbers_in(text)
        self.words[prefix + "printed"] = text.splitlines()

    def keep_error(self, ended: Ended, name: str) -> None:
        """Keep an exit status, and the key and the value that the error names."""
        text = self.plain(ended.stderr, ended).strip()
        last = next(
            (
                line
                for line in reversed(text.splitlines())
                if re.match(r"\w+(Error|Exception)?: ", line)
            ),
            "",
        )
        named = re.search(r"\w+: ([\w.]+)=(.+?): ", last)
        self.numbers[name] = [ended.statuses[0], *(named.groups() if named else (None, None))]
        self.words[name] = "no error" if not ended.statuses[0] else last or text.splitlines()[-3:]

    def audit(self, ended: Ended, name: str = "audit") -> None:
        """Audit a run, and keep its verdict; how the audit words what it found is no number."""
        audited = self.module("adaptive_batch", "audit", str(ended.folder))
        self.numbers[f"{name}.status"] = audited.statuses
        self.words[f"{name}.printed"] = self.plain(audited.stdout, audited).splitlines()

    def plain(self, text: str, ended: Ended) -> str:
        """Take out of a text what differs from one time to the next."""
        for path, name in (
            (ended.folder, "OUTPUT"),
            (self.folder, "CASE"),
            (self.base, "BASE"),
            (ROOT, "ROOT"),
        ):
            text = text.replace(str(path), name)
        text = re.sub(
            r"\b(yes|no)\s+[\d.,]+\s+[\d.,-]+", r"\1 - -", text
        )  # seconds and rows a second of a trial
        text = re.sub(r"\d+ cores?, [\d.]+ GiB", "HOST", text)
        text = re.sub(r"\b\d+(\.\d+)? s\b", "SECONDS", text)
        text = re.sub(r"(?<![\w.])[0-9a-f]{12,}\b", "ID", text)
        text = re.sub(r"[\d.]+ examples/s|\d{4}-\d\d-\d\d", "-", text)
        if (
            ended.ranks > 1
        ):  # counted peaks, which gloo's threads may raise, and the trials that follow from them
            text = re.sub(r"\d+\.\d+ [GM]iB", "SIZE", text)
            text = re.sub(r"^ *\d+ +\d+ +[\d.-]+ +(yes|no) - -\n", "", text, flags=re.MULTILINE)
        return re.sub(r" +", " ", text)


def _run_path(path: Path, arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(str(path), run_name="__main__")


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])


# --- numbers


def digest(value: Any) -> str:
    """Give a short digest of plain values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Give a digest of names, types, shapes and bytes, in the order of the names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digest_of_weights(folder: Path) -> str:
    """Give a digest of the weights in a folder."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return digest_tensors(tensors)


def compact(values: list[Any]) -> Any:
    """Write a list whose values are all the same, or steps of one, in short."""
    if len(values) > 2 and all(value == values[0] for value in values):
        return {"always": values[0], "times": len(values)}
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if len(values) > 3 and whole:
        by = values[1] - values[0]
        if by and values == list(range(values[0], values[-1] + (1 if by > 0 else -1), by)):
            return {"from": values[0], "to": values[-1], "by": by}
    return values


def sorted_numbers(value: Any) -> list[Any]:
    """Give the numbers in a nest of plain values, whatever they are called, but for those of the
    moment.
    """

    def found(part: Any) -> Iterator[Any]:
        if isinstance(part, Mapping):
            for key, inner in part.items():
                if not PASSING.search(str(key)):
                    yield from found(inner)
        elif isinstance(part, list):
            for inner in part:
                yield from found(inner)
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield part

    return sorted(found(value))


def numbers_in(text: str) -> list[float]:
    """Give the numbers in a text, sorted."""
    found = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", text)
    return sorted(float(number.replace(",", "")) for number in found)


def as_json(value: Any) -> Any:
    """Give plain values that JSON can hold and that equal themselves."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


# --- the cases

Case = Callable[[Place], None]
CASES: dict[str, Case] = {}
ALONE: set[str] = set()  # cases of several processes, which run while no other does

SCHEDULE = "batch_size_schedule"
COSINE = (
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=3",
)
ON_RANKS = "probe.device_memory=3906KiB"  # well away from where one row more would fit
FIND = "use_maximum_batch_size=True"
MEMORY = "probe.device_memory=6MiB"
LARGEST = "probe.objective=largest"  # what is fastest is another thing in each run
HELD_OUT = (
    "dataset_val._component_=torchtune.datasets.instruct_dataset",
    "dataset_val.source=json",
    "dataset_val.data_files=${data_dir}/held_out.jsonl",
    "dataset_val.cache_dir=${data_dir}/cache",
    "dataset_val.split=train",
    "dataset_val.column_map={input: question, output: answer}",
)


def schedule(name: str, **arguments: object) -> tuple[str, ...]:
    """Give a ready-made schedule as key=value."""
    return (
        f"{SCHEDULE}._component_={SAY['schedules']}.{name}",
        *(f"{SCHEDULE}.{key}={value}" for key, value in arguments.items()),
    )


def increase(name: str, **arguments: object) -> tuple[str, ...]:
    """Give a ready-made increment as key=value."""
    return (
        f"batch_increase_function._component_={SAY['schedules']}.{name}",
        *(f"batch_increase_function.{key}={value}" for key, value in arguments.items()),
    )


BEYOND = ("grow_beyond_maximum=True", "micro_batch_size=4")

# Runs of training, on one device.
RUNS: dict[str, tuple[str, ...]] = {
    "off": ("epochs=2",),
    "accumulation": ("gradient_accumulation_steps=2",),
    "clipping and cosine": ("clip_grad_norm=0.5", *COSINE),
    "maximum batch": (FIND, MEMORY, "epochs=2"),
    "maximum batch, unrounded": (
        FIND,
        MEMORY,
        "probe.round_to_power_of_two=False",
        "probe.headroom=0.1",
    ),
    "micro-batches of rows": ("micro_batch_size=3", "batch_size=8", "clip_grad_norm=1.0"),
    "micro-batches of rows, auto": ("micro_batch_size=auto", "batch_size=16", MEMORY, LARGEST),
    "micro-batches of tokens": ("micro_batch_tokens=200", "batch_size=8"),
    "micro-batches of tokens, auto": ("micro_batch_tokens=auto", "batch_size=16", MEMORY, LARGEST),
    "micro-batches alike": (
        "uniform_micro_batches=both",
        "micro_batch_size=4",
        "batch_size=8",
        "pad_to_multiple_of=8",
    ),
    "steps of tokens": (
        "batch_tokens=300",
        "sample_order=seqlen",
        "sample_window=16",
        "epochs=2",
        MEMORY,
        LARGEST,
    ),
    "steps of tokens, long rows alone": (
        "batch_tokens=110",
        LARGEST,
        "long_rows=alone",
        "max_rows_per_batch=3",
        "micro_batch_size=2",
    ),
    "increase, own function": (
        "batch_increase_function=golden.four_more",
        "epochs=3",
        MEMORY,
        *COSINE,
    ),
    "increase, beyond the bound": (
        *increase("geometric", factor=2),
        *BEYOND,
        "epochs=3",
        "lr_scaling=sqrt",
    ),
    "increase, cut to the bound": (
        *increase("at_epochs", additions="{1: 8}"),
        "probe.device_memory=3MiB",
        "epochs=2",
    ),
    "schedule, steps": (
        *schedule("steps", batch_sizes="[4,8]", thresholds="[0.5ep]"),
        *BEYOND,
        "lr_scaling=linear",
        "epochs=2",
    ),
    "schedule, linear ramp": (
        *schedule("linear_ramp", start=4, end=12, over="32sp", multiple_of=2),
        *BEYOND,
        *COSINE,
    ),
    "schedule, ramp by doubling": (
        *schedule("ramp_by_doubling", start=2, end=8, over="1ep"),
        *BEYOND,
        "epochs=2",
    ),
    "schedule, noise scale": (
        *schedule("by_noise_scale", start=4, maximum=8, every=4, margin=0.1, monotone=False),
        "grow_beyond_maximum=True",
        "micro_batch_size=1",
        "optimizer.lr=1e-3",
        "epochs=8",
    ),
    "schedule, own rule": (
        f"{SCHEDULE}=golden.eight_after_five_steps",
        MEMORY,
        "lr_clock=steps",
        *COSINE,
    ),
    "schedule, of tokens": (
        *schedule("steps", batch_sizes="[150,300]", thresholds="[4ba]"),
        "batch_tokens=200",
        "grow_beyond_maximum=True",
        "micro_batch_tokens=200",
    ),
    "rate scaled linearly by tokens": (
        "batch_tokens=300",
        "micro_batch_tokens=400",
        "lr_scaling=linear",
        "reference_batch_size=250tok",
    ),
    "clock of tokens": ("lr_clock=tokens", "batch_tokens=250", "micro_batch_tokens=400", *COSINE),
    "clock of two units": ("lr_clock={warmup: steps, decay: tokens}", *COSINE),
    "noise scale logged": (
        "log_gradient_noise_scale=True",
        "micro_batch_size=1",
        "optimizer.lr=1e-3",
        "batch_size=2",
        "epochs=4",
    ),
    "optimizer in backward": ("optimizer_in_bwd=True", "optimizer.fused=False", FIND, MEMORY),
    "bf16": ("dtype=bf16", FIND, MEMORY),
    "packed": ("dataset.packed=True", "micro_batch_size=auto", MEMORY, LARGEST),
    "activation checkpointing and dropout": (
        "enable_activation_checkpointing=True",
        "model.attn_dropout=0.2",
        FIND,
        MEMORY,
    ),
    "plain cross-entropy, SGD": (
        "loss=torch.nn.CrossEntropyLoss",
        "optimizer=torch.optim.SGD",
        "~optimizer.fused",
        "optimizer.momentum=0.9",
        "drop_last=True",
        "batch_size=5",
    ),
    "validation": (
        *HELD_OUT,
        "run_val_every_n_steps=3",
        "batch_size_val=auto",
        MEMORY,
        "max_validation_batches=2",
    ),
    "out of memory, replayed": (
        "model._component_=golden.scarce",
        "model.rows_fit=3",
        "batch_size=8",
    ),
}

# The same on two ranks.
RUNS_ON_RANKS: dict[str, tuple[str, ...]] = {
    "off": ("batch_size=2", "epochs=2"),
    "clipping and accumulation": (
        "batch_size=2",
        "gradient_accumulation_steps=2",
        "clip_grad_norm=0.5",
    ),
    "steps of tokens": (
        "batch_tokens=150",
        "micro_batch_tokens=200",
        "sample_order=seqlen",
        "sample_window=16",
    ),
    "micro-batches of rows, auto": ("micro_batch_size=auto", "batch_size=8", ON_RANKS, LARGEST),
    "maximum batch": (FIND, ON_RANKS, "lr_scaling=sqrt"),
    "schedule, gradients summed late": (
        *schedule("steps", batch_sizes="[2,4]", thresholds="[0.5ep]"),
        "grow_beyond_maximum=True",
        "micro_batch_size=1",
        "sync_gradients_every_micro_batch=False",
        "lr_scaling=linear",
        *COSINE,
    ),
    "increase and validation": (
        "batch_increase_function=golden.four_more",
        "grow_beyond_maximum=True",
        "micro_batch_size=2",
        "batch_size=2",
        "epochs=2",
        *HELD_OUT,
        "run_val_every_n_steps=4",
    ),
    "out of memory on one, replayed": (
        "model._component_=golden.scarce",
        "model.rows_fit=2",
        "model.on_rank=1",
        "batch_size=4",
    ),
}

PREVIEWS: dict[str, tuple[str, ...]] = {
    "steps": (
        *schedule("steps", batch_sizes="[4,8,16]", thresholds="[0.5ep,1ep]"),
        *BEYOND,
        "epochs=2",
    ),
    "ramp": (
        *schedule("ramp_by_doubling", start=2, end=16, over="2ep"),
        *BEYOND,
        "epochs=3",
        "lr_scaling=linear",
    ),
    "increase, bound assumed": (
        *increase("geometric", factor=2),
        f"{SAY['assumed_maximum']}=10",
        "epochs=3",
        *COSINE,
    ),
    "tokens": ("batch_tokens=300", f"{SAY['assumed_maximum']}=8", "lr_clock=steps", *COSINE),
}

SEARCHES: dict[str, tuple[str, ...]] = {
    "predict": ("probe.search=predict", MEMORY),
    "binary": ("probe.search=binary", "probe.maximum=32", MEMORY),
    "halve": ("probe.search=halve", "probe.maximum=32", MEMORY),
    "a length": ("probe.sequence_length=32", MEMORY, "optimizer_in_bwd=True"),
    "as the tokenizer cuts": (
        "probe.sequence_length=max_seq_len",
        MEMORY,
        "gradient_accumulation_steps=4",
    ),
}

ERRORS: dict[str, tuple[str, ...]] = {
    "no batch": ("batch_size=0",),
    "a batch above the rows": ("batch_increase_function=golden.four_more", "batch_size=64"),
    "a key that is nearly ours": ("use_max_batch_size=True",),
    "an unknown key in probe": ("probe.serach=binary",),
    "no size": ("probe.device_memory=12XiB",),
    "less than the weights need": (FIND, "probe.device_memory=100KiB"),
    "both micro-batches": ("micro_batch_size=2", "micro_batch_tokens=auto"),
    "tokens below a row": ("micro_batch_tokens=10",),
    "a step below a row": ("batch_tokens=10",),
    "tokens and the maximum": ("batch_tokens=200", FIND),
    "backward and accumulation": ("optimizer_in_bwd=True", "gradient_accumulation_steps=2"),
    "half precision": ("dtype=fp16",),
    "a function that is not there": ("batch_increase_function=nowhere.f",),
    "a function that raises": ("batch_increase_function=golden.raises",),
    "thresholds that fall": schedule("steps", batch_sizes="[4,8,16]", thresholds="[2ep,1ep]"),
    "a clock of no unit": ("lr_clock=epochs", *COSINE),
    "nothing to validate on": ("run_val_every_n_steps=5",),
    "micro-batches above what fits": (FIND, MEMORY, "micro_batch_size=30", "probe.cache=False"),
    "one row does not fit": (FIND, "probe.device_memory=900KiB"),
}

EXAMPLES = {"plain_pytorch": 1, "hugging_face": 1, "lightning_module": 1, "fsdp2": 2}


def case(name: str, *, alone: bool = False) -> Callable[[Case], Case]:
    """Enter a function among the cases."""

    def enter(function: Case) -> Case:
        CASES[name] = function
        if alone:
            ALONE.add(name)
        return function

    return enter


def enter_tables() -> None:
    """Enter the tables above among the cases."""

    def trains(overrides: tuple[str, ...], ranks: int) -> Case:
        def run(place: Place) -> None:
            ended = place.recipe(*overrides, ranks=ranks)
            place.keep_run(ended)
            place.audit(ended)

        return run

    for name, overrides in RUNS.items():
        case(f"run: {name}")(trains(overrides, 1))
    for name, overrides in RUNS_ON_RANKS.items():
        case(f"two ranks: {name}", alone=True)(trains(overrides, 2))

    def previews(overrides: tuple[str, ...]) -> Case:
        return lambda place: place.keep_text(place.recipe(f"{SAY['preview']}=True", *overrides))

    for name, overrides in PREVIEWS.items():
        case(f"preview: {name}")(previews(overrides))

    def searches(overrides: tuple[str, ...]) -> Case:
        return lambda place: place.keep_search(place.recipe(*overrides, recipe="search"))

    for name, overrides in SEARCHES.items():
        case(f"search: {name}")(searches(overrides))

    def shows(name: str, ranks: int) -> Case:
        def run(place: Place) -> None:
            ended = place.script(ROOT / "examples" / f"{name}.py", ranks=ranks)
            for label, values in re.findall(
                r"^([a-z_][\w -]+): ([\d. e-]+)$", ended.stdout, re.MULTILINE
            ):
                place.numbers[label] = [float(value) for value in values.split()]
            printed = place.plain(ended.stdout, ended).splitlines()
            place.words["printed"] = [line for line in printed if "runtime" not in line]

        return run

    for name, ranks in EXAMPLES.items():
        case(f"example: {name}", alone=ranks > 1)(shows(name, ranks))


@case("errors")
def _errors(place: Place) -> None:
    for name, overrides in ERRORS.items():
        place.keep_error(place.recipe(*overrides, expect=None), name)


@case("search: several lengths")
def _several_lengths(place: Place) -> None:
    ended = place.recipe(f"{SAY['search_lengths']}=[16,32,64]", MEMORY, recipe="search")
    place.keep_text(ended)
    place.keep_search(ended)


@case("search: known from before")
def _known_from_before(place: Place) -> None:
    first = place.recipe(FIND, MEMORY)
    place.keep_run(first, "first")
    again = place.recipe(FIND, MEMORY, folder=first.folder)
    place.keep_run(again, "again")
    less = place.recipe("probe.device_memory=4MiB", recipe="search", folder=first.folder)
    place.keep_search(less, "less memory")


@case("estimate: with changes")
def _estimate(place: Place) -> None:
    own = (f"{SAY['estimate_devices']}=[2MiB,H100]", f"{SAY['estimate_lengths']}=[32,64]")
    place.keep_estimate(place.recipe(*own, recipe="estimate"))


@case("estimate: other ways to train")
def _estimate_others(place: Place) -> None:
    own = (f"{SAY['estimate_devices']}=3MiB", f"{SAY['estimate_changes']}=False")
    ways = {
        "the longest row": (),
        "in backward, bf16": (
            "optimizer_in_bwd=True",
            "dtype=bf16",
            f"{SAY['estimate_lengths']}=[48]",
        ),
        "two ranks": (f"{SAY['estimate_ranks']}=2", f"{SAY['estimate_lengths']}=[32]"),
        "accumulating": (
            "gradient_accumulation_steps=2",
            "clip_grad_norm=1.0",
            f"{SAY['estimate_lengths']}=[32]",
        ),
        "packed": ("dataset.packed=True", f"{SAY['estimate_lengths']}=[64]"),
    }
    for name, overrides in ways.items():
        place.keep_estimate(place.recipe(*own, *overrides, recipe="estimate"), name)


@case("estimate: a real model")
def _estimate_real(place: Place) -> None:
    ended = place.recipe(
        f"{SAY['estimate_devices']}=[H100,RTX4090]",
        f"{SAY['estimate_lengths']}=[512]",
        f"{SAY['estimate_changes']}=False",
        recipe="estimate",
        config=SAY["real_config"],
    )
    place.keep_estimate(ended)


@case("demo: its configuration")
def _demo(place: Place) -> None:
    demo = ROOT / "examples" / "demo"
    if demo.is_dir():  # before, the configuration's tokenizer made the files
        made = [sys.executable, demo, "--files-only", "--directory", place.folder / "demo"]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    ended = place.recipe(
        f"demo_dir={place.folder / 'demo'}",
        FIND,
        "max_steps_per_epoch=2",
        "epochs=2",
        config=SAY["demo_config"],
    )
    place.keep_run(ended)


# --- going on


def left_at(ended: Ended, step: int) -> Ended:
    """Leave of a run what a kill would have left that came after the resume point of a step."""
    for path in ended.folder.iterdir():
        name, _, number = path.name.partition("_")
        if name in ("epoch", "recipe") or (name == "step" and int(number) > step):
            shutil.rmtree(path)
    return ended


SAVES = ("save_every_n_steps=3", "batch_size=2")


@case("resume: in mid-epoch")
def _resume(place: Place) -> None:
    keys = (*SAVES, "epochs=2", "model.attn_dropout=0.1", *COSINE)
    whole = place.recipe(*keys)
    place.keep_run(whole, "whole")
    for step in (6, 18):
        cut = place.recipe(*keys)
        goes_on = place.recipe(
            *keys, "resume_from_checkpoint=True", folder=left_at(cut, step).folder
        )
        place.keep_run(goes_on, f"from step {step}")
        place.audit(goes_on, f"audit from step {step}")


@case("resume: while the batch grows")
def _resume_growing(place: Place) -> None:
    keys = (
        *increase("geometric", factor=2),
        *SAVES,
        "epochs=3",
        "lr_scaling=linear",
        MEMORY,
        *COSINE,
    )
    cut = place.recipe(*keys)
    goes_on = place.recipe(*keys, "resume_from_checkpoint=True", folder=left_at(cut, 18).folder)
    place.keep_run(goes_on)
    place.audit(goes_on)


@case("resume: refused and changed")
def _resume_changed(place: Place) -> None:
    keys = (*SAVES, "epochs=2")
    cut = left_at(place.recipe(*keys), 6)
    others = "dataset.data_files=${data_dir}/held_out.jsonl"
    for override in (
        "optimizer=torch.optim.SGD",
        others,
        "sample_order=random",
        "optimizer_in_bwd=True",
    ):
        more = ("~optimizer.fused",) if "SGD" in override else ()
        refused = place.recipe(
            *keys, override, *more, "resume_from_checkpoint=True", folder=cut.folder, expect=None
        )
        place.keep_error(refused, override)
    goes_on = place.recipe(
        *keys,
        others,
        "resume_allow_changes=[dataset]",
        "resume_from_checkpoint=True",
        "epochs=3",
        folder=cut.folder,
    )
    place.keep_run(goes_on)
    place.audit(goes_on)


@case("resume: two ranks to one", alone=True)
def _resume_on_fewer(place: Place) -> None:
    cut = left_at(place.recipe(*SAVES, ranks=2), 3)
    goes_on = place.recipe(*SAVES, "resume_from_checkpoint=True", folder=cut.folder)
    place.keep_run(goes_on)
    place.audit(goes_on)


@case("resume: one rank to two", alone=True)
def _resume_on_more(place: Place) -> None:
    cut = left_at(place.recipe(*SAVES), 6)
    goes_on = place.recipe(*SAVES, "resume_from_checkpoint=True", folder=cut.folder, ranks=2)
    place.keep_run(goes_on)
    place.audit(goes_on)


@case("two ranks: by tune run", alone=True)
def _by_tune_run(place: Place) -> None:
    folder = place.fresh()
    command = [str(SCRIPTS / "tune"), "run", "--nproc_per_node", "2", SAY["training"], "--config"]
    command += [
        str(place.base / "small.yaml"),
        f"output_dir={folder}",
        "batch_size=2",
        "micro_batch_size=1",
    ]
    done = subprocess.run(command, cwd=place.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])
    place.keep_run(Ended([done.returncode], done.stdout, done.stderr, folder, ranks=2))


# --- a loop of one's own


class Bytes(nn.Module):
    """Predicts the next of 50 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = (
            nn.Embedding(50, 16),
            nn.Linear(16, 64),
            nn.Linear(64, 50),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embed(tokens)).relu())


@dataclass
class Loop:
    """A model, its optimizer, and an AdaptiveLoop around them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loop: Any

    @classmethod
    def begin(cls, *, cosine: bool = False, rows_fit: int | None = None, **options: Any) -> Loop:
        """Build all of it, the same each time.

        Args:
            cosine: with a schedule of the rate.
            rows_fit: run out of memory beyond so many rows.
            options: of AdaptiveLoop.
        """
        draw = random.Random(1)
        rows = [
            {"tokens": [draw.randrange(1, 50) for _ in range(3 + 5 * n % 13)]} for n in range(40)
        ]
        torch.manual_seed(0)
        model = Bytes()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = None
        if cosine:
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda n: 0.5 + 0.5 * math.cos(n / 10)
            )
            options["lr_scheduler"] = scheduler

        def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
            tokens = [torch.tensor(row["tokens"]) for row in batch]
            pad = nn.utils.rnn.pad_sequence
            return {"tokens": pad(tokens, True, 0), "labels": pad(tokens, True, -100)}

        def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if rows_fit is not None and len(batch["tokens"]) > rows_fit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            logits = model(batch["tokens"])[:, :-1]
            return nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten()
            )

        package = importlib.import_module(SAY["loop"])
        adaptive, options = package.AdaptiveLoop, {"batch_size": 8, **options}
        for argument, group in (("sampling", "Sampling"), ("options", "StepOptions")):
            if kind := getattr(package, group, None):  # since arguments are grouped
                options[argument] = kind(
                    **{k: options.pop(k) for k in kind.__dataclass_fields__ if k in options}
                )
        return cls(
            model,
            optimizer,
            scheduler,
            adaptive(model, optimizer, rows, collate=collate, mean_loss=mean_loss, **options),
        )

    def train(self, epochs: int, until: int = 10**9) -> list[list[Any]]:
        """Train to the end of so many epochs or so many steps: rows, micro-batches, rate, loss and
        norm of each.
        """
        seen: list[list[Any]] = []
        while self.loop.progress.epoch < epochs:
            for rows in self.loop:
                result = self.loop.run(rows)
                self.optimizer.step()
                self.optimizer.zero_grad()
                norm = None if result.grad_norm is None else float(result.grad_norm)
                seen.append(
                    [result.rows, result.micro_batches, self.loop.learning_rate, result.loss, norm]
                )
                if self.loop.progress.steps >= until:
                    return seen
        return seen

    def keep(self, place: Place, seen: list[list[Any]], found: Any = None) -> None:
        """Keep the steps, the weights, where training stands and the bound that was found."""
        names = ("rows", "micro_batches", "lr", "loss", "grad_norm")
        for name, values in zip(names, zip(*seen, strict=True), strict=True):
            place.numbers[name] = compact(list(values))
        place.numbers["weights"] = digest_tensors(self.model.state_dict())
        progress = self.loop.progress
        place.numbers["stands"] = [
            progress.epoch,
            progress.steps,
            progress.samples,
            progress.tokens,
        ]
        bound = (
            self.loop.max_batch_size if hasattr(self.loop, "max_batch_size") else self.loop.bound
        )
        place.numbers["bound"] = [bound, self.loop.batch_size, self.loop.num_out_of_memory]
        if found is not None:
            place.numbers["trials"] = [
                [trial.batch_size, trial.fits, trial.peak_bytes, trial.optimizer_peak_bytes]
                for trial in found.trials
            ]
            place.numbers["found"] = [
                found.max_batch_size,
                found.sequence_length,
                found.resident_bytes,
                found.budget_bytes,
            ]


def ready_made(name: str) -> Any:
    """Give a ready-made rule."""
    return getattr(importlib.import_module(SAY["schedules"]), name)


@case("loop: plain")
def _loop_plain(place: Place) -> None:
    one = Loop.begin(max_grad_norm=0.5)
    one.keep(place, one.train(2))


@case("loop: bound, growth, rate")
def _loop_grows(place: Place) -> None:
    one = Loop.begin(
        batch_increase_function=ready_made("geometric")(2.0),
        grow_beyond_maximum=True,
        lr_scaling="sqrt",
        cosine=True,
    )
    found = one.loop.find_bound(device_memory="160KiB")
    place.numbers["steps ahead"] = one.loop.num_steps(3)
    one.keep(place, one.train(3), found)


@case("loop: growth cut to the bound")
def _loop_is_cut(place: Place) -> None:
    one = Loop.begin(
        batch_increase_function=ready_made("at_epochs")({1: 30}),
        lr_scaling="linear",
        reference_batch_size="64tok",
    )
    found = one.loop.find_bound(device_memory="300KiB", headroom=0.0, round_to_power_of_two=True)
    one.keep(place, one.train(2), found)


@case("loop: schedule, micro-batches")
def _loop_schedule(place: Place) -> None:
    rule = ready_made("linear_ramp")(4, 16, "40sp")
    one = Loop.begin(batch_size_schedule=rule, micro_batch_size=3, shuffle=False, max_grad_norm=1.0)
    one.keep(place, one.train(2))


@case("loop: out of memory, replayed")
def _loop_replays(place: Place) -> None:
    one = Loop.begin(rows_fit=3, batch_size=10)
    one.keep(place, one.train(1))


@case("loop: going on")
def _loop_goes_on(place: Place) -> None:
    options: dict[str, Any] = {
        "batch_increase_function": ready_made("geometric")(2.0),
        "lr_scaling": "linear",
        "cosine": True,
        "batch_size": 4,
    }
    first = Loop.begin(**options)
    found = first.loop.find_bound(device_memory="300KiB")
    before = first.train(3, until=7)
    state = first.loop.state_dict()
    second = Loop.begin(**options)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    second.loop.load_state_dict(state)
    second.keep(place, before + second.train(3), found)


@case("loop: errors")
def _loop_errors(place: Place) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "batch_size": {"batch_size": 0},
        "lr_scaling": {"lr_scaling": "cubic"},
        "both rules": {
            "batch_increase_function": ready_made("geometric")(2.0),
            "batch_size_schedule": ready_made("linear_ramp")(4, 16, "40sp"),
        },
        "reference": {"reference_batch_size": "many"},
    }
    for name, options in wrong.items():
        try:
            Loop.begin(**options)
        except Exception as error:
            place.numbers[name] = [
                getattr(error, "key", None),
                repr(getattr(error, "value", None))[:20],
            ]
            place.words[name] = re.sub(r"0x[0-9a-f]+", "ID", f"{type(error).__name__}: {error}")
        else:
            place.numbers[name] = "nothing was refused"


enter_tables()

# --- all of it


def run_case(name: str, base: Path, folder: Path, written: Path) -> None:
    """Run one case and write what it gives."""
    folder.mkdir()
    os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
    place = Place(base, folder)
    error = None
    begin = time.monotonic()
    try:
        CASES[name](place)
    except BaseException:
        error = place.plain(traceback.format_exc(), Ended([1], "", "", folder))[-4000:]
    result = {"numbers": as_json(place.numbers), "words": as_json(place.words)}
    if error:
        result["numbers"]["failed"], result["words"]["failed"] = True, error
    written.write_text(json.dumps({"result": result, "seconds": time.monotonic() - begin}))


def run_all(names: Sequence[str], *, jobs: int) -> dict[str, Any]:
    """Run cases, several at a time but for those that want to be alone; what each gives, by name."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as made:
        top = Path(made).resolve()
        base = top / "base"
        base.mkdir()
        _in_child(lambda: make_base(base))
        waiting = [name for name in names if name not in ALONE] + [
            name for name in names if name in ALONE
        ]
        running: dict[int, tuple[str, float]] = {}
        number = {name: index for index, name in enumerate(names)}
        while waiting or running:
            alone = any(name in ALONE for name, _ in running.values())
            while (
                waiting
                and len(running) < jobs
                and not alone
                and not (running and waiting[0] in ALONE)
            ):
                name = waiting.pop(0)
                files = top / f"{number[name]}.json"
                process = _start(
                    lambda name=name, files=files: run_case(
                        name, base, files.with_suffix(""), files
                    )
                )
                running[process] = name, time.monotonic()
                alone = name in ALONE
            for process, (name, begin) in list(running.items()):
                if time.monotonic() - begin > TIMEOUT:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process, signal.SIGKILL)
                if os.waitpid(process, os.WNOHANG)[0]:
                    del running[process]
                    path = top / f"{number[name]}.json"
                    gone = {
                        "result": {"numbers": {"failed": True}, "words": {"failed": "ended early"}},
                        "seconds": 0,
                    }
                    found = json.loads(path.read_text()) if path.exists() else gone
                    results[name] = found["result"]
                    failed = ", FAILED" if "failed" in found["result"]["numbers"] else ""
                    print(f"{found['seconds']:6.1f} s  {name}{failed}", flush=True)
                    if failed:
                        print(found["result"]["words"]["failed"], flush=True)
                    shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            time.sleep(0.05)
    return {name: results[name] for name in names}


def _start(run: Callable[[], None]) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _in_child(run: Callable[[], None]) -> None:
    if os.waitpid(_start(run), 0)[1]:
        raise RuntimeError("the model and its data could not be made")


def warm_up() -> None:
    """Import once what every run imports, so that each begins at once."""
    os.environ.update(
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        CUDA_VISIBLE_DEVICES="",
        PYTHONPATH=os.pathsep.join(
            filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
        ),
        PYTHONWARNINGS="ignore",
    )
    for name in ("ADAPTIVE_BATCH_TRACEBACK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    installed = Path(str(importlib.import_module("adaptive_batch").__file__)).resolve()
    if ROOT not in installed.parents:
        sys.exit(
            "the adaptive_batch that this Python imports is that of another checkout; take this"
            " one's .venv"
        )
    for name in (
        "datasets",
        "torchtune._cli.tune",
        "torchtune.models.qwen2",
        "safetensors.torch",
        SAY["training"],
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def about() -> dict[str, Any]:
    """Tell what the last bits depend on besides the code."""
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cases": len(CASES),
    }


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write what all cases give, a line for each part."""
    lines = [f'"about": {json.dumps(about())}']
    for name, result in results.items():
        parts = [
            f"  {json.dumps(part)}: {{\n"
            + ",\n".join(
                f"   {json.dumps(key)}: {json.dumps(value)}" for key, value in result[part].items()
            )
            + "\n  }"
            for part in ("numbers", "words")
        ]
        lines.append(f"{json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n }")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def is_near(one: Any, other: Any) -> bool:
    """Say whether two nests of numbers are the same within the tolerance."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_near, one, other))
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=TOLERANCE) if numbers else one == other


def shown(value: Any) -> str:
    """Give a value on one line that is not too long."""
    text = json.dumps(value)
    return text if len(text) <= 400 else f"{text[:400]} ... ({len(text)} characters)"


def first_difference(one: Any, other: Any) -> str:
    """Tell where two lists begin to differ."""
    if not (isinstance(one, list) and isinstance(other, list)):
        return ""
    at = next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )
    return f" (from entry {at} on; {len(one)} entries before, {len(other)} now)"


def compare(before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> int:
    """Print what differs; return how many numbers do."""
    wrong, reworded = [], []
    for name in names:
        if name not in before or name not in now:
            wrong.append(f"{name}: only {'now' if name in now else 'before'}")
            continue
        for part, list_of in (("numbers", wrong), ("words", reworded)):
            old, new = before[name][part], now[name][part]
            for key in [*old, *(key for key in new if key not in old)]:
                one, other = old.get(key), new.get(key)
                same = is_near(one, other) if key.startswith("~") else one == other
                if same:
                    continue
                if part == "words" and isinstance(one, list) and isinstance(other, list):
                    gone = [line for line in one if line not in other]
                    come = [line for line in other if line not in one]
                    lines = [
                        *(f"    - {line}" for line in gone),
                        *(f"    + {line}" for line in come),
                    ]
                    list_of.append(f"{name} | {key}:\n" + "\n".join(lines or ["    (order)"]))
                else:
                    where = first_difference(one, other)
                    list_of.append(
                        f"{name} | {key}{where}:\n    - {shown(one)}\n    + {shown(other)}"
                    )
    if reworded:
        print(f"\nwords that differ, which is no failure ({len(reworded)}):")
        print("\n".join(reworded))
    print(f"\nnumbers that differ: {len(wrong)}")
    if wrong:
        print("\n".join(wrong))
    return len(wrong)


def main() -> int:
    """Run the cases; record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what comes out")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with what was written"
    )
    parser.add_argument(
        "--only", default="", metavar="SUBSTRING", help="run the cases whose names contain this"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="cases at a time (default: %(default)s)"
    )
    parser.add_argument("--list", action="store_true", help="name the cases")
    given = parser.parse_args()
    names = [name for name in CASES if given.only in name]
    if given.list or not names:
        print("\n".join(names))
        return 0 if names else 2
    if not (given.record or given.against):
        parser.error("give --record FILE or --against FILE")
    before = json.loads(given.against.read_text()) if given.against else {}
    begin = time.monotonic()
    warm_up()
    results = run_all(names, jobs=given.jobs)
    print(f"\n{len(results)} cases in {time.monotonic() - begin:.0f} s")
    failed = [name for name, result in results.items() if "failed" in result["numbers"]]
    if failed:
        print(f"failed: {', '.join(failed)}")
    if given.record:
        write(given.record, results)
    status = 1 if failed else 0
    if given.against:
        here, there = about(), before.pop("about")
        if here | {"cases": 0} != there | {"cases": 0}:
            print(f"the machines differ, so last bits may: {there} before, {here} now")
        compared = [
            *(name for name in before if given.only in name),
            *(name for name in names if name not in before),
        ]
        if compare(before, json.loads(json.dumps(results)), compared):
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
