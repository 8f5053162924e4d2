"""Padding, batches and planning time: ours beside torchtune's, Hugging Face's and DeepSpeed's ways
to make batches.

    python benchmarks/batching.py [--quick] [--deepspeed FILE] [--output DIR]

Part (a) makes the batches of an epoch for one budget of padded tokens, of 20,000 lognormal lengths
and of the demo's rows. Part (b) measures how planning time and memory grow with the rows, each
number of rows in a process of its own.

The peers' own code runs: Hugging Face's out of transformers, DeepSpeed's out of the installed
package or FILE, its
``deepspeed/runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py``. Without either it
is not measured.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import records
import torch
from torch.utils.data import BatchSampler, RandomSampler

from adaptive_batch.config_files import config_path
from adaptive_batch.data import DatasetAdapter, plan_batches, row_order, split_by_tokens

MAX_TOKENS = 16_384
# of the longest rows, so many fill the budget: 16,384 / 2048; the demo's budget is made alike
LONGEST_ROWS = 8
STEP_ROWS = 64
DEEPSPEED_ROWS = 8_000  # its planning is cubic: 20,000 rows would take a quarter of an hour
DEEPSPEED_FILE = "deepspeed/runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py"
WINDOWS = (1024, 2048, 4096, 8192)

Batches = list[list[int]]
Plan = Callable[[torch.Tensor, int], Batches]


def lognormal(num_rows: int) -> torch.Tensor:
    """Lengths of mean 385 tokens, 8 to 2048. Sigma is that with which 16 random rows waste 72.3% as
    padding.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(num_rows, dtype=torch.int64)
    for piece in lengths.split(
        1_000_000
    ):  # a peak of memory made here would hide some of the planner's
        normal = torch.randn(len(piece), generator=generator, dtype=torch.float64)
        piece.copy_((5.53 + 0.97 * normal).exp().clamp(8, 2048).round())
    return lengths


def demo_lengths(*, longest: int | None = None) -> torch.Tensor:
    """Tokens of the rows that the demo trains on; with ``longest``, of all docstrings of the
    standard library, cut to so many.
    """
    # Imported here, as in the other functions: a process of part (b) holds no memory that importing
    # them took and freed.
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import demo
    from omegaconf import OmegaConf
    from torchtune import config

    path = config_path("demo_cpu")
    assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
    with tempfile.TemporaryDirectory() as folder:
        demo.prepare(folder)
        cfg = OmegaConf.merge(OmegaConf.load(path), {"demo_dir": folder, "output_dir": folder})
        if longest is not None:
            rows = "".join(json.dumps(row) + "\n" for row in demo.instruction_rows())
            file = Path(folder, "all.jsonl")
            file.write_text(rows, encoding="utf-8")
            cfg.dataset.data_files = str(file)
            cfg.model.max_seq_len = cfg.tokenizer.max_seq_len = longest
        dataset = config.instantiate(cfg.dataset, config.instantiate(cfg.tokenizer))
        return DatasetAdapter(dataset).lengths


# --- the ways to make batches


def ours(*, order: str = "dataloader", window: int | None = None, **arguments: Any) -> Plan:
    def plan(lengths: torch.Tensor, max_tokens: int) -> Batches:
        rows = row_order(len(lengths), order=order, lengths=lengths, window=window)[:]
        return plan_batches(lengths, max_tokens, order=rows, **arguments).tolist()

    return plan


def ours_inside_steps(lengths: torch.Tensor, max_tokens: int) -> Batches:
    batches: Batches = []
    for start in range(0, len(lengths), STEP_ROWS):
        pieces = split_by_tokens(lengths[start : start + STEP_ROWS].tolist(), max_tokens)
        batches += [[start + row for row in piece] for piece in pieces]
    return batches


def fixed(batch_size: int) -> Plan:
    """What torchtune's loader hands out: shuffled rows, a fixed number at a time."""

    def plan(lengths: torch.Tensor, max_tokens: int) -> Batches:
        generator = torch.Generator().manual_seed(0)
        return list(
            BatchSampler(
                RandomSampler(lengths.tolist(), generator=generator), batch_size, drop_last=False
            )
        )

    return plan


