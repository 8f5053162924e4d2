"""Scripts of others, plain and with adaptive_batch: the lines that it takes, and whether they train
the same.

    python benchmarks/scripts.py [--scripts DIR] [--only NAME ...] [--output DIR]

Each script runs in processes of its own, as it is and changed by a diff of `patches/`. With its
dropout and nothing adaptive, losses and weights are to be the same bits (on two ranks to 1e-7 and
1e-5). Without dropout, where the changed one runs out of memory for more than a third of a batch's
rows, losses are to agree to 2e-6, and what a trainer of TRL counts as its tokens is to be equal.
With both, the check of the split is to pass. Memory runs out in a hook, at the first module that
sees rows; of two ranks, on the second alone.

Lines are those that a diff adds once ruff has formatted both, blank ones left out. Models are tiny,
data are docstrings of the standard library; nothing is downloaded.

Five scripts, of what pip installs, are in `patches/`. The others are their authors', and not here:
DIR is a folder with a checkout of each repository at this commit, in which the file that is changed
has this sha256.

    https://github.com/karpathy/nanoGPT  3adf61e154c3fe3fca428ad6bc3818b27a3b8291
        train.py
        413bd97b40bb400a2a0d01230e2946f056c263ebac1b7281c2367d964a123085
    https://github.com/yc-cy/Metaphorical-Reasoning  f5671bdb88ed0d5b3e8bd64748238737c191b522
        run_clm_no_trainer.py, a copy of transformers 4.41's
        5218b3fc4cf403ecb1b988b3dff11af57886ec0d64c20556ed1c5d8ccb075558
    https://github.com/Lightning-AI/litgpt  26857050fe3ff627cd714fe92f5838f51a3d5efa
        litgpt/finetune/full.py; `pip install jsonargparse[signatures]` for its command line
        4c191753a63336860f6ef14ca1b574a3d9761102b31dcc31dc7ccc5c678dbb12
    https://github.com/pytorch/examples  77f55b912142e11fcfdf5b530231fb9c52f181e8
        mnist/main.py
        30a3359d1911d2d859dd090ce20be7ed132a33f508dc389f40366010b3e9ecc8
        word_language_model/main.py
        391de12bb7c6e07dbb105d47d017632bf80c01d2e5b25adbf83da9cdcdd5a862
        distributed/ddp-tutorial-series/multigpu_torchrun.py
        6b0a1568337fe206fa74e971cfeec42317f40b82122475327d50f0a0d37e1ba7

What is changed in both versions beside their arguments:

    run_clm_no_trainer     names that are gone: a function that does nothing for transformers'
                           send_example_telemetry, and accelerate's DistributedType.XLA for TPU
    mnist                  torchvision is a stand-in whose images are docstrings
    multigpu_torchrun      the CPU and gloo for CUDA and nccl; mse_loss for cross_entropy, which of
                           the one column that its model has is 0 whatever the weights; its group
                           is not destroyed, in which its model, let go of after it, can wait for
                           ever for a thread of gloo's
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import torch
from patches import observe, prepare
from torch import nn
from torch.nn.functional import cross_entropy

from adaptive_batch import AdaptiveStep, SettingError
from adaptive_batch.training import Part

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ranks import reserved_port

PATCHES = Path(__file__).parent / "patches"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Processes are forked off one that has imported what takes long.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "patches.prepare",
        "patches.observe",
        "adaptive_batch.integrations.lightning",
        "adaptive_batch.integrations.transformers",
        "datasets",
        "trl.trainer.dpo_trainer",
        "trl.trainer.grpo_trainer",
        "trl.trainer.sft_trainer",
    ]
)
# Variants that run at once, each on one thread.
AT_ONCE = 2
# Rounding that may lie between a batch and its parts, and between two ranks and two ranks.
PARTS_LOSS = 2e-6
RANKS_LOSS = 1e-7
RANKS_WEIGHTS = 1e-5


@dataclass(frozen=True)
class Script:
    """A script, and how it runs here.

    Attributes:
        name: name of its diff in `patches/`.
        most_lines: lines that the diff may add.
        command: how it is run: a file or ``-m`` and a module, with arguments.
        file: path of the script in its folder; None for one of `patches/`.
        folder: folder of the checkouts that it lies in and imports from.
        sha256: of the file.
        module: class of ``torch.nn`` that sees rows first.
        dimension: dimension of its input that is the rows.
        num_rows: rows that it sees of a batch.
        dropout: argument that sets the dropout which is no ``nn.Dropout``.
        adaptions: text that is replaced in both versions.
        prepare: function that runs before the script.
        ranks: processes that run it.
    """

    name: str
    most_lines: int
    command: str
    file: str | None = None
    folder: str = ""
    sha256: str = ""
    module: str = "Embedding"
    dimension: int = 0
    num_rows: int = 6
    dropout: str | None = None
    adaptions: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[], None] = prepare.nothing
    ranks: int = 1

    @property
    def path(self) -> str:
        """Path of the script in the folder that it runs in."""
        return self.file or f"{self.name}.py"

    def found_in(self, checkouts: Path | None) -> Path | None:
        """Return the folder of the script; None where the script is missing.

        Raises:
            SystemExit: it is another file than the diff is for.
        """
        if self.file is None:
            return PATCHES
        if checkouts is None or not (checkouts / self.folder / self.file).is_file():
            return None
        path = checkouts / self.folder / self.file
        if hashlib.sha256(path.read_bytes()).hexdigest() != self.sha256:
            raise SystemExit(f"{path}: sha256 is not {self.sha256}; check out the commit above")
        return checkouts / self.folder


SCRIPTS = [
    Script(
        "nanogpt",
        12,
        "train.py --device=cpu --dtype=float32 --compile=False --dataset=docstrings --n_layer=2"
        " --n_head=2 --n_embd=32 --block_size=32 --batch_size=6 --gradient_accumulation_steps=4"
        " --max_iters=5 --eval_interval=2 --eval_iters=2 --warmup_iters=1 --lr_decay_iters=5",
        file="train.py",
        folder="nanoGPT",
        sha256="413bd97b40bb400a2a0d01230e2946f056c263ebac1b7281c2367d964a123085",
        dropout="--dropout={}",
    ),
    Script(
        "run_clm",
        12,
        "run_clm_no_trainer.py --train_file train.txt --validation_file valid.txt"
        " --model_name_or_path model --block_size 32 --per_device_train_batch_size 6"
        " --per_device_eval_batch_size 6 --gradient_accumulation_steps 3 --max_train_steps 4"
        " --learning_rate 1e-2 --output_dir out",
        file="run_clm_no_trainer.py",
        folder="Metaphorical-Reasoning",
        sha256="5218b3fc4cf403ecb1b988b3dff11af57886ec0d64c20556ed1c5d8ccb075558",
        adaptions=(("DistributedType.TPU", "DistributedType.XLA"),),
        prepare=prepare.name_of_transformers_4,
    ),
    Script(
        "litgpt",
        12,
        "-m litgpt finetune_full model --out_dir out --precision 32-true --data JSON"
        " --data.json_path instructions.json --data.num_workers 0 --train.global_batch_size 12"
        " --train.micro_batch_size 6 --train.max_seq_length 48 --train.max_steps 4"
        " --train.lr_warmup_steps 1 --eval.max_new_tokens 4 --eval.max_iters 2"
        " --eval.final_validation false",
        file="litgpt/finetune/full.py",
        folder="litgpt",
        sha256="4c191753a63336860f6ef14ca1b574a3d9761102b31dcc31dc7ccc5c678dbb12",
        prepare=prepare.litgpt_checkpoint,
    ),
    Script(
        "mnist",
        12,
        "main.py --no-accel --epochs 2 --batch-size 24 --log-interval 1",
        file="main.py",
        folder="examples/mnist",
        sha256="30a3359d1911d2d859dd090ce20be7ed132a33f508dc389f40366010b3e9ecc8",
        module="Conv2d",
        num_rows=24,
        prepare=prepare.torchvision_of_docstrings,
    ),
    Script(
        "word_language_model",
        25,
        "main.py --data . --epochs 2 --emsize 16 --nhid 16 --batch_size 6 --bptt 8 --lr 0.01"
        " --use-optimizer",
        file="main.py",
        folder="examples/word_language_model",
        sha256="391de12bb7c6e07dbb105d47d017632bf80c01d2e5b25adbf83da9cdcdd5a862",
        dimension=1,
        dropout="--dropout={}",
    ),
    Script(
        "multigpu_torchrun",
        12,
        "multigpu_torchrun.py 2 1",
        file="multigpu_torchrun.py",
        folder="examples/distributed/ddp-tutorial-series",
        sha256="6b0a1568337fe206fa74e971cfeec42317f40b82122475327d50f0a0d37e1ba7",
        module="Linear",
        num_rows=32,
        adaptions=(
            ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass"),
            ('"nccl"', '"gloo"'),
            (".to(self.gpu_id)", '.to("cpu")'),
            (", device_ids=[self.gpu_id]", ""),
            ("F.cross_entropy", "F.mse_loss"),
            ("    destroy_process_group()\n", ""),
        ),
        ranks=2,
    ),
    Script("sft", 3, "sft.py"),
    Script("dpo", 3, "dpo.py", num_rows=12),
    Script("grpo", 3, "grpo.py", num_rows=12),
    Script("lightning_module", 3, "lightning_module.py"),
    Script("stream", 12, "stream.py"),
]


@dataclass(frozen=True)
class Variant:
    """One of the runs of a script."""

    name: str
    is_changed: bool
    has_dropout: bool
    runs_out: bool = False


PLAIN = Variant("plain", False, True)
CHANGED = Variant("changed", True, True)
WITHOUT_DROPOUT = Variant("plain, no dropout", False, False)
OUT_OF_MEMORY = Variant("changed, out of memory", True, False, True)
WITH_BOTH = Variant("changed, out of memory, with dropout", True, True, True)
VARIANTS = (PLAIN, CHANGED, WITHOUT_DROPOUT, OUT_OF_MEMORY, WITH_BOTH)


def texts(script: Script, folder: Path) -> tuple[str, str]:
    """Return a script as it is, and changed by its diff, both with what both need to run here."""
    original = (folder / script.path).read_text()
    diff = (PATCHES / f"{script.name}.diff").read_text()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, script.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(original)
        apply = ["git", "apply", "--unidiff-zero", "-p0", "-"]
        subprocess.run(apply, cwd=scratch, input=diff, text=True, check=True)
        changed = path.read_text()
    for old, new in script.adaptions:
        assert old in original, f"{script.name}: no {old!r}"
        original = original.replace(old, new)
        changed = changed.replace(old, new)
    return original, changed


def lines_added(original: str, changed: str) -> int:
    """Return how many lines a diff adds to a script, as ruff formats both; blank ones left out."""
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", "100", "-"]
    before, after = (
        subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
        for text in (original, changed)
    )
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0))
    # The first two name the files.
    return sum(line.startswith("+") and line.strip() != "+" for line in lines[2:])


def run(
    script: Script, variant: Variant, *, text: str, sources: Path, data: Path, folder: Path
) -> list[dict[str, Any]]:
    """Run a script; return what was recorded of each rank, and what it printed.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    shutil.copytree(sources, folder, ignore=shutil.ignore_patterns(".git"))
    shutil.copytree(data, folder, dirs_exist_ok=True)
    (folder / script.path).write_text(text)
    command = script.command.split()
    if script.dropout is not None:
        command.append(script.dropout.format(0.1 if variant.has_dropout else 0.0))
    limit = None
    if variant.runs_out:
        # On the last rank alone where there are several.
        last_rank = script.ranks - 1
        max_rows = script.num_rows // 3
        limit = observe.MemoryLimit(script.module, script.dimension, max_rows, last_rank)
    arguments = (script.prepare, limit, variant.has_dropout)
    with reserved_port() as port:
        processes = []
        for rank in range(script.ranks):
            environment = environment_of(rank, script.ranks, port, folder)
            process = CONTEXT.Process(
                target=observe.run, args=(folder, command, environment, *arguments)
            )
            process.start()
            processes.append(process)
        for process in processes:
            process.join()
    outputs = [(folder / f"output.{rank}").read_text() for rank in range(script.ranks)]
    # A record is the last that a process writes. Its exit status is no evidence: multiprocessing
    # reads it in the thread that starts another as well, and who comes second is told 255.
    if not all((folder / f"record.{rank}").exists() for rank in range(script.ranks)):
        printed = "\n".join(outputs)
        raise RuntimeError(f"{script.name}, {variant.name}:\n{printed[-6000:]}")
    return [
        {**torch.load(folder / f"record.{rank}"), "output": output}
        for rank, output in enumerate(outputs)
    ]


