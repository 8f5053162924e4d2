"""The rules by which the learning rate, beta2 and the weight decay follow the batch of a step, and
the schedule as a function of the clock.

Each step's values are computed from the unscaled ones, so nothing accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from adaptive_batch._util import LARGEST_NUMBER
from adaptive_batch.errors import SettingError

RULES = ("none", "linear", "sqrt")
SCALED_WITH_BATCH: Mapping[str, str] = {"beta2": "half_life", "weight_decay": "per_token"}
# The key of a parameter group that holds each of them.
_IN_GROUP = {"beta2": "betas", "weight_decay": "weight_decay"}
# From an optimizer and one of its parameter groups to the scaled values of the group.
Scale = Callable[[Optimizer, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Reference:
    """The global batch that a learning rate was chosen for; `amount` is above 0."""

    amount: float
    unit: Literal["rows", "tokens"]

    def __str__(self) -> str:
        # As a whole number where it is one: "64 rows", not "64.0 rows".
        amount = int(self.amount) if float(self.amount).is_integer() else self.amount
        unit = self.unit.removesuffix("s") if amount == 1 else self.unit
        return f"{amount} {unit}"


def parse_reference(key: str, value: object) -> Reference:
    """Read ``64`` as rows and ``8192tok`` or ``1.5e6tok`` as tokens.

    Raises:
        SettingError: the value of `key` is neither.
    """
    if type(value) is int and 1 <= value <= LARGEST_NUMBER:
        return Reference(float(value), "rows")
    if isinstance(value, str) and value.endswith("tok"):
        with suppress(ValueError):
            amount = float(value.removesuffix("tok"))
            if 0 < amount <= LARGEST_NUMBER:
                return Reference(amount, "tokens")
    remedy = "give a whole number of rows, 1 or more, or tokens as in 8192tok"
    raise SettingError(key, value, remedy)


def scale_learning_rate(learning_rate: float, batch: float, reference: float, rule: str) -> float:
    """Scale the rate that was chosen for one batch to another.

    Args:
        learning_rate: the rate that belongs to `reference`.
        batch: global batch of a step, in rows or in tokens.
        reference: global batch that the rate was chosen for, in the same unit.
        rule: ``none`` keeps it; ``linear`` multiplies it by batch / reference (Goyal et al. 2017,
            arXiv 1706.02677, section 2.1); ``sqrt`` by the square root of that (Krizhevsky 2014,
            arXiv 1404.5997, section 5; for Adam Malladi et al. 2022, arXiv 2205.10287, definition
            5.1).

    Raises:
        ValueError: an unknown rule, or a batch or reference that is not positive.
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: give one of {', '.join(RULES)}")
    if not (batch > 0 and reference > 0):
        raise ValueError(f"batch={batch!r}, reference={reference!r}: both must be above 0")
    factor = {"none": 1.0, "linear": batch / reference, "sqrt": math.sqrt(batch / reference)}[rule]
    return learning_rate * factor


def scale_beta2(beta2: float, ratio: float) -> float:
    """Scale the beta2 of one batch to a batch of `ratio` times as much data.

    Its half-life in data stays: beta2 ** ratio (Marek et al. 2025, arXiv 2507.07101), kept within
    0.9 to 0.9999 or what was configured.
    """
    lowest = min(beta2, 0.9)
    highest = max(beta2, 0.9999)
    return float(min(max(beta2**ratio, lowest), highest))


def scale_weight_decay(weight_decay: float, ratio: float, rate_factor: float) -> float:
    """Scale the weight decay of one batch to a batch of `ratio` times as much data.

    The decay for each row or token stays. A step of AdamW decays weights by rate x weight decay. A
    step of `ratio` times the data decays them by `ratio` times as much, of which the rate brings
    `rate_factor`: rate x weight decay / batch is kept (the timescale of Wang and Aitchison 2024,
    arXiv 2405.13698). So the rule ``linear`` keeps the weight decay, ``sqrt`` multiplies it by
    sqrt(ratio), and ``none`` by `ratio`.
    """
    return weight_decay * ratio / rate_factor


