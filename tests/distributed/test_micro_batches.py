"""A step on ranks has the gradients of one device, for any division of rows and any layout."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from support.processes import run_on_ranks
from support.runners import sizer_of
from support.sharded_model import (
    IGNORED,
    Decoder,
    by_hand,
    divided,
    make_rows,
    relative_error,
    run_out_of_memory,
    runner_of,
    whole_gradients,
    whole_parameters,
)

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit, MicroBatchTime
from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.training import RecipeStep, pack_rows

CLOSE = 1e-10
KINDS = ("padded", "grouped", "packed")
# Limits of each unit: one row, some rows, and all rows of a rank.
LIMITS = {
    "rows": tuple(map(MicroBatchLimit, (1, 2, 64))),
    "tokens": tuple(MicroBatchLimit(amount, "tokens") for amount in (8, 18, 900)),
}
LENGTHS = (9, 7, 9, 4, 6, 9, 8, 2, 5, 3)

# Lengths of each rank's rows, and the rows without labels, for two and four ranks.
DEALS: dict[
    str, tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[int, ...]]
] = {
    "even": (((0, 2, 4, 6), (1, 3, 5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)), ()),
    "uneven": (((0, 1, 2, 3, 4, 5, 6), (7, 8)), ((0, 1, 2, 3, 4), (5, 6, 7), (8,), (9,)), ()),
    "the last rank has no rows": (((0, 1, 2, 3, 4), ()), ((0, 1, 2), (3,), (4, 5), ()), ()),
    "the first rank has no rows": (((), (0, 1, 2)), ((), (), (), (0, 1, 2)), ()),
    "some rows have no label": (((0, 1, 2, 3), (4, 5, 6)), ((0, 1), (2, 3), (4, 5), (6,)), (1, 4)),
    "a micro-batch has no label": (
        ((0, 1, 2, 3, 4), (5, 6, 7)),
        ((0, 1, 2), (3, 4), (5,), (6,)),
        (0, 1, 2, 3),
    ),
    "one rank has no label": (((0, 1, 2), (3, 4)), ((0, 1), (2,), (3, 4), (5,)), (3, 4)),
    "no row has a label": (((0, 1, 2), (3,)), ((0,), (1, 2), (3,), ()), tuple(range(10))),
    "a single token": (((7, 9), (0,)), ((7,), (9,), (0,), ()), (7,)),
}


@dataclass(frozen=True)
class Way:
    """Configuration of a step."""

    kind: str
    limit: MicroBatchLimit
    syncs_every_micro_batch: bool
    reshards: bool
    checkpointing: bool

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in vars(self).items())


def ways(number: int) -> list[Way]:
    """Return four configurations of a deal; three consecutive deals have all layouts and limits."""
    reshards, checkpoints = divmod(number % 4, 2)
    return [
        Way(
            KINDS[(number + sync) % 3],
            LIMITS[unit][(number + 2 * sync) % 3],
            sync,
            bool(reshards ^ sync ^ (unit == "rows")),
            bool(checkpoints ^ (unit == "rows")),
        )
        for sync in (True, False)
        for unit in LIMITS
    ]


def packed(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[int]]:
    """Return a packed row and the tokens of each of its rows."""
    return pack_rows(rows, ignore_index=IGNORED), [len(row["tokens"]) for row in rows]


def runner(model: Decoder, way: Way, **options: Any) -> RecipeStep:
    layout = MicroBatchLayout(kind=way.kind, time=MicroBatchTime(fixed=20.0))
    syncs = {"syncs_every_micro_batch": way.syncs_every_micro_batch} if not options else {}
    run = runner_of(model, way.limit, layout=layout, **syncs, **options)
    run.loss = replace(run.loss, pack=packed)
    return run


def _dealt(deal: str, world_size: int) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the rows of each rank, and all rows."""
    of_two, of_four, unlabelled = DEALS[deal]
    rows = make_rows(LENGTHS, unlabelled=unlabelled)
    numbers: Sequence[Sequence[int]] = {2: of_two, 4: of_four}[world_size]
    return [[rows[number] for number in mine] for mine in numbers], [
        rows[n] for mine in numbers for n in mine
    ]