def environment_of(rank: int, ranks: int, port: int, folder: Path) -> dict[str, str]:
    """Return what a process finds in its environment, as torchrun would set it for several."""
    environment = {"HF_HOME": str(folder / "cache")}
    if ranks == 1:
        return environment
    return environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def difference(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, float]:
    """Return how far losses and weights are apart, of all ranks."""
    losses = 0.0
    weights = 0.0
    for own, other in zip(ours, plain, strict=True):
        pairs = zip(own["losses"], other["losses"], strict=True)
        losses = max(losses, *(abs(first - second) for first, second in pairs))
        weights = max(weights, float((own["weights"] - other["weights"]).abs().max()))
    return {"loss": losses, "weights": weights}


def tokens(recorded: list[dict[str, Any]]) -> str | None:
    """Return how many tokens a trainer says that it has seen; None where it says nothing."""
    found = re.search(r"^tokens ([\d.]+)$", recorded[0]["output"], re.MULTILINE)
    return found and found.group(1)


def measure(script: Script, sources: Path, data: Path, scratch: Path) -> dict[str, Any]:
    """Run a script in all variants, and return the figures."""
    original, changed = texts(script, sources)

    def recorded_of(variant: Variant) -> list[dict[str, Any]]:
        text = changed if variant.is_changed else original
        folder = scratch / script.name / variant.name
        return run(script, variant, text=text, sources=sources, data=data, folder=folder)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = dict(zip(VARIANTS, pool.map(recorded_of, VARIANTS), strict=True))
    out_of_memory = runs[OUT_OF_MEMORY]
    return {
        "lines": lines_added(original, changed),
        "most_lines": script.most_lines,
        "steps": len(runs[PLAIN][0]["losses"]),
        "first_loss": runs[PLAIN][0]["losses"][0],
        "last_loss": runs[PLAIN][0]["losses"][-1],
        "nothing_adaptive": difference(runs[CHANGED], runs[PLAIN]),
        "out_of_memory": difference(out_of_memory, runs[WITHOUT_DROPOUT]),
        "parts": max(recorded["most_parts"] for recorded in out_of_memory),
        "checks": min(recorded["num_checks"] for recorded in runs[WITH_BOTH]),
        "tokens": [tokens(runs[WITHOUT_DROPOUT]), tokens(out_of_memory)],
    }


