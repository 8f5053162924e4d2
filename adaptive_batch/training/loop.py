"""What a training loop of one's own needs, put together: the bound, steps that grow, micro-batches, the learning rate.

loop = AdaptiveLoop(model, optimizer, rows, collate=collate, mean_loss=mean_loss, batch_size=8, batch_increase_function=grow)
loop.find_bound()
for epoch in range(loop.progress.epoch, epochs):
    for step_rows in loop:
        result = loop.run(step_rows)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from adaptive_batch import distributed
from adaptive_batch._torch import disable_current_modes
from adaptive_batch._util import check_bool, check_share, check_whole
from adaptive_batch.data import (
    IGNORE_INDEX,
    KINDS,
    LONG_ROWS,
    ORDERS,
    Batching,
    DatasetAdapter,
    MicroBatchLayout,
    MicroBatchLimit,
    RowLength,
    StepPlanner,
    check_loss,
    label_tokens,
    move_to_device,
)
from adaptive_batch.distributed import Sharding, reshard
from adaptive_batch.errors import NonfiniteLossError, SettingError
from adaptive_batch.estimate import CONTEXT_BYTES, FakeDevice, MemoryEstimate, estimate_step
from adaptive_batch.memory import DeviceMemory, RandomState, check_device_memory, device_memory
from adaptive_batch.probe import ProbeResult
from adaptive_batch.schedules import (
    RULES,
    UNITS,
    Clock,
    Progress,
    Schedule,
    Seesaw,
    check_scaled,
    needs_noise_scale,
    parse_reference,
    rate_rule,
    schedule_of,
)

from .agreement import Question
from .bound_search import BoundSearch, ProbeOptions, find_in_step
from .micro_batch_runner import MicroBatchRunner, RowLoss, StepResult, TriedRows
from .model_checks import (
    check_gradients_are_clear,
    check_parameters,
    check_ranks,
    has_batch_norm,
    is_compiled,
    is_replicated,
)
from .nonfinite import ON_NONFINITE_LOSS, NonfiniteSteps, norm_to_clip
from .packing import pack_rows
from .parts import whole_count
from .sizing import LimitChange, MicroBatchSizer, OOMPolicy
from .step_rate import StepRate
from .throughput_search import Choices
from .trials import WorstRows

log = logging.getLogger("adaptive_batch")

__all__ = ["AdaptiveLoop", "label_tokens"]

_MEMORY_REMEDIES = (
    "shorten the rows, recompute activations (torch.utils.checkpoint), use an optimizer with less state or a chunked loss, "
    "or allow more memory"
)


@dataclass(frozen=True)
class Sampling:
    """In which order rows come, and steps that hold tokens.

    Attributes:
        shuffle: with the order ``dataloader``, take the rows in a new order in each epoch.
        seed: of the order.
        sample_order: ``dataloader``, ``random``, or ``seqlen``: sorted by length.
        sample_window: rows within which ``seqlen`` sorts; None for the whole dataset.
        batch_tokens: tokens of a step on one device, in place of `batch_size` rows; None for rows.
        min_rows_per_batch, max_rows_per_batch: of a step by tokens.
        long_rows: what becomes of a row above `batch_tokens`: ``error``, ``drop`` or ``alone``.

    Raises:
        SettingError: a value cannot be used.
    """

    shuffle: bool = True
    seed: int = 0
    sample_order: str = "dataloader"
    sample_window: int | None = None
    batch_tokens: int | None = None
    min_rows_per_batch: int = 1
    max_rows_per_batch: int | None = None
    long_rows: str = "error"

    def __post_init__(self) -> None:
        _check_choice("sample_order", self.sample_order, ORDERS)
        _check_choice("long_rows", self.long_rows, LONG_ROWS)
        if self.batch_tokens is not None:
            check_whole("batch_tokens", self.batch_tokens)


@dataclass(frozen=True)
class StepOptions:
    """How a step runs.

    Attributes:
        max_grad_norm: clip the norm of all gradients to this; None clips nothing.
        to_device: gives a batch on the device; None moves the tensors in mappings and sequences, and what has ``to``.
        on_out_of_memory: ``shrink`` runs a step again with a smaller limit, ``raise`` lets the error through.
        oom_policy: decides how the limit of a micro-batch shrinks and grows back; None for :class:`OOMPolicy` as it is.
        sync_gradients_every_micro_batch: False keeps unsharded gradients until the last micro-batch.
        memory: of the model's device; None asks torch.
        on_nonfinite_loss: of a step whose loss is NaN or infinite ``warn`` logs a line; ``skip`` and ``stop`` look at the norm of
            its gradients too; ``skip`` leaves no gradients, so that ``optimizer.step()`` changes nothing, and ``stop`` raises.
        micro_batch_layout: ``padded``, ``grouped`` or ``packed``; None for padded, or with ``micro_batch_tokens="auto"`` what
            :meth:`AdaptiveLoop.find_bound` finds fastest. Packed rows are mappings with ``labels`` and ``tokens`` or ``input_ids``, of
            which :func:`pack_rows` makes the batch in the place of `collate`.
        scale_with_batch: what of the optimizer follows the batch beside the rate: ``{"beta2": "half_life", "weight_decay": "per_token"}``
            or one of them; None for neither.

    Raises:
        SettingError: a value cannot be used.
    """

    max_grad_norm: float | None = None
    to_device: Callable[[Any], Any] | None = None
    on_out_of_memory: str = "shrink"
    oom_policy: OOMPolicy | None = None
    sync_gradients_every_micro_batch: bool = True
    memory: DeviceMemory | None = None
    on_nonfinite_loss: str = "warn"
    micro_batch_layout: str | None = None
    scale_with_batch: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_scaled("scale_with_batch", self.scale_with_batch or {})
        if self.micro_batch_layout is not None:
            _check_choice("micro_batch_layout", self.micro_batch_layout, KINDS)
        norm = self.max_grad_norm
        is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if norm is not None and not (is_number and 0 < norm < math.inf):
            raise SettingError("max_grad_norm", norm, "give a number above 0, or None to clip nothing")
        _check_choice("on_out_of_memory", self.on_out_of_memory, ("shrink", "raise"))
        _check_choice("on_nonfinite_loss", self.on_nonfinite_loss, ON_NONFINITE_LOSS)


class AdaptiveLoop:
    """The rows of each step, and the gradients of their mean loss; the loop around them, and the optimizer's step, are the user's.

    Iterating hands out what is left of the current epoch, each row once, step by step; :meth:`run` leaves the gradients of a
    step and sets its learning rate. On several ranks, which must hold a model that `fully_shard` has divided, each is
    handed its own rows of a step, and on all of them the loop is built and called alike.

    Arguments that are keys of the configuration mean what docs/configuration.md says of them.

    Args:
        model: on its device.
        optimizer: of its parameters; the state of another that steps the rest is in no trial.
        dataset: map-style.
        collate: makes one padded batch of a list of rows, on the host.
        mean_loss: the loss of a batch on the device: a tensor of one number, averaged over its labels, each of which counts
            the same, whatever other rows are there.
        batch_size: rows of a step on one device, before a rule changes it.
        num_labels: how many labels a batch has that `mean_loss` averages over, asked on the host and on the device; None for
            :func:`label_tokens`.
        row_length: tokens of a row, or a number where all rows are alike; None for those of its ``tokens`` or ``input_ids``.
        batch_increase_function: ``f(epoch, batch_size) -> rows to add``, asked as an epoch starts, 0 included.
        batch_size_schedule: ``rule(progress) -> rows of a step on one device``, asked for each step.
        grow_beyond_maximum: let these pass the bound, in several micro-batches.
        micro_batch_size: rows at once; None for the bound, and where none was sought, for all rows of a step.
        micro_batch_tokens: padded tokens at once, ``auto`` for those of the bound; not together with `micro_batch_size`.
        lr_scheduler: a ``LambdaLR`` (or a ``SequentialLR`` of such), built around `optimizer` for steps of
            `batch_size` rows; its clock is the part of training that is done, so that growing the batch does not
            stretch it. None for the rate that the optimizer holds before :meth:`run`, whoever sets it: any other
            scheduler is stepped by the script.
        lr_scaling: ``none``, ``linear`` or ``sqrt`` of global batch / `reference_batch_size`.
        reference_batch_size: the global batch that the optimizer's rates belong to: rows, or ``"8192tok"``; None for
            `batch_size` on all ranks.
        lr_clock: what the schedule counts: ``samples``, ``tokens`` or ``steps``.
        sampling: the order of rows, and steps that hold tokens.
        options: how a step runs.

    Attributes:
        progress: what training has consumed; moves in :meth:`run`.
        bound: the most rows that were tried and fit at once; None before :meth:`find_bound`.
        num_out_of_memory: steps that were run again after running out of memory.
        learning_rate: what :meth:`run` has set for the last step, of the first group; None before it.

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
        batch_size: int,
        num_labels: Callable[[Any], int | torch.Tensor] | None = None,
        row_length: RowLength = None,
        batch_increase_function: Callable[[int, int], int] | None = None,
        batch_size_schedule: Schedule | None = None,
        grow_beyond_maximum: bool = False,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | str | None = None,
        lr_scheduler: LRScheduler | None = None,
        lr_scaling: str = "none",
        reference_batch_size: int | str | None = None,
        lr_clock: str = "samples",
        sampling: Sampling | None = None,
        options: StepOptions | None = None,
    ) -> None:
        sampling, options = sampling or Sampling(), options or StepOptions()
        check_whole("batch_size", batch_size)
        check_bool("grow_beyond_maximum", grow_beyond_maximum)
        for key, value in (("collate", collate), ("mean_loss", mean_loss)):
            if not callable(value):
                raise SettingError(key, value, "give a function")
        check_parameters(model, optimizer)
        if micro_batch_size is not None:
            check_whole("micro_batch_size", micro_batch_size)
        if sampling.batch_tokens and micro_batch_tokens is None and micro_batch_size is None:
            micro_batch_tokens = "auto"
        if micro_batch_tokens is not None and micro_batch_size is not None:
            remedy = "micro_batch_size is given too; give one of them"
            raise SettingError("micro_batch_tokens", micro_batch_tokens, remedy)
        if micro_batch_tokens not in (None, "auto"):
            check_whole("micro_batch_tokens", micro_batch_tokens, remedy="give auto, or a whole number, 1 or more")
        _check_choice("lr_scaling", lr_scaling, RULES)
        _check_choice("lr_clock", lr_clock, UNITS)
        lr_scaling = rate_rule(batch_size_schedule, lr_scaling)
        self._model, self._optimizer = model, optimizer
        sharding = Sharding(
            model, finishes=not is_replicated(model), syncs_every_micro_batch=options.sync_gradients_every_micro_batch
        )
        check_ranks(model, is_sharded=sharding.is_sharded)
        if has_batch_norm(model):
            log.warning("the model has BatchNorm, whose statistics are those of a micro-batch: a split changes results")
        self._rows = DatasetAdapter(dataset, row_length)
        self._collate, self._num_labels = collate, num_labels or label_tokens
        batching = Batching(
            batch_size,
            batch_increase_function=batch_increase_function,
            batch_size_schedule=batch_size_schedule,
            grow_beyond_maximum=grow_beyond_maximum,
            **asdict(sampling),
        )
        batching.check_rules()
        if needs_noise_scale(batch_size_schedule):
            remedy = "this loop measures nothing that it could follow; give steps, linear_ramp or ramp_by_doubling"
            raise SettingError("batch_size_schedule", batch_size_schedule, remedy)
        self._micro_batch_tokens = micro_batch_tokens
        self._written_layout = options.micro_batch_layout
        device = next(model.parameters()).device
        memory = options.memory or device_memory(device, shared_by=distributed.local_world_size())
        self._sizer = MicroBatchSizer(
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            layout=MicroBatchLayout(kind=self._written_layout or "padded"),
            memory=memory,
            policy=options.oom_policy,
            on_change=self._log_limit,
        )
        clock = Clock.from_config(lr_clock)
        self._steps = StepPlanner(
            self._rows,
            batching,
            self._sizer,
            counts_tokens=clock.counts_tokens,
            first_batch_size=batch_size,
            asks_rank_zero=True,
            event=self._log_event,
        )
        if isinstance(batch_size_schedule, Seesaw):
            self._steps.couple(schedule_of(lr_scheduler), clock)
        self._handed_out = _HandedOut()
        shrinks = options.on_out_of_memory == "shrink"
        self._runner = MicroBatchRunner(
            model,
            self._row_loss(collate, options.to_device or partial(move_to_device, device=device), mean_loss),
            self._sizer,
            memory=memory,
            retries=shrinks,
            remedies=_MEMORY_REMEDIES,
            max_grad_norm=norm_to_clip(options.max_grad_norm, options.on_nonfinite_loss),
            sharding=sharding,
        )
        if self._written_layout == "packed" and (why := self._why_not_packed()):
            raise SettingError("micro_batch_layout", "packed", f"{why}; or give grouped")
        self._nonfinite = NonfiniteSteps(options.on_nonfinite_loss, runner=self._runner, event=self._log_event)
        several = distributed.world_size() > 1
        self._keeps_gradients = several and not options.sync_gradients_every_micro_batch
        self._learns_collectives = several and shrinks and not is_compiled(model)
        self._built_with = {
            "batch_size": batch_size,
            "reference_batch_size": reference_batch_size,
            "lr_scaling": lr_scaling,
            "lr_clock": str(clock),
            "scale_with_batch": dict(options.scale_with_batch or {}),
            **asdict(sampling),
            "dataset": f"{len(self._rows)} rows",
        }
        try:
            reference = None if reference_batch_size is None else parse_reference(reference_batch_size)
        except ValueError as error:
            raise SettingError("reference_batch_size", reference_batch_size, str(error)) from None
        self._rate = StepRate(
            self._steps,
            [optimizer],
            lr_scheduler,
            clock,
            rule=lr_scaling,
            reference=reference,
            scale_with_batch=options.scale_with_batch,
        )
        self.progress = Progress(rows_per_epoch=len(self._rows))
        self.learning_rate: float | None = None
        self._bound_accumulates = False  # it was tried with the gradients of earlier micro-batches there
        self._warned_unlabelled = False

    def _row_loss(
        self,
        collate: Callable[[list[Any]], Any],
        to_device: Callable[[Any], Any],
        mean_loss: Callable[[Any], torch.Tensor],
    ) -> RowLoss:
        """Wrap the user's functions: a batch may be anything, and a step may be run again, so rows that change are copies."""
        return RowLoss(
            collate=lambda rows, length: {"batch": collate([dict(row) if type(row) is dict else row for row in rows])},
            to_device=lambda batch: batch.update(batch=to_device(batch["batch"])),
            mean_loss=lambda batch: check_loss(mean_loss(batch.pop("batch"))),
            count_labels=lambda batch: torch.tensor(whole_count(self._num_labels(batch["batch"]))),
            row_length=self._rows.length,
            num_real_tokens=self._rows.length,
            dummy_row=lambda: self._labelled_row,
            pack=lambda rows: {"batch": pack_rows(rows, ignore_index=IGNORE_INDEX)},
        )

    def _why_not_packed(self) -> str:
        """Return why packed rows would not train the model as padded ones do; empty where they would. Ranks ask together."""
        rows = self._rows.longest(min(2, len(self._rows)))  # a row of one token has no label
        if is_compiled(self._model):
            return "the model is compiled, and packed micro-batches are of ever other shapes"
        if not all(
            isinstance(row, Mapping) and "labels" in row and row.keys() & {"tokens", "input_ids"} for row in rows
        ):
            return "rows are no mappings with `labels` and `tokens` or `input_ids`"
        return self._runner.why_not_packed(rows)

    # --- the bound --------------------------------------------------------------------------------------------------

    def find_bound(
        self,
        *,
        device_memory: int | float | str | None = None,
        headroom: float = 0.05,
        maximum: int = 4096,
        round_to_power_of_two: bool = False,
        objective: str = "throughput",
    ) -> ProbeResult:
        """Find the most of the longest rows whose whole training step fits; training is left as it was, bit for bit.

        Steps of more rows run as micro-batches, beside whose gradients fewer rows fit: the bound is of the batch as it is now.
        Call it after :meth:`load_state_dict` and after `batch_size` was set above what fits.

        Args:
            device_memory: what a trial may use: a size such as ``"12GiB"``, a share such as 0.9, or None for what is available.
            headroom: share of that which is left free.
            maximum: no larger size is tried.
            round_to_power_of_two: also try the power of two at or below the bound, which is the result's `batch_size`.
            objective: what ``micro_batch_tokens="auto"`` takes: ``throughput``, the micro-batches that train most tokens a second
                within the bound, found by a few timed trials; or ``largest``, as much at once as fits.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: an argument cannot be used, or `micro_batch_size` is above what fits.
        """
        self._runner.retry.memory.check_it_can_be_measured()
        check_device_memory("device_memory", device_memory)
        check_share("headroom", headroom)
        check_whole("maximum", maximum)
        check_bool("round_to_power_of_two", round_to_power_of_two)
        _check_choice("objective", objective, ("throughput", "largest"))
        self._rate.restore()  # of a step that was left out: a trial is none of training's steps
        reshard(self._model)
        ranks, rows = distributed.data_parallel_size(), self._rows
        tried = TriedRows(self._runner, self._optimizer, keeps_gradients=self._keeps_gradients)
        random_state = RandomState(self._runner.retry.memory.device)  # reading a row of some datasets draws from it
        (longest,) = rows.longest(1)
        choices = self._choices() if objective == "throughput" else None
        random_state.restore()
        worst = WorstRows(rows.longest, rows.length(longest), rows.describe(longest), self._rows_in_order())
        most = min(maximum, max(1, len(rows) // ranks))
        options = ProbeOptions(device_memory, headroom, most, round_to_power_of_two=round_to_power_of_two)
        # On fewer ranks than training began with, even a rule's batch that is cut to the bound is more rows than that.
        splits = self._steps.batching.grow_beyond_maximum or self._sizer.splits or self._steps.ranks > ranks

        def find(accumulates: bool) -> ProbeResult:
            if accumulates and self._keeps_gradients:
                self._learn_collectives()  # what is kept can be dropped once FSDP has run
            return BoundSearch(tried, worst, options, accumulates=accumulates, choices=choices).run()

        try:
            results = find_in_step(find, accumulates=splits, step_rows=self._rows_at_most(self.batch_size))
        finally:
            rows.forget()
        found, splits = results[-1], splits or len(results) > 1
        self._sizer.found(found)
        self._bound_accumulates = splits
        return found

    def _choices(self) -> Choices | None:
        is_known = self._sizer.throughput is not None  # of a saved state, so that steps are cut as they were
        if self._micro_batch_tokens != "auto" or is_known or is_compiled(self._model):
            return None
        kinds = ["grouped"] if self._why_not_packed() else ["grouped", "packed"]
        batching = self._steps.batching
        rows = self._rows_at_most(self.batch_size)
        if batching.batch_tokens:
            rows = max(1, int(batching.batch_tokens / self._rows.lengths.double().mean()))
        return Choices([self._written_layout] if self._written_layout else kinds, "tokens", rows)

    def _rows_in_order(self) -> Callable[[int, int], list[Any]]:
        order = self._steps.epochs.order(self.progress.at_epoch_start()).tolist()
        return lambda begin, number: [self._rows[order[i % len(order)]] for i in range(begin, begin + number)]

    def estimate(
        self, devices: Any, *, maximum: int = 4096, context: int = CONTEXT_BYTES, headroom: int | float | str = 0
    ) -> MemoryEstimate:
        """Estimate how many of the longest rows a step of this loop can hold on CUDA devices that are not here.

        The rows are collated as in training, on the host; `to_device` is not called. For arguments and errors see
        :func:`adaptive_batch.estimate_memory`.
        """
        rows, runner, real = self._rows, self._runner, self._runner.loss
        (longest,) = rows.longest(1)

        def collate(some: Sequence[Any], length: int) -> dict[str, Any]:
            with disable_current_modes():
                return real.collate(some, length)

        def forward_backward(device: FakeDevice, size: int) -> None:
            made = rows.longest(min(size, len(rows)))
            pack = real.pack and disable_current_modes()(real.pack)
            runner.loss = replace(real, collate=collate, pack=pack, to_device=device.batch)
            runner.try_rows([made[number % len(made)] for number in range(size)])

        try:
            return estimate_step(
                self._model,
                self._optimizer,
                forward_backward,
                runner.clip,
                devices,
                sequence_length=rows.length(longest),
                accumulates=self._sizer.splits,
                maximum=check_whole("maximum", maximum),
                context=context,
                headroom=headroom,
            )
        finally:
            runner.loss = real
            rows.forget()

    # --- training ---------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Rows of a step on one device now; to be set between two epochs, as to the bound."""
        return self._steps.batch_size

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        if self._steps.batching.batch_size_schedule is not None:
            raise SettingError(
                "batch_size", batch_size, "batch_size_schedule decides what a step holds; set one of them"
            )
        self._steps.take_batch_size(check_whole("batch_size", batch_size))

    @property
    def limit(self) -> MicroBatchLimit:
        """What one micro-batch may hold now; lowered after an out-of-memory error, and grown back; 0 where :meth:`find_bound` has to find it."""
        return self._sizer.limit(self._rows_at_most(self.batch_size))

    @property
    def bound(self) -> int | None:
        """The most rows that were tried and fit at once; None before :meth:`find_bound`."""
        return self._sizer.max_batch_size

    @property
    def num_out_of_memory(self) -> int:
        """Steps that were run again after running out of memory."""
        return self._sizer.num_out_of_memory

    @property
    def is_trial(self) -> bool:
        """Whether what runs now is a trial, and not training: for code in a loss that counts or logs."""
        return self._runner.is_trial

    def __iter__(self) -> Iterator[list[Any]]:
        """Hand out this rank's rows of each step that is left of the current epoch; they may be taken ahead of :meth:`run`."""
        steps = self._steps
        self._handed_out.clear()
        progress = steps.begin_epoch(self.progress)
        # A loader draws a random number as it begins, which resuming within an epoch would draw again.
        with torch.random.fork_rng(devices=[]):
            steps.start_epoch(progress)
        while True:
            progress, rows = steps.next_step(progress)
            if not (size := len(steps.sampler.taken)):
                return
            self._handed_out.append(_StepRows(progress.batch, size, rows))
            yield rows
            counts = steps.batching.batch_size_schedule is not None
            tokens = sum(distributed.all_gather(sum(map(self._rows.length, rows)))) if counts else 0
            progress = progress.after_step(rows=size, tokens=tokens)

    def num_steps(self, epochs: int) -> int:
        """Return the optimizer steps that are left of so many epochs, as the rules answer now."""
        return self._steps.num_steps(self.progress, epochs)

    def run(self, rows: Sequence[Any]) -> StepResult:
        """Leave in the gradients the mean over the labels of a step, clipped, and set the learning rate of ``optimizer.step()``.

        A step that runs out of memory is run again with a smaller limit. Gradients must be clear before. The step counts as
        done: ``optimizer.step()`` and ``optimizer.zero_grad()`` are to follow. Where it raises, the same rows can be run again.

        Args:
            rows: of the step that was handed out first of those that have not been run.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            NonfiniteLossError: the loss or the gradients are NaN or infinite, with ``on_nonfinite_loss="stop"``; no gradient is left.
            RankLostError: out of memory on this rank where the others cannot be told; end the process, so that they end too.
            SettingError: the step has more rows than the bound, which was tried for steps of one micro-batch; or the loss or
                its labels are none.
            ValueError: other rows than were handed out, or gradients are there.
        """
        step, runner = self._handed_out.step_of(rows), self._runner
        self._check_fits(self._rows_at_most(step.asked))
        reshard(self._model)
        check_gradients_are_clear(self._model, self._optimizer, mine=runner.sharding.of_this_rank)
        self._learn_collectives()
        batch_size = self._rows_at_most(step.asked)
        division, _ = runner.agree(rows, batch_size, Question(step.asked, step.rows))
        result = runner.run(rows, batch_size, division=division)
        assert result.rows == step.rows, f"a step of {step.rows} rows trained {result.rows} of them"
        progress, tokens = self.progress, result.tokens
        self.learning_rate = self._rate.set(progress, batch=tokens if self._rate.counts_tokens else result.rows)["lr"]
        try:
            changes = {"epoch": progress.epoch, "batch_size": step.asked, "micro-batch": self._sizer.limit(batch_size)}
            self._nonfinite.drops(result, step=progress.steps + 1, lr=self.learning_rate, **changes)
        except NonfiniteLossError:
            self._rate.restore()
            raise
        self._handed_out.popleft()
        if not result.micro_batches and not self._warned_unlabelled:
            self._warned_unlabelled = True
            log.warning(
                "a step of %d rows had no label to learn from; see num_labels, if that should not be", step.rows
            )
        progress = replace(progress, batch=step.asked).after_step(rows=result.rows, tokens=tokens)
        self.progress = progress.after_epoch() if self._steps.is_over(progress) else progress
        return result

    def _learn_collectives(self) -> None:
        """Once, so that even the first micro-batch can fail on one rank and be brought to its end."""
        if self._learns_collectives:
            self._runner.learn_collectives()
            self._learns_collectives = False

    def _check_fits(self, rows: int) -> None:
        bound = self._sizer.max_batch_size
        if not self._sizer.tried_length and self._micro_batch_tokens == "auto":
            raise SettingError("micro_batch_tokens", "auto", "call find_bound first, or give a number")
        if bound is not None and rows > bound and not (self._bound_accumulates or self._sizer.splits):
            tried = f"{bound} rows fit at once where no gradients are there yet, and from a step's second micro-batch on there are"
            remedy = f"{tried}; call find_bound again, which sees this batch, or give {bound} or less"
            raise SettingError("batch_size", rows, remedy)

    def _rows_at_most(self, batch_size: int) -> int:
        """Return the rows of a step on the rank that has most: there may be other ranks than training began with."""
        return -(-batch_size * self._steps.ranks // distributed.data_parallel_size())

    def _log_limit(self, change: LimitChange) -> None:
        if distributed.is_rank_zero():
            log.log(logging.INFO if change.grows else logging.WARNING, "%s", change.describe())

    def _log_event(self, kind: str, message: str, *, prints: bool = True, **facts: Any) -> None:
        if distributed.is_rank_zero() and prints:
            log.log(logging.WARNING if kind == "nonfinite_loss" else logging.INFO, "%s", message)
        changed = kind == "batch_size" and facts["before"] != facts["after"] and distributed.is_rank_zero()
        if changed and (line := self._rate.describe_unscaled(facts["after"] * self._steps.ranks)):
            log.info("%s", line)

    # --- resuming ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where training is, as plain values, the same on all ranks; to be taken after ``optimizer.step()``.

        Weights, the optimizer's state and that of random numbers are the user's to save.
        """
        return {
            "progress": self.progress.state_dict(),
            "steps": self._steps.state_dict(),
            "limits": self._sizer.state_dict(),
            "learning_rate": self._rate.state_dict(),
            "bound_accumulates": self._bound_accumulates,
            "built_with": self._built_with,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state, in a loop that was built as the saved one was, before :meth:`find_bound` or without it.

        A bound that was found before is kept; otherwise it is the saved one. Either may have been tried for smaller steps than
        the state brings: :meth:`run` then refuses, and asks for :meth:`find_bound`. On another number of ranks a step has as
        many rows as before.

        Raises:
            SettingError: rows would come in another order, or the rate would follow another batch.
        """
        for key, now in self._built_with.items():
            if (saved := state["built_with"][key]) != now:
                raise SettingError(key, now, f"the saved loop was built with {saved}; resume with that")
        self._steps.load_state_dict(state["steps"])
        self._steps.saved_maximum = 0  # a schedule follows the bound that is found here
        self._handed_out.clear()
        self.progress = Progress(**state["progress"])
        if self.bound is None and state["limits"]["bound"] is not None:
            self._sizer.load_search(state["limits"])
            self._bound_accumulates = state["bound_accumulates"]
        self._sizer.load_state_dict(state["limits"])
        if self._micro_batch_tokens == "auto":
            self._sizer.load_throughput(state["limits"], kind=self._written_layout)
        self._rate.load_state_dict(state["learning_rate"])

    @cached_property
    def _labelled_row(self) -> Any:
        """The first row that has a label, for a rank that has no row of a step."""
        for number in range(len(self._rows)):
            row = self._rows[number]
            if self._num_labels(self._collate([row])):
                return row
        raise SettingError("dataset", type(self._rows).__name__, "no row has a label")


@dataclass(frozen=True)
class _StepRows:
    """A step whose rows were handed out: rows it was asked to hold on one device, rows on all ranks, and those of this rank."""

    asked: int
    rows: int
    mine: list[Any]


class _HandedOut(deque[_StepRows]):
    """The steps whose rows were handed out and have not been run, in order."""

    def step_of(self, rows: Sequence[Any]) -> _StepRows:
        """Return the step of some rows, which must be the first."""
        if not self or len(rows) != len(self[0].mine):
            comes = f"{len(self[0].mine)} rows come next" if self else "none are waiting"
            raise ValueError(
                f"{len(rows)} rows were given, and {comes}: run each step that is handed out once, in order"
            )
        # Rows may have been copied on their way, so only those of another step are known to be wrong.
        if not _are(rows, self[0].mine) and any(_are(rows, later.mine) for later in self):
            raise ValueError("a step that was handed out before has not been run: run each step once, in order")
        return self[0]


def _check_choice(key: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise SettingError(key, value, f"give one of {', '.join(options)}")


def _are(rows: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(rows) == len(others) and all(one is other for one, other in zip(rows, others, strict=True))
