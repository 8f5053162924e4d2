"""Progress, plans of an epoch, and durations with their units."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.schedules import Progress
from adaptive_batch.schedules.progress import Duration, parse_duration


def test_progress_is_restored_from_its_state():
    progress = (
        Progress(rows_per_epoch=8)
        .after_step(rows=8, tokens=100)
        .after_epoch()
        .after_step(rows=4, tokens=50)
    )
    assert Progress(**progress.state_dict()) == progress
    done = {"steps": 2, "samples": 12, "tokens": 150, "rows_per_epoch": 8}
    assert progress == Progress(epoch=1, epoch_rows=4, epoch_steps=1, epoch_tokens=50, **done)
    assert progress.epochs == 1.5
    assert Progress(epoch=3, epoch_rows=5).epochs == 3.0  # an epoch of unknown length


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("0.5ep", Duration(0.5, "ep")),
        ("1.5e6tok", Duration(1_500_000, "tok")),
        (" 1e3 ba ", Duration(1000, "ba")),
        ("10_000sp", Duration(10_000, "sp")),
    ],
)
def test_a_duration_is_read_with_its_unit(text, duration):
    assert parse_duration(text, key="over") == duration


def test_each_unit_reads_its_own_part_of_progress():
    progress = Progress(
        epoch=1, epoch_rows=25, rows_per_epoch=100, steps=7, samples=125, tokens=4000
    )
    shares = {unit: Duration(5, unit).share(progress) for unit in ("ep", "ba", "sp", "tok")}
    assert shares == {"ep": Fraction(1, 4), "ba": Fraction(7, 5), "sp": 25, "tok": 800}
    # An epoch of unknown length has no fractions.
    assert Duration(1, "ep").share(Progress(epoch=1, epoch_rows=25)) == 1


@given(rows=st.integers(1, 2000), epoch=st.integers(0, 50), tenth=st.integers(1, 9))
def test_a_fraction_of_an_epoch_ends_at_its_row_exactly(rows, epoch, tenth):
    """In floats, 0.1 x 3 is above 0.3; here it is 3 rows of 10."""
    duration = parse_duration(f"{epoch}.{tenth}ep", key="over")
    at = Progress(epoch=epoch, epoch_rows=tenth * rows, rows_per_epoch=10 * rows)
    assert duration.share(at) == 1
    assert duration.share(replace(at, epoch_rows=tenth * rows - 1)) < 1
