"""The log of a fake run: successive phases, and interpolated sizes."""

from __future__ import annotations

import math
from array import array
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_steps import Decoder, fake_step
from support.step_logs import peak_bytes

from adaptive_batch.estimate import CudaKernels, FakeDevice
from adaptive_batch.estimate.allocator import Phase, join_phases


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
    assert sum(alive(logs[0])) >= 3 * weights - step.model.scale.nbytes * 2


def test_interpolated_sizes_are_those_of_a_trace():
    traced, between = fake_step(), fake_step()
    traced.trace(7)
    for rows in (2, 3):
        between.trace(rows)
    assert traced.is_traced(7)
    assert not between.is_traced(7)
    assert between.log(7) == traced.log(7)


def test_later_micro_batches_free_their_gradients():
    step = fake_step(accumulates=True)
    one, two = (step.log(2, num_steps=1, micro_batches=count) for count in (1, 2))
    assert alive(one) == alive(two)
    assert len(two) > len(one)


def test_allocations_of_the_first_run_are_joined_once():
    product = Phase(array("q", [512, ~0]), (), {}, once=((1, 32), (1, 8)))
    assert list(join_phases([(product, True), (product, False)])) == [512, 32, 8, ~0, 512, ~3]


def test_cublas_has_one_workspace_each_for_forward_and_backward():
    with torch.device("meta"):
        model = Decoder()
    step = fake_step(model=model, device=FakeDevice(CudaKernels((8, 0))))
    log = step.log(2)
    assert list(log).count(8_519_680) == 2
    assert alive(log).count(8_519_680) == 2


def test_extrapolated_sizes_stay_positive():
    """Sizes that grow with the square of a length would be negative for short ones."""
    long, short = (Phase(array("q", [size, size**2, ~0, ~1]), (), {}) for size in (100, 75))
    far = short.between(long, Fraction(-2))
    assert list(far.log) == [25, 1, ~0, ~1]
    assert peak_bytes(join_phases([(far, True)])) == 26


@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 2**40)] * 2), min_size=1, max_size=8),
    share=st.fractions(-4, 8, max_denominator=2**14),
)
def test_interpolated_sizes_are_rounded_up_exactly(sizes, share):
    few, more = (Phase(array("q", [*column, ~0]), (), {}) for column in zip(*sizes, strict=True))
    log = few.between(more, share).log
    assert log[-1] == ~0
    for size, larger, between in zip(few.log[:-1], more.log[:-1], log[:-1], strict=True):
        assert between == max(1, math.ceil(size + (larger - size) * share))
