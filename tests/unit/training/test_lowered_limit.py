"""The limit shrinks to less than what failed, and as often as it takes for one row to be left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.errors import SettingError
from adaptive_batch.training import OOMPolicy

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=24)
UNITS = st.sampled_from(["rows", "tokens"])
CAPACITIES = st.builds(MicroBatchLimit, st.integers(1, 200), UNITS)
SHAPES = st.builds(
    MicroBatchLayout,
    uniform=st.sampled_from([None, "rows", "lengths", "both"]),
    pad_to_multiple_of=st.integers(1, 8),
    longest=st.none() | st.integers(1, 40),
)


def may_hold(capacity, rows, length):
    return (rows if capacity.unit == "rows" else rows * length) <= capacity.amount


@given(
    LENGTHS,
    CAPACITIES,
    SHAPES,
    st.sampled_from([OOMPolicy().after_out_of_memory, OOMPolicy().after_allocator_retry]),
)
def test_with_a_lower_limit_no_micro_batch_is_as_large_as_the_one_that_was_too_large(
    lengths, capacity, shapes, how
):
    for piece in micro_batches(lengths, capacity, shapes):
        lower = how(capacity, rows=len(piece.rows), length=piece.length)
        if lower is None:
            assert len(piece.rows) == 1
            continue
        assert 1 <= lower.amount < capacity.amount
        assert lower.unit == capacity.unit
        assert not may_hold(lower, len(piece.rows), piece.length)
        for other in micro_batches(lengths, lower, shapes):
            assert not set(piece.rows) <= set(other.rows)
            assert len(other.rows) < len(piece.rows) or other.length < piece.length


@given(LENGTHS, CAPACITIES, SHAPES, st.data())
def test_halving_whatever_does_not_fit_ends_with_what_fits_or_one_row(
    lengths, capacity, shapes, data
):
    """Within as many failures as the first micro-batch can be halved, whatever the device holds."""
    device_holds = data.draw(st.integers(0, 30 * 24))
    failures = 0
    while too_large := [
        piece
        for piece in micro_batches(lengths, capacity, shapes)
        if len(piece.rows) > 1 and len(piece.rows) * piece.length > device_holds
    ]:
        failed = data.draw(st.sampled_from(too_large))
        capacity = OOMPolicy().after_out_of_memory(
            capacity, rows=len(failed.rows), length=failed.length
        )
        failures += 1
        assert failures <= (24 * 40).bit_length()


@given(rows=st.integers(2, 500), length=st.integers(1, 100), unit=UNITS)
def test_limit_is_halved_to_half_and_reduced_by_a_sixteenth(rows, length, unit):
    tokens = length if unit == "tokens" else 1
    capacity = MicroBatchLimit(10**6, unit)
    assert OOMPolicy().after_out_of_memory(capacity, rows=rows, length=length) == MicroBatchLimit(
        rows * tokens // 2, unit
    )
    reduced = OOMPolicy().after_allocator_retry(capacity, rows=rows, length=length)
    assert may_hold(reduced, rows - max(1, rows // 16), length)
    assert not may_hold(reduced, rows - max(1, rows // 16) + 1, length)


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_one_row_cannot_be_halved(unit):
    assert OOMPolicy().after_out_of_memory(MicroBatchLimit(64, unit), rows=1, length=64) is None
    assert OOMPolicy().after_allocator_retry(MicroBatchLimit(64, unit), rows=1, length=64) is None


def test_no_policy_leaves_less_than_one_row_or_shrinks_nothing():
    policy = OOMPolicy(shrink_divisor=4)
    assert policy.after_out_of_memory(MicroBatchLimit(2), rows=2, length=10) == MicroBatchLimit(1)
    assert policy.after_out_of_memory(
        MicroBatchLimit(20, "tokens"), rows=2, length=10
    ) == MicroBatchLimit(10, "tokens")
    with pytest.raises(SettingError, match="shrink_divisor=1: give 2 or more"):
        OOMPolicy(shrink_divisor=1)


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_a_policy_of_ones_own_shrinks_by_what_it_says(unit):
    limit, policy = MicroBatchLimit(64, unit), OOMPolicy(shrink_divisor=4, ease_divisor=8)
    tokens = 10 if unit == "tokens" else 1
    assert policy.after_out_of_memory(limit, rows=16, length=10) == MicroBatchLimit(
        4 * tokens, unit
    )
    assert policy.after_allocator_retry(limit, rows=16, length=10) == MicroBatchLimit(
        14 * tokens, unit
    )
