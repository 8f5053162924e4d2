"""A step of any script: the batch that it has made, split into parts that fit, and run again where
memory runs out.

    def forward_backward(part):
        loss = model(**part.batch).loss * part.share
        loss.backward()
        return loss.detach()

    step = AdaptiveStep(model, forward_backward)
    for batch in loader:
        losses = step(batch)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import check_bool, check_state, check_whole, instance_of
from adaptive_batch.data import Event, MicroBatch, MicroBatchLayout
from adaptive_batch.distributed import sharding_of
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import device_memory, expand_segments_in_script
from adaptive_batch.probe import ProbeResult

from .bound_search import ProbeOptions, SearchScope, find_limit
from .label_shares import LENGTHS_REMEDY, STATISTICS, BatchStatistics, LabelShares
from .model_checks import (
    check_parameters,
    check_ranks,
    gradients_must_come,
    is_compiled,
    is_replicated,
)
from .options import REMEDIES, StepOptions, Terms
from .parts import BatchSource, LabelCounter, Part, SplitBatch
from .sizing import ConfiguredSize, LimitChange, MicroBatchSizer
from .split_check import SplitCheck
from .splitters import CustomSplit, RowSplitter, length_in_sample
from .step import RankReport, Step
from .trials import LongestRows, TriedStep

private = PrivateNames("memory estimates")
if TYPE_CHECKING:
    from adaptive_batch.estimate import FakeDevice, MemoryEstimate
log = logging.getLogger("adaptive_batch")


class PartStep(Step):
    """Runs a script's function on the parts of a batch: divided alike on all ranks, checked before
    the first split, and again where memory runs out.

    Args:
        model: model whose gradients are summed.
        forward_backward: function that runs forward and backward of a part.
        sizer: decides what a part may hold.
        terms: names of the caller's API, for errors.
        num_labels: function that returns the labels of a batch; see :class:`.AdaptiveStep`.
        statistics: function that returns statistics of a part; see :class:`.AdaptiveStep`.
        counts_over_ranks: whether labels and statistics are those of all ranks.
        event: function that writes down what was compiled again; see :class:`.CompilationLog`.
        options: see :class:`Step`.

    Attributes:
        forward_backward, terms: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Part], Any],
        sizer: MicroBatchSizer,
        *,
        terms: Terms,
        num_labels: Callable[[Any], Any] | None,
        statistics: Callable[[Part], Mapping[str, Any]] | None,
        counts_over_ranks: bool,
        event: Callable[..., object],
        **options: Any,
    ) -> None:
        super().__init__(model, sizer, **options)
        self.forward_backward = forward_backward
        self.terms = terms
        self._event = event
        self._counts_over_ranks = counts_over_ranks
        self._labels = LabelCounter(num_labels)
        self._statistics = BatchStatistics(statistics, self, over_ranks=counts_over_ranks)
        self._check = SplitCheck(
            self,
            forward_backward,
            self._labels,
            self._statistics,
            terms=terms,
            name=getattr(forward_backward, "__name__", type(forward_backward).__name__),
        )
        # A rank can be brought to the end of a micro-batch whose collectives are known.
        self._records_collectives = (
            self.sharding.is_sharded and self.retry.retries and not is_compiled(model)
        )

    def run(self, rows: BatchSource, report: RankReport) -> list[Any]:
        """Run forward and backward of a batch; see :meth:`.AdaptiveStep.__call__`.

        Args:
            rows: rows of this rank.
            report: what this rank reports to the others; its batch size is the rows of the step on
                the rank that has most.
        """
        self.sizer.is_packed = rows.is_packed
        self.record_collectives_of(rows)
        weighting = LabelShares(
            self,
            self.forward_backward,
            rows,
            labels=self._labels,
            statistics=self._statistics,
            check=self._check,
            counts_over_ranks=self._counts_over_ranks,
        )
        results = self.run_step(weighting, self.agree(weighting, report))
        self.compilations.log_new(self._event)
        return results

    def num_labels(self, batch: Any, num_rows: int) -> float:
        """Return the labels of a batch of `num_rows` rows, as a part's share counts them."""
        return self._labels.count(batch, num_rows, counts_first=self._check.counts_first_label)

    def run_alone(self, part: Part) -> None:
        """Run a part that is the whole batch, with its own statistics."""
        statistics = self._statistics.of_part(part)
        self.forward_backward(part._replace(statistics=statistics))

    # --- trials

    def record_collectives_of(self, rows: BatchSource) -> None:
        """Run one row as a trial, to record collectives before a micro-batch can fail."""
        if not self._records_collectives:
            return
        self._records_collectives = False

        def run() -> None:
            for is_last in (False, True):
                self.try_part(lambda: (rows.dummy(), 1), is_last=is_last)

        self.record_collectives(run, MicroBatch([0], 1))

    def try_part(self, make: Callable[[], tuple[Any, int]], *, is_last: bool = True) -> None:
        """Run a batch as one part, as a trial, and forget what it returned.

        Args:
            make: function that makes the batch, which is part of what is tried, and returns it with
                the number of its rows.
            is_last: whether gradients are reduced.
        """
        statistics = {}
        if self._statistics.are_needed:
            with self.trial(evaluates=STATISTICS):
                batch, num_rows = make()
                statistics = self._statistics.of_part(Part(batch, num_rows, is_trial=True))
                # Made again below, where its memory is part of what is tried.
                del batch
        with self.trial(is_last=is_last):
            batch, num_rows = make()
            self.forward_backward(
                Part(batch, num_rows, is_last=is_last, is_trial=True, statistics=statistics)
            )


