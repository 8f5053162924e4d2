"""The learning rate: its clock, its schedule, and how it, beta2 and weight decay follow the batch.

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
# Their keys in a parameter group.
_IN_GROUP = {"beta2": "betas", "weight_decay": "weight_decay"}
# f(optimizer, parameter group) -> scaled values of the group
Scale = Callable[[Optimizer, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Clock:
    """The units of a schedule's clock: one until `num_warmup_steps` are over, one afterwards."""

    warmup: str = "samples"
    decay: str = "samples"

    @classmethod
    def from_config(cls, value: object) -> Clock:
        """Read the key `lr_clock`.

        Raises:
            SettingError: the value is neither a unit nor a block of two units.
        """
        if value is None:
            return cls()
        units: dict[str, Any] = {"warmup": value, "decay": value}
        if isinstance(value, Mapping):
            units = dict(value)
        units = {key: "samples" if unit is None else unit for key, unit in units.items()}
        if not units.keys() <= {"warmup", "decay"} or not all(
            unit in UNITS for unit in units.values()
        ):
            remedy = (
                f"give one of {', '.join(UNITS)}, or a block such as {{warmup: steps, decay:"
                " tokens}"
            )
            raise SettingError("lr_clock", value, remedy)
        return cls(**units)

    def __str__(self) -> str:
        if self.warmup == self.decay:
            return self.decay
        return f"warm-up in {self.warmup}, decay in {self.decay}"

    @property
    def counts_tokens(self) -> bool:
        """True if the clock needs the number of tokens in an epoch."""
        return "tokens" in (self.warmup, self.decay)


class TrainingClock:
    """The time of the learning-rate schedule: the step that training with a constant batch would
    have reached.

    In samples or tokens, it is the number of trained epochs, fractions included, times the steps
    per epoch of the constant batch. So a growing batch neither stretches nor cuts the schedule.
    With a constant batch (in tokens: if all steps have the same number), the time is exactly the
    number of optimizer steps. In steps, it always is.

    Args:
        clock: units of the clock; None for samples.
        warmup_steps: warm-up steps of the scheduler.
        total_steps: total steps of the scheduler.
    """

    def __init__(
        self, clock: Clock | None = None, *, warmup_steps: int = 0, total_steps: int = 0
    ) -> None:
        self._clock = clock or Clock()
        self._warmup_steps = warmup_steps
        self._total_steps = total_steps
        self._warmup_ended_at: float | None = None

    def at(self, progress: Progress) -> float:
        """Return the time before a step.

        It is the warm-up's clock first; the decay's clock then covers the remaining schedule steps.
        """
        decay = elapsed_steps(self._clock.decay, progress)
        if self._clock.warmup == self._clock.decay:
            return decay
        warmup = elapsed_steps(self._clock.warmup, progress)
        if warmup < self._warmup_steps:
            return warmup
        if self._warmup_ended_at is None:
            self._warmup_ended_at = decay
        ended_at = self._warmup_ended_at
        total = self._total_steps
        if ended_at >= total:
            return decay
        return self._warmup_steps + (decay - ended_at) * (total - self._warmup_steps) / (
            total - ended_at
        )

    def state_dict(self) -> dict[str, float | None]:
        """Return the time of the decay's clock at the end of the warm-up."""
        return {"warmup_ended_at": self._warmup_ended_at}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Resume from a saved state."""
        self._warmup_ended_at = state["warmup_ended_at"]


def elapsed_steps(unit: str, progress: Progress) -> float:
    """Return the progress of training in steps of a constant batch.

    Args:
        unit: ``steps`` counts optimizer steps; ``samples`` and ``tokens`` measure the trained
            fraction of an epoch.
        progress: progress of training; samples and tokens need its `pace`.
    """
    if unit == "steps":
        return progress.steps
    assert progress.pace is not None, f"a clock of {unit} needs the pace of the epoch"
    reference = progress.pace.reference
    plan = progress.pace.plan
    epochs_done = progress.epoch * reference.steps
    if unit == "tokens":
        return epochs_done + progress.epoch_tokens * reference.steps / plan.tokens
    if not plan.is_estimate:
        slots = plan.slots
        # If both train the same rows, the times are bit-identical to those of the constant batch.
        if plan.stepped_rows == reference.stepped_rows:
            slots = reference.slots
        return epochs_done + progress.epoch_rows * reference.steps / slots
    by_steps = 0.0
    if plan.most_steps:
        by_steps = progress.epoch_steps / plan.most_steps
    return epochs_done + max(progress.epoch_rows / plan.rows, by_steps) * reference.steps


def relative_decay(schedule: Callable[[float], float]) -> Callable[[float], float]:
    """Return the schedule divided by its running maximum (1 during a warm-up)."""
    # Running maximum at each whole time.
    peaks = [0.0]

    def decay(time: float) -> float:
        while len(peaks) < int(time) + 2:
            peaks.append(max(peaks[-1], schedule(len(peaks) - 1)))
        now = schedule(time)
        peak = max(peaks[int(time) + 1], now)
        return now / peak if peak > 0 else 1.0

    return decay


@dataclass(frozen=True)
class ReferenceBatch:
    """The global batch that a learning rate was chosen for; `amount` is above 0."""

    amount: float
    unit: Literal["rows", "tokens"]

    def __str__(self) -> str:
        # "64 rows", not "64.0 rows"
        amount = int(self.amount) if float(self.amount).is_integer() else self.amount
        unit = self.unit.removesuffix("s") if amount == 1 else self.unit
        return f"{amount} {unit}"


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


def check_scaled(name: str, value: object) -> Mapping[str, str]:
    """Read the block of values that are scaled with the batch, such as ``{beta2: half_life}``.

    Raises:
        SettingError: the value is not a block, or names an unknown value or method.
    """
    choices = ", ".join(f"{key}: {method}" for key, method in SCALED_WITH_BATCH.items())
    if not isinstance(value, Mapping):
        raise SettingError(name, value, f"give a block of {choices}")
    for key, method in value.items():
        if key not in SCALED_WITH_BATCH or method not in (None, SCALED_WITH_BATCH[key]):
            raise SettingError(
                f"{name}.{key}", method, f"give {choices}; or null to keep the value"
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
    """Return the changed values of a parameter group for a step.

    Args:
        optimizer: optimizer of the group.
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
    # torchao's low-bit optimizers recompile their step for each new Python number.
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
        # Inside a compiled step they would not restore Python numbers.
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

        # torch's schedulers wrap the step again and require a method.
        optimizer.step = MethodType(scaled_step, optimizer)  # type: ignore[method-assign]
        # With a GradScaler, accelerate calls the original method, which only the hooks scale.
        # torchao's CPUOffloadOptimizer has no hooks.
        with suppress(AttributeError):
            optimizer.register_step_pre_hook(begin)
            optimizer.register_step_post_hook(end)

    def _begin(self, *_: Any) -> None:
        # The method and the pre-hook both call this.
        self._end()
        if self.scale is None:
            return
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if on_cuda and torch.cuda.is_current_stream_capturing():
            remedy = (
                "a CUDA graph captures its step, and replays would not scale the learning rate;"
                " call step() outside the graph"
            )
            raise SettingError("optimizer", type(self._optimizer).__name__, remedy)
        for group in self._optimizer.param_groups:
            scaled = self.scale(self._optimizer, group)
            self._scaled.append((group, {key: group[key] for key in scaled}, scaled))
            group.update(scaled)

    def _end(self, *_: Any) -> None:
        for group, unscaled, scaled in self._scaled:
            # Keep values that the step itself has changed.
            group.update({key: unscaled[key] for key in scaled if group[key] is scaled[key]})
        self._scaled.clear()


