"""What a plan on fake tensors says, beside what real trials count, on one device and on several
ranks; and what planning takes.

    python benchmarks/estimate.py [--only {peaks,ranks,time,compiled,configs}] [--quick]
    [--output DIR]
    python benchmarks/estimate.py --device cuda [--quick] [--memory 24GiB] [--output DIR]

On a CPU, tensor bytes are counted. `peaks`: small models of torchtune's builders; the peak at each
of many sizes, and the bound under budgets between them, beside the recipes' own trials and their
search. `ranks`: the same with FSDP2 on gloo, where each rank is a process. `time`: shipped configs
planned in a fresh process each; one that is finished is kept in `.measure/`, and a part that was
stopped resumes with the next one. `compiled`: the same for one length, two of them, eager and
compiled. `configs`: which of the shipped ones and of torchtune's own can be planned. On CUDA:
random weights of real size; the peak of what the allocator gave out, and the bound beside one that
is bisected and checked upward.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import records
import torch
import torchtune
from omegaconf import OmegaConf
from records import Finished

from adaptive_batch.config_files import config_path, shipped_configs
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.estimate import LengthEstimate, parse_devices
from adaptive_batch.memory import GIB, device_memory, parse_size
from adaptive_batch.probe import Trial
from adaptive_batch.torchtune import estimate_devices, set_up_process

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.model_families import Combination, RealRun, found, peaks_on_ranks, searched, tried
from support.ranks import run_on_ranks

TESTS = Path(__file__).parents[1] / "tests"
STOCK = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
SIZES = (*range(1, 25), 32, 48, 64)
QUICK_SIZES = (1, 2, 3, 4, 7, 8, 16)
PROBED = (1, 2, 3, 7, 16)  # true all_reduce_max that the recipes' own search is asked for
REPEATS = (
    4  # on ranks: a thread of gloo's may hold a buffer a little longer than the collective takes
)

PEAKS = (
    Combination("llama2", 32, "AdamW"),
    Combination("llama3", 32),
    Combination("llama3", 64, "AdamW foreach", "chunked", "checkpointing"),
    Combination("llama3_1", 32, "AdamW", "chunked", clips=True),
    Combination("llama3_1", 64, "AdamW8bit", checkpointing="checkpointing"),
    Combination("llama3_2", 32, "AdamW foreach"),
    Combination("llama3_2", 48, "AdamW fused", "chunked", "every 2nd layer", "bf16"),
    Combination("llama3_2", 64, packed=True),
    Combination("qwen2", 32, "SGD", accumulation=4),
    Combination("qwen2", 64, "AdamW", "chunked", "checkpointing", in_backward=True),
    Combination("qwen2", 64, "AdamW8bit", "chunked", dtype="bf16"),
    Combination("qwen2", 40, "AdamW4bit", "plain", "every 2nd layer"),
    Combination("qwen2", 32, "AdamWFp8", "chunked"),
    Combination("qwen2, tied", 32, "AdamW", dtype="bf16", clips=True),
    Combination("qwen2, tied", 64, "AdamW fused", "chunked", "checkpointing", accumulation=2),
    Combination("qwen2, tied", 48, "SGD momentum", in_backward=True),
    Combination("qwen2, deep", 32, "AdamW8bit", "chunked", "checkpointing", in_backward=True),
    Combination(
        "qwen2, deep", 64, "AdamW foreach", "plain", "every 2nd layer", accumulation=2, clips=True
    ),
    Combination("qwen2, deep", 64, "SGD", "chunked", "checkpointing", "bf16", packed=True),
    Combination("gemma", 32, "AdamW fused", "plain"),
    Combination("gemma2", 32, "AdamW fused", "plain"),
    Combination("gemma2", 48, "AdamW", "plain", "checkpointing", "bf16", accumulation=2),
    Combination("gemma2", 64, "AdamW4bit", "plain", "every 2nd layer"),
    Combination("mistral", 32, "AdamW fused", "chunked", in_backward=True),
    Combination("mistral", 64, "AdamWFp8", "plain", "checkpointing", "bf16"),
    Combination("mistral", 64, "SGD momentum", "chunked", packed=True, accumulation=2),
    Combination("phi3", 32, "AdamW", "plain"),
    Combination("phi3", 64, "AdamW foreach", "chunked", "checkpointing", "bf16", clips=True),
    Combination("phi3", 48, "AdamW8bit", "chunked", "every 2nd layer", accumulation=2),
)
RANKS = (
    Combination("qwen2", 32, ranks=2, reshards=False),
    Combination("qwen2", 32, ranks=2),
    Combination("llama3_2", 64, "AdamW", "chunked", "checkpointing", ranks=2, reshards=False),
    Combination("llama3_2", 64, "AdamW", "chunked", "checkpointing", ranks=2),
    Combination("qwen2, deep", 48, accumulation=2, ranks=2, reshards=False),
    Combination("qwen2, deep", 48, accumulation=2, ranks=2, reshards=False, syncs=False),
    Combination("qwen2, deep", 48, accumulation=2, ranks=2),
    Combination("qwen2, deep", 48, accumulation=2, ranks=2, syncs=False),
    Combination("llama3", 32, "AdamW", apart=("tok_embeddings",), ranks=2, reshards=False),
    Combination("llama3", 64, "AdamW", "chunked", apart=("tok_embeddings", "output"), ranks=2),
    Combination("qwen2", 32, "AdamW foreach", dtype="bf16", clips=True, ranks=2),
    Combination("qwen2, tied", 32, "AdamW", in_backward=True, ranks=2),
    Combination("qwen2, tied", 32, "AdamW", in_backward=True, ranks=2, reshards=False),
    Combination("gemma2", 32, "AdamW", "plain", "every 2nd layer", ranks=2),
    Combination("qwen2, deep", 48, accumulation=2, ranks=4, reshards=False),
    Combination("qwen2, deep", 48, accumulation=2, ranks=4, reshards=False, syncs=False),
    Combination("qwen2, deep", 48, accumulation=2, ranks=4),
    Combination("qwen2, deep", 48, accumulation=2, ranks=4, syncs=False),
    Combination("llama3_2", 64, "AdamW", "chunked", "checkpointing", ranks=4),
    Combination(
        "llama3",
        64,
        "AdamW",
        "chunked",
        apart=("tok_embeddings", "output"),
        ranks=4,
        reshards=False,
    ),
)
RANK_SIZES = (1, 2, 3, 7, 16)


def on_cuda(quick: bool) -> list[Combination]:
    """What is compared on CUDA."""
    return [
        Combination(model, length, optimizer, "chunked", checkpointing, "bf16", device="cuda")
        for model in (
            ("qwen2_5_0_5b",) if quick else ("qwen2_5_0_5b", "llama3_2_1b", "llama3_2_3b")
        )
        for length in ((512,) if quick else (512, 2048))
        for checkpointing in ("", "checkpointing")
        for optimizer in (("AdamW fused",) if quick else ("AdamW fused", "AdamW8bit"))
    ]


def said(plan: LengthEstimate, rows: int) -> int:
    """Peak of forward and backward of so many rows, as the plan has it."""
    return plan.one_row_bytes if rows == 1 else plan.curve.peak_bytes(rows)


def relative(counted: int | None, estimate: int | None) -> float:
    """How much the estimate is off, as a part of what was counted; above 0 where it is too high."""
    if counted is None or estimate is None:
        assert counted is estimate, f"{counted} is counted, {estimate} is planned"
        return 0.0
    return (estimate - counted) / counted


def bound_of(plan: LengthEstimate, budget_bytes: int, maximum: int) -> int:
    """The plan's bound; `maximum` where any number of rows fits."""
    rows = plan.max_rows(budget_bytes)
    return maximum if rows is None else min(rows, maximum)


