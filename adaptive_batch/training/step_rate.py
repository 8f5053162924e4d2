"""The learning rate of each step: the schedule at the clock of training, scaled by what the step holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive_batch.data import StepPlanner
from adaptive_batch.schedules import (
    SCALED_WITH_BATCH,
    Clock,
    EpochPlan,
    LearningRate,
    Progress,
    Reference,
    Seesaw,
    TrainingClock,
    scale_learning_rate,
)


class StepRate:
    """Sets the rate of each step, from where training is and what the step holds.

    Args:
        planner: of the run; the clock counts in steps of the batch that it began with.
        optimizers, scheduler, rule: of :class:`LearningRate`.
        clock: its units.
        reference: the global batch that the rates belong to; None for that of a configured step on the ranks that training
            began with.
        scale_with_batch: of :class:`LearningRate`.
        warmup_steps, total_steps: of the scheduler, see :class:`TrainingClock`.
    """

    def __init__(
        self,
        planner: StepPlanner,
        optimizers: Sequence[Optimizer],
        scheduler: LRScheduler | None,
        clock: Clock,
        *,
        rule: str,
        reference: Reference | None = None,
        scale_with_batch: Mapping[str, str] | None = None,
        warmup_steps: int = 0,
        total_steps: int = 0,
    ) -> None:
        self._planner, self._optimizers, self._unit = planner, optimizers, clock
        self._warmup_steps, self._total_steps, self._given = warmup_steps, total_steps, reference
        self._follows_rate = isinstance(planner.batching.batch_size_schedule, Seesaw)
        self._rate = LearningRate(
            optimizers, scheduler, rule=rule, reference=self.reference, scale_with_batch=scale_with_batch
        )
        self._begin()

    def _begin(self) -> None:
        self._rate.reference = self.reference
        steps = {"warmup_steps": self._warmup_steps, "total_steps": self._total_steps}
        self._clock = TrainingClock(self._unit, reference=self._planner.reference, **steps)

    @property
    def reference(self) -> Reference:
        """The global batch that the rates belong to."""
        batching, ranks = self._planner.batching, self._planner.ranks
        if self._given or not (self._follows_rate and batching.batch_tokens):
            return self._given or Reference(self._step_rows, "rows")
        return Reference(batching.batch_tokens * ranks, "tokens")

    @property
    def _step_rows(self) -> int:
        batching = self._planner.batching
        return batching.batch_size * batching.gradient_accumulation_steps * self._planner.ranks

    @property
    def counts_tokens(self) -> bool:
        """Whether the rate is scaled by the tokens of a step, and not by its rows."""
        return self.reference.unit == "tokens"

    def set(self, progress: Progress, *, batch: int, plan: EpochPlan | None = None) -> dict[str, float]:
        """Apply the rate of a step; return it as ``lr``, and what else follows the batch: ``beta2``, ``weight_decay``.

        Args:
            progress: before the step.
            batch: rows that the step holds on all ranks, or real tokens where it :attr:`counts_tokens`.
            plan: of the epoch; None for the planner's, and for one of a constant batch where only rows count: that is as good
                for a loop that drops no row, and known without reading lengths.
        """
        if self._follows_rate:  # the clock that the batch reads
            plan = self._planner.reference
        elif plan is None:
            needs_lengths = self._unit.counts_tokens or self._planner.batching.batch_tokens
            plan = self._planner.plan if needs_lengths else self._planner.reference
        return {"lr": self._rate.set(self._clock.at(progress, plan), batch=max(1, batch)), **self._rate.scaled}

    def restore(self) -> None:
        """Put the rates back that are not scaled, after a step or without one."""
        self._rate.restore()

    def describe(self) -> str | None:
        """Return a line on what is scaled with the batch, before the first step; None where nothing is."""
        bases = [("lr", self.base, self._rate.rule)] if self._rate.rule != "none" else []
        bases += [(name, base, SCALED_WITH_BATCH[name]) for name, base in self._rate.scaled.items()]
        belongs = f"belongs to {self.reference} a step, and is scaled by the rule"
        return "; ".join(f"{name} {base:g} {belongs} {rule}" for name, base, rule in bases) or None

    def describe_unscaled(self, batch: int) -> str | None:
        """Return a line on a rate that does not follow another global batch than the configured one, in rows; None where it does."""
        base, configured = self.base, self._step_rows
        if self._rate.rule != "none" or batch == configured:
            return None
        linear, root = (scale_learning_rate(base, batch, configured, rule) for rule in ("linear", "sqrt"))
        would = f"linear scaling would give {linear:g}, sqrt {root:g}"
        return f"lr {base:g} stays, chosen for a global batch of {configured}, now {batch}: {would}"

    @property
    def base(self) -> float:
        """The learning rate before it is scheduled and scaled."""
        group = self._optimizers[0].param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, for a checkpoint."""
        return {
            "rule": self._rate.rule,
            "clock": self._clock.state_dict(),
            "total_steps": self._total_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the ranks that training began with are known by now."""
        self._begin()
        self._clock.load_state_dict(state["clock"])