def hugging_face(batch_size: int) -> Plan:
    """What transformers' Trainer with group_by_length hands out."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    def plan(lengths: torch.Tensor, max_tokens: int) -> Batches:
        generator = torch.Generator().manual_seed(0)
        rows = get_length_grouped_indices(lengths.tolist(), batch_size, generator=generator)
        return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]

    return plan


def deepspeed_function(file: Path | None) -> Callable[..., Any] | None:
    """DeepSpeed's batch_by_seqlens, run from its source so that the rest of the package need not be
    importable.
    """
    import numpy as np

    if file is None:
        package = importlib.util.find_spec("deepspeed")
        if package is None or package.origin is None:
            return None
        file = Path(package.origin).parents[1] / DEEPSPEED_FILE
    tree = ast.parse(file.read_text())
    function = next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "batch_by_seqlens"
    )
    names: dict[str, Any] = {
        "logger": logging.getLogger("deepspeed"),
        "random": random,
        "np": np,
        "torch": torch,
    }
    exec(compile(ast.Module([function], []), str(file), "exec"), names)
    return names["batch_by_seqlens"]


def deepspeed(batch_by_seqlens: Callable[..., Any], order: str) -> Plan:
    def plan(lengths: torch.Tensor, max_tokens: int) -> Batches:
        batches, _, _ = batch_by_seqlens(lengths.tolist(), max_tokens, sequence_picking_order=order)
        return [rows for _, rows in batches]

    return plan


def ways_without_deepspeed() -> dict[str, Plan]:
    return {
        "ours: data order": ours(),
        **{
            f"ours: seqlen, window {window}": ours(order="seqlen", window=window)
            for window in WINDOWS
        },
        "ours: seqlen": ours(order="seqlen"),
        "ours: seqlen, real tokens": ours(order="seqlen", count="real"),
        f"ours: inside steps of {STEP_ROWS} rows": ours_inside_steps,
        **{f"torchtune: {rows} rows": fixed(rows) for rows in (8, 16, 32)},
        **{
            f"Hugging Face group_by_length: {rows} rows": hugging_face(rows) for rows in (8, 16, 32)
        },
    }


# --- part (a)


def measure_ways(
    ways: dict[str, Plan], lengths: torch.Tensor, *, max_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    measured = []
    listed = lengths.tolist()
    for name, plan in ways.items():
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            batches = plan(lengths, max_tokens)
            seconds.append(time.perf_counter() - start)
        padded = [len(batch) * max(listed[row] for row in batch) for batch in batches]
        kept = [row for batch in batches for row in batch]
        assert len(set(kept)) == len(kept)
        measured.append(
            {
                "way": name,
                "padding": 1 - sum(listed[row] for row in kept) / sum(padded),
                "batches": len(batches),
                "most_padded_tokens": max(padded),
                "largest_over_mean": max(padded) * len(padded) / sum(padded),
                "batches_over_budget": sum(tokens > max_tokens for tokens in padded),
                "rows_lost": len(lengths) - len(kept),
                "seconds": min(seconds),
            }
        )
    return measured


def print_ways(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n(a) {title}")
    print(
        f"{'':<38} {'padding':>8} {'batches':>8} {'most tokens':>12} {'over budget':>12}"
        f" {'rows lost':>10} {'seconds':>9}"
    )
    for row in rows:
        print(
            f"{row['way']:<38} {row['padding']:>8.1%} {row['batches']:>8,}"
            f" {row['most_padded_tokens']:>12,} {row['batches_over_budget']:>12,}"
            f" {row['rows_lost']:>10,} {row['seconds']:>9.3f}"
        )


# --- part (b)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data order": ({}, {}),
    "seqlen, window 4096": ({"order": "seqlen", "window": 4096}, {}),
    "seqlen": ({"order": "seqlen"}, {}),
    "random, min_rows 8, divisible": (
        {"order": "random"},
        {"min_rows": 8, "divisible": True},
    ),
    "random, real tokens, min_rows 16": ({"order": "random"}, {"count": "real", "min_rows": 16}),
}


def peak_bytes() -> int:
    """The most memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux, whose ru_maxrss starts at what the parent had
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes


