"""The learning rate as a function of the base rate, the schedule and where training is; recomputed, never accumulated."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from adaptive_batch.errors import SettingError

from .lr_scheduler import Schedule, write_rate

log = logging.getLogger("adaptive_batch")

RULES = ("none", "linear", "sqrt")


@dataclass(frozen=True)
class Reference:
    """The global batch that a learning rate was chosen for.

    Attributes:
        amount: above 0.
        unit: what it counts.
    """

    amount: float
    unit: Literal["rows", "tokens"]

    def __str__(self) -> str:
        amount = int(self.amount) if float(self.amount).is_integer() else self.amount
        return f"{amount} {self.unit[:-1] if amount == 1 else self.unit}"


def parse_reference(value: object) -> Reference:
    """Read ``64`` as rows and ``8192tok`` or ``1.5e6tok`` as tokens.

    Raises:
        ValueError: neither of these, or not above 0.
    """
    if type(value) is int and value >= 1:
        return Reference(float(value), "rows")
    if isinstance(value, str) and value.endswith("tok"):
        try:
            amount = float(value.removesuffix("tok"))
        except ValueError:
            amount = math.nan
        if 0 < amount < math.inf:
            return Reference(amount, "tokens")
    raise ValueError(f"{value!r}: give a whole number of rows, 1 or more, or tokens as in 8192tok")


def scale_learning_rate(learning_rate: float, batch: float, reference: float, rule: str) -> float:
    """The rate for a batch, from the rate that is right for another.

    Args:
        learning_rate: the rate that belongs to `reference`.
        batch: global batch of a step, in rows or in tokens.
        reference: global batch that the rate was chosen for, in the same unit.
        rule: ``none`` keeps it; ``linear`` multiplies it by batch / reference (Goyal et al. 2017, arXiv 1706.02677,
            section 2.1); ``sqrt`` by the square root of that (Krizhevsky 2014, arXiv 1404.5997, section 5; for Adam
            Malladi et al. 2022, arXiv 2205.10287, definition 5.1).

    Raises:
        ValueError: an unknown rule, or a batch or reference that is not positive.
    """
    if rule not in RULES:
        raise ValueError(f"rule={rule!r}: give one of {', '.join(RULES)}")
    if not (batch > 0 and reference > 0):
        raise ValueError(f"batch={batch!r}, reference={reference!r}: both must be above 0")
    factor = {"none": 1.0, "linear": batch / reference, "sqrt": math.sqrt(batch / reference)}[rule]
    return learning_rate * factor


def describe_unscaled(learning_rate: float, *, batch: int, reference: int) -> str:
    """One line on a rate that stays although the batch is another, and what the two rules would make of it."""
    linear, root = (scale_learning_rate(learning_rate, batch, reference, rule) for rule in ("linear", "sqrt"))
    return (
        f"lr {learning_rate:g} stays, chosen for a global batch of {reference}, now {batch}: "
        f"linear scaling would give {linear:g}, sqrt {root:g}"
    )


class LearningRate:
    """Sets the rate of optimizers: base x schedule(clock) x rule(batch / reference), anew each time.

    A ``LambdaLR``, as every schedule of torchtune is, and a ``SequentialLR`` of nothing else are functions of the step:
    they are evaluated at the clock, which may be fractional. Any other scheduler keeps its own count and is stepped once
    each time the clock has moved; it sees unscaled rates only, as it may make the next rate from the last. Nothing else
    may step the scheduler; its ``get_last_lr()`` reports what was applied.

    Args:
        optimizers: one, or all that are to follow; the first is the one that `scheduler` was built around. Each group
            keeps its base rate in its ``initial_lr``. Schedulers that bring rates of their own (``OneCycleLR``,
            ``CyclicLR``) give those of the first optimizer to all.
        scheduler: None for a rate that only the batch changes.
        rule: ``none``, ``linear`` or ``sqrt``, as in `scale`.
        reference: the global batch that the base rates were chosen for; rows where it is a number.
        batch_can_change: warn where the scheduler cannot follow.

    Raises:
        SettingError: a scheduler that waits for a metric.
        ValueError: an unknown rule, a rule without a reference, or a scheduler built around another optimizer.
    """

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        scheduler: LRScheduler | None = None,
        *,
        rule: str = "none",
        reference: Reference | int | None = None,
        batch_can_change: bool = False,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule={rule!r}: give one of {', '.join(RULES)}")
        if rule != "none" and reference is None:
            raise ValueError(f"rule={rule!r}: give the reference too, the global batch that the rate was chosen for")
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._scheduler = scheduler
        self._rule = rule
        self._reference = reference if isinstance(reference, Reference | None) else parse_reference(reference)
        self._schedule = Schedule(scheduler, self._optimizers[0])
        # a scheduler that is built to resume meets followers whose lr is what the schedule had made of their base
        self._resumes = getattr(scheduler, "last_epoch", 0) > 0
        if scheduler is not None:
            self._check(scheduler, batch_can_change=batch_can_change)
        self._remember_bases()

    @property
    def follows_clock(self) -> bool:
        """Whether the scheduler is a function of the clock, and keeps no count of its own."""
        return self._schedule.follows_clock

    def set(self, clock: float, *, batch: float | None = None) -> float:
        """Apply the rate that belongs to a point of training and to the batch that is stepped there.

        Args:
            clock: in steps of a constant batch.
            batch: global batch of this step, in the unit of the reference; rule ``none`` does without.

        Returns:
            The rate of the first group, as applied.

        Raises:
            ValueError: the rule needs a batch and there is none, or it is not above 0; nothing has moved then.
        """
        factor = 1.0
        if self._rule != "none":
            assert self._reference is not None
            if batch is None:
                raise ValueError(f"batch=None: rule {self._rule} needs the {self._reference.unit} of the step")
            factor = scale_learning_rate(1.0, batch, self._reference.amount, self._rule)
        first = self._optimizers[0]
        if self._scheduler is not None or self._rule != "none":
            self._remember_bases()
            said = self._schedule.at(clock)
            for optimizer in self._optimizers:
                groups = optimizer.param_groups
                for group, of_group in zip(groups, _one_each(said, groups), strict=True):
                    rate = of_group.rate if optimizer is first else of_group.of(float(group["initial_lr"]))
                    write_rate(group, rate * factor)
        self._schedule.applied()
        return float(first.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the optimizers' own state, as numbers, strings, lists and dicts.

        Nothing where the rate is a function of the clock; else the scheduler's count and its last rate before the rule.
        """
        return self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with a scheduler that was built as the saved one was; before or after the optimizers'."""
        self._schedule.load_state_dict(state)

    def _check(self, scheduler: LRScheduler, *, batch_can_change: bool) -> None:
        name = type(scheduler).__name__
        if isinstance(scheduler, ReduceLROnPlateau):
            remedy = "it waits for a metric and gets none; a LambdaLR, such as torchtune's cosine schedule, would do"
            raise SettingError("lr_scheduler", name, remedy)
        if getattr(scheduler, "optimizer", self._optimizers[0]) is not self._optimizers[0]:
            raise ValueError(f"{name} was built around another optimizer: give the one that it was built around first")
        if batch_can_change and not self._schedule.follows_clock:
            log.warning(
                "%s counts optimizer steps: it cannot follow a batch that changes, and decays too late when the batch grows; "
                "a LambdaLR, such as torchtune's cosine schedule, can",
                name,
            )

    def _remember_bases(self) -> None:
        """Note the base rate of each group where an optimizer's state dict keeps it: its lr may be saved scaled."""
        if self._scheduler is None and self._rule == "none":
            return
        first = self._optimizers[0]
        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            for group, leader in zip(groups, _one_each(first.param_groups, groups), strict=True):
                if "initial_lr" not in group:
                    group["initial_lr"] = float(leader.get("initial_lr", group["lr"]) if self._resumes else group["lr"])


def _one_each(items: list[Any], groups: list[Any]) -> list[Any]:
    """One item for each group, as they stand; the first for all where their numbers differ."""
    return items if len(items) == len(groups) else items[:1] * len(groups)
