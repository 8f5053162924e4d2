"""A small setup of data, tokenizer, model and configuration, and runs of recipes on it.

    setup = make_setup(folder)
    # Run the command line in this process.
    finished = setup.run_in_process("full_finetune_single_device")
    # Run it in new processes, with their output and exit status.
    finished = setup.run("adaptive_full_finetune", "batch_size=0", expect=1)
    finished = setup.run("adaptive_full_finetune", "batch_size=2", ranks=2)
    # Read the exact losses of the log.
    finished.losses

The rows are docstrings of the standard library. The tokenizer is trained on them. The model is a
Qwen2 of two layers.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from support.paths import ROOT
from support.processes import run
from torch import nn
from torchtune import training
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

sys.path.insert(
    0, str(ROOT / "examples")
)  # for benchmarks and processes that pytest does not start
import demo

from adaptive_batch._util import replaced
from adaptive_batch.report import read_records
from adaptive_batch.torchtune.job import restored_compiler

OURS = "adaptive_full_finetune"
STOCK, STOCK_ON_RANKS = "full_finetune_single_device", "full_finetune_distributed"
TUNE = Path(sys.executable).parent / "tune"
LOG = "log.txt"

NUM_ROWS = 32
SOURCES = ("textwrap", "heapq", "bisect", "shlex", "statistics", "fractions")
MODEL: dict[str, Any] = {
    "vocab_size": demo.MODEL["vocab_size"],  # maximum of the demo's tokenizer
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 64,
}

_CONFIG = """
data_dir: ???
output_dir: ${data_dir}/output
model:
  _component_: torchtune.models.qwen2.qwen2
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
# A run that a test interrupts keeps the state of the previous epoch.
keep_final_state: False
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: ${data_dir}/train.jsonl
  cache_dir: ${data_dir}/cache
  split: train
  column_map: {input: signature, output: docstring}
  train_on_input: False
  packed: False
seed: 7
shuffle: True
epochs: 2
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


# The override for two datasets with half of the rows each.
HALVES = "dataset=halves"


def block(name: str, component: str, **keys: Any) -> tuple[str, ...]:
    """Return the overrides that build a block of the configuration from a component."""
    values = {"_component_": component, **keys}
    return tuple(f"{name}.{key}={value}" for key, value in values.items())


def cosine_after(warmup_steps: int) -> tuple[str, ...]:
    """Return the overrides of torchtune's cosine schedule with warm-up."""
    component = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    return block("lr_scheduler", component, num_warmup_steps=warmup_steps)


# Overrides of features by name. The rows divide into whole accumulations, since the stock recipe
# keeps the gradients of an unfinished one.
FEATURES: dict[str, tuple[str, ...]] = {
    "accumulation": ("gradient_accumulation_steps=2",),
    "activation checkpointing": ("enable_activation_checkpointing=True",),
    "plain cross-entropy": ("loss=torch.nn.CrossEntropyLoss",),
    "bf16": ("dtype=bf16",),
    "dropout": ("model.attn_dropout=0.2",),
    "packed": ("dataset.packed=True", "max_steps_per_epoch=2"),
    "cosine": cosine_after(3),
    "clipping": ("clip_grad_norm=0.5",),
    "concatenated": (HALVES,),
    "max_steps_per_epoch": ("max_steps_per_epoch=3",),
    "SGD with momentum": (
        "optimizer=torch.optim.SGD",
        "optimizer.momentum=0.9",
        "optimizer.lr=0.1",
    ),
}


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    output: str  # printed text; empty for a run in this process
    output_dir: Path
    spread: float = 0.0  # seconds between the ends of its first and last process

    @property
    def losses(self) -> list[str]:
        return self.figures("loss")

    def figures(self, name: str) -> list[str]:
        """Return a figure of each step as text, from the log of this and of resumed runs."""
        text = (self.output_dir / "logs" / LOG).read_text()
        return re.findall(rf"(?:^|\s){name}:(\S+)", text)

    def weights(self, epoch: int) -> dict[str, torch.Tensor]:
        return weights(self.output_dir / f"epoch_{epoch}")


