"""The learning rate of a loop, which belongs to the batch that the loop is configured with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive_batch import distributed
from adaptive_batch.data import AdaptiveBatches
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Clock, Reference, Seesaw, rate_rule

from .options import StepOptions
from .rate import AdaptiveRate

log = logging.getLogger("adaptive_batch")


class LoopRate(AdaptiveRate):
    """The rate of steps whose batches are known: it belongs to the configured batch, unless another
    one is named, and stays with that where training resumes on other ranks.

    Args:
        optimizer: see :class:`AdaptiveRate`.
        lr_scheduler: see :class:`AdaptiveRate`.
        batches: batches of the steps; a schedule of theirs that follows the rate is coupled to it.
        lr_scaling: see :class:`AdaptiveRate`; ``sqrt`` with `seesaw`.
        reference_batch_size: global batch that the rates belong to; None for the configured one.
        is_sought: whether the batch is what a search will find, so that it is not configured.
        options: clock of the rate, and what else follows the batch.

    Raises:
        SettingError: an argument cannot be used.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None,
        batches: AdaptiveBatches,
        *,
        lr_scaling: str,
        reference_batch_size: int | str | None,
        is_sought: bool,
        options: StepOptions,
    ) -> None:
        if isinstance(batches.planner.batching.batch_size_schedule, Seesaw):
            batches.couple(lr_scheduler, lr_clock=options.lr_clock)
        self._planner = batches.planner
        lr_scaling = rate_rule(self._planner.batching.batch_size_schedule, lr_scaling)
        if is_sought and lr_scaling != "none" and reference_batch_size is None:
            remedy = (
                "with batch_size='max' it is not known before a search; give the global batch that"
                " lr was chosen for"
            )
            raise SettingError("reference_batch_size", None, remedy)
        self._is_of_configured = reference_batch_size is None and not is_sought
        clock = Clock.from_config(options.lr_clock)
        reference: Reference | int | str | None = reference_batch_size
        if self._is_of_configured:
            reference = self._planner.batching.global_batch(distributed.data_parallel_size())
        super().__init__(
            optimizer,
            lr_scheduler,
            lr_scaling=lr_scaling,
            reference_batch_size=reference,
            lr_clock=clock,
            scale_with_batch=options.scale_with_batch,
        )
        self.built_with: Mapping[str, Any] = {
            "reference_batch_size": reference_batch_size,
            "lr_scaling": lr_scaling,
            "lr_clock": str(clock),
            "scale_with_batch": dict(options.scale_with_batch or {}),
        }
        self._described_batch = self._planner.batch.batch_size

    def describe_batch(self) -> None:
        """Log once of each batch size how the rate stands to it, where nothing scales the rate."""
        planner = self._planner
        if planner.batch.batch_size == self._described_batch:
            return
        self._described_batch = planner.batch.batch_size
        # The configured batch, or what the first search has found.
        assert planner.batch.first_batch_size is not None, "AdaptiveBatches begins with it"
        line = self.describe_unscaled(
            planner.batch.batch_size * planner.ranks,
            configured=planner.batch.first_batch_size * planner.ranks,
        )
        if line and distributed.is_rank_zero():
            log.info("%s", line)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, once the batches have resumed from theirs."""
        super().load_state_dict(state)
        if self._is_of_configured:
            self.refer_to(self._planner.batching.global_batch(self._planner.ranks))
