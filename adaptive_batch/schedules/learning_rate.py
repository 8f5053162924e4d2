"""The learning rate as a function of the base rate, the schedule and the progress.

It is recomputed for each step, never accumulated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from adaptive_batch._util import LARGEST_NUMBER
from adaptive_batch.errors import SettingError

log = logging.getLogger("adaptive_batch")

RULES = ("none", "linear", "sqrt")
SCALED_WITH_BATCH: Mapping[str, str] = {"beta2": "half_life", "weight_decay": "per_token"}
# The key of a parameter group that holds each of them.
_IN_GROUP = {"beta2": "betas", "weight_decay": "weight_decay"}


@dataclass(frozen=True)
class Reference:
    """The global batch that a learning rate was chosen for; `amount` is above 0."""

    amount: float
    unit: Literal["rows", "tokens"]

    def __str__(self) -> str:
        # As a whole number where it is one: "64 rows", not "64.0 rows".
        amount: int | float = self.amount
        if float(amount).is_integer():
            amount = int(amount)
        unit: str = self.unit
        if amount == 1:
            unit = unit.removesuffix("s")
        return f"{amount} {unit}"


def parse_reference(key: str, value: object) -> Reference:
    """Read ``64`` as rows and ``8192tok`` or ``1.5e6tok`` as tokens.

    Raises:
        SettingError: the value of `key` is neither.
    """
    if type(value) is int and 1 <= value <= LARGEST_NUMBER:
        return Reference(float(value), "rows")
    if isinstance(value, str) and value.endswith("tok"):
        try:
            amount = float(value.removesuffix("tok"))
        except ValueError:
            # Not a number, so it falls through to the refusal below.
            amount = math.nan
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


class _Scaled(NamedTuple):
    """A scaled value of parameter group `number`: unscaled, and as it was applied."""

    number: int
    group: dict[str, Any]
    key: str
    unscaled: Any
    applied: Any

    @property
    def is_there(self) -> bool:
        """Whether the group still has what was applied."""
        return bool(_read(self.group, self.key) == self.applied)


class LearningRate:
    """Set the rate of optimizers for one step, scaled by its batch.

    The step alone sees this rate: the unscaled rate x rule(batch / reference). Beta2 and the weight
    decay are set the same way where they are to follow the batch.

    The unscaled rate is base x schedule(clock); without a scheduler it is the one that the groups
    hold, which anybody may change between two steps. The groups hold it again as soon as
    ``optimizer.step()`` returns, and so does what ``optimizer.state_dict()`` returns before that:
    whatever reads or multiplies a rate between two steps reads its own.

    A ``LambdaLR``, as every schedule of torchtune is, is a function of the step. It is evaluated at
    the clock, which may be fractional; its ``get_last_lr()`` returns the applied rates. Any other
    scheduler keeps its own count and is refused: leave it out and step it after each step, and its
    rates are scaled.

    Args:
        optimizers: one, or several; the first is the one that `scheduler` was built around. With a
            scheduler each group keeps its base rate in its ``initial_lr``.
        scheduler: None for a rate that only the batch changes. Of either, what accelerate or
            Lightning wraps is taken.
        rule: ``none``, ``linear`` or ``sqrt``, see :func:`scale_learning_rate`.
        reference: the global batch that the base rates were chosen for, or what
            :func:`parse_reference` reads.
        scale_with_batch: other values that follow the batch: ``beta2``, ``weight_decay``; see
            :func:`scale_beta2`, :func:`scale_weight_decay`.

    Attributes:
        rule, reference: as given.
        scaled: the other values that were applied last, by name, of the first group where they are
            not 0; before the first step, the values that they are scaled from.

    Raises:
        SettingError: a scheduler that keeps its own count, or an optimizer without what is to
            follow the batch.
        ValueError: a scheduler built around another optimizer.
    """

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        scheduler: LRScheduler | None = None,
        *,
        rule: str = "none",
        reference: Reference | int | str | None = None,
        scale_with_batch: Mapping[str, str] | None = None,
    ) -> None:
        assert rule in RULES, rule
        self._follow = check_scaled("scale_with_batch", scale_with_batch or {})
        self._scales = rule != "none" or bool(self._follow)
        assert reference is not None or not self._scales, "what is scaled has a reference"
        if not isinstance(reference, Reference | None):
            reference = parse_reference("reference_batch_size", reference)
        self.rule = rule
        self.reference = reference
        given: Sequence[Any] = [optimizers]
        if isinstance(optimizers, list | tuple):
            given = optimizers
        self._optimizers: list[Optimizer] = [
            _unwrapped(optimizer, "optimizer") for optimizer in given
        ]
        if not given or not all(isinstance(each, Optimizer) for each in self._optimizers):
            raise SettingError("optimizer", optimizers, "give an optimizer, or a list of them")
        self._first = self._optimizers[0]
        self._scheduler = _unwrapped(scheduler, "scheduler")
        # Values that are scaled for a step that is still to be taken.
        self._scaled: dict[Optimizer, list[_Scaled]] = {}
        self._warned_left_out = False
        self._check_scheduler()
        self._remember_bases()
        for optimizer in self._optimizers:
            _check_has(optimizer, self._follow)
            if "beta2" in self._follow and hasattr(optimizer, "_subclass_zeros"):
                _let_beta2_be_a_tensor(optimizer)
        self.scaled = self._read_scaled()
        if self._scales:
            self._register_hooks()

    def _check_scheduler(self) -> None:
        """Refuse a scheduler that keeps its own count, or was built around another optimizer."""
        name = type(self._scheduler).__name__
        if not follows_clock(self._scheduler):
            remedy = (
                "it keeps its own count; leave it out here and step it in your own loop after"
                " optimizer.step(): the rate that it sets is scaled"
            )
            raise SettingError("lr_scheduler", name, remedy)
        built_around = _unwrapped(getattr(self._scheduler, "optimizer", self._first), "optimizer")
        if built_around is not self._first:
            raise ValueError(
                f"{name} was built around another optimizer: give the one that it was built around"
                " first"
            )

    def _register_hooks(self) -> None:
        """Let each optimizer restore its unscaled values after its step, and save only those."""
        for optimizer in self._optimizers:
            # torchao's CPUOffloadOptimizer has no hooks: restore() is called for it.
            with suppress(AttributeError):
                optimizer.register_step_pre_hook(self._refuse_overwritten)
                optimizer.register_step_post_hook(self._restore_after_step)
                optimizer.register_state_dict_post_hook(self._save_unscaled)

    def set(self, clock: float, *, batch: float | None = None) -> float:
        """Apply the rate of one step, which its time and its batch decide.

        Args:
            clock: time of the step, in steps of a constant batch.
            batch: global batch of this step, in the unit of the reference; rule ``none`` does
                without.

        Returns:
            The rate of the first group, as applied.

        Raises:
            SettingError: the scheduler's rate is no finite number, or somebody has added a
                parameter group that it does not know. Where somebody overwrites the rate before
                ``optimizer.step()``, that raises it.
            ValueError: the rule needs a batch, and it is not above 0; nothing has moved then.
        """
        if self._scales:
            ratio, rate_factor = self._scaling_of(batch)
            # The groups hold the unscaled values again, so that no scaling comes on top of another.
            self._warn_of_step_left_out()
            self.restore()
        if self._scheduler is not None:
            self._schedule(self._scheduler, clock)
        if self._scales:
            self._scale_optimizers(ratio, rate_factor)
            self.scaled = self._read_scaled()
        groups = self._first.param_groups
        if self._scheduler is not None:
            # The attribute that the scheduler's get_last_lr() returns.
            self._scheduler._last_lr = [float(group["lr"]) for group in groups]
        return float(groups[0]["lr"])

    def _scaling_of(self, batch: float | None) -> tuple[float, float]:
        """Return batch / reference, and the factor of the rate that follows from it."""
        assert self.reference is not None
        assert batch is not None, f"a step is scaled by its {self.reference.unit}"
        rate_factor = scale_learning_rate(1.0, batch, self.reference.amount, self.rule)
        return batch / self.reference.amount, rate_factor

    def _scale_optimizers(self, ratio: float, rate_factor: float) -> None:
        """Scale the values of all groups, and remember them for :meth:`restore`."""
        keys = [_IN_GROUP[name] for name in self._follow]
        # A rate that stays is left alone: somebody else may change it before the step.
        if rate_factor != 1.0:
            keys.insert(0, "lr")
        if not keys:
            return
        for optimizer in self._optimizers:
            self._scaled[optimizer] = _scale_groups(optimizer, keys, ratio, rate_factor)

    def _refuse_overwritten(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse a step with a value that somebody has set since :meth:`set`: it is not scaled."""
        for scaled in self._scaled.get(optimizer, ()):
            if scaled.is_there or _is_zero_rate(scaled):
                continue
            setting = "scale_with_batch"
            value = str(self._follow)
            if scaled.key == "lr":
                setting = "lr_scaling"
                value = self.rule
            remedy = (
                f"another {scaled.key} was set after the step's own and before optimizer.step(),"
                " and is not scaled; set it before or after both"
            )
            raise SettingError(setting, value, remedy)

    def _warn_of_step_left_out(self) -> None:
        """Say once where a rate was written after a step that was not taken: a scheduler that
        multiplies has multiplied the scaled one.
        """
        waiting = (scaled for owned in self._scaled.values() for scaled in owned)
        if self._warned_left_out or all(scaled.is_there for scaled in waiting):
            return
        self._warned_left_out = True
        log.warning(
            "a step was left out, and another rate was written since: a scheduler that multiplies"
            " the last rate, as CosineAnnealingLR, has multiplied the scaled one; call restore()"
            " of the rate after a step that is left out"
        )

    def restore(self, optimizer: Optimizer | None = None) -> None:
        """Restore the unscaled rates, where nobody has changed what :meth:`set` wrote.

        Args:
            optimizer: optimizer to restore; None for all.
        """
        optimizers = self._optimizers
        if optimizer is not None:
            optimizers = [optimizer]
        for owner in optimizers:
            for scaled in self._scaled.pop(owner, ()):
                if scaled.is_there:
                    _write(scaled.group, scaled.key, scaled.unscaled)

    @property
    def base(self) -> float:
        """The rate of the first group before it is scheduled and scaled."""
        group = self._first.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def _read_scaled(self) -> dict[str, float]:
        """Return what follows the batch, by name, of the first group where it is not 0."""
        values = {}
        for name in self._follow:
            numbers = [_number(group[_IN_GROUP[name]]) for group in self._first.param_groups]
            values[name] = next(filter(None, numbers), 0.0)
        return values

    def _restore_after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Restore an optimizer's unscaled values, unless its own step is still to come."""
        if not any(map(_is_zero_rate, self._scaled.get(optimizer, ()))):
            self.restore(optimizer)

    def _save_unscaled(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write the unscaled values into an optimizer's state dict."""
        for scaled in self._scaled.get(optimizer, ()):
            if not scaled.is_there:
                continue
            group = state["param_groups"][scaled.number]
            unscaled = scaled.unscaled
            # A new tensor: the one in the state dict is the group's own.
            if scaled.key == "lr" and isinstance(group["lr"], torch.Tensor):
                unscaled = torch.full_like(group["lr"], unscaled)
            group[scaled.key] = unscaled

    def _remember_bases(self) -> None:
        """Keep the base rate of each group in its ``initial_lr``.

        The state dict of an optimizer keeps that; its lr is saved as it was scheduled.
        """
        if self._scheduler is None:
            return
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", float(group["lr"]))

    def _schedule(self, scheduler: LambdaLR, clock: float) -> None:
        """Write the scheduled rates."""
        factors = _factors(scheduler, clock)
        num_groups = len(self._first.param_groups)
        if num_groups != len(factors):
            remedy = (
                f"it was built for {len(factors)} parameter groups, and the optimizer has "
                f"{num_groups}; add groups before it is built"
            )
            raise SettingError("lr_scheduler", type(scheduler).__name__, remedy)
        if not all(map(math.isfinite, factors)):
            remedy = (
                f"at step {clock:g} it gives {factors}; give a function whose values are finite"
            )
            raise SettingError("lr_scheduler", type(scheduler).__name__, remedy)
        # Groups may have been added since the last step.
        self._remember_bases()
        groups = self._first.param_groups
        for group, base, factor in zip(groups, scheduler.base_lrs, factors, strict=True):
            write_rate(group, float(base) * factor)
        for optimizer in self._optimizers[1:]:
            groups = optimizer.param_groups
            shared = factors
            # An optimizer with other groups follows the first group's schedule.
            if len(factors) != len(groups):
                shared = factors[:1] * len(groups)
            for group, factor in zip(groups, shared, strict=True):
                write_rate(group, float(group["initial_lr"]) * factor)


def _is_zero_rate(scaled: _Scaled) -> bool:
    """Whether a rate is 0 that was scaled: torch's get_optimizer_state_dict takes such a step, and
    puts the rate back.
    """
    return scaled.key == "lr" and not scaled.is_there and not _read(scaled.group, "lr")


def _unwrapped(wrapper: Any, name: str) -> Any:
    """Return what accelerate's or Lightning's wrapper holds; itself where there is no wrapper."""
    inner = getattr(wrapper, name, None)
    while isinstance(inner, Optimizer | LRScheduler):
        wrapper = inner
        inner = getattr(wrapper, name, None)
    return wrapper


def write_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a parameter group, in place where it is a tensor, as torchao keeps it."""
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _scale_groups(
    optimizer: Optimizer, keys: Sequence[str], ratio: float, rate_factor: float
) -> list[_Scaled]:
    """Scale values of all parameter groups, and return what was scaled."""
    unscaled = []
    # All are read first: groups may share a tensor.
    for number, group in enumerate(optimizer.param_groups):
        unscaled += [(number, group, key, _read(group, key)) for key in keys]
    for _, group, key, value in unscaled:
        _write(group, key, _scale(optimizer, key, value, ratio, rate_factor))
    return [
        _Scaled(number, group, key, value, applied=_read(group, key))
        for number, group, key, value in unscaled
    ]


def _read(group: dict[str, Any], key: str) -> Any:
    # A number, as a rate may be a tensor that is changed in place.
    if key == "lr":
        return float(group["lr"])
    return group[key]


def _write(group: dict[str, Any], key: str, value: Any) -> None:
    if key == "lr":
        write_rate(group, value)
    else:
        group[key] = value


def _scale(optimizer: Optimizer, key: str, value: Any, ratio: float, rate_factor: float) -> Any:
    """Return a value of a parameter group, scaled to a batch of `ratio` times the reference."""
    if key == "lr":
        return value * rate_factor
    convert: Callable[[float], Any] = float
    # torchao's low-bit optimizers compile their step for each number that is no tensor.
    if hasattr(optimizer, "_subclass_zeros"):
        convert = torch.tensor
    if key == "betas":
        return (value[0], convert(scale_beta2(value[1], ratio)), *value[2:])
    return convert(scale_weight_decay(value, ratio, rate_factor))


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
        tensors = []
        for arg in args:
            if isinstance(arg, kind):
                arg = arg.dequantize()
            tensors.append(arg)
        return func(*tensors, **kwargs)


def _number(value: Any) -> float:
    """Return a weight decay as it is, and of betas the second."""
    if isinstance(value, tuple | list):
        return float(value[1])
    return float(value)


def _check_has(optimizer: Optimizer, names: Mapping[str, str]) -> None:
    """Refuse an optimizer whose groups do not have what is to follow the batch."""
    for name, method in names.items():
        key = _IN_GROUP[name]
        kind = type(optimizer).__name__
        if not all(key in group for group in optimizer.param_groups):
            remedy = (
                f"the parameter groups of {kind} have no {key}; remove it, or take"
                " torch.optim.AdamW"
            )
            raise SettingError(f"scale_with_batch.{name}", method, remedy)
        # Scaling 0 would change nothing, without a word.
        if not any(_number(group[key]) for group in optimizer.param_groups):
            raise SettingError(
                f"scale_with_batch.{name}", method, f"{name} of {kind} is 0; set it, or remove this"
            )


def follows_clock(scheduler: Any) -> bool:
    """Return whether a scheduler is a function of the step alone; so is None.

    Such a scheduler keeps no count of its own.
    """
    if scheduler is None:
        return True
    # A subclass with a get_lr() of its own may count.
    return isinstance(scheduler, LambdaLR) and type(scheduler).get_lr is LambdaLR.get_lr


def schedule_of(scheduler: LRScheduler | None) -> Callable[[float], float]:
    """Return a schedule as a function of the clock: its factor of the first group's base rate.

    Raises:
        SettingError: there is none, or it keeps its own count.
    """
    unwrapped = _unwrapped(scheduler, "scheduler")
    if unwrapped is None or not follows_clock(unwrapped):
        remedy = (
            "a batch that follows the decay of the rate needs a LambdaLR, such as torchtune's"
            " cosine schedule"
        )
        kind = None
        if unwrapped is not None:
            kind = type(unwrapped).__name__
        raise SettingError("lr_scheduler", kind, remedy)

    return lambda clock: _factors(unwrapped, clock)[0]


def _factors(scheduler: LambdaLR, clock: float) -> list[float]:
    """Return a schedule's factor for each group's base rate."""
    time = clock
    # torch calls the functions with whole numbers.
    if clock == int(clock):
        time = int(clock)
    return [rule(time) for rule in scheduler.lr_lambdas]  # type: ignore[arg-type]
