"""The learning rate as a function of the base rate, the schedule and where training is; recomputed, never accumulated."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

log = logging.getLogger("adaptive_batch")

RULES = ("none", "linear", "sqrt")


def scale(learning_rate: float, batch: float, reference: float, rule: str) -> float:
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
    linear, root = (scale(learning_rate, batch, reference, rule) for rule in ("linear", "sqrt"))
    return (
        f"lr {learning_rate:g} stays, chosen for a global batch of {reference}, now {batch}: "
        f"linear scaling would give {linear:g}, sqrt {root:g}"
    )


class LearningRate:
    """Sets the rate of some optimizers from one schedule and the training's clock.

    A ``LambdaLR``, as every schedule of torchtune is, is a function of the step: it is evaluated at the clock, which may be
    fractional, and multiplied with the base rate anew each time. Any other scheduler keeps its own count and is stepped once
    a step.

    Args:
        optimizers: all that are to follow; the first is the one that `scheduler` was built around.
        scheduler: None for a constant rate.
        batch_can_change: warn where the scheduler cannot follow.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], scheduler: LRScheduler | None, *, batch_can_change: bool
    ) -> None:
        self._optimizers = list(optimizers)
        self._scheduler = scheduler
        self._last_clock: float | None = None
        if scheduler is not None and not isinstance(scheduler, LambdaLR) and batch_can_change:
            log.warning(
                "%s counts optimizer steps: it cannot follow a batch that changes, and decays too late when the batch grows; "
                "a LambdaLR, such as torchtune's cosine schedule, can",
                type(scheduler).__name__,
            )

    def set(self, clock: float) -> float:
        """Apply the rate that belongs to `clock` (in steps of a constant batch), and return that of the first group."""
        if isinstance(self._scheduler, LambdaLR):
            step = int(clock) if clock == int(clock) else clock
            rules = cast("list[Callable[[float], float]]", self._scheduler.lr_lambdas)
            self._apply([float(base) * rule(step) for base, rule in zip(self._scheduler.base_lrs, rules, strict=True)])
        elif self._scheduler is not None:
            if self._last_clock is not None and clock != self._last_clock:
                self._scheduler.step()
            self._apply([group["lr"] for group in self._optimizers[0].param_groups])
        self._last_clock = clock
        return float(self._optimizers[0].param_groups[0]["lr"])

    def _apply(self, rates: list[float]) -> None:
        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            for group, rate in zip(
                groups, rates if len(rates) == len(groups) else rates[:1] * len(groups), strict=True
            ):
                if hasattr(group["lr"], "fill_"):  # a tensor, as torchao's optimizers keep it
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
