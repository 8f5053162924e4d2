"""Checks of models, optimizers and gradients for all loops, and compilations of models."""

from __future__ import annotations

import gc
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import belongs_to, count
from adaptive_batch.distributed import Replicas, Sharding, local_part, reshard
from adaptive_batch.errors import SettingError

private = PrivateNames("compiled steps")
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
    """Return whether a BatchNorm normalizes over the rows of a micro-batch: results then depend on
    the number of rows.
    """
    return any(
        is_batch_norm(module) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def fewest_rows(model: nn.Module) -> int:
    """Return the fewest rows that the model can train on: two with a BatchNorm1d, whose statistics
    are undefined for one value.
    """
    # A model in evaluation mode is put into training mode with all modules.
    has_batch_norm_1d = any(
        isinstance(module, nn.BatchNorm1d) and (module.training or not model.training)
        for module in model.modules()
    )
    return 2 if has_batch_norm_1d else 1


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model, or a part of it, is compiled."""
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


class Compilations(AbstractContextManager["Compilations"]):
    """Context manager that counts the compilations inside and frees the garbage of each.

    Attributes:
        number: compilations so far, including those of the backward at its first run.
        variants: numbers of the compiled variants of each function, by torch's number of the
            function.
    """

    def __init__(self) -> None:
        self.number = 0
        self.variants: defaultdict[str, set[str]] = defaultdict(set)

    def __enter__(self) -> Compilations:
        private.compilation_callbacks.register_end_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        # torch.compiler.reset() removes callbacks.
        with suppress(ValueError):
            private.compilation_callbacks.remove_end_callback(self._end)

    def _end(self, compilation: Any) -> None:
        self.number += 1
        # The id is "function/variant_attempt"; a backward has the id of its forward.
        function, _, variant_attempt = compilation.compile_id.partition("/")
        variant, _, _ = variant_attempt.partition("_")
        self.variants[function].add(variant)
        # The error of a kernel that needs too much shared memory is in a cycle with the frames of
        # its callers, and keeps their logits alive. Torch collects only younger generations.
        gc.collect()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager: set the model to evaluation mode, and restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_parameters(model: object, optimizer: object) -> None:
    """Raise if the optimizer has parameters outside of the model, whose gradients a step would
    neither clip nor restore. Log the trained parameters that the optimizer does not have.

    Raises:
        SettingError: an argument cannot be used.
    """
    if not isinstance(model, nn.Module):
        raise SettingError("model", type(model).__name__, "give an nn.Module")
    if not isinstance(optimizer, Optimizer):
        remedy = (
            "give one torch.optim.Optimizer; if several step the model, the one with most state"
        )
        raise SettingError("optimizer", type(optimizer).__name__, remedy)
    reshard(model)
    parameters = {id(parameter) for parameter in model.parameters()}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    num_foreign = len(stepped - parameters)
    if num_foreign:
        remedy = (
            f"{num_foreign} tensors of the optimizer are not parameters of the model; put all"
            " trained parameters into one nn.Module"
        )
        raise SettingError("model", type(model).__name__, remedy)
    not_stepped = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in stepped
    ]
    if not_stepped and distributed.is_rank_zero():
        log.warning(
            "the optimizer leaves out %s: freeze them with requires_grad_(False),"
            " or, if another optimizer steps them, clear their gradients after each step too;"
            " trials of find_bound do not contain its state",
            some_names(not_stepped),
        )


def some_names(names: Sequence[str], kind: str = "parameter") -> str:
    """Describe names for a message: their number and the first of them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{count(len(names), kind)} ({', '.join(names[:_NAMED])}{more})"


def check_ranks(model: nn.Module, sharding: Sharding) -> None:
    """Raise if a model is neither fully sharded nor replicated over ranks.

    Raises:
        SettingError: parameters are neither sharded nor replicated.
    """
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        remedy = "it divides batches itself; start a process for each GPU with torchrun"
        raise SettingError("model", "DataParallel", remedy)
    if distributed.world_size() == 1:
        return
    if isinstance(sharding, Replicas):
        synchronized = {id(parameter) for parameter in sharding.parameters}
        cause = "DDP leaves out"
        remedy = "wrap the whole model in one DDP module"
    else:
        reshard(model)
        dtensors = _dtensors(model)
        if not (sharding.is_sharded and _is_sharded_by_rows(dtensors)):
            remedy = (
                "several ranks need a DDP module, or a model that fully_shard alone has sharded"
                " over all ranks; or start one process"
            )
            raise SettingError("model", type(model).__name__, remedy)
        synchronized = {id(parameter) for parameter in dtensors if _num_shardings(parameter)}
        cause = "fully_shard leaves out"
        remedy = "call fully_shard on the whole model too, after its parts"
    left_out = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in synchronized
    ]
    if left_out:
        problem = f"{cause} {some_names(left_out)}, so each rank would train its own"
        raise SettingError("model", type(model).__name__, f"{problem}; {remedy}")


