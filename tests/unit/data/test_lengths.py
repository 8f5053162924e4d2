import itertools
import logging
import multiprocessing
import os
import random
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from adaptive_batch.data import (
    DatasetAdapter,
    count_other_bytes,
    largest_rows,
    longest_rows,
    measure_rows,
)
from adaptive_batch.data import lengths as lengths_module
from adaptive_batch.errors import SettingError


class Rows:
    """Rows of given lengths that count how often, and in which process, they are read."""

    def __init__(self, lengths):
        self.lengths = list(lengths)
        self.reads = []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        self.reads.append((row, os.getpid()))
        return {"tokens": [0] * self.lengths[row], "labels": [0]}


class Broken(Rows):
    """Row `at` does `what` instead of being read."""

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


def measure(dataset, cache_dir=None, *, fingerprint="f", **settings):
    cache_file = cache_dir and cache_dir / f"lengths-{fingerprint}.bin"
    settings = {"show_progress": False, "num_workers": 0, **settings}
    return measure_rows(dataset, num_tokens, cache_file=cache_file, **settings)[:, 0]


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# counting


def test_a_row_is_as_long_as_it_was_measured():
    measured = measure([{"tokens": [1, 2, 3]}, {"tokens": []}])
    assert measured.dtype == torch.int64
    assert measured.tolist() == [3, 0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_measuring_a_row_raises_is_raised_as_itself(num_workers, caplog):
    with pytest.raises(SettingError) as caught:
        measure(Broken(some_lengths(20), 13, dict), num_workers=num_workers)
    assert str(caught.value) == "dataset='Rows': row 13 has no tokens"
    assert warnings_of(caplog) == []


def test_a_dataset_without_rows_or_length_is_refused(tmp_path):
    with pytest.raises(SettingError, match="dataset='list': it has no rows; check its source,"):
        measure([], tmp_path)
    with pytest.raises(SettingError, match="dataset='count': a count has no row by its number;"):
        measure(itertools.count(), tmp_path)


def test_the_random_state_is_left_as_it_was(tmp_path):
    class Drawing(Rows):
        def __getitem__(self, row):
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(row)

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    dataset = Drawing(some_lengths(20))
    for num_workers in (0, 2, 0):  # the last reads the cache
        measure(dataset, tmp_path / str(num_workers), num_workers=num_workers)
        assert states() == before


def test_progress_ends_with_the_number_of_rows(caplog):
    caplog.set_level("INFO")
    measure(Rows(some_lengths(30)), show_progress=True)
    assert caplog.messages == ["counting tokens: 30 of 30 rows"]
    caplog.clear()
    measure(Rows(some_lengths(30)))
    assert caplog.messages == []


# worker processes


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 57])
def test_workers_measure_what_one_process_measures(num_workers, num_rows, caplog):
    dataset = Rows(some_lengths(num_rows))
    assert measure(dataset, num_workers=num_workers).tolist() == dataset.lengths
    assert [row for row, _ in dataset.reads] == [0]  # the others were read in workers
    assert warnings_of(caplog) == []


def test_workers_read_datasets_that_cannot_be_pickled():
    dataset = Rows(some_lengths(40))
    dataset.lock = threading.Lock()
    dataset.function = lambda: None
    assert measure(dataset, num_workers=2).tolist() == dataset.lengths
    assert len(dataset.reads) == 1


def test_workers_start_only_where_the_rest_takes_long():
    assert lengths_module._worthwhile_workers(4.0) == 0
    num_cpus = len(os.sched_getaffinity(0))
    assert lengths_module._worthwhile_workers(60.0) == (min(num_cpus, 16) if num_cpus > 1 else 0)


@pytest.mark.parametrize("at", [1, 30, 56])
def test_where_a_worker_dies_the_rest_is_counted_here_and_said(at, caplog):
    here = os.getpid()
    dataset = Broken(
        some_lengths(57), at, lambda: {"tokens": [0] * 7} if os.getpid() == here else os._exit(1)
    )
    expected = [*dataset.lengths[:at], 7, *dataset.lengths[at + 1 :]]
    assert measure(dataset, num_workers=2).tolist() == expected
    assert len(warnings_of(caplog)) == 1
    assert "exited unexpectedly" in warnings_of(caplog)[0]
    assert "counting the other rows in this process" in warnings_of(caplog)[0]


def test_a_row_that_fails_in_workers_alone_is_counted_here_and_said(caplog):
    here = os.getpid()

    def only_here():
        if os.getpid() != here:
            raise RuntimeError("no such handle")
        return {"tokens": [0] * 7}

    dataset = Broken(some_lengths(57), 30, only_here)
    assert measure(dataset, num_workers=2).tolist() == [
        *dataset.lengths[:30],
        7,
        *dataset.lengths[31:],
    ]
    assert warnings_of(caplog) == [
        "worker processes failed at row 30 (RuntimeError: no such handle); counting the other rows"
        " in this process"
    ]


def test_a_mistake_of_the_dataset_is_raised_as_itself(caplog):
    error = ValueError("row 30 holds no text")

    def fail():
        raise error

    with pytest.raises(ValueError, match="row 30 holds no text") as caught:
        measure(Broken(some_lengths(57), 30, fail), num_workers=2)
    assert caught.value is error
    assert warnings_of(caplog) == []


# the cache


def test_rows_are_counted_once_and_then_read_from_the_cache_which_is_said_once(tmp_path, caplog):
    caplog.set_level("INFO")
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
    measure(dataset, tmp_path / "a" / "b")
    assert caplog.text.count("lengths of 1000 rows read from") == 1