def shortfalls(script: Script, measured: dict[str, Any]) -> list[str]:
    """Return what a script falls short of."""
    is_alone = script.ranks == 1
    same = measured["nothing_adaptive"]
    apart = measured["out_of_memory"]["loss"]
    plain_tokens, own_tokens = measured["tokens"]
    wanted = {
        "training": measured["first_loss"] != measured["last_loss"],
        "lines": measured["lines"] <= script.most_lines,
        "losses with nothing adaptive": same["loss"] <= (0.0 if is_alone else RANKS_LOSS),
        "weights with nothing adaptive": same["weights"] <= (0.0 if is_alone else RANKS_WEIGHTS),
        "losses after running out of memory": apart <= PARTS_LOSS,
        "parts": measured["parts"] >= 3,
        "checks of the split": measured["checks"] >= 1,
        "tokens": plain_tokens == own_tokens,
    }
    return [name for name, holds in wanted.items() if not holds]


def refused(
    model: nn.Module,
    mean_loss: Callable[[Any], torch.Tensor],
    batch: Any,
    num_labels: Callable[[Any], Any] | None = None,
) -> str | None:
    """Return the error of a loss whose batch is split in parts of two rows; None without one."""

    def forward_backward(part: Part) -> None:
        (mean_loss(part.batch) * part.share).backward()

    step = AdaptiveStep(model, forward_backward, micro_batch_size=2, num_labels=num_labels)
    try:
        step(batch)
    except SettingError as error:
        return str(error)
    return None


