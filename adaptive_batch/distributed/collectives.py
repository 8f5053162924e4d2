"""Collectives over all ranks; without a process group there is one rank, and each function returns
what it was given.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adaptive_batch.errors import RankLostError

_IS_AVAILABLE = dist.is_available()
if _IS_AVAILABLE:
    from torch.distributed.distributed_c10d import PrefixStore, Store
    from torch.distributed.rendezvous import rendezvous

Result = TypeVar("Result")

# What rank zero does for all may take long: reading a checkpoint, writing one, counting the tokens
# of a dataset.
_PATIENCE = timedelta(hours=12)
_CONNECT = timedelta(minutes=5)
_COME = timedelta(minutes=10)
_patient_group: Any = None
# With tensor parallelism, so many ranks in a row hold one copy of the model and see the same rows.
_ranks_of_a_model = 1
# In which gloo's threads let go of the last tensors: one that does so while Python ends aborts the
# process.
_SETTLE_SECONDS = 0.1
# Whether this rank runs by itself, see `alone`.
_is_alone = ContextVar("_is_alone", default=False)
# What this process calls its attempt, by where the ranks meet.
_attempts: dict[tuple[str, ...], str] = {}


def is_launched() -> bool:
    """Return whether this process was started as one of several, as torchrun does; there need not
    be a process group yet.
    """
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def launch_name() -> str | None:
    """Return a name for what torchrun has started, the same after each restart; None without
    torchrun.
    """
    # "none" is torchrun's own word where nobody gave another.
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    return f"{run}/{platform.node()}/{os.getppid()}/{_began(os.getppid())}"


def _began(process: int) -> str:
    """Return when a process began, in ticks since the machine did: in containers, each launch may
    have the same number.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def meet_ranks() -> tuple[Store, int, int]:
    """Meet the other ranks in the store that torchrun's environment names; a collective, that needs
    no process group.

    torchrun's store outlives a restart, and what an earlier attempt has left there must not be read
    again. Its count of restarts does not tell them apart: a node whose ranks were well when
    another's failed starts them again uncounted.

    Returns:
        A new connection to what this attempt keeps in the store, this rank, and the number of
        ranks.

    Raises:
        torch.distributed.DistNetworkError: the store did not answer for 5 minutes.
        RankLostError: other ranks did not come within 10 minutes.
    """
    store, rank, size = next(rendezvous("env://", timeout=_CONNECT))
    place = tuple(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    if place not in _attempts:
        _attempts[place] = _attempt(PrefixStore("adaptive_batch/attempts", store), rank, size)
    return PrefixStore(f"adaptive_batch/{_attempts[place]}", store), rank, size


def _attempt(store: Store, rank: int, size: int) -> str:
    """Return a name that rank zero makes and gives to whoever asks until all ranks of this attempt
    have it.

    The ranks of an attempt have all ended before those of the next one start, so that nobody gets
    an earlier name.
    """
    if rank:
        number = store.add("asked", 1)
        try:
            store.wait([f"answer/{number}"], _COME)
        except dist.DistStoreError as error:
            raise RankLostError(f"rank zero has not come within {_COME}", {}) from error
        name = store.get(f"answer/{number}").decode()
        store.add(f"{name}/taken", 1)
        return name
    name = uuid.uuid4().hex
    until = time.monotonic() + _COME.total_seconds()
    while True:
        num_arrived = store.add(f"{name}/taken", 0)
        if num_arrived >= size - 1:
            break
        num_asked = store.add("asked", 0)
        num_answered = store.add("answered", 0)
        for number in range(num_answered + 1, num_asked + 1):
            store.set(f"answer/{number}", name)
        store.add("answered", num_asked - num_answered)
        if time.monotonic() > until:
            raise RankLostError(f"{num_arrived + 1} of {size} ranks have come within {_COME}", {})
        time.sleep(0.01)
    return name


def init_process_group(backend: str, *, ranks_of_a_model: int = 1) -> None:
    """Begin the process group of all ranks that were launched; `ranks_of_a_model` of tensor
    parallelism divides their number.
    """
    global _ranks_of_a_model, _patient_group
    store, rank, size = meet_ranks()
    dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size)
    _ranks_of_a_model = ranks_of_a_model
    _patient_group = dist.new_group(backend="gloo", timeout=_PATIENCE)


@contextlib.contextmanager
def fake_process_group(world_size: int, *, ranks_of_a_model: int = 1) -> Iterator[None]:
    """Context manager: inside, this is rank zero of `world_size` ranks whose collectives have
    shapes, and move nothing.

    `ranks_of_a_model` of tensor parallelism divides the world size.
    """
    global _ranks_of_a_model
    if world_size == 1:
        yield
        return
    assert not has_group(), "there is a process group already"
    dist.init_process_group("fake", rank=0, world_size=world_size)
    _ranks_of_a_model = ranks_of_a_model
    try:
        yield
    finally:
        destroy_process_group()


def destroy_process_group() -> None:
    """End the process group, if there is one."""
    global _ranks_of_a_model, _patient_group
    if has_group():
        dist.destroy_process_group()
    if _patient_group is not None:
        time.sleep(_SETTLE_SECONDS)
    _ranks_of_a_model = 1
    _patient_group = None


def host_group() -> Any:
    """Return another process group of all ranks, for tensors on the host; None with one rank."""
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def world_size() -> int:
    """Return the number of ranks; 1 without a process group, and within :func:`alone`."""
    return dist.get_world_size() if has_group() and not _is_alone.get() else 1