def errors_of(way: Way, deal: str) -> dict[str, Any]:
    """Return the relative errors of gradients, norm and weights of a step, and wrong counts."""
    world_size, rank = distributed.world_size(), distributed.rank()
    dealt, rows = _dealt(deal, world_size)
    model = Decoder(checkpointing=way.checkpointing)
    reference = copy.deepcopy(model)
    divided(model, reshard_after_forward=way.reshards)
    free = runner(model, way)
    most = max(1, *(len(free.divide(mine)) for mine in dealt))
    expected, loss, label_tokens = by_hand(reference, rows)
    norm = float(torch.nn.utils.get_total_norm(expected.values()))
    found: dict[str, Any] = {}
    for name, limit in (("gradients", None), ("clipped", 0.3 * norm + 1e-9)):
        run = free
        if limit is not None:
            run = runner(model, way, max_grad_norm=limit, sharding=free.sharding)
        result = run.run(dealt[rank])
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        found[name] = relative_error(
            whole_gradients(model), {k: v * scale for k, v in expected.items()}
        )
        if limit is not None:
            found[f"{name}: norm"] = (
                abs(float(result.grad_norm) - norm) / max(norm, 1e-300) if label_tokens else 0.0
            )
        found[f"{name}: loss"] = abs(result.loss - loss) / max(loss, 1e-300)
        found[f"{name}: counts"] = (int(result.num_labels), result.rows, result.tokens) != (
            label_tokens,
            len(rows),
            sum(len(row["tokens"]) for row in rows),
        )
        num_parts = most if label_tokens else 0
        found[f"{name}: micro-batches"] = result.micro_batches != num_parts
        found[f"{name}: padding"] = way.kind == "packed" and result.padding_fraction > 0
        if name != "clipped":
            model.zero_grad(set_to_none=True)
    if label_tokens:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        optimizer.step()
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
        reference.zero_grad(set_to_none=True)
        for name, parameter in reference.named_parameters():
            parameter.grad = expected[name] * scale if name in expected else None
        optimizer.step()
        found["weights after a step"] = relative_error(
            whole_parameters(model), whole_parameters(reference)
        )
    else:
        found["gradients of no label"] = any(
            parameter.grad is not None for parameter in model.parameters()
        )
    return found


def fillers_that_do_not_fit() -> list[str]:
    """Return the errors of all ranks if the last rank, which has no rows, runs out of memory."""
    world_size, rank = distributed.world_size(), distributed.rank()
    dealt, _ = _dealt("the last rank has no rows", world_size)
    model = divided(Decoder())
    run = runner_of(model, limit=MicroBatchLimit(2))
    loss = replace(run.loss, dummy_row=lambda: make_rows([5])[0])
    evaluate = partial(run.evaluate, dealt[rank], loss=loss, sizer=sizer_of(MicroBatchLimit(2)))
    run.run(dealt[rank])
    evaluate()
    model.burden = {"forward": run_out_of_memory} if rank == world_size - 1 else {}
    said = []
    for act in (lambda: run.run(dealt[rank]), evaluate):
        try:
            act()
        except DoesNotFitError as error:
            said.append(str(error))
    return said


def everything() -> dict[str, Any]:
    """Return the facts of one rank. The default dtype is that of the factor of gradients."""
    torch.set_default_dtype(torch.float64)
    world_size = distributed.world_size()
    facts: dict[str, Any] = {"steps": {}}
    for number, deal in enumerate(DEALS):
        for way in ways(number)[number % 4 :: 4] if world_size == 4 else ways(number):
            facts["steps"][str(way), deal] = errors_of(way, deal)
    facts["fillers"] = fillers_that_do_not_fit()
    return facts


@pytest.fixture(
    scope="module",
    params=[pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)],
    ids=lambda n: f"{n} ranks",
)
def ranks(request):
    return run_on_ranks(everything, request.param, timeout=300)


@pytest.mark.slow
def test_gradients_loss_and_norms_are_those_of_one_device(ranks):
    wrong = {
        (rank, *case): off
        for rank, facts in enumerate(ranks)
        for case, errors in facts["steps"].items()
        if (off := {name: error for name, error in errors.items() if not error <= CLOSE})
    }
    assert wrong == {}
    assert {len(facts["steps"]) for facts in ranks} == {len(DEALS) * (1 if len(ranks) == 4 else 4)}


def test_an_oom_of_a_rank_without_rows_names_one_row(ranks):
    where = f"ran out of memory on rank {len(ranks) - 1}, alone in its micro-batch"
    for facts in ranks:
        training, evaluation = facts["fillers"]
        assert training.startswith(f"one row {where}")
        assert evaluation.startswith(f"one row {where}")
