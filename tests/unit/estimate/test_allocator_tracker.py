"""The log of a step on fake tensors, and its composition by kind."""

from __future__ import annotations

from array import array

import pytest
from support.fake_steps import LENGTH, WORDS, Decoder, fake_step
from torch import nn, ones

from adaptive_batch.estimate.allocator import LoggingTracker, Phase
from adaptive_batch.memory import MemoryTracker

ROWS = 4
# In float32.
LOGITS = ROWS * LENGTH * WORDS * 4
GRADIENTS = sum(4 * each.numel() for each in Decoder().parameters() if each.requires_grad)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_kinds_add_up_to_the_peak(checkpointing, accumulates):
    step = fake_step(checkpointing=checkpointing, accumulates=accumulates)
    peak = max(step.trace(ROWS).live_bytes)
    composition = step.composition(ROWS, step.forward_backward)
    assert sum(composition.values()) == peak
    assert composition["parameters"] == step.resident.parameters
    assert composition["optimizer state"] == step.resident.optimizer
    assert composition["activations"] >= LOGITS
    if accumulates:
        assert composition["gradients"] == GRADIENTS
    elif checkpointing:
        # Some exist when a layer is recomputed.
        assert 0 < composition["gradients"] < GRADIENTS
    else:
        # Backward of the loss.
        assert composition["gradients"] == 0
        assert composition["backward temporaries"] >= LOGITS


def test_checkpointing_saves_fewer_activations():
    kept, recomputed = (
        step.composition(ROWS, step.forward_backward)["activations"]
        for step in (fake_step(), fake_step(checkpointing=True))
    )
    assert recomputed < kept


def test_kinds_are_those_of_the_first_peak():
    log = array("q", [40, 30, ~1, 50, 20, ~3, 20])
    phase = Phase(
        log,
        before=(("model", 0, 0),),
        after={("gradient", 0, 0): 3},
        once=((1, 8),),
        activations=frozenset({1, 2}),
    )
    assert phase.held_at_peak() == {"activations": 30, "gradients": 50, "backward temporaries": 28}


def test_a_logging_tracker_counts_like_a_memory_tracker():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    traces = []
    for counter in (MemoryTracker(2**40), LoggingTracker()):
        counter.add(model.parameters())
        with counter:
            model(ones(5, 32)).sum().backward()
        traces.append((list(counter.trace().live_bytes), counter.peak_bytes))
        model.zero_grad(set_to_none=True)
    assert traces[0] == traces[1]
