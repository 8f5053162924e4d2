"""The learning rate of each step: the schedule at the clock of training, scaled by the batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive_batch import distributed
from adaptive_batch._util import check_choice, check_state
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    RULES,
    Clock,
    Progress,
    ReferenceBatch,
    TrainingClock,
    check_scaled,
    factors_at,
    follows_clock,
    parse_reference,
    prepare_scaled,
    read_scaled,
    scale_group,
    scale_learning_rate,
    scale_steps,
    unwrap,
    write_rate,
)


class AdaptiveRate:
    """Scales the learning rate, beta2 and the weight decay of each step by its batch.

    The rate of a step is base x schedule(clock) x rule(batch / reference). The optimizer holds it
    during ``optimizer.step()`` alone, and the unscaled rate, base x schedule(clock), at any other
    time. So schedulers, state dicts and callbacks see unscaled rates, also where a step is skipped.

    Args:
        optimizer: one, or several; the first is the one that `lr_scheduler` was built around. Each
            may be wrapped by accelerate or Lightning. With a scheduler each group keeps its base
            rate in its ``initial_lr``.
        lr_scheduler: a ``LambdaLR``: a function of the clock, which nobody has to step. Its
            ``get_last_lr()`` returns the scaled rates. None for the rate that the optimizer holds,
            whoever sets it.
        lr_scaling: ``none``, ``linear`` or ``sqrt`` of global batch / `reference_batch_size`.
        reference_batch_size: global batch that the optimizer's rates were chosen for: rows, or
            ``"8192tok"``. Required if something is scaled.
        lr_clock: unit of the schedule: ``steps``, or the part of training that is done by
            ``samples`` or ``tokens``, in steps of a constant batch, so that a batch that grows does
            not stretch it.
        scale_with_batch: what follows the batch too: ``{"beta2": "half_life", "weight_decay":
            "per_token"}`` or one of them.
        warmup_steps: steps of the scheduler's warm-up, where `lr_clock` is a :class:`Clock` of two
            units.
        total_steps: steps of the scheduler in all, likewise.

    Attributes:
        reference: global batch that the rates belong to.

    Raises:
        SettingError: an argument cannot be used, or a scheduler keeps its own count.
        ValueError: a scheduler built around another optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        lr_scheduler: LRScheduler | None = None,
        *,
        lr_scaling: str = "none",
        reference_batch_size: ReferenceBatch | int | str | None = None,
        lr_clock: Clock | str = "steps",
        scale_with_batch: Mapping[str, str] | None = None,
        warmup_steps: int = 0,
        total_steps: int = 0,
    ) -> None:
        check_choice("lr_scaling", lr_scaling, RULES)
        if not isinstance(lr_clock, Clock):
            lr_clock = Clock.from_config(lr_clock)
        self._follow = check_scaled("scale_with_batch", scale_with_batch or {})
        self._scales = lr_scaling != "none" or bool(self._follow)
        if self._scales and reference_batch_size is None:
            remedy = (
                "give the global batch, in rows or as in 8192tok, that the learning rate was"
                " chosen for"
            )
            raise SettingError("reference_batch_size", None, remedy)
        if not isinstance(reference_batch_size, ReferenceBatch | None):
            reference_batch_size = parse_reference("reference_batch_size", reference_batch_size)
        self._rule = lr_scaling
        self.reference = reference_batch_size
        given: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self._optimizers: list[Optimizer] = [unwrap(each, "optimizer") for each in given]
        if not given or not all(isinstance(each, Optimizer) for each in self._optimizers):
            raise SettingError("optimizer", optimizer, "give an optimizer, or a list of them")
        self._scheduler = unwrap(lr_scheduler, "scheduler")
        self._check_scheduler()
        for each in self._optimizers:
            prepare_scaled(each, self._follow)
            # A rate that was built for it before no longer scales it.
            scale_steps(each, None)
        self._clock = lr_clock
        self._total_steps = total_steps
        self._training_clock = TrainingClock(
            lr_clock, warmup_steps=warmup_steps, total_steps=total_steps
        )
        # Steps whose rate was set, for a clock of steps without progress.
        self._steps = 0
        # A recipe's scheduler that keeps its own count, and how often it was stepped.
        self._counting_scheduler: Any = None
        self._scheduler_steps = 0

    @classmethod
    def for_recipe(
        cls, optimizers: Sequence[Optimizer], scheduler: LRScheduler | None, **settings: Any
    ) -> AdaptiveRate:
        """Build the rate of a recipe, which also steps a scheduler that keeps its own count.

        It is stepped once for each step of training. Its state is not saved: a resumed run steps it
        again, from the first step to where training is.

        Args:
            optimizers: optimizers that follow; `scheduler` was built around the first of them for
                the first step.
            scheduler: a torch scheduler.
            settings: other arguments of :class:`AdaptiveRate`.
        """
        if follows_clock(scheduler):
            return cls(optimizers, scheduler, **settings)
        rate = cls(optimizers, None, **settings)
        rate._counting_scheduler = scheduler
        return rate

    def _check_scheduler(self) -> None:
        """Refuse a scheduler that keeps its own count, or was built around another optimizer."""
        name = type(self._scheduler).__name__
        if not follows_clock(self._scheduler):
            remedy = (
                "it keeps its own count; leave it out here and step it in your own loop after"
                " optimizer.step(): the rate that it sets is scaled"
            )
            raise SettingError("lr_scheduler", name, remedy)
        first = self._optimizers[0]
        if unwrap(getattr(self._scheduler, "optimizer", first), "optimizer") is not first:
            raise ValueError(
                f"{name} was built around another optimizer: give the one that it was built around"
                " first"
            )

    @property
    def counts_tokens(self) -> bool:
        """True if the rate is scaled by the tokens of a step, and not by its rows."""
        return self.reference is not None and self.reference.unit == "tokens"

    def refer_to(self, reference: ReferenceBatch) -> None:
        """Set the global batch that the rates belong to, as a resumed run does."""
        self.reference = reference

    def set(
        self,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """Set the rate of the next ``optimizer.step()``. A collective if the rate is scaled.

        Every step until the next call has this rate: one that is retried or repeated too. A rate
        that somebody writes before the step is scaled instead.

        Args:
            rows: rows of this rank's batch; needed where the reference is in rows.
            tokens: real tokens of this rank's batch; needed where the reference is in tokens.
            progress: what training has consumed before the step, as ``AdaptiveBatches.progress``;
                needed by the clocks ``samples`` and ``tokens``.

        Returns:
            The scaled rate of the first group as ``lr``, and ``beta2`` and ``weight_decay`` if they
            follow the batch, of the first group with a value.

        Raises:
            SettingError: an argument for the clock or the reference is missing; the schedule is not
                finite; or the optimizer has groups that the scheduler does not know.
        """
        if progress is None:
            if self._scheduler is not None and self._clock != Clock("steps", "steps"):
                remedy = (
                    "its clock is the part of training that is done; give"
                    " set(progress=batches.progress)"
                )
                raise SettingError("lr_clock", str(self._clock), remedy)
            progress = Progress(steps=self._steps)
        batch = 1
        if self._scales:
            name, own_batch = ("tokens", tokens) if self.counts_tokens else ("rows", rows)
            if not isinstance(own_batch, int) or own_batch < 0:
                remedy = (
                    f"the rate belongs to {self.reference}; give set({name}=...) of this step, a"
                    " whole number"
                )
                raise SettingError(name, own_batch, remedy)
            batch = sum(distributed.all_gather(own_batch or 1))
        self._steps += 1
        return self.apply(progress, batch=batch)

    def apply(self, progress: Progress, *, batch: int) -> dict[str, float]:
        """Set the rate of a step whose global batch is known; see :meth:`set`.

        Args:
            progress: what training has consumed before the step.
            batch: rows that the step holds on all ranks, or real tokens where the rate
                :attr:`counts_tokens`.
        """
        if self._counting_scheduler is not None:
            self._step_scheduler(progress.steps)
        if self._scheduler is not None:
            self._schedule(self._training_clock.at(progress))
        groups = self._optimizers[0].param_groups
        if self._scales:
            assert self.reference is not None
            batch = max(1, batch)
            reference = self.reference.amount
            scale = partial(
                scale_group,
                ratio=batch / reference,
                rate_factor=scale_learning_rate(1.0, batch, reference, self._rule),
                names=self._follow,
            )
            for optimizer in self._optimizers:
                scale_steps(optimizer, scale)
            groups = [group | scale(self._optimizers[0], group) for group in groups]
        rates = [float(group["lr"]) for group in groups]
        if self._scheduler is not None:
            # The attribute that the scheduler's get_last_lr() returns.
            self._scheduler._last_lr = rates
        return {"lr": rates[0], **read_scaled(groups, self._follow)}

    def _step_scheduler(self, steps: int) -> None:
        """Step a scheduler that keeps its own count to where training is."""
        with warnings.catch_warnings():
            # a resumed run and a preview step it before their optimizer
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            while self._scheduler_steps < steps:
                self._counting_scheduler.step()
                self._scheduler_steps += 1
        first, *followers = self._optimizers
        for optimizer in followers:
            for group in optimizer.param_groups:
                write_rate(group, float(first.param_groups[0]["lr"]))

    def _schedule(self, clock: float) -> None:
        """Write the scheduled rates."""
        factors = factors_at(self._scheduler, clock)
        num_groups = len(self._optimizers[0].param_groups)
        remedy = None
        if num_groups != len(factors):
            remedy = (
                f"it was built for {len(factors)} parameter groups, and the optimizer has "
                f"{num_groups}; add groups before it is built"
            )
        elif not all(map(math.isfinite, factors)):
            remedy = (
                f"at step {clock:g} it gives {factors}; give a function whose values are finite"
            )
        if remedy:
            raise SettingError("lr_scheduler", type(self._scheduler).__name__, remedy)
        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            bases = [group.setdefault("initial_lr", float(group["lr"])) for group in groups]
            if optimizer is self._optimizers[0]:
                bases = self._scheduler.base_lrs
            # An optimizer with other groups follows the first group's schedule.
            shared = factors if len(groups) == len(factors) else factors[:1] * len(groups)
            for group, base, factor in zip(groups, bases, shared, strict=True):
                write_rate(group, float(base) * factor)

    def describe(self) -> str | None:
        """Describe the values that are scaled with the batch; None without any."""
        rules = {"lr": self._rule, **self._follow}
        followers = read_scaled(self._optimizers[0].param_groups, self._follow)
        bases = {"lr": self.base, **followers}
        belongs = f"belongs to {self.reference} a step, and is scaled by the rule"
        lines = [
            f"{name} {bases[name]:g} {belongs} {rule}"
            for name, rule in rules.items()
            if rule != "none"
        ]
        return "; ".join(lines) or None

    def describe_unscaled(self, batch: int, *, configured: int) -> str | None:
        """Describe a rate that does not follow the batch; None if it does, or if the batch is as
        configured.

        Args:
            batch: global batch now, in rows.
            configured: global batch as configured.
        """
        if self._rule != "none" or batch == configured:
            return None
        linear = scale_learning_rate(self.base, batch, configured, "linear")
        root = scale_learning_rate(self.base, batch, configured, "sqrt")
        stays = f"lr {self.base:g} stays, chosen for a global batch of {configured}, now {batch}"
        return f"{stays}: linear scaling would give {linear:g}, sqrt {root:g}"

    @property
    def base(self) -> float:
        """The learning rate of the first group before it is scheduled and scaled."""
        group = self._optimizers[0].param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, for a checkpoint."""
        return {
            "rule": self._rule,
            "clock": self._training_clock.state_dict(),
            "total_steps": self._total_steps,
            "steps": self._steps,
            "reference": self.reference and asdict(self.reference),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            SettingError: the state does not belong to a rate.
        """
        check_state(state, ("clock", "steps"), owner="a rate")
        self._training_clock.load_state_dict(state["clock"])
        self._steps = state["steps"]
