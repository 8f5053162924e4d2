"""Cyclic garbage of the compiler is freed before backward."""

from __future__ import annotations

import gc
import weakref

import torch
from support.sharded_model import Decoder, collate, make_rows, token_losses

from adaptive_batch import AdaptiveStep

ROWS = make_rows([5, 5, 7, 7, 9, 9, 5, 5])


class Left:
    def __init__(self):
        self.itself = self


def left_behind():
    """Return a weak reference to an object that only a full garbage collection frees."""
    left = Left()
    gc.collect(1)
    return weakref.ref(left)


def test_cyclic_garbage_of_a_compilation_is_freed_before_backward():
    torch.compiler.reset()
    model, is_freed = Decoder(), []
    # The model is compiled again for each shape.
    model.compile(backend="aot_eager", dynamic=False)

    def forward_backward(part):
        left = left_behind()
        loss = token_losses(model, part.batch, "mean") * part.share
        is_freed.append(left() is None)
        loss.backward()

    step = AdaptiveStep(model, forward_backward)
    gc.disable()
    try:
        for place in range(0, len(ROWS), 2):
            step(collate(ROWS[place : place + 2]))
    finally:
        gc.enable()
        torch.compiler.reset()
    # The last batch has the length of the first.
    assert is_freed == [True, True, True, False]
