"""A batch sampler whose batches grow: row numbers for a script's own DataLoader, with workers,
resumable at any step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, cast

from torch.utils.data import BatchSampler

from adaptive_batch import distributed
from adaptive_batch._util import (
    check_built_alike,
    check_state,
    check_whole,
    instance_of,
)
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Progress,
    Schedule,
    check_rule,
    needs_noise_scale,
    reads_tokens,
)

from .batches import Batches, Event, Sizer
from .dataset import DatasetAdapter, RowLength
from .layouts import MicroBatchLayout, MicroBatchLimit
from .sampling import YIELDS_BATCHES, Batching, SamplerOrder, Sampling

log = logging.getLogger("adaptive_batch")


class NoSizer:
    """Stand-in for the sizer of a step: a largest number of rows for rules.

    Args:
        maximum: largest number of rows; None without one.
        batch_tokens: tokens of a step on one device; None if it holds rows.
    """

    def __init__(self, maximum: int | None, batch_tokens: int | None) -> None:
        self.max_batch_size = maximum
        self.layout = MicroBatchLayout()
        self._batch_tokens = batch_tokens

    def limit(self, batch_size: int) -> MicroBatchLimit:
        if self._batch_tokens is not None:
            # Ranks balance their rows by tokens.
            return MicroBatchLimit(self._batch_tokens, "tokens")
        return MicroBatchLimit(batch_size)


class AdaptiveBatches(Batches):
    """Batch sampler whose batches grow. It yields this rank's row numbers for each remaining step
    of the current epoch. Each row occurs once per epoch.

    Use it as ``DataLoader(dataset, batch_sampler=batches, num_workers=8)``. The loader may read
    batches ahead. Call :meth:`step` after each batch to count it as used, so that a resumed run
    neither loses nor repeats batches that were read ahead. With gradient accumulation, also call it
    after each batch, but save a state only after ``optimizer.step()``.

    With several ranks, each rank yields its own rows of the global step, which has `batch_size`
    rows per rank. No other sampler may shard these rows again.

    Args:
        dataset: map-style dataset; rows are read only if lengths are needed.
        batch_size: number of rows in a step on one device, before a rule changes it.
        row_length: function that returns the number of tokens in a row, or a number if all rows
            have the same length. None: the length of ``tokens`` or ``input_ids``. The dataset is
            read once to measure lengths if steps are by tokens, the order is ``seqlen``, a schedule
            counts tokens, or this argument is given. In the last case, ``progress.tokens`` is
            counted for your own schedule or for a rate whose clock counts tokens.
        maximum: maximum number of rows that a rule may set on one device: a number, or the sizer of
            an :class:`AdaptiveStep`, whose `max_batch_size` applies once it is found. None: no
            limit.
        sampler: sampler of row numbers that determines the order, on one rank only. It is read once
            at the start of each epoch, after ``set_epoch``, and yields as many rows as its length
            is now. A resumed run repeats its draws.
        batch_increase_function: ``f(epoch, batch_size) -> rows to add``, called at the start of
            each epoch, including epoch 0.
        batch_size_schedule: ``rule(progress) -> rows of a step on one device``, called for each
            step.
        sampling: order of rows, and steps that hold tokens.

    Attributes:
        batch_size: current rows of a step on one device.

    Raises:
        SettingError: an argument cannot be used.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        row_length: RowLength = None,
        maximum: int | Sizer | None = None,
        sampler: Any = None,
        batch_increase_function: Callable[[int, int], int] | None = None,
        batch_size_schedule: Schedule | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        sampling = instance_of(Sampling, "sampling", sampling)
        batching = Batching(
            batch_size=batch_size,
            batch_increase_function=batch_increase_function,
            batch_size_schedule=batch_size_schedule,
            **asdict(sampling),
        )
        if batch_increase_function is not None:
            check_rule("batch_increase_function", batch_increase_function)
        if batch_size_schedule is not None:
            check_rule("batch_size_schedule", batch_size_schedule)
        if needs_noise_scale(batch_size_schedule):
            remedy = (
                "no noise scale is measured here for it to follow; give steps, linear_ramp or"
                " ramp_by_doubling"
            )
            raise SettingError("batch_size_schedule", batch_size_schedule, remedy)
        sizer = _sizer_of(maximum, sampling.batch_tokens)
        rows = (
            dataset if isinstance(dataset, DatasetAdapter) else DatasetAdapter(dataset, row_length)
        )
        self._sampler = None
        if sampler is not None:
            _check_sampler(sampler, sampling)
            self._sampler = SamplerOrder(sampler, len(rows))
        self._listeners: list[Event] = []
        # Steps that were done when iteration last reached the end of an epoch.
        self._steps_at_end: int | None = None
        super().__init__(
            rows,
            batching,
            sizer,
            counts_tokens=row_length is not None or reads_tokens(batch_size_schedule),
            order=self._sampler,
            in_script=True,
            event=self.report,
        )
        self.begin_with(batch_size)
        # A run may resume only with the same order of rows, which these settings decide.
        settings = asdict(sampling)
        # Like `maximum`, `grow_beyond_maximum` does not change the order, so a run may change it.
        del settings["grow_beyond_maximum"]
        self._built_with = {
            "batch_size": batch_size,
            **settings,
            "dataset": f"{len(rows)} rows",
            "sampler": None if sampler is None else type(sampler).__name__,
        }

    def tell(self, event: Event) -> None:
        """Add a listener ``event(kind, message, **facts)`` for decisions about batches."""
        self._listeners.append(event)

    def report(self, kind: str, message: str, *, prints: bool = True, **facts: Any) -> None:
        """Log an event, and pass it to the listeners."""
        if prints and distributed.is_rank_zero():
            log.info("%s", message)
        for listener in self._listeners:
            listener(kind, message, prints=False, **facts)

    def set_batch_size(self, batch_size: int) -> None:
        """Set the batch size, between two epochs or after :meth:`load_state_dict`.

        Raises:
            SettingError: a schedule sets the batch size.
        """
        if self.batching.batch_size_schedule is not None:
            remedy = "batch_size_schedule decides what a step holds; set one of them"
            raise SettingError("batch_size", batch_size, remedy)
        super().set_batch_size(check_whole("batch_size", batch_size))

    def rows_on_largest_rank(self, batch_size: int) -> int:
        """Return the rows of a step on the rank with most; the number of ranks may differ from that
        at the beginning of training.
        """
        return -(-batch_size * self.ranks // distributed.data_parallel_size())

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()
        # A loader may read a whole epoch ahead, but not two.
        if self._progress.steps == self._steps_at_end:
            log.warning(
                "two epochs were read without a step() between them, so the epoch is repeated:"
                " call step() after each batch"
            )
        self._steps_at_end = self._progress.steps

    def __len__(self) -> int:
        """Return the number of remaining steps of this epoch, as the rules answer now."""
        return self.num_steps(self._progress.epoch + 1)

    def num_steps(self, epochs: int) -> int:
        """Return the number of remaining steps until `epochs` epochs are done, according to the
        current results of the rules.
        """
        return self.count_steps(epochs, counts_tokens=self._counts_tokens)

    def step(self) -> None:
        """Count the oldest batch that was handed out as used. Call it after ``optimizer.step()``.

        Raises:
            ValueError: no batch is waiting.
        """
        self.done()
        if self.is_over:
            self.end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and the plan's state as plain values, the same on all ranks. Save
        them after ``optimizer.step()``.
        """
        return {
            **super().state_dict(),
            "order": None if self._sampler is None else self._sampler.state_dict(),
            "built_with": self._built_with,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in batches that were built with the same arguments.

        Raises:
            SettingError: the order of rows would change, or the state does not belong to
                AdaptiveBatches.
        """
        check_state(state, ("progress", "steps", "order", "built_with"), owner="batches")
        check_built_alike(
            self._built_with, state["built_with"], what="state", sets_batch="call set_batch_size()"
        )
        if self._sampler is not None:
            self._sampler.load_state_dict(state["order"])
        self.resume(Progress(**state["progress"]), state["steps"])
        # resume() has set the maximum of the saved run. In a script, a schedule is limited by the
        # maximum of this device alone.
        self.saved_maximum = 0


def _sizer_of(maximum: Any, batch_tokens: int | None) -> Sizer:
    """Return `maximum` if it is a sizer, else a sizer for this number of rows, or for no limit."""
    if hasattr(maximum, "max_batch_size"):
        return cast(Sizer, maximum)
    if maximum is not None:
        remedy = "give a whole number of rows, or the sizer of an AdaptiveStep"
        check_whole("maximum", maximum, remedy=remedy)
    return NoSizer(maximum, batch_tokens)


def _check_sampler(sampler: Any, sampling: Sampling) -> None:
    """Raise SettingError if the order of a sampler cannot be used."""
    name = type(sampler).__name__
    if distributed.data_parallel_size() > 1:
        remedy = (
            "on several ranks leave it out: rows are dealt to them here, in the order of torch's"
            " DistributedSampler"
        )
        raise SettingError("sampler", name, remedy)
    if sampling.batch_tokens is not None or sampling.sample_order != "dataloader":
        raise SettingError(
            "sampler",
            name,
            "batch_tokens and sample_order have an order of their own; give one of them",
        )
    if isinstance(sampler, BatchSampler):
        raise SettingError("sampler", name, YIELDS_BATCHES)
    has_length = hasattr(sampler, "__iter__") and hasattr(sampler, "__len__")
    if isinstance(sampler, str) or not has_length or not len(sampler):
        remedy = "give row numbers with a length above 0, such as torch's RandomSampler"
        raise SettingError("sampler", name, remedy)
