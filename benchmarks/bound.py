"""The bound that each search finds, beside brute force under the same budget and the same rule for
a trial.

    python benchmarks/bound.py [--quick] [--adapters | --tasks] [--threads N] [--output DIR]

Tensor bytes are counted on a CPU. Small models of torchtune's qwen2 builder run every size from one
row up until three in a row do not fit, then the three searches. The peaks that brute force saw are
also replayed to `predict` under budgets for every true maximum that they cover. With `--adapters`,
LoRA, DoRA and QLoRA, two bounds of hundreds of rows among them. With `--tasks`, preference pairs
and distillation as the recipes build them, with their second model.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import records
import torch
import torchao.optim
from torch import nn
from torchtune import modules, training
from torchtune.data import padded_collate_sft
from torchtune.models.qwen2 import lora_qwen2, qwen2
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import DeviceMemory, OptimizerInBackward, device_memory
from adaptive_batch.probe import (
    BinarySearch,
    DryRun,
    Halving,
    Predictive,
    ProbeResult,
    Search,
    Trial,
    run_search,
)
from adaptive_batch.training import RecipeStep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import model_families
from support.runners import build_runner

MIB = 2**20
PLENTY = 2**50
# Rows of the epoch, or twice the true maximum where that is more.
MAXIMUM = 128
SEARCHES = ("predict", "binary", "halve")
CPU = torch.device("cpu")
IGNORED = -100
SEED = 0


def with_adapters(*sizes: int, **options: bool) -> nn.Module:
    """A Qwen2 whose adapters alone are trained."""
    names = (
        "vocab_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "embed_dim",
        "intermediate_dim",
        "max_seq_len",
    )
    attention = ["q_proj", "v_proj", "output_proj"]
    shape = dict(zip(names, sizes, strict=True))
    model = lora_qwen2(
        attention, apply_lora_to_mlp=True, lora_rank=8, lora_alpha=16, **shape, **options
    )
    for module in model.modules():
        if hasattr(module, "initialize_dora_magnitude"):
            module.initialize_dora_magnitude()
    set_trainable_params(model, get_adapter_params(model))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "narrow": partial(qwen2, 1000, 3, 4, 2, 64, 192, 1024, tie_word_embeddings=True),
    "wide": partial(qwen2, 2000, 2, 4, 2, 128, 512, 1024),
    "vocabulary": partial(qwen2, 16000, 2, 4, 2, 64, 256, 1024, tie_word_embeddings=True),
    "deep": partial(qwen2, 500, 8, 4, 4, 64, 256, 1024),
    "LoRA": partial(with_adapters, 1000, 3, 4, 2, 64, 192, 1024, tie_word_embeddings=True),
    "DoRA": partial(with_adapters, 1000, 3, 4, 2, 64, 192, 1024, use_dora=True),
    "QLoRA": partial(with_adapters, 1000, 2, 4, 2, 256, 512, 1024, quantize_base=True),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "AdamW8bit": lambda p: torchao.optim.AdamW8bit(p, lr=1e-4),
}


@dataclass(frozen=True)
class Combination:
    """A way of training; `about` is the true maximum that the budget is chosen for."""

    model: str
    length: int
    optimizer: str
    in_backward: bool = False
    checkpointing: bool = False
    loss: str = "plain"
    dtype: str = "float32"
    accumulates: bool = False
    about: int = 0
    task: str = ""
    layout: str = ""

    @property
    def maximum(self) -> int:
        return max(MAXIMUM, 2 * self.about)

    def __str__(self) -> str:
        marks = [self.task] if self.task else []
        marks += [
            self.model,
            str(self.length),
            self.optimizer + (" in backward" if self.in_backward else ""),
            self.loss,
        ]
        marks += [self.layout] if self.layout else []
        marks += ["checkpointing"] * self.checkpointing + ["bf16"] * (self.dtype == "bfloat16")
        return ", ".join(marks + ["accumulating"] * self.accumulates)


COMBINATIONS = [
    Combination("narrow", 32, "AdamW", about=60),
    Combination("narrow", 32, "AdamW", loss="chunked", about=37),
    Combination("narrow", 64, "AdamW", checkpointing=True, about=60),
    Combination("narrow", 64, "AdamW fused", checkpointing=True, loss="chunked", about=23),
    Combination("narrow", 128, "AdamW fused", dtype="bfloat16", about=7),
    Combination("wide", 32, "AdamW fused", about=2),
    Combination("wide", 64, "SGD", about=1),
    Combination("wide", 64, "SGD momentum", checkpointing=True, accumulates=True, about=48),
    Combination("wide", 32, "AdamW8bit", about=12),
    Combination(
        "wide", 64, "AdamW8bit", checkpointing=True, loss="chunked", dtype="bfloat16", about=30
    ),
    Combination("wide", 32, "AdamW", in_backward=True, about=9),
    Combination("deep", 32, "AdamW fused", in_backward=True, checkpointing=True, about=31),
    Combination(
        "deep", 64, "AdamW8bit", in_backward=True, checkpointing=True, loss="chunked", about=16
    ),
    Combination("deep", 32, "SGD", in_backward=True, loss="chunked", about=3),
    Combination("deep", 32, "AdamW", accumulates=True, about=19),
    Combination(
        "vocabulary", 32, "AdamW", checkpointing=True, loss="chunked", dtype="bfloat16", about=60
    ),
    Combination("vocabulary", 16, "AdamW fused", in_backward=True, checkpointing=True, about=40),
    Combination("vocabulary", 64, "SGD momentum", loss="chunked", about=5),
]
WITH_ADAPTERS = [
    Combination("LoRA", 32, "AdamW", about=60),
    Combination("LoRA", 64, "AdamW fused", checkpointing=True, loss="chunked", about=23),
    Combination("LoRA", 64, "AdamW", loss="chunked", accumulates=True, about=37),
    Combination("LoRA", 128, "AdamW8bit", dtype="bfloat16", about=7),
    Combination("LoRA", 32, "AdamW", in_backward=True, checkpointing=True, about=9),
    Combination("LoRA", 32, "AdamW", about=300),
    Combination("DoRA", 32, "SGD momentum", about=19),
    Combination(
        "DoRA", 64, "AdamW fused", checkpointing=True, loss="chunked", accumulates=True, about=48
    ),
    Combination("DoRA", 128, "AdamW", dtype="bfloat16", about=2),
    Combination("DoRA", 32, "AdamW fused", checkpointing=True, about=220),
    Combination("QLoRA", 32, "AdamW", dtype="bfloat16", about=31),
    Combination(
        "QLoRA", 64, "AdamW8bit", checkpointing=True, loss="chunked", dtype="bfloat16", about=12
    ),
    Combination("QLoRA", 128, "SGD", accumulates=True, dtype="bfloat16", about=1),
]
WITH_TASKS = [
    Combination("LoRA", 64, "AdamW", about=23, task="DPO"),
    Combination("LoRA", 64, "AdamW fused", checkpointing=True, about=31, task="DPO"),
    Combination("LoRA", 128, "AdamW", accumulates=True, about=9, task="DPO", layout="grouped"),
    Combination("LoRA", 64, "AdamW", about=25, task="DPO", layout="packed"),
    Combination("full", 64, "AdamW", about=12, task="DPO"),
    Combination("full", 64, "SGD", in_backward=True, about=7, task="DPO"),
    Combination("full", 32, "AdamW", dtype="bfloat16", about=19, task="DPO", layout="grouped"),
    Combination("full", 32, "AdamW fused", about=23, task="DPO", layout="packed"),
    Combination("LoRA", 64, "AdamW", loss="chunked", about=37, task="distillation"),
    Combination("LoRA", 64, "AdamW fused", about=16, task="distillation", layout="grouped"),
    Combination(
        "LoRA", 32, "AdamW", loss="chunked", about=20, task="distillation", layout="packed"
    ),
    Combination("full", 64, "AdamW", checkpointing=True, about=30, task="distillation"),
    Combination("full", 64, "AdamW", accumulates=True, about=5, task="distillation"),
    Combination("full", 32, "SGD momentum", about=11, task="distillation", layout="packed"),
]


class Bench:
    """A model in training, and rehearsals of it; subclasses build it."""

    combination: Combination
    memory: DeviceMemory
    model: nn.Module
    _runner: RecipeStep
    _optimizer: torch.optim.Optimizer | OptimizerInBackward
    _held: Sequence[nn.Module] = ()
    _row: Any

    def _step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        assert isinstance(self._optimizer, torch.optim.Optimizer)
        self._optimizer.step()

    def rehearsal(self, budget_bytes: int) -> DryRun:
        return DryRun(
            model=self.model,
            optimizer=self._optimizer,
            forward_backward=lambda rows: self._runner.try_rows([self._row] * rows),
            step=self._step,
            accumulates=self.combination.accumulates,
            memory=self.memory,
            budget_bytes=budget_bytes,
            row=f"one row of {self.combination.length} tokens",
            held=self._held,
        )

    def search(self, name: str, *, budget_bytes: int, maximum: int) -> tuple[ProbeResult, float]:
        """The whole probe: snapshot, rehearsal of a step, trials, restoring."""
        start = time.perf_counter()
        with self.rehearsal(budget_bytes) as rehearsal:
            search: Search
            if name == "predict":
                search = Predictive(
                    budget_bytes=budget_bytes,
                    maximum=maximum,
                    resident_bytes=rehearsal.resident_bytes,
                )
            else:
                search = (
                    BinarySearch(maximum=maximum) if name == "binary" else Halving(start=maximum)
                )
            result = run_search(rehearsal, search=search, resident_bytes=rehearsal.resident_bytes)
        return result, time.perf_counter() - start


class BenchOfModel(Bench):
    """A small model of this file, and its loss of next tokens."""

    def __init__(self, combination: Combination) -> None:
        torch.manual_seed(SEED)
        self.combination = combination
        self.memory = device_memory(CPU)
        with training.set_default_dtype(getattr(torch, combination.dtype)):
            self.model = MODELS[combination.model]()
        if combination.checkpointing:
            layer = {modules.TransformerSelfAttentionLayer}
            training.set_activation_checkpointing(self.model, auto_wrap_policy=layer)
        self._chunked = (
            CEWithChunkedOutputLoss(ignore_index=IGNORED) if combination.loss == "chunked" else None
        )
        if self._chunked:
            self.model.set_num_output_chunks(self._chunked.num_output_chunks)
        make = OPTIMIZERS[combination.optimizer]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if combination.in_backward:
            self._optimizer = OptimizerInBackward({p: make([p]) for p in trained})
        else:
            self._optimizer = make(trained)
        self._runner = build_runner(
            self.model,
            MicroBatchLimit(1),
            collate=partial(padded_collate_sft, padding_idx=0, ignore_idx=IGNORED),
            mean_loss=self._mean_loss,
            scale_gradients=not combination.in_backward,
        )
        tokens = torch.randint(1, 500, (combination.length,)).tolist()
        self._row = {"tokens": tokens, "labels": [IGNORED, *tokens[1:]]}

    def _mean_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        logits = self.model(**batch)
        labels = torch.hstack((labels[:, 1:], labels.new_full((len(labels), 1), IGNORED)))
        if self._chunked:
            return self._chunked(logits, labels)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )


class BenchOfTask(Bench):
    """A small model and what it is compared with, built and run as the recipes do."""

    def __init__(self, combination: Combination) -> None:
        self.combination = combination
        family = model_families.Combination(
            "qwen2",
            combination.length,
            combination.optimizer,
            combination.loss,
            "checkpointing" if combination.checkpointing else "",
            "bf16" if combination.dtype == "bfloat16" else "fp32",
            combination.in_backward,
            layout=combination.layout or None,
            task=combination.task,
            adapters=combination.model == "LoRA",
        )
        run = model_families.RealRun(family)
        step = run.trainer.tried()
        self.memory = run.job.memory
        self.model = run.trainer.model
        self._runner = run.trainer.engine
        self._optimizer = step.optimizer
        self._held = step.held
        self._row = run.data.dataset[0]


def found(result: ProbeResult, seconds: float) -> dict[str, Any]:
    """What a search did, for the record."""
    return {
        "found": result.max_batch_size,
        "trials": len(result.trials),
        "ooms": result.num_out_of_memory,
        "seconds": round(seconds, 3),
        "tried": [(t.batch_size, t.fits, t.peak_bytes) for t in result.trials],
    }


def choose_budget(bench: Bench) -> int:
    """Half-way between the peaks of the wanted true maximum and the next row, or what the
    optimizer's step needs.
    """
    with bench.rehearsal(PLENTY) as trial:
        peaks = [trial(bench.combination.about + more).peak_bytes or 0 for more in (0, 1)]
        return max(sum(peaks) // 2, trial.optimizer_peak_bytes or 0)


def brute_force(bench: Bench, budget_bytes: int) -> tuple[int, dict[int, int], float]:
    """Every size from one row up until three in a row do not fit: the largest that fits, the peaks,
    the seconds.
    """
    peaks: dict[int, int] = {}
    start = time.perf_counter()
    with bench.rehearsal(budget_bytes) as trial:
        rows = failed = 0
        while failed < 3 and rows < bench.combination.maximum:
            rows += 1
            tried = trial(rows)
            failed = 0 if tried.fits else failed + 1
            if tried.fits:
                peaks[rows] = tried.peak_bytes or 0
    return max(peaks), peaks, time.perf_counter() - start


def replay(peaks: dict[int, int], resident_bytes: int) -> dict[str, Any]:
    """`predict` on the peaks that were seen, under budgets for every true maximum that
    they cover.
    """
    cases, misses = 0, []
    trials: list[int] = []
    for true_maximum in range(1, max(peaks)):
        here, above = peaks[true_maximum], peaks[true_maximum + 1]
        if true_maximum > 1 and max(peaks[rows] for rows in range(1, true_maximum + 1)) > here:
            continue  # a dip: the largest that fits under this budget is not this one
        for part in (0.0, 0.25, 0.5, 0.75, 0.999):
            budget = int(here + part * (above - here))
            if above <= budget:
                continue
            cases += 1
            search = Predictive(
                budget_bytes=budget, maximum=max(peaks), resident_bytes=resident_bytes
            )
            tried: list[tuple[int, bool]] = []
            while (rows := search.candidate) is not None:
                fits = peaks[rows] <= budget
                tried.append((rows, fits))
                search.record(Trial(rows, fits, peaks[rows] if fits else None))
            trials.append(len(tried))
            if search.best != true_maximum or not all(fits for _, fits in tried):
                misses.append(
                    {
                        "true": true_maximum,
                        "budget_bytes": budget,
                        "found": search.best,
                        "tried": tried,
                    }
                )
    return {
        "cases": cases,
        "equal": cases - sum(miss["found"] != miss["true"] for miss in misses),
        "ooms": sum(not fits for miss in misses for _, fits in miss["tried"]),
        "trials_mean": sum(trials) / max(1, len(trials)),
        "trials_worst": max(trials, default=0),
        "misses": misses,
    }


def measure(combinations: Sequence[Combination]) -> list[dict[str, Any]]:
    rows = []
    columns = " ".join(f"{name}:>12" for name in SEARCHES)
    print("each search: found, trials and OOMs")
    table = records.Table(f"name:<78 MiB:>6.1f true:>4 {columns} brute_force_seconds:>19.1f")
    for combination in combinations:
        bench = BenchOfTask(combination) if combination.task else BenchOfModel(combination)
        budget = choose_budget(bench)
        true_maximum, peaks, seconds = brute_force(bench, budget)
        searches = {
            name: found(*bench.search(name, budget_bytes=budget, maximum=combination.maximum))
            for name in SEARCHES
        }
        with bench.rehearsal(budget) as trial:
            resident = trial.resident_bytes
        rows.append(
            {
                **asdict(combination),
                "budget_bytes": budget,
                "resident_bytes": resident,
                "true": true_maximum,
                "peaks": peaks,
                "brute_force_seconds": round(seconds, 3),
                "searches": searches,
                "replayed": replay(peaks, resident),
            }
        )
        cells = {
            name: f"{search['found']} {search['trials']:>3} {search['ooms']:>2}"
            for name, search in searches.items()
        }
        table.print(rows[-1], name=str(combination), MiB=budget / MIB, **cells)
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals, printed."""
    totals: dict[str, Any] = {}
    for name in SEARCHES:
        done = [row["searches"][name] | {"true": row["true"]} for row in rows]
        totals[name] = {
            "equal": sum(d["found"] == d["true"] for d in done),
            "of": len(done),
            "ooms": sum(d["ooms"] for d in done),
            "trials": sum(d["trials"] for d in done),
            "seconds": round(sum(d["seconds"] for d in done), 1),
        }
        t = totals[name]
        print(
            f"{name:<8} equal to brute force in {t['equal']} of {t['of']}, {t['ooms']} OOMs,"
            f" {t['trials']} trials, {t['seconds']} s"
        )
    replayed = [row["replayed"] for row in rows]
    cases, equal, ooms = (sum(r[key] for r in replayed) for key in ("cases", "equal", "ooms"))
    worst = max(r["trials_worst"] for r in replayed)
    totals["replayed"] = {"cases": cases, "equal": equal, "ooms": ooms, "trials_worst": worst}
    print(
        f"predict, from peaks alone, as where the device does not count, replayed under {cases}"
        f" other budgets: equal in {equal}, {ooms} OOMs, at most {worst} trials"
    )
    return totals


def main() -> None:
    parser = records.parser(__doc__, quick="fewer combinations, with smaller maxima")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--adapters", action="store_true", help="on a frozen base")
    kinds.add_argument("--tasks", action="store_true", help="preference pairs and distillation")
    parser.add_argument("--threads", type=int, help="threads of PyTorch on the CPU")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    # Trials collect garbage; imported modules need not be looked through each time.
    gc.freeze()
    combinations = WITH_ADAPTERS if arguments.adapters else COMBINATIONS
    if arguments.tasks:
        combinations = WITH_TASKS
    if arguments.quick:
        combinations = [replace(each, about=min(each.about, 8)) for each in combinations[::3]]
    rows = measure(combinations)
    print()
    name = "bound" + "_adapters" * arguments.adapters + "_tasks" * arguments.tasks
    records.write(name, arguments.output, totals=summarize(rows), bound=rows)


if __name__ == "__main__":
    main()
