"""The learning rate: its clock, its schedule, and how it, beta2 and weight decay follow the batch.

The clock of a schedule is in units of the steps that a constant batch would have taken. So a
growing batch neither stretches nor cuts the schedule.

The values of each step are computed from the unscaled ones, so rounding does not accumulate.
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

from .progress import Progress

UNITS = ("samples", "tokens", "steps")
RULES = ("none", "linear", "sqrt")
SCALED_WITH_BATCH: Mapping[str, str] = {"beta2": "half_life", "weight_decay": "per_token"}
# Keys of a parameter group that hold these values; ``betas`` is (beta1, beta2, ...).
_GROUP_KEYS = {"beta2": "betas", "weight_decay": "weight_decay"}
# f(parameter group) -> scaled values of the group
Scale = Callable[[dict[str, Any]], dict[str, Any]]


def elapsed_steps(unit: str, progress: Progress) -> float:
    """Return the progress of training in steps of a constant batch.

    With a constant batch (in tokens: if all steps have the same number), this is exactly the number
    of optimizer steps.

    Args:
        unit: ``steps`` counts optimizer steps. ``samples`` and ``tokens`` count the trained epochs,
            fractions included, times the steps per epoch of the constant batch.
        progress: progress of training; samples and tokens need its `pace`.

    Raises:
        SettingError: the clock counts tokens, and the batches do not.
    """
    if unit == "steps":
        return progress.steps
    assert progress.pace is not None, f"a clock of {unit} needs the pace of the epoch"
    reference = progress.pace.reference
    plan = progress.pace.plan
    steps_of_finished_epochs = progress.epoch * reference.steps
    if unit == "tokens":
        if not plan.tokens:
            remedy = "AdaptiveBatches counts no tokens; give it row_length"
            raise SettingError("lr_clock", unit, remedy)
        return steps_of_finished_epochs + progress.epoch_tokens * reference.steps / plan.tokens
    if plan.is_estimate:
        # The epoch ends with its last row or at the maximum number of steps, whichever is first.
        trained_fraction = progress.epoch_rows / plan.rows
        if plan.most_steps:
            trained_fraction = max(trained_fraction, progress.epoch_steps / plan.most_steps)
        return steps_of_finished_epochs + trained_fraction * reference.steps
    slots = plan.slots
    # If both plans train the same rows, divide by the same number: the times are then bit-identical
    # to those of the constant batch.
    if plan.stepped_rows == reference.stepped_rows:
        slots = reference.slots
    return steps_of_finished_epochs + progress.epoch_rows * reference.steps / slots


def relative_decay(schedule: Callable[[float], float]) -> Callable[[float], float]:
    """Return the schedule divided by its running maximum (1 during a warm-up)."""
    # peaks[n] is the maximum of the schedule at the whole times before n; it grows on demand.
    peaks = [0.0]

    def decay(time: float) -> float:
        whole_time = int(time)
        while len(peaks) <= whole_time + 1:
            next_time = len(peaks) - 1
            peaks.append(max(peaks[-1], schedule(next_time)))
        now = schedule(time)
        peak = max(peaks[whole_time + 1], now)
        return now / peak if peak > 0 else 1.0

    return decay


@dataclass(frozen=True)
class ReferenceBatch:
    """The global batch that a learning rate was chosen for; `amount` is above 0."""

    amount: float
    unit: Literal["rows", "tokens"]

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.amount == 1 else self.unit
        # "64 rows", not "64.0 rows"; the largest amount has 13 digits.
        return f"{self.amount:.15g} {unit}"


def parse_reference(key: str, value: object) -> ReferenceBatch:
    """Read ``64`` as rows and ``8192tok`` or ``1.5e6tok`` as tokens.

    Raises:
        SettingError: the value of `key` has another form.
    """
    if type(value) is int and 1 <= value <= LARGEST_NUMBER:
        return ReferenceBatch(float(value), "rows")
    if isinstance(value, str) and value.endswith("tok"):
        with suppress(ValueError):
            amount = float(value.removesuffix("tok"))
            if 0 < amount <= LARGEST_NUMBER:
                return ReferenceBatch(amount, "tokens")
    remedy = "give a whole number of rows, 1 or more, or tokens as in 8192tok"
    raise SettingError(key, value, remedy)


def scale_learning_rate(learning_rate: float, batch: float, reference: float, rule: str) -> float:
    """Scale a learning rate from its reference batch to another batch.

    Args:
        learning_rate: learning rate for `reference`.
        batch: global batch of a step, in rows or tokens.
        reference: global batch that the rate was chosen for, in the same unit.
        rule: ``none`` keeps the rate; ``linear`` multiplies it by batch / reference (Goyal et al.
            2017, arXiv 1706.02677, section 2.1); ``sqrt`` by sqrt(batch / reference) (Krizhevsky
            2014, arXiv 1404.5997, section 5; for Adam: Malladi et al. 2022, arXiv 2205.10287,
            definition 5.1).

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
    """Scale beta2 to a batch `ratio` times as large.

    The half-life in tokens is kept: beta2 ** ratio (Marek et al. 2025, arXiv 2507.07101), clamped
    to 0.9 to 0.9999 unless the configured value lies outside.
    """
    lowest = min(beta2, 0.9)
    highest = max(beta2, 0.9999)
    return float(min(max(beta2**ratio, lowest), highest))


