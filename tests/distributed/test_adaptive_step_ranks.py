"""Ranks with a sharded model run the parts of a batch together, and retry together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.packed_batches import FORMS, Attends
from support.processes import run_on_ranks
from support.sharded_model import (
    Decoder,
    RunsOutOnRankOne,
    by_hand,
    collate,
    divided,
    make_rows,
    relative_error,
    run_out_of_memory,
    token_losses,
    whole_gradients,
)
from torch.distributed.fsdp import fully_shard

from adaptive_batch import SplitBatch, distributed, find_max_batch_size
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.training import AdaptiveStep, Part, StepOptions
from adaptive_batch.training.parts import RowsOfBatch

CLOSE = 1e-10
# Rows of each rank in several batches.
LENGTHS = ((9, 7, 9, 4), (6, 9, 8, 5))
LATER_LENGTHS = ((5, 8, 3, 9), (7, 7, 4, 6))


def rows_of(lengths: tuple[tuple[int, ...], ...], *, seed: int = 1) -> list[list[dict[str, Any]]]:
    """Return the rows of each rank."""
    return [make_rows(each, seed=seed + rank) for rank, each in enumerate(lengths)]


def mean_over_ranks(model: Decoder, rows: list[list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return the mean of the ranks' gradients, computed on one device."""
    of_ranks = [by_hand(model, each)[0] for each in rows]
    return {name: torch.stack([each[name] for each in of_ranks]).mean(0) for name in of_ranks[0]}


def script_of(model: Decoder, **options: Any) -> RunsOutOnRankOne:
    """Return a `forward_backward` function that runs out of memory on rank 1."""

    def forward_backward(part: Part) -> float:
        loss = token_losses(model, dict(part.batch), "mean") * part.share
        loss.backward()
        return loss.item()

    return RunsOutOnRankOne(forward_backward, model, **options)


def retried(phase: str, reshards: bool, checkpointing: bool, syncs: bool) -> dict[str, Any]:
    """Accumulate the gradients of two batches; rank 1 runs out of memory in the second."""
    model = Decoder(checkpointing=checkpointing)
    batches = [rows_of(LENGTHS), rows_of(LATER_LENGTHS, seed=5)]
    one_device = copy.deepcopy(model)
    expected = [mean_over_ranks(one_device, each) for each in batches]
    divided(model, reshard_after_forward=reshards)
    script = script_of(model, phase=phase)
    step = AdaptiveStep(model, script, options=StepOptions(sync_gradients_every_micro_batch=syncs))
    rank = distributed.rank()
    losses = [sum(step(collate(batches[0][rank])))]
    first = relative_error(whole_gradients(model), expected[0])
    # A validation between the batches leaves parameters gathered that are not resharded.
    with torch.no_grad():
        model(collate(batches[0][rank])["tokens"])
    script.most_rows = 3
    losses.append(sum(step(collate(batches[1][rank]))))
    both = {name: expected[0][name] + expected[1][name] for name in expected[0]}
    second = relative_error(whole_gradients(model), both)
    plain_losses = [by_hand(one_device, each[rank])[1] for each in batches]
    return {"errors": (first, second), "rows": script.rows, "losses": losses, "plain": plain_losses}


@pytest.mark.parametrize(
    ("phase", "reshards", "checkpointing", "syncs"),
    [
        ("forward", True, False, True),
        ("backward", False, False, True),
        pytest.param("forward", True, True, False, marks=pytest.mark.slow),
        pytest.param("backward", False, True, True, marks=pytest.mark.slow),
    ],
)
def test_a_batch_out_of_memory_on_one_rank_is_retried_on_both(
    phase, reshards, checkpointing, syncs
):
    results = run_on_ranks(retried, 2, phase, reshards, checkpointing, syncs)
    for result in results:
        assert max(result["errors"]) <= CLOSE
        assert result["rows"] == [4, 4, 2, 2]
        assert result["losses"] == pytest.approx(result["plain"], rel=CLOSE)


def out_of_memory_before_forward(where: str) -> dict[str, Any]:
    """Run out of memory on rank 1 as a batch of more than three rows is made or split."""
    model = Decoder()
    rows = rows_of(LENGTHS)
    expected = mean_over_ranks(copy.deepcopy(model), rows)
    divided(model)

    def needs_memory(num_rows: int) -> None:
        if num_rows > 3 and distributed.rank() == 1:
            run_out_of_memory()

    def split(batch: Any) -> SplitBatch:
        whole = RowsOfBatch(batch)

        def part(numbers: Any) -> Any:
            needs_memory(len(numbers))
            return whole.part(numbers)

        return SplitBatch(whole.num_rows, part)

    script = script_of(model)
    step = AdaptiveStep(model, script, split=split)
    if where == "step":
        step(collate(rows[distributed.rank()]))
        return {"error": relative_error(whole_gradients(model), expected), "rows": script.rows}

    def sample(num_rows: int) -> Any:
        needs_memory(num_rows)
        return collate(make_rows([9] * num_rows))

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    bounds = [step.find_bound(optimizer, sample, maximum=16)]

    def forward_backward(batch: Any) -> None:
        token_losses(model, dict(batch), "mean").backward()

    bounds.append(find_max_batch_size(model, optimizer, forward_backward, sample, maximum=16))
    return {"bounds": [bound.max_batch_size for bound in bounds]}


