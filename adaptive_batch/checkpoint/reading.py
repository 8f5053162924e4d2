"""How the tree of a resume point is read: whole, into tensors that are there, or as the state of optimizers that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from adaptive_batch.distributed import Agreement
from adaptive_batch.errors import CheckpointError

from .optimizer_state import distributed_from_local, empty_like_parameter, named_form, parameter_name, refuse_to_divide
from .rank_parts import check_layout, joined, names_of
from .saved_tensors import SavedTensors
from .state_tree import SavedLeaf, leaves, mapped, unflatten


def read_whole(saved: SavedTensors, state: Mapping[str, Any]) -> Any:
    """The tree on the host, every tensor whole.

    Args:
        saved: the tensors.
        state: of the point; its ``skeleton`` and ``parts``.

    Raises:
        CheckpointError: it has tensors that several ranks saved in parts that cannot be put together.
    """
    alone, parts = Agreement(), state.get("parts", {})
    for name, description in parts.items():
        check_layout(name, description, None, alone)
    tensors = {name: saved.empty(name) for name in saved.entries}
    saved.read(tensors)
    tensors |= {name: joined(description, tensors, alone) for name, description in parts.items()}
    return unflatten(tensors, state["skeleton"])


def read_into(saved: SavedTensors, state: Mapping[str, Any], tree: Mapping[str, Any]) -> None:
    """Read into the tensors of a tree.

    Args:
        saved: the tensors.
        state: of the point.
        tree: some of the entries of the tree that was saved; below these, with the same keys.

    Raises:
        CheckpointError: the trees differ, or a tensor was saved in another form than a plain one; it is named.
    """
    found = leaves(state["skeleton"])
    if unknown := [key for key in tree if key not in found]:
        raise CheckpointError(f"it has no {unknown[0]!r}, but {', '.join(map(repr, found))}")
    pairs: dict[str, list[torch.Tensor]] = {}
    for key, child in tree.items():
        _pair(found[key], child, str(key), pairs)
    for name in pairs:
        if name in state.get("parts", {}):
            raise CheckpointError(f"{name} was saved in parts of a low-bit tensor, which cannot be read into another")
    first = {name: tensors[0].detach() for name, tensors in pairs.items()}
    saved.read(first)
    for name, tensors in pairs.items():
        for other in tensors[1:]:  # the same tensor when it was saved, and perhaps not here
            with torch.no_grad():
                other.copy_(first[name])


def read_optimizer(
    saved: SavedTensors,
    state: Mapping[str, Any],
    key: str,
    optimizers: Iterable[Optimizer],
    names: Mapping[nn.Parameter, str],
    ranks: Agreement,
) -> dict[str, Any]:
    """The state of optimizers in the named form, sharded as their parameters are: no rank reads more than its own part.

    Args:
        saved: the tensors.
        state: of the point.
        key: of the optimizer's state in the tree.
        optimizers: that it is for.
        names: of their parameters, as ``model.named_parameters()`` has them.
        ranks: that load.

    Raises:
        CheckpointError: the state belongs to other parameters, or cannot be divided among these ranks.
    """
    found = leaves(state["skeleton"])
    if key not in found:
        raise CheckpointError(f"it has no {key!r}, but {', '.join(map(repr, found))}")
    form = named_form(found[key], optimizers, names)
    reading = _Reading(saved, state.get("parts", {}), ranks)
    of_name = {parameter_name(name): parameter for parameter, name in names.items()}

    def values(act: Callable[[torch.Tensor | None, SavedLeaf], Any]) -> dict[str, Any]:
        return {
            "state": {
                name: mapped(entries, SavedLeaf, partial(act, of_name[name])) for name, entries in form["state"].items()
            },
            "param_groups": mapped(form["param_groups"], SavedLeaf, partial(act, None)),
        }

    values(reading.prepare)
    saved.read(reading.tensors)
    return values(reading.take)


class _Reading:
    """What is to be read for the leaves of an optimizer's state, and what becomes of it.

    Args:
        saved: the tensors.
        parts: descriptions of those that were saved rank by rank.
        ranks: that load.

    Attributes:
        tensors: to read into, by name.
    """

    def __init__(self, saved: SavedTensors, parts: Mapping[str, Any], ranks: Agreement) -> None:
        self._saved = saved
        self._parts = parts
        self._ranks = ranks
        self.tensors: dict[str, torch.Tensor] = {}

    def prepare(self, parameter: torch.Tensor | None, leaf: SavedLeaf) -> None:
        """Make room for a leaf of the state of a parameter, or of none."""
        if leaf.wrapper is not None:
            refuse_to_divide(leaf.wrapper, parameter, leaf.names[0].rpartition(".")[0])
        for name in leaf.names:
            if name in self._parts:
                check_layout(name, self._parts[name], parameter, self._ranks)
                self.tensors |= {part: self._saved.empty(part) for part in names_of(self._parts[name], self._ranks)}
                continue
            entry = self._saved.entries[name]
            sharded = None
            if parameter is not None and leaf.wrapper is None:
                sharded = empty_like_parameter(parameter, entry.size, entry.properties.dtype)
            self.tensors[name] = self._saved.empty(name) if sharded is None else sharded

    def take(self, parameter: torch.Tensor | None, leaf: SavedLeaf) -> torch.Tensor:
        """The leaf's tensor, once all are read."""
        name = leaf.names[0]
        if leaf.wrapper is None and name in self._parts:
            part = joined(self._parts[name], self.tensors, self._ranks)
            if isinstance(parameter, DTensor):
                return distributed_from_local(part, parameter, parameter.placements, self._parts[name]["shape"])
            return part
        if isinstance(self.tensors[name], DTensor):
            return self.tensors[name]
        tensor: torch.Tensor = unflatten(self.tensors, leaf.node)
        return tensor


def _pair(found: Any, into: Any, path: str, pairs: dict[str, list[torch.Tensor]]) -> None:
    """Find the tensors of `into` that go with the leaves of a tree."""
    if isinstance(found, SavedLeaf) and isinstance(into, torch.Tensor):
        if found.wrapper is not None:
            raise CheckpointError(
                f"{path} was saved as a {found.wrapper.__name__}, which cannot be read into another tensor"
            )
        pairs.setdefault(found.names[0], []).append(into)
    elif isinstance(found, dict) and isinstance(into, Mapping):
        if differing := [*(key for key in into if key not in found), *(key for key in found if key not in into)]:
            where = "was not saved" if differing[0] in into else "was saved, and is not here"
            raise CheckpointError(f"{path}.{differing[0]} {where}; it belongs to another model")
        for key, child in into.items():
            _pair(found[key], child, f"{path}.{key}", pairs)
    elif isinstance(found, list | tuple) and isinstance(into, list | tuple) and len(found) == len(into):
        for number, (one, other) in enumerate(zip(found, into, strict=True)):
            _pair(one, other, f"{path}.{number}", pairs)
    elif isinstance(found, SavedLeaf) or isinstance(into, torch.Tensor):
        raise CheckpointError(f"{path} is a tensor in one of the two and not in the other; it belongs to another model")
