"""The limit shrinks to less than what failed, and as often as it takes for one row to be left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training_cases import CPU

from adaptive_batch.data import MicroBatch, MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB, Room
from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.training import ConfiguredSize, MicroBatchSizer, OOMPolicy

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=24)
UNITS = st.sampled_from(["rows", "tokens"])
CAPACITIES = st.builds(MicroBatchLimit, st.integers(1, 200), UNITS)
SHAPES = st.builds(
    MicroBatchLayout,
    uniform=st.sampled_from([None, "rows", "lengths", "both"]),
    pad_to_multiple_of=st.integers(1, 8),
    longest=st.none() | st.integers(1, 40),
)


def smaller_limit(limit, failed, *, memory=None, error=""):
    """Return the limit that is asked for after a micro-batch ran out of memory."""
    size = {f"micro_batch_{'size' if limit.unit == 'rows' else 'tokens'}": limit.amount}
    sizer = MicroBatchSizer(ConfiguredSize(**size), memory=memory)
    sizer.begin_step(limit.amount)
    return sizer.after_out_of_memory(failed, error, failures=1).limit


def may_hold(capacity, rows, length):
    return (rows if capacity.unit == "rows" else rows * length) <= capacity.amount


@given(LENGTHS, CAPACITIES, SHAPES)
def test_with_a_lower_limit_no_micro_batch_is_as_large_as_the_one_that_was_too_large(
    lengths, capacity, shapes
):
    for piece in micro_batches(lengths, capacity, shapes):
        lower = smaller_limit(capacity, piece)
        if lower is None:
            assert len(piece.rows) == 1
            continue
        assert 1 <= lower.amount < capacity.amount
        assert lower.unit == capacity.unit
        assert not may_hold(lower, len(piece.rows), piece.length)
        for other in micro_batches(lengths, lower, shapes):
            assert not set(piece.rows) <= set(other.rows)
            assert len(other.rows) < len(piece.rows) or other.length < piece.length


class Device(CountedMemory):
    """A device that has room for `fits` rows of 1 GiB."""

    def __init__(self, fits):
        super().__init__(CPU)
        self.fits = fits

    def room(self):
        return None if self.fits is None else Room(GIB, (1 + self.fits) * GIB)


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_a_limit_becomes_half_or_what_is_known_to_fit_and_at_least_a_row(unit):
    limit, row = MicroBatchLimit(640, unit), 1 if unit == "rows" else 10

    def smaller(rows, fits):
        error = (
            f"Tried to allocate {rows}.00 GiB. Of the allocated memory 1.00 GiB is allocated by"
            " PyTorch"
        )
        failed = MicroBatch([*range(rows)], 10)
        lower = smaller_limit(limit, failed, memory=Device(fits), error=error)
        return lower and lower.amount / row

    assert smaller(32, None) == 16
    assert smaller(32, 20) == 20
    assert smaller(32, 99) == 30  # it did not fit
    assert (smaller(32, 1), smaller(2, None)) == (1, 1)
    assert smaller(1, None) is smaller(1, 20) is None


def test_no_policy_tries_again_at_once():
    with pytest.raises(SettingError, match="grow_after=0: give 1 or more"):
        OOMPolicy(grow_after=0)
