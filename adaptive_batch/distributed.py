"""The one seam to torch.distributed: every rank decides alike.

Without a process group there is one rank, and each function returns what it was given. With one, each function but
`world_size`, `rank` and `is_rank_zero` is a collective over all ranks: every rank must call it, in the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


def world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size() if _has_group() else 1


def rank() -> int:
    """Returns the number of this rank, from 0; 0 without a process group."""
    return dist.get_rank() if _has_group() else 0


def is_rank_zero() -> bool:
    """Returns whether this is the rank that prints, writes and computes for all."""
    return rank() == 0


def minimum(value: int) -> int:
    """Returns the least `value` of all ranks, on every rank."""
    return _reduced(value, dist.ReduceOp.MIN) if world_size() > 1 else value


def maximum(value: int) -> int:
    """Returns the greatest `value` of all ranks, on every rank."""
    return _reduced(value, dist.ReduceOp.MAX) if world_size() > 1 else value


def total(value: int) -> int:
    """Returns the sum of `value` over all ranks, on every rank."""
    return _reduced(value, dist.ReduceOp.SUM) if world_size() > 1 else value


def any_rank(flag: bool) -> bool:
    """Returns, on every rank, whether `flag` is true on one rank at least."""
    return maximum(int(flag)) > 0


def barrier() -> None:
    """Returns on no rank before every rank has called it."""
    # A sum rather than dist.barrier(), which on NCCL guesses the device and warns of it.
    total(0)


def from_rank_zero(compute: Callable[[], Result]) -> Result:
    """Computes on rank zero alone and shares the result.

    Args:
        compute: called on rank zero; its result must be picklable when there are other ranks. They wait for it no
            longer than the process group's timeout, by default 10 minutes on NCCL and 30 on gloo.

    Returns:
        The result of rank zero, on every rank.

    Raises:
        BaseException: what `compute` raised on rank zero is raised on every rank, so that none is left waiting. An
            error that cannot be pickled becomes a RuntimeError with its type and text on the other ranks.
    """
    if world_size() == 1:
        return compute()
    if is_rank_zero():
        return _computed_and_sent(compute)
    envelope: list[Any] = [None, None]
    dist.broadcast_object_list(envelope, src=0, device=_collective_device())
    packed_result, packed_error = envelope
    if packed_error is not None:
        raise _unpacked_error(packed_error)
    result: Result = pickle.loads(packed_result)
    return result


def _computed_and_sent(compute: Callable[[], Result]) -> Result:
    try:
        result = compute()
        envelope = [pickle.dumps(result), None]
    except BaseException as error:
        dist.broadcast_object_list([None, _packed_error(error)], src=0, device=_collective_device())
        raise
    dist.broadcast_object_list(envelope, src=0, device=_collective_device())
    return result


def _packed_error(error: BaseException) -> bytes:
    """Pickles an error in the first form that comes back with the same text.

    Errors whose ``__init__`` takes other arguments than ``args``, as many do, pickle well and then fail to unpickle;
    those are rebuilt without ``__init__``.
    """
    for form in (error, (type(error), error.args, vars(error))):
        try:
            packed = pickle.dumps(form)
            if str(_unpacked_error(packed)) == str(error):
                return packed
        except Exception:
            continue
    return pickle.dumps(RuntimeError(f"rank zero failed with {type(error).__name__}: {error}"))


def _unpacked_error(packed: bytes) -> BaseException:
    form = pickle.loads(packed)
    if isinstance(form, BaseException):
        return form
    kind, args, attributes = form
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _reduced(value: int, operation: Any) -> int:
    reduced = torch.tensor(value, dtype=torch.int64, device=_collective_device())
    dist.all_reduce(reduced, op=operation)
    return int(reduced.item())


def _collective_device() -> torch.device:
    """Returns the CPU wherever the group has a backend for it (gloo), otherwise this process's accelerator (NCCL)."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "a process group without a CPU backend needs an accelerator"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
