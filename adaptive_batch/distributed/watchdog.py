"""Watchdog that ends all ranks within a quarter of a second after one fails, with one message.

A rank that fails leaves the others in a collective until the process group's timeout: half an hour
with gloo. Neither a monitored barrier nor aborting the group releases them. Therefore a thread of
each rank polls the store of torchrun's environment for failures, and checks that the ranks of its
machine are alive: gloo detects a killed rank, NCCL does not. The first rank to fail claims the end
and prints the reason, rank 0 records it, and each process exits immediately. A second thread ends a
run that makes no progress. The watchdog uses no signals: Python handles signals in the main thread,
which may hang.

    claim          `End` of the first rank to fail
    written        rank 0 has recorded the end, or has exited and never will
    left/RANK      rank exits, or no longer needs the store
    host leaves    rank 0, which hosts the store, has finished without error
    process/RANK   namespace and process id of the rank
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
# torchrun polls every 0.1 s, stops all ranks and reports the first to exit: let the rank that
# failed exit first.
_LINGER_SECONDS = 0.3
_LAST_RESORT_SECONDS = 15.0
_TICK_SECONDS = 0.25

# Errors of gloo, NCCL and the store after the peer process exited.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset)|broken pipe|socket closed|remote process"
    r" exit|ncclRemoteError|recv, got 0 bytes",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class End:
    """Reason why a run ended: the first rank to fail, its node in torchrun's numbering, and facts
    as JSON values.

    The kind is ``error``, ``out_of_memory``, ``stalled``, ``lost_peer`` or ``lost_store``.
    """

    rank: int
    kind: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    node: int = 0


class Watchdog:
    """Ends this process when another rank fails, and the other ranks when this one fails.

    The constructor is a collective that needs no process group. All ranks call it, either all
    before or all after ``init_process_group``.

    Args:
        stall_seconds: maximum time without a beat; None for no limit.
        on_end: function that rank 0 calls with the reason, in the thread that detects the end,
            while the main thread may still run. The other ranks wait up to 5 s for it. See
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
        # The store outlives this object; do not read the keys of an earlier watchdog.
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
        """Replace the function that receives the reason of an end."""
        self._on_end = on_end

    def start(self) -> None:
        """Watch the calling thread."""
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
        """Stop watching after this rank finished without error. The others continue to train and to
        watch each other.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        # The store may be gone.
        with contextlib.suppress(RuntimeError):
            if self._has_store:
                if self._rank == 0:
                    self._store.set("written", "")
                    self._store.set("host leaves", "")
                self._leave_store()
        # A thread that uses the store during interpreter shutdown would abort the process.
        for thread in self._threads:
            thread.join(_LAST_RESORT_SECONDS)

    def beat(self, doing: str = "") -> None:
        """Report progress at each step, micro-batch or trial. `doing` names the next activity in a
        stall message.
        """
        self._last_beat = (time.monotonic(), doing or self._last_beat[1])

    @contextlib.contextmanager
    def time_limit(self, seconds: float | None, doing: str) -> Iterator[None]:
        """Context manager that sets the maximum `seconds` without a beat; None for no limit."""
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
        """End the run on all ranks. Call this before destroying the process group, since the other
        ranks would detect that first.

        The first rank to fail prints the reason on stderr once: an error of this package as one
        line, any other with its traceback. A rank that fails later prints nothing. After rank 0 has
        recorded the reason, each process exits with status 1 and without clean-up.

        Args:
            error: error or message. An error about a lost peer becomes ``lost_peer``.
            kind, facts: see :class:`End`.
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

        The first rank that claims the end prints its text; the others print nothing. All ranks wait
        until rank 0 has recorded the claim. Then each process exits, the claimant before the other
        ranks of its machine.
        """
        if not self._ending.acquire(blocking=False):
            # Another thread is ending this process.
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

        # The timer ends the process even if the store does not answer.
        timer = threading.Timer(_LAST_RESORT_SECONDS, end_at_last)
        timer.daemon = True
        # The system may be out of threads.
        with contextlib.suppress(RuntimeError):
            timer.start()
        own_claim = json.dumps(asdict(end), default=str)
        claim = self._claim(own_claim)
        is_claimant = claim == own_claim
        if is_claimant:
            say()
        # From here on the timer prints nothing.
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
        """Return the claim of the first rank to fail, or this rank's own if the store does not
        answer.
        """
        claim = own_claim
        with contextlib.suppress(RuntimeError):
            if self._has_store:
                claim = self._store.compare_set("claim", "", own_claim).decode()
        return claim

    def _leave_store(self) -> None:
        """Mark this rank as done with the store. If rank 0 hosts the store, it waits for the
        others.
        """
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
                    gone = "torchrun, or rank 0 if it hosts the store, has exited"
                    self._end_of_this("lost_store", f"{gone} ({_gist(error)})")

    def _check_neighbours(self) -> None:
        """End this rank if another rank of this machine has exited; ranks in other process
        namespaces are not checked.
        """
        for rank, process in self._neighbours.items():
            if not process and self._store.check([f"process/{rank}"]):
                process = self._store.get(f"process/{rank}").decode()
                self._neighbours[rank] = process
            namespace, _, number = process.rpartition(" ")
            is_gone = namespace and namespace == _namespace() and _has_ended(number)
            if is_gone and not self._store.check([f"left/{rank}"]):
                self._end_of_this("lost_peer", _lost_peer(f"rank {rank} is gone"))

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
                self._end_of_this("stalled", message, facts, f"; stack:\n{stack}")

    def _write_down(self, end: End) -> None:
        try:
            self._on_end(end)
        except Exception as error:
            _print(
                f"rank {self._rank}: the reason for the end could not be recorded:"
                f" {type(error).__name__}: {error}"
            )


def _lost_peer(reason: str) -> str:
    return (
        "another rank exited without an error message, perhaps killed by the OOM killer"
        f" ({reason}); resume from the last checkpoint with torchrun's --max-restarts or"
        " resume_from_checkpoint=True"
    )


def _await(store: Store, keys: list[str], seconds: float) -> None:
    """Wait until the keys exist, at most `seconds`; the store's own wait would warn on stderr."""
    until = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.01)


def _namespace() -> str:
    """Return the process namespace, the scope of process ids; empty if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _has_ended(process: str) -> bool:
    """Return whether a process has exited or is a zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _print(text: str) -> None:
    # stderr may be closed.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()


def _tell_torchrun(text: str) -> None:
    """Write the error file of torchrun's `ErrorHandler`, which its summary reads."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def _gist(error: BaseException) -> str:
    """Return the first sentence of an error without gloo's C++ source location."""
    return re.split(r"\. |\n", re.sub(r"^\[[^\]]*\] *", "", str(error)))[0]