def test_another_fingerprint_is_another_file(tmp_path):
    measure(Rows([1, 2]), tmp_path, fingerprint="a")
    assert measure(Rows([3, 4]), tmp_path, fingerprint="b").tolist() == [3, 4]
    assert measure(Rows([1, 2]), tmp_path, fingerprint="a").tolist() == [1, 2]


def assert_rebuilt(dataset, folder, caplog):
    caplog.clear()
    assert measure(dataset, folder).tolist() == dataset.lengths
    assert len(warnings_of(caplog)) == 1
    assert "lengths-f.bin" in warnings_of(caplog)[0]
    caplog.clear()
    assert measure(dataset, folder).tolist() == dataset.lengths
    assert warnings_of(caplog) == []


def test_a_file_torn_or_changed_at_any_byte_is_counted_again_and_said(tmp_path, caplog):
    dataset = Rows(some_lengths(10))
    measure(dataset, tmp_path)
    path = tmp_path / "lengths-f.bin"
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            assert_rebuilt(dataset, tmp_path, caplog)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"\n", b"{}\n", b"\x80\x04N.", b"\xff" * 300, b"PK\x03\x04" + bytes(500)]
)
def test_a_foreign_file_is_counted_again_and_said(content, tmp_path, caplog):
    (tmp_path / "lengths-f.bin").write_bytes(content)
    assert_rebuilt(Rows(some_lengths(10)), tmp_path, caplog)


def test_a_whole_file_of_another_fingerprint_or_of_more_zeros_is_foreign(tmp_path, caplog):
    dataset = Rows(some_lengths(10))
    measure(dataset, tmp_path, fingerprint="other")
    content = (tmp_path / "lengths-other.bin").read_bytes()
    (tmp_path / "lengths-f.bin").write_bytes(content)
    assert_rebuilt(dataset, tmp_path, caplog)
    with (tmp_path / "lengths-f.bin").open("ab") as file:
        file.write(bytes(8))
    assert_rebuilt(dataset, tmp_path, caplog)


@pytest.mark.parametrize("change", [1, -1])
def test_a_dataset_with_another_number_of_rows_is_counted_again_and_said(change, tmp_path, caplog):
    measure(Rows([5] * 10), tmp_path)
    assert_rebuilt(Rows([5] * (10 + change)), tmp_path, caplog)


@pytest.mark.parametrize("changed", [0, 700, 999])
def test_a_first_last_or_longest_row_of_another_length_is_noticed(changed, tmp_path, caplog):
    lengths = some_lengths(1000)
    lengths[700] = 90
    measure(Rows(lengths), tmp_path)
    lengths[changed] += 1
    dataset = Rows(lengths)
    assert measure(dataset, tmp_path).tolist() == lengths
    assert warnings_of(caplog) == [
        f"{tmp_path / 'lengths-f.bin'}: row {changed} no longer has that length; counting all rows"
        " again"
    ]


def test_a_cache_that_cannot_be_written_is_said_and_costs_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    dataset = Rows(some_lengths(10))
    assert measure(dataset, tmp_path / "file").tolist() == dataset.lengths
    assert len(warnings_of(caplog)) == 2  # neither readable nor writable
    (tmp_path / "lengths-f.bin").mkdir()
    assert measure(dataset, tmp_path).tolist() == dataset.lengths
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "file",
        "lengths-f.bin",
    ]  # nothing left aside


def measured_in_another_process(folder: Path):
    dataset = Rows(some_lengths(5000))
    return [
        measure(dataset, folder).tolist() == dataset.lengths
        for _ in range(20)
        if not remove_cache(folder)
    ]


def remove_cache(folder: Path) -> None:
    (folder / "lengths-f.bin").unlink(missing_ok=True)


def test_two_processes_write_the_same_cache_safely(tmp_path, caplog):
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        for right in pool.map(measured_in_another_process, [tmp_path, tmp_path]):
            assert right == [True] * 20
    dataset = Rows(some_lengths(5000))
    assert measure(dataset, tmp_path).tolist() == dataset.lengths
    assert len(dataset.reads) <= 8
    assert warnings_of(caplog) == []
    assert len(list(tmp_path.iterdir())) == 1


# longest_rows


@given(lengths=st.lists(st.integers(0, 9), min_size=1), data=st.data())
def test_longest_rows_are_those_of_a_stable_sort(lengths, data):
    count = data.draw(st.integers(1, len(lengths)))
    expected = sorted(range(len(lengths)), key=lambda row: -lengths[row])[:count]
    assert longest_rows(torch.tensor(lengths), count) == expected
    text_alone = torch.zeros(len(lengths), dtype=torch.int64)
    assert largest_rows(torch.tensor(lengths), text_alone)[:count] == expected


def test_a_loader_given_as_a_dataset_is_refused_with_what_to_give():
    loader = DataLoader([{"tokens": [1]}])
    with pytest.raises(SettingError, match=r"DataLoader': .* give its dataset, loader\.dataset,"):
        DatasetAdapter(loader, None)


def test_the_bytes_beside_text_are_those_of_pictures_in_any_form():
    text = {"input_ids": [1, 2, 3], "labels": torch.tensor([1, 2, 3]), "name": "a"}
    assert count_other_bytes(text) == 0
    for pixels, size in (
        (torch.zeros(3, 4, 4), 192),
        (torch.zeros(48, dtype=torch.uint8), 48),
        (torch.zeros(3, 4, 4).tolist(), 192),
        ([torch.zeros(3, 4, 4), torch.zeros(3, 2, 2)], 240),
    ):
        assert count_other_bytes({**text, "pixels": pixels}) == size
