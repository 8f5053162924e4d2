"""The learning rate as a function of the base rate, the schedule and the progress; recomputed,
never accumulated.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from adaptive_batch._util import LARGEST_NUMBER
from adaptive_batch.errors import SettingError

RULES = ("none", "linear", "sqrt")
SCALED_WITH_BATCH: Mapping[str, str] = {"beta2": "half_life", "weight_decay": "per_token"}
_IN_GROUP = {"beta2": "betas", "weight_decay": "weight_decay"}


@dataclass(frozen=True)
class Reference:
    """The global batch that a learning rate was chosen for; `amount` is above 0."""

    amount: float
    unit: Literal["rows", "tokens"]

    def __str__(self) -> str:
        amount = int(self.amount) if float(self.amount).is_integer() else self.amount
        return f"{amount} {self.unit[:-1] if amount == 1 else self.unit}"


def parse_reference(value: object) -> Reference:
    """Read ``64`` as rows and ``8192tok`` or ``1.5e6tok`` as tokens; raise ValueError for all else."""
    if type(value) is int and 1 <= value <= LARGEST_NUMBER:
        return Reference(float(value), "rows")
    if isinstance(value, str) and value.endswith("tok"):
        try:
            amount = float(value.removesuffix("tok"))
        except ValueError:
            amount = math.nan
        if 0 < amount <= LARGEST_NUMBER:
            return Reference(amount, "tokens")
    raise ValueError(f"{value!r}: give a whole number of rows, 1 or more, or tokens as in 8192tok")


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
    """Scale the beta2 of one batch to one of `ratio` times as much, so that its half-life in data
    stays.

    beta2 ** ratio (Marek et al. 2025, arXiv 2507.07101), kept within 0.9 to 0.9999 or what was
    configured.
    """
    return float(min(max(beta2**ratio, min(beta2, 0.9)), max(beta2, 0.9999)))


def scale_weight_decay(weight_decay: float, ratio: float, rate_factor: float) -> float:
    """Scale the weight decay of one batch to one of `ratio` times as much, so that the decay for
    each row or token stays.

    A step of AdamW decays weights by rate x weight decay. Of `ratio` times the data, it has to by
    `ratio` times that, of which the rate brings `rate_factor`: rate x weight decay / batch is kept
    (the timescale of Wang and Aitchison 2024, arXiv 2405.13698). So the rule ``linear`` keeps the
    weight decay, ``sqrt`` multiplies it by sqrt(ratio), and ``none`` by `ratio`.
    """
    return weight_decay * ratio / rate_factor


def check_scaled(name: str, value: object) -> Mapping[str, str]:
    """Read what is scaled with the batch, such as ``{beta2: half_life}``; raise SettingError for
    what is not known.
    """
    known = ", ".join(f"{key}: {how}" for key, how in SCALED_WITH_BATCH.items())
    if not isinstance(value, Mapping):
        raise SettingError(name, value, f"give a block of {known}")
    for key, how in value.items():
        if key not in SCALED_WITH_BATCH or how not in (None, SCALED_WITH_BATCH[key]):
            raise SettingError(
                f"{name}.{key}", how, f"give {known}; null or nothing for what stays"
            )
    return {str(key): how for key, how in value.items() if how is not None}


class _Scaled(NamedTuple):
    """A value of parameter group `number` that was scaled: as it was before, and as it was applied."""

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
    """Set the rate of optimizers for a step: the unscaled rate x rule(batch / reference), which the
    step alone sees.

    So it does with beta2 and the weight decay, where these are to follow the batch.

    The unscaled rate is base x schedule(clock); without a scheduler it is the one that the groups
    hold, which anybody may change between two steps. The groups hold it again as soon as
    ``optimizer.step()`` returns, and so does what ``optimizer.state_dict()`` returns before that:
    whatever reads or multiplies a rate between two steps reads its own.

    A ``LambdaLR``, as every schedule of torchtune is, and a ``SequentialLR`` of nothing else are
    functions of the step. They are evaluated at the clock, which may be fractional; their
    ``get_last_lr()`` returns the applied rates. Any other scheduler keeps its own count and is
    refused: leave it out and step it after each step, and its rates are scaled.

    Args:
        optimizers: one, or several; the first is the one that `scheduler` was built around. With a
            scheduler each group keeps its base rate in its ``initial_lr``.
        scheduler: None for a rate that only the batch changes. Of either, what accelerate or
            Lightning wraps is taken.
        rule: ``none``, ``linear`` or ``sqrt``, see :func:`scale_learning_rate`.
        reference: the global batch that the base rates were chosen for; rows where it is a number.
        scale_with_batch: what else follows the batch: ``beta2``, ``weight_decay``; see
            :func:`scale_beta2`, :func:`scale_weight_decay`.

    Attributes:
        rule, reference: as given.
        scaled: what else was applied last, by name, of the first group where it is not 0; before
            the first step, what it is scaled from.

    Raises:
        SettingError: a scheduler that keeps its own count, or an optimizer without what is to
            follow the batch.
        ValueError: an unknown rule, a rule without a reference, or a scheduler built around another
            optimizer.
    """

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        scheduler: LRScheduler | None = None,
        *,
        rule: str = "none",
        reference: Reference | int | None = None,
        scale_with_batch: Mapping[str, str] | None = None,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: give one of {', '.join(RULES)}")
        self._follow = check_scaled("scale_with_batch", scale_with_batch or {})
        if (rule != "none" or self._follow) and reference is None:
            what = "scale_with_batch" if rule == "none" else f"rule={rule!r}"
            raise ValueError(
                f"{what}: give the reference too, the global batch that the rate was chosen for"
            )
        several = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        self._optimizers: list[Optimizer] = [_unwrapped(each, "optimizer") for each in several]
        self._first = self._optimizers[0]
        self._scheduler = _unwrapped(scheduler, "scheduler")
        self.rule = rule
        self.reference = (
            reference if isinstance(reference, Reference | None) else parse_reference(reference)
        )
        self._scaled: dict[Optimizer, list[_Scaled]] = {}  # for a step that is still to be taken
        self._overwritten: list[_Scaled] = []  # before the step
        if not follows_clock(self._scheduler):
            remedy = (
                "it keeps its own count; leave it out here and step it in your own loop after"
                " optimizer.step(): the rate that it sets is scaled"
            )
            raise SettingError("lr_scheduler", type(self._scheduler).__name__, remedy)
        built_around = _unwrapped(getattr(self._scheduler, "optimizer", self._first), "optimizer")
        if built_around is not self._first:
            name = type(self._scheduler).__name__
            raise ValueError(
                f"{name} was built around another optimizer: give the one that it was built around"
                " first"
            )
        self._remember_bases()
        for optimizer in self._optimizers:
            _check_has(optimizer, self._follow)
            if "beta2" in self._follow and hasattr(optimizer, "_subclass_zeros"):
                _let_beta2_be_a_tensor(optimizer)
        self.scaled = self._read_scaled()
        for optimizer in self._optimizers if rule != "none" or self._follow else ():
            with suppress(
                AttributeError
            ):  # torchao's CPUOffloadOptimizer has no hooks: restore() is called for it
                optimizer.register_step_post_hook(lambda stepped, *_: self._after_step(stepped))
                optimizer.register_state_dict_post_hook(self._save_unscaled)

    def set(self, clock: float, *, batch: float | None = None) -> float:
        """Apply the rate that belongs to a point of training and to the batch that is stepped
        there.

        Args:
            clock: in steps of a constant batch.
            batch: global batch of this step, in the unit of the reference; rule ``none`` does
                without.

        Returns:
            The rate of the first group, as applied.

        Raises:
            SettingError: somebody else has overwritten the last step's rate, or added a parameter
                group that the scheduler does not know.
            ValueError: the rule needs a batch and there is none, or it is not above 0; nothing has
                moved then.
        """
        factor = ratio = 1.0
        if self.rule != "none" or self._follow:
            assert self.reference is not None
            if batch is None:
                raise ValueError(
                    f"batch=None: rule {self.rule} needs the {self.reference.unit} of the step"
                )
            factor = scale_learning_rate(1.0, batch, self.reference.amount, self.rule)
            ratio = batch / self.reference.amount
        overwritten = self._overwritten
        self._overwritten = []
        for one in overwritten:
            if not one.is_there:
                key, value = (
                    ("lr_scaling", self.rule)
                    if one.key == "lr"
                    else ("scale_with_batch", str(self._follow))
                )
                remedy = (
                    f"another {one.key} was set after the step's own and before optimizer.step(),"
                    " and is not scaled; set it before or after both"
                )
                raise SettingError(key, value, remedy)
            _write(
                one.group, one.key, one.unscaled
            )  # torch's get_optimizer_state_dict has taken a step at a rate of 0
        self.restore()
        if self._scheduler is not None:
            self._schedule(self._scheduler, clock)
        keys = [*(["lr"] if factor != 1.0 else []), *(_IN_GROUP[name] for name in self._follow)]
        for optimizer in self._optimizers if keys else ():
            # all are read first: groups may share a tensor
            before = [
                (at, group, key, _read(group, key))
                for at, group in enumerate(optimizer.param_groups)
                for key in keys
            ]
            for _, group, key, value in before:
                _write(group, key, _scale(optimizer, key, value, ratio, factor))
            self._scaled[optimizer] = [
                _Scaled(*one, applied=_read(one[1], one[2])) for one in before
            ]
        self.scaled = self._read_scaled()
        if self._scheduler is not None:
            self._scheduler._last_lr = [
                float(group["lr"]) for group in self._first.param_groups
            ]  # for its get_last_lr()
        return float(self._first.param_groups[0]["lr"])

    def restore(self, optimizer: Optimizer | None = None) -> None:
        """Put the unscaled rates back, of all optimizers or one, where nobody has changed what
        :meth:`set` wrote.
        """
        for each in self._optimizers if optimizer is None else [optimizer]:
            for one in self._scaled.pop(each, ()):
                if one.is_there:
                    _write(one.group, one.key, one.unscaled)

    @property
    def base(self) -> float:
        """The rate of the first group before it is scheduled and scaled."""
        group = self._first.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def _read_scaled(self) -> dict[str, float]:
        groups = self._first.param_groups
        return {
            name: next(filter(None, (_number(g[_IN_GROUP[name]]) for g in groups)), 0.0)
            for name in self._follow
        }

    def _after_step(self, optimizer: Optimizer) -> None:
        self._overwritten += [one for one in self._scaled.get(optimizer, ()) if not one.is_there]
        self.restore(optimizer)

    def _save_unscaled(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        for one in self._scaled.get(optimizer, ()):
            if one.is_there:
                saved = state["param_groups"][one.number]
                in_tensor = one.key == "lr" and isinstance(saved["lr"], torch.Tensor)
                saved[one.key] = (
                    torch.full_like(saved["lr"], one.unscaled) if in_tensor else one.unscaled
                )

    def _remember_bases(self) -> None:
        """Keep the base rate of each group where an optimizer's state dict keeps it: its lr is
        saved as it was scheduled.
        """
        if self._scheduler is None:
            return
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", float(group["lr"]))

    def _schedule(self, scheduler: LRScheduler, clock: float) -> None:
        """Write the scheduled rates."""
        part, factors = _evaluate(scheduler, clock)
        num_groups = len(self._first.param_groups)
        if num_groups != len(factors):
            remedy = (
                f"it was built for {len(factors)} parameter groups, and the optimizer has "
                f"{num_groups}; add groups before it is built"
            )
            raise SettingError("lr_scheduler", type(scheduler).__name__, remedy)
        self._remember_bases()
        for group, base, factor in zip(
            self._first.param_groups, part.base_lrs, factors, strict=True
        ):
            write_rate(group, float(base) * factor)
        for optimizer in self._optimizers[1:]:
            groups = optimizer.param_groups
            # an optimizer with other groups follows the first group's schedule
            shared = factors if len(factors) == len(groups) else factors[:1] * len(groups)
            for group, factor in zip(groups, shared, strict=True):
                write_rate(group, float(group["initial_lr"]) * factor)


def _unwrapped(one: Any, name: str) -> Any:
    """Return the optimizer or the scheduler that accelerate's or Lightning's wrapper holds; itself
    where it is none.
    """
    while isinstance(inner := getattr(one, name, None), Optimizer | LRScheduler):
        one = inner
    return one


def write_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a parameter group, in place where it is a tensor, as torchao's optimizers
    keep it.
    """
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _read(group: dict[str, Any], key: str) -> Any:
    return float(group[key]) if key == "lr" else group[key]