@dataclass(frozen=True)
class SmallSetup:
    """Dataset, tokenizer, base checkpoint, configuration and outputs of runs in one folder."""

    folder: Path
    config: Path  # base configuration of the runs, with one key of ours

    def run(
        self,
        recipe: str,
        *overrides: str,
        config: str | None = None,
        ranks: int | None = None,
        expect: int | Sequence[int] | None = 0,
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
        before: str = "",
    ) -> Finished:
        """Run the command line in new processes.

        Args:
            recipe: module of the recipe.
            overrides: key=value; a run without ``output_dir`` gets a new one.
            config: path of another configuration than the setup's.
            ranks: number of processes with the variables of torchrun; None for one without them.
            expect: exit status of all processes, or one for each; None if all must fail.
            environment: returns further variables of a rank; its ``OVERRIDES``, key=value pairs,
                are overrides of this rank alone.
            before: dotted path of a function without arguments that each rank calls first.
        """
        arguments, output_dir = self._arguments(recipe, overrides, config)
        ended = run(
            *(_tune, arguments, before),
            ranks=ranks,
            environment=lambda rank: {**self._environment(), **environment(rank)},
            timeout=500,
            terminates=True,
        )
        statuses = [one.exit_status for one in ended]
        output = "\n".join(one.output for one in ended)
        if isinstance(expect, int):
            expect = [expect] * len(ended)
        is_expected = all(statuses) if expect is None else statuses == list(expect)
        assert is_expected, f"{arguments} ended with {statuses}:\n{output[-6000:]}"
        ends = [one.seconds for one in ended]
        return Finished(output, output_dir, max(ends) - min(ends))

    def run_in_process(self, recipe: str, *overrides: str, config: str | None = None) -> Finished:
        """Run the same command line in this process, which saves the import of torch. Errors are
        raised unchanged.
        """
        arguments, output_dir = self._arguments(recipe, overrides, config)
        with _as_a_process(["tune", *arguments], self._environment()):
            try:
                runpy.run_path(str(TUNE), run_name="__main__")
            except SystemExit as ended:
                if ended.code:
                    raise AssertionError(f"exit status {ended.code} of {arguments}") from ended
        return Finished("", output_dir)

    @property
    def base(self) -> Path:
        """The folder of the base checkpoint and the tokenizer."""
        return self.folder / "base"

    def fresh_folder(self) -> Path:
        """Create an empty folder for the output of a run."""
        (self.folder / "runs").mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.folder / "runs"))

    def _arguments(
        self, recipe: str, overrides: tuple[str, ...], config: str | None
    ) -> tuple[list[str], Path]:
        given = [value.partition("=")[2] for value in overrides if value.startswith("output_dir=")]
        output_dir = Path(given[-1]) if given else self.fresh_folder()
        own = () if given else (f"output_dir={output_dir}",)
        if HALVES in overrides:
            # The command line can replace a block with a component only by a dotted path.
            merged = OmegaConf.load(self.config)
            merged.dataset = [
                {**merged.dataset, "split": f"train[{half}]"}
                for half in (f":{NUM_ROWS // 2}", f"{NUM_ROWS // 2}:")
            ]
            config = f"{output_dir}.yaml"
            OmegaConf.save(merged, config)
        rest = [value for value in overrides if value != HALVES]
        return ["run", recipe, "--config", config or str(self.config), *own, *rest], output_dir

    def _environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1",
            "ADAPTIVE_BATCH_CACHE": str(self.folder / "lengths"),
            "HF_HUB_OFFLINE": "1",
        }


def _tune(arguments: list[str], before: str) -> None:
    """Run ``tune ARGUMENTS`` in a process of :meth:`SmallSetup.run`."""
    if before:
        module, _, name = before.rpartition(".")
        getattr(import_module(module), name)()
    if not arguments[1].startswith("adaptive_"):
        _let_stock_recipes_run_on_a_cpu()
    sys.argv = ["tune", *arguments, *os.environ.get("OVERRIDES", "").split()]
    runpy.run_path(str(TUNE), run_name="__main__")


def _let_stock_recipes_run_on_a_cpu() -> None:
    """Replace the calls of torchtune's distributed recipes that fail on a CPU."""
    init_process_group = dist.init_process_group
    dist.init_process_group = lambda backend, **options: init_process_group("gloo", **options)
    training.get_memory_stats = lambda device: {}
    training.log_memory_stats = lambda stats, **options: None
    training.cleanup_before_training = gc.collect


def make_setup(folder: Path, **dimensions: int) -> SmallSetup:
    """Write dataset, tokenizer, base checkpoint and configuration, always with the same bytes.

    Args:
        folder: existing, empty folder.
        dimensions: arguments of the model that replace those of :data:`MODEL`.
    """
    arguments = {**MODEL, **dimensions}
    rows = docstrings()
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    base = folder / "base"
    base.mkdir()
    demo.write_tokenizer(base, [text for row in rows for text in row.values()])
    write_checkpoint(base, arguments)
    config, own = folder / "small.yaml", {"data_dir": str(folder), "model": arguments}
    OmegaConf.save(OmegaConf.merge(OmegaConf.create(_CONFIG), own), config)
    return SmallSetup(folder, config)


def write_checkpoint(folder: Path, dimensions: dict[str, Any], *, output_scale: float = 1) -> None:
    """Write a Qwen2 with random weights in the format of Hugging Face."""
    written = {
        "num_attention_heads": dimensions["num_heads"],
        "num_key_value_heads": dimensions["num_kv_heads"],
        "hidden_size": dimensions["embed_dim"],
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(written))
    model = qwen2(**dimensions)
    fill(model)
    model.output.weight.data *= output_scale
    state = qwen2_tune_to_hf(model.state_dict())
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def checkpointer_of(name: str, folder: Path) -> tuple[str, ...]:
    """Return the overrides of a block that reads the checkpoint of :func:`write_checkpoint`."""
    return block(
        name,
        "torchtune.training.FullModelHFCheckpointer",
        checkpoint_dir=folder,
        checkpoint_files="[model.safetensors]",
        output_dir="${output_dir}",
        model_type="QWEN2",
    )