class AdaptiveStep:
    """Calls a function of the script's once for each part of a batch that fits, and again where
    memory runs out.

    It knows no data, optimizer, rate or scaler: autocast, ``scaler.scale(loss)``,
    ``accelerator.backward``, clipping and accumulation stay in the script. Gradients of earlier
    batches are kept; those of a batch are the same, to rounding, whatever it is split into. With
    one part they have the script's own bits.

    A failed attempt is undone: gradients, random numbers and running statistics are as before it.
    What else `forward_backward` changes, a metric for instance, it changes in each attempt.

    On several ranks, which must hold a model that `fully_shard` has divided, all call it alike, and
    retry together.

    Args:
        model: model on its device; its modules are those that it has in the first step.
        forward_backward: ``forward_backward(part)`` runs forward and backward of ``part.batch``,
            its mean loss multiplied by ``part.share``; see :class:`Part`. What it returns is
            collected.
        micro_batch_size: the most rows of a part: a number, ``auto`` for what :meth:`find_bound`
            finds, or None for the whole batch.
        micro_batch_tokens: the most tokens of a part, padding included; not together with
            `micro_batch_size`. Needs the length of each row, see :class:`RowsOfBatch`, or `split`.
        split: function that returns :class:`SplitBatch` of a batch: for pairs, sequences along
            another dimension, states. None splits each tensor by its first dimension.
        num_labels: function that returns the number of labels that the loss of a batch is a mean
            over, or the sum of their weights where it is a weighted mean. None counts ``labels``
            that are not -100, after the shift by one or before it, as the loss of the first split
            shows; of a batch without ``labels`` its rows.
        statistics: ``statistics(part)`` returns a mapping of names to numbers or tensors. It is run
            on each part before the first backward, without gradients; the sums over the parts are
            ``part.statistics`` in `forward_backward`. With ``count_labels_over="ranks"`` they are
            sums over all ranks. None where a loss needs none.
        options: how a step runs.

    Attributes:
        model: model that is trained.
        memory: memory of its device.
        sharding: how several ranks hold it.
        sizer: decides what a part may hold.
        engine: runs the parts of a batch.
        terms: names of the caller's API, for errors.
        tried_one_part: whether the trials of a search ran one part alone, without the gradients
            that a second part meets.

    Raises:
        SettingError: an argument cannot be used.
    """

    # A class attribute, since a script gives none.
    terms = Terms()

    def __init__(
        self,
        model: nn.Module,
        forward_backward: Callable[[Part], Any],
        *,
        micro_batch_size: int | str | None = None,
        micro_batch_tokens: int | str | None = None,
        split: Callable[[Any], SplitBatch] | None = None,
        num_labels: Callable[[Any], Any] | None = None,
        statistics: Callable[[Part], Mapping[str, Any]] | None = None,
        options: StepOptions | None = None,
    ) -> None:
        options = instance_of(StepOptions, "options", options)
        options.check_of_step()
        size = configured_size(micro_batch_size, micro_batch_tokens)
        for key, function in (
            ("forward_backward", forward_backward),
            ("split", split),
            ("num_labels", num_labels),
            ("statistics", statistics),
        ):
            if not callable(function) and (function is not None or key == "forward_backward"):
                raise SettingError(key, function, "give a function")
        if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
            raise SettingError("model", type(model).__name__, "give an nn.Module with parameters")
        self.model = model
        self._split_batch: RowSplitter | CustomSplit = (
            RowSplitter(trims=not is_compiled(model)) if split is None else CustomSplit(split)
        )
        device = next(model.parameters()).device
        expand_segments_in_script(device)
        self.memory = options.memory or device_memory(
            device, shared_by=distributed.local_world_size()
        )
        self.sizer = MicroBatchSizer(
            size,
            layout=MicroBatchLayout(kind=options.micro_batch_layout or "padded"),
            memory=self.memory,
            policy=options.oom_policy,
            on_change=partial(log_change, options.event),
        )
        self.sharding = sharding_of(
            model,
            overlaps=options.overlap_reduction,
            finishes=not is_replicated(model),
            syncs_every_micro_batch=options.sync_gradients_every_micro_batch,
        )
        check_ranks(model, self.sharding)
        self.engine = PartStep(
            model,
            forward_backward,
            self.sizer,
            terms=self.terms,
            num_labels=num_labels,
            statistics=statistics,
            counts_over_ranks=options.count_labels_over == "ranks" and distributed.world_size() > 1,
            event=partial(log_event, options.event),
            memory=self.memory,
            sharding=self.sharding,
            retries=options.on_out_of_memory == "shrink",
            remedies=REMEDIES,
        )
        self.tried_one_part = False
        if self.sizer.waits_for_search:
            log.info("auto is the whole batch until find_bound finds what fits, or memory runs out")

    @classmethod
    def of(
        cls, model: nn.Module, **arguments: Any
    ) -> Callable[[Callable[[Part], Any]], AdaptiveStep]:
        """Return a decorator that makes an AdaptiveStep of a `forward_backward` function."""

        def decorate(forward_backward: Callable[[Part], Any]) -> AdaptiveStep:
            return cls(model, forward_backward, **arguments)

        return decorate

    @property
    def is_trial(self) -> bool:
        """Whether what runs now is a trial or a check of a split, and not training."""
        return self.engine.is_trial

    @property
    def max_batch_size(self) -> int | None:
        """The most rows that were tried and fit at once; None before :meth:`find_bound`."""
        return self.sizer.max_batch_size

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Rows of each micro-batch of the last batch, on this rank."""
        return self.engine.plan.micro_batches

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the last batch, on the rank that has most."""
        return self.engine.plan.number

    # --- a step

    def __call__(self, batch: Any) -> list[Any]:
        """Run forward and backward of a batch, in parts that fit.

        Args:
            batch: whatever the script has made, on the host or on the device.

        Returns:
            What `forward_backward` returned, of each part in turn; a part without a label is left
            out.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told; end the
                process.
            SettingError: the loss of the batch is not the sum of its parts' shares, so that it
                cannot be split.
        """
        rows = self._split_batch(batch)
        report = RankReport(batch_size=distributed.maximum(rows.num_rows))
        try:
            return self.engine.run(rows, report)
        finally:
            # Also where the step has run out of memory for good.
            if self.tried_one_part and self.num_micro_batches > 1:
                self.tried_one_part = False
                log.warning(
                    "a batch is split, and what fits was tried without the gradients of other"
                    " parts: give find_bound batch_size="
                )

    # --- what fits

    def find_bound(
        self,
        optimizer: Optimizer,
        sample: Callable[[int], Any],
        *,
        device_memory: int | float | str | None = None,
        headroom: float | str = "auto",
        maximum: int = 4096,
        batch_size: int | None = None,
        accumulates: bool = False,
    ) -> ProbeResult:
        """Find the most rows whose whole training step fits, and run no more at once; training is
        left as it was, bit for bit.

        Args:
            optimizer: optimizer of the model's parameters.
            sample: function that returns the `n` worst rows as a batch: the longest that training
                may meet, collated.
            device_memory: memory that a trial may use: a size such as ``"12GiB"``, a share such as
                0.9, or None for what is available.
            headroom: share of that which is left free; see :class:`ProbeOptions`.
            maximum: the most rows that are tried.
            batch_size: rows of the script's batches; of more than fit, the bound is sought again
                beside the gradients that a second part meets. None where they fit, or are not
                known.
            accumulates: whether the script adds up the gradients of several batches, so that those
                of earlier ones are there.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: an argument cannot be used, or a configured size is above what fits.
        """
        options = ProbeOptions(device_memory, headroom, maximum)
        check_parameters(self.model, optimizer)
        if not callable(sample):
            raise SettingError("sample", sample, "give a function of a number of rows")
        if batch_size is not None:
            check_whole("batch_size", batch_size)
        check_bool("accumulates", accumulates)
        rows = LongestRows.of_sample(sample, self._split_batch.split_sample, self.memory.device)
        if self.sizer.limit_of_step.unit == "tokens" and not rows.length:
            raise SettingError("micro_batch_tokens", "auto", LENGTHS_REMEDY)
        scope = SearchScope(
            rows, accumulates=accumulates or self.sizer.may_split, whole_step_rows=batch_size
        )
        try_sample = partial(self._try_sample, beside_gradients=accumulates)
        return self.search(TriedStep(self.engine, optimizer, try_sample), scope, options)

    def search(self, tried: TriedStep, scope: SearchScope, options: ProbeOptions) -> ProbeResult:
        """Find how many rows fit, and run no more at once; see :func:`find_limit`."""
        results = find_limit(tried, scope, options, sizer=self.sizer)
        fits_whole = results[-1].max_batch_size >= (scope.whole_step_rows or 0)
        self.tried_one_part = fits_whole and not scope.accumulates
        return results[-1]

    def _try_sample(
        self, make_batch: Callable[[], Any], *, beside_gradients: bool, is_last: bool = True
    ) -> None:
        """Run forward and backward of a batch at once, as a trial.

        Args:
            make_batch: function that makes the batch.
            beside_gradients: whether the gradients of earlier batches are there.
            is_last: whether gradients are reduced.
        """

        def whole() -> tuple[Any, int]:
            rows = self._split_batch.split_sample(make_batch())
            return rows.part(range(rows.num_rows)), rows.num_rows

        def run() -> None:
            comes = gradients_must_come(self.model, self.engine.forward_backward)
            # Gradients that are not reduced are not the parameters' yet.
            with comes if is_last else nullcontext():
                self.engine.try_part(whole, is_last=is_last)

        if not beside_gradients:
            run()
            return
        gradients = self.engine.save_gradients()
        if self.sizer.may_split:
            # From its second part on a batch has gradients of its own beside the earlier ones.
            gradients.fill_new()
        run()
        gradients.add_up()

    def estimate(
        self,
        optimizer: Optimizer,
        sample: Callable[[int], Any],
        devices: Any,
        *,
        maximum: int = 4096,
        context: int | None = None,
        headroom: int | float | str = "auto",
    ) -> MemoryEstimate:
        """Estimate how many rows of a sample a step can hold on CUDA devices that are not here.

        Args:
            optimizer: optimizer of the model's parameters; its state is made again.
            sample: function that returns the `n` longest rows as a batch, as in :meth:`find_bound`.
            devices: one or several: a name such as ``"H100"``, a size such as ``"80GiB"``.
            maximum: more rows are of no interest.
            context: bytes that the driver's context takes of each device; None for 770
                MiB of an H100 or H200, and 500 MiB of others.
            headroom: what is left free beside that: bytes, a size or a share; ``auto`` as in
                :func:`adaptive_batch.estimate_memory`.

        Raises:
            SettingError: an argument cannot be used, or the model needs values, which fake tensors
                do not have.
        """
        from adaptive_batch.estimate import DevicesAsHost, estimate_step

        check_parameters(self.model, optimizer)
        if not callable(sample):
            raise SettingError("sample", sample, "give a function of a number of rows")
        # A model on the meta device draws no random numbers; the sample may.
        device = self.memory.device
        if device.type == "meta":
            device = torch.device("cpu")
        longest = length_in_sample(sample, self._split_batch.split_sample, device)

        def forward_backward(fake: FakeDevice, num_rows: int) -> None:
            with private.disable_current_modes():
                made = {"batch": sample(num_rows)}
            # A script has to copy what a sample has on the CPU to a model on another device.
            fake.batch(made, is_moved=device.type == "cpu")
            with DevicesAsHost(fake):
                self.engine.run_alone(Part(made["batch"], num_rows, is_trial=True))

        try:
            return estimate_step(
                self.model,
                optimizer,
                forward_backward,
                lambda: None,
                devices,
                sequence_length=max(1, longest),
                accumulates=self.sizer.may_split,
                maximum=check_whole("maximum", maximum),
                context=context,
                headroom=headroom,
            )
        finally:
            self.engine.compilations.forget()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return what fits, as plain values; random numbers are the script's to save."""
        return {"sizer": self.sizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; what :meth:`find_bound` has found since counts more.

        Raises:
            SettingError: the state is none of a step.
        """
        check_state(state, ("sizer",), owner="a step")
        self.sizer.load_search(state["sizer"])
        self.sizer.load_state_dict(state["sizer"])


def configured_size(
    micro_batch_size: int | str | None, micro_batch_tokens: int | str | None
) -> ConfiguredSize:
    """Return the size of a micro-batch that these arguments configure.

    Raises:
        SettingError: naming the key.
    """
    if micro_batch_tokens is not None and micro_batch_size is not None:
        remedy = "micro_batch_size is given too; give one of them"
        raise SettingError("micro_batch_tokens", micro_batch_tokens, remedy)
    for key, value in (
        ("micro_batch_size", micro_batch_size),
        ("micro_batch_tokens", micro_batch_tokens),
    ):
        if value not in (None, "auto"):
            check_whole(key, value, remedy="give auto, or a whole number, 1 or more")
    return ConfiguredSize(micro_batch_size=micro_batch_size, micro_batch_tokens=micro_batch_tokens)


def log_change(
    event: Callable[..., object] | None,
    change: LimitChange,
    *,
    kind: str = "limit",
    prefix: str = "",
) -> None:
    """Log a change of a limit, and report it as an event of a kind."""
    text = prefix + change.describe()
    if distributed.is_rank_zero():
        log.log(logging.INFO if change.grows else logging.WARNING, "%s", text)
    if event is not None:
        event(kind, text, prints=False, **change.facts())


def log_event(
    event: Event | None, kind: str, message: str, *, prints: bool = True, **facts: Any
) -> None:
    """Log an event on rank zero, unless `prints` is False, and report it."""
    if prints and distributed.is_rank_zero():
        log.warning("%s", message)
    if event is not None:
        event(kind, message, prints=False, **facts)
