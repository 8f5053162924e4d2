"""The learning rate of each step: the schedule at the clock of training, scaled by the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive_batch import distributed
from adaptive_batch._util import check_built_alike, check_choice, check_state
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    RULES,
    UNITS,
    Progress,
    ReferenceBatch,
    check_scaled_options,
    elapsed_steps,
    factors_at,
    follows_clock,
    parse_reference,
    parse_scaled_options,
    read_scaled_options,
    scale_group,
    scale_learning_rate,
    scale_steps,
    unwrap,
    write_rate,
)


class AdaptiveRate:
    """Scales the learning rate, beta2 and the weight decay of each step by its batch.

    The learning rate of a step is base x schedule(clock) x rule(batch / reference). The optimizer
    has this rate only during ``optimizer.step()``. At any other time it has the unscaled rate, base
    x schedule(clock). Schedulers, state dicts and callbacks therefore see unscaled rates, even if a
    step is skipped.

    Args:
        optimizer: one optimizer or several. `lr_scheduler` must belong to the first. Optimizers may
            be wrapped by accelerate or Lightning. With a scheduler, the base rate of each group is
            its ``initial_lr``.
        lr_scheduler: a ``LambdaLR``, used as a function of the clock; do not step it. Its
            ``get_last_lr()`` returns the scaled rates. None: the rate in the optimizer, which other
            code may set.
        lr_scaling: ``none``, ``linear`` or ``sqrt`` of global batch / `reference_batch_size`.
        reference_batch_size: global batch for which the optimizer's rates were chosen: a number of
            rows, or ``"8192tok"``. Required if a value is scaled.
        lr_clock: unit of the schedule. ``steps`` counts optimizer steps. ``samples`` and ``tokens``
            use the completed fraction of training, converted to steps of a constant batch. A
            growing batch then does not stretch the schedule.
        scale_with_batch: other values to scale: ``{"beta2": "half_life", "weight_decay":
            "per_token"}`` or one of them.
        total_steps: total steps of the scheduler, which the state keeps for a resumed run.

    Attributes:
        reference: global batch for which the rates were chosen. A resumed run takes it from the
            state.

    Raises:
        SettingError: an argument cannot be used, or the scheduler counts steps itself.
        ValueError: the scheduler belongs to another optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        lr_scheduler: LRScheduler | None = None,
        *,
        lr_scaling: str = "none",
        reference_batch_size: ReferenceBatch | int | str | None = None,
        lr_clock: str = "steps",
        scale_with_batch: Mapping[str, str] | None = None,
        total_steps: int = 0,
    ) -> None:
        check_choice("lr_scaling", lr_scaling, RULES)
        check_choice("lr_clock", lr_clock, UNITS)
        self._scaled_options = parse_scaled_options("scale_with_batch", scale_with_batch or {})
        self._scales = lr_scaling != "none" or bool(self._scaled_options)
        if self._scales and reference_batch_size is None:
            remedy = (
                "give the global batch, in rows or as in 8192tok, that the learning rate was"
                " chosen for"
            )
            raise SettingError("reference_batch_size", None, remedy)
        if not isinstance(reference_batch_size, ReferenceBatch | None):
            reference_batch_size = parse_reference("reference_batch_size", reference_batch_size)
        self._lr_scaling = lr_scaling
        self.reference = reference_batch_size
        given: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self._optimizers: list[Optimizer] = [unwrap(each, "optimizer") for each in given]
        if not given or not all(isinstance(each, Optimizer) for each in self._optimizers):
            raise SettingError("optimizer", optimizer, "give an optimizer, or a list of them")
        self._scheduler = unwrap(lr_scheduler, "scheduler")
        self._check_scheduler()
        for each in self._optimizers:
            check_scaled_options(each, self._scaled_options)
            # Detach an earlier AdaptiveRate of this optimizer.
            scale_steps(each, None)
        self._clock = lr_clock
        self._total_steps = total_steps
        # Number of calls of set(), which is the clock if no progress is given.
        self._num_set = 0

    def _check_scheduler(self) -> None:
        """Raise if the scheduler counts steps itself or belongs to another optimizer."""
        name = type(self._scheduler).__name__
        if not follows_clock(self._scheduler):
            remedy = (
                "it counts steps itself; leave it out here and step it in your own loop after"
                " optimizer.step(): the rate that it sets is scaled"
            )
            raise SettingError("lr_scheduler", name, remedy)
        first = self._optimizers[0]
        if unwrap(getattr(self._scheduler, "optimizer", first), "optimizer") is not first:
            raise ValueError(
                f"{name} belongs to another optimizer: give the optimizer that it was built with"
                " first"
            )

    @property
    def counts_tokens(self) -> bool:
        """True if the rate is scaled by the tokens of a step, False if by its rows."""
        return self.reference is not None and self.reference.unit == "tokens"

    def set(
        self,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """Set the rate of the next ``optimizer.step()``. A collective if the rate is scaled.

        The rate applies to all steps until the next call, including retries. If other code writes
        ``lr`` before the step, that rate is scaled.

        Args:
            rows: number of rows in this rank's batch; needed if the reference is in rows.
            tokens: number of real tokens in this rank's batch; needed if the reference is in
                tokens.
            progress: progress before the step, as ``AdaptiveBatches.progress``; needed by the
                clocks ``samples`` and ``tokens``.

        Returns:
            The scaled rate of the first group as ``lr``, and ``beta2`` and ``weight_decay`` if they
            are scaled, of the first group with such a value.

        Raises:
            SettingError: an argument for the clock or the reference is missing; the schedule is not
                finite; or the optimizer has groups that the scheduler does not know.
        """
        if progress is None:
            if self._scheduler is not None and self._clock != "steps":
                remedy = (
                    "its clock is the completed part of training; give"
                    " set(progress=batches.progress)"
                )
                raise SettingError("lr_clock", self._clock, remedy)
            progress = Progress(steps=self._num_set)
        batch = 1
        if self._scales:
            name, own_batch = "rows", rows
            if self.counts_tokens:
                name, own_batch = "tokens", tokens
            if not isinstance(own_batch, int) or own_batch < 0:
                remedy = (
                    f"the rate was chosen for {self.reference}; give set({name}=...) of this step,"
                    " a whole number"
                )
                raise SettingError(name, own_batch, remedy)
            batch = sum(distributed.all_gather(own_batch))
        rates = self.apply(progress, batch=batch)
        # A call that raised does not count as a step.
        self._num_set += 1
        return rates

    def apply(self, progress: Progress, *, batch: int) -> dict[str, float]:
        """Set the rate of a step whose global batch is known; see :meth:`set`.

        Args:
            progress: progress before the step.
            batch: rows of the step on all ranks; real tokens if the rate :attr:`counts_tokens`.
        """
        if self._scheduler is not None:
            self._schedule(elapsed_steps(self._clock, progress))
        groups = self._optimizers[0].param_groups
        if self._scales:
            assert self.reference is not None
            batch = max(1, batch)
            reference = self.reference.amount
            scale = partial(
                scale_group,
                ratio=batch / reference,
                rate_factor=scale_learning_rate(1.0, batch, reference, self._lr_scaling),
                names=self._scaled_options,
            )
            # Each optimizer.step() applies the scale and undoes it afterwards.
            for optimizer in self._optimizers:
                scale_steps(optimizer, scale)
            # Copies with the scaled values, to report the rate of the step.
            groups = [group | scale(group) for group in groups]
        rates = [float(group["lr"]) for group in groups]
        if self._scheduler is not None:
            # The scheduler's get_last_lr() then returns the scaled rates.
            self._scheduler._last_lr = rates
        return {"lr": rates[0], **read_scaled_options(groups, self._scaled_options)}

    def _schedule(self, clock: float) -> None:
        """Write the rates that the scheduler gives at a time of its clock."""
        kind = type(self._scheduler).__name__
        factors = factors_at(self._scheduler, clock)
        num_groups = len(self._optimizers[0].param_groups)
        if num_groups != len(factors):
            remedy = (
                f"it was built for {len(factors)} parameter groups, and the optimizer has "
                f"{num_groups}; add groups before it is built"
            )
            raise SettingError("lr_scheduler", kind, remedy)
        if not all(map(math.isfinite, factors)):
            remedy = (
                f"at step {clock:g} it returns {factors}; give a function whose values are finite"
            )
            raise SettingError("lr_scheduler", kind, remedy)
        # The scheduler was built for the first optimizer.
        scheduled, *others = self._optimizers
        for group, base, factor in zip(
            scheduled.param_groups, self._scheduler.base_lrs, factors, strict=True
        ):
            write_rate(group, float(base) * factor)
        for optimizer in others:
            groups = optimizer.param_groups
            # If the scheduler does not know these groups, they follow the first one.
            own_factors = factors if len(groups) == len(factors) else factors[:1] * len(groups)
            for group, factor in zip(groups, own_factors, strict=True):
                # torch's schedulers keep the unscheduled rate of a group under this key.
                write_rate(group, group.setdefault("initial_lr", float(group["lr"])) * factor)

    def describe(self) -> str | None:
        """Describe the values that are scaled with the batch; None without any."""
        rules = {"lr": self._lr_scaling, **self._scaled_options}
        groups = self._optimizers[0].param_groups
        values = {"lr": self.base, **read_scaled_options(groups, self._scaled_options)}
        lines = [
            f"{name} {values[name]:g}: chosen for {self.reference} per step, scaled by {rule}"
            for name, rule in rules.items()
            if rule != "none"
        ]
        return "; ".join(lines) or None

    def describe_unscaled(self, batch: int) -> str | None:
        """Describe a rate that is not scaled although the batch has changed; None otherwise.

        Args:
            batch: current global batch in rows.
        """
        reference = self.reference
        if reference is None or reference.unit != "rows" or self._lr_scaling != "none":
            return None
        if batch == reference.amount:
            return None
        linear = scale_learning_rate(self.base, batch, reference.amount, "linear")
        root = scale_learning_rate(self.base, batch, reference.amount, "sqrt")
        stays = f"lr {self.base:g} stays, chosen for a global batch of {reference}, now {batch}"
        return f"{stays}: linear scaling would give {linear:g}, sqrt {root:g}"

    @property
    def base(self) -> float:
        """The learning rate of the first group before it is scheduled and scaled."""
        group = self._optimizers[0].param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, for a checkpoint."""
        return {
            "rule": self._lr_scaling,
            "total_steps": self._total_steps,
            "steps": self._num_set,
            "reference": self.reference and asdict(self.reference),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Raises:
            SettingError: the state is not that of an AdaptiveRate, or its `lr_scaling` or
                `reference_batch_size` differ.
        """
        check_state(state, ("rule", "reference", "steps"), owner="a rate")
        saved_reference = state["reference"] and ReferenceBatch(**state["reference"])
        own = {"lr_scaling": self._lr_scaling, "reference_batch_size": str(self.reference)}
        saved = {"lr_scaling": state["rule"], "reference_batch_size": str(saved_reference)}
        check_built_alike(own, saved, what="rate")
        self._num_set = state["steps"]
