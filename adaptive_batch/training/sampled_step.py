"""The step of a script as an estimate runs it: batches come from a sample of the longest rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from itertools import count as count_from
from typing import Any

import torch

from adaptive_batch._torch import disable_current_modes, tree_leaves, tree_map_only
from adaptive_batch._util import check_whole, count
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import (
    REPLAYED_STEPS,
    DevicesAsHost,
    FakeDevice,
    Fit,
    LengthPlan,
    PlannedSteps,
    Shape,
    batches_in_order,
    checked_lengths,
    lengths_of_quantiles,
)
from adaptive_batch.memory import RandomState

from .part_runner import PartRunner
from .parts import OwnSplit, Part, RowsOfBatch, Splittable, length_in_sample
from .split_check import CHECKED_SPLITS, largest_part

# Rows of a sample among which a shorter one is looked for.
_MOST_LOOKED_AT = 16


class SampledStep:
    """Runs batches of a sample on a device that is not here, and plans steps of real lengths.

    Args:
        sample: function that returns the `n` longest rows as a batch.
        parts: runs and plans parts.
        split_batch: function that makes a batch ready to be split.
        device: of the model.
        keeps_columns: whether parts keep the batch's columns, as where another shape would be
            compiled; a script's own function that splits batches does as it does.

    Attributes:
        longest: tokens of the sample's longest row; 0 where nothing shows them.
    """

    def __init__(
        self,
        sample: Callable[[int], Any],
        parts: PartRunner,
        split_batch: Callable[[Any], Splittable],
        *,
        device: torch.device,
        keeps_columns: bool,
    ) -> None:
        self._sample = sample
        self._parts = parts
        self._split_batch = split_batch
        self._keeps_columns = keeps_columns
        # A model on the meta device draws no random numbers; the sample may.
        if device.type == "meta":
            device = torch.device("cpu")
        self._device = device
        self.longest = length_in_sample(sample, split_batch, device)

    def run(self, device: FakeDevice, num_rows: int, width: int | None = None) -> None:
        """Run forward and backward of rows.

        Args:
            device: where tensors have no memory.
            num_rows: rows of the batch.
            width: tokens that they are padded to; None for those of the sample.
        """
        with disable_current_modes():
            batch = self._sample(num_rows)
            if width is not None:
                batch = self._shortened(batch, width)
        self._run_part(device, batch, num_rows, run=self._parts.run_alone)

    def evaluate(self, device: FakeDevice, num_rows: int, width: int) -> None:
        """Run what the check of a split runs of rows; the rest as in :meth:`run`.

        Raises:
            SettingError: the sample has fewer rows.
        """
        with disable_current_modes():
            batch = self._shortened(self._sample(num_rows), width)
            sampled_rows = self._split_batch(batch).num_rows
        if sampled_rows != num_rows:
            remedy = f"a check of a split has {num_rows}; return as many of sample({num_rows})"
            raise SettingError("sample", count(sampled_rows, "row"), remedy)
        self._run_part(device, batch, num_rows, run=self._parts.evaluate_alone)

    def _run_part(
        self, device: FakeDevice, batch: Any, num_rows: int, *, run: Callable[[Part], object]
    ) -> None:
        made = {"batch": batch}
        # What a sample has on the CPU a script has to copy to a model that is not there.
        device.batch(made, is_moved=self._device.type == "cpu")
        with DevicesAsHost(device):
            run(Part(made["batch"], num_rows, is_trial=True))

    def length_plan(
        self, lengths: Any, batch_size: int | None, *, maximum: int
    ) -> LengthPlan | None:
        """Return how rows of these lengths are divided and run; None without lengths.

        Args:
            lengths: tokens of each row, or their quantiles.
            batch_size: rows of the script's batches.
            maximum: more rows are of no interest.

        Raises:
            SettingError: lengths or batch size cannot be used.
        """
        if lengths is None:
            return None
        if not self.longest:
            remedy = "nothing in sample(1) shows the tokens of a row; leave lengths out"
            if isinstance(self._split_batch, OwnSplit):
                remedy = "SplitBatch has none of sample(1); give them there, or leave them out here"
            raise SettingError("lengths", "of a sample", remedy)
        keeps_columns = self._keeps_columns
        if isinstance(self._split_batch, OwnSplit):
            with RandomState(self._device):
                self._check_shortened()
                keeps_columns = not self._parts_are_cut(min(_MOST_LOOKED_AT, maximum))
        remedy = "give the rows of the script's batches, which lengths are drawn into"
        rows = check_whole("batch_size", batch_size, remedy=remedy)
        owner = "the longest row of sample(1)"
        if isinstance(lengths, Mapping):
            quantiles = lengths
            lengths = lengths_of_quantiles(quantiles, rows * REPLAYED_STEPS)
            # As given, since the longest that is drawn may be below it.
            checked_lengths([int(quantiles[1])], longest=self.longest, owner=owner)
        tokens = checked_lengths(lengths, longest=self.longest, owner=owner)

        def steps(fit: Fit) -> PlannedSteps:
            limit = self._parts.runner.sizer.limit_where_fits(
                fit.max_batch_size, length=self.longest, batch_size=rows
            )

            def divide(batch: Sequence[int]) -> list[MicroBatch]:
                if self._keeps_columns and not isinstance(self._split_batch, OwnSplit):
                    batch = [max(batch)] * len(batch)
                pieces = self._parts.plan(batch, limit)
                if keeps_columns:
                    return [replace(piece, length=max(batch)) for piece in pieces]
                return pieces

            splits = count_from(1)

            def check(batch: Sequence[int], pieces: Sequence[MicroBatch]) -> Iterator[Shape]:
                if len(pieces) < 2 or next(splits) not in CHECKED_SPLITS:
                    return
                for piece in self._checked(pieces):
                    length = max(batch if keeps_columns else [batch[row] for row in piece])
                    yield Shape(len(piece), length)

            return PlannedSteps.of(batches_in_order(tokens, rows), limit, divide, check)

        return LengthPlan(steps, self.run, self.evaluate)

    def _checked(self, pieces: Sequence[MicroBatch]) -> list[list[int]]:
        """Return the rows of the pieces that the check of a split evaluates."""
        if any(piece.own_lengths for piece in pieces):
            return []
        parts = [list(piece.rows) for piece in pieces]
        whole = sorted(chain.from_iterable(parts))
        largest, halves_of_largest = largest_part(parts)
        sizer = self._parts.runner.sizer
        is_bound_known = sizer.max_batch_size is not None or sizer.waits_for_search
        # As the check itself does.
        if is_bound_known and len(halves_of_largest) > 1:
            whole = largest
            parts = halves_of_largest
        return [whole, *parts] if len(parts) > 1 else []

    def _shortened(self, batch: Any, length: int) -> Any:
        """Return a batch of the longest rows as one of rows of a length."""
        if not isinstance(self._split_batch, OwnSplit):
            return RowsOfBatch(batch).shortened(length)

        # Where the tensors of one row have as many, so that rows are not taken for tokens.
        of_tensors = [_dimensions_of(tensor, self.longest) for tensor in _tensors(self._sample(1))]
        tensors = _tensors(batch)
        if len(tensors) != len(of_tensors):
            # Each row has tensors of its own.
            of_tensors = [_dimensions_of(tensor, self.longest) for tensor in tensors]
        dimensions = iter(of_tensors)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            for dimension in next(dimensions):
                tensor = tensor.narrow(dimension, 0, length)
            return tensor.contiguous()

        return tree_map_only(torch.Tensor, cut, batch)

    def _check_shortened(self) -> None:
        """Refuse a sample of which it is not known how shorter rows look.

        Raises:
            SettingError: rows of it that are cut to a length do not have that length.
        """
        length = max(1, self.longest // 2)
        lengths = self._split_batch(self._shortened(self._sample(1), length)).lengths
        if list(lengths or ()) != [length]:
            problem = (
                f"the row of sample(1) has {count(self.longest, 'token')}; with every dimension of"
                f" that size cut to {length}, SplitBatch gives it {lengths}"
            )
            remedy = (
                "give lengths in SplitBatch that follow from the shapes, or leave them out here"
            )
            raise SettingError("lengths", "together with split", f"{problem}; {remedy}")

        # Rows that lie end to end in one dimension are seen where there are two.
        batch = self._sample(2)
        own_lengths = list(self._split_batch(batch).lengths or ())
        lengths = self._split_batch(self._shortened(batch, length)).lengths
        if list(lengths or ()) != [min(own_length, length) for own_length in own_lengths]:
            problem = (
                f"the rows of sample(2) have {own_lengths} tokens; with every dimension cut to"
                f" {length} that is the row's in sample(1), SplitBatch gives them {lengths}"
            )
            remedy = (
                "give batches in which no rows lie end to end in one dimension, or leave lengths"
                " out here"
            )
            raise SettingError("lengths", "together with split", f"{problem}; {remedy}")

    def _parts_are_cut(self, num_rows: int) -> bool:
        """Return whether `part` is seen to drop what no row of a part uses, from rows of different
        lengths, of which a sample of so many rows is looked at.
        """
        batch = self._split_batch(self._sample(num_rows))
        lengths = list(batch.lengths or ())
        shortest = min(lengths, default=0)
        if shortest == max(lengths, default=0):
            return False
        part = batch.part([lengths.index(shortest)])
        return not any(_dimensions_of(tensor, self.longest) for tensor in _tensors(part))


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _dimensions_of(tensor: torch.Tensor, size: int) -> list[int]:
    return [dimension for dimension, own_size in enumerate(tensor.shape) if own_size == size > 1]