def docstrings() -> list[dict[str, str]]:
    """Return rows that are short enough to keep labels if they are truncated."""
    rows: list[dict[str, str]] = []
    for name in SOURCES:
        found = demo.docstring_rows(name, inspect.getsource(import_module(name)))
        rows += [
            row for row in found if len(row["signature"]) <= 50 and len(row["docstring"]) >= 16
        ]
    assert len(rows) >= NUM_ROWS, f"{SOURCES} have {len(rows)} such docstrings"
    return rows[:NUM_ROWS]


def fill(model: nn.Module) -> None:
    """Fill a model with random weights, always the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith(".bias"):
                parameter.normal_(0, 0.1, generator=generator)


def records(run: Finished | Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the records of some kinds in the log of a run."""
    folder = run.output_dir if isinstance(run, Finished) else run
    every = read_records(folder / "adaptive_batch" / "run.jsonl")
    return [record for record in every if record["kind"] in kinds]


def figures(run: Finished | Path, name: str) -> list[Any]:
    """Return a figure of each step from the log of a run."""
    return [step[name] for step in records(run, "step")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a saved epoch."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two checkpoints are bit-identical."""
    return (
        bool(one)
        and one.keys() == other.keys()
        and all(torch.equal(one[name], other[name]) for name in one)
    )


def interrupted(finished: Finished, setup: SmallSetup) -> Path:
    """Copy a run of two epochs in the state after a kill in the second epoch, with an empty log."""
    folder = setup.fresh_folder()
    shutil.copytree(finished.output_dir, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "epoch_1")
    (folder / "logs" / LOG).unlink()
    return folder


def resumes(recipe: str, folder: Path) -> tuple[str, ...]:
    """Return the overrides that resume a recipe in a folder; a stock one resumes from epoch 0."""
    keys = (f"output_dir={folder}", "resume_from_checkpoint=True")
    if recipe.startswith("adaptive_"):
        return keys
    paths = sorted((folder / "epoch_0").glob("*.safetensors"))
    files = ",".join(str(path.relative_to(folder)) for path in paths)
    return (*keys, f"checkpointer.checkpoint_files=[{files}]")


def resume_run(setup: SmallSetup, folder: Path, *overrides: str, recipe: str = OURS) -> Finished:
    """Resume a run in its folder."""
    return setup.run_in_process(recipe, *overrides, *resumes(recipe, folder))


@contextmanager
def _as_a_process(arguments: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Context manager: set the arguments, environment and threads of a new process; restore all
    that a recipe changes.
    """
    log = logging.getLogger("adaptive_batch")
    environ, threads = dict(os.environ), torch.get_num_threads()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        with (
            replaced(sys, argv=arguments, path=[*sys.path], excepthook=sys.excepthook),
            # A handler of an earlier test writes to the stderr of that test.
            replaced(log, handlers=[], level=log.level, propagate=log.propagate),
            restored_compiler(),
        ):
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(threads)
        # The allocator keeps the settings of the last run.
        if torch.cuda.is_available():
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


# --- a small vision model, named by dotted paths on the command line

_TILE, _PATCH = 16, 8
_TOKENS_PER_TILE = (_TILE // _PATCH) ** 2


class VisionModel(nn.Module):
    """A small decoder that scales the logits of each row by its pictures. It ignores the arguments
    of the stock configuration of the 11B model.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.decoder = qwen2(**MODEL)
        self.patches = nn.Conv2d(3, 1, _PATCH, stride=_PATCH)

    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        self.decoder.set_num_output_chunks(num_output_chunks)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        encoder_input: dict[str, torch.Tensor],
        encoder_mask: torch.Tensor,
    ) -> list[torch.Tensor]:
        pictures = encoder_input["images"]
        patches = self.patches(pictures.flatten(0, 2).to(self.patches.weight.dtype))
        scales = 1 + patches.view(len(tokens), -1).mean(1)[:, None, None]
        return [logits * scales for logits in self.decoder(tokens)]


def pictures(tokenizer: Any, **_: Any) -> list[dict[str, Any]]:
    """Return rows of text with a random picture of one or two tiles each, in the form of
    torchtune's vision datasets.
    """
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(8):
        length, tiles = 12 + 3 * index, 1 + index % 2
        tokens = torch.randint(0, 500, (length,), generator=generator).tolist()
        rows.append(
            {
                "tokens": tokens,
                "labels": [-100] * 4 + tokens[4:],
                "encoder_input": {
                    "images": [torch.randn(tiles, 3, _TILE, _TILE, generator=generator)],
                    "aspect_ratio": [torch.tensor([1, tiles])],
                },
                "encoder_mask": [torch.ones(length, tiles * _TOKENS_PER_TILE, dtype=torch.bool)],
            }
        )
    return rows


def write_vision_base(folder: Path) -> None:
    """Write a base checkpoint of :class:`VisionModel` in torchtune's format."""
    folder.mkdir(parents=True, exist_ok=True)
    model = VisionModel()
    fill(model)
    torch.save(model.state_dict(), folder / "model.pt")