def scale_weight_decay(weight_decay: float, ratio: float, rate_factor: float) -> float:
    """Scale the weight decay to a batch `ratio` times as large.

    A step of AdamW decays weights by rate x weight decay. The result keeps rate x weight decay /
    batch, the timescale of Wang and Aitchison 2024 (arXiv 2405.13698). The learning rate already
    grows by `rate_factor`, so the rule ``linear`` keeps the weight decay, ``sqrt`` multiplies it by
    sqrt(ratio), and ``none`` by `ratio`.
    """
    return weight_decay * ratio / rate_factor


def parse_scaled_options(key: str, block: object) -> Mapping[str, str]:
    """Read the block of optimizer options that are scaled with the batch, such as
    ``{beta2: half_life}``; an option with null is left out.

    Raises:
        SettingError: the value of `key` is not a block, or names an unknown option or method.
    """
    choices = ", ".join(f"{name}: {method}" for name, method in SCALED_WITH_BATCH.items())
    if not isinstance(block, Mapping):
        raise SettingError(key, block, f"give a block of {choices}")
    for name, method in block.items():
        if name not in SCALED_WITH_BATCH or method not in (None, SCALED_WITH_BATCH[name]):
            remedy = f"give {choices}; or null to keep the value"
            raise SettingError(f"{key}.{name}", method, remedy)
    return {str(name): method for name, method in block.items() if method is not None}


def scale_group(
    group: Mapping[str, Any],
    *,
    ratio: float,
    rate_factor: float,
    names: Collection[str],
) -> dict[str, Any]:
    """Return the changed values of a parameter group for a step.

    Args:
        group: parameter group with unscaled values.
        ratio: batch of the step / reference.
        rate_factor: factor of the learning rate.
        names: other values to scale: ``beta2``, ``weight_decay``.
    """
    scaled: dict[str, Any] = {}
    if rate_factor != 1.0:
        scaled["lr"] = float(group["lr"]) * rate_factor
        # torchao's optimizers require a tensor.
        if isinstance(group["lr"], torch.Tensor):
            scaled["lr"] = torch.full_like(group["lr"], scaled["lr"])
    if "beta2" in names:
        beta1, beta2, *others = group["betas"]
        scaled["betas"] = (beta1, scale_beta2(beta2, ratio), *others)
    if "weight_decay" in names:
        weight_decay = scale_weight_decay(group["weight_decay"], ratio, rate_factor)
        scaled["weight_decay"] = float(weight_decay)
    return scaled


def scale_steps(optimizer: Any, scale: Scale | None) -> None:
    """Scale values of an optimizer's parameter groups during each ``optimizer.step()``.

    Between steps the groups hold the unscaled values, even after a skipped or failed step, so
    schedulers, warm-ups and checkpoints never see a scaled one. The scaling applies until the next
    call, so a repeated step is scaled like its first attempt. A step that is captured in a CUDA
    graph raises SettingError.

    Args:
        optimizer: optimizer to scale; replaces its former scaling.
        scale: function that returns the scaled values of a group by key; None for unscaled steps.
    """
    if scale is not None and not hasattr(optimizer, "scaled_steps"):
        optimizer.scaled_steps = _ScaledSteps(optimizer)
    if hasattr(optimizer, "scaled_steps"):
        optimizer.scaled_steps.scale = scale


