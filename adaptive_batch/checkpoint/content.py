"""The content of a checkpoint: gathered from what the ranks hold, and read back whole, into tensors, or as an optimizer's state.

A DTensor whose part on a rank is no plain tensor, such as torchao's low-bit optimizer states, is kept rank by rank: a block of it is
scaled as a whole, so that it cannot be cut where another number of ranks would cut it. Such parts are saved under names of their
rank, and described under ``parts`` of the state, with the layout that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from adaptive_batch.errors import CheckpointError

from .dcp import Ranks, SavedTensors
from .optimizer_state import distributed_from_local, empty_like_parameter, named_form, parameter_name, refuse_to_divide
from .state_tree import SavedLeaf, flatten, leaf_paths, leaves, unflatten

_REMEDY = "or begin with a new optimizer state (resume_from_checkpoint=False from its weights), or with an optimizer in full precision"


@dataclass(frozen=True)
class Content:
    """What is written: tensors of this rank by name, the state (that of rank zero counts), and the bytes of all ranks' tensors.

    The state holds ``skeleton`` and ``parts`` of the tensors' tree, and ``small_tensors`` and ``small_skeleton`` of the small state.
    """

    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]
    num_bytes: int


def gather_content(tensors_tree: Any, small_state: Any, ranks: Ranks) -> Content:
    """Flatten what a checkpoint is to hold; a collective.

    Args:
        tensors_tree: alike on all ranks but for what each holds of a DTensor; not copied.
        small_state: of rank zero; that of another rank is not looked at. Copied.
        ranks: that save together.

    Raises:
        TypeError: a value is of a kind that cannot be saved; on every rank.
    """
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {"parts": {}}

    def flattened() -> list[str]:
        found, state["skeleton"] = flatten(tensors_tree)
        small_tensors, state["small_skeleton"] = flatten(small_state if ranks.rank == 0 else None)
        state["small_tensors"] = {name: tensor.to("cpu", copy=True) for name, tensor in small_tensors.items()}
        tensors.update(found)
        return [name for name, t in found.items() if isinstance(t, DTensor) and _is_wrapper(t.to_local())]

    # On one rank the part of a low-bit DTensor may be a plain tensor, so the ranks agree on the names.
    names = sorted({name for names in ranks.each(flattened) for name in names})
    low_bit = {name: tensor for name in names if isinstance(tensor := tensors.pop(name), DTensor)}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if low_bit:
        parts: dict[str, torch.Tensor] = {}

        def flattened_parts() -> tuple[dict[str, Any], int]:
            skeletons = {}
            for name, tensor in low_bit.items():
                inner, skeletons[name] = flatten({f"{name}@{ranks.rank}": tensor.to_local().detach()})
                parts.update(inner)
            return skeletons, sum(part.nbytes for part in parts.values())

        of_ranks = ranks.each(flattened_parts)
        tensors |= parts
        num_bytes += sum(bytes_ for _, bytes_ in of_ranks)
        state["parts"] = {
            name: {"layout": _layout(t), "shape": t.shape, "ranks": [skeletons[name] for skeletons, _ in of_ranks]}
            for name, t in low_bit.items()
        }
    return Content(tensors, state, num_bytes)


def read_whole(saved: SavedTensors, state: Mapping[str, Any]) -> Any:
    """Read the tree on the host, every tensor whole.

    Raises:
        CheckpointError: it has tensors that several ranks saved in parts that cannot be put together.
    """
    tensors = {name: saved.empty(name) for name in saved.entries}
    parts = state["parts"]
    for name, part in parts.items():
        _check_layout(name, part, None, Ranks())
    saved.read(tensors)
    for name, part in parts.items():
        (tensors[name],) = unflatten(tensors, part["ranks"][0]).values()
    return unflatten(tensors, state["skeleton"])


def read_into(saved: SavedTensors, state: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Read into the tensors of a tree.

    Args:
        saved: the tensors.
        state: of the checkpoint.
        tree: some entries of the tree that was saved; below these, with the same tensors.

    Raises:
        CheckpointError: the trees differ, or a tensor was saved in another form than a plain one; it is named.
    """
    into: dict[str, list[torch.Tensor]] = {}
    for key, child in tree.items():
        found, here = dict(leaf_paths(_entry(state, key), key)), dict(leaf_paths(child, key))
        if differing := [*(path for path in here if path not in found), *(path for path in found if path not in here)]:
            where = "was not saved" if differing[0] in here else "was saved, and is not here"
            raise CheckpointError(f"{'.'.join(differing[0])} {where}; it belongs to another model")
        for path, tensor in here.items():
            leaf = found[path]
            if leaf.wrapper is not None or leaf.names[0] in state["parts"]:
                kind = "low-bit tensor" if leaf.wrapper is None else leaf.wrapper.__name__
                raise CheckpointError(
                    f"{'.'.join(path)} was saved as a {kind}, which cannot be read into another tensor"
                )
            into.setdefault(leaf.names[0], []).append(tensor)
    first = {name: tensors[0].detach() for name, tensors in into.items()}
    saved.read(first)
    with torch.no_grad():
        for name, tensors in into.items():
            for other in tensors[1:]:  # the same tensor when it was saved, and perhaps not here
                other.copy_(first[name])


