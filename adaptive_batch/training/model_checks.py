"""Checks of models, optimizers and gradients for all loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.distributed import Replicas, Sharding, local_part, reshard
from adaptive_batch.errors import SettingError

log = logging.getLogger("adaptive_batch")

# Most parameters that a message names.
_NAMED = 3


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a BatchNorm of any kind, such as apex's ``SyncBatchNorm``."""
    has_statistics = hasattr(module, "num_batches_tracked") and hasattr(module, "running_mean")
    return has_statistics and not isinstance(
        module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
    )


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the model normalizes over the rows of a micro-batch, so that its results
    depend on their number.
    """
    return any(
        is_batch_norm(module) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def fewest_rows(model: nn.Module) -> int:
    """Return the fewest rows that the model can train on: two with a BatchNorm1d, whose statistics
    are undefined for one value.
    """
    takes_statistics = any(
        isinstance(module, nn.BatchNorm1d) and (module.training or not model.training)
        for module in model.modules()
    )
    return 2 if takes_statistics else 1


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is compiled."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set the model to evaluation mode inside; restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_parameters(model: object, optimizer: object) -> None:
    """Refuse an optimizer of parameters outside of the model, whose gradients a step would neither
    clip nor restore; log the parameters that it leaves out.
    """
    if not isinstance(model, nn.Module):
        raise SettingError("model", type(model).__name__, "give an nn.Module")
    if not isinstance(optimizer, Optimizer):
        remedy = (
            "give one torch.optim.Optimizer; where several step the model, that with most state"
        )
        raise SettingError("optimizer", type(optimizer).__name__, remedy)
    closure = signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        remedy = "its step() needs a closure that runs the batch again, which is not supported"
        raise SettingError("optimizer", type(optimizer).__name__, remedy)
    reshard(model)
    parameters = {id(parameter) for parameter in model.parameters()}
    if not parameters:
        raise SettingError("model", type(model).__name__, "it has no parameters")
    num_foreign = 0
    for group in optimizer.param_groups:
        num_foreign += sum(id(tensor) not in parameters for tensor in group["params"])
    if num_foreign:
        remedy = (
            f"{num_foreign} tensors of the optimizer are no parameters of it; put all that is"
            " trained into one nn.Module"
        )
        raise SettingError("model", type(model).__name__, remedy)
    stepped = _stepped_by(optimizer)
    left = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in stepped
    ]
    if left and distributed.is_rank_zero():
        log.warning(
            "the optimizer leaves out %s: freeze them with requires_grad_(False),"
            " or, where another optimizer steps them, clear their gradients after each step too,"
            " and note that its state is in no trial of find_bound",
            some_names(left),
        )


def _stepped_by(optimizer: Optimizer) -> set[int]:
    stepped: set[int] = set()
    for group in optimizer.param_groups:
        stepped |= {id(parameter) for parameter in group["params"]}
    return stepped


def some_names(names: Sequence[str], kind: str = "parameter") -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{count(len(names), kind)} ({', '.join(names[:_NAMED])}{more})"


def check_ranks(model: nn.Module, sharding: Sharding) -> None:
    """Refuse a model that several ranks neither divide among them as a whole, nor keep alike.

    Raises:
        SettingError: parameters are neither sharded nor replicated.
    """
    if distributed.world_size() == 1:
        return
    if isinstance(sharding, Replicas):
        alike = {id(parameter) for parameter in sharding.parameters}
        apart = [
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in alike
        ]
        if apart:
            needed = f"DDP leaves out {some_names(apart)}, so each rank would train its own"
            remedy = "wrap the whole model in one DDP module"
            raise SettingError("model", type(model).__name__, f"{needed}; {remedy}")
        return
    if not (sharding.is_sharded and _is_divided_by_rows(model)):
        needed = (
            "several ranks need one that torch's fully_shard, and nothing else, has divided over"
            " all of them, or a DDP module"
        )
        raise SettingError("model", type(model).__name__, f"{needed}; or start one process")
    whole = _undivided(model)
    if whole:
        needed = f"fully_shard leaves out {some_names(whole)}, so each rank would train its own"
        remedy = "call fully_shard on the whole model too, after its parts"
        raise SettingError("model", type(model).__name__, f"{needed}; {remedy}")


def _is_divided_by_rows(model: nn.Module) -> bool:
    """Return whether each rank runs its own rows; with tensor parallelism some run the same."""
    divided = _divided(model)
    if any(parameter.device_mesh.size() != distributed.world_size() for parameter in divided):
        return False
    num_divisions = [
        sum(not place.is_replicate() for place in parameter.placements) for parameter in divided
    ]
    return max(num_divisions) <= 1


def is_replicated(model: nn.Module) -> bool:
    """Return whether ranks also hold copies of parts, kept alike by other collectives."""
    return any(parameter.device_mesh.ndim > 1 for parameter in _divided(model))


def _divided(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if hasattr(parameter, "device_mesh")]


def _undivided(model: nn.Module) -> list[str]:
    """Return the names of trained parameters that no rank has sharded."""
    divided = {
        id(parameter)
        for parameter in _divided(model)
        if not all(place.is_replicate() for place in parameter.placements)
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in divided
    ]


def gradient_hooks(model: nn.Module) -> list[str]:
    """Return the names of parameters with a hook that changes or reads their gradients."""
    return [name for name, parameter in model.named_parameters() if parameter._backward_hooks]


def check_hooks(leaves: Iterable[torch.Tensor | None]) -> None:
    """Refuse hooks that may step an optimizer in the backward of each part.

    Raises:
        SettingError: a leaf has a hook that is not DDP's own.
    """
    for leaf in leaves:
        hooks = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            function = getattr(hook, "func", hook)
            if getattr(function, "__module__", "") == "torch.nn.parallel.distributed":
                continue
            name = getattr(function, "__qualname__", type(function).__name__)
            remedy = (
                "a split batch would call this hook once for each part, and so step an optimizer"
                " several times; remove the hook and call optimizer.step() after the batch, or make"
                " batches that fit whole, without micro_batch_size and micro_batch_tokens"
            )
            raise SettingError("register_post_accumulate_grad_hook", name, remedy)


@contextmanager
def optimizers_wait() -> Iterator[None]:
    """Refuse to step an optimizer inside, where the parts of a batch run.

    Raises:
        SettingError: an optimizer's ``step()`` is called.
    """

    def refuse(optimizer: Optimizer, *_: object) -> None:
        remedy = (
            "a part of a split batch called it, so it would step once for each part; call it after"
            " the batch, outside of forward_backward"
        )
        raise SettingError("optimizer.step()", type(optimizer).__name__, remedy)

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def check_gradients_are_clear(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse gradients that are there before a step.

    Args:
        model: that trains.
        optimizer: of its parameters.

    Raises:
        ValueError: with the parameters that have some.
    """
    dirty = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and bool(local_part(parameter.grad).any())
    }
    if not dirty:
        return
    stepped = _stepped_by(optimizer)
    foreign = [name for name, parameter in dirty.items() if id(parameter) not in stepped]
    if len(foreign) < len(dirty):
        remedy = (
            "call optimizer.step() and optimizer.zero_grad() after each run. Accumulation belongs"
            " to the loop, which runs a step of any batch_size in micro-batches that fit: set"
            " gradient_accumulation_steps=1 in a trainer around it"
        )
    else:
        remedy = (
            f"the optimizer leaves out {some_names(foreign)}, and so does its zero_grad();"
            " freeze them with requires_grad_(False), or call model.zero_grad() after each step"
        )
    raise ValueError(f"gradients are there before a step: {remedy}")


@contextmanager
def gradients_must_come(model: nn.Module, function: Callable[..., object]) -> Iterator[None]:
    """Refuse a `forward_backward` function that changes no gradient inside, unless hooks of the
    script's own take them.

    Raises:
        SettingError: each parameter has the gradient that it had.
    """
    before = [_gradient_version(parameter) for parameter in model.parameters()]
    yield
    for parameter, version in zip(model.parameters(), before, strict=True):
        # Hooks that run an optimizer in backward.
        takes_gradients = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if takes_gradients or _gradient_version(parameter) != version:
            return
    name = getattr(function, "__name__", type(function).__name__)
    remedy = "it left no gradient; call backward() of its loss in it, and leave zero_grad() out"
    raise SettingError("forward_backward", name, remedy)


def _gradient_version(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Return what changes as a gradient comes or is added to; None without one."""
    gradient = parameter.grad
    if gradient is None:
        return None
    # FSDP adds to the part of a gradient that this rank has.
    return id(gradient), local_part(gradient)._version
