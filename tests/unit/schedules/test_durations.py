"""Durations: units in the value, exact, and never compared across units."""

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress
from adaptive_batch.schedules.durations import Epochs, Samples, Steps, Tokens, parse_duration

whole = st.integers(0, 10**15)
durations = st.one_of(
    st.builds(Epochs, st.floats(0, 1e6, allow_nan=False)),
    st.builds(Steps, whole),
    st.builds(Samples, whole),
    st.builds(Tokens, whole),
)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("2ep", Epochs(2)),
        ("0.5ep", Epochs(0.5)),
        ("100ba", Steps(100)),
        ("10000sp", Samples(10_000)),
        ("1.5e6tok", Tokens(1_500_000)),
        (" 1e3 ba ", Steps(1000)),
        ("10_000sp", Samples(10_000)),
        ("0ba", Steps(0)),
    ],
)
def test_the_unit_is_in_the_value(text, duration):
    assert parse_duration(text, key="over") == duration


@given(durations)
def test_its_text_is_read_back_as_the_same_duration(duration):
    again = parse_duration(str(duration), key="over")
    assert again == duration
    assert type(again) is type(duration)
    assert parse_duration(duration, key="over") is duration
    assert pickle.loads(pickle.dumps(duration)) == duration


@pytest.mark.parametrize("text", ["2ep", "0.5ep", "100ba", "10000sp", "1.5e6tok", "1234567tok", "0.0001ep", "1e20ep"])
def test_its_text_is_the_notation(text):
    assert str(parse_duration(text, key="over")) == text


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            100,
            "it has no unit; give one of ep (epochs), ba (optimizer steps), sp (samples) or tok (tokens), such as 100ba",
        ),
        ("1.5", "it has no unit"),
        ("", "it has no unit"),
        ("nan", "it has no unit"),
        ("10dur", "unknown unit 'dur'; give one of ep"),
        ("10 batches", "unknown unit 'batches'"),
        ("2EP", "unknown unit 'EP'"),
        ("ep", "'' is no number"),
        ("xep", "'x' is no number"),
        ("1,000ba", "'1,000' is no number"),
        ("-1ep", "it must not be negative"),
        ("infep", "it must be finite"),
        ("nanba", "it must be finite"),
        ("1e400tok", "it must be finite"),
        ("1.5ba", "ba are counted in whole ones"),
        ("0.5sp", "sp are counted in whole ones"),
        (None, "give a number with a unit"),
        (True, "give a number with a unit"),
        (["1ep"], "give a number with a unit"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_would_do(value, says):
    with pytest.raises(SettingError) as caught:
        parse_duration(value, key="over")
    assert str(caught.value).startswith(f"over={value!r}: ")
    assert says in str(caught.value)


def test_each_unit_reads_its_own_part_of_progress():
    progress = Progress(epoch=1, epoch_rows=25, rows_per_epoch=100, steps=7, samples=125, tokens=4000)
    assert [unit(1).done(progress) for unit in (Epochs, Steps, Samples, Tokens)] == [1.25, 7.0, 125.0, 4000.0]
    assert [unit(5).share(progress) for unit in (Epochs, Steps)] == [Fraction(1, 4), Fraction(7, 5)]


def test_an_epoch_of_unknown_length_has_no_parts():
    assert Epochs(1.5).done(Progress(epoch=1, epoch_rows=25)) == 1.0


@given(rows=st.integers(1, 2000), part=st.data())
def test_a_part_of_an_epoch_is_reached_at_its_row_whatever_floats_say(rows, part):
    """0.1 x 3 is above 0.3 in floats; here 3 rows of 10 are three tenths."""
    row, epoch = part.draw(st.integers(0, rows * 10)), part.draw(st.integers(0, 50))
    duration = parse_duration(f"{epoch + row / (rows * 10):.9f}ep", key="over")
    at = Progress(epoch=epoch, epoch_rows=min(rows, -(-row // 10) + 1), rows_per_epoch=rows)
    assert duration.reached(at) or at.epoch_rows == rows
    for tenth in range(1, 10):
        at = Progress(epoch=epoch, epoch_rows=tenth * rows, rows_per_epoch=10 * rows)
        duration = parse_duration(f"{epoch}.{tenth}ep", key="over")
        assert duration.reached(at)
        assert duration.share(at) == 1
        assert not duration.reached(Progress(epoch=epoch, epoch_rows=tenth * rows - 1, rows_per_epoch=10 * rows))


def test_units_are_not_compared_by_accident():
    kinds = [Epochs(1), Steps(1), Samples(1), Tokens(1)]
    for one in kinds:
        for other in kinds:
            if one is not other:
                assert one != other
                with pytest.raises(TypeError):
                    assert one < other
    assert Steps(1) < Steps(2)
