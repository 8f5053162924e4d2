"""Ends of a process: a stop that is requested by a signal, and the failure of a rank.

A requested stop is recorded on arrival and handled between two steps. A rank that fails would leave
the others in a collective, so it exits immediately: torchrun then ends the other ranks of the
machine, and ranks of other machines end with the process group's timeout, or earlier because gloo
reports the closed connection.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from adaptive_batch.errors import AdaptiveBatchError, RankLostError

from .collectives import meet_ranks

# Stopped on request and saved; restart to resume: "temporary failure; the user is invited to
# retry" (sysexits.h).
EXIT_STATUS = 75


# Signals of a scheduler, of Ctrl-C, and of a closed terminal. Windows has no SIGHUP.
_STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)


class Terminated(KeyboardInterrupt):
    """Stop request that ends the process immediately."""


def raising_on_request() -> AbstractContextManager[None]:
    """Create a context manager in which SIGTERM and SIGHUP raise :class:`Terminated` in the main
    thread; Ctrl-C still raises KeyboardInterrupt.
    """

    def raise_terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signals = [number for number in _STOP_SIGNALS if number != signal.SIGINT]
    return _handled_by(raise_terminated, signals)


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
        self._handlers.enter_context(_handled_by(self._on_signal, _STOP_SIGNALS))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            is_repeated = time.monotonic() - self._requested_at <= self._same_within
            if not is_repeated:
                # Send the second request again, to the handler from before this context manager.
                self._handlers.close()
                os.kill(os.getpid(), number)
            return
        self.requested = True
        self._requested_at = time.monotonic()
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            message = "interrupted: finishing and saving the step; Ctrl-C again stops immediately"
            # Write to the file descriptor: the signal may have interrupted a write to sys.stderr,
            # which raises an error if it is entered again.
            with suppress(OSError):
                os.write(2, f"\n{message}\n".encode())
        if not self._same_within:
            # The former handler takes a second request. Unlike this method, the default one ends
            # the process even while the main thread waits in C code, as in a collective.
            self._handlers.close()


@contextmanager
def _handled_by(handler: Callable[..., None], numbers: Sequence[int]) -> Iterator[None]:
    """Context manager that sets a handler for signals that are not ignored."""
    former_handlers = {}
    # Python allows only the main thread to set handlers.
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            former = signal.getsignal(number)
            if former != signal.SIG_IGN:
                signal.signal(number, handler)
                # A handler that C code has set reads as None and cannot be set again.
                former_handlers[number] = former or signal.SIG_DFL
    try:
        yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)


# torchrun polls every 0.1 s and reports the first rank to exit as the cause.
_LINGER_SECONDS = 1.0

# Errors of gloo, NCCL and the store after the peer process exited.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|remote process"
    r" exit|ncclRemoteError|recv, got 0 bytes",
    re.IGNORECASE,
)
# Errors of gloo and the store if a rank does not join a collective in time.
_TIMED_OUT = re.compile(r"timed out waiting|wait timeout", re.IGNORECASE)
_SECONDS_BETWEEN_LINES = 5.0


class Watchdog:
    """Ends this process after an error. A thread publishes which line runs, so that a rank whose
    collective times out can name the ranks that did not join it.

    The constructor is a collective that needs no process group. All ranks call it, either all
    before or all after ``init_process_group``.

    Attributes:
        on_end: function that the first rank to fail calls with a kind, a message and facts. The
            kind is ``error``, ``out_of_memory``, ``stalled`` or ``lost_peer``.

    Raises:
        torch.distributed.DistNetworkError, RankLostError: as
            :func:`adaptive_batch.distributed.meet_ranks`.
    """

    def __init__(self) -> None:
        store, self._rank, self._num_ranks = meet_ranks()
        # A connection of its own: the main thread may hang in a call of the store.
        self._store = store.clone()  # type: ignore[attr-defined]
        self.on_end: Callable[[str, str, Mapping[str, Any]], object] = lambda *_: None
        self._is_closed = threading.Event()
        self._publisher = threading.Thread(
            target=self._publish_lines, args=(threading.get_ident(),), daemon=True
        )
        self._publisher.start()

    def close(self) -> None:
        """End the thread, before the interpreter ends it in a call of the store."""
        self._is_closed.set()
        self._publisher.join(_LINGER_SECONDS)

    def _publish_lines(self, thread: int) -> None:
        # The process that hosts the store may exit first.
        with suppress(RuntimeError):
            self._store.set(f"line/{self._rank}", _running_line(thread))
            while not self._is_closed.wait(_SECONDS_BETWEEN_LINES):
                self._store.set(f"line/{self._rank}", _running_line(thread))

    def _ranks_at_other_lines(self) -> str:
        """Return the ranks that run another line than this rank, for a message."""
        try:
            lines = [self._store.get(f"line/{rank}").decode() for rank in range(self._num_ranks)]
        except RuntimeError as error:
            return f"their lines are unknown: {error}"
        others = [
            f"rank {rank} is in {line}"
            for rank, line in enumerate(lines)
            if line != lines[self._rank]
        ]
        return ", ".join(others) or "all ranks run the same line"

    def fail(self, error: BaseException | str) -> NoReturn:
        """Exit with status 1 and without clean-up. Call this before destroying the process group,
        since the other ranks would detect that first.

        The first rank to fail prints the reason on stderr: an error of this package as one line,
        any other with its traceback. Ranks that fail later print nothing.
        """
        # Each _end() below exits. Publish no more lines: the last one shows the other ranks where
        # this rank failed.
        self._is_closed.set()
        facts = error.facts if isinstance(error, RankLostError) else {}
        if isinstance(error, RuntimeError):
            reason = _first_sentence(error)
            if _TIMED_OUT.search(reason):
                message = f"a collective timed out ({reason}); {self._ranks_at_other_lines()}"
                self._end("stalled", message, facts, f"rank {self._rank}: {message}")
            if _PEER_GONE.search(reason):
                message = (
                    "another rank exited without an error message, perhaps killed by the OOM killer"
                    f" ({reason}); resume with resume_from_checkpoint=True, or with auto and"
                    " torchrun's --max-restarts"
                )
                self._end("lost_peer", message, facts, f"rank {self._rank}: {message}")
        if isinstance(error, str):
            self._end("error", error, facts, f"rank {self._rank}: {error}")
        # Only a rank that ran out of memory reports its limit.
        kind = "out_of_memory" if "limit" in facts else "error"
        message = f"{type(error).__name__}: {error}"
        text = f"rank {self._rank}:\n{''.join(traceback.format_exception(error)).rstrip()}"
        if isinstance(error, AdaptiveBatchError) and "ADAPTIVE_BATCH_TRACEBACK" not in os.environ:
            text = message
        self._end(kind, message, facts, text)

    def _end(self, kind: str, message: str, facts: Mapping[str, Any], text: str) -> NoReturn:
        """Exit with status 1 and without clean-up; the first rank to fail reports the reason."""
        try:
            is_first = self._store.add("failed", 1) == 1
        except RuntimeError:
            # The process that hosts the store has exited.
            is_first = True
        if is_first:
            _print(text)
            try:
                self.on_end(kind, message, facts)
            except Exception as failure:
                _print(f"the reason could not be recorded: {type(failure).__name__}: {failure}")
        if is_first and kind != "lost_peer":
            _write_error_file(text)
        else:
            # torchrun reports the first rank to exit as the cause: exit after the one that failed.
            time.sleep(_LINGER_SECONDS)
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        os._exit(1)


def _first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of an error, without the C++ source location that gloo puts before
    it in brackets.
    """
    text = re.sub(r"^\[[^\]]*\] *", "", str(error))
    return re.split(r"\. |\n", text)[0]


def _running_line(thread: int) -> str:
    """Return the innermost line outside of torch that a thread runs."""
    frame = sys._current_frames()[thread]
    while frame.f_globals.get("__name__", "").startswith("torch.") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _print(text: str) -> None:
    # stderr may be closed.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def _write_error_file(text: str) -> None:
    """Write the file that torchrun's summary reads.

    torch's ``ErrorHandler`` would write the traceback of the thread that calls it instead of the
    text.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
