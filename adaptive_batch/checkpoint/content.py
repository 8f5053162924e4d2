"""Split a nested state into plain tensors for torch.distributed.checkpoint and a small state that
describes them.

A DTensor is stored with its global shape, so any number of ranks can read it. Wrapper tensors, such
as torchao's low-bit optimizer states, are stored in a file of each rank: quantization blocks cannot
be split for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from adaptive_batch.distributed import local_part
from adaptive_batch.errors import CheckpointError
from adaptive_batch.memory import storage_bytes

from .dcp import Ranks, load_safely, low_bit_file, read_tensors
from .optimizer_state import check_parameters, distributed_from_local, map_leaves, parameter_name

# Path to a value: keys of mappings and indices of lists.
_Path = tuple[Any, ...]

# Types that ``torch.load(weights_only=True)`` restores unchanged.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint: this rank's tensors and low-bit tensors by name, rank 0's state, and
    the approximate size of all ranks' tensors in bytes.

    The state has ``tree``, with tensors on the meta device in place of the stored tensors;
    ``ranks``, their number; ``low_bit``, with the layout of each low-bit tensor; and ``small``.
    """

    tensors: Mapping[str, torch.Tensor]
    low_bit: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class _Stored:
    """Stored tensor: its name, its form on the meta device, and the parameter that defines its
    sharding, if any.
    """

    name: str
    form: torch.Tensor
    parameter: torch.Tensor | None = None

    def empty(self) -> torch.Tensor:
        parameter = self.parameter
        form = self.form
        if isinstance(parameter, DTensor) and form.dim() and form.shape == parameter.shape:
            return torch.empty_like(parameter.detach(), dtype=form.dtype)
        return torch.empty_like(form, device="cpu")


def gather_content(tensors_tree: Any, small_state: Any, ranks: Ranks) -> Content:
    """Split a state into the content of a checkpoint; a collective. Rank 0's small state is copied,
    tensors are not.

    Raises:
        TypeError: a value has an unsupported type; raised on all ranks.
    """
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}

    def divide() -> list[str]:
        state["tree"], divided = _divided(tensors_tree)
        tensors.update(divided)
        # Only rank 0 saves it.
        state["small"] = map_leaves(_copied, small_state if ranks.rank == 0 else None)
        return [
            name
            for name, tensor in tensors.items()
            if hasattr(local_part(tensor), "__tensor_flatten__")
        ]

    # A rank's part of a low-bit DTensor may be a plain tensor, so the ranks merge their names.
    names = sorted(set(chain(*ranks.each(divide))))
    state["ranks"] = ranks.count
    state["low_bit"] = {name: _layout(tensors[name]) for name in names}
    low_bit = {name: local_part(tensors.pop(name)) for name in names}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    num_bytes += ranks.count * storage_bytes(low_bit.values())
    return Content(tensors, low_bit, state, num_bytes)


def read_whole(folder: Path, state: Mapping[str, Any]) -> Any:
    """Read the tree with full tensors to the host.

    Raises:
        CheckpointError: several ranks saved low-bit tensors, which cannot be merged.
    """
    return _read(folder, state, _stored(state["tree"]), Ranks())


def read_into(
    folder: Path, state: Mapping[str, Any], tree: Mapping[str, Any], ranks: Ranks
) -> None:
    """Read entries of the saved tree into the tensors of `tree`.

    Raises:
        CheckpointError: the trees differ, or other ranks saved a low-bit tensor; the message names
            the tensor.
    """
    low_bit = _read_low_bit(folder, state, ranks)
    into: dict[str, list[torch.Tensor]] = {}
    for key, child in tree.items():
        saved = dict(_leaves(_entry(state, key), _Stored))
        targets = dict(_leaves(child, torch.Tensor))
        for path in [*targets, *saved]:
            if path not in saved or path not in targets:
                problem = "was not saved" if path in targets else "was saved but has no target"
                raise CheckpointError(
                    f"{_joined((key, *path))} {problem}; it belongs to another model: give the one"
                    " that was saved"
                )
        for path, tensor in targets.items():
            name = saved[path].name
            if name in low_bit:
                _check_layout(name, tensor, state, ranks)
                local_part(tensor.detach()).copy_(low_bit[name])
            else:
                into.setdefault(name, []).append(tensor.detach())
    read_tensors(folder, {name: parts[0] for name, parts in into.items()})
    # Tensors that were tied at the save may be separate now.
    for first, *copies in into.values():
        for copy in copies:
            copy.copy_(first)


def read_optimizer(
    folder: Path,
    state: Mapping[str, Any],
    optimizers: Iterable[Optimizer],
    names: Mapping[nn.Parameter, str],
    ranks: Ranks,
) -> dict[str, Any]:
    """Read the state of optimizers by name with the sharding of their parameters; each rank reads
    only its own part.

    Raises:
        CheckpointError: the state belongs to other parameters, or cannot be split over these ranks.
    """
    form = _entry(state, "optimizer")
    check_parameters(form, optimizers, names)
    for parameter, name in names.items():
        entries = form["state"].get(parameter_name(name))
        if entries:
            of_parameter = partial(_sharded_as, parameter)
            form["state"][parameter_name(name)] = map_leaves(of_parameter, entries, _Stored)
    read: dict[str, Any] = _read(folder, state, form, ranks)
    return read


def _sharded_as(parameter: nn.Parameter, _: _Path, stored: _Stored) -> _Stored:
    return replace(stored, parameter=parameter)