def read_scaled(groups: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, float]:
    """Return the first nonzero value of each name among the parameter groups."""
    values = {}
    for name in names:
        numbers = [_number(group[_IN_GROUP[name]]) for group in groups]
        values[name] = next(filter(None, numbers), 0.0)
    return values


def prepare_scaled(optimizer: Optimizer, names: Mapping[str, str]) -> None:
    """Check that an optimizer supports the scaled values, and patch torchao's to accept them.

    Raises:
        SettingError: the parameter groups lack a value, or it is 0.
    """
    kind = type(optimizer).__name__
    for name, method in names.items():
        key = _IN_GROUP[name]
        remedy = None
        if not all(key in group for group in optimizer.param_groups):
            remedy = (
                f"the parameter groups of {kind} have no {key}; remove this key, or use"
                " torch.optim.AdamW"
            )
        # Scaling 0 would silently change nothing.
        elif not any(_number(group[key]) for group in optimizer.param_groups):
            remedy = f"{name} of {kind} is 0; set it, or remove this key"
        if remedy:
            raise SettingError(f"scale_with_batch.{name}", method, remedy)
    if "beta2" in names and _is_low_bit(optimizer):
        _let_beta2_be_a_tensor(optimizer)


def _is_low_bit(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torchao's low-bit optimizers."""
    return hasattr(optimizer, "_subclass_zeros")


def _let_beta2_be_a_tensor(optimizer: Any) -> None:
    """Register the operation that torchao's low-bit states lack for a beta2 tensor."""
    # torchao's AdamW without low-bit states
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
    """Return a weight decay, or the second value of betas."""
    return float(value[1] if isinstance(value, tuple | list) else value)


def unwrap(wrapper: Any, name: str) -> Any:
    """Return the optimizer or scheduler inside the wrappers of accelerate or Lightning."""
    while isinstance(inner := getattr(wrapper, name, None), Optimizer | LRScheduler):
        wrapper = inner
    return wrapper


def write_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; a tensor (torchao) is set in place."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def follows_clock(scheduler: Any) -> bool:
    """Return whether a scheduler is a function of the step alone; True for None."""
    # A subclass that overrides get_lr() may count steps.
    return scheduler is None or (
        isinstance(scheduler, LambdaLR) and type(scheduler).get_lr is LambdaLR.get_lr
    )


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
        kind = unwrapped and type(unwrapped).__name__
        raise SettingError("lr_scheduler", kind, remedy)

    return lambda clock: factors_at(unwrapped, clock)[0]


def factors_at(scheduler: LambdaLR, clock: float) -> list[float]:
    """Return a schedule's factor for each group's base rate."""
    # torch calls the functions with whole numbers.
    if clock == int(clock):
        clock = int(clock)
    return [rule(clock) for rule in scheduler.lr_lambdas]  # type: ignore[arg-type]