def read_optimizer(
    saved: SavedTensors,
    state: Mapping[str, Any],
    key: str,
    optimizers: Iterable[Optimizer],
    names: Mapping[nn.Parameter, str],
    ranks: Ranks,
) -> dict[str, Any]:
    """Read the state of optimizers in the named form, sharded as their parameters are: no rank reads more than its own part.

    Args:
        saved: the tensors.
        state: of the checkpoint.
        key: of the optimizer's state in the tree.
        optimizers: that it is for.
        names: of their parameters, as ``model.named_parameters()`` has them.
        ranks: that load.

    Raises:
        CheckpointError: the state belongs to other parameters, or cannot be divided among these ranks.
    """
    form = named_form(_entry(state, key), optimizers, names)
    parameters = {parameter_name(name): parameter for parameter, name in names.items()}
    into: dict[str, torch.Tensor] = {}

    def requested(leaf: SavedLeaf, parameter: torch.Tensor | None) -> _Requested:
        """Make tensors to read a leaf into; returns how they are put together once they are read."""
        part = state["parts"].get(leaf.names[0])
        if part is not None:
            _check_layout(leaf.names[0], part, parameter, ranks)
            skeleton = part["ranks"][ranks.rank]
            (own,) = leaves(skeleton).values()
            into.update({name: saved.empty(name) for name in own.names})
            return _Requested(lambda: _assembled(part, unflatten(into, skeleton), parameter))
        if leaf.wrapper is not None:
            refuse_to_divide(leaf.wrapper, parameter, leaf.names[0].rpartition(".")[0])
        for name in leaf.names:
            entry = saved.entries[name]
            sharded = None
            if parameter is not None and leaf.wrapper is None:
                sharded = empty_like_parameter(parameter, entry.size, entry.properties.dtype)
            into[name] = saved.empty(name) if sharded is None else sharded
        first = leaf.names[0]
        return _Requested(lambda: into[first] if isinstance(into[first], DTensor) else unflatten(into, leaf.node))

    requests = {
        "state": {
            name: tree_map_only(SavedLeaf, partial(requested, parameter=parameters[name]), entries)
            for name, entries in form["state"].items()
        },
        "param_groups": tree_map_only(SavedLeaf, partial(requested, parameter=None), form["param_groups"]),
    }
    saved.read(into)
    read: dict[str, Any] = tree_map_only(_Requested, lambda request: request.finish(), requests)
    return read


@dataclass(frozen=True)
class _Requested:
    finish: Callable[[], torch.Tensor]


def _assembled(
    part: Mapping[str, Any], tree: Mapping[str, torch.Tensor], parameter: torch.Tensor | None
) -> torch.Tensor:
    (local,) = tree.values()
    if isinstance(parameter, DTensor):
        return distributed_from_local(local, parameter, parameter.placements, part["shape"])
    return local


def _entry(state: Mapping[str, Any], key: str) -> Any:
    found = leaves(state["skeleton"])
    if key not in found:
        raise CheckpointError(f"it has no {key!r}, but {', '.join(map(repr, found))}")
    return found[key]


def _is_wrapper(tensor: torch.Tensor) -> bool:
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return is_wrapper


def _check_layout(name: str, part: Mapping[str, Any], parameter: torch.Tensor | None, ranks: Ranks) -> None:
    """Refuse where the ranks, or what each of them holds, differ from when it was saved; `parameter` is None to read it whole."""
    saved = len(part["ranks"])
    if saved != ranks.count:
        raise CheckpointError(
            f"{name} is a low-bit state that {saved} rank{'s' * (saved > 1)} saved in parts, which {ranks.count} cannot divide again: "
            f"resume with {saved}, {_REMEDY}"
        )
    if isinstance(parameter, DTensor) and saved > 1 and _layout(parameter) != part["layout"]:
        raise CheckpointError(
            f"{name} is a low-bit state that was sharded as {part['layout']}, and is {_layout(parameter)} here: "
            f"resume with the ranks divided as they were, {_REMEDY}"
        )
    if not isinstance(parameter, DTensor) and saved > 1:
        raise CheckpointError(f"{name} is a low-bit state in {saved} parts: resume with sharded parameters, {_REMEDY}")


def _layout(tensor: DTensor) -> str:
    placements = ", ".join(
        f"{type(placement).__name__}({getattr(placement, 'dim', '')})" for placement in tensor.placements
    )
    return f"{placements} over {' x '.join(map(str, tensor.device_mesh.shape))}"
