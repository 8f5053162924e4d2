"""Optimizer state by parameter name (FQN), independent of sharding, checkpointing and compilation.

    {"state": {name: {"exp_avg": tensor, "step": tensor, ...}}, "param_groups": [{"lr": ...,
    "params": [name, ...]}, ...]}

``torch.distributed.checkpoint.state_dict`` has the same format. Its functions are not used: they
call ``step()`` of the live optimizer if it has no state (a new AdamW on load, plain SGD on each
save), and raise for a parameter that was never stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.optim import Optimizer

from adaptive_batch.errors import CheckpointError

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
    check_parameters(state, optimizers, names)
    group_of: dict[str, Any] = {}
    for group in state["param_groups"]:
        group_of |= dict.fromkeys(group["params"], group)
    # Build all states before the first is loaded, so that an error leaves all unchanged.
    numbered = [_numbered(state["state"], group_of, optimizer, names) for optimizer in optimizers]
    for optimizer, own_state in zip(optimizers, numbered, strict=True):
        optimizer.load_state_dict(own_state)


def check_parameters(
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
                state_by_number[number] = map_leaves(replicate, state[name], torch.Tensor)
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
    return distributed_from_local(value, parameter, [Replicate()] * parameter.device_mesh.ndim)


def map_leaves(
    function: Callable[[tuple[Any, ...], Any], Any],
    tree: Any,
    kind: Any = object,
    path: tuple[Any, ...] = (),
) -> Any:
    """Apply `function` to path and value of each leaf of type `kind` in a tree of mappings, lists
    and tuples.
    """
    if isinstance(tree, Mapping):
        return {key: map_leaves(function, child, kind, (*path, key)) for key, child in tree.items()}
    is_named_tuple = hasattr(tree, "_fields")
    if type(tree) in (list, tuple) or is_named_tuple:
        children = [
            map_leaves(function, child, kind, (*path, number)) for number, child in enumerate(tree)
        ]
        return type(tree)(*children) if is_named_tuple else type(tree)(children)
    if isinstance(tree, kind):
        return function(path, tree)
    return tree


def distributed_from_local(
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


def _parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return the parameters in torch's numbering."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
