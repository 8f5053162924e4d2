"""DPO and distillation on ranks have the gradient of all rows, in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from support.exact_tasks import (
    EXACT,
    distilling,
    job_on_pairs,
    of_all_pairs_at_once,
    of_all_tokens_at_once,
    pairs,
    rows_of,
)
from support.processes import run_on_ranks
from support.runners import set_limit
from support.sharded_model import relative_error

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit

NUM_ROWS = 13
# Rows of each rank by the number of ranks; the last ranks have fewer.
ENDS = {2: (0, 8, 13), 4: (0, 5, 9, 11, 13)}
WAYS = {
    "DPO": (pairs, job_on_pairs, of_all_pairs_at_once),
    "DPO, packed": (pairs, partial(job_on_pairs, layout="packed"), of_all_pairs_at_once),
    "distillation": (rows_of, distilling, of_all_tokens_at_once),
    "distillation, packed": (rows_of, partial(distilling, layout="packed"), of_all_tokens_at_once),
}


def drawn_limits(ranks: int) -> list[MicroBatchLimit]:
    """Draw limits of rows and of tokens that split the rows of rank 0."""
    drawn = random.Random(ranks)
    by_rows = [MicroBatchLimit(drawn.randrange(1, 4)) for _ in range(2)]
    return by_rows + [MicroBatchLimit(drawn.randrange(60, 110), "tokens") for _ in range(2)]


def of_each_limit(
    way: str, kind: str, rows: Sequence[Any], limits: Sequence[MicroBatchLimit]
) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Return micro-batches and unsharded gradients of a step under each limit."""
    _, job_on, _ = WAYS[way]
    rank = distributed.rank()
    start, end = ENDS[distributed.world_size()][rank : rank + 2]
    wired = job_on(kind, rows, limit=limits[0])
    steps = []
    for limit in limits:
        set_limit(wired.trainer.engine.sizer, limit)
        result = wired.run(rows[start:end])
        steps.append((result.micro_batches, wired.gradients()))
    return steps


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["LoRA", "full"])
@pytest.mark.parametrize("way", WAYS)
def test_any_split_has_the_gradient_of_the_rows_of_all_ranks(way, kind, ranks):
    make_rows, job_on, of_all_at_once = WAYS[way]
    rows = make_rows(NUM_ROWS)
    *_, expected = of_all_at_once(job_on(kind, rows, limit=MicroBatchLimit(NUM_ROWS)), rows)
    limits = drawn_limits(ranks)
    for steps in run_on_ranks(of_each_limit, ranks, way, kind, rows, limits):
        assert all(micro_batches > 1 for micro_batches, _ in steps)
        assert max(relative_error(found, expected) for _, found in steps) < EXACT
