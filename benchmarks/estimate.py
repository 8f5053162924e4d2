"""Estimates on fake tensors and the time that they take, beside the bytes that real trials count.

    python benchmarks/estimate.py [--only {peaks,ranks,time}] [--quick] [--output DIR]

`peaks`: small models of torchtune's builders; the peak at each of many sizes, and the bound under
budgets between them, beside the recipes' own trials and their search. `ranks`: the same with FSDP2
on gloo, where each rank is a process. `time`: shipped configs planned in a fresh process each; a
finished one is kept in `.measure/`, and a part that was stopped resumes with the next one.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import records
import torch
from records import Finished, Table

from adaptive_batch.estimate import LengthEstimate
from adaptive_batch.memory import GIB
from adaptive_batch.torchtune import set_up_process

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.model_families import Combination, RealRun, found, peaks_on_ranks, tried
from support.ranks import run_on_ranks

TESTS = Path(__file__).parents[1] / "tests"
SIZES = (*range(1, 25), 32, 48, 64)
QUICK_SIZES = (1, 2, 3, 4, 7, 8, 16)
# True bounds that the recipes' own search is asked for.
PROBED = (1, 2, 3, 7, 16)
# A thread of gloo may hold a buffer a little longer than the collective takes.
REPEATS = 4

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
    table = Table(
        "combination:<66 sizes:>5 worst:>9.4% worst_resident:>14.2% worst_optimizer:>15.2%"
        " equal:>7 at_edges:>8 to_the_probe:>12 plan_seconds:>12.1f trial_seconds:>13.1f"
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
        table.print(
            row,
            combination=str(combination),
            sizes=len(peaks),
            equal=f"{row['budgets_equal']}/{row['budgets']}",
            at_edges=f"{row['edges_equal']}/{row['edges']}",
            to_the_probe=f"{row['probes_equal']}/{len(probes)}",
            trial_seconds=seconds,
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
    largest = RANK_SIZES[-1]
    print(f"MiB are of {largest} rows")
    table = Table(
        "combination:<92 worst:>9.3% worst_resident:>14.3% worst_optimizer:>15.3%"
        " MiB:>9.2f planned_MiB:>11.2f"
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
            mib = {"MiB": peaks[largest] / 2**20, "planned_MiB": said(plan, largest) / 2**20}
            table.print(row, combination=str(combination), **mib)
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
    table = Table(
        "name:<44 with_changes:>12 plan:>7.1f command:>9.1f user:>7.1f peak_GiB:>9.2f target:>8"
    )
    for changes, planning in product((False, True), plannings):
        if changes not in planning.changes:
            continue
        key = {"config": planning.config, "overrides": planning.overrides, "changes": changes}
        key["repeats"] = repeats
        row = finished.entry(key, partial(timed, planning, changes))
        rows.append(row)
        name = " ".join((planning.config, *planning.overrides))
        if "failed" in row:
            print(f"{name}: {row['failed']}", flush=True)
            continue
        peak, target = row["peak_bytes"] / GIB, "-" if changes else str(planning.target_seconds)
        table.print(row, name=name, with_changes=str(changes), peak_GiB=peak, target=target)
    return rows


def run_planning(planning: Planning, *, changes: bool) -> dict[str, Any]:
    """One command: what its plan says it took, what the whole process took, and what it held."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(Path(sys.executable).parent / "tune"), "run", "adaptive_estimate"),
            *("--config", planning.config, f"output_dir={folder}"),
            *("estimate.devices=[80GiB]", "estimate.sequence_lengths=[512,1024,2048]"),
            *(f"estimate.changes={changes}", *planning.overrides),
        ]
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


def main() -> None:
    parser = records.parser(__doc__, quick="fewer combinations and sizes, one timing")
    parts = ("peaks", "ranks", "time")
    parser.add_argument("--only", nargs=1, choices=parts, default=parts, help="one of the parts")
    parser.add_argument("--repeats", type=int, default=3, help="of each timing")
    arguments = parser.parse_args()
    set_up_process()
    logging.getLogger("adaptive_batch").setLevel(logging.WARNING)
    # Trials collect garbage; imported modules need not be looked through each time.
    gc.freeze()
    finished = Finished("estimate-time")
    for part in arguments.only:
        if part == "peaks":
            torch.set_num_threads(1)
            combinations, sizes = (PEAKS[::10], QUICK_SIZES) if arguments.quick else (PEAKS, SIZES)
            measured = measure_peaks(combinations, sizes)
        elif part == "ranks":
            measured = measure_ranks(RANKS[:2] if arguments.quick else RANKS)
        else:
            plannings, repeats = (TIMED[:1], 1) if arguments.quick else (TIMED, arguments.repeats)
            measured = measure_time(plannings, finished, repeats=repeats)
            finished.forget()
        records.write(f"estimate-{part}", arguments.output, **{part: measured})


if __name__ == "__main__":
    main()