def refusals() -> dict[str, str | None]:
    """Return the errors of three losses of which a split would train something else."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 16)
    labels = torch.randint(0, 16, (8, 6))
    labels[:4, 1:] = -100
    sentences = {"tokens": labels.clamp(min=0), "labels": labels}
    linear = nn.Linear(16, 16)
    embedding = nn.Embedding(16, 16)
    weights = torch.linspace(0.1, 3.0, 16)

    def info_nce(batch: torch.Tensor) -> torch.Tensor:
        vectors = linear(batch)
        return cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))

    def class_weighted(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(linear(batch[0]), batch[1], weight=weights)

    def of_shifted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(embedding(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    def as_if_not_shifted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    return {
        "InfoNCE": refused(linear, info_nce, inputs),
        "class weights": refused(linear, class_weighted, (inputs, torch.arange(8))),
        "shifted labels, counted wrong": refused(
            embedding, of_shifted, sentences, as_if_not_shifted
        ),
    }


def show(name: str, measured: dict[str, Any]) -> None:
    same = measured["nothing_adaptive"]
    apart = measured["out_of_memory"]
    print(
        f"{name:<20} {measured['lines']:>5} {same['loss']:>9.1e} {same['weights']:>9.1e}"
        f" {apart['loss']:>9.1e} {apart['weights']:>9.1e} {measured['parts']:>6}"
        f" {measured['checks']:>7}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scripts", type=Path, metavar="DIR", help="checkouts, see this file")
    parser.add_argument("--only", nargs="+", choices=[script.name for script in SCRIPTS])
    parser.add_argument("--output", type=Path, default=records.RESULTS)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    wanted = [script for script in SCRIPTS if script.name in (arguments.only or script.name)]
    folders = {script: script.found_in(arguments.scripts) for script in wanted}
    print(f"{'':20} {'lines':>5} {'nothing adaptive':>19} {'out of memory':>19}  parts  checks")
    print(f"{'':26} {'loss':>9} {'weights':>9} {'loss':>9} {'weights':>9}")
    figures = {}
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch, "data")
        data.mkdir()
        prepare.write_data(data)
        for script, sources in folders.items():
            if sources is None:
                print(f"{script.name:<20} missing: {script.folder}/{script.file}")
                failures.append(f"{script.name}: missing")
                continue
            try:
                figures[script.name] = measure(script, sources, data, Path(scratch))
            except RuntimeError as error:
                print(error)
                failures.append(f"{script.name}: it did not end well")
                continue
            show(script.name, figures[script.name])
            shortfall = shortfalls(script, figures[script.name])
            failures += [f"{script.name}: {name}" for name in shortfall]
    errors = refusals()
    for name, error in errors.items():
        if error is None:
            failures.append(f"{name}: not refused")
            continue
        print(f"refused: {name}: {error.partition(',')[0]}")
    records.write("scripts", arguments.output, scripts=figures, refused=errors, failures=failures)
    if failures:
        raise SystemExit("\n".join(["fell short:", *failures]))


if __name__ == "__main__":
    main()
