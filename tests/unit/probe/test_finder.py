"""Results of searches have been tried; damaged files are ignored; ranks agree."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.memory import GIB
from adaptive_batch.probe import (
    BinarySearch,
    Halving,
    Predictive,
    ProbeResult,
    Store,
    Trial,
    run_search,
)

BUDGET = 16 * GIB
MAXIMUM = 256


class IdealDevice:
    """A size fits exactly when its peak, a known function of the rows, is within the budget."""

    def __init__(self, peak, *, budget_bytes, optimizer_peak_bytes=None):
        self.peak, self.budget_bytes = peak, budget_bytes
        self.optimizer_peak_bytes = optimizer_peak_bytes
        self.tried = []

    def __call__(self, rows: int) -> Trial:
        self.tried.append(rows)
        if self.peak(rows) > self.budget_bytes:
            return Trial(rows, fits=False)
        return Trial(rows, True, self.peak(rows), self.optimizer_peak_bytes)


def linear(true_maximum: int) -> IdealDevice:
    """A device on which at most `true_maximum` rows fit."""
    row = int(0.7 * BUDGET / (true_maximum + 0.5))
    return IdealDevice(
        lambda rows: BUDGET * 3 // 10 + rows * row,
        budget_bytes=BUDGET,
        optimizer_peak_bytes=BUDGET // 2,
    )


SEARCHES = {
    "predict": lambda: Predictive(budget_bytes=BUDGET, maximum=MAXIMUM),
    "binary": lambda: BinarySearch(maximum=MAXIMUM),
    "halve": lambda: Halving(start=MAXIMUM),
}


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("true_maximum", [1, 2, 3, 37, 64, 255, 256, 1000])
def test_the_result_and_the_rounded_result_were_tried_and_fit(search, true_maximum, rounds):
    device = linear(true_maximum)
    result = run_search(device, search=SEARCHES[search](), round_to_power_of_two=rounds)
    fitting = [trial.batch_size for trial in result.trials if trial.fits]
    assert {result.batch_size, result.max_batch_size} <= set(fitting)
    expected = result.max_batch_size
    if rounds:
        expected = 1 << (expected.bit_length() - 1)
    assert result.batch_size == expected
    assert [trial.batch_size for trial in result.trials] == device.tried
    assert len(device.tried) == len(set(device.tried)) == len(result.seconds)
    assert result.num_out_of_memory == sum(rows > true_maximum for rows in device.tried)
    assert result.max_batch_size <= min(true_maximum, MAXIMUM)
    if search != "halve":
        assert result.max_batch_size == min(true_maximum, MAXIMUM)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("row_seconds", [0, 1])
def test_trials_stay_within_their_time_limit(search, row_seconds, monkeypatch, caplog):
    device = linear(64)
    clock = [0.0]

    def trial(rows):
        clock[0] += 1 + row_seconds * rows
        return device(rows)

    caplog.set_level("INFO", "adaptive_batch")
    with monkeypatch.context() as patched:
        patched.setattr("adaptive_batch.probe.finder.time.perf_counter", lambda: clock[0])
        result = run_search(trial, search=SEARCHES[search](), trial_seconds=20, min_rows_seconds=5)
    assert ("(trial_seconds)" in caplog.text) == bool(row_seconds)
    if row_seconds:
        assert max(device.tried) == result.max_batch_size
        assert 10 <= result.max_batch_size < 20
        assert result.bound == f"{result.max_batch_size}+"
    else:
        assert result.max_batch_size == {"halve": 40}.get(search, 64)


@given(answers=st.lists(st.booleans()), search=st.sampled_from(list(SEARCHES)))
def test_for_any_device_the_result_was_tried_and_fits(answers, search):
    left = list(answers)
    result = run_search(
        lambda rows: Trial(rows, bool(left and left.pop())),
        search=SEARCHES[search](),
        round_to_power_of_two=True,
    )
    fitting = {t.batch_size for t in result.trials if t.fits} | {0}
    assert {result.max_batch_size, result.batch_size} <= fitting
    assert result.batch_size <= result.max_batch_size


@pytest.fixture
def result() -> ProbeResult:
    found = run_search(
        linear(37),
        search=SEARCHES["predict"](),
        round_to_power_of_two=True,
        sequence_length=512,
    )
    return replace(found, resident_bytes=9, budget_bytes=BUDGET)


def test_older_results_are_kept(result, tmp_path, caplog):
    path = tmp_path / "adaptive_batch" / "probe.json"
    store = Store(path, "s")
    assert store.known("512") is None
    other = replace(result, sequence_length=1024)
    for name, each in (("512", result), ("1024", other), ("512", result)):
        store.put(name, each)
    assert (store.known("512"), store.known("1024")) == (result, other)
    assert store.known("other") is None
    latest = json.loads(path.read_text())
    assert (latest["fingerprint"], latest["max_batch_size"]) == ("512", 37)
    unread = Store(path, "s", reads=False)
    assert (unread.newest(), unread.known("512")) == (result, None)
    assert Store(path, "t").newest() is None
    assert store.name(1) != Store(path, "t").name(1) != Store(path, "t", [2]).name(1)
    assert caplog.text == ""


def edited(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


def without(name):
    return lambda text: text.replace(f'"{name}"', '"unknown"', 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2, 3]",
        edited(format=0),
        without("trials"),
        without("maximum"),
        edited(trials=[{"rows": 3}]),
        edited(trials=[]),
        edited(max_batch_size=4000),
        edited(batch_size=4000),
        edited(max_batch_size=None),
        edited(earlier=[{}]),
        edited(earlier=3),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning(result, tmp_path, caplog, change):
    path = tmp_path / "probe.json"
    Store(path, "s").put("f", result)
    path.write_text(change(path.read_text()))
    with caplog.at_level(logging.INFO, logger="adaptive_batch"):
        assert Store(path, "s").known("f") is None
    assert f"{path}" in caplog.text
    assert "probing" in caplog.text


def test_a_failed_save_keeps_the_previous_file(result, tmp_path, caplog):
    store = Store(tmp_path / "probe.json", "s")
    store.put("f", result)
    with pytest.raises(TypeError):  # fails while writing
        store.put("f", replace(result, seconds=object()))
    assert store.known("f") == result
    (tmp_path / "a file").write_text("")
    Store(tmp_path / "a file" / "probe.json", "s").put("f", result)
    assert "cannot be written" in caplog.text


def found_by_rank():
    rank, found = distributed.rank(), {}
    for search, make in SEARCHES.items():
        device = linear((37, 23)[rank])
        found[search] = run_search(device, search=make(), round_to_power_of_two=True), device.tried
    # The device of one rank reports no peaks.
    silent = IdealDevice(lambda rows: rows, budget_bytes=9)
    result = run_search(
        lambda rows: replace(silent(rows), peak_bytes=rows if rank else None),
        search=SEARCHES["predict"](),
    )
    return {**found, "silent": (result, silent.tried)}


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(found_by_rank, 2)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_rank_with_the_least_memory_decides_for_all(ranks, search):
    (ours, our_tries), (theirs, their_tries) = (found[search] for found in ranks)
    assert our_tries == their_tries
    assert replace(ours, seconds=()) == replace(theirs, seconds=())
    assert ours.max_batch_size == (16 if search == "halve" else 23)
    assert ours.batch_size == 16


def test_the_largest_peak_of_any_rank_counts(ranks):
    for found in ranks:
        result, tried = found["silent"]
        assert result.max_batch_size == 9
        assert tried[-1] in (9, 10)
        assert all(t.peak_bytes == t.batch_size for t in result.trials if t.fits)


def test_the_largest_size_with_retries_is_reported(tmp_path):
    def run_trial(rows):
        return Trial(rows, rows <= 9, 100 * rows if rows <= 9 else None, retried=9 < rows <= 12)

    result = run_search(run_trial, search=BinarySearch(maximum=20))
    assert (result.max_batch_size, result.max_batch_size_with_retries) == (9, 10)
    assert result.num_out_of_memory == sum(trial.batch_size > 12 for trial in result.trials)
    assert "max_batch_size_with_retries: 10 (" in result.table()
    store = Store(tmp_path / "probe.json", "s")
    store.put("a", result)
    assert store.known("a") == result
    plain = run_search(lambda rows: Trial(rows, rows <= 9), search=BinarySearch(maximum=20))
    assert plain.max_batch_size_with_retries is None
    assert "with_retries" not in plain.table()
