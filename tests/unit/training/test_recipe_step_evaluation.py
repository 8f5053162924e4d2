"""The loss of many rows does not depend on what fits at once, and evaluating changes nothing about
training.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.fault_injection import IGNORED, Decoder, collate, mean_loss
from support.runners import HeldSizer, build_runner
from support.training_cases import VOCABULARY

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.training import Evaluator

FOUR = MicroBatchLimit(4)


class Validated:
    """A small model with dropout in training mode but for a part of it, and what evaluates it."""

    def __init__(self, capacity=FOUR, **settings):
        torch.manual_seed(0)
        self.model = Decoder(checkpointing=False).double()
        self.model.layer.norm.eval()
        self.shapes_run, self.changes, self.changes_in_training = [], [], []
        self.too_large = lambda tokens: False
        self.engine = build_runner(
            self.model,
            MicroBatchLimit(8),
            collate=collate,
            mean_loss=self.mean_loss,
            on_change=self.changes_in_training.append,
            **settings,
        )
        self.evaluator = Evaluator(
            self.engine, self.engine.loss, HeldSizer(capacity, on_change=self.changes.append)
        )

    def mean_loss(self, batch):
        self.shapes_run.append(tuple(batch["tokens"].shape))
        if self.too_large(batch["tokens"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss = mean_loss(self.model, batch)
        assert not loss.requires_grad
        return loss

    def modes(self):
        return [module.training for module in self.model.modules()]


def row(length, *, masked=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
    return {"tokens": tokens, "labels": [IGNORED] * masked + tokens[masked:]}


CAPACITIES = st.one_of(
    st.builds(MicroBatchLimit, st.integers(1, most), st.just(unit))
    for most, unit in ((9, "rows"), (150, "tokens"))
)


@st.composite
def rows(draw):
    length = draw(st.integers(2, 16))
    return row(length, masked=draw(st.integers(0, length)), seed=draw(st.integers(0, 99)))


def mean_of_label_tokens(model, batch):
    """Row by row."""
    model.eval()
    counts = [sum(label != IGNORED for label in one["labels"][1:]) for one in batch]
    with torch.no_grad():
        sums = [
            float(mean_loss(model, collate([one]))) * count
            for one, count in zip(batch, counts, strict=True)
            if count
        ]
    return sum(sums) / sum(counts) if sum(counts) else math.nan


@given(batch=st.lists(rows(), max_size=9), capacity=CAPACITIES)
@examples(60)
def test_the_loss_is_the_mean_over_all_label_tokens_whatever_the_limit(batch, capacity):
    validated = Validated(capacity)
    found = validated.evaluator.run(iter(batch))
    assert found == pytest.approx(
        mean_of_label_tokens(validated.model, batch), rel=1e-12, nan_ok=True
    )


@pytest.mark.parametrize(
    "batch", [[], [row(5, masked=5)], [row(3, masked=3), row(4, masked=4)]], ids=len
)
def test_without_labels_the_loss_is_nan_and_nothing_is_run(batch):
    validated = Validated()
    assert math.isnan(validated.evaluator.run(batch))
    assert validated.shapes_run == []


@pytest.mark.parametrize("error", [ValueError("a bad row"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["forward", "rows"])
def test_each_module_is_put_back_after_an_error(error, place):
    validated = Validated()
    before = validated.modes()

    def fail(tokens):
        raise error

    def rows():
        yield row(5)
        if place == "rows":
            fail(None)

    if place == "forward":
        validated.too_large = fail
    with pytest.raises(type(error)) as caught:
        validated.evaluator.run(rows())
    assert caught.value is error
    assert validated.modes() == before
    assert len(validated.shapes_run) == (place == "forward")


def test_gradients_statistics_and_random_numbers_are_as_they_were():
    validated = Validated()
    for parameter in validated.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: tensor.clone() for name, tensor in validated.model.state_dict().items()}
    random_state = torch.get_rng_state()
    validated.evaluator.run([row(5), row(6)])
    assert all((parameter.grad == 1).all() for parameter in validated.model.parameters())
    after = validated.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("capacity", "after"),
    [
        (MicroBatchLimit(8), MicroBatchLimit(2)),
        (MicroBatchLimit(72, "tokens"), MicroBatchLimit(18, "tokens")),
    ],
    ids=str,
)
def test_running_out_lowers_its_own_limit_and_never_that_of_training(capacity, after):
    batch = [row(9, masked=seed % 4, seed=seed) for seed in range(8)]
    expected = Validated(capacity).evaluator.run(batch)
    validated = Validated(capacity)
    before = validated.modes()
    validated.too_large = lambda tokens: tokens.shape[0] > 2
    assert validated.evaluator.run(batch) == pytest.approx(expected, rel=1e-12)
    assert validated.evaluator.limit == after
    assert [change.grows for change in validated.changes] == [False, False]
    assert (validated.engine.sizer.limit(), validated.changes_in_training) == (
        MicroBatchLimit(8),
        [],
    )
    assert validated.modes() == before
    validated.shapes_run.clear()
    validated.evaluator.run(batch)
    assert {shape[0] for shape in validated.shapes_run} == {2}
