"""However the rows of a step lie in micro-batches, padded, grouped or packed, and on how many
ranks: the gradients are the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import run_on_ranks
from support.sharded_model import (
    IGNORED,
    WIDTH,
    Decoder,
    Row,
    by_hand,
    divided,
    make_rows,
    relative_error,
    runner_of,
    twin,
    whole_gradients,
)
from torch import nn
from torch.nn.functional import cross_entropy

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit, MicroBatchTime, balance_by_tokens
from adaptive_batch.training import RecipeStep, pack_rows

CLOSE = 1e-12
KINDS = ("padded", "grouped", "packed")
LIMITS = (
    MicroBatchLimit(1),
    MicroBatchLimit(3),
    MicroBatchLimit(64),
    MicroBatchLimit(8, "tokens"),
    MicroBatchLimit(25, "tokens"),
    MicroBatchLimit(900, "tokens"),
)


class Positioned(Decoder):
    """The small transformer with an embedding of positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.positions = nn.Embedding(40, WIDTH, dtype=torch.float64)
        self.given: torch.Tensor | None = None
        self.embed.register_forward_hook(self._add_positions)

    def _add_positions(
        self, _: nn.Module, inputs: tuple[torch.Tensor], embedded: torch.Tensor
    ) -> torch.Tensor:
        given = torch.arange(inputs[0].shape[1])[None] if self.given is None else self.given
        return embedded + self.positions(given)


def mean_loss(model: Positioned, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.given = batch.get("input_pos")
    try:
        logits = model(batch["tokens"])[:, :-1]
    finally:
        model.given = None
    return cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED
    )


def packed(rows: Sequence[dict[str, Any]], form: object) -> tuple[dict[str, Any], list[int]]:
    """Rows laid end to end, and the tokens of each."""
    return pack_rows(rows, ignore_index=IGNORED), [len(row["tokens"]) for row in rows]


def runner(
    model: Positioned, limit: MicroBatchLimit, layout: MicroBatchLayout, **options: Any
) -> RecipeStep:
    run = runner_of(model, limit, mean_loss=partial(mean_loss, model), layout=layout, **options)
    run.loss = replace(run.loss, join=packed)
    return run


def deals(world_size: int) -> dict[str, list[list[Row]]]:
    """The rows of each rank: as recipes deal them, and by no rule at all."""
    draw, found = random.Random(world_size), {}
    for name, number, unlabelled in (
        ("many", 23, (2, 9, 17)),
        ("few", 3, (1,)),
        ("of no label", 4, (0, 1, 2, 3)),
    ):
        rows = make_rows(
            [draw.randint(1, 30) for _ in range(number)], unlabelled=unlabelled, seed=number
        )
        owners = [draw.randrange(world_size) for _ in rows]
        found[f"{name}, anywhere"] = [
            [row for row, owner in zip(rows, owners, strict=True) if owner == rank]
            for rank in range(world_size)
        ]
        for kind in ("grouped", "packed"):
            lengths = [len(row["tokens"]) for row in rows]
            dealt = balance_by_tokens(lengths, world_size, LIMITS[4], MicroBatchLayout(kind=kind))
            found[f"{name}, {kind}"] = [[rows[number] for number in numbers] for numbers in dealt]
    return found


def errors() -> dict[tuple[str, str, str, bool], tuple[float, bool, bool]]:
    """For each deal, kind and limit: how far gradients and loss are from those by hand, and whether
    counts are wrong.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of what gradients are multiplied by
    try:
        return _errors(checkpointing=False) | _errors(checkpointing=True)
    finally:
        torch.set_default_dtype(before)


def _errors(*, checkpointing: bool) -> dict[tuple[str, str, str, bool], tuple[float, bool, bool]]:
    world_size, rank = distributed.world_size(), distributed.rank()
    model = Positioned(checkpointing=checkpointing)
    reference = twin(model)
    reference.embed._forward_hooks.clear()
    reference.embed.register_forward_hook(reference._add_positions)
    divided(model)
    found = {}
    runs = {
        (kind, limit): runner(
            model, limit, MicroBatchLayout(kind=kind, time=MicroBatchTime(fixed=20.0))
        )
        for kind in KINDS
        for limit in LIMITS
    }
    for number, (deal, dealt) in enumerate(deals(world_size).items()):
        if world_size > 1 and number % 2 != checkpointing:
            continue
        rows = [row for mine in dealt for row in mine]
        expected, loss, label_tokens = by_hand(reference, rows)
        for (kind, limit), run in runs.items():
            if (
                world_size > 1 and LIMITS.index(limit) % 3 != number % 3
            ):  # on several ranks each deal has two of the limits
                continue
            run.drop_gradients()
            result = run.run(dealt[rank])
            real = sum(len(row["tokens"]) for row in rows)
            counts = (int(result.label_tokens), result.rows, result.tokens) == (
                label_tokens,
                len(rows),
                real,
            )
            error = max(
                relative_error(whole_gradients(model), expected),
                abs(result.loss - loss) / max(loss, 1e-300),
            )
            is_padded = result.padding_fraction > 0
            found[deal, kind, str(limit), checkpointing] = error, counts, is_padded
    return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, marks=pytest.mark.slow),
        2,
        pytest.param(4, marks=pytest.mark.nightly),
    ],
    ids=lambda n: f"{n} ranks",
)
def ranks(request):
    if request.param == 1:
        return [errors()]
    return run_on_ranks(errors, request.param, timeout=300)


@pytest.mark.slow
def test_gradients_loss_and_counts_are_those_of_rows_one_by_one(ranks):
    for facts in ranks:
        assert len(facts) == 9 * len(KINDS) * (2 * len(LIMITS) if len(ranks) == 1 else 2)
        assert {
            case: error
            for case, (error, counts, _) in facts.items()
            if not (error <= CLOSE and counts)
        } == {}


def test_packed_rows_have_no_padding(ranks):
    padded = {case for facts in ranks for case, (*_, is_padded) in facts.items() if is_padded}
    assert {kind for _, kind, *_ in padded} == {"padded", "grouped"}
