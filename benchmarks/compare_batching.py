"""Table 4 of docs/comparison.md: batches with a limit of tokens, by other libraries and by this
project.

    python benchmarks/compare_batching.py [--output DIR]

The rows are all docstrings of the standard library, cut to 512 tokens. A batch may have 4,096
tokens, including padding. Hugging Face's sampler runs with the largest number of rows that keeps
within this limit, and with twice as many. DeepSpeed's runs with its three orders, and in the best
order also with its largest budget that keeps within the limit. Ours divides steps of 64 rows into
micro-batches.
"""

from __future__ import annotations

import ast
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from omegaconf import OmegaConf
from torchtune import config
from transformers.trainer_pt_utils import get_length_grouped_indices

from adaptive_batch.config_files import config_files
from adaptive_batch.data import DatasetAdapter, MicroBatchLimit, micro_batches, row_order

LONGEST = 512
MAX_TOKENS = 8 * LONGEST
STEP_ROWS = 64
DEEPSPEED_FILE = "deepspeed/runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py"
Batches = list[list[int]]
Plan = Callable[[torch.Tensor, int], Batches]
PEERS = Path(__file__).parents[1] / ".venv-peers"


def docstring_lengths() -> torch.Tensor:
    """Tokens of all docstrings of the standard library, cut to `LONGEST`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import demo

    path = config_files()["demo_cpu"]
    assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
    with tempfile.TemporaryDirectory() as folder:
        demo.prepare(folder)
        cfg = OmegaConf.merge(OmegaConf.load(path), {"demo_dir": folder, "output_dir": folder})
        rows = "".join(json.dumps(row) + "\n" for row in demo.instruction_rows())
        file = Path(folder, "all.jsonl")
        file.write_text(rows, encoding="utf-8")
        cfg.dataset.data_files = str(file)
        cfg.model.max_seq_len = cfg.tokenizer.max_seq_len = LONGEST
        dataset = config.instantiate(cfg.dataset, config.instantiate(cfg.tokenizer))
        return DatasetAdapter(dataset).lengths


def ours(**ordering: Any) -> Plan:
    """Steps of rows in an order, each cut into micro-batches of the budget."""

    def plan(lengths: torch.Tensor, max_tokens: int) -> Batches:
        rows = row_order(len(lengths), lengths=lengths, **ordering)[:].tolist()
        limit = MicroBatchLimit(max_tokens, "tokens")
        batches: Batches = []
        for start in range(0, len(rows), STEP_ROWS):
            step = rows[start : start + STEP_ROWS]
            pieces = micro_batches(lengths[step].tolist(), limit)
            batches += [[step[row] for row in piece.rows] for piece in pieces]
        return batches

    return plan


def hugging_face(batch_size: int) -> Plan:
    """Batches of transformers' Trainer with group_by_length."""

    def plan(lengths: torch.Tensor, max_tokens: int) -> Batches:
        generator = torch.Generator().manual_seed(0)
        rows = get_length_grouped_indices(lengths.tolist(), batch_size, generator=generator)
        return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]

    return plan


def deepspeed_function(file: Path) -> Callable[..., Any]:
    """Return DeepSpeed's batch_by_seqlens, run from its source so that the rest of the package need
    not be importable.
    """
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


def deepspeed_folder() -> Path:
    """Return the folder of the installed DeepSpeed.

    Raises:
        SystemExit: it is not installed.
    """
    folders = list(PEERS.glob("lib/python*/site-packages"))
    if not folders:
        raise SystemExit(f"DeepSpeed is not in {PEERS.name}: run `make compare`, which installs it")
    return folders[0]


def deepspeed_version() -> str:
    (version,) = (
        package.version
        for package in distributions(path=[str(deepspeed_folder())])
        if package.name == "deepspeed"
    )
    return version


def deepspeed_budget(batch_by_seqlens: Any, lengths: torch.Tensor, max_tokens: int) -> int:
    """Return the largest budget of real tokens that keeps each batch of sorted rows within our
    budget of padded tokens.
    """
    plan = deepspeed(batch_by_seqlens, "seqlen")

    def fits(budget: int) -> bool:
        batches = plan(lengths, budget)
        return max(len(batch) * int(lengths[batch].max()) for batch in batches) <= max_tokens

    low = max_tokens // 2
    high = max_tokens
    while high - low > 32:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def hugging_face_rows(lengths: torch.Tensor, max_tokens: int) -> int:
    """Return the largest number of rows that keeps each batch within the budget."""
    rows = 1
    while True:
        batches = hugging_face(rows + 1)(lengths, max_tokens)
        if max(len(batch) * int(lengths[batch].max()) for batch in batches) > max_tokens:
            return rows
        rows += 1


def measure_ways(
    ways: dict[str, Plan], lengths: torch.Tensor, *, max_tokens: int
) -> list[dict[str, Any]]:
    measured = []
    listed = lengths.tolist()
    for name, plan in ways.items():
        start = time.perf_counter()
        batches = plan(lengths, max_tokens)
        seconds = time.perf_counter() - start
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
                "seconds": seconds,
            }
        )
    return measured


def main() -> None:
    parser = harness.parser(__doc__)
    arguments = parser.parse_args()
    start = time.perf_counter()
    lengths = docstring_lengths()
    function = deepspeed_function(deepspeed_folder() / DEEPSPEED_FILE)
    assert function is not None
    budget = deepspeed_budget(function, lengths, MAX_TOKENS)
    by_length = deepspeed(function, "seqlen")
    rows = hugging_face_rows(lengths, MAX_TOKENS)
    ways: dict[str, Plan] = {
        **{
            f"DeepSpeed: {order}": deepspeed(function, order)
            for order in ("dataloader", "random", "seqlen")
        },
        f"DeepSpeed: seqlen, {budget:,} tokens": lambda lengths, _: by_length(lengths, budget),
        f"Hugging Face: group by length, {rows} rows": hugging_face(rows),
        f"Hugging Face: group by length, {2 * rows} rows": hugging_face(2 * rows),
        "ours: data order": ours(),
        "ours: seqlen, window 1024": ours(order="seqlen", window=1024),
        "ours: seqlen": ours(order="seqlen"),
    }
    results = measure_ways(ways, lengths, max_tokens=MAX_TOKENS)
    print(f"{len(lengths):,} docstrings, {MAX_TOKENS:,} tokens")
    table = harness.Table(
        "way:<38 padding:>8.1% batches:>8, most_padded_tokens:>18, batches_over_budget:>19,"
        " rows_lost:>9, seconds:>9.3f"
    )
    for row in results:
        table.print(row)
    harness.write(
        "compare_batching",
        arguments.output,
        deepspeed=deepspeed_version(),
        rows=len(lengths),
        mean_length=float(lengths.double().mean()),
        longest=int(lengths.max()),
        max_tokens=MAX_TOKENS,
        results=results,
        seconds=round(time.perf_counter() - start, 1),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
