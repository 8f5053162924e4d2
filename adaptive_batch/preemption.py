"""A request to stop that comes from outside: noted when it arrives, acted on between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# Ended by a request, saved, and to be started again: "temporary failure; the user is invited to retry" (sysexits.h).
EXIT_STATUS = 75


class Preemption:
    """Within its context, SIGTERM sets :attr:`requested` instead of ending the process.

    A second SIGTERM acts as it would have without this. Outside of the main thread, which alone can be told of signals, nothing
    is changed.

    Attributes:
        requested: the process was asked to end.
    """

    def __init__(self) -> None:
        self.requested = False
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
        self.requested = True
        self._put_back()

    def _put_back(self) -> None:
        if self._is_set:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
            self._is_set = False
