"""One rank that fails ends the others, at once and with one message.

A rank that fails leaves the others in a collective, which ends at the process group's timeout: half an hour on gloo.
Neither a monitored barrier nor aborting the group frees them. So a thread of each rank waits, with a connection of its
own, for a word in the store that torchrun's environment names. The rank that fails first claims the end, says why, has
rank zero write it down, gives all others the word, and each process ends where it stands. A second thread ends a run that
has stopped without failing, or in which a rank of the same machine was killed: gloo tells its peers of that, NCCL does not.
Signals play no part: Python handles them in the main thread, which is the one that hangs.

    claim          the first rank to fail: its `End`
    word/RANK      what that rank is waiting for: an `End`, or that it may stop waiting
    written        rank zero has written the end down, or has left and never will
    left/RANK      that rank has heard, or has left
    process/RANK   the process of that rank
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from adaptive_batch.errors import AdaptiveBatchError

from . import collectives as distributed
from .processes import Processes, name_of_this_process

if dist.is_available():
    from torch.distributed.distributed_c10d import PrefixStore, Store

# Once all neighbours are seen, nothing is asked of the store until something happens. A wait that runs out has torch warn
# of it on stderr, and a longer one would not fit into the milliseconds of poll(2).
_WITHOUT_END = timedelta(days=20)
_WRITTEN_SECONDS = 5.0
_LEFT_SECONDS = 2.0
# torchrun looks every 0.1 s, ends all and names the first: time for the rank that failed to go first.
_LINGER_SECONDS = 0.3
_LAST_RESORT_SECONDS = 15.0
_TICK_SECONDS = 0.5
_STOPPED, _HOST_LEAVES = "stopped", "host leaves"

# What gloo, NCCL and the store say when the process at the other end has gone.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|remote process exit|ncclRemoteError|recv, got 0 bytes",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class End:
    """Why a run ended on all ranks.

    Attributes:
        rank: the rank that said so.
        kind: ``error``, ``out_of_memory``, ``stalled``, ``lost_peer`` or ``lost_store``.
        message: in a sentence.
        facts: what is known beside it, as JSON values.
        node: of that rank, numbered as torchrun does.
    """

    rank: int
    kind: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    node: int = 0


class Watchdog:
    """Ends this process when another rank fails, and the others when this one does. :meth:`connect` makes it.

    Args:
        stall_seconds: so long without a beat is a stall; None for no such limit.
        on_end: called on rank zero alone with the reason, in whichever thread learns of it, while the main thread may be
            anywhere. The rank that failed waits for it no longer than 5 s. It can be set later, too.

    Raises:
        torch.distributed.DistNetworkError, RankLostError: as :func:`adaptive_batch.distributed.meet`.
    """

    def __init__(self, *, stall_seconds: float | None = None, on_end: Callable[[End], object] | None = None) -> None:
        self.on_end = on_end
        (store, rank, world_size), (waiting, _, _) = distributed.meet_ranks(), distributed.meet_ranks()
        # The store outlives this object: what was said there before is not heard again.
        prefix = f"watch/{store.add(f'watch/started/{rank}', 1)}"
        self._store: Store = PrefixStore(prefix, store)
        self._waiting: Store = PrefixStore(prefix, waiting)  # blocked by the thread that watches
        self._has_store = True
        self._hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._rank, self._node = rank, int(os.environ.get("GROUP_RANK", "0"))
        self._others = [other for other in range(world_size) if other != rank]
        first = rank - int(os.environ.get("LOCAL_RANK", "0"))
        of_node = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._unseen = [other for other in self._others if other in of_node]
        self._neighbours = Processes()
        self._limit = stall_seconds
        self._last_beat = (time.monotonic(), "it started")
        self._main = threading.get_ident()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._unsaid = ""

    @classmethod
    def connect(
        cls, *, stall_seconds: float | None = None, on_end: Callable[[End], object] | None = None
    ) -> Watchdog | None:
        """Returns a watch that has yet to start, or None where the environment names no store, as without torchrun.

        A collective, that needs no process group: every rank calls it, all before or all after ``init_process_group``. It holds two
        connections to the store.
        """
        named = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        return cls(stall_seconds=stall_seconds, on_end=on_end) if named and dist.is_available() else None

    def start(self) -> None:
        """Begins to watch over the thread that calls it."""
        self._main = threading.get_ident()
        self.beat()
        self._store.set(f"process/{self._rank}", name_of_this_process())
        for target in (self._watch, self._keep_time):
            self._threads.append(threading.Thread(target=target, name=f"adaptive_batch{target.__name__}", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Ends the watch of a rank that ended well. The others may go on for as long as they like, and watch each other."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        with contextlib.suppress(RuntimeError):  # without a store there is nobody to tell
            if self._has_store:
                if self._rank == 0:
                    self._store.set("written", "")
                self._store.set(f"left/{self._rank}", "")
                self._store.compare_set(f"word/{self._rank}", "", _STOPPED)
                for other in self._others if self._hosts_store else ():
                    self._store.compare_set(f"word/{other}", "", _HOST_LEAVES)
                self._outlive(self._store, self._others)
        for thread in self._threads:  # one that still waits in the store when Python ends would abort the process
            thread.join(_LAST_RESORT_SECONDS)
        self._neighbours.close()

    def beat(self, doing: str = "") -> None:
        """Says that the run goes on: at each step, micro-batch or trial.

        Args:
            doing: what begins now, for the message that a stall would give; the last one still holds where there is none.
        """
        self._last_beat = (time.monotonic(), doing or self._last_beat[1])

    @contextlib.contextmanager
    def limit(self, seconds: float | None, doing: str) -> Iterator[None]:
        """Within its context so many `seconds` without a beat are a stall; with None, no time is."""
        before, was_doing = self._limit, self._last_beat[1]
        self.beat(doing)
        self._limit = seconds
        try:
            yield
        finally:
            self.beat(was_doing)
            self._limit = before

    def fail(
        self, error: BaseException | str, *, kind: str = "error", facts: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Ends the run on all ranks. Call it before the process group is destroyed, which the others would hear of first.

        The first rank to fail says why on stderr, once: an error of ours in a line, any other with its traceback. A rank that
        fails later says nothing. When rank zero has been told, each process ends with status 1 and without clean-up.

        Args:
            error: what happened. An error that says that another rank has gone becomes a ``lost_peer``.
            kind: of :class:`End`.
            facts: of :class:`End`.
        """
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = f"rank {self._rank}: {message}"
        if kind == "error" and isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)):
            kind = "lost_peer"
            message = _lost_peer(_gist(error))
            text = f"rank {self._rank}: {message}"
        elif isinstance(error, AdaptiveBatchError) and "ADAPTIVE_BATCH_TRACEBACK" not in os.environ:
            text = message
        elif isinstance(error, BaseException):
            text = f"rank {self._rank}:\n{''.join(traceback.format_exception(error)).rstrip()}"
        self._end(End(self._rank, kind, message, dict(facts or {}), self._node), text)

    def _end(self, end: End, text: str) -> NoReturn:
        if not self._ending.acquire(blocking=False):
            _wait_for_another_thread()
        self._unsaid, packed = text, json.dumps(asdict(end), default=str)
        self._end_at_last()
        if not self._claims(packed):
            self._unsaid = ""
            if not self._threads:
                self._watch()
            _wait_for_another_thread()
        self._say()
        if self._rank == 0:
            self._write_down(end)
        with contextlib.suppress(RuntimeError):
            if self._has_store:
                self._give_the_word(packed)
        _leave()

    def _claims(self, packed: str) -> bool:
        try:
            return not self._has_store or self._store.compare_set("claim", "", packed) == packed.encode()
        except RuntimeError:
            self._has_store = False
            return True

    def _give_the_word(self, packed: str) -> None:
        if self._rank != 0:
            self._store.set("word/0", packed)
            _await(self._store, ["written"], _WRITTEN_SECONDS)
        for other in self._others:
            self._store.set(f"word/{other}", packed)
        self._outlive(self._store, self._others)

    def _watch(self) -> None:
        try:
            word = self._word()
        except RuntimeError as error:
            if self._stopped.is_set():
                return
            self._has_store = False
            message = f"torchrun, or rank zero where that holds the ranks together, has gone ({_gist(error)})"
            self._end(End(self._rank, "lost_store", message, {}, self._node), f"rank {self._rank}: {message}")
        if word not in (_STOPPED, _HOST_LEAVES):
            self._follow(End(**json.loads(word)))
        self._has_store = word == _STOPPED
        with contextlib.suppress(RuntimeError):
            self._waiting.set(f"left/{self._rank}", "")

    def _word(self) -> str:
        while True:
            with contextlib.suppress(dist.DistStoreError):  # the wait ran out
                self._waiting.wait([f"word/{self._rank}"], _WITHOUT_END)
                return self._waiting.get(f"word/{self._rank}").decode()

    def _follow(self, end: End) -> NoReturn:
        self._end_at_last()
        with contextlib.suppress(RuntimeError):
            if self._rank == 0:
                self._write_down(end)
                self._waiting.set("written", "")
            if end.node == self._node:
                time.sleep(_LINGER_SECONDS)
            self._waiting.set(f"left/{self._rank}", "")
            self._outlive(self._waiting, [other for other in self._others if other != end.rank])
        _leave()

    def _outlive(self, store: Store, others: list[int]) -> None:
        if self._hosts_store and others:
            _await(store, [f"left/{other}" for other in others], _LEFT_SECONDS)

    def _keep_time(self) -> None:
        while not self._stopped.wait(_TICK_SECONDS):
            with contextlib.suppress(RuntimeError):  # of a store that has gone the other thread hears
                self._look_after_neighbours()
            (since, doing), seconds = self._last_beat, self._limit
            if seconds is not None and time.monotonic() - since > seconds:
                message = f"no progress for {seconds:g} s, since {doing}"
                stack = "".join(traceback.format_stack(sys._current_frames().get(self._main))).rstrip()
                facts = {"seconds": seconds, "doing": doing}
                end = End(self._rank, "stalled", message, facts, self._node)
                self._end(end, f"rank {self._rank}: {message}; it stands at\n{stack}")

    def _look_after_neighbours(self) -> None:
        if not self._has_store:
            return
        for other in [other for other in self._unseen if self._store.check([f"process/{other}"])]:
            self._unseen.remove(other)
            self._neighbours.look_after(other, self._store.get(f"process/{other}").decode())
        for other in self._neighbours.ended():
            if not self._store.check([f"left/{other}"]):
                message = _lost_peer(f"rank {other} is no longer there")
                self._end(End(self._rank, "lost_peer", message, {}, self._node), f"rank {self._rank}: {message}")

    def _write_down(self, end: End) -> None:
        try:
            if self.on_end is not None:
                self.on_end(end)
        except Exception as error:
            _print(f"rank {self._rank}: why the run ended was not written down: {type(error).__name__}: {error}")

    def _say(self) -> None:
        text, self._unsaid = self._unsaid, ""
        if text:
            _tell_torchrun(text)
            _print(text)

    def _end_at_last(self) -> None:
        """Whatever may keep this process from ending, as a store that does not answer, it has so many seconds."""

        def end() -> None:
            self._say()
            os._exit(1)

        timer = threading.Timer(_LAST_RESORT_SECONDS, end)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread is to be had
            timer.start()


def _lost_peer(said: str) -> str:
    return (
        f"another rank has gone without a word, perhaps killed for want of memory ({said}); --max-restarts, or "
        "resume_from_checkpoint=True, goes on from what was saved last"
    )


def _await(store: Store, keys: list[str], seconds: float) -> None:
    """Returns when the keys are there, or no later than in so many seconds: one rank asks, and a wait would warn on stderr."""
    until = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.01)


def _wait_for_another_thread() -> NoReturn:
    time.sleep(2 * _LAST_RESORT_SECONDS)
    os._exit(1)


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody may be there to read it
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def _tell_torchrun(text: str) -> None:
    """Writes the file from which torchrun's summary takes the reason, in the form of its `ErrorHandler`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _gist(error: BaseException) -> str:
    """The first sentence, without the place in the C++ code that gloo begins with."""
    return re.split(r"\. |\n", re.sub(r"^\[[^\]]*\] *", "", str(error)))[0]