def _is_sharded_by_rows(dtensors: Sequence[Any]) -> bool:
    """Return whether each rank runs its own rows; with tensor parallelism some run the same."""
    return all(
        parameter.device_mesh.size() == distributed.world_size() and _num_shardings(parameter) <= 1
        for parameter in dtensors
    )


def is_replicated(model: nn.Module) -> bool:
    """Return whether ranks also hold copies of shards, which other collectives synchronize."""
    return any(parameter.device_mesh.ndim > 1 for parameter in _dtensors(model))


def _dtensors(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if hasattr(parameter, "device_mesh")]


def _num_shardings(dtensor: Any) -> int:
    """Return the number of mesh dimensions that shard a tensor."""
    return sum(not place.is_replicate() for place in dtensor.placements)


def gradient_hooks(model: nn.Module) -> list[str]:
    """Return the names of parameters with a hook that reads or changes their gradients."""
    return [name for name, parameter in model.named_parameters() if parameter._backward_hooks]


def check_hooks(leaves: Iterable[torch.Tensor | None]) -> None:
    """Raise for hooks that may step an optimizer in the backward of each part.

    Raises:
        SettingError: a leaf has such a hook, and it is not DDP's own.
    """
    for leaf in leaves:
        hooks = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            # DDP registers a functools.partial.
            function = getattr(hook, "func", hook)
            if getattr(function, "__module__", "") == "torch.nn.parallel.distributed":
                continue
            name = getattr(function, "__qualname__", type(function).__name__)
            remedy = (
                "a split batch would call this hook once for each part, so an optimizer might step"
                " several times; remove the hook and call optimizer.step() after the batch, or use"
                " batches that fit whole, without micro_batch_size and micro_batch_tokens"
            )
            raise SettingError("register_post_accumulate_grad_hook", name, remedy)


@contextmanager
def optimizers_wait() -> Iterator[None]:
    """Context manager for the parts of a batch, between which no optimizer of this thread may step.

    Raises:
        SettingError: an optimizer's ``step()`` is called inside.
    """
    thread = threading.current_thread()

    def refuse(optimizer: Optimizer, *_: object) -> None:
        if not belongs_to(thread):
            return
        remedy = (
            "forward_backward called it, so it would step once for each part of a split batch;"
            " call it after the batch"
        )
        raise SettingError("optimizer.step()", type(optimizer).__name__, remedy)

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def check_gradients_are_clear(model: nn.Module) -> None:
    """Raise if a parameter has a nonzero gradient.

    Raises:
        ValueError: a gradient is not zero.
    """
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and bool(local_part(parameter.grad).any())
    ]
    if names:
        raise ValueError(
            f"gradients of {some_names(names)} are not zero: call optimizer.step()"
            " and optimizer.zero_grad() after each run, with gradient_accumulation_steps=1 in a"
            " trainer around it; freeze parameters that the optimizer does not have with"
            " requires_grad_(False), or call model.zero_grad() after each step"
        )


@contextmanager
def gradients_must_come(model: nn.Module, function: Callable[..., object]) -> Iterator[None]:
    """Raise if a `forward_backward` function changes no gradient and no hook consumes gradients.

    Raises:
        SettingError: no gradient has changed.
    """
    before = [_gradient_version(parameter) for parameter in model.parameters()]
    # Not in a finally block: an error of the function explains missing gradients better.
    yield
    for parameter, version in zip(model.parameters(), before, strict=True):
        # Such a hook may step an optimizer and clear the gradient.
        has_hook = bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
        if has_hook or _gradient_version(parameter) != version:
            return
    name = getattr(function, "__name__", type(function).__name__)
    remedy = "it left no gradient; call backward() on the loss in it, but not zero_grad()"
    raise SettingError("forward_backward", name, remedy)


def _gradient_version(parameter: nn.Parameter) -> tuple[int, int] | None:
    """Return id and version of a gradient, which change when it is written; None without a
    gradient.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    # FSDP adds to the part of a gradient that this rank has.
    return id(gradient), local_part(gradient)._version
