"""A request to stop that comes from outside: noted when it arrives, acted on between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# Ended by a request, saved, and to be started again: "temporary failure; the user is invited to
# retry" (sysexits.h).
EXIT_STATUS = 75


# A scheduler, a person at the terminal, and the terminal that goes. Windows has no SIGHUP.
_REQUESTS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)


class Terminated(KeyboardInterrupt):
    """Request to end the process while nothing has to be finished before."""


@contextmanager
def raising_on_request() -> Iterator[None]:
    """Context manager: SIGTERM and SIGHUP raise :class:`Terminated` in the main thread; Ctrl-C
    raises KeyboardInterrupt, as always.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = _handle([number for number in _REQUESTS if number != signal.SIGINT], end)
    try:
        yield
    finally:
        _put_back(previous)


class Preemption:
    """Within its context, SIGTERM, Ctrl-C and SIGHUP set :attr:`requested` instead of ending the
    process.

    A second request acts as it would have without this. Outside of the main thread, which alone
    handles signals, nothing changes, nor where a signal is ignored, as SIGHUP under nohup.

    Args:
        same_within: seconds in which another request is taken for the same: torchrun hands on what
            a scheduler may have sent to all processes already.
    """

    def __init__(self, *, same_within: float = 0.0) -> None:
        self.requested = False
        self._same_within = same_within
        self._asked_at = 0.0
        # The earlier handlers by signal, while this one is set.
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        self._before = _handle(_REQUESTS, self._note)
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
            if number == signal.SIGINT:
                _tell_the_terminal()
        self.requested = True
        if not self._same_within:
            self._put_back()

    def _put_back(self) -> None:
        _put_back(self._before)
        self._before = {}


def _handle(numbers: Sequence[int], handler: Callable[..., None]) -> dict[int, Any]:
    """Set a handler for signals that are not ignored; return the earlier ones."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {}
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            # None stands for a handler that is none of Python's.
            before[number] = signal.signal(number, handler) or signal.SIG_DFL
    return before


def _put_back(before: Mapping[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


def _tell_the_terminal() -> None:
    """Print, on one rank, what Ctrl-C does; past Python's streams, which may be in mid-write."""
    if os.environ.get("RANK", "0") == "0":
        message = "interrupted: the step is finished and saved; Ctrl-C again ends at once"
        with suppress(OSError):
            os.write(2, f"\n{message}\n".encode())
