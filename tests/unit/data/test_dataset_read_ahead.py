"""Prefetching rows in a thread changes neither rows nor errors nor random numbers."""

import random
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.processes import run_python

from adaptive_batch.data import ReadAhead, row_order

WATCHED = 32


class Squares:
    """A dataset that records the reading thread and detects simultaneous reads."""

    def __init__(self, num_rows=200, *, seconds=0.0, draw=lambda: None):
        self.num_rows, self.seconds, self.draw = num_rows, seconds, draw
        self.by_thread, self.by_main, self.is_read, self.overlapped = [], [], False, False

    def __len__(self):
        return self.num_rows

    def __getitem__(self, number):
        self.overlapped |= self.is_read
        self.is_read = True
        is_main = threading.current_thread() is threading.main_thread()
        (self.by_main if is_main else self.by_thread).append(number)
        if self.seconds:
            time.sleep(self.seconds)
        self.draw()
        self.is_read = False
        return number * number


class Epoch:
    """Takes the rows of an epoch step by step and announces the next rows, like a planner."""

    def __init__(self, dataset, *, order=None, position=0):
        self.order = list(range(len(dataset))) if order is None else order
        self.dataset = dataset
        self.position = position

    def take(self, count, *, only=None):
        numbers = self.order[self.position : self.position + count]
        self.position += len(numbers)
        following = self.order[self.position : self.position + count]
        if only is not None:
            numbers = [numbers[position] for position in only]
            following = [following[position] for position in only if position < len(following)]
        rows = [self.dataset[number] for number in numbers]
        self.dataset.expect(following)
        self.dataset.start()
        return rows


def started(dataset):
    """Return an epoch after the reads that decide on prefetching, with one prefetched row."""
    epoch = Epoch(ReadAhead(dataset))
    assert epoch.take(WATCHED - 1) + epoch.take(1) == [number * number for number in range(WATCHED)]
    wait_until(lambda: not threads())
    return epoch


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.endswith("_read_ahead")]


@given(
    takes=st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), max_size=25),
    position=st.integers(0, 50),
    seed=st.integers(0, 3),
)
@examples(30)
def test_prefetching_does_not_change_the_rows(takes, position, seed):
    dataset = Squares(seconds=1e-5)
    order = row_order(200, shuffle=True, seed=seed, epoch=1).tolist()
    ahead = Epoch(ReadAhead(dataset), order=order, position=position)
    for count, takes_half, waits in takes:
        begin = ahead.position
        numbers = order[begin : begin + count]
        only = range(0, len(numbers), 2) if takes_half else None
        expected = numbers[::2] if takes_half else numbers
        assert ahead.take(count, only=only) == [number * number for number in expected]
        if waits:
            wait_until(lambda: not threads())
    wait_until(lambda: not threads())
    assert not dataset.overlapped


def test_the_rows_of_the_next_step_are_read_once():
    dataset = Squares(seconds=1e-4)
    epoch = started(dataset)
    epoch.take(8, only=[1, 5])
    wait_until(lambda: not threads())
    assert dataset.by_thread == [32, 41, 45]
    read = len(dataset.by_main)
    assert epoch.take(8, only=[1, 5]) == [41**2, 45**2]
    assert len(dataset.by_main) == read
    # Rows that are not expected any more are dropped.
    wait_until(lambda: not threads())
    epoch.dataset.expect([])
    assert (epoch.dataset[dataset.by_thread[-1]], len(dataset.by_main)) == (53**2, read + 1)


def test_a_call_for_a_row_stops_the_thread_after_its_row():
    dataset = Squares(seconds=0.02)
    epoch = started(dataset)
    epoch.take(50)  # the thread begins to read rows 82 to 131
    wait_until(lambda: dataset.is_read)
    assert epoch.dataset[7] == 49
    assert not threads()
    assert not dataset.overlapped
    assert 1 < len(dataset.by_thread) < 50


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1), np.random.random])
def test_a_dataset_that_draws_random_numbers_is_not_prefetched(draw):
    dataset = Squares(draw=draw)
    epoch = started(dataset)
    epoch.take(8)
    epoch.take(8)
    assert not threads()
    assert dataset.by_thread == []


def test_watched_reads_draw_the_random_numbers_of_the_dataset_alone():
    states = []
    for dataset in (Squares(draw=random.random), ReadAhead(Squares(draw=random.random))):
        torch.manual_seed(1)
        random.seed(1)
        for number in range(40):
            _ = dataset[number]
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]


def test_an_error_is_raised_when_its_row_is_used():
    class Broken(Squares):
        def __getitem__(self, number):
            if number == 50:
                super().__getitem__(number)
                raise ValueError("row 50")
            return super().__getitem__(number)

    dataset = Broken()
    epoch = started(dataset)
    epoch.take(16, only=[0, 2])  # the next rows are 48 and 50
    wait_until(lambda: not threads())
    assert dataset.by_thread == [32, 48, 50]
    assert epoch.take(16, only=[0, 1]) == [48**2, 49**2]
    epoch.position = 48
    with pytest.raises(ValueError, match="row 50"):
        epoch.take(16)
    wait_until(lambda: not threads())
    assert dataset.by_thread == [32, 48, 50]


def test_a_process_that_exits_waits_for_one_row_alone():
    process = run_python(
        "-c",
        textwrap.dedent("""
            import time
            from adaptive_batch.data import ReadAhead

            class Rows:
                def __getitem__(self, number):
                    if number >= 32:
                        print(number, flush=True)
                        time.sleep(0.1)

            rows = ReadAhead(Rows())
            for number in range(32):
                rows[number]
            rows.expect(range(32, 132))
            rows.start()
        """),
    )
    assert 1 <= len(process.stdout.split()) < 50