def check_scaled(name: str, value: object) -> Mapping[str, str]:
    """Read the values that are scaled with the batch, such as ``{beta2: half_life}``.

    Raises:
        SettingError: it is no block, or names a value or a way of scaling that does not exist.
    """
    choices = ", ".join(f"{key}: {method}" for key, method in SCALED_WITH_BATCH.items())
    if not isinstance(value, Mapping):
        raise SettingError(name, value, f"give a block of {choices}")
    for key, method in value.items():
        if key not in SCALED_WITH_BATCH or method not in (None, SCALED_WITH_BATCH[key]):
            raise SettingError(
                f"{name}.{key}", method, f"give {choices}; null or nothing for what stays"
            )
    return {str(key): method for key, method in value.items() if method is not None}


def scale_group(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    *,
    ratio: float,
    rate_factor: float,
    names: Collection[str],
) -> dict[str, Any]:
    """Return the values of a parameter group that are other ones in a scaled step.

    Args:
        optimizer: optimizer of the group.
        group: parameter group with its unscaled values.
        ratio: batch of the step / reference.
        rate_factor: factor of the rate that follows from it.
        names: other values that follow the batch: ``beta2``, ``weight_decay``.
    """
    scaled: dict[str, Any] = {}
    if rate_factor != 1.0:
        scaled["lr"] = float(group["lr"]) * rate_factor
        # Of the same type: torchao's optimizers refuse a number.
        if isinstance(group["lr"], torch.Tensor):
            scaled["lr"] = torch.full_like(group["lr"], scaled["lr"])
    # torchao's low-bit optimizers compile their step for each number that is not a tensor.
    number: Callable[[float], Any] = torch.tensor if _is_low_bit(optimizer) else float
    if "beta2" in names:
        beta1, beta2, *others = group["betas"]
        scaled["betas"] = (beta1, number(scale_beta2(beta2, ratio)), *others)
    if "weight_decay" in names:
        weight_decay = scale_weight_decay(group["weight_decay"], ratio, rate_factor)
        scaled["weight_decay"] = number(weight_decay)
    return scaled


def scale_steps(optimizer: Any, scale: Scale | None) -> None:
    """Scale values of an optimizer's parameter groups during each ``optimizer.step()``.

    Between two steps the groups hold the unscaled values. So whatever reads, multiplies or saves
    them there, such as a scheduler, a warm-up or a checkpoint, never meets a scaled one, also where
    a step is skipped or raises. The scaling lasts until this is called again: a step that is
    repeated after an error is scaled as the first attempt was. In a step that a CUDA graph captures
    this raises SettingError.

    Args:
        optimizer: optimizer whose former scaling, if any, is replaced.
        scale: function that returns the scaled values of a group by their keys; None for unscaled
            steps.
    """
    if scale is not None and not hasattr(optimizer, "scaled_steps"):
        optimizer.scaled_steps = _ScaledSteps(optimizer)
    if hasattr(optimizer, "scaled_steps"):
        optimizer.scaled_steps.scale = scale


class _ScaledSteps:
    """Replaces values of an optimizer's groups as a step begins, and restores them as it ends."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.scale: Scale | None = None
        self._optimizer = optimizer
        # Groups in a step, with the unscaled and the scaled values.
        self._scaled: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        # As a part of a compiled step they would not restore a number.
        disable: Any = torch.compiler.disable
        begin = disable(self._begin)
        end = disable(self._end)
        step = optimizer.step

        @wraps(getattr(step, "__func__", step))
        def scaled_step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                begin()
                return step(*args, **kwargs)
            finally:
                end()

        # A method, as torch's schedulers wrap the step once more.
        optimizer.step = MethodType(scaled_step, optimizer)  # type: ignore[method-assign]
        # With a GradScaler, accelerate calls the method that it found before this one; only the
        # hooks scale it. torchao's CPUOffloadOptimizer has no hooks.
        with suppress(AttributeError):
            optimizer.register_step_pre_hook(begin)
            optimizer.register_step_post_hook(end)

    def _begin(self, *_: Any) -> None:
        # The hook repeats what the method has begun.
        self._end()
        if self.scale is None:
            return
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_cuda and torch.cuda.is_current_stream_capturing():
            remedy = (
                "its step is captured in a CUDA graph, and a replay does not scale the rate; call"
                " step() outside of the graph"
            )
            raise SettingError("optimizer", type(self._optimizer).__name__, remedy)
        for group in self._optimizer.param_groups:
            scaled = self.scale(self._optimizer, group)
            self._scaled.append((group, {key: group[key] for key in scaled}, scaled))
            group.update(scaled)

    def _end(self, *_: Any) -> None:
        for group, unscaled, scaled in self._scaled:
            # The step itself may have written another value.
            group.update({key: unscaled[key] for key in scaled if group[key] is scaled[key]})
        self._scaled.clear()


def read_scaled(groups: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Return what follows the batch, by name, of the first group where it is not 0."""
    values = {}
    for name in names:
        numbers = [_number(group[_IN_GROUP[name]]) for group in groups]
        values[name] = next(filter(None, numbers), 0.0)
    return values


