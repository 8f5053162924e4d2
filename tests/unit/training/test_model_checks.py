"""Compilations are counted, and their garbage is freed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.sharded_model import Decoder, collate, make_rows, token_losses

from adaptive_batch import AdaptiveStep
from adaptive_batch.training.model_checks import Compilations


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def doubled(tensor):
    return (2 * tensor).sum()


def run(function, *sizes):
    for size in sizes:
        function(torch.ones(size, requires_grad=True)).backward()


def compiled(**how):
    return torch.compile(doubled, backend="aot_eager", **how)


def compiled_decoder():
    """A model that is compiled for each shape anew."""
    model = Decoder()
    model.compile(backend="aot_eager", dynamic=False)
    return model


def test_compilations_inside_are_counted_with_their_seconds():
    function = compiled()
    with Compilations() as compilations:
        run(function, 3)
        first = compilations.number
        assert first > 0
        assert compilations.seconds > 0
        run(function, 3)
        assert compilations.number == first
        run(function, 5, 7)
        again = compilations.number
        assert again > first
    run(function, 1)
    assert compilations.number == again


ROWS = make_rows([5, 5, 7, 7, 9, 9, 5, 5])


class Left:
    def __init__(self):
        self.itself = self


def left_behind():
    """Return a reference to what only a collection of the oldest generation frees; torch itself
    collects the younger ones after it has compiled.
    """
    left = Left()
    gc.collect(1)
    return weakref.ref(left)


@pytest.fixture
def _no_automatic_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_automatic_collection")
def test_cycles_that_compiling_leaves_are_freed_before_backward():
    model, is_freed = compiled_decoder(), []

    def forward_backward(part):
        left = left_behind()
        loss = token_losses(model, part.batch, "mean") * part.share
        is_freed.append(left() is None)
        loss.backward()

    step = AdaptiveStep(model, forward_backward)
    for place in range(0, len(ROWS), 2):
        step(collate(ROWS[place : place + 2]))
    # The last is of the first one's length.
    assert is_freed == [True, True, True, False]
