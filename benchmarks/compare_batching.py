"""Table 4 of docs/comparison.md: batches of at most so many tokens, by peers and by this project.

    python benchmarks/compare_batching.py [--output DIR]

The rows are all docstrings of the standard library, cut to 512 tokens; a batch may have 4,096
tokens with its padding. The peers' own functions make the batches, as batching.py runs them:
Hugging Face's, with the most rows that keep within the budget and with twice as many; DeepSpeed's
in its three orders, and in the best of them with the largest budget of its own that keeps within
ours.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import batching
import records
import torch

LONGEST = 512
MAX_TOKENS = 8 * LONGEST
PEERS = Path(__file__).parents[1] / ".venv-peers"


def deepspeed_folder() -> Path:
    """Return the folder that DeepSpeed is installed in.

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
    """Return a budget of real tokens, as large as may be, with which no batch of sorted rows passes
    our budget of padded ones.
    """
    plan = batching.deepspeed(batch_by_seqlens, "seqlen")

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
    """Return the most rows of a batch with which no batch passes the budget."""
    rows = 1
    while True:
        batches = batching.hugging_face(rows + 1)(lengths, max_tokens)
        if max(len(batch) * int(lengths[batch].max()) for batch in batches) > max_tokens:
            return rows
        rows += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    start = time.perf_counter()
    lengths = batching.demo_lengths(longest=LONGEST)
    function = batching.deepspeed_function(deepspeed_folder() / batching.DEEPSPEED_FILE)
    assert function is not None
    budget = deepspeed_budget(function, lengths, MAX_TOKENS)
    by_length = batching.deepspeed(function, "seqlen")
    rows = hugging_face_rows(lengths, MAX_TOKENS)
    ways: dict[str, batching.Plan] = {
        **{
            f"DeepSpeed: {order}": batching.deepspeed(function, order)
            for order in ("dataloader", "random", "seqlen")
        },
        f"DeepSpeed: seqlen, {budget:,} tokens": lambda lengths, _: by_length(lengths, budget),
        f"Hugging Face: group by length, {rows} rows": batching.hugging_face(rows),
        f"Hugging Face: group by length, {2 * rows} rows": batching.hugging_face(2 * rows),
        "ours: data order": batching.ours(),
        f"ours: inside steps of {batching.STEP_ROWS} rows": batching.ours_inside_steps,
        "ours: seqlen, window 1024": batching.ours(order="seqlen", window=1024),
        "ours: seqlen": batching.ours(order="seqlen"),
    }
    results = batching.measure_ways(ways, lengths, max_tokens=MAX_TOKENS, repeats=1)
    batching.print_ways(f"{len(lengths):,} docstrings, {MAX_TOKENS:,} tokens", results)
    records.write(
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
