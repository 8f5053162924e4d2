"""Collectives over all ranks; without a process group, each function returns its input."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch.errors import RankLostError

_IS_AVAILABLE = dist.is_available()
if _IS_AVAILABLE:
    from torch.distributed.distributed_c10d import PrefixStore, Store
    from torch.distributed.rendezvous import rendezvous

Result = TypeVar("Result")

# Rank 0 may read or write a checkpoint or tokenize a dataset while the others wait.
_PATIENCE = timedelta(hours=12)
_JOIN = timedelta(minutes=10)
# Ranks of another machine than one that has failed wait this long.
_COLLECTIVE = timedelta(minutes=10)
_patient_group: Any = None
# Tensor-parallel size: consecutive ranks that share one copy of the model and see the same rows.
_ranks_of_a_model = 1
_GLOO_SETTLE_SECONDS = 0.1
# Store of this attempt, rank and number of ranks, by rendezvous address.
_attempts: dict[tuple[str, str], tuple[Store, int, int]] = {}
# True within `alone`.
_is_alone = ContextVar("_is_alone", default=False)


def is_launched() -> bool:
    """Return whether a launcher such as torchrun started several processes."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ


def meet_ranks() -> tuple[Store, int, int]:
    """Connect to the other ranks in the store of torchrun's environment; the first call for an
    address is a collective that needs no process group.

    torchrun's store outlives a restart, and this attempt must not read keys of earlier attempts.
    torchrun's restart count does not identify an attempt: it does not count a restart of a healthy
    node after a failure on another node.

    Returns:
        This attempt's keys in the store, this rank, and the number of ranks.

    Raises:
        RankLostError, torch.distributed.DistStoreError, torch.distributed.DistNetworkError: other
            ranks or the store did not answer within 10 minutes.
    """
    address = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    if address not in _attempts:
        store, rank, size = next(rendezvous("env://", timeout=_JOIN))
        name = _agree_on_name(PrefixStore("adaptive_batch/attempts", store), rank, size)
        _attempts[address] = (PrefixStore(f"adaptive_batch/{name}", store), rank, size)
    return _attempts[address]


def _agree_on_name(store: Store, rank: int, size: int) -> str:
    """Return a new name of this attempt, the same on all ranks.

    Each other rank sends a numbered request, and rank 0 answers requests until all ranks have the
    name. All ranks of an attempt exit before the next attempt starts, so no rank gets an old name.
    """
    if rank > 0:
        request = store.add("requests", 1)
        name = store.get(f"answer/{request}").decode()
        store.add(f"{name}/joined", 1)
        return name
    name = uuid.uuid4().hex
    deadline = time.monotonic() + _JOIN.total_seconds()
    num_joined = 0
    while num_joined < size - 1:
        # Adding 0 reads a counter, and creates it if no rank has.
        num_answered = store.add("answered", 0)
        if store.add("requests", 0) > num_answered:
            store.set(f"answer/{num_answered + 1}", name)
            store.add("answered", 1)
        elif time.monotonic() > deadline:
            raise RankLostError(f"{num_joined + 1} of {size} ranks joined within {_JOIN}", {})
        else:
            time.sleep(0.01)
        num_joined = store.add(f"{name}/joined", 0)
    return name


def init_process_group(backend: str, *, ranks_of_a_model: int = 1) -> None:
    """Initialize the process group of all launched ranks; `ranks_of_a_model` is the tensor-parallel
    size.
    """
    global _ranks_of_a_model, _patient_group
    store, rank, size = meet_ranks()
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=_COLLECTIVE,
    )
    _ranks_of_a_model = ranks_of_a_model
    _patient_group = dist.new_group(backend="gloo", timeout=_PATIENCE)


@contextlib.contextmanager
def fake_process_group(world_size: int, *, ranks_of_a_model: int = 1) -> Iterator[None]:
    """Context manager that simulates rank 0 of `world_size` ranks. Collectives compute shapes and
    move no data.

    `ranks_of_a_model` is the tensor-parallel size.
    """
    global _ranks_of_a_model
    if world_size == 1:
        yield
        return
    assert not has_group(), "a process group exists"
    dist.init_process_group("fake", rank=0, world_size=world_size)
    _ranks_of_a_model = ranks_of_a_model
    try:
        yield
    finally:
        destroy_process_group()


def destroy_process_group() -> None:
    """Destroy the process group, if any."""
    global _ranks_of_a_model, _patient_group
    if has_group():
        dist.destroy_process_group()
    if _patient_group is not None:
        # gloo's threads release the tensors of finished collectives a moment later. If the
        # interpreter shuts down before they have, the release aborts the process.
        time.sleep(_GLOO_SETTLE_SECONDS)
    _ranks_of_a_model = 1
    _patient_group = None


def host_group() -> Any:
    """Create a gloo process group of all ranks for CPU tensors; None with one rank."""
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def world_size() -> int:
    """Return the number of ranks; 1 without a process group and within :func:`alone`."""
    return dist.get_world_size() if has_group() and not _is_alone.get() else 1


@contextlib.contextmanager
def alone(is_alone: bool = True) -> Iterator[None]:
    """Context manager that makes the functions of this module act as with one rank, or with all
    ranks again if `is_alone` is false.
    """
    token = _is_alone.set(is_alone)
    try:
        yield
    finally:
        _is_alone.reset(token)


