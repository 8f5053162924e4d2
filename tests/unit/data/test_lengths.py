import itertools
import logging
import os
import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from adaptive_batch.data import DatasetAdapter, largest_rows, longest_rows, measure_rows
from adaptive_batch.data import lengths as lengths_module
from adaptive_batch.errors import SettingError


class Rows:
    """A dataset of given lengths that records each read and its process."""

    def __init__(self, lengths):
        self.lengths = list(lengths)
        self.reads = []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        self.reads.append((row, os.getpid()))
        return {"tokens": [0] * self.lengths[row], "labels": [0]}


class Broken(Rows):
    """A dataset that calls `what` to read row `at`."""

    def __init__(self, lengths, at, what):
        super().__init__(lengths)
        self.at = at
        self.what = what

    def __getitem__(self, row):
        return self.what() if row == self.at else super().__getitem__(row)


def some_lengths(count, seed=0):
    generator = random.Random(seed)
    return [generator.randint(0, 40) for _ in range(count)]


def num_tokens(number, row):
    if "tokens" not in row:
        raise SettingError("dataset", "Rows", f"row {number} has no tokens")
    return (len(row["tokens"]),)


def measure(dataset, cache_dir=None, *, fingerprint="f"):
    cache_file = cache_dir and cache_dir / f"lengths-{fingerprint}.bin"
    return measure_rows(dataset, num_tokens, cache_file=cache_file, show_progress=False)[:, 0]


@pytest.fixture(autouse=True)
def start_workers(monkeypatch):
    """Measure rows in this process; the returned function sets a number of workers instead."""
    monkeypatch.setattr(lengths_module, "TIMED_SECONDS", float("inf"))

    def start(num_workers):
        monkeypatch.setattr(lengths_module, "TIMED_SECONDS", 0.0)
        monkeypatch.setattr(lengths_module, "_worthwhile_workers", lambda seconds: num_workers)

    return start


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_measuring_a_row_is_raised_unchanged(num_workers, start_workers):
    start_workers(num_workers)
    with pytest.raises(SettingError, match="dataset='Rows': row 13 has no tokens"):
        measure(Broken(some_lengths(20), 13, dict))
    error = ValueError("row 30 holds no text")

    def fail():
        raise error

    with pytest.raises(ValueError, match="row 30 holds no text") as caught:
        measure(Broken(some_lengths(57), 30, fail))
    assert caught.value is error


def test_a_dataset_without_numbered_rows_is_refused(tmp_path):
    for dataset in ([], itertools.count()):
        with pytest.raises(SettingError, match=f"dataset='{type(dataset).__name__}': "):
            measure(dataset, tmp_path)
    with pytest.raises(SettingError, match=r"DataLoader': .* give its dataset and its"):
        DatasetAdapter(DataLoader([{"tokens": [1]}]), None)


def test_measuring_does_not_change_the_random_state(tmp_path, start_workers):
    class Drawing(Rows):
        def __getitem__(self, row):
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(row)

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    dataset = Drawing(some_lengths(20))
    for num_workers in (0, 2, 0):  # the last reads the cache
        start_workers(num_workers)
        measure(dataset, tmp_path / str(num_workers))
        assert states() == before


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 57])
def test_workers_measure_the_same_lengths_as_one_process(
    num_workers, num_rows, start_workers, caplog
):
    start_workers(num_workers)
    dataset = Rows(some_lengths(num_rows))
    dataset.cannot_be_pickled = threading.Lock()
    assert measure(dataset).tolist() == dataset.lengths
    assert [row for row, _ in dataset.reads] == [0]  # workers read the others
    assert warnings_of(caplog) == []


def test_workers_start_only_if_the_rest_takes_long():
    assert lengths_module._worthwhile_workers(4.0) == 0
    num_cpus = len(os.sched_getaffinity(0))
    assert lengths_module._worthwhile_workers(60.0) == (min(num_cpus, 16) if num_cpus > 1 else 0)


