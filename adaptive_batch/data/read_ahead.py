"""A thread that reads the next rows ahead, unless reading draws random numbers."""

from __future__ import annotations

import atexit
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from adaptive_batch._torch import PrivateNames

private = PrivateNames("reading rows ahead")

# Only one row is read at a time: datasets may share a file. The lock is also held at a fork and at
# exit, so that no thread is in the middle of a row then.
_reading = threading.RLock()
atexit.register(_reading.acquire, timeout=10.0)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
    )


class ReadAhead:
    """A map-style dataset whose next rows a thread reads ahead.

    Expected rows are only a hint: every other row is read on demand. A row that fails in the thread
    is read again on demand, where it raises its error. The thread stops after a failure, and if one
    of the first rows draws random numbers of Python, numpy or torch, whose order training depends
    on.

    Args:
        dataset: dataset whose rows do not depend on the thread or the order of reads.
        at_once: True starts the thread in :meth:`expect`, False only in :meth:`start`.
    """

    def __init__(self, dataset: Any, *, at_once: bool = True) -> None:
        self._dataset = dataset
        self._at_once = at_once
        self._is_running = False
        self._rows: dict[int, Any] = {}
        # Numbers of the rows to read, in order.
        self._expected: dict[int, None] = {}
        # Number of further reads to watch for random draws before a row is read ahead. None after
        # a draw or a failure: no row is read ahead.
        self._reads_to_watch: int | None = 32

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        if number not in self._rows and number not in self._expected:
            # Drop them, or the thread could take the lock for each expected row before this read.
            self._expected = {}
        with _reading:
            if number in self._rows:
                return self._rows.pop(number)
            self._expected.pop(number, None)
            if not self._reads_to_watch:
                return self._dataset[number]
            random_state = _random_state()
            row = self._dataset[number]
            self._reads_to_watch -= 1
            if _random_state() != random_state:
                self._reads_to_watch = None
            return row

    def expect(self, numbers: Iterable[int]) -> None:
        """Set the rows to read ahead, in order; drop all others."""
        numbers = list(numbers)
        with _reading:
            self._rows = {number: self._rows[number] for number in numbers if number in self._rows}
            self._expected = {}
            if self._reads_to_watch == 0:
                missing = [number for number in numbers if number not in self._rows]
                self._expected = dict.fromkeys(missing)
        if self._at_once:
            self.start()

    def start(self) -> None:
        """Start the thread that reads the expected rows, without waiting for a lock."""
        if self._expected and not self._is_running:
            self._is_running = True
            threading.Thread(
                target=self._read, name="adaptive_batch_read_ahead", daemon=True
            ).start()

    def _read(self) -> None:
        while self._is_running:
            with _reading:
                try:
                    for number in list(self._expected)[:1]:
                        self._rows[number] = self._dataset[number]
                        self._expected.pop(number, None)
                except BaseException:
                    self._reads_to_watch = None
                    self._expected = {}
                self._is_running = bool(self._expected)


def _random_state() -> bytes:
    with private.disable_current_modes():
        numpy_state = getattr(sys.modules.get("numpy.random"), "get_state", lambda: None)()
        return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), numpy_state))
