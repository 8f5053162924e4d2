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
from adaptive_batch._util import check_bool, check_whole, instance_of
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import SettingError
from adaptive_batch.probe import ProbeResult

from .bound_search import LongestRows, ProbeOptions, SearchScope, TriedStep
from .model_checks import check_parameters, gradients_must_come, is_compiled
from .options import StepOptions
from .part_step import LENGTHS_REMEDY, PartStep
from .parts import Part, SplitBatch
from .splitters import CustomSplit, RowSplitter, length_in_sample
from .step import RankReport

private = PrivateNames("memory estimates")
if TYPE_CHECKING:
    from adaptive_batch.estimate import FakeDevice, MemoryEstimate
log = logging.getLogger("adaptive_batch")


class AdaptiveStep(PartStep):
    """Calls a function of the script's once for each part of a batch that fits, and again where
    memory runs out.

    It needs no data, optimizer, rate or scaler: autocast, ``scaler.scale(loss)``,
    ``accelerator.backward``, clipping and accumulation stay in the script. Gradients of earlier
    batches are kept; those of a batch are the same, to rounding, whatever it is split into. With
    one part they have the script's own bits.

    A failed attempt is undone: gradients, random numbers and running statistics are restored. Other
    side effects of `forward_backward`, such as metrics, happen in each attempt.

    On several ranks the model must be divided by `fully_shard` or wrapped in DDP. All ranks call
    the step alike, and retry together.

    Args:
        model: model on its device; its modules are those that it has in the first step.
        forward_backward: ``forward_backward(part)`` runs forward and backward of ``part.batch``,
            with the mean loss multiplied by ``part.share``; see :class:`Part`. Its results are
            collected.
        micro_batch_size: the most rows of a part: a number, ``auto`` for what :meth:`find_bound`
            finds, or None for the whole batch.
        micro_batch_tokens: the most tokens of a part, padding included; not together with
            `micro_batch_size`. Needs the length of each row, see :class:`RowsOfBatch`, or `split`.
        split: function that returns :class:`SplitBatch` of a batch: for pairs, sequences along
            another dimension, states. None splits each tensor by its first dimension.
        num_labels: function that returns the number of labels that the loss of a batch averages
            over, or the sum of their weights for a weighted mean. None counts ``labels``
            that are not -100, after the shift by one or before it, as the loss of the first split
            shows; of a batch without ``labels`` its rows.
        statistics: ``statistics(part)`` returns a mapping of names to numbers or tensors. It is run
            on each part before the first backward, without gradients; the sums over the parts are
            ``part.statistics`` in `forward_backward`. With ``count_labels_over="ranks"`` they are
            sums over all ranks. None if a loss needs none.
        options: how a step runs.

    Attributes:
        model: model that is trained.
        memory: memory of its device.
        sharding: how several ranks hold it.
        sizer: limits a part.
        is_trial: whether a trial or a check of a split runs now, and not training.

    Raises:
        SettingError: an argument cannot be used.
    """

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
        super().__init__(
            model,
            forward_backward,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            num_labels=num_labels,
            statistics=statistics,
            options=options,
            name=getattr(forward_backward, "__name__", type(forward_backward).__name__),
        )
        self._split_batch: RowSplitter | CustomSplit = (
            RowSplitter(trims=not is_compiled(model)) if split is None else CustomSplit(split)
        )

    @classmethod
    def of(
        cls, model: nn.Module, **arguments: Any
    ) -> Callable[[Callable[[Part], Any]], AdaptiveStep]:
        """Return a decorator that makes an AdaptiveStep of a `forward_backward` function."""

        def decorate(forward_backward: Callable[[Part], Any]) -> AdaptiveStep:
            return cls(model, forward_backward, **arguments)

        return decorate

    @property
    def max_batch_size(self) -> int | None:
        """The most rows that were tried and fit at once; None before :meth:`find_bound`."""
        return self.sizer.max_batch_size

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Rows of each micro-batch of the last batch, on this rank."""
        return self.plan.micro_batches

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the last batch, on the rank that has most."""
        return self.plan.number

    # --- a step

    def __call__(self, batch: Any) -> list[Any]:
        """Run forward and backward of a batch, in parts that fit.

        Args:
            batch: whatever the script has made, on the host or on the device.

        Returns:
            The results of `forward_backward` in the order of the parts, without parts that have no
            label.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others; end the
                process.
            SettingError: the loss of the batch is not the sum of its parts' shares, so that it
                cannot be split.
        """
        rows = self._split_batch(batch)
        report = RankReport(batch_size=distributed.maximum(rows.num_rows))
        try:
            return self.run_rows(rows, report)
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
        """Find the most rows that fit in a whole training step, and limit parts to them; leave
        training as it was, bit for bit.

        Args:
            optimizer: optimizer of the model's parameters.
            sample: function that returns the `n` worst rows as a batch: the longest that training
                may meet, collated.
            device_memory: memory that a trial may use: a size such as ``"12GiB"``, a share such as
                0.9, or None for what is available.
            headroom: share of that memory that stays free; see :class:`ProbeOptions`.
            maximum: the most rows that are tried.
            batch_size: rows of the script's batches. If they do not fit, the search is repeated
                with the gradients of a first part in memory. None if they fit or are unknown.
            accumulates: whether the script accumulates the gradients of several batches.

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
        return self.search(TriedStep(self, optimizer, try_sample), scope, options)

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
            comes = gradients_must_come(self.model, self.forward_backward)
            # Gradients that are not reduced are not the parameters' yet.
            with comes if is_last else nullcontext():
                self.try_part(whole, is_last=is_last)

        if not beside_gradients:
            run()
            return
        gradients = self.save_gradients()
        if self.sizer.may_split:
            # From its second part on, a batch has its own gradients besides the earlier ones.
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
            headroom: memory that stays free besides that: bytes, a size or a share; ``auto`` as in
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
            # A script copies the tensors of a sample from the CPU to a model on another device.
            fake.batch(made, is_moved=device.type == "cpu")
            with DevicesAsHost(fake):
                part = Part(made["batch"], num_rows, is_trial=True)
                self.forward_backward(part._replace(statistics=self.statistics.of_part(part)))

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