@pytest.mark.parametrize("at", [1, 30, 56])
@pytest.mark.parametrize("dies", [True, False])
def test_if_a_worker_dies_or_fails_this_process_counts_the_rest_with_a_warning(
    dies, at, start_workers, caplog
):
    start_workers(2)
    here = os.getpid()

    def only_here():
        if os.getpid() == here:
            return {"tokens": [0] * 7}
        if dies:
            os._exit(1)
        raise RuntimeError("no such handle")

    dataset = Broken(some_lengths(57), at, only_here)
    expected = [*dataset.lengths[:at], 7, *dataset.lengths[at + 1 :]]
    assert measure(dataset).tolist() == expected
    (warning,) = warnings_of(caplog)
    says = "exited unexpectedly" if dies else "failed (RuntimeError: no such handle)"
    assert says in warning
    assert "in this process" in warning


def test_rows_are_counted_once_and_then_read_from_the_cache(tmp_path, caplog):
    dataset = Rows(some_lengths(1000))
    first = measure(dataset, tmp_path / "a" / "b")
    assert len(dataset.reads) == 1000
    dataset.reads.clear()
    second = measure(dataset, tmp_path / "a" / "b")
    assert torch.equal(first, second)
    assert first.dtype == second.dtype
    assert len(dataset.reads) <= 8
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["lengths-f.bin"]
    assert warnings_of(caplog) == []


def test_a_damaged_or_foreign_cache_is_counted_again_with_a_warning(tmp_path, caplog):
    dataset = Rows(some_lengths(10))
    path = tmp_path / "lengths-f.bin"
    measure(dataset, tmp_path)
    whole = path.read_bytes()
    damaged = [b"{}\n", b"\xff" * 300, whole + bytes(8)]
    for at in range(len(whole)):
        damaged += [whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]]
    for rows, fingerprint in ((dataset, "other"), (Rows([5] * 9), "f"), (Rows([5] * 11), "f")):
        path.unlink(missing_ok=True)
        measure(rows, tmp_path, fingerprint=fingerprint)
        damaged.append((tmp_path / f"lengths-{fingerprint}.bin").read_bytes())
    for content in damaged:
        path.write_bytes(content)
        caplog.clear()
        assert measure(dataset, tmp_path).tolist() == dataset.lengths
        (warning,) = warnings_of(caplog)
        assert "lengths-f.bin" in warning
        caplog.clear()
        assert measure(dataset, tmp_path).tolist() == dataset.lengths
        assert warnings_of(caplog) == []
    assert path.read_bytes() == whole


@pytest.mark.parametrize("changed", [0, 700, 999])
def test_a_changed_length_of_the_first_last_or_longest_row_is_detected(changed, tmp_path, caplog):
    lengths = some_lengths(1000)
    lengths[700] = 90
    measure(Rows(lengths), tmp_path)
    lengths[changed] += 1
    assert measure(Rows(lengths), tmp_path).tolist() == lengths
    (warning,) = warnings_of(caplog)
    assert f"lengths-f.bin: row {changed} has changed; measuring all" in warning


def test_a_cache_that_cannot_be_written_causes_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    dataset = Rows(some_lengths(10))
    assert measure(dataset, tmp_path / "file").tolist() == dataset.lengths
    assert len(warnings_of(caplog)) == 1
    (tmp_path / "lengths-f.bin").mkdir()
    assert measure(dataset, tmp_path).tolist() == dataset.lengths
    # No temporary file is left.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "lengths-f.bin"]


@given(lengths=st.lists(st.integers(0, 9), min_size=1), data=st.data())
def test_longest_rows_are_those_of_a_stable_sort(lengths, data):
    count = data.draw(st.integers(1, len(lengths)))
    expected = sorted(range(len(lengths)), key=lambda row: -lengths[row])[:count]
    assert longest_rows(torch.tensor(lengths), count) == expected
    text_alone = torch.zeros(len(lengths), dtype=torch.int64)
    assert largest_rows(torch.tensor(lengths), text_alone)[:count] == expected