class _ScaledSteps:
    """Hooks that scale values of an optimizer's groups before a step and restore them after it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.scale: Scale | None = None
        self._optimizer = optimizer
        # (group, unscaled values, scaled values) during a step
        self._scaled: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        # torch.compile would not run these as Python in a compiled step, and numbers that they
        # restore would be lost.
        disable: Any = torch.compiler.disable
        apply_scale = disable(self._apply_scale)
        restore = disable(self._restore)
        step = optimizer.step

        @wraps(getattr(step, "__func__", step))
        def scaled_step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                apply_scale()
                return step(*args, **kwargs)
            finally:
                restore()

        # torch's schedulers wrap the step again and require a method.
        optimizer.step = MethodType(scaled_step, optimizer)  # type: ignore[method-assign]
        # With a GradScaler, accelerate calls the original step, which only the hooks can scale.
        # torchao's CPUOffloadOptimizer has no hooks.
        with suppress(AttributeError):
            optimizer.register_step_pre_hook(apply_scale)
            optimizer.register_step_post_hook(restore)

    def _apply_scale(self, *_: Any) -> None:
        # scaled_step() and the pre-hook both call this in one step: do not scale twice.
        self._restore()
        if self.scale is None:
            return
        uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if uses_cuda and torch.cuda.is_current_stream_capturing():
            remedy = (
                "a CUDA graph captures its step, and replays would not scale the learning rate;"
                " call step() outside the graph"
            )
            raise SettingError("optimizer", type(self._optimizer).__name__, remedy)
        for group in self._optimizer.param_groups:
            scaled = self.scale(group)
            unscaled = {key: group[key] for key in scaled}
            self._scaled.append((group, unscaled, scaled))
            group.update(scaled)

    def _restore(self, *_: Any) -> None:
        for group, unscaled, scaled in self._scaled:
            for key in scaled:
                # Keep a value that the step itself has replaced.
                if group[key] is scaled[key]:
                    group[key] = unscaled[key]
        self._scaled.clear()


def read_scaled_options(
    groups: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> dict[str, float]:
    """Return each named option (``beta2``, ``weight_decay``) of the first parameter group in which
    the option is not 0; 0.0 if it is 0 in all groups.
    """
    options = {}
    for name in names:
        of_groups = [_option_value(group, name) for group in groups]
        options[name] = next((value for value in of_groups if value != 0), 0.0)
    return options


def check_scaled_options(optimizer: Optimizer, methods: Mapping[str, str]) -> None:
    """Check that the options to scale can change at each step of an optimizer.

    Args:
        optimizer: optimizer to check.
        methods: method by name of the option, from :func:`parse_scaled_options`.

    Raises:
        SettingError: the parameter groups lack an option, it is 0, or it must be constant.
    """
    kind = type(optimizer).__name__
    # torchao's low-bit optimizers.
    if methods and hasattr(optimizer, "_subclass_zeros"):
        remedy = (
            f"{kind} compiles its step for constant options; remove this key, or use"
            " torch.optim.AdamW"
        )
        raise SettingError("scale_with_batch", dict(methods), remedy)
    groups = optimizer.param_groups
    for name, method in methods.items():
        group_key = _GROUP_KEYS[name]
        if not all(group_key in group for group in groups):
            remedy = (
                f"the parameter groups of {kind} have no {group_key}; remove this key, or use"
                " torch.optim.AdamW"
            )
            raise SettingError(f"scale_with_batch.{name}", method, remedy)
        # Scaling 0 would silently change nothing.
        if all(_option_value(group, name) == 0 for group in groups):
            remedy = f"{name} of {kind} is 0; set it, or remove this key"
            raise SettingError(f"scale_with_batch.{name}", method, remedy)


def _option_value(group: Mapping[str, Any], name: str) -> float:
    """Return ``beta2`` or ``weight_decay`` of a parameter group."""
    value = group[_GROUP_KEYS[name]]
    return float(value[1] if name == "beta2" else value)


def unwrap(wrapper: Any, name: str) -> Any:
    """Return the optimizer or scheduler inside the wrappers of accelerate or Lightning."""
    inner = getattr(wrapper, name, None)
    while isinstance(inner, Optimizer | LRScheduler):
        wrapper = inner
        inner = getattr(wrapper, name, None)
    return wrapper


def write_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; a tensor (torchao) is set in place."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def follows_clock(scheduler: Any) -> bool:
    """Return whether a scheduler is a function of the step alone; True for None."""
    if scheduler is None:
        return True
    # A subclass that overrides get_lr() may count steps.
    return isinstance(scheduler, LambdaLR) and type(scheduler).get_lr is LambdaLR.get_lr


def schedule_factor(scheduler: LRScheduler | None) -> Callable[[float], float]:
    """Return a schedule as a function of the clock: the factor of the first group's base rate.

    Raises:
        SettingError: the scheduler is None or counts steps itself.
    """
    unwrapped = unwrap(scheduler, "scheduler")
    if unwrapped is None or not follows_clock(unwrapped):
        remedy = (
            "a batch that follows the decay of the learning rate needs a LambdaLR, such as"
            " torchtune's cosine schedule"
        )
        kind = None if unwrapped is None else type(unwrapped).__name__
        raise SettingError("lr_scheduler", kind, remedy)

    return lambda clock: factors_at(unwrapped, clock)[0]


def factors_at(scheduler: LambdaLR, clock: float) -> list[float]:
    """Return a schedule's factor for each group's base rate."""
    # torch calls the functions with integers, so a function may need one.
    if clock == int(clock):
        clock = int(clock)
    return [rule(clock) for rule in scheduler.lr_lambdas]  # type: ignore[arg-type]
