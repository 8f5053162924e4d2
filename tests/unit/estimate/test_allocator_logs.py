"""The log of a fake run: successive phases, interpolated sizes, and kinds of memory."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_steps import LENGTH, WORDS, Decoder, fake_step
from support.step_logs import peak_bytes

from adaptive_batch.estimate.allocator import FirstAllocation, Phase, join_phases


def alive(log):
    """Return the sizes that remain; fail if a storage is freed twice."""
    sizes, left = [], {}
    for entry in log:
        if entry > 0:
            left[len(sizes)] = entry
            sizes.append(entry)
        else:
            del left[~entry]
    return sorted(left.values())


@pytest.mark.parametrize("options", [{}, {"accumulates": True}, {"in_backward": True}])
def test_only_weights_and_states_remain_after_a_step(options):
    step = fake_step("AdamW foreach", **options)
    logs = [step.log(4, num_steps=steps, micro_batches=3) for steps in (1, 2, 5)]
    assert alive(logs[0]) == alive(logs[1]) == alive(logs[2])
    assert peak_bytes(logs[1]) == peak_bytes(logs[2])
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    frozen = sum(parameter.nbytes for parameter in step.model.frozen.parameters())
    assert sum(alive(logs[0])) >= 3 * weights - 2 * frozen


def test_interpolated_sizes_are_those_of_a_trace():
    traced, between = fake_step(), fake_step()
    traced.trace(7)
    for rows in (2, 3):
        between.trace(rows)
    assert traced.is_traced(7)
    assert not between.is_traced(7)
    assert between.log(7) == traced.log(7)


def test_allocations_of_the_first_run_are_joined_once():
    product = Phase(array("q", [512, ~0]), (), {}, (FirstAllocation(1, 32), FirstAllocation(1, 8)))
    assert list(join_phases([(product, True), (product, False)])) == [512, 32, 8, ~0, 512, ~3]


@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 2**40)] * 2), min_size=1, max_size=8),
    share=st.fractions(-4, 8, max_denominator=2**14),
)
def test_interpolated_sizes_are_rounded_up_exactly(sizes, share):
    few, more = (Phase(array("q", [*column, ~0]), (), {}) for column in zip(*sizes, strict=True))
    log = few.interpolate(more, share).log
    assert log[-1] == ~0
    for size, larger, between in zip(few.log[:-1], more.log[:-1], log[:-1], strict=True):
        assert between == max(1, math.ceil(size + (larger - size) * share))


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
