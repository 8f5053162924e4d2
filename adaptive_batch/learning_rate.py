"""The learning rate as a function of the base rate, the schedule and where training is; recomputed, never accumulated."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

log = logging.getLogger("adaptive_batch")


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

    def __init__(self, optimizers: Sequence[Optimizer], scheduler: LRScheduler | None, *, batch_can_change: bool) -> None:
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
            pairs = zip(self._scheduler.base_lrs, self._scheduler.lr_lambdas, strict=True)
            self._apply([base * rule(step) for base, rule in pairs])  # type: ignore[arg-type]
        elif self._scheduler is not None:
            if self._last_clock is not None and clock != self._last_clock:
                self._scheduler.step()
            self._apply([group["lr"] for group in self._optimizers[0].param_groups])
        self._last_clock = clock
        return float(self._optimizers[0].param_groups[0]["lr"])

    def _apply(self, rates: list[float]) -> None:
        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            for group, rate in zip(groups, rates if len(rates) == len(groups) else rates[:1] * len(groups), strict=True):
                if hasattr(group["lr"], "fill_"):  # a tensor, as torchao's optimizers keep it
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
