"""A step over rows of a dataset: rows are collated or packed, trained, and counted over ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import check_whole
from adaptive_batch.data import (
    IGNORE_INDEX,
    DatasetAdapter,
    check_loss,
    move_to_device,
)
from adaptive_batch.distributed import reshard
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.probe import ProbeResult

from .adaptive_step import PartStep
from .bound_search import LongestRows, ProbeOptions, SearchScope, TriedStep
from .model_checks import check_gradients_are_clear
from .options import StepOptions, Terms
from .packing import isolated_rows, pack_rows, packed_lengths, why_not_packed
from .parts import BatchSource, Part, RowsOfBatch, arrays_in, is_unusual
from .step import RankReport
from .step_result import StepResult

private = PrivateNames("memory estimates")

if TYPE_CHECKING:
    from adaptive_batch.estimate import FakeDevice, MemoryEstimate

log = logging.getLogger("adaptive_batch")

Row = Any
Batch = Any


class RowsOfStep(BatchSource):
    """This rank's rows of a step; collates each part on demand.

    Args:
        step: makes the batches.
        rows: rows of this rank.
    """

    knows_lengths = True
    collates_parts = True

    def __init__(self, step: RowStep, rows: Sequence[Row]) -> None:
        self._step = step
        self._rows = rows
        self.num_rows = len(rows)
        # Shapes of a row in the parts so far, which differ if parts have different columns.
        self._shapes: set[tuple[torch.Size, ...]] = set()

    @cached_property
    def lengths(self) -> list[int]:
        # A list, since a StopIteration of a script's function would end map() without an error.
        return [self._step.dataset.length(row) for row in self._rows]

    @property
    def cuts(self) -> bool:
        return self._step.sizer.layout.pads and len(self._shapes) > 1

    def part(self, rows: Sequence[int], /) -> Batch:
        batch = self._step.make_batch(list(map(self._rows.__getitem__, rows)))
        shapes = [array.shape[1:] for array in arrays_in(batch) if not is_unusual(array)]
        self._shapes.add(tuple(shapes))
        return batch

    def dummy(self) -> Batch:
        return self._step.make_batch([self._step.labelled_row])

    def to_check(self) -> BatchSource:
        """Return rows that are collated in parts, as in training, if `collate` always returns the
        same batch for the same rows; else one collated batch.
        """
        if not self._step.sizer.layout.pads or not self._rows:
            return self
        all_rows = range(self.num_rows)
        random_state = RandomState(self._step.memory.device)
        batch = self.part(all_rows)
        try:
            collated = RowsOfBatch(batch)
        except SettingError:
            return self
        is_divisible = None not in collated.is_divided.values()
        is_divisible &= not any(map(is_unusual, arrays_in(batch)))
        if collated.num_rows != self.num_rows or not is_divisible:
            return self
        # If rows are collated one by one, reversed rows are in the batch in reverse.
        reversed_batch = self.part(all_rows[::-1])
        # Numbers that are drawn need not change this batch: they may mask a part now and then.
        draws = bool(random_state.changed())
        if not draws and _are_reversed(collated, RowsOfBatch(reversed_batch)):
            return CollatedRows(batch, self.part)
        if not draws and _are_equal(batch, self.part(all_rows)):
            # `collate` sorts rows or joins them in one tensor, so the batch cannot be divided.
            return self
        # Each call of `collate` draws other random numbers, such as masks, so divide one batch.
        if self.cuts and not collated.cuts:
            self._step.check.warn(
                "padding",
                "collate draws random numbers, so no check shows whether the model sees padding;"
                " if it does, pad all rows to one length",
            )
        return collated


class CollatedRows(RowsOfBatch):
    """A batch whose parts are collated by themselves, with the padding that they have in training.

    Args:
        batch: batch of all rows.
        collate_part: function that returns the batch of some rows.
    """

    def __init__(self, batch: Batch, collate_part: Callable[[Sequence[int]], Batch]) -> None:
        super().__init__(batch)
        self._collate_part = collate_part

    def part(self, rows: Sequence[int], /) -> Batch:
        if len(rows) == self.num_rows:
            return super().part(rows)
        return self._collate_part(rows)

    @property
    def cuts(self) -> bool:
        return True


class RowStep(PartStep):
    """Runs forward and backward of the rows of one step, and finds how many of the longest rows
    fit.

    Args:
        model: model on its device.
        optimizer: optimizer of its parameters.
        dataset: rows and their lengths.
        collate: function that makes one padded batch of a list of rows, on the host.
        mean_loss: function that returns the mean loss of a batch over its labels.
        num_labels: function that returns the number of labels; see :class:`.AdaptiveStep`.
        micro_batch_size: maximum rows at once; see :class:`.AdaptiveStep`.
        micro_batch_tokens: maximum padded tokens at once.
        options: options of a step.

    Attributes:
        dataset: as given.

    Raises:
        SettingError: an argument cannot be used, or packed rows are configured and would train the
            model differently from padded rows.
    """

    terms = Terms(
        function="mean_loss",
        split="make what belongs together one row of the dataset",
        share="return the mean over the labels of the batch",
        sum="return the mean over the labels of the batch",
        totals="",
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: DatasetAdapter,
        *,
        collate: Callable[[list[Row]], Batch],
        mean_loss: Callable[[Batch], torch.Tensor],
        num_labels: Callable[[Batch], Any] | None,
        micro_batch_size: int | str | None,
        micro_batch_tokens: int | str | None,
        options: StepOptions,
    ) -> None:
        functions = {"collate": collate, "mean_loss": mean_loss, "num_labels": num_labels}
        for key, function in functions.items():
            if not callable(function) and (function is not None or key != "num_labels"):
                raise SettingError(key, function, "give a function")
        super().__init__(
            model,
            self._forward_backward,
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            num_labels=num_labels,
            statistics=None,
            options=replace(options, overlap_reduction=False, count_labels_over="ranks"),
            name=getattr(mean_loss, "__name__", type(mean_loss).__name__),
        )
        self.dataset = dataset
        self._optimizer = optimizer
        self._collate = collate
        self._mean_loss = mean_loss
        self._options = options
        self._to_device = options.to_device or partial(move_to_device, device=self.memory.device)
        self._warned_unlabelled = False
        if not self.sizer.layout.pads:
            reason = self._why_not_packed()
            if reason:
                layout = self.sizer.layout.kind
                raise SettingError("micro_batch_layout", layout, f"{reason}; or give grouped")

    # --- a step

    def make_batch(self, rows: Sequence[Row]) -> Batch:
        """Return one batch of rows, on the host. `collate` gets copies of the rows, since a step
        may run again.
        """
        if not self.sizer.layout.pads:
            return pack_rows(rows, ignore_index=IGNORE_INDEX)
        return self._collate([dict(row) if type(row) is dict else row for row in rows])

    def _token_loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the token losses of a batch."""
        num_labels = self.num_labels(batch, 1)
        return check_loss(self._mean_loss(self._to_device(batch))) * num_labels

    def _forward_backward(self, part: Part) -> tuple[torch.Tensor, float] | None:
        """Run a part; return its loss and its number of labels, or None without labels."""
        num_labels = self.num_labels(part.batch, part.num_rows)
        if not num_labels and distributed.world_size() == 1 and not part.is_trial:
            # The mean over 0 labels is NaN. On several ranks, others wait for the collectives.
            return None
        with self._isolate_rows(part.batch):
            loss = check_loss(self._mean_loss(self._to_device(part.batch)))
            if part.share != 1.0:
                loss = loss * part.share
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), num_labels

    def _isolate_rows(self, batch: Batch) -> AbstractContextManager[object]:
        """Return a context that isolates packed rows, for forward and backward."""
        if self.sizer.layout.pads:
            return nullcontext()
        return isolated_rows(packed_lengths(batch))

    def run(self, rows: Sequence[Row], report: RankReport) -> StepResult:
        """Compute the gradients of the mean loss over the labels of a step on all ranks, and clip
        them.

        Args:
            rows: rows of this rank; none where other ranks have some.
            report: see :meth:`PartStep.run_rows`.

        Raises:
            SettingError: the bound was found for steps of one micro-batch, and this one has more
                rows.
            ValueError: gradients are not zero before the step.
        """
        reshard(self.model)
        if self.gradients():
            check_gradients_are_clear(self.model)
        self._check_batch_fits(report.batch_size)
        step_rows = RowsOfStep(self, rows)
        results = self.run_rows(step_rows, report)
        # Loss and number of labels of each part; _forward_backward() returned None without labels.
        with_labels = [result for result in results if result is not None]
        num_parts = len(with_labels)
        num_labels: float = sum(labels for _, labels in with_labels)
        loss = 0.0
        if with_labels:
            loss = float(torch.stack([loss_of_part for loss_of_part, _ in with_labels]).sum())
        num_tokens = sum(step_rows.lengths)
        run_tokens = sum(micro_batch.run_tokens for micro_batch in self.micro_batches)
        ranks = distributed.world_size()
        if ranks > 1:
            # Shares are relative to the mean number of labels of a rank, so the losses of all ranks
            # add up to `ranks` times the mean loss.
            own: list[Any] = [loss / ranks, num_labels, num_tokens, run_tokens]
            loss, num_labels, num_tokens, run_tokens = (
                sum(of_ranks) for of_ranks in zip(*distributed.all_gather(own), strict=True)
            )
            # All ranks ran the same number of parts, some of them as dummies.
            num_parts = self.num_micro_batches if num_labels else 0
            if not num_labels:
                self.drop_gradients()
        if not num_labels and not self._warned_unlabelled:
            self._warned_unlabelled = True
            log.warning(
                "a step of %d rows has no labels, so nothing is learned from it; check num_labels",
                report.num_rows,
            )
        return StepResult(
            loss=loss,
            num_labels=num_labels,
            rows=report.num_rows,
            tokens=num_tokens,
            micro_batches=num_parts,
            padding_fraction=max(0.0, 1 - num_tokens / max(1, run_tokens)),
            metrics={},
            grad_norm=self.clip(),
        )

    def _check_batch_fits(self, batch_size: int) -> None:
        """Raise SettingError for a batch that has to be split, if the search expected no split."""
        bound = self.sizer.max_batch_size
        if bound is None or batch_size <= bound:
            return
        if self.bound_excludes_gradients and not self.sizer.may_split:
            remedy = (
                f"{bound} rows fit without existing gradients, but later micro-batches of a step"
                " run with gradients in memory; call find_bound again for this batch size, or give"
                f" {bound} or less"
            )
            raise SettingError("batch_size", batch_size, remedy)

    @cached_property
    def labelled_row(self) -> Row:
        """First row with a label, for a rank without rows in a step."""
        for number in range(len(self.dataset)):
            row = self.dataset[number]
            if self.num_labels(self.make_batch([row]), 1):
                return row
        raise SettingError("dataset", type(self.dataset).__name__, "no row has a label")

    def estimate(
        self,
        devices: Any,
        *,
        maximum: int,
        context: int | None,
        headroom: int | float | str,
    ) -> MemoryEstimate:
        """Estimate how many of the longest rows a step can hold; see
        :func:`adaptive_batch.estimate_memory`.
        """
        from adaptive_batch.estimate import estimate_step

        longest = self.longest_rows()

        def forward_backward(device: FakeDevice, num_rows: int) -> None:
            # Rows are collated on the host.
            with private.disable_current_modes():
                batch = self.make_batch(longest.first(num_rows))
                isolated = self._isolate_rows(batch)
            tensors = {"batch": batch}
            # FakeDevice.move_batch() replaces the tensors in place.
            device.move_batch(tensors)
            with isolated:
                loss = check_loss(self._mean_loss(tensors["batch"]))
                loss.backward()  # type: ignore[no-untyped-call]

        return estimate_step(
            self.model,
            self._optimizer,
            forward_backward,
            self.clip,
            devices,
            sequence_length=longest.length,
            accumulates=self.sizer.may_split,
            maximum=check_whole("maximum", maximum),
            context=context,
            headroom=headroom,
        )

    # --- what fits

    def longest_rows(self, order: torch.Tensor | None = None) -> LongestRows:
        """Return the rows of trials.

        Args:
            order: numbers of the rows in the order of training; None if trials need none.
        """
        return LongestRows.of_dataset(
            self.dataset,
            are_alike=self.dataset.are_alike,
            order=None if order is None else lambda: order,
        )

    def find_bound(
        self,
        options: ProbeOptions,
        *,
        order: torch.Tensor,
        accumulates: bool,
        step_rows: int,
        timed_rows: int,
    ) -> ProbeResult:
        """Find how many rows fit, and run no more at once; see :meth:`PartStep.search`.

        Args:
            options: options of the search.
            order: numbers of the rows in the order of training.
            accumulates: whether a step may have several micro-batches even if its rows fit at once.
            step_rows: rows of a step on one device.
            timed_rows: rows of a step whose micro-batches are timed.
        """
        reshard(self.model)
        layouts: tuple[str, ...] = ()
        # Skip timing if a loaded state already has the fastest layout.
        must_time_layouts = (
            self.sizer.micro_batch_tokens == "auto" and self.sizer.throughput is None
        )
        if must_time_layouts and options.times_micro_batches:
            layouts = self._compare_layouts()
        scope = SearchScope(
            self.longest_rows(order),
            accumulates=accumulates or self.sizer.may_split,
            whole_step_rows=step_rows,
            layouts=layouts,
            timed_rows=timed_rows,
        )
        keep_gradients = None
        if distributed.world_size() > 1 and not self._options.sync_gradients_every_micro_batch:
            keep_gradients = partial(self._try_rows, is_last=False)
            # Run FSDP once: before that, its unsharded gradients cannot be dropped.
            self.record_collectives_of(RowsOfStep(self, self.dataset.longest(1)))
        tried = TriedStep(
            self,
            self._optimizer,
            self._try_rows,
            self.clip,
            row_length=self.dataset.length,
            keep_gradients=keep_gradients,
        )
        return self.search(tried, scope, options)

    def _try_rows(self, rows: Sequence[Row], *, is_last: bool = True) -> None:
        self.try_part(lambda: (self.make_batch(rows), len(rows)), is_last=is_last)

    def _compare_layouts(self) -> tuple[str, ...]:
        """Return the layouts that a search may choose, which all train the model alike. A
        collective.
        """
        configured = self._options.micro_batch_layout
        if configured is not None:
            return (configured,)
        return ("grouped",) if self._why_not_packed() else ("grouped", "packed")

    def _why_not_packed(self) -> str:
        """Return the reason why packed rows would train the model differently from padded rows;
        empty if they would not. A collective.
        """
        # A row of one token has no label.
        rows = self.dataset.longest(min(2, len(self.dataset)))
        if not all(map(_can_be_packed, rows)):
            return "rows are not mappings with `labels` and `tokens` or `input_ids`"
        return why_not_packed(
            self.model,
            self._token_loss,
            rows,
            collate=lambda rows, length: self._collate([dict(row) for row in rows]),
            pack=partial(pack_rows, ignore_index=IGNORE_INDEX),
        )

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the limits as plain values."""
        return {**super().state_dict(), "bound_accumulates": not self.bound_excludes_gradients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the bound of a later search is kept."""
        keeps_bound = self.sizer.max_batch_size is not None
        super().load_state_dict(state)
        if keeps_bound:
            return
        self.bound_excludes_gradients = not state["bound_accumulates"]
        if state["sizer"]["throughput"] and self.sizer.micro_batch_tokens == "auto":
            self.sizer.load_throughput(state["sizer"], kinds=self._compare_layouts())