def refuse_collectives(error: Exception) -> contextlib.AbstractContextManager[object]:
    """Create a context manager that raises `error` if torch starts a collective within
    :func:`alone`.
    """

    class RefuseCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "c10d" in function.namespace and _is_alone.get():
                raise error
            return function(*args, **(kwargs or {}))

    return RefuseCollectives()  # type: ignore[no-untyped-call]


def rank() -> int:
    """Return the index of this rank; 0 without a process group."""
    return dist.get_rank() if has_group() else 0


def is_rank_zero() -> bool:
    """Return whether this is rank 0, which prints and writes for all ranks."""
    return rank() == 0


def data_parallel_size() -> int:
    """Return the number of ranks with different rows: the world size / tensor-parallel size."""
    return world_size() // _ranks_of_a_model


def data_parallel_rank() -> int:
    """Return the index of this rank's rows among :func:`data_parallel_size`."""
    return rank() // _ranks_of_a_model


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world_size() > 1 else 1


def minimum(value: int) -> int:
    """Return the minimum of `value` over all ranks."""
    return -maximum(-value)


def maximum(value: int) -> int:
    """Return the maximum of `value` over all ranks."""
    return all_reduce_max([value])[0]


def all_reduce_max(values: Sequence[int]) -> list[int]:
    """Return the elementwise maximum of `values` over all ranks, in one collective."""
    if world_size() == 1:
        return list(values)
    # Reduce on the host with gloo if the group has it, otherwise on the device with NCCL.
    has_gloo = "cpu:" in dist.get_backend_config()
    device = torch.device("cpu") if has_gloo else torch.accelerator.current_accelerator()
    reduced = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return [int(value) for value in reduced.tolist()]


def all_reduce_sum(*tensors: torch.Tensor) -> None:
    """Sum each tensor over all ranks in place, with one asynchronous collective per tensor."""
    if world_size() > 1:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def broadcast(tensor: torch.Tensor) -> None:
    """Replace a tensor in place by rank 0's."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0)


def all_gather(value: Result) -> list[Result]:
    """Return the `value` of each rank, by rank; must be picklable with several ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def any_of_ranks(flag: bool) -> bool:
    """Return whether `flag` is true on any rank."""
    return bool(all_reduce_max([flag])[0])


def from_rank_zero(compute: Callable[[], Result], group: Any = None) -> Result:
    """Compute on rank 0 only and return the result on every rank.

    Args:
        compute: function that rank 0 calls. With several ranks, its result must be picklable. The
            others wait up to 12 hours, or the group's own timeout if :func:`init_process_group` did
            not create it.
        group: another process group of all ranks, for calls from a thread.

    Raises:
        BaseException: the error of rank 0, raised on every rank. On the other ranks, an error that
            cannot be pickled becomes a RuntimeError with its type and text.
    """
    if world_size() == 1:
        return compute()
    outcome: tuple[Any, BaseException | None] = (None, None)
    if is_rank_zero():
        outcome = _outcome(compute)
    sent = [_sendable(outcome)]
    dist.broadcast_object_list(sent, src=0, group=group or _patient_group)
    # Rank 0 raises its own error, which _sendable() may have replaced for the others.
    if not is_rank_zero():
        outcome = sent[0]
    result: Result = _result(outcome)
    return result


def from_each_rank(compute: Callable[[], Result], group: Any = None) -> list[Result]:
    """Compute on every rank and return all results, by rank, on every rank; arguments and errors as
    in :func:`from_rank_zero`.
    """
    if world_size() == 1:
        return [compute()]
    own_outcome = _outcome(compute)
    outcomes: list[Any] = [None] * world_size()
    dist.all_gather_object(outcomes, _sendable(own_outcome), group=group or _patient_group)
    # This rank raises its own error, which _sendable() may have replaced for the others.
    outcomes[rank()] = own_outcome
    return [_result(outcome) for outcome in outcomes]


def on_rank_zero(act: Callable[[], Result]) -> Result | None:
    """Call `act` on rank 0 only. Return its result there, which need not be picklable, and None on
    other ranks; errors as in :func:`from_rank_zero`.
    """
    results: list[Result] = []
    # append() returns None, which can be pickled; the result stays on rank 0.
    from_rank_zero(lambda: results.append(act()))
    return results[0] if results else None


def _outcome(compute: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of a function and None, or None and its error."""
    try:
        return compute(), None
    except BaseException as error:
        return None, error


def _result(outcome: tuple[Any, BaseException | None]) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value


def _sendable(
    outcome: tuple[Any, BaseException | None],
) -> tuple[Any, BaseException | None]:
    """Return an outcome for other ranks. An error whose text would not survive pickling becomes a
    RuntimeError.
    """
    value, error = outcome
    with contextlib.suppress(Exception):
        received = pickle.loads(pickle.dumps(error))
        if str(received) == str(error):
            return outcome
    return value, RuntimeError(f"rank {rank()} failed with {type(error).__name__}: {error}")


def has_group() -> bool:
    """Return whether a process group is initialized."""
    return _IS_AVAILABLE and dist.is_initialized()
