"""The learning rate of each step: the schedule at the clock of training, scaled by what the step
holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive_batch import distributed
from adaptive_batch._util import check_choice, check_state
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    RULES,
    SCALED_WITH_BATCH,
    Clock,
    LearningRate,
    Progress,
    Reference,
    TrainingClock,
    scale_learning_rate,
)


class AdaptiveRate:
    """Sets the learning rate of each step, and what else follows the batch, for that step alone.

    As soon as ``optimizer.step()`` returns, the optimizer holds the rate that is not scaled, and so
    does what ``optimizer.state_dict()`` returns.

    Args:
        optimizer: one, or several; the first is the one that `lr_scheduler` was built around.
        lr_scheduler: a ``LambdaLR``: a function of the clock, which nobody has to step. None for
            the rate that the optimizer holds, whoever sets it.
        lr_scaling: ``none``, ``linear`` or ``sqrt`` of global batch / `reference_batch_size`.
        reference_batch_size: global batch that the optimizer's rates were chosen for: rows, or
            ``"8192tok"``. None only where nothing is scaled.
        lr_clock: what the schedule counts: ``steps``, or the part of training that is done by
            ``samples`` or ``tokens``, in steps of a constant batch, so that a batch that grows does
            not stretch it.
        scale_with_batch: what follows the batch too: ``{"beta2": "half_life", "weight_decay":
            "per_token"}`` or one of them.
        warmup_steps: steps of the scheduler's warm-up, where `lr_clock` is a :class:`Clock` of two
            units.
        total_steps: steps of the scheduler in all, likewise.

    Raises:
        SettingError: an argument cannot be used, or a scheduler keeps a count of its own.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        lr_scheduler: LRScheduler | None = None,
        *,
        lr_scaling: str = "none",
        reference_batch_size: Reference | int | str | None = None,
        lr_clock: Clock | str = "steps",
        scale_with_batch: Mapping[str, str] | None = None,
        warmup_steps: int = 0,
        total_steps: int = 0,
    ) -> None:
        check_choice("lr_scaling", lr_scaling, RULES)
        if not isinstance(lr_clock, Clock):
            lr_clock = Clock.from_config(lr_clock)
        self._clock = lr_clock
        self._scales = lr_scaling != "none" or bool(scale_with_batch)
        if self._scales and reference_batch_size is None:
            remedy = (
                "give the global batch, in rows or as in 8192tok, that the learning rate was"
                " chosen for"
            )
            raise SettingError("reference_batch_size", None, remedy)
        self._rate = LearningRate(
            optimizer,
            lr_scheduler,
            rule=lr_scaling,
            reference=reference_batch_size,
            scale_with_batch=scale_with_batch,
        )
        self._has_scheduler = lr_scheduler is not None
        self._total_steps = total_steps
        self._training_clock = TrainingClock(
            self._clock, warmup_steps=warmup_steps, total_steps=total_steps
        )
        # Steps whose rate was set, for a clock of steps without progress.
        self._steps = 0

    @property
    def reference(self) -> Reference | None:
        """The global batch that the rates belong to."""
        return self._rate.reference

    @property
    def counts_tokens(self) -> bool:
        """Whether the rate is scaled by the tokens of a step, and not by its rows."""
        reference = self._rate.reference
        return reference is not None and reference.unit == "tokens"

    def refer_to(self, reference: Reference) -> None:
        """Take another global batch that the rates belong to, as that of a run that is resumed."""
        self._rate.reference = reference

    def set(
        self,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """Apply the rate of the next step, before ``optimizer.step()``; on several ranks a
        collective where it is scaled.

        Args:
            rows: rows of this rank's batch; needed where the reference is in rows.
            tokens: real tokens of this rank's batch; needed where the reference is in tokens.
            progress: what training has consumed before the step, as ``AdaptiveBatches.progress``;
                needed by the clocks ``samples`` and ``tokens``.

        Returns:
            The rate as ``lr``, and what else follows the batch: ``beta2``, ``weight_decay``.

        Raises:
            SettingError: what the clock or the reference needs is missing.
        """
        name = "rows"
        own_batch = rows
        if self.counts_tokens:
            name = "tokens"
            own_batch = tokens
        is_count = isinstance(own_batch, int) and own_batch >= 0
        if self._scales and not is_count:
            raise SettingError(
                name,
                own_batch,
                f"the rate belongs to {self.reference}; give set({name}=...) of this step, a whole"
                " number",
            )
        if progress is None:
            if self._has_scheduler and self._clock != Clock("steps", "steps"):
                remedy = (
                    "its clock is the part of training that is done; give"
                    " set(progress=batches.progress)"
                )
                raise SettingError("lr_clock", str(self._clock), remedy)
            progress = Progress(steps=self._steps)
        batch = own_batch or 1
        if self._scales:
            batch = sum(distributed.all_gather(batch))
        self._steps += 1
        return self.apply(progress, batch=batch)

    def apply(self, progress: Progress, *, batch: int) -> dict[str, float]:
        """Apply the rate of a step whose global batch is known; see :meth:`set`.

        Args:
            progress: what training has consumed before the step.
            batch: rows that the step holds on all ranks, or real tokens where the rate
                :attr:`counts_tokens`.
        """
        time = 0.0
        if self._has_scheduler:
            time = self._training_clock.at(progress)
        return {"lr": self._rate.set(time, batch=max(1, batch)), **self._rate.scaled}

    def restore(self) -> None:
        """Put the rates back that are not scaled, of a step that is not taken."""
        self._rate.restore()

    def describe(self) -> str | None:
        """Return a line on what is scaled with the batch, before the first step; None where nothing
        is.
        """
        scaled = []
        if self._rate.rule != "none":
            scaled.append(("lr", self.base, self._rate.rule))
        scaled += [
            (name, base, SCALED_WITH_BATCH[name]) for name, base in self._rate.scaled.items()
        ]
        belongs = f"belongs to {self.reference} a step, and is scaled by the rule"
        return "; ".join(f"{name} {base:g} {belongs} {rule}" for name, base, rule in scaled) or None

    def describe_unscaled(self, batch: int, *, configured: int) -> str | None:
        """Return a line on a rate that does not follow the batch; None where it does, or the batch
        is as configured.

        Args:
            batch: global batch now, in rows.
            configured: global batch as configured.
        """
        if self._rate.rule != "none" or batch == configured:
            return None
        linear = scale_learning_rate(self.base, batch, configured, "linear")
        root = scale_learning_rate(self.base, batch, configured, "sqrt")
        stays = f"lr {self.base:g} stays, chosen for a global batch of {configured}, now {batch}"
        return f"{stays}: linear scaling would give {linear:g}, sqrt {root:g}"

    @property
    def base(self) -> float:
        """The learning rate before it is scheduled and scaled."""
        return self._rate.base

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, for a checkpoint."""
        return {
            "rule": self._rate.rule,
            "clock": self._training_clock.state_dict(),
            "total_steps": self._total_steps,
            "steps": self._steps,
            "reference": self.reference and asdict(self.reference),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            SettingError: the state is none of a rate.
        """
        check_state(state, ("clock", "steps"), owner="a rate")
        self._training_clock.load_state_dict(state["clock"])
        self._steps = state["steps"]