@contextlib.contextmanager
def alone(is_alone: bool = True) -> Iterator[None]:
    """Context manager: inside, the functions of this module act as with one rank, or where
    `is_alone` is false as with all of them again.
    """
    token = _is_alone.set(is_alone)
    try:
        yield
    finally:
        _is_alone.reset(token)


def refuse_collectives(error: Exception) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that raises `error` where a rank begins a collective of torch while
    it is :func:`alone`.
    """
    from adaptive_batch._torch import TorchDispatchMode

    class Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "c10d" in function.namespace and _is_alone.get():
                raise error
            return function(*args, **(kwargs or {}))

    return Refusing()  # type: ignore[no-untyped-call]


def rank() -> int:
    """Return the number of this rank, from 0; 0 without a process group."""
    return dist.get_rank() if has_group() else 0


def is_rank_zero() -> bool:
    """Return whether this is the rank that prints, writes and computes for all."""
    return rank() == 0


def data_parallel_size() -> int:
    """Return how many ranks see different rows: all of them but for tensor parallelism."""
    return world_size() // _ranks_of_a_model


def data_parallel_rank() -> int:
    """Return which of the :func:`data_parallel_size` parts of a step's rows this rank has."""
    return rank() // _ranks_of_a_model


def local_world_size() -> int:
    """Return how many ranks share this machine's memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world_size() > 1 else 1


def minimum(value: int) -> int:
    """Return the least `value` of all ranks, on every rank."""
    return -maximum(-value)


def maximum(value: int) -> int:
    """Return the greatest `value` of all ranks, on every rank."""
    if world_size() == 1:
        return value
    return all_reduce_max([value])[0]


def all_reduce_max(values: Sequence[int]) -> list[int]:
    """Return the greatest of each of `values`, as many on all ranks, in one collective."""
    if world_size() == 1:
        return list(values)
    # gloo where the group has it, otherwise this process's accelerator (NCCL)
    on_host = "cpu:" in dist.get_backend_config()
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator()
    reduced = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [int(value) for value in reduced.tolist()]


def all_reduce_sum(*tensors: torch.Tensor) -> None:
    """Put the sums over all ranks into some tensors, in place; one collective for each, which do
    not wait for each other.
    """
    if world_size() > 1:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def broadcast(tensor: torch.Tensor) -> None:
    """Replace a tensor by that of rank zero, in place."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0)


def all_gather(value: Result) -> list[Result]:
    """Return the `value` of each rank, by rank, on every rank; it must be picklable when there are
    other ranks.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def any_of_ranks(flag: bool) -> bool:
    """Return, on every rank, whether `flag` is true on one rank at least."""
    if world_size() == 1:
        return flag
    return bool(maximum(flag))


def from_rank_zero(compute: Callable[[], Result], group: Any = None) -> Result:
    """Compute on rank zero alone and share the result.

    Args:
        compute: called on rank zero; its result must be picklable when there are other ranks. They
            wait for it up to 12 hours, or where :func:`init_process_group` did not begin the group,
            up to its timeout.
        group: another process group of all ranks, so that a thread may call this where nothing else
            uses that group.

    Raises:
        BaseException: what `compute` raised on rank zero is raised on every rank, so that none is
            left waiting. An error that does not survive a pickle becomes a RuntimeError with its
            type and text on the other ranks.
    """
    if world_size() == 1:
        return compute()
    own = _outcome(compute) if is_rank_zero() else None
    envelope: list[Any] = [own and own.packed]
    dist.broadcast_object_list(envelope, src=0, group=group or _patient_group)
    result: Result = (own or _unpacked(envelope[0])).result()
    return result


def from_each_rank(compute: Callable[[], Result], group: Any = None) -> list[Result]:
    """Compute on every rank and return the results by rank, on every rank; arguments and errors as
    in :func:`from_rank_zero`.
    """
    if world_size() == 1:
        return [compute()]
    own = _outcome(compute)
    envelopes: list[Any] = [None] * world_size()
    dist.all_gather_object(envelopes, own.packed, group=group or _patient_group)
    return [
        (own if of == rank() else _unpacked(envelope)).result()
        for of, envelope in enumerate(envelopes)
    ]


def on_rank_zero(act: Callable[[], Result]) -> Result | None:
    """Act on rank zero alone and return the result there, which need not be picklable; errors as in
    :func:`from_rank_zero`.
    """
    results: list[Result] = []
    from_rank_zero(lambda: results.append(act()))
    return results[0] if results else None


@dataclass(frozen=True)
class _Outcome:
    """Result or error of a computation, and the pickle of both for other ranks."""

    value: Any
    error: BaseException | None
    packed: bytes = b""

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


def _outcome(compute: Callable[[], Any]) -> _Outcome:
    try:
        value = compute()
        return _Outcome(value, None, pickle.dumps((value, None)))
    except BaseException as error:
        return _Outcome(None, error, pickle.dumps((None, _sendable(error))))


def _unpacked(packed: bytes) -> _Outcome:
    return _Outcome(*pickle.loads(packed))


def _sendable(error: BaseException) -> BaseException:
    """Return the error, or where a pickle would not bring it back, as where its ``__init__`` takes
    other arguments, its text.
    """
    with contextlib.suppress(Exception):
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    return RuntimeError(f"rank {rank()} failed with {type(error).__name__}: {error}")


def has_group() -> bool:
    """Return whether there is a process group."""
    return _IS_AVAILABLE and dist.is_initialized()
