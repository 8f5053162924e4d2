"""The step of any script: split a batch into parts that fit, and repeat it after an OOM.

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
    """Calls a function of the script for each part of a batch, in smaller parts after an OOM.

    The script keeps its data, optimizer, rate and scaler: autocast, ``scaler.scale(loss)``,
    ``accelerator.backward``, clipping and accumulation stay in it. The step adds to existing
    gradients. The number of parts changes a gradient only by rounding. With one part, gradients are
    bitwise equal to the script's own.

    After an OOM the step restores gradients, random numbers and running statistics. Other side
    effects of `forward_backward`, such as metrics, happen in each attempt.

    On several ranks, shard the model with `fully_shard` or wrap it in DDP. All ranks call the step
    together, and repeat it together.

    Args:
        model: model on its device. Do not add modules to it after the first step.
        forward_backward: function ``forward_backward(part)`` that runs forward and backward of
            ``part.batch``, with the mean loss multiplied by ``part.share``; see :class:`Part`. The
            step returns its results.
        micro_batch_size: the most rows of a part: a number; ``auto`` for the result of
            :meth:`find_bound`; None for the whole batch.
        micro_batch_tokens: the most tokens of a part, padding included: a number or ``auto``. Give
            only one of both. The length of each row must be known, see :class:`RowsOfBatch`, or
            given by `split`.
        split: function that returns the :class:`SplitBatch` of a batch, for rows that belong
            together, such as pairs, and for tensors whose first dimension is not the rows. None
            splits each tensor by its first dimension.
        num_labels: function that returns the number of labels that the loss of a batch averages
            over, or the sum of their weights for a weighted mean. None counts the ``labels`` that
            are not -100. The check of the first split shows whether the first label of each row
            counts. A batch without ``labels`` counts its rows.
        statistics: function ``statistics(part)`` that returns a mapping of names to numbers or
            tensors. It runs on each part without gradients before the first backward.
            `forward_backward` finds the sums over the parts in ``part.statistics``; with
            ``count_labels_over="ranks"`` they are sums over all ranks.
        options: options of a step.

    Attributes:
        model: model that trains.
        memory: memory of the model's device.
        sharding: FSDP or DDP modules of the model.
        sizer: limit of a part.
        is_trial: whether a trial or a check of a split runs, and not training.

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
        """Return a decorator that turns a `forward_backward` function into an AdaptiveStep."""

        def decorate(forward_backward: Callable[[Part], Any]) -> AdaptiveStep:
            return cls(model, forward_backward, **arguments)

        return decorate

    @property
    def max_batch_size(self) -> int | None:
        """Most rows that fit at once, found by :meth:`find_bound`; None before it."""
        return self.sizer.max_batch_size

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Micro-batches of the last batch on this rank."""
        return self.plan.micro_batches

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the last batch, on the rank with the most."""
        return self.plan.number

    # --- a step

    def __call__(self, batch: Any) -> list[Any]:
        """Run forward and backward of a batch, in parts that fit.

        Args:
            batch: batch of the script, on the host or on the device.

        Returns:
            The results of `forward_backward` of the parts with labels, in their order.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others; end the
                process.
            SettingError: the batch cannot be split, for example because its loss is not the sum
                of the weighted losses of its parts.
        """
        rows = self._split_batch(batch)
        report = RankReport(batch_size=distributed.maximum(rows.num_rows))
        try:
            return self.run_rows(rows, report)
        finally:
            # Warn even if the step raises DoesNotFitError.
            if self.bound_excludes_gradients and self.num_micro_batches > 1:
                self.bound_excludes_gradients = False
                log.warning(
                    "a batch is split, but find_bound tried parts without the gradients of other"
                    " parts in memory: call it with batch_size="
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
        """Find the most rows that fit in a whole training step, and limit parts to them. Weights,
        optimizer, gradients and random numbers are restored to the bit.

        Args:
            optimizer: optimizer of the model's parameters.
            sample: function ``sample(n)`` that returns a collated batch of the `n` longest rows
                that training may have.
            device_memory: memory that a trial may use: a size such as ``"12GiB"``; a share such as
                0.9; None for the available memory.
            headroom: share of that memory that stays free; see :class:`ProbeOptions`.
            maximum: the most rows that are tried.
            batch_size: rows of the script's batches. If they do not fit at once, the search is
                repeated with the gradients of an earlier part in memory. None if they fit.
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
        try_sample = partial(self._try_sample, has_gradients=accumulates)
        return self.search(TriedStep(self, optimizer, try_sample), scope, options)

    def _try_sample(
        self, make_batch: Callable[[], Any], *, has_gradients: bool, is_last: bool = True
    ) -> None:
        """Run forward and backward of a batch as one part, in a trial.

        Args:
            make_batch: function that makes the batch.
            has_gradients: whether the gradients of earlier batches are in memory.
            is_last: whether gradients are reduced.
        """

        def whole() -> tuple[Any, int]:
            rows = self._split_batch.split_sample(make_batch())
            return rows.part(range(rows.num_rows)), rows.num_rows

        def run() -> None:
            checking = gradients_must_come(self.model, self.forward_backward)
            # Parameters have no gradients before the reduction.
            with checking if is_last else nullcontext():
                self.try_part(whole, is_last=is_last)

        if not has_gradients:
            run()
            return
        gradients = self.save_gradients()
        if self.sizer.may_split:
            # From the second part on, the gradients of the batch are in memory too.
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
        """Estimate how many rows of a sample fit in a step on CUDA devices that are not here.

        Args:
            optimizer: optimizer of the model's parameters; the estimate creates its state.
            sample: function ``sample(n)`` as in :meth:`find_bound`.
            devices: one or several: a name such as ``"H100"``, a size such as ``"80GiB"``.
            maximum: the most rows that are estimated.
            context: bytes of the driver's context on each device; None for 770 MiB on an H100 or
                H200, and 500 MiB on others.
            headroom: memory that also stays free: bytes, a size or a share; ``auto`` as in
                :func:`adaptive_batch.estimate_memory`.

        Raises:
            SettingError: an argument cannot be used, or the model reads values of fake tensors.
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
                tensors = {"batch": sample(num_rows)}
            # If the model is on the CPU, a script moves no tensors of a sample to its device.
            # FakeDevice.batch() replaces the tensors in place.
            fake.batch(tensors, is_on_device=device.type == "cpu")
            with DevicesAsHost(fake):
                part = Part(tensors["batch"], num_rows, is_trial=True)
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