def _write(group: dict[str, Any], key: str, value: Any) -> None:
    if key == "lr":
        write_rate(group, value)
    else:
        group[key] = value


def _scale(optimizer: Optimizer, key: str, value: Any, ratio: float, rate_factor: float) -> Any:
    """Return what becomes of a value of a parameter group at a batch of `ratio` times the
    reference.
    """
    if key == "lr":
        return value * rate_factor
    # torchao's low-bit optimizers compile their step for each number that is no tensor
    kept = torch.tensor if hasattr(optimizer, "_subclass_zeros") else float
    if key == "betas":
        return (value[0], kept(scale_beta2(value[1], ratio)), *value[2:])
    return kept(scale_weight_decay(value, ratio, rate_factor))


def _let_beta2_be_a_tensor(optimizer: Any) -> None:
    """Give the states of torchao's low-bit optimizers the one operation that they lack for it."""
    if math.isinf(optimizer.block_size):  # its AdamW without low-bit states
        return
    kind = type(
        optimizer._subclass_zeros(torch.zeros(optimizer.block_size), True, optimizer.block_size)
    )

    @kind.implements(torch.ops.aten.lerp.Tensor)  # type: ignore[untyped-decorator]
    def lerp(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(
            *(each.dequantize() if isinstance(each, kind) else each for each in args), **kwargs
        )


def _number(value: Any) -> float:
    """Return the weight decay, or of betas the second."""
    return float(value[1] if isinstance(value, tuple | list) else value)


def _check_has(optimizer: Optimizer, names: Mapping[str, str]) -> None:
    """Refuse an optimizer whose groups do not have what is to follow the batch."""
    for name, how in names.items():
        key = _IN_GROUP[name]
        kind = type(optimizer).__name__
        if not all(key in group for group in optimizer.param_groups):
            remedy = (
                f"the parameter groups of {kind} have no {key}; remove it, or take"
                " torch.optim.AdamW"
            )
            raise SettingError(f"scale_with_batch.{name}", how, remedy)
        if not any(_number(group[key]) for group in optimizer.param_groups):
            raise SettingError(
                f"scale_with_batch.{name}", how, f"{name} of {kind} is 0; set it, or remove this"
            )


def follows_clock(scheduler: Any) -> bool:
    """Whether a scheduler is a function of the step alone, and keeps no count; so is None."""
    if type(scheduler) is SequentialLR:
        are_lambdas = all(
            isinstance(part, LambdaLR) and follows_clock(part) for part in scheduler._schedulers
        )
        return are_lambdas and scheduler._milestones == sorted(scheduler._milestones)
    is_lambda = isinstance(scheduler, LambdaLR) and type(scheduler).get_lr is LambdaLR.get_lr
    return scheduler is None or is_lambda


def schedule_of(scheduler: LRScheduler | None) -> Callable[[float], float]:
    """Return a schedule as a function of the clock: what it multiplies the first group's base rate
    by.

    Raises:
        SettingError: there is none, or it keeps its own count.
    """
    unwrapped = _unwrapped(scheduler, "scheduler")
    if unwrapped is None or not follows_clock(unwrapped):
        remedy = (
            "a batch that follows the decay of the rate needs a LambdaLR, such as torchtune's"
            " cosine schedule"
        )
        raise SettingError("lr_scheduler", unwrapped and type(unwrapped).__name__, remedy)
    return lambda clock: _evaluate(unwrapped, clock)[1][0]


def _evaluate(scheduler: LRScheduler, clock: float) -> tuple[LambdaLR, list[float]]:
    """Return the part of a schedule that is in force, and what it multiplies the base rate of each
    group by.
    """
    # torch calls the functions with whole numbers
    time = int(clock) if clock == int(clock) else clock
    if isinstance(scheduler, SequentialLR):
        index = bisect_right(scheduler._milestones, time)
        if index:
            time -= scheduler._milestones[index - 1]
        scheduler = scheduler._schedulers[index]
    assert isinstance(scheduler, LambdaLR)
    return scheduler, [rule(time) for rule in scheduler.lr_lambdas]  # type: ignore[arg-type]
