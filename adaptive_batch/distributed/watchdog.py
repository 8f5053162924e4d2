"""One rank that fails ends the others, within a quarter of a second and with one message.

A rank that fails leaves the others in a collective, which ends at the process group's timeout: half
an hour on gloo. Neither a monitored barrier nor aborting the group frees them. So a thread of each
rank asks the store that torchrun's environment names whether a rank has failed, and whether the
ranks of the same machine are alive: gloo notices one that was killed, NCCL does not. The first rank
to fail claims the end and prints why, rank zero writes it down, and each process ends where it
stands. A second thread ends a run that has stopped without failing. Signals play no part: Python
handles them in the main thread, which is the one that hangs.

    claim          the first rank to fail: its `End`
    written        rank zero has written the end down, or has left and never will
    left/RANK      that rank ends, or needs the store no longer
    host leaves    rank zero, whose process holds the store, has ended well
    process/RANK   namespace and number of that rank's process
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
from typing import Any, NoReturn

import torch.distributed as dist

from adaptive_batch._util import replaced
from adaptive_batch.errors import AdaptiveBatchError

from . import collectives as distributed

if dist.is_available():
    from torch.distributed.distributed_c10d import PrefixStore, Store

_WRITTEN_SECONDS = 5.0
_LEFT_SECONDS = 2.0
# torchrun looks every 0.1 s, ends all and names the first: time for the rank that failed to go
# first.
_LINGER_SECONDS = 0.3
_LAST_RESORT_SECONDS = 15.0
_TICK_SECONDS = 0.25

# What gloo, NCCL and the store say when the process at the other end has gone.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|remote process"
    r" exit|ncclRemoteError|recv, got 0 bytes",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class End:
    """Reason why a run ended on all ranks: the rank that failed first, its node as torchrun numbers
    it, and facts as JSON values.

    The kind is ``error``, ``out_of_memory``, ``stalled``, ``lost_peer`` or ``lost_store``.
    """

    rank: int
    kind: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    node: int = 0


class Watchdog:
    """Ends this process when another rank fails, and the others when this one does.

    Making one is a collective that needs no process group: every rank makes one, all before or all
    after ``init_process_group``.

    Args:
        stall_seconds: so long without a beat is a stall; None for no such limit.
        on_end: called on rank zero alone with the reason, in whichever thread learns of it, while
            the main thread may be anywhere. The other ranks wait for it no longer than 5 s. See
            :meth:`call_at_end`.

    Raises:
        torch.distributed.DistNetworkError, RankLostError: as
            :func:`adaptive_batch.distributed.meet_ranks`.
    """

    def __init__(
        self,
        *,
        stall_seconds: float | None = None,
        on_end: Callable[[End], object] = lambda end: None,
    ) -> None:
        self._on_end = on_end
        store, self._rank, world_size = distributed.meet_ranks()
        # The store outlives this object: what an earlier one has left there is not read again.
        self._store: Store = PrefixStore(
            f"watch/{store.add(f'watch/started/{self._rank}', 1)}", store
        )
        self._has_store = True
        self._rank_zero_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._node = int(os.environ.get("GROUP_RANK", "0"))
        self._others = [number for number in range(world_size) if number != self._rank]
        first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
        of_node = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._neighbours = dict.fromkeys(set(self._others).intersection(of_node), "")
        self._limit = stall_seconds
        self._last_beat = (time.monotonic(), "it started")
        self._main = threading.get_ident()
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._ending = threading.Lock()

    def call_at_end(self, on_end: Callable[[End], object]) -> None:
        """Call a function with the reason of an end from now on, in place of the one before."""
        self._on_end = on_end

    def start(self) -> None:
        """Watch over the thread that calls it."""
        self._main = threading.get_ident()
        self.beat()
        self._store.set(f"process/{self._rank}", f"{_namespace()} {os.getpid()}")
        for target in (self._watch, self._keep_time):
            self._threads.append(
                threading.Thread(
                    target=target, name=f"adaptive_batch{target.__name__}", daemon=True
                )
            )
            self._threads[-1].start()

    def stop(self) -> None:
        """End the watch of a rank that ended well. The others may train for as long as they like,
        and watch each other.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        # An error where the store has gone.
        with contextlib.suppress(RuntimeError):
            if self._has_store:
                if self._rank == 0:
                    self._store.set("written", "")
                    self._store.set("host leaves", "")
                self._leave_store()
        # One that uses the store when Python ends would abort the process.
        for thread in self._threads:
            thread.join(_LAST_RESORT_SECONDS)

    def beat(self, doing: str = "") -> None:
        """Report progress: at each step, micro-batch or trial. `doing` is what begins now, for the
        message of a stall.
        """
        self._last_beat = (time.monotonic(), doing or self._last_beat[1])

    @contextlib.contextmanager
    def time_limit(self, seconds: float | None, doing: str) -> Iterator[None]:
        """Context manager: inside, so many `seconds` without a beat are a stall; with None, no time
        is.
        """
        was_doing = self._last_beat[1]
        self.beat(doing)
        with replaced(self, _limit=seconds):
            try:
                yield
            finally:
                self.beat(was_doing)

    def fail(
        self,
        error: BaseException | str,
        *,
        kind: str = "error",
        facts: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """End the run on all ranks. Call it before the process group is destroyed, which the others
        would notice first.

        The first rank to fail prints why on stderr, once: an error of ours in a line, any other
        with its traceback. A rank that fails later prints nothing. When rank zero has written it
        down, each process ends with status 1 and without clean-up.

        Args:
            error: what happened. An error that another rank has gone becomes a ``lost_peer``.
            kind, facts: of :class:`End`.
        """
        if kind == "error" and isinstance(error, RuntimeError) and _PEER_GONE.search(str(error)):
            self._end_of_this("lost_peer", _lost_peer(_gist(error)), facts)
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = f"rank {self._rank}: {message}"
        if isinstance(error, AdaptiveBatchError) and "ADAPTIVE_BATCH_TRACEBACK" not in os.environ:
            text = message
        elif isinstance(error, BaseException):
            text = f"rank {self._rank}:\n{''.join(traceback.format_exception(error)).rstrip()}"
        self._end(End(self._rank, kind, message, facts or {}, self._node), text)

    def _end(self, end: End, text: str) -> NoReturn:
        """End this process with status 1.

        The first rank that claims the end prints its text, and the others print nothing. Rank zero
        writes down what was claimed, for which all wait. Then each process ends, the claimant
        before the other ranks of its machine.
        """
        if not self._ending.acquire(blocking=False):
            # Another thread of this process ends it already.
            time.sleep(2 * _LAST_RESORT_SECONDS)
            os._exit(1)
        texts_to_say = [text]

        def say() -> None:
            if texts_to_say:
                _tell_torchrun(texts_to_say[0])
                _print(texts_to_say.pop())

        def end_at_last() -> None:
            say()
            os._exit(1)

        # The process ends even if something holds it up, such as a store that does not answer.
        timer = threading.Timer(_LAST_RESORT_SECONDS, end_at_last)
        timer.daemon = True
        # The system may have no thread to give.
        with contextlib.suppress(RuntimeError):
            timer.start()
        own_claim = json.dumps(asdict(end), default=str)
        claim = self._claim(own_claim)
        is_claimant = claim == own_claim
        if is_claimant:
            say()
        # From now on the timer ends the process silently.
        texts_to_say.clear()
        if self._rank == 0:
            self._write_down(End(**json.loads(claim)))
        with contextlib.suppress(RuntimeError):
            if self._has_store:
                if self._rank == 0:
                    self._store.set("written", "")
                _await(self._store, ["written"], _WRITTEN_SECONDS)
                if not is_claimant and json.loads(claim)["node"] == self._node:
                    time.sleep(_LINGER_SECONDS)
                self._leave_store()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)

    def _claim(self, own_claim: str) -> str:
        """Return the claim of the first rank to fail; without a store that answers, the own one."""
        claim = own_claim
        with contextlib.suppress(RuntimeError):
            if self._has_store:
                claim = self._store.compare_set("claim", "", own_claim).decode()
        return claim

    def _leave_store(self) -> None:
        """Let a rank zero whose process holds the store end; that rank waits for the others."""
        self._store.set(f"left/{self._rank}", "")
        if self._rank == 0 and self._rank_zero_hosts and self._others:
            _await(self._store, [f"left/{number}" for number in self._others], _LEFT_SECONDS)

    def _watch(self) -> None:
        while self._has_store and not self._stopped.wait(_TICK_SECONDS):
            try:
                if self._store.check(["claim"]):
                    self._end(End(self._rank, "", ""), "")
                self._check_neighbours()
                if self._rank_zero_hosts and self._store.check(["host leaves"]):
                    self._has_store = False
                    self._leave_store()
            except RuntimeError as error:
                if self._has_store and not self._stopped.is_set():
                    self._has_store = False
                    gone = "torchrun, or rank zero where that holds the ranks together, has gone"
                    self._end_of_this("lost_store", f"{gone} ({_gist(error)})")

    def _check_neighbours(self) -> None:
        """End where a rank of this machine is no longer there; one in another namespace of
        processes is not watched.
        """
        for rank, process in self._neighbours.items():
            if not process and self._store.check([f"process/{rank}"]):
                process = self._store.get(f"process/{rank}").decode()
                self._neighbours[rank] = process
            namespace, _, number = process.rpartition(" ")
            is_gone = namespace and namespace == _namespace() and _has_ended(number)
            if is_gone and not self._store.check([f"left/{rank}"]):
                self._end_of_this("lost_peer", _lost_peer(f"rank {rank} is no longer there"))

    def _end_of_this(
        self, kind: str, message: str, facts: Mapping[str, Any] | None = None, where: str = ""
    ) -> NoReturn:
        self._end(
            End(self._rank, kind, message, facts or {}, self._node),
            f"rank {self._rank}: {message}{where}",
        )

    def _keep_time(self) -> None:
        while not self._stopped.wait(_TICK_SECONDS):
            since, doing = self._last_beat
            seconds = self._limit
            if seconds is not None and time.monotonic() - since > seconds:
                stack = "".join(
                    traceback.format_stack(sys._current_frames().get(self._main))
                ).rstrip()
                message = f"no progress for {seconds:g} s, since {doing}"
                facts = {"seconds": seconds, "doing": doing}
                self._end_of_this("stalled", message, facts, f"; it stands at\n{stack}")

    def _write_down(self, end: End) -> None:
        try:
            self._on_end(end)
        except Exception as error:
            _print(
                f"rank {self._rank}: why the run ended was not written down:"
                f" {type(error).__name__}: {error}"
            )


def _lost_peer(reason: str) -> str:
    return (
        f"another rank has gone without a word, perhaps killed for want of memory ({reason});"
        " --max-restarts, or resume_from_checkpoint=True, resumes from what was saved last"
    )


def _await(store: Store, keys: list[str], seconds: float) -> None:
    """Return when the keys are there, or no later than in so many seconds: a wait of the store's
    would warn on stderr.
    """
    until = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.01)


def _namespace() -> str:
    """Name the namespace in which process numbers mean something; empty where the system has none
    to name.
    """
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _has_ended(process: str) -> bool:
    """Return whether a process is no longer there, or waits to be reaped by its parent."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _print(text: str) -> None:
    # Nobody may be there to read it.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def _tell_torchrun(text: str) -> None:
    """Write the file from which torchrun's summary takes the reason, in the form of its
    `ErrorHandler`.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _gist(error: BaseException) -> str:
    """Return the first sentence of an error, without the place in the C++ code that gloo begins
    with.
    """
    return re.split(r"\. |\n", re.sub(r"^\[[^\]]*\] *", "", str(error)))[0]