def measure_planning(case: str, num_rows: int) -> dict[str, Any]:
    """Plan once in this process, which has done nothing else."""
    ordering, planning = CASES[case]

    def planned(lengths: torch.Tensor) -> int:
        order = row_order(len(lengths), lengths=lengths, **ordering)[:]
        return len(plan_batches(lengths, MAX_TOKENS, order=order, **planning))

    planned(lognormal(1000))
    lengths = lognormal(num_rows)
    before = peak_bytes()
    start = time.perf_counter()
    batches = planned(lengths)
    seconds = time.perf_counter() - start
    return {
        "case": case,
        "rows": num_rows,
        "batches": batches,
        "seconds": seconds,
        "extra_bytes_per_row": (peak_bytes() - before) / num_rows,
    }


def measure_in_child(case: str, num_rows: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", case, str(num_rows)]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(ran.stdout)
    return measured


def print_planning(rows: list[dict[str, Any]]) -> None:
    print(f"\n(b) planning for {MAX_TOKENS:,} tokens, lognormal lengths, order included")
    print(f"{'':<44} {'rows':>11} {'seconds':>9} {'us / row':>9} {'extra bytes / row':>18}")
    for row in rows:
        print(
            f"{row['case']:<44} {row['rows']:>11,} {row['seconds']:>9.3f}"
            f" {1e6 * row['seconds'] / row['rows']:>9.3f} {row['extra_bytes_per_row']:>18.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="at most 10^6 rows, and DeepSpeed on 1,000"
    )
    parser.add_argument("--deepspeed", type=Path, metavar="FILE", help="where it is not installed")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        case, num_rows = arguments.child
        print(json.dumps(measure_planning(case, int(num_rows))))
        return

    if arguments.deepspeed:  # a record names no folder of this machine
        sys.argv = [
            argument.replace(str(arguments.deepspeed), arguments.deepspeed.name)
            for argument in sys.argv
        ]
    function = deepspeed_function(arguments.deepspeed)
    peer = (
        {}
        if function is None
        else {f"DeepSpeed: {order}": deepspeed(function, order) for order in ("random", "seqlen")}
    )
    repeats = 1 if arguments.quick else 3

    common = ways_without_deepspeed()
    made, demo = lognormal(20_000), demo_lengths()
    demo_budget = LONGEST_ROWS * int(demo.max())
    few = made[: 1_000 if arguments.quick else DEEPSPEED_ROWS]
    sets = [
        ("lognormal", made, MAX_TOKENS, repeats, common),
        ("demo", demo, demo_budget, repeats, {**common, **peer}),
    ]
    if peer:
        beside = {
            name: plan
            for name, plan in common.items()
            if name in ("ours: data order", "ours: seqlen")
        }
        sets.append(
            ("lognormal, as many as DeepSpeed is given", few, MAX_TOKENS, 1, {**beside, **peer})
        )
    ways = {}
    for name, lengths, max_tokens, times, which in sets:
        ways[name] = measure_ways(which, lengths, max_tokens=max_tokens, repeats=times)
        mean = float(lengths.double().mean())
        print_ways(
            f"{name}: {len(lengths):,} rows, mean {mean:.0f}, longest {int(lengths.max())},"
            f" {max_tokens:,} tokens",
            ways[name],
        )
    ratios = None
    if peer:
        seconds = {row["way"]: row["seconds"] for row in ways[sets[-1][0]]}
        ratios = {name: seconds[name] / seconds["ours: seqlen"] for name in peer}
        for name, ratio in ratios.items():
            print(f"{name}: {ratio:,.0f} times as long as ours: seqlen, at {len(few):,} rows")
    else:
        print("\nDeepSpeed: not measured; install it, or give --deepspeed FILE")

    sizes = [10**4, 10**5, 10**6, *([] if arguments.quick else [10**7])]
    planning = [measure_in_child(case, num_rows) for case in CASES for num_rows in sizes]
    print_planning(planning)

    records.write(
        "batching",
        arguments.output,
        max_tokens={"lognormal": MAX_TOKENS, "demo": demo_budget},
        ways=ways,
        deepspeed_rows=len(few) if peer else None,
        deepspeed_times_ours=ratios,
        planning=planning,
    )


if __name__ == "__main__":
    torch.set_num_threads(
        1
    )  # on a busy machine, waiting for a second thread takes longer than planning
    main()