def prepare_scaled(optimizer: Optimizer, names: Mapping[str, str]) -> None:
    """Check that an optimizer has what is to follow the batch, and let it take scaled values.

    Raises:
        SettingError: the parameter groups have no such value, or it is 0.
    """
    kind = type(optimizer).__name__
    for name, method in names.items():
        key = _IN_GROUP[name]
        remedy = None
        if not all(key in group for group in optimizer.param_groups):
            remedy = (
                f"the parameter groups of {kind} have no {key}; remove it, or take"
                " torch.optim.AdamW"
            )
        # Scaling 0 would change nothing, without a word.
        elif not any(_number(group[key]) for group in optimizer.param_groups):
            remedy = f"{name} of {kind} is 0; set it, or remove this"
        if remedy:
            raise SettingError(f"scale_with_batch.{name}", method, remedy)
    if "beta2" in names and _is_low_bit(optimizer):
        _let_beta2_be_a_tensor(optimizer)


def _is_low_bit(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torchao's, whose states may have few bits."""
    return hasattr(optimizer, "_subclass_zeros")


def _let_beta2_be_a_tensor(optimizer: Any) -> None:
    """Give the states of torchao's low-bit optimizers the one operation that they lack for it."""
    # Its AdamW without low-bit states.
    if math.isinf(optimizer.block_size):
        return
    kind = type(
        optimizer._subclass_zeros(torch.zeros(optimizer.block_size), True, optimizer.block_size)
    )

    @kind.implements(torch.ops.aten.lerp.Tensor)  # type: ignore[untyped-decorator]
    def lerp(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors = [arg.dequantize() if isinstance(arg, kind) else arg for arg in args]
        return func(*tensors, **kwargs)


def _number(value: Any) -> float:
    """Return a weight decay as it is, and of betas the second."""
    return float(value[1] if isinstance(value, tuple | list) else value)


def unwrap(wrapper: Any, name: str) -> Any:
    """Return what accelerate's or Lightning's wrapper holds; itself where there is no wrapper."""
    while isinstance(inner := getattr(wrapper, name, None), Optimizer | LRScheduler):
        wrapper = inner
    return wrapper


def write_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a parameter group, in place where it is a tensor, as torchao keeps it."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def follows_clock(scheduler: Any) -> bool:
    """Return whether a scheduler is a function of the step alone; so is None.

    Such a scheduler keeps no count of its own.
    """
    # A subclass with a get_lr() of its own may count.
    return scheduler is None or (
        isinstance(scheduler, LambdaLR) and type(scheduler).get_lr is LambdaLR.get_lr
    )


def schedule_of(scheduler: LRScheduler | None) -> Callable[[float], float]:
    """Return a schedule as a function of the clock: its factor of the first group's base rate.

    Raises:
        SettingError: there is none, or it keeps its own count.
    """
    unwrapped = unwrap(scheduler, "scheduler")
    if unwrapped is None or not follows_clock(unwrapped):
        remedy = (
            "a batch that follows the decay of the rate needs a LambdaLR, such as torchtune's"
            " cosine schedule"
        )
        kind = unwrapped and type(unwrapped).__name__
        raise SettingError("lr_scheduler", kind, remedy)

    return lambda clock: factors_at(unwrapped, clock)[0]


def factors_at(scheduler: LambdaLR, clock: float) -> list[float]:
    """Return a schedule's factor for each group's base rate."""
    # torch calls the functions with whole numbers.
    if clock == int(clock):
        clock = int(clock)
    return [rule(clock) for rule in scheduler.lr_lambdas]  # type: ignore[arg-type]
