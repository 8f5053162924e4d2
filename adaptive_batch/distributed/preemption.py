"""A request to stop that comes from outside: noted when it arrives, acted on between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# Ended by a request, saved, and to be started again: "temporary failure; the user is invited to retry" (sysexits.h).
EXIT_STATUS = 75


class Preemption:
    """Within its context, SIGTERM sets :attr:`requested` instead of ending the process.

    A second SIGTERM acts as it would have without this. Outside of the main thread, which alone can be told of signals, nothing
    is changed.

    Args:
        same_within: seconds in which another SIGTERM is taken for the same: torchrun hands on what a scheduler may have sent to all
            processes already.

    Attributes:
        requested: the process was asked to end.
    """

    def __init__(self, *, same_within: float = 0.0) -> None:
        self.requested = False
        self._same_within, self._asked_at = same_within, 0.0
        self._before: Any = None
        self._is_set = False

    def __enter__(self) -> Preemption:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._is_set = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._asked_at > self._same_within:
            self._put_back()
            os.kill(os.getpid(), number)
            return
        self._asked_at = self._asked_at if self.requested else now
        self.requested = True
        if not self._same_within:
            self._put_back()

    def _put_back(self) -> None:
        if self._is_set:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self._is_set = False