def _divided(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the tree with forms in place of tensors, and the tensors by name; tensors that share
    memory have one form.
    """
    forms: dict[Any, torch.Tensor] = {}
    tensors: dict[int, torch.Tensor] = {}

    def form(path: _Path, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _plain_value(path, value)
        tensor = value.detach()
        if type(value) is torch.Tensor:
            tensor = tensor.resolve_conj().resolve_neg()
        local = local_part(tensor)
        is_wrapper = hasattr(local, "__tensor_flatten__")
        if not is_wrapper and (
            type(local) is not torch.Tensor or local.is_meta or local.layout is not torch.strided
        ):
            kind = f"{_kind(local)} of layout {local.layout} on {local.device}"
            raise TypeError(f"{_joined(path)} is a {kind}; checkpoints cannot store it")
        # Tensors that share memory are saved once.
        key = path if is_wrapper else (*_memory(local), value.shape)
        form = forms.setdefault(key, _form(tensor))
        tensors.setdefault(id(form), tensor)
        return form

    divided = map_leaves(form, tree)
    return divided, {
        stored.name: tensors[id(stored.form)] for _, stored in _leaves(_stored(divided), _Stored)
    }


def _stored(divided: Any) -> Any:
    """Name the forms of a tree by their first path."""
    names: dict[int, str] = {}
    used_names: set[str] = set()

    def to_stored(path: _Path, form: torch.Tensor) -> _Stored:
        if id(form) not in names:
            # ``{"a.b": x, "a": {"b": y}}`` gives two tensors the same joined path.
            unique = _joined(path)
            while unique in used_names:
                unique += "#"
            names[id(form)] = unique
            used_names.add(unique)
        return _Stored(names[id(form)], form)

    return map_leaves(to_stored, divided, torch.Tensor)


def _read(folder: Path, state: Mapping[str, Any], tree: Any, ranks: Ranks) -> Any:
    """Read the stored tensors of a tree."""
    low_bit = _read_low_bit(folder, state, ranks)
    into: dict[str, torch.Tensor] = {}
    for _, stored in _leaves(tree, _Stored):
        if stored.name in low_bit:
            _check_layout(stored.name, stored.parameter, state, ranks)
        elif stored.name not in into:
            into[stored.name] = stored.empty()
    read_tensors(folder, into)

    def restored(_: _Path, stored: _Stored) -> torch.Tensor:
        if stored.name not in low_bit:
            return into[stored.name]
        local: torch.Tensor = low_bit[stored.name]
        parameter = stored.parameter
        if isinstance(parameter, DTensor):
            return distributed_from_local(local, parameter, parameter.placements, stored.form.shape)
        return local

    return map_leaves(restored, tree, _Stored)


def _read_low_bit(folder: Path, state: Mapping[str, Any], ranks: Ranks) -> Mapping[str, Any]:
    """Read the low-bit tensors that this rank saved; a new rank has only their names."""
    low_bit: Mapping[str, Any] = state["low_bit"]
    if low_bit and ranks.rank < state["ranks"]:
        low_bit = load_safely(folder / low_bit_file(ranks.rank))
    return low_bit


def _check_layout(
    name: str, parameter: torch.Tensor | None, state: Mapping[str, Any], ranks: Ranks
) -> None:
    """Raise if the ranks or their shards differ from those that saved a low-bit tensor."""
    saved = state["ranks"]
    saved_layout = state["low_bit"][name]
    layout = _layout(parameter)
    if saved != ranks.count or (saved > 1 and layout != saved_layout):
        raise CheckpointError(
            f"{name} is a low-bit state that {saved} ranks saved ({saved_layout});"
            f" {ranks.count} ranks ({layout}) cannot split it again: resume with {saved} ranks and"
            " the same sharding, or start from the weights with a new optimizer state"
            " (resume_from_checkpoint=False) or a full-precision optimizer"
        )


def _layout(tensor: torch.Tensor | None) -> str:
    if not isinstance(tensor, DTensor):
        return "whole"
    return (
        f"{', '.join(map(str, tensor.placements))} over"
        f" {' x '.join(map(str, tensor.device_mesh.shape))}"
    )


def _entry(state: Mapping[str, Any], key: str) -> Any:
    if key not in state["tree"]:
        raise CheckpointError(f"it has no {key!r}, but {', '.join(map(repr, state['tree']))}")
    return _stored(state["tree"])[key]


def _copied(path: _Path, value: Any) -> Any:
    """Copy a leaf of the small state to the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return _plain_value(path, value)


def _plain_value(path: _Path, value: Any) -> Any:
    """Return a value as a plain type; numpy's float64 and other subclasses become their base
    type.
    """
    if type(value) in _PLAIN:
        return value
    for base in (int, float, str):
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"{_joined(path)} is a {_kind(value)}; checkpoints cannot store it")


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the meta device, with its strides if it is dense."""
    if type(tensor) is torch.Tensor:
        return torch.empty_like(tensor, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors that share memory. Empty shards have a storage
    too.
    """
    place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def _leaves(tree: Any, kind: type) -> list[tuple[_Path, Any]]:
    """Return path and value of all leaves of type `kind`."""
    leaves: list[tuple[_Path, Any]] = []
    map_leaves(lambda path, leaf: leaves.append((path, leaf)), tree, kind)
    return leaves


def _joined(path: _Path) -> str:
    return ".".join(map(str, path)) or "the state"


def _kind(value: object) -> str:
    return type(value).__qualname__
