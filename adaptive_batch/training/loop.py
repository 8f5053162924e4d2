"""What a training loop of one's own needs, put together: the largest batch that fits, steps that
grow, micro-batches, the learning rate.

    loop = AdaptiveLoop(
        model, optimizer, rows, collate=collate, mean_loss=mean_loss, batch_size="max"
    )
    for epoch in range(loop.progress.epoch, epochs):
        for step_rows in loop:
            result = loop.run(step_rows)
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive_batch._util import check_built_alike, check_state, check_whole, instance_of
from adaptive_batch.data import (
    AdaptiveBatches,
    DatasetAdapter,
    MicroBatchLimit,
    RowLength,
    Sampling,
)
from adaptive_batch.probe import ProbeResult
from adaptive_batch.schedules import Clock, Progress, Schedule

from .bound_search import ProbeOptions
from .loop_rate import LoopRate
from .loop_search import LoopSearch
from .loop_step import LoopStep
from .model_checks import check_parameters
from .options import StepOptions
from .row_step import RowStep
from .step_result import StepResult

if TYPE_CHECKING:
    from adaptive_batch.estimate import MemoryEstimate

log = logging.getLogger("adaptive_batch")


class AdaptiveLoop:
    """The rows of each step, and the gradients of their mean loss; the loop around them, and the
    optimizer's step, are the user's.

    Iterating hands out what is left of the current epoch, each row once, step by step; :meth:`run`
    leaves the gradients of a step and sets its learning rate. Several ranks, which must hold a
    model that `fully_shard` has divided, build and call it alike; each is handed its own rows.

    It is :class:`AdaptiveBatches`, :class:`AdaptiveStep` and :class:`AdaptiveRate` put together.
    Arguments that are keys of the configuration mean what docs/configuration.md says of them.

    Args:
        model: model on its device; its modules are those that it has in the first step.
        optimizer: optimizer of its parameters; the state of another that steps the rest is in no
            trial.
        dataset: map-style.
        collate: function that makes one padded batch of a list of rows, on the host.
        mean_loss: function that returns the loss of a batch on the device: a tensor of one number,
            averaged over its labels, whatever other rows are there.
        batch_size: rows of a step on one device, before a rule changes it; ``"max"`` for the most
            that fit, which :meth:`find_bound` finds before the first epoch.
        num_labels: function that returns how many labels a batch has that `mean_loss` averages
            over, or the sum of their weights; None for ``labels`` that are not -100, see
            :class:`AdaptiveStep`.
        row_length: function that returns the tokens of a row, or a number where all rows are alike;
            None for those of its ``tokens`` or ``input_ids``.
        batch_increase_function: ``f(epoch, batch_size) -> rows to add``, asked as an epoch starts,
            0 included.
        batch_size_schedule: ``rule(progress) -> rows of a step on one device``, asked each step.
        micro_batch_size: rows at once; None for the bound, and where none was sought, for all rows
            of a step.
        micro_batch_tokens: padded tokens at once, ``auto`` for what `objective` of
            :meth:`find_bound` takes; not together with `micro_batch_size`.
        lr_scheduler: a ``LambdaLR``, built for steps of `batch_size` rows; a batch that grows does
            not stretch it, see :class:`AdaptiveRate`. None for the rate that the optimizer holds
            before :meth:`run`, whoever sets it.
        lr_scaling: ``none``, ``linear`` or ``sqrt`` of global batch / `reference_batch_size`.
        reference_batch_size: global batch that the optimizer's rates belong to: rows, or
            ``"8192tok"``; None for `batch_size` on all ranks.
        sampling: order of rows, steps that hold tokens, and whether rules may pass the bound.
        options: how a step runs.

    Raises:
        SettingError: an argument cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], Any],
        mean_loss: Callable[[Any], torch.Tensor],
        batch_size: int | str,
        num_labels: Callable[[Any], float | torch.Tensor] | None = None,
        row_length: RowLength = None,
        batch_increase_function: Callable[[int, int], int] | None = None,
        batch_size_schedule: Schedule | None = None,
        micro_batch_size: int | str | None = None,
        micro_batch_tokens: int | str | None = None,
        lr_scheduler: LRScheduler | None = None,
        lr_scaling: str = "none",
        reference_batch_size: int | str | None = None,
        sampling: Sampling | None = None,
        options: StepOptions | None = None,
    ) -> None:
        sampling = instance_of(Sampling, "sampling", sampling)
        options = instance_of(StepOptions, "options", options)
        first_batch_size = _first_batch_size(batch_size)
        check_parameters(model, optimizer)
        if sampling.batch_tokens and micro_batch_tokens is None and micro_batch_size is None:
            micro_batch_tokens = "auto"
        self._optimizer = optimizer
        rows = DatasetAdapter(dataset, row_length)
        self._step = RowStep(
            model,
            rows,
            collate=collate,
            mean_loss=mean_loss,
            num_labels=num_labels,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            options=options,
        )
        self._batches = AdaptiveBatches(
            rows,
            first_batch_size,
            row_length=rows.length if Clock.from_config(options.lr_clock).counts_tokens else None,
            maximum=self._step.sizer,
            batch_increase_function=batch_increase_function,
            batch_size_schedule=batch_size_schedule,
            sampling=sampling,
        )
        self._rate = LoopRate(
            optimizer,
            lr_scheduler,
            self._batches,
            lr_scaling=lr_scaling,
            reference_batch_size=reference_batch_size,
            is_sought=batch_size == "max",
            options=options,
        )
        self._search = LoopSearch(
            self._step, optimizer, self._batches, self._rate, seeks_batch_size=batch_size == "max"
        )
        self._loop_step = LoopStep(
            model,
            optimizer,
            step=self._step,
            search=self._search,
            batches=self._batches,
            rate=self._rate,
            options=options,
        )
        self._built_with = {"batch_size": batch_size, **self._rate.built_with}

    # --- what fits

    def find_bound(
        self,
        *,
        device_memory: int | float | str | None = None,
        headroom: float | str = "auto",
        maximum: int = 4096,
        round_to_power_of_two: bool = False,
        objective: str = "throughput",
    ) -> ProbeResult:
        """Find the most of the longest rows whose whole training step fits; training is left as it
        was, bit for bit.

        Steps of more rows run as micro-batches, beside whose gradients fewer rows fit: the bound is
        of the batch as it is now. Call it after :meth:`load_state_dict` and after `batch_size` was
        set above what fits. The arguments are those of :class:`ProbeOptions`.

        Args:
            objective: what ``micro_batch_tokens="auto"`` takes: ``throughput``, the micro-batches
                that train most tokens a second within the bound, found by a few timed trials; or
                ``largest``, as much at once as fits.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: an argument cannot be used, or `micro_batch_size` is above what fits.
        """
        options = ProbeOptions(
            device_memory,
            headroom,
            maximum,
            round_to_power_of_two=round_to_power_of_two,
            objective=objective,
        )
        return self._search.find(options)

    def estimate(
        self,
        devices: Any,
        *,
        maximum: int = 4096,
        context: int | None = None,
        headroom: int | float | str = "auto",
    ) -> MemoryEstimate:
        """Estimate how many of the longest rows a step of this loop can hold on CUDA devices that
        are not here.

        The rows are collated as in training, on the host; `to_device` is not called. For the other
        arguments and errors see :func:`adaptive_batch.estimate_memory`.
        """
        return self._step.estimate(
            self._optimizer,
            devices,
            maximum=maximum,
            context=context,
            headroom=headroom,
        )

    # --- training

    @property
    def batch_size(self) -> int:
        """Rows of a step on one device; set it between epochs or after :meth:`load_state_dict`."""
        return self._batches.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._batches.set_batch_size(batch_size)

    @property
    def progress(self) -> Progress:
        """What training has consumed; it moves in :meth:`run`."""
        return self._batches.progress

    @property
    def limit(self) -> MicroBatchLimit:
        """Limit of one micro-batch now; lowered if memory runs out, and tried again later."""
        return self._step.sizer.limit(self._batches.rows_on_largest_rank(self.batch_size))

    @property
    def max_batch_size(self) -> int | None:
        """The most rows that were tried and fit at once; None before :meth:`find_bound`."""
        return self._step.sizer.max_batch_size

    @property
    def num_out_of_memory(self) -> int:
        """Steps that were run again after running out of memory."""
        return self._step.sizer.num_out_of_memory

    @property
    def learning_rate(self) -> float | None:
        """The rate of the last step, of the optimizer's first group; None before :meth:`run`."""
        return self._loop_step.learning_rate

    @property
    def is_trial(self) -> bool:
        """Whether what runs now is a trial, and not training."""
        return self._step.step.is_trial

    def __iter__(self) -> Iterator[list[Any]]:
        """Hand out this rank's rows of each step that is left of the epoch, also ahead of `run`."""
        self._search.find_if_due()
        yield from self._loop_step.steps()

    def __len__(self) -> int:
        """Return the steps that are left of the current epoch, as the rules answer now."""
        self._search.find_if_due()
        return self.num_steps(self.progress.epoch + 1)

    def __bool__(self) -> bool:
        """Return True, at the end of training too."""
        return True

    def num_steps(self, epochs: int) -> int:
        """Return the optimizer steps that are left of so many epochs, as the rules answer now."""
        return self._batches.planner.num_steps(self.progress, epochs)

    def run(self, rows: Sequence[Any]) -> StepResult:
        """Leave in the gradients the mean over the labels of a step, clipped, and set the learning
        rate of ``optimizer.step()``.

        A step that runs out of memory is run again with a smaller limit. Gradients must be clear
        before. The step counts as done: ``optimizer.step()`` and ``optimizer.zero_grad()`` are to
        follow. Where it raises, the same rows can be run again.

        Args:
            rows: rows of the step that was handed out first of those that have not been run.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            NonfiniteLossError: the loss or the gradients are NaN or infinite, with
                ``on_nonfinite_loss="stop"``; no gradient is left.
            RankLostError: out of memory on this rank where the others cannot be told; end the
                process, so that they end too.
            SettingError: the step has more rows than the bound, which was tried for steps of one
                micro-batch; or the loss or its labels are none, or it is another loss when it is
                split.
            ValueError: other rows than were handed out, or gradients are there.
        """
        return self._loop_step.run(rows)

    # --- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return where training is, as plain values, the same on all ranks; to be taken after
        ``optimizer.step()``.

        Weights, the optimizer's state and that of random numbers are the user's to save.

        Raises:
            ValueError: the gradients of the last step wait for ``optimizer.step()``, which a run
                that resumes would not take.
        """
        return {**self._loop_step.state_dict(), "built_with": self._built_with}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in a loop that was built as the saved one was, before
        :meth:`find_bound` or without it.

        A bound that was found before is kept; otherwise it is the saved one. Either may have been
        tried for smaller steps than the state brings: :meth:`run` then refuses, and asks for
        :meth:`find_bound`. On another number of ranks a step has as many rows as before.

        Raises:
            SettingError: rows would come in another order, the rate would follow another batch, or
                the state is none of a loop.
        """
        check_state(state, ("batches", "step", "rate", "built_with"), owner="a loop")
        check_built_alike(
            self._built_with, state["built_with"], what="loop", sets_batch="set loop.batch_size"
        )
        self._loop_step.load_state_dict(state)


def _first_batch_size(batch_size: int | str) -> int:
    """Return the batch that training begins with; one row stands for the maximum until it is found.

    Raises:
        SettingError: it is neither a whole number nor max.
    """
    if batch_size == "max":
        return 1
    remedy = "give a whole number, 1 or more, or max for the most that fit"
    return check_whole("batch_size", batch_size, remedy=remedy)
