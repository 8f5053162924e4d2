"""Signals that request a stop: recorded on arrival, handled between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType

# Stopped on request and saved; restart to resume: "temporary failure; the user is invited to
# retry" (sysexits.h).
EXIT_STATUS = 75


# Sent by a scheduler, by Ctrl-C, and by a closed terminal. Windows has no SIGHUP.
_REQUESTS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)


class Terminated(KeyboardInterrupt):
    """Stop request that ends the process immediately."""


def raising_on_request() -> AbstractContextManager[None]:
    """Create a context manager in which SIGTERM and SIGHUP raise :class:`Terminated` in the main
    thread; Ctrl-C still raises KeyboardInterrupt.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    return _handled_by(end, [number for number in _REQUESTS if number != signal.SIGINT])


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
        self._requested_at = 0.0
        self._handlers = ExitStack()

    def __enter__(self) -> Preemption:
        self._handlers.enter_context(_handled_by(self._note, _REQUESTS))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self._requested_at = time.monotonic()
            if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
                message = (
                    "interrupted: finishing and saving the step; Ctrl-C again stops immediately"
                )
                # Python's streams may be in mid-write.
                with suppress(OSError):
                    os.write(2, f"\n{message}\n".encode())
            if not self._same_within:
                self._handlers.close()
        elif time.monotonic() - self._requested_at > self._same_within:
            self._handlers.close()
            os.kill(os.getpid(), number)


@contextmanager
def _handled_by(handler: Callable[..., None], numbers: Sequence[int]) -> Iterator[None]:
    """Context manager that sets a handler for signals that are not ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) != signal.SIG_IGN:
                # None means that the handler was not set by Python.
                before[number] = signal.signal(number, handler) or signal.SIG_DFL
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
