"""The losses of examples/snippets/losses.py have the gradient of the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.losses import CASES, Batch, Page, taken_gradients, whole_gradients_of
from support.processes import run_on_ranks
from support.sharded_model import Decoder, RunsOutOnRankOne, divided, relative_error, whole
from torch.nn.parallel import DistributedDataParallel

from adaptive_batch import distributed
from adaptive_batch.training import AdaptiveStep, StepOptions

EXACT = 1e-12
LENGTHS = [5, 9, 4, 8, 7, 12, 6]
# Rows of each rank, by the number of ranks.
ROWS = {2: (range(5), range(5, 7)), 4: (range(3), range(3, 4), range(4, 6), range(6, 7))}


def shared(page: Page, how: str) -> None:
    """Let the page's functions run a sharded model."""
    model = page.model
    assert isinstance(model, Decoder)
    if how == "DDP":
        page.names["model"] = DistributedDataParallel(model)
    else:
        divided(model)


def gradients_of(page: Page) -> dict[str, torch.Tensor]:
    """Return the unsharded gradients by the names of the unsharded model."""
    taken = taken_gradients(page.model)
    return {name.removeprefix("module."): whole(gradient) for name, gradient in taken.items()}


def own_rows(batch: Batch) -> Batch:
    """Return the rows of this rank."""
    rows = list(ROWS[distributed.world_size()][distributed.rank()])
    return {key: tensor[rows] for key, tensor in batch.items()}


def of_the_global_batch(name: str, how: str) -> tuple[float, list[int]]:
    page = Page()
    case = CASES[name]
    batch = case.batch(page, LENGTHS)
    expected, _ = whole_gradients_of(page, case.whole, batch)
    shared(page, how)
    options = StepOptions(count_labels_over="ranks")
    step = case.step(page, micro_batch_size=2, options=options)
    losses = step(own_rows(batch))
    return relative_error(gradients_of(page), expected), [len(losses), step.num_micro_batches]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["DDP", "FSDP"])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_any_split_has_the_gradient_of_the_global_batch(name, how, ranks):
    results = run_on_ranks(of_the_global_batch, ranks, name, how)
    own_parts = [[3], [1]] if ranks == 2 else [[2], [1], [1], [1]]
    most_parts = max(own_parts)
    assert [parts for _, parts in results] == [own + most_parts for own in own_parts]
    assert max(error for error, _ in results) <= EXACT


def out_of_memory(how: str, fails_in: str, over: str) -> dict[str, Any]:
    """Run a batch that runs out of memory in one of its passes."""
    page = Page()
    case = CASES["ratio over the batch"]
    model = page.model
    batch = page.batch(LENGTHS)
    if over == "ranks":
        expected, _ = whole_gradients_of(page, case.whole, batch)
    else:
        of_ranks = []
        for rows in ROWS[2]:
            rows_of_rank = {key: tensor[list(rows)] for key, tensor in batch.items()}
            of_ranks.append(whole_gradients_of(page, case.whole, rows_of_rank)[0])
        expected = {name: (of_ranks[0][name] + of_ranks[1][name]) / 2 for name in of_ranks[0]}
    shared(page, how)
    most_rows = {"statistics": 10, "loss": 10, fails_in: 1}
    statistics, loss = (
        RunsOutOnRankOne(function, model, most_rows=most_rows[name], trials_fit=True)
        for name, function in (("statistics", page.sums), ("loss", page.distill))
    )
    step = AdaptiveStep(
        page.model,
        loss,
        num_labels=page.completion_tokens,
        statistics=statistics,
        options=StepOptions(count_labels_over=over),
    )
    step(own_rows(batch))
    return {
        "error": relative_error(gradients_of(page), expected),
        "statistics": statistics.rows,
        "loss": loss.rows,
    }


@pytest.mark.parametrize(("how", "over"), [("FSDP", "ranks"), ("DDP", "rank")])
@pytest.mark.parametrize("fails_in", ["statistics", "loss"])
def test_an_oom_in_either_pass_on_one_rank_is_retried_by_both(how, fails_in, over):
    first, second = run_on_ranks(out_of_memory, 2, how, fails_in, over)
    assert max(first["error"], second["error"]) <= EXACT
    # Under FSDP, rank 1 runs dummies while rank 0 runs its additional rows.
    num_parts = 5 if how == "FSDP" else 2
    assert first["statistics"] == [5, 1, 1, 1, 1, 1]
    assert second["statistics"] == [2, *[1] * num_parts]
    failed = fails_in == "loss"
    assert first["loss"] == [*[5] * failed, 1, 1, 1, 1, 1]
    assert second["loss"] == [*[2] * failed, *[1] * num_parts]
