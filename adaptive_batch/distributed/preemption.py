"""Signals that request a stop: recorded on arrival, handled between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# Stopped on request and saved; restart to resume: "temporary failure; the user is invited to
# retry" (sysexits.h).
EXIT_STATUS = 75


# Sent by a scheduler, by Ctrl-C, and by a closed terminal. Windows has no SIGHUP.
_REQUESTS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)


class Terminated(KeyboardInterrupt):
    """Stop request that ends the process immediately."""


@contextmanager
def raising_on_request() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGHUP raise :class:`Terminated` in the main thread;
    Ctrl-C still raises KeyboardInterrupt.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = _handle([number for number in _REQUESTS if number != signal.SIGINT], end)
    try:
        yield
    finally:
        _put_back(previous)


class Preemption:
    """Context manager in which SIGTERM, Ctrl-C and SIGHUP set :attr:`requested` instead of ending
    the process.

    A second request acts as without this context manager. Signals that are ignored, such as SIGHUP
    under nohup, stay ignored. In threads other than the main thread this context manager does
    nothing.

    Args:
        same_within: seconds in which a repeated request counts as the same one: a scheduler may
            signal all processes, and torchrun forwards its own signal.
    """

    def __init__(self, *, same_within: float = 0.0) -> None:
        self.requested = False
        self._same_within = same_within
        self._asked_at = 0.0
        # Previous handlers by signal while this context is active.
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
    """Set a handler for signals that are not ignored; return the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {}
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            # None means that the handler was not set by Python.
            before[number] = signal.signal(number, handler) or signal.SIG_DFL
    return before


def _put_back(before: Mapping[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


def _tell_the_terminal() -> None:
    """Print the effect of Ctrl-C on one rank; bypass Python's streams, which may be in
    mid-write.
    """
    if os.environ.get("RANK", "0") == "0":
        message = "interrupted: finishing and saving the step; Ctrl-C again stops immediately"
        with suppress(OSError):
            os.write(2, f"\n{message}\n".encode())