# --- one device


def measure_peaks(
    combinations: Sequence[Combination], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Each combination's estimates beside what its trials count, and its bounds beside those of
    brute force and of the probe.
    """
    rows = []
    print(
        f"{'combination':<66} {'sizes':>5} {'worst error':>11} {'resident':>9} {'optimizer':>9}"
        f" {'budgets':>8} {'equal':>6} {'edges':>6} {'equal':>6} {'probes':>6} {'equal':>6}"
        f" {'plan s':>7} {'trials s':>8}"
    )
    for combination in combinations:
        start = time.perf_counter()
        plan = combination.planned()
        planned = time.perf_counter() - start
        start = time.perf_counter()
        real = tried(RealRun(combination), sizes)
        peaks = {trial.batch_size: trial.peak_bytes or 0 for trial in real.trials}
        of_step = real.trials[0].optimizer_peak_bytes
        errors = {size: relative(peak, said(plan, size)) for size, peak in peaks.items()}
        budgets = [
            {
                "budget_bytes": budget,
                "true": true,
                "planned": bound_of(plan, budget, max(peaks)),
                "is_edge": is_edge,
            }
            for budget, true, is_edge in budgets_between(peaks, of_step or 0)
        ]
        edges = [entry for entry in budgets if entry["is_edge"]]
        halfway = [entry for entry in budgets if not entry["is_edge"]]
        asked = {
            entry["true"]: entry["budget_bytes"] for entry in halfway if entry["true"] in PROBED
        }
        probes = [probed(combination, budget, plan) for budget in asked.values()]
        seconds = time.perf_counter() - start
        row = {
            **asdict(combination),
            "peaks": peaks,
            "estimates": {size: said(plan, size) for size in peaks},
            "worst": max(errors.values(), key=abs),
            "worst_resident": relative(real.resident_bytes, plan.resident.total),
            "worst_optimizer": relative(of_step, plan.optimizer_peak_bytes),
            "budgets": len(halfway),
            "budgets_equal": num_equal(halfway),
            "edges": len(edges),
            "edges_equal": num_equal(edges),
            "unequal": [entry for entry in budgets if entry["true"] != entry["planned"]],
            "probes": probes,
            "probes_equal": num_equal(probes),
            "plan_seconds": round(planned, 2),
        }
        rows.append(row)
        print(
            f"{combination!s:<66} {len(peaks):>5} {row['worst']:>11.4%}"
            f" {row['worst_resident']:>9.2%} {row['worst_optimizer']:>9.2%} {row['budgets']:>8}"
            f" {row['budgets_equal']:>6} {row['edges']:>6} {row['edges_equal']:>6} {len(probes):>6}"
            f" {row['probes_equal']:>6} {planned:>7.1f} {seconds:>8.1f}",
            flush=True,
        )
    total = {
        key: sum(row[key] for row in rows)
        for key in ("budgets", "budgets_equal", "edges", "edges_equal", "probes_equal")
    }
    print(
        f"\n{len(rows)} combinations: worst error of a peak"
        f" {max(abs(r['worst']) for r in rows):.4%}; bounds equal to brute force in"
        f" {total['budgets_equal']} of {total['budgets']} half-way between two peaks, in"
        f" {total['edges_equal']} of {total['edges']} at a peak to the byte; equal to the probe in"
        f" {total['probes_equal']} of {sum(len(r['probes']) for r in rows)}"
    )
    return rows


def budgets_between(
    peaks: dict[int, int], optimizer_peak_bytes: int
) -> list[tuple[int, int, bool]]:
    """Budgets, each with the most rows that fit by brute force, and whether it is at a peak to the
    byte rather than half-way.
    """
    every = range(1, next(size for size in range(1, max(peaks) + 2) if size not in peaks))
    budgets = []
    for rows in every[:-1]:
        here, above = peaks[rows], peaks[rows + 1]
        for budget, is_edge in ((here - 1, True), (here, True), ((here + above) // 2, False)):
            fit = [size for size in every if peaks[size] <= budget]
            true = (
                max(fit, default=0) if optimizer_peak_bytes <= budget and peaks[1] <= budget else 0
            )
            budgets.append((budget, true, is_edge))
    return budgets


def num_equal(entries: Sequence[dict[str, Any]]) -> int:
    """In how many of them the plan has the true bound."""
    return sum(entry["true"] == entry["planned"] for entry in entries)


def probed(combination: Combination, budget_bytes: int, plan: LengthEstimate) -> dict[str, Any]:
    """What the recipes' own search finds within a budget, beside the plan."""
    maximum = 64
    result = found(RealRun(combination, device_memory=budget_bytes, maximum=maximum))
    assert result.budget_bytes == budget_bytes, (
        f"{result.budget_bytes} may be used, not {budget_bytes}"
    )
    return {
        "budget_bytes": budget_bytes,
        "true": result.max_batch_size,
        "planned": bound_of(plan, budget_bytes, maximum),
        "trials": len(result.trials),
    }


# --- ranks


def measure_ranks(combinations: Sequence[Combination]) -> list[dict[str, Any]]:
    """Each combination's estimates beside what real ranks count."""
    rows = []
    print(
        f"{'combination':<92} {'worst error':>11} {'resident':>9} {'optimizer':>9}   counted and"
        f" planned MiB at {RANK_SIZES[-1]} rows"
    )
    for ranks in sorted({combination.ranks for combination in combinations}):
        chosen = [combination for combination in combinations if combination.ranks == ranks]
        counted = run_on_ranks(
            partial(peaks_on_ranks, repeats=REPEATS), ranks, chosen, RANK_SIZES, timeout=1800.0
        )[0]
        for combination, (peaks, result) in zip(chosen, counted, strict=True):
            plan = combination.planned()
            errors = [relative(peak, said(plan, size)) for size, peak in peaks.items()]
            row = {
                **asdict(combination),
                "peaks": peaks,
                "estimates": {size: said(plan, size) for size in peaks},
                "worst": max(errors, key=abs),
                "worst_resident": relative(result.resident_bytes, plan.resident.total),
                "worst_optimizer": relative(
                    result.trials[0].optimizer_peak_bytes, plan.optimizer_peak_bytes
                ),
            }
            rows.append(row)
            largest = RANK_SIZES[-1]
            print(
                f"{combination!s:<92} {row['worst']:>11.3%} {row['worst_resident']:>9.3%}"
                f" {row['worst_optimizer']:>9.3%}   {peaks[largest] / 2**20:.2f}"
                f" {said(plan, largest) / 2**20:.2f}",
                flush=True,
            )
    for reshards in (False, True):
        worst = max((abs(row["worst"]) for row in rows if row["reshards"] == reshards), default=0.0)
        print(f"fsdp_reshard_after_forward={reshards}: worst error of a peak {worst:.3%}")
    return rows


# --- time


@dataclass(frozen=True)
class Planning:
    """A config that is planned in a process of its own."""

    config: str
    overrides: tuple[str, ...] = ()
    target_seconds: float = 60.0
    changes: tuple[bool, ...] = (False, True)


# 20,000 rows of up to 2,048 tokens, of which a tokenizer's padding is all that is asked for.
REAL_LENGTHS = (
    "estimate.sequence_lengths=[longest]",
    "~tokenizer.path",
    "~tokenizer.max_seq_len",
    "tokenizer._component_=types.SimpleNamespace",
    "tokenizer.pad_id=0",
    "dataset._component_=support.cuda_stack.squeezing.skewed_rows",
    "dataset.number=20000",
    "dataset.longest=2048",
)
PLAIN_STEP = (
    "estimate.devices=[B200]",
    "optimizer._component_=torch.optim.AdamW",
    "optimizer.fused=True",
    "enable_activation_checkpointing=False",
)
TIMED = (
    Planning("llama3_2_1B", target_seconds=15.0),
    Planning("llama3_1_8B", target_seconds=30.0),
    Planning("llama3_1_8B", REAL_LENGTHS, changes=(False,)),
    Planning("llama3_1_8B", (*REAL_LENGTHS, *PLAIN_STEP), changes=(False,)),
    Planning("llama3_1_70B_8gpu", ("estimate.world_size=8",), changes=(False,)),
    Planning("llama3_1_70B_8gpu", ("estimate.world_size=1",), changes=(False,)),
)
ONE_LENGTH = (
    "estimate.devices=[B200]",
    "estimate.sequence_lengths=[2048]",
)
TIMED_COMPILED = tuple(
    Planning(config, (*ONE_LENGTH, f"compile={compiled}"), changes=(False,))
    for config in ("llama3_2_1B", "llama3_1_8B")
    for compiled in (False, True)
)


def measure_time(
    plannings: Sequence[Planning], finished: Finished, *, repeats: int
) -> list[dict[str, Any]]:
    """Seconds and most memory of each planning, first without single changes, then with them."""

    def timed(planning: Planning, changes: bool) -> dict[str, Any]:
        runs = [run_planning(planning, changes=changes) for _ in range(repeats)]
        return {
            "runs": runs,
            **{key: median(run[key] for run in runs) for key in ("plan", "command", "user")},
            "peak_bytes": max(run["peak_bytes"] for run in runs),
            "target_seconds": None if changes else planning.target_seconds,
        }

    rows = []
    print(f"load of this machine: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    print(
        f"{'config':<44} {'changes':>7} {'plan s':>7} {'command s':>9} {'user s':>7}"
        f" {'peak GiB':>9} {'target s':>8}"
    )
    for changes, planning in product((False, True), plannings):
        if changes not in planning.changes:
            continue
        key = {"config": planning.config, "overrides": planning.overrides, "changes": changes}
        key["repeats"] = repeats
        row = finished.entry(key, partial(timed, planning, changes))
        rows.append(row)
        outcome = row.get("failed")
        if outcome is None:
            target = "-" if changes else f"{planning.target_seconds:.0f}"
            outcome = (
                f"{row['plan']:>7.1f} {row['command']:>9.1f} {row['user']:>7.1f}"
                f" {row['peak_bytes'] / GIB:>9.2f} {target:>8}"
            )
        print(
            f"{' '.join((planning.config, *planning.overrides)):<44}"
            f" {'yes' if changes else 'no':>7} {outcome}",
            flush=True,
        )
    return rows


def run_planning(planning: Planning, *, changes: bool) -> dict[str, Any]:
    """One command: what its plan says it took, what the whole process took, and what it held."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(Path(sys.executable).parent / "tune"),
            "run",
            "adaptive_estimate",
            "--config",
            planning.config,
        ]
        command += [
            "estimate.devices=[80GiB]",
            "estimate.sequence_lengths=[512,1024,2048]",
            f"output_dir={folder}",
        ]
        command += [f"estimate.changes={changes}", *planning.overrides]
        load, start = os.getloadavg()[0], time.perf_counter()
        with (Path(folder) / "said.txt").open("wb") as said_by_it:
            process = subprocess.Popen(
                command,
                stdout=said_by_it,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(TESTS)},
            )
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if process.returncode:
            raise RuntimeError(
                f"{' '.join(command)}:\n{(Path(folder) / 'said.txt').read_text()[-4000:]}"
            )
        planned = json.loads((Path(folder) / "adaptive_batch" / "estimate.json").read_text())
    return {
        "plan": planned["seconds"],
        "command": round(seconds, 2),
        "user": round(used.ru_utime, 2),
        "system": round(used.ru_stime, 2),
        "peak_bytes": used.ru_maxrss * 1024,
        "load_before": round(load, 2),
    }


# --- configurations


def measure_configs(names: Sequence[str]) -> list[dict[str, Any]]:
    """Whether shipped configs and torchtune's own full fine-tunes can be planned, and what fits of
    512 tokens in 80 GiB.
    """
    rows = []
    print(f"{'config':<48} {'ranks':>5} {'rows':>5} {'seconds':>8}  refused")
    for name in names:
        path = config_path(name) or STOCK / name
        cfg, several = OmegaConf.load(path), "--nproc_per_node" in path.read_text()
        cfg = OmegaConf.merge(
            cfg, {"estimate": {"devices": ["80GiB"], "sequence_lengths": [512], "changes": False}}
        )
        cfg.estimate.world_size = 8 if several else 1
        row: dict[str, Any] = {
            "config": name,
            "ranks": cfg.estimate.world_size,
            "rows": None,
            "refused": "",
        }
        start = time.perf_counter()
        try:
            plan = estimate_devices(cfg, show=lambda text: None)
            row["rows"] = plan.bound(plan.lengths[0], plan.devices[0])
            row["checked"] = asdict(plan.lengths[0].check)
        except Exception as error:  # what is not made for these recipes fails in its own ways
            row["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        row["seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        fits = "-" if row["rows"] is None else row["rows"]
        print(
            f"{name:<48} {row['ranks']:>5} {fits:>5} {row['seconds']:>8.1f}  {row['refused']}",
            flush=True,
        )
    return rows


def all_configs() -> list[str]:
    """Names of the shipped ones, and paths of torchtune's."""
    stock = (str(path.relative_to(STOCK)) for path in sorted(STOCK.glob("*/*full*.yaml")))
    return [*(name for name, _ in shipped_configs()), *stock]


# --- CUDA


class Doubling:
    """A search by brute force: doubled until it does not fit, bisected, and checked upward three
    sizes beyond.

    Args:
        maximum: no larger size is tried.
    """

    def __init__(self, *, maximum: int) -> None:
        self.maximum = maximum
        self._fits: dict[int, bool] = {}

    @property
    def best(self) -> int:
        return max((size for size, fits in self._fits.items() if fits), default=0)

    @property
    def candidate(self) -> int | None:
        failed = [size for size, fits in self._fits.items() if not fits and size > self.best]
        if self.best >= self.maximum:
            return None
        if not failed:
            return min(self.maximum, max(1, 2 * self.best))
        nearest = min(failed)
        if nearest > self.best + 1:
            return (self.best + nearest) // 2
        beyond = range(self.best + 1, min(self.maximum, self.best + 3) + 1)
        return next((size for size in beyond if size not in self._fits), None)

    def record(self, trial: Trial) -> None:
        self._fits[trial.batch_size] = trial.fits


@contextmanager
def real_run(combination: Combination, **probe: Any) -> Iterator[RealRun]:
    """A model that is gone after."""
    run = RealRun(combination, **probe)
    try:
        yield run
    finally:
        run.__dict__.clear()
        gc.collect()
        torch.cuda.empty_cache()


def noting(run: RealRun) -> dict[int, int]:
    """What the allocator gave out at once in the last trial of each size, from now on."""
    allocated: dict[int, int] = {}
    tried: Callable[[Sequence[Any]], None] = run.trainer.runner.try_rows

    def try_rows(rows: Sequence[Any]) -> None:
        tried(rows)
        allocated[len(rows)] = torch.cuda.max_memory_allocated()

    run.trainer.runner.try_rows = try_rows  # type: ignore[method-assign, assignment]
    return allocated


def device_here() -> str:
    """What a plan for the device of this process is asked for; a CPU is 1 TiB."""
    if not torch.cuda.is_available():
        return "1TiB"
    name = torch.cuda.get_device_name()
    try:
        parse_devices([name])
    except SettingError:
        return f"{torch.cuda.mem_get_info()[1]}B"
    return name


def measure_on_device(
    combinations: Sequence[Combination], memory: str | None, *, maximum: int
) -> list[dict[str, Any]]:
    """Each combination's estimates beside what the allocator gave out, and its bound beside the
    true one and the probe's.
    """
    rows = []
    on_cuda = torch.cuda.is_available()
    name = device_here()
    print(
        f"{'combination':<68} {'GiB':>6} {'planned':>7} {'true':>5} {'probe':>5} {'share':>6}"
        f" {'worst error':>11} {'at bound':>9} {'true s':>7}"
    )
    for combination in combinations:
        plan = combination.planned(devices=[name])
        budget = budget_here(combination, memory)
        row: dict[str, Any] = {**asdict(combination), "budget_bytes": budget, "device": name}
        rows.append(row)
        row["planned"] = bound_of(plan, budget, maximum)
        limits = {"device_memory": budget, "maximum": maximum}
        start = time.perf_counter()
        try:
            with real_run(combination, **limits) as run:
                allocated = noting(run) if on_cuda else {}
                result = searched(run, Doubling(maximum=maximum))
            seconds = time.perf_counter() - start
            with real_run(combination, **limits) as run:
                probe = found(run)
        except DoesNotFitError as error:
            row["refused"] = str(error)
            print(
                f"{combination!s:<68} {budget / GIB:>6.2f} {row['planned']:>7} {error}", flush=True
            )
            continue
        if not on_cuda:
            allocated = {
                trial.batch_size: trial.peak_bytes or 0 for trial in result.trials if trial.fits
            }
        reserved = {trial.batch_size: trial.peak_bytes for trial in result.trials if trial.fits}
        estimates = {size: said(plan, size) for size in reserved}
        errors = {
            size: relative(allocated[size], estimates[size]) for size in reserved if size > 1
        }  # one is not traced
        row |= {
            "true": result.max_batch_size,
            "probe": probe.max_batch_size,
            "share": row["planned"] / result.max_batch_size,
            "allocated": {size: allocated[size] for size in reserved},
            "reserved": reserved,
            "estimates": estimates,
            "resident": result.resident_bytes,
            "planned_resident": plan.resident.total,
            "optimizer_reserved": result.trials[0].optimizer_peak_bytes,
            "planned_optimizer": plan.optimizer_peak_bytes,
            "worst": max(errors.values(), key=abs, default=0.0),
            "at_bound": relative(
                allocated[result.max_batch_size], estimates[result.max_batch_size]
            ),
            "seconds": round(seconds, 1),
        }
        print(
            f"{combination!s:<68} {budget / GIB:>6.2f} {row['planned']:>7} {row['true']:>5}"
            f" {row['probe']:>5} {row['share']:>6.1%} {row['worst']:>11.2%} {row['at_bound']:>9.2%}"
            f" {seconds:>7.1f}",
            flush=True,
        )
    done = [row for row in rows if "share" in row]
    if done:
        print(
            f"\nshare of the true bound: {min(r['share'] for r in done):.1%} to"
            f" {max(r['share'] for r in done):.1%}; worst error at the true bound"
            f" {max(abs(r['at_bound']) for r in done):.2%}"
        )
    return rows


def budget_here(combination: Combination, memory: str | None) -> int:
    """What trials may use: what was asked for, or 95% of what is free."""
    own = device_memory(torch.device(combination.device))
    available = own.available_bytes(())
    return (
        min(parse_size(memory, total_bytes=own.total_bytes()), available)
        if memory
        else int(0.95 * available)
    )


MEASURES = ("peaks", "ranks", "time", "compiled", "configs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--memory", help="on CUDA: what may be used, such as 24GiB; default 95%% of what is free"
    )
    parser.add_argument("--only", choices=MEASURES, help="one of the parts on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing")
    parser.add_argument(
        "--quick", action="store_true", help="fewer combinations and sizes, one timing"
    )
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    set_up_process()
    logging.getLogger("adaptive_batch").setLevel(logging.WARNING)
    gc.freeze()  # trials collect garbage; what is imported need not be looked through every time
    quick = arguments.quick
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: this PyTorch sees no such device")
        measured = measure_on_device(on_cuda(quick), arguments.memory, maximum=4096)
        records.write("estimate-cuda", arguments.output, cuda=measured)
        return
    parts: dict[str, Any] = {}
    if arguments.only in (None, "peaks"):
        torch.set_num_threads(1)
        parts["peaks"] = measure_peaks(
            PEAKS[::10] if quick else PEAKS, QUICK_SIZES if quick else SIZES
        )
        print()
    if arguments.only in (None, "ranks"):
        parts["ranks"] = measure_ranks(RANKS[:2] if quick else RANKS)
        print()
    timed: list[Finished] = []
    if arguments.only in (None, "time"):
        timed.append(Finished("estimate-time"))
        parts["time"] = measure_time(
            TIMED[:1] if quick else TIMED, timed[-1], repeats=1 if quick else arguments.repeats
        )
        print()
    if arguments.only in (None, "compiled"):
        timed.append(Finished("estimate-compiled"))
        parts["compiled"] = measure_time(
            TIMED_COMPILED[:2] if quick else TIMED_COMPILED,
            timed[-1],
            repeats=1 if quick else arguments.repeats,
        )
        print()
    if arguments.only in (None, "configs"):
        parts["configs"] = measure_configs(all_configs()[::20] if quick else all_configs())
    name = f"estimate-{arguments.only}" if arguments.only else "estimate"
    records.write(name, arguments.output, **parts)
    for finished in timed:
        finished.forget()


if __name__ == "__main__":
    main()
