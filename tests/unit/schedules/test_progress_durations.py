"""Durations: units in the value, exact, and never compared across units."""

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress
from adaptive_batch.schedules.progress import Duration, parse_duration

whole = st.integers(1, 10**15)
durations = st.one_of(
    st.builds(Duration, st.floats(0, 1e6, exclude_min=True), st.just("ep")),
    st.builds(Duration, whole, st.just("ba")),
    st.builds(Duration, whole, st.just("sp")),
    st.builds(Duration, whole, st.just("tok")),
)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("2ep", Duration(2, "ep")),
        ("0.5ep", Duration(0.5, "ep")),
        ("100ba", Duration(100, "ba")),
        ("10000sp", Duration(10_000, "sp")),
        ("1.5e6tok", Duration(1_500_000, "tok")),
        (" 1e3 ba ", Duration(1000, "ba")),
        ("10_000sp", Duration(10_000, "sp")),
    ],
)
def test_the_unit_is_in_the_value(text, duration):
    assert parse_duration(text, key="over") == duration


@given(durations)
def test_its_text_is_read_back_as_the_same_duration(duration):
    again = parse_duration(str(duration), key="over")
    assert again == duration
    assert pickle.loads(pickle.dumps(duration)) == duration


@pytest.mark.parametrize(
    ("value", "says"),
    [
        *(
            (value, "give a number with a unit")
            for value in (100, "1.5", "", "nan", "10dur", "10 batches", "2EP", None, True, ["1ep"])
        ),
        ("ep", "write it such as 2ep"),
        ("1,000ba", "write it such as 2ba"),
        *(
            (value, "with a finite number above 0")
            for value in ("xep", "0ba", "-1ep", "infep", "nanba", "1e400tok")
        ),
        ("1.5ba", "ba are counted in whole ones"),
        ("0.5sp", "sp are counted in whole ones"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_would_do(value, says):
    with pytest.raises(SettingError) as caught:
        parse_duration(value, key="over")
    assert str(caught.value).startswith(f"over={value!r}: ")
    assert says in str(caught.value)


def test_each_unit_reads_its_own_part_of_progress():
    progress = Progress(
        epoch=1, epoch_rows=25, rows_per_epoch=100, steps=7, samples=125, tokens=4000
    )
    shares = {unit: Duration(5, unit).share(progress) for unit in ("ep", "ba", "sp", "tok")}
    assert shares == {"ep": Fraction(1, 4), "ba": Fraction(7, 5), "sp": 25, "tok": 800}


def test_an_epoch_of_unknown_length_has_no_parts():
    assert Duration(1, "ep").share(Progress(epoch=1, epoch_rows=25)) == 1


@given(rows=st.integers(1, 2000), part=st.data())
def test_a_part_of_an_epoch_is_reached_at_its_row_whatever_floats_say(rows, part):
    """0.1 x 3 is above 0.3 in floats; here 3 rows of 10 are three tenths."""
    row, epoch = part.draw(st.integers(1, rows * 10)), part.draw(st.integers(0, 50))
    duration = parse_duration(f"{epoch + row / (rows * 10):.9f}ep", key="over")
    at = Progress(epoch=epoch, epoch_rows=min(rows, -(-row // 10) + 1), rows_per_epoch=rows)
    assert duration.share(at) >= 1 or at.epoch_rows == rows
    for tenth in range(1, 10):
        at = Progress(epoch=epoch, epoch_rows=tenth * rows, rows_per_epoch=10 * rows)
        duration = parse_duration(f"{epoch}.{tenth}ep", key="over")
        assert duration.share(at) == 1
        assert (
            duration.share(
                Progress(epoch=epoch, epoch_rows=tenth * rows - 1, rows_per_epoch=10 * rows)
            )
            < 1
        )


def test_units_are_not_equal_by_accident():
    assert len({Duration(1, unit) for unit in ("ep", "ba", "sp", "tok")}) == 4
