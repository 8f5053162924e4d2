"""A request to stop that comes from outside: noted when it arrives, acted on between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Ended by a request, saved, and to be started again: "temporary failure; the user is invited to
# retry" (sysexits.h).
EXIT_STATUS = 75


class Terminated(KeyboardInterrupt):
    """SIGTERM came where there is nothing to finish before."""


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Inside, in the main thread, SIGTERM raises :class:`Terminated`."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, end) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class Preemption:
    """Within its context, SIGTERM sets :attr:`requested` instead of ending the process.

    A second SIGTERM acts as it would have without this. Outside of the main thread, which alone
    handles signals, nothing changes.

    Args:
        same_within: seconds in which another SIGTERM is taken for the same: torchrun hands on what
            a scheduler may have sent to all processes already.
    """

    def __init__(self, *, same_within: float = 0.0) -> None:
        self.requested = False
        self._same_within = same_within
        self._asked_at = 0.0
        # The earlier handler, while this one is set.
        self._before: Any = None

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._asked_at > self._same_within:
            self._put_back()
            os.kill(os.getpid(), number)
            return
        if not self.requested:
            self._asked_at = now
        self.requested = True
        if not self._same_within:
            self._put_back()

    def _put_back(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