def _can_be_packed(row: Row) -> bool:
    has_keys = isinstance(row, Mapping) and "labels" in row
    return has_keys and ("tokens" in row or "input_ids" in row)


def _are_reversed(batch: RowsOfBatch, other: RowsOfBatch) -> bool:
    """Return whether a batch has the rows of another one in reverse order."""
    if batch.num_rows != other.num_rows or batch.is_divided != other.is_divided:
        return False
    rows = range(batch.num_rows)
    batch, other = batch.uncut(), other.uncut()
    return all(
        _are_equal(batch.part([row]), other.part([other_row]))
        for row, other_row in zip(rows, reversed(rows), strict=True)
    )


def _are_equal(batch: Batch, other: Batch) -> bool:
    """Return whether two batches have the same tensors and arrays. NaN is equal to itself."""
    arrays, others = list(arrays_in(batch)), list(arrays_in(other))
    if [array.shape for array in arrays] != [array.shape for array in others]:
        return False
    return all(map(_is_equal, arrays, others))


def _is_equal(array: Any, other: Any) -> bool:
    if not isinstance(array, torch.Tensor):
        # NumPy has arrays of text too.
        return bool(array.tobytes() == other.tobytes())
    are_nan = (array != array) & (other != other)
    return bool(((array == other) | are_nan).all())
