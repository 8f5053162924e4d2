"""DTensors whose part on each rank is no plain tensor, such as torchao's low-bit optimizer states: kept rank by rank.

A block of a low-bit state is scaled as a whole, so it cannot be cut where another number of ranks would cut it. What is saved
for such a DTensor is each rank's own part, under names of that rank, and the layout that the parts belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from adaptive_batch.distributed import Agreement
from adaptive_batch.errors import CheckpointError

from .state_tree import SavedLeaf, flatten, leaves, unflatten

_REMEDY = "or begin with a new optimizer state (resume_from_checkpoint=False from its weights), or with an optimizer in full precision"


def wrapped_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The DTensors whose part on this rank wraps other tensors; on another rank it may be a plain one."""
    return [
        name for name, t in tensors.items() if isinstance(t, DTensor) and is_traceable_wrapper_subclass(t.to_local())
    ]


def divided(
    tensors: Mapping[str, torch.Tensor], names: Iterable[str], ranks: Agreement
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Put the parts of some DTensors in their place; a collective.

    Args:
        tensors: as :func:`.state_tree.flatten` gave them.
        names: of :func:`wrapped_names` on any rank, the same on every rank.
        ranks: whose parts they are.

    Returns:
        The tensors, and for each of `names` what :func:`joined` needs to know.
    """
    names = sorted(names)
    if not names:
        return dict(tensors), {}
    rest = {name: tensor for name, tensor in tensors.items() if name not in set(names)}
    ours: dict[str, DTensor] = {name: tensor for name in names if isinstance(tensor := tensors[name], DTensor)}
    parts: dict[str, torch.Tensor] = {}

    def flattened() -> dict[str, Any]:
        skeletons = {}
        for name, tensor in ours.items():
            inner, skeletons[name] = flatten({f"{name}@{ranks.rank}": tensor.to_local().detach()})
            parts.update(inner)
        return skeletons

    all_skeletons = ranks.gathered(flattened)
    described = {
        name: {"layout": _layout(tensor), "shape": tensor.shape, "ranks": [one[name] for one in all_skeletons]}
        for name, tensor in ours.items()
    }
    return {**rest, **parts}, described


def names_of(description: Mapping[str, Any], ranks: Agreement) -> list[str]:
    """The tensors that this rank's part is made of."""
    (leaf,) = leaves(description["ranks"][ranks.rank]).values()
    assert isinstance(leaf, SavedLeaf)
    return leaf.names


def joined(description: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], ranks: Agreement) -> torch.Tensor:
    """This rank's part, put together again."""
    (part,) = unflatten(tensors, description["ranks"][ranks.rank]).values()
    assert isinstance(part, torch.Tensor)
    return part


def check_layout(name: str, description: Mapping[str, Any], parameter: torch.Tensor | None, ranks: Agreement) -> None:
    """Refuse where the ranks, or what each of them holds, are not as they were.

    Args:
        name: of the tensor.
        description: of :func:`divided`.
        parameter: that it is the state of; None to load it whole, which one rank alone can.
        ranks: that load.

    Raises:
        CheckpointError: says what would do.
    """
    saved = len(description["ranks"])
    if saved != ranks.num_ranks:
        raise CheckpointError(
            f"{name} is a low-bit state that {saved} rank{'s' * (saved > 1)} saved in parts, which {ranks.num_ranks} cannot divide anew: "
            f"go on with {saved}, {_REMEDY}"
        )
    if isinstance(parameter, DTensor) and saved > 1 and _layout(parameter) != description["layout"]:
        raise CheckpointError(
            f"{name} is a low-bit state that was sharded as {description['layout']}, and is {_layout(parameter)} here: "
            f"go on with the ranks divided as they were, {_REMEDY}"
        )
    if not isinstance(parameter, DTensor) and saved > 1:
        raise CheckpointError(f"{name} is a low-bit state in {saved} parts: go on with sharded parameters, {_REMEDY}")


def _layout(tensor: DTensor) -> str:
    placements = ", ".join(
        f"{type(placement).__name__}({getattr(placement, 'dim', '')})" for placement in tensor.placements
    )
    return f"{placements} over {' x '.join(map(str, tensor.device_mesh.shape))}"
