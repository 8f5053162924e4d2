"""The log of a fake run: its phases follow each other, and sizes at other rows lie on a straight
line.
"""

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
from adaptive_batch.estimate.step_log import Phase, joined


def alive(log):
    """Return the sizes that are left; fails where something is freed that is not there."""
    sizes, left = [], {}
    for entry in log:
        if entry > 0:
            left[len(sizes)] = entry
            sizes.append(entry)
        else:
            del left[~entry]
    return sorted(left.values())


@pytest.mark.parametrize("options", [{}, {"accumulates": True}, {"in_backward": True}])
def test_steps_leave_weights_and_states_alone(options):
    step = fake_step("AdamW foreach", **options)
    logs = [step.log(4, num_steps=steps, micro_batches=3) for steps in (1, 2, 5)]
    assert alive(logs[0]) == alive(logs[1]) == alive(logs[2])
    assert peak_bytes(logs[1]) == peak_bytes(logs[2])
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    assert (
        sum(alive(logs[0])) >= 3 * weights - step.model.scale.nbytes * 2
    )  # whose steps are counted on the host


def test_sizes_between_rows_that_were_traced_are_those_of_a_trace():
    traced, between = fake_step(), fake_step()
    traced.trace(7)
    for rows in (2, 3):
        between.trace(rows)
    assert traced.is_traced(7)
    assert not between.is_traced(7)
    assert between.log(7) == traced.log(7)


def test_a_micro_batch_after_the_first_frees_the_gradients_that_it_adds():
    step = fake_step(accumulates=True)
    one, two = (step.log(2, num_steps=1, micro_batches=count) for count in (1, 2))
    assert alive(one) == alive(two)
    assert len(two) > len(one)


def test_what_is_kept_from_the_first_time_on_may_be_taken_at_one_place():
    product = Phase(array("q", [512, ~0]), (), {}, once=((1, 32), (1, 8)))
    assert list(joined([(product, True), (product, False)])) == [512, 32, 8, ~0, 512, ~3]


def test_cublas_takes_a_workspace_for_forward_and_one_for_backward_once():
    with torch.device("meta"):
        model = Decoder()
    step = fake_step(model=model, device=FakeDevice(CudaKernels((8, 0))))
    log = step.log(2)
    assert list(log).count(8_519_680) == 2
    assert alive(log).count(8_519_680) == 2


def test_sizes_beyond_those_that_were_traced_stay_allocations():
    """What grows with the square of a length is none where it is extrapolated to short ones."""
    long, short = (Phase(array("q", [size, size**2, ~0, ~1]), (), {}) for size in (100, 75))
    far = short.between(long, Fraction(-2))
    assert list(far.log) == [25, 1, ~0, ~1]
    assert peak_bytes(joined([(far, True)])) == 26


@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 2**40)] * 2), min_size=1, max_size=8),
    share=st.fractions(-4, 8, max_denominator=2**14),
)
def test_sizes_between_two_logs_are_rounded_up_exactly(sizes, share):
    few, more = (Phase(array("q", [*column, ~0]), (), {}) for column in zip(*sizes, strict=True))
    log = few.between(more, share).log
    assert log[-1] == ~0
    for size, larger, between in zip(few.log[:-1], more.log[:-1], log[:-1], strict=True):
        assert between == max(1, math.ceil(size + (larger - size) * share))