@pytest.mark.slow
def test_a_sample_out_of_memory_on_one_rank_does_not_fit():
    for result in run_on_ranks(out_of_memory_before_forward, 2, "search"):
        assert result["bounds"] == [3, 3]


def test_a_split_out_of_memory_on_one_rank_is_retried_on_both():
    first, second = run_on_ranks(out_of_memory_before_forward, 2, "step")
    assert max(first["error"], second["error"]) <= CLOSE
    assert (first["rows"], second["rows"]) == ([4, 2, 2], [2, 2])


def message_of(step: AdaptiveStep, batch: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as refusal:
        step(batch)
    return str(refusal.value)


def refused() -> tuple[list[str], bool]:
    """Return the messages of a wrong loss, of a row that does not fit on rank 1, and of a hook."""
    model = divided(Decoder())

    def forward_backward(part: Part) -> None:
        labels = part.batch["labels"]
        losses = [
            token_losses(
                model, {"tokens": part.batch["tokens"][[row]], "labels": labels[[row]]}, "mean"
            )
            for row in range(len(labels))
        ]
        (torch.stack(losses).mean() * part.share).backward()

    batch = collate(rows_of(LENGTHS)[distributed.rank()])
    of_loss = message_of(
        AdaptiveStep(model, forward_backward, micro_batch_size=3), batch, SettingError
    )
    has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    script = script_of(model, trials_fit=True)
    step = AdaptiveStep(model, script)
    step(batch)
    model.zero_grad()
    script.most_rows = 0
    of_memory = message_of(step, batch, DoesNotFitError)
    script.most_rows = 10**9
    next(model.parameters()).register_post_accumulate_grad_hook(lambda sharded: None)
    of_hook = message_of(AdaptiveStep(model, script, micro_batch_size=3), batch, SettingError)
    return [of_loss, of_memory, of_hook], has_gradients


def test_all_ranks_refuse_alike():
    first, second = run_on_ranks(refused, 2)
    assert first == second
    (of_loss, of_memory, of_hook), has_gradients = first
    assert of_loss.startswith("forward_backward='forward_backward': gradients of ")
    assert "ran out of memory on rank 1, alone in its micro-batch" in of_memory
    assert of_hook.startswith("register_post_accumulate_grad_hook=")
    assert not has_gradients


def undivided():
    model = torch.nn.Linear(3, 2)
    fully_shard(model)

    def forward_backward(part):
        inputs, labels, weights = part.batch
        loss = torch.nn.functional.cross_entropy(model(inputs), labels, weights)
        (loss * part.share).backward()

    batch = (torch.ones(4, 3), torch.tensor([0, 1, 1, 0]), torch.tensor([1.0, 2.0]))
    step = AdaptiveStep(model, forward_backward)
    step(batch)
    model.zero_grad()
    smaller = AdaptiveStep(model, forward_backward, micro_batch_size=2)
    return step.num_micro_batches, message_of(smaller, batch, SettingError)


def test_a_batch_that_cannot_be_divided_trains_whole_on_ranks_and_is_refused_where_it_is_split():
    for num_micro_batches, of_split in run_on_ranks(undivided, 2):
        assert num_micro_batches == 1
        assert "[2] cannot be divided by rows" in of_split


DOCUMENTS = ([5, 3, 8, 2], [7, 4])


def split_on_ranks(form):
    model = Attends()
    alone = copy.deepcopy(model)
    for lengths in DOCUMENTS:
        (alone(FORMS[form](lengths)) / len(DOCUMENTS)).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    fully_shard(model)

    def forward_backward(part):
        (model(part.batch) * part.share).backward()

    step = AdaptiveStep(model, forward_backward, micro_batch_size=1)
    step(FORMS[form](DOCUMENTS[distributed.rank()]))
    found = whole_gradients(model)
    errors = [float((found[name] - expected[name]).abs().max()) for name in expected]
    return max(errors), step.num_micro_batches


@pytest.mark.parametrize("form", ["positions", "flattened", "torchtitan"])
def test_packed_batches_are_split_alike_and_gradients_are_the_mean_of_both_ranks(form):
    for error, num_micro_batches in run_on_ranks(split_on_ranks, 2, form):
        assert error < 1e-12
        assert num_micro_batches == 4
