"""What a resume point is made of: gathered from what the ranks hold, and copied to the host where it is written in the background."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from adaptive_batch.distributed import Agreement
from adaptive_batch.memory import GIB, host_available_bytes

from .rank_parts import divided, wrapped_names
from .state_tree import flatten

log = logging.getLogger("adaptive_batch")


@dataclass(frozen=True)
class Content:
    """What is written.

    Attributes:
        tensors: by name, what this rank holds.
        state: the rest, as :func:`.resume_point.write_point` takes it; that of rank zero counts.
        num_bytes: of the tensors of all ranks.
    """

    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]
    num_bytes: int


def gathered_content(tensors_tree: Any, small_state: Any, ranks: Agreement) -> Content:
    """The content of a point; a collective.

    Args:
        tensors_tree: alike on all ranks but for what each holds of a DTensor; not copied.
        small_state: of rank zero; another's is not looked at. Copied.
        ranks: that save together.

    Raises:
        TypeError, CheckpointException: a value is of a kind that cannot be saved; the latter with several ranks, on every one.
    """
    ours: list[Any] = []

    def flattened() -> list[str]:
        tensors, skeleton = flatten(tensors_tree)
        small_tensors, small_skeleton = flatten(small_state if ranks.rank == 0 else None)
        small_copies = {name: tensor.to("cpu", copy=True) for name, tensor in small_tensors.items()}
        state = {"skeleton": skeleton, "small_tensors": small_copies, "small_skeleton": small_skeleton}
        ours.extend([tensors, state])
        return wrapped_names(tensors)

    names = {name for names in ranks.gathered(flattened) for name in names}
    tensors, state = ours
    whole_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if name not in names)
    tensors, parts = divided(tensors, names, ranks)
    own_bytes = sum(tensor.nbytes for tensor in tensors.values()) - whole_bytes
    num_bytes = whole_bytes + (sum(ranks.gathered(lambda: own_bytes)) if parts else 0)
    return Content(tensors, {**state, "parts": parts}, num_bytes)


class HostCopies:
    """Copies of tensors on the host, kept from one time to the next: fresh memory costs more than the copying.

    Args:
        ranks: that copy together.
    """

    def __init__(self, ranks: Agreement) -> None:
        self._ranks = ranks
        self._copies: dict[str, torch.Tensor] = {}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        """Copy what this rank holds, into last time's copies where they are alike; a collective.

        Returns:
            The copies, good until the next call; None, and that is said, where a rank's host has no room for them.

        Raises:
            RuntimeError, CheckpointException: copying failed; the latter with several ranks, on every one.
        """
        self._copies = {name: copy for name, copy in self._copies.items() if _alike(copy, tensors.get(name))}
        needed = sum(_local(tensor).nbytes for name, tensor in tensors.items() if name not in self._copies)
        host = platform.node()
        hosts = self._ranks.gathered(lambda: (host, needed, host_available_bytes()))
        on_host = {name: sum(bytes_ for other, bytes_, _ in hosts if other == name) for name, _, _ in hosts}
        if any(on_host[name] > available for name, _, available in hosts):
            self.release()
            log.warning(
                "an asynchronous save copies %.2f GiB to the host, which has %.2f GiB available: saving synchronously",
                on_host[host] / GIB,
                hosts[self._ranks.rank][2] / GIB,
            )
            return None
        self._ranks.gathered(lambda: self._copy(tensors))
        return self._copies

    def release(self) -> None:
        """Let go of the memory."""
        self._copies = {}

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._copies:
                _local(self._copies[name]).copy_(_local(tensor))
            else:
                self._copies[name] = tensor.to("cpu", copy=True)


def _alike(copy: torch.Tensor, tensor: torch.Tensor | None) -> bool:
    """Whether a copy can be used again for a tensor."""
    if tensor is None or type(copy) is not type(tensor) or copy.shape != tensor.shape:
        return False
    if isinstance(copy, DTensor) and isinstance(tensor, DTensor) and copy.placements != tensor.placements:
        return False
    ours, theirs = _local(copy), _local(tensor)
    return (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
