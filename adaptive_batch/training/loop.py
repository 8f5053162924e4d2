"""A training loop with batches that grow, steps that fit, and a learning rate that follows.

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

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from adaptive_batch import distributed
from adaptive_batch._util import check_built_alike, check_state, check_whole, count, instance_of
from adaptive_batch.data import (
    AdaptiveBatches,
    DatasetAdapter,
    MicroBatchLimit,
    RowLength,
    Sampling,
    mean_rows,
)
from adaptive_batch.memory import RandomState
from adaptive_batch.probe import ProbeResult
from adaptive_batch.schedules import (
    Progress,
    ReferenceBatch,
    Schedule,
    Seesaw,
    rate_rule,
    unwrap,
)

from .bound_search import ProbeOptions
from .model_checks import check_gradients_are_clear, check_parameters
from .options import StepOptions
from .rate import AdaptiveRate
from .row_step import RowStep
from .step import RankReport
from .step_result import NonfiniteSteps, StepResult

if TYPE_CHECKING:
    from adaptive_batch.estimate import MemoryEstimate


class AdaptiveLoop:
    """Yields the rows of each step, computes the gradients of their mean loss, and sets the
    learning rate. Your script iterates over the loop and steps the optimizer.

    Iterating yields the remaining steps of the current epoch. Each row is in one step. :meth:`run`
    computes the gradients of a step and sets its learning rate. On several ranks, shard the model
    with `fully_shard`. All ranks create and call the loop together, and each rank gets its own
    rows.

    The loop combines :class:`AdaptiveBatches`, :class:`AdaptiveStep` and :class:`AdaptiveRate`. An
    argument with the name of a key in docs/configuration.md has the meaning of that key.

    Args:
        model: model on its device. Do not add modules to it after the first step.
        optimizer: optimizer of the model's parameters. Trials do not contain the state of other
            optimizers.
        dataset: map-style dataset.
        collate: function that combines a list of rows into one padded batch on the host.
        mean_loss: function that returns the loss of a batch on the device: a tensor with one
            element, the mean over the labels in the batch.
        batch_size: number of rows in a step on one device, before a rule changes it. ``"max"``: the
            maximum number that fits, which :meth:`find_bound` finds before the first epoch.
        num_labels: function that returns the number of labels that `mean_loss` averages over, or
            the sum of their weights. None: the ``labels`` that are not -100, as in
            :class:`AdaptiveStep`.
        row_length: function that returns the number of tokens in a row, or a number if all rows
            have the same length. None: the length of ``tokens`` or ``input_ids``.
        batch_increase_function: function ``f(epoch, batch_size)`` that returns the number of rows
            to add. It is called at the start of each epoch, including the first.
        batch_size_schedule: function ``rule(progress)`` that returns the number of rows in a step
            on one device. It is called before each step.
        micro_batch_size: maximum number of rows that run at once. None: the bound, or all rows of a
            step before a search.
        micro_batch_tokens: maximum number of padded tokens that run at once. ``auto``: the result
            of :meth:`find_bound` (see `objective` there). Give either this argument or
            `micro_batch_size`.
        lr_scheduler: a ``LambdaLR`` for steps of `batch_size` rows. A growing batch does not
            stretch it; see :class:`AdaptiveRate`. None: the rate that the optimizer has before
            :meth:`run`.
        lr_scaling: ``none``, ``linear`` or ``sqrt`` of global batch / `reference_batch_size`.
        reference_batch_size: global batch for which the optimizer's rates were chosen: a number of
            rows, or ``"8192tok"``. None: `batch_size` on all ranks.
        sampling: order of rows, steps that hold tokens, and whether rules may exceed the bound.
        options: options of a step.

    Attributes:
        learning_rate: rate of the last step in the optimizer's first group; None before the first
            step.

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
        check_parameters(model, optimizer)
        # With "max", the batch size is 1 until it is found.
        rows_of_step = 1
        if batch_size != "max":
            rows_of_step = check_whole(
                "batch_size",
                batch_size,
                remedy="give a whole number, 1 or more, or max for the most rows that fit",
            )
        if sampling.batch_tokens and micro_batch_tokens is None and micro_batch_size is None:
            micro_batch_tokens = "auto"
        rows = DatasetAdapter(dataset, row_length)
        self._options = options
        self._step = RowStep(
            model,
            optimizer,
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
            rows_of_step,
            row_length=rows.length if options.lr_clock == "tokens" else None,
            maximum=self._step.sizer,
            batch_increase_function=batch_increase_function,
            batch_size_schedule=batch_size_schedule,
            sampling=sampling,
        )
        if isinstance(batch_size_schedule, Seesaw):
            self._batches.couple(lr_scheduler, lr_clock=options.lr_clock)
        self._batches.tell(options.report)
        # Without a generator of its own, DataLoader would draw a global random number each epoch.
        self._loader: DataLoader[Any] = DataLoader(
            rows, batch_sampler=self._batches, collate_fn=list, generator=torch.Generator()
        )
        # Rows of each step that was yielded and has not been run, the oldest first.
        self._waiting: deque[list[Any]] = deque()
        self._has_reported_start = False
        lr_scaling = rate_rule(batch_size_schedule, lr_scaling)
        reference: ReferenceBatch | int | str | None = reference_batch_size
        if reference is None and batch_size != "max":
            reference = self._batches.batching.global_batch(distributed.data_parallel_size())
        self._rate = AdaptiveRate(
            optimizer,
            lr_scheduler,
            lr_scaling=lr_scaling,
            reference_batch_size=reference,
            lr_clock=options.lr_clock,
            scale_with_batch=options.scale_with_batch,
        )
        self.learning_rate: float | None = None
        self._nonfinite = NonfiniteSteps(
            options.on_nonfinite_loss, self._step.drop_gradients, event=options.report
        )
        self._built_with = {
            "batch_size": batch_size,
            "reference_batch_size": reference_batch_size,
            "lr_scaling": lr_scaling,
            "lr_clock": options.lr_clock,
            "scale_with_batch": dict(options.scale_with_batch or {}),
        }
        # True from run() to optimizer.step(), which is not seen if an optimizer has no hooks, such
        # as torchao's CPUOffloadOptimizer.
        self._awaits_optimizer = False
        with suppress(AttributeError):
            unwrap(optimizer, "optimizer").register_step_post_hook(self._note_optimizer_step)

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
        """Find the maximum number of the longest rows whose whole training step fits. Weights,
        optimizer, gradients and RNG state are restored bit for bit.

        A larger step runs as several micro-batches. Fewer rows fit then, because gradients are in
        memory, so the bound depends on the batch size. Call this method after
        :meth:`load_state_dict`, and whenever you have set `batch_size` above the bound. See
        :class:`ProbeOptions` for the other arguments.

        Args:
            objective: criterion for the micro-batches of ``micro_batch_tokens="auto"``.
                ``throughput``: the most tokens per second in a few timed trials. ``largest``: the
                largest micro-batches that fit.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: an argument cannot be used, or `micro_batch_size` is above what fits.
        """
        batches = self._batches
        ranks = distributed.data_parallel_size()
        options = ProbeOptions(
            device_memory,
            headroom,
            # No more rows are tried than a rank has in an epoch.
            min(check_whole("maximum", maximum), max(1, batches.num_rows // ranks)),
            round_to_power_of_two=round_to_power_of_two,
            objective=objective,
        )
        step_rows = timed_rows = batches.rows_on_largest_rank(self.batch_size)
        # Reading a row of some datasets draws random numbers.
        with RandomState(self._step.memory.device):
            if batches.batching.batch_tokens:
                timed_rows = mean_rows(batches.batching.batch_tokens, self._step.dataset.lengths)
            result = self._step.find_bound(
                options,
                order=batches.order,
                # If training began on more ranks, a step of this rank may have more rows than the
                # bound.
                accumulates=batches.batching.grow_beyond_maximum or batches.ranks > ranks,
                step_rows=step_rows,
                timed_rows=timed_rows,
            )
        if self._built_with["batch_size"] == "max" and not self.progress.steps:
            batches.begin_with(result.batch_size)
        return result

    def estimate(
        self,
        devices: Any,
        *,
        maximum: int = 4096,
        context: int | None = None,
        headroom: int | float | str = "auto",
    ) -> MemoryEstimate:
        """Estimate how many of the longest rows fit in a training step on CUDA devices that are not
        available.

        Rows are collated on the host, as in training; `to_device` is not called. See
        :func:`adaptive_batch.estimate_memory` for the other arguments and errors.
        """
        return self._step.estimate(devices, maximum=maximum, context=context, headroom=headroom)

    # --- training

    @property
    def batch_size(self) -> int:
        """Number of rows in a step on one device. Set it between epochs or after
        :meth:`load_state_dict`.
        """
        return self._batches.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        self._batches.set_batch_size(batch_size)

    @property
    def progress(self) -> Progress:
        """Progress of training, after the last step that :meth:`run` ran."""
        return self._batches.progress

    @property
    def limit(self) -> MicroBatchLimit:
        """Current micro-batch limit. An OOM lowers it for some steps."""
        return self._step.sizer.limit(self._batches.rows_on_largest_rank(self.batch_size))

    @property
    def max_batch_size(self) -> int | None:
        """Maximum number of rows that fit at once, found by :meth:`find_bound`; None before the
        search.
        """
        return self._step.sizer.max_batch_size

    @property
    def num_out_of_memory(self) -> int:
        """Number of OOMs in training steps so far."""
        return self._step.sizer.num_out_of_memory

    @property
    def is_trial(self) -> bool:
        """True while a trial is running instead of training."""
        return self._step.is_trial

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield this rank's rows of each remaining step of the epoch. A script may take several
        steps before it runs the first.
        """
        self._find_batch_size()
        self._waiting.clear()
        for rows in self._loader:
            if self._batches.batching.batch_size_schedule is not None:
                own_tokens = sum(map(self._step.dataset.length, rows))
                self._batches.count_tokens(sum(distributed.all_gather(own_tokens)))
            self._waiting.append(rows)
            yield rows

    def __len__(self) -> int:
        """Return the remaining steps of the current epoch."""
        return self.num_steps(self.progress.epoch + 1)

    def num_steps(self, epochs: int) -> int:
        """Return the number of remaining optimizer steps in `epochs` epochs. Rules that depend on
        training may change this number.
        """
        self._find_batch_size()
        return self._batches.count_steps(epochs)

    def run(self, rows: Sequence[Any]) -> StepResult:
        """Compute the gradients of the mean loss over the labels of a step, clip them, and set the
        learning rate of ``optimizer.step()``.

        A step that runs out of memory runs again with a smaller limit. Clear the gradients before
        the call. The step then counts as done, so call ``optimizer.step()`` and
        ``optimizer.zero_grad()`` next. After an error, the same rows can be run again.

        Args:
            rows: rows of the oldest step that was yielded and has not run.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            NonfiniteLossError: the loss or the gradients are NaN or infinite, with
                ``on_nonfinite_loss="stop"``. Gradients are cleared.
            RankLostError: this rank ran out of memory and cannot notify the others. End the
                process, so that the others end too.
            SettingError: the step has more rows than the bound, which was tried without the
                gradients of earlier micro-batches; the loss or its labels cannot be used; or
                splitting changes the loss.
            ValueError: the rows are not those of the next step, or gradients are not cleared.
        """
        self._check_rows_of_step(rows)
        if not self._has_reported_start:
            self._report_start()
        planned = self._batches.oldest
        began = time.perf_counter()
        result = self._step.run(
            rows,
            RankReport(
                batch_size=self._batches.rows_on_largest_rank(planned.progress.batch),
                num_rows=len(planned.numbers),
                requested=planned.progress.batch,
            ),
        )
        batch = result.tokens if self._rate.counts_tokens else result.rows
        rates = self._rate.apply(self.progress, batch=batch)
        self.learning_rate = rates["lr"]
        self._nonfinite.drop_if_nonfinite(result, planned.progress, lr=rates["lr"])
        self._awaits_optimizer = True
        self._waiting.popleft()
        progress = self._batches.done(tokens=result.tokens)
        record = result.record(
            progress,
            numbers=planned.numbers,
            seconds=time.perf_counter() - began,
            rates=rates,
            num_out_of_memory=self.num_out_of_memory,
        )
        self._options.report("step", "", prints=False, **record)
        if self._batches.is_over:
            message, facts = self._batches.describe_epoch()
            self._batches.report("epoch", message, **facts)
            self._batches.end_epoch()
        return result

    def _check_rows_of_step(self, rows: Sequence[Any]) -> None:
        """Raise if the rows are not those of the next step."""
        expected = self._waiting[0] if self._waiting else []
        # A script may run copies of the expected rows, but not the rows of a later step.
        ids = [id(row) for row in rows]
        ids_of_steps = [[id(row) for row in step] for step in self._waiting]
        is_later_step = ids in ids_of_steps and ids != ids_of_steps[0]
        if not self._waiting or len(rows) != len(expected) or is_later_step:
            raise ValueError(
                f"these {len(rows)} rows are not those of the next step, which has {len(expected)};"
                " run each step once, in the order of the loop"
            )

    def _report_start(self) -> None:
        """Report the start or the resume of training."""
        self._has_reported_start = True
        progress = self.progress
        num_rows = len(self._step.dataset)
        self._batches.report(
            "start",
            f"training from epoch {progress.epoch}, step {progress.steps}, on"
            f" {count(num_rows, 'row')}",
            resumed=bool(progress.steps),
            rows=num_rows,
            ranks=distributed.world_size(),
            progress=progress.state_dict(),
        )

    def _find_batch_size(self) -> None:
        """Find the batch size of training if it is ``"max"`` and not known."""
        if self._built_with["batch_size"] == "max" and self.max_batch_size is None:
            self.find_bound()

    def _note_optimizer_step(self, *_: Any) -> None:
        self._awaits_optimizer = False

    # --- resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the progress and all state of the loop as plain values, the same on all ranks.
        Call it after ``optimizer.step()``; if the optimizer has no hooks, after ``zero_grad()``.

        Your script saves the weights, the optimizer state and the RNG state.

        Raises:
            ValueError: the gradients of the last step were neither applied nor cleared; a resumed
                run would lose this step.
        """
        if self._awaits_optimizer:
            check_gradients_are_clear(self._step.model)
        return {
            "batches": self._batches.state_dict(),
            "step": self._step.state_dict(),
            "rate": self._rate.state_dict(),
            "built_with": self._built_with,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state. First create the loop with the same arguments.

        A bound that this loop has found is kept. Otherwise, the saved bound is used. If the steps
        in the state are larger than the steps for which the bound was found, :meth:`run` raises;
        call :meth:`find_bound` again. On a different number of ranks, a step keeps its number of
        rows.

        Raises:
            SettingError: the order of rows or the rate would change, or the state does not belong
                to a loop.
        """
        check_state(state, ("batches", "step", "rate", "built_with"), owner="a loop")
        check_built_alike(
            self._built_with, state["built_with"], what="loop", sets_batch="set loop.batch_size"
        )
        self._batches.load_state_dict(state["batches"])
        self._waiting.clear()
        self._has_reported_start = False
        self._step.load_state_dict(state["step"])
        if state["rate"]["reference"]:
            # The reference depends on the number of ranks at the start of training.
            self._rate.reference = ReferenceBatch(**state["rate"]["reference"])
        self._rate.load_state_dict(state["rate"])
