"""Split a nested state into plain tensors for torch.distributed.checkpoint and a small state that
describes them. An optimizer's state is stored by parameter name.

A DTensor is stored with its global shape, so any number of ranks can read it. Wrapper tensors, such
as torchao's low-bit optimizer states, are stored in a file of each rank: quantization blocks cannot
be split for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer

from adaptive_batch.distributed import local_part
from adaptive_batch.errors import CheckpointError

from .files import Ranks, load_safely, low_bit_file, read_tensors

# Path to a value: keys of mappings and indices of lists.
_Path = tuple[Any, ...]

# Types that ``torch.load(weights_only=True)`` restores unchanged.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint: this rank's tensors and low-bit tensors by name, and rank 0's state.

    The state has ``tree``, with tensors on the meta device in place of the stored tensors;
    ``ranks``, their number; ``low_bit``, with the layout of each low-bit tensor; and ``small``.
    """

    tensors: Mapping[str, torch.Tensor]
    low_bit: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class _Stored:
    """Stored tensor: its name, its form on the meta device, and the parameter that defines its
    sharding, if any.
    """

    name: str
    form: torch.Tensor
    parameter: torch.Tensor | None = None

    def empty(self) -> torch.Tensor:
        """Return an empty tensor to read this one into, sharded if its parameter is."""
        parameter = self.parameter
        form = self.form
        # Optimizer states of another shape, such as the scalar `step`, are not sharded.
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
        """Fill `tensors` and `state`; return the names of this rank's low-bit tensors."""
        state["tree"], tensors_by_name = _divided(tensors_tree)
        tensors.update(tensors_by_name)
        # Only rank 0 saves it.
        state["small"] = _map_leaves(_copied, small_state if ranks.rank == 0 else None)
        return [name for name, tensor in tensors.items() if _is_wrapper(local_part(tensor))]

    # A rank's part of a low-bit DTensor may be a plain tensor, so the ranks merge their names.
    low_bit_names = sorted(set(chain(*ranks.each(divide))))
    state["ranks"] = ranks.count
    state["low_bit"] = {name: _layout(tensors[name]) for name in low_bit_names}
    low_bit = {name: local_part(tensors.pop(name)) for name in low_bit_names}
    return Content(tensors, low_bit, state)


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
        CheckpointError: the trees differ, or a low-bit tensor was saved by another number of ranks;
            the message names the tensor.
    """
    low_bit = _read_low_bit(folder, state, ranks)
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in tree.items():
        saved = dict(_leaves(_entry(state, key), _Stored))
        targets = dict(_leaves(entry, torch.Tensor))
        for path in [*targets, *saved]:
            if path not in saved or path not in targets:
                problem = "was not saved" if path in targets else "was saved but has no target"
                raise CheckpointError(
                    f"{_joined((key, *path))} {problem}; it belongs to another model: give the one"
                    " that was saved"
                )
        for path, target in targets.items():
            name = saved[path].name
            if name in low_bit:
                _check_layout(name, target, state, ranks)
                local_part(target.detach()).copy_(low_bit[name])
            else:
                tensors[name] = target.detach()
    read_tensors(folder, tensors)


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
    saved = _entry(state, "optimizer")
    _check_parameters(saved, optimizers, names)
    states_by_name = saved["state"]
    for parameter, given_name in names.items():
        name = parameter_name(given_name)
        if name in states_by_name:
            set_sharding = partial(_with_parameter, parameter)
            states_by_name[name] = _map_leaves(set_sharding, states_by_name[name], _Stored)
    read: dict[str, Any] = _read(folder, state, saved, ranks)
    return read


def _with_parameter(parameter: nn.Parameter, _: _Path, stored: _Stored) -> _Stored:
    return replace(stored, parameter=parameter)


def _divided(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the tree with forms in place of tensors, and the tensors by name."""
    tensors: list[torch.Tensor] = []

    def replace_by_form(path: _Path, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _plain_value(path, value)
        tensor = value.detach()
        if type(value) is torch.Tensor:
            # Write the values of a lazy conjugate or negative view.
            tensor = tensor.resolve_conj().resolve_neg()
        local = local_part(tensor)
        is_dense = type(local) is torch.Tensor and local.layout is torch.strided
        if not _is_wrapper(local) and (not is_dense or local.is_meta):
            kind = f"{_kind(local)} of layout {local.layout} on {local.device}"
            raise TypeError(f"{_joined(path)} is a {kind}; checkpoints cannot store it")
        tensors.append(tensor)
        return _form(tensor)

    tree_of_forms = _map_leaves(replace_by_form, tree)
    stored = [leaf for _, leaf in _leaves(_stored(tree_of_forms), _Stored)]
    return tree_of_forms, {leaf.name: tensor for leaf, tensor in zip(stored, tensors, strict=True)}


def _stored(tree_of_forms: Any) -> Any:
    """Return a tree of forms as one of stored tensors, which are named by their path."""
    used_names: set[str] = set()

    def to_stored(path: _Path, form: torch.Tensor) -> _Stored:
        name = _joined(path)
        # ``{"a.b": x, "a": {"b": y}}`` gives two tensors the same joined path.
        while name in used_names:
            name += "#"
        used_names.add(name)
        return _Stored(name, form)

    return _map_leaves(to_stored, tree_of_forms, torch.Tensor)


def _read(folder: Path, state: Mapping[str, Any], tree: Any, ranks: Ranks) -> Any:
    """Return a tree with tensors in place of the stored ones, read from their files."""
    low_bit = _read_low_bit(folder, state, ranks)
    tensors: dict[str, torch.Tensor] = {}
    for _, stored in _leaves(tree, _Stored):
        if stored.name in low_bit:
            _check_layout(stored.name, stored.parameter, state, ranks)
        elif stored.name not in tensors:
            tensors[stored.name] = stored.empty()
    read_tensors(folder, tensors)

    def to_tensor(_: _Path, stored: _Stored) -> torch.Tensor:
        if stored.name not in low_bit:
            return tensors[stored.name]
        local: torch.Tensor = low_bit[stored.name]
        parameter = stored.parameter
        if isinstance(parameter, DTensor):
            return _distributed_from_local(
                local, parameter, parameter.placements, stored.form.shape
            )
        return local

    return _map_leaves(to_tensor, tree, _Stored)


def _distributed_from_local(
    local: torch.Tensor,
    parameter: DTensor,
    placements: Sequence[Placement],
    shape: torch.Size | None = None,
) -> DTensor:
    """Create a DTensor from this rank's part, on the mesh and the device of a parameter (the CPU
    with CPU offload).
    """
    if shape is None:
        shape = local.shape
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return whole.to(parameter.device)  # type: ignore[return-value]


def _read_low_bit(folder: Path, state: Mapping[str, Any], ranks: Ranks) -> Mapping[str, Any]:
    """Return the low-bit tensors that this rank saved, by name. A rank that saved none gets the
    names with layouts, which :func:`_check_layout` then refuses.
    """
    layouts: Mapping[str, Any] = state["low_bit"]
    if layouts and ranks.rank < state["ranks"]:
        tensors: Mapping[str, Any] = load_safely(folder / low_bit_file(ranks.rank))
        return tensors
    return layouts


def _check_layout(
    name: str, parameter: torch.Tensor | None, state: Mapping[str, Any], ranks: Ranks
) -> None:
    """Raise if the ranks or their shards differ from those that saved a low-bit tensor."""
    saved_ranks = state["ranks"]
    saved_layout = state["low_bit"][name]
    layout = _layout(parameter)
    if saved_ranks != ranks.count or (saved_ranks > 1 and layout != saved_layout):
        raise CheckpointError(
            f"{name} is a low-bit state that {saved_ranks} ranks saved ({saved_layout});"
            f" {ranks.count} ranks ({layout}) cannot split it again: resume with {saved_ranks}"
            " ranks and the same sharding, or start from the weights with a new optimizer state"
            " (resume_from_checkpoint=False) or a full-precision optimizer"
        )


def _layout(tensor: torch.Tensor | None) -> str:
    """Describe how the parameter of a low-bit state is divided over ranks, for an error. A plain
    parameter is whole, and so is a state without one.
    """
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


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of other tensors, such as a low-bit optimizer state."""
    return hasattr(tensor, "__tensor_flatten__")


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the meta device, with its strides if it is dense."""
    if type(tensor) is torch.Tensor:
        return torch.empty_like(tensor, device="meta")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _map_leaves(
    function: Callable[[tuple[Any, ...], Any], Any],
    tree: Any,
    kind: Any = object,
    path: tuple[Any, ...] = (),
) -> Any:
    """Apply `function` to path and value of each leaf of type `kind` in a tree of mappings, lists
    and tuples.
    """
    if isinstance(tree, Mapping):
        return {
            key: _map_leaves(function, child, kind, (*path, key)) for key, child in tree.items()
        }
    is_named_tuple = hasattr(tree, "_fields")
    if type(tree) in (list, tuple) or is_named_tuple:
        children = [
            _map_leaves(function, child, kind, (*path, number)) for number, child in enumerate(tree)
        ]
        return type(tree)(*children) if is_named_tuple else type(tree)(children)
    if isinstance(tree, kind):
        return function(path, tree)
    return tree


def _leaves(tree: Any, kind: type) -> list[tuple[_Path, Any]]:
    """Return path and value of all leaves of type `kind`."""
    leaves: list[tuple[_Path, Any]] = []
    _map_leaves(lambda path, leaf: leaves.append((path, leaf)), tree, kind)
    return leaves


def _joined(path: _Path) -> str:
    return ".".join(map(str, path)) or "the state"


def _kind(value: object) -> str:
    return type(value).__qualname__


# --- optimizer state by parameter name (FQN), whatever the sharding and the wrappers
#
#     {"state": {name: {"exp_avg": tensor, "step": tensor, ...}}, "param_groups": [{"lr": ...,
#     "params": [name, ...]}, ...]}
#
# ``torch.distributed.checkpoint.state_dict`` has the same format. Its functions are not used: they
# call ``step()`` of the live optimizer if it has no state (a new AdamW on load, plain SGD on each
# save), and raise for a parameter that was never stepped.

# Module names that activation checkpointing and torch.compile insert.
_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod"}
# Keys of a group that are saved in another form.
_NOT_SAVED = ("params", "param_names")
# Options that a group keeps on load. The last three choose how this machine computes a step.
_KEPT_ON_LOAD = ("param_names", "fused", "foreach", "capturable")


def parameter_name(name: str) -> str:
    """Return the name of a parameter without wrapper modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_optimizer_state(
    optimizers: Iterable[Optimizer], names: Mapping[nn.Parameter, str]
) -> dict[str, Any]:
    """Return the state of optimizers by parameter name, with the optimizers' own tensors.

    Args:
        optimizers: one optimizer for all parameters, or one per parameter.
        names: names of the parameters, as in ``model.named_parameters()``.

    Raises:
        CheckpointError: an optimizer does not store its state by parameter.
    """
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        saved = optimizer.state_dict()
        if "param_groups" not in saved:
            raise CheckpointError(
                f"{type(optimizer).__name__} does not store its state by parameter, so it cannot"
                " be saved; use another optimizer"
            )
        # torch saves the numbers of parameters.
        name_of = [parameter_name(names[parameter]) for parameter in _parameters([optimizer])]
        state |= {name_of[number]: dict(entries) for number, entries in saved["state"].items()}
        for group in saved["param_groups"]:
            options = {key: value for key, value in group.items() if key not in _NOT_SAVED}
            groups.append({**options, "params": [name_of[number] for number in group["params"]]})
    return {"state": state, "param_groups": groups}


def load_named_optimizer_state(
    state: Mapping[str, Any], optimizers: Iterable[Optimizer], names: Mapping[nn.Parameter, str]
) -> None:
    """Load the state returned by :func:`named_optimizer_state`, without communication.

    Args:
        state: state with the sharding of the parameters. If a parameter is a DTensor, a plain
            tensor of another shape is replicated; a scalar (``step``) stays unchanged.
        optimizers: one optimizer for all parameters, or one per parameter; may differ from the
            save.
        names: as in :func:`named_optimizer_state`.

    Raises:
        CheckpointError: the state belongs to other parameters. The message names the parameter, and
            nothing is loaded.
    """
    optimizers = list(optimizers)
    _check_parameters(state, optimizers, names)
    group_of: dict[str, Any] = {}
    for group in state["param_groups"]:
        group_of |= dict.fromkeys(group["params"], group)
    # Build all states before the first is loaded, so that an error leaves all unchanged.
    numbered = [_numbered(state["state"], group_of, optimizer, names) for optimizer in optimizers]
    for optimizer, own_state in zip(optimizers, numbered, strict=True):
        optimizer.load_state_dict(own_state)


def _check_parameters(
    state: Mapping[str, Any], optimizers: Iterable[Optimizer], names: Mapping[nn.Parameter, str]
) -> None:
    """Raise a CheckpointError if the state has a parameter that is not trained."""
    trained = {parameter_name(names[parameter]) for parameter in _parameters(optimizers)}
    for group in state["param_groups"]:
        for name in group["params"]:
            if name not in trained:
                raise CheckpointError(
                    f"the saved optimizer state has the parameter {name}, but this model does not"
                    " train it; the state belongs to another model"
                )


def _numbered(
    state: Mapping[str, Any],
    group_of: Mapping[str, Mapping[str, Any]],
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
) -> dict[str, Any]:
    """Return the state by parameter number for ``optimizer.load_state_dict``.

    Args:
        state: saved state by parameter name.
        group_of: saved group of each parameter name.
        optimizer: optimizer that loads the state.
        names: names of its parameters.
    """
    state_by_number: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group in optimizer.param_groups:
        saved_group: Mapping[str, Any] | None = None
        first_name = ""
        numbers: list[int] = []
        for parameter in group["params"]:
            name = parameter_name(names[parameter])
            if name not in group_of:
                raise CheckpointError(
                    f"the saved optimizer state has no parameter {name}; it belongs to another"
                    " model"
                )
            if saved_group is None:
                saved_group, first_name = group_of[name], name
            if group_of[name] is not saved_group:
                raise CheckpointError(
                    f"the saved optimizer state has {first_name} and {name} in two groups, this"
                    " optimizer has them in one; use the saved groups and the saved"
                    " optimizer_in_bwd"
                )
            if name in state:
                replicate = partial(_replicated, parameter=parameter)
                state_by_number[number] = _map_leaves(replicate, state[name], torch.Tensor)
            numbers.append(number)
            number += 1
        kept = {key: group[key] for key in _KEPT_ON_LOAD if key in group}
        groups.append({**(saved_group or {}), **kept, "params": numbers})
    return {"state": state_by_number, "param_groups": groups}


def _replicated(_: object, value: torch.Tensor, *, parameter: nn.Parameter) -> torch.Tensor:
    """Return a plain tensor replicated over the mesh of its parameter. A scalar, a DTensor and the
    state of a plain parameter stay unchanged.
    """
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or not value.dim():
        return value
    assert value.shape != parameter.shape, "a whole tensor of a parameter that is divided"
    return _distributed_from_local(value, parameter, [Replicate()] * parameter.device_mesh.ndim)


def _parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters in torch's numbering."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
