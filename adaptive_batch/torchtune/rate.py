"""The learning rate of each step: torchtune's scheduler at the clock, scaled by the batch."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from omegaconf import DictConfig
from torch.optim import Optimizer
from torchtune import config

from adaptive_batch.data import StepPlanner
from adaptive_batch.errors import SettingError
from adaptive_batch.report import RunLog
from adaptive_batch.schedules import (
    Clock,
    EpochPlan,
    LearningRate,
    Progress,
    Reference,
    TrainingClock,
    write_rate,
)

from .config_errors import as_dict
from .job import Job
from .keys import load_function


class RateController:
    """Sets the rate of each step, from where training is and what the step holds.

    Args:
        job: of the run.
        planner: of the run, begun.
        optimizers: that follow; the first is the one that the scheduler is built around.
        progress: where training resumes.
        total_steps: where the scheduler ends, in steps of the constant batch or, where its clock counts steps, in steps.
        saved: what :meth:`state_dict` gave when the checkpoint was saved; empty without one.
        record: of the run; None logs nothing.
    """

    def __init__(
        self,
        job: Job,
        planner: StepPlanner,
        optimizers: list[Optimizer],
        *,
        progress: Progress,
        total_steps: int,
        saved: Mapping[str, Any],
        record: RunLog | None = None,
    ) -> None:
        self._settings, self._optimizers = job.settings, optimizers
        self._total, self._reference = total_steps, reference_batch(job)
        block = job.cfg.get("lr_scheduler", None)
        self._clock = TrainingClock(
            job.settings.lr_clock,
            reference=planner.reference,
            warmup_steps=int(block.get("num_warmup_steps", 0)) if block else 0,
            total_steps=total_steps,
        )
        self._follow_rule(saved, record)
        last_epoch = int(self._clock.decay(progress, planner.plan)) - 1
        if last_epoch >= 0:  # torch asks for it in a scheduler that begins later
            for group in optimizers[0].param_groups:
                group.setdefault("initial_lr", float(group["lr"]))
        scheduler = block and config.instantiate(
            block, optimizers[0], num_training_steps=total_steps, last_epoch=last_epoch
        )
        self._rate = LearningRate(
            optimizers,
            scheduler,
            rule=job.settings.lr_scaling,
            reference=self._reference,
            batch_can_change=job.settings.grows or bool(job.settings.batch_tokens),
        )
        if saved:
            self._rate.load_state_dict(saved["scheduler"])
            self._clock.load_state_dict(saved["clock"])

    @property
    def counts_tokens(self) -> bool:
        """Whether the rate is scaled by the tokens of a step, and not by its rows."""
        return self._reference.unit == "tokens"

    def set(self, progress: Progress, *, plan: EpochPlan, batch: int) -> float:
        """Apply the rate of a step, and return it.

        Args:
            progress: before the step.
            plan: of the epoch.
            batch: rows that the step holds on all ranks, or real tokens where it :attr:`counts_tokens`.
        """
        return self._rate.set(self._clock.at(progress, plan), batch=batch)

    def describe(self) -> str | None:
        """Return a line on the scaling of the rate; None without."""
        if self._settings.lr_scaling == "none":
            return None
        group, rule = self._optimizers[0].param_groups[0], self._settings.lr_scaling
        return f"lr {group['initial_lr']:g} belongs to {self._reference} a step, and is scaled by the rule {rule}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, for the checkpoint."""
        return {
            "rule": self._settings.lr_scaling,
            "scheduler": self._rate.state_dict(),
            "clock": self._clock.state_dict(),
            "total_steps": self._total,
        }

    def _follow_rule(self, saved: Mapping[str, Any], record: RunLog | None) -> None:
        """Where the rule of scaling is another than the checkpoint's, begin with rates that are not scaled."""
        before, now = saved.get("rule", "none"), self._settings.lr_scaling
        if not saved or before == now:
            return
        if record:
            message = f"lr_scaling {before} -> {now}: not what the checkpoint was trained with"
            record.event("lr_scaling", message, before=before, after=now)
        for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
            write_rate(group, float(group.get("initial_lr", group["lr"])))  # what was saved is scaled


def reference_batch(job: Job) -> Reference:
    """The global batch that the configured learning rate belongs to."""
    return job.settings.reference_batch_size or Reference(job.settings.step_rows * job.ranks, "rows")


def check_scheduler(cfg: DictConfig) -> None:
    """Refuse a scheduler that cannot be built as torchtune's recipes build one, or that cannot follow the clock that is asked for.

    Raises:
        SettingError: naming the scheduler, or the clock.
    """
    block = cfg.get("lr_scheduler", None)
    if not block:
        return
    key = "lr_scheduler._component_"
    component = load_function(block._component_, key=key)
    arguments = {str(name): value for name, value in block.items() if name != "_component_"}
    try:
        signature(component).bind(None, num_training_steps=1, last_epoch=-1, **arguments)
    except TypeError as error:
        raise SettingError(
            key,
            block._component_,
            f"it is called with an optimizer, num_training_steps, last_epoch and its other keys: {error}; "
            "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup would do",
        ) from None
    optimizer = optimizer_of_nothing(1.0)
    steps = 10**6  # more than any warm-up
    rate = LearningRate(optimizer, config.instantiate(block, optimizer, num_training_steps=steps, last_epoch=-1))
    asked = Clock.from_config(as_dict(cfg).get("lr_clock"))
    if cfg.get("lr_clock", None) is not None and asked != Clock("steps", "steps") and not rate.follows_clock:
        raise SettingError(
            "lr_clock",
            cfg.lr_clock,
            f"{block._component_} counts steps and can follow nothing else; give steps, or a LambdaLR such as "
            "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        )


def optimizer_of_nothing(rate: float) -> Optimizer:
    """An optimizer of nothing, for a schedule to be built around."""
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
