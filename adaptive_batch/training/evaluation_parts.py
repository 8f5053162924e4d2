"""Runs the batches of an evaluation that another library's trainer has made; a batch that runs out
of memory runs again in parts, whose results are joined.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from adaptive_batch import distributed
from adaptive_batch.data import NO_LIMIT, MicroBatch, split_by_rows
from adaptive_batch.distributed import sharding_of
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.memory import RandomState, device_memory

from .oom_retry import OOMRetry
from .options import StepOptions
from .parts import (
    BatchSource,
    LabelCounter,
    SplitBatch,
    copy_containers,
    named_items,
    rebuild,
)
from .sizing import MicroBatchSizer
from .splitters import CustomSplit, RowSplitter

log = logging.getLogger("adaptive_batch")

# Results of rows by name: numbers that parts have one of, and outputs with an entry for each row.
Results = dict[str, Any]
# Counts of a part: labels without the first of each row, all labels, and rows.
_Counts = tuple[float, float, int]
_ROWS = 2
# Numbers of parts combine as a mean that is weighted by one of the three counts, or as a sum.
_SUM = 3
# Differences of numbers that rounding may cause, as shares of them.
_TOLERANCE_FLOAT32 = 1e-3
_TOLERANCE = 1.5e-2
# A difference that weights of another kind hardly come to.
_ROUNDING = 1e-6
# Outputs depend on other rows if they differ by this share of their norm in 16 bits, or if this
# share of whole numbers differs.
_OTHER_OUTPUTS = 0.05
_OTHER_NUMBERS = 0.1
_PADDING = -100


class EvaluationParts:
    """Runs batches without gradients, each at once until memory runs out.

    The limit of a part is apart from training's and from other ranks', and is tried again as in
    training. Parts keep all columns of the batch. At the first split, and at later ones at growing
    distances, the first part runs again, whole and in halves: that shows which weights give the
    number of the whole, and outputs that differ by more than rounding are refused.

    Args:
        model: model that is evaluated.
        split: function that returns :class:`SplitBatch` of a batch; None splits it by rows.
        num_labels: function that counts labels, see :class:`.AdaptiveStep`.
        is_sum: whether the loss is known to be a sum.
        is_shifted: whether the loss leaves the first label of each row out, as far as is known.
        is_exact: whether the model runs without autocast.
        must_check: whether results that cannot be compared are refused; False warns of them.
        fix: fix of a batch that cannot run in parts, in the imperative.
        options: how a step runs.

    Attributes:
        model: as given.
        sizer: limits a part.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        split: Callable[[Any], SplitBatch] | None,
        num_labels: Callable[[Any], Any] | None,
        is_sum: bool = False,
        is_shifted: bool = False,
        is_exact: bool,
        must_check: bool = False,
        fix: str,
        options: StepOptions,
    ) -> None:
        self.model = model
        self._fix = fix
        self._is_exact = is_exact
        self._must_check = must_check
        self._has_others = distributed.world_size() > 1
        self._split: RowSplitter | CustomSplit = (
            RowSplitter(trims=False, keeps_rows=True) if split is None else CustomSplit(split)
        )
        self._labels = LabelCounter(num_labels)
        self._parameter = next(model.parameters())
        self._memory = options.memory or device_memory(
            self._parameter.device, shared_by=distributed.local_world_size()
        )
        self.sizer = MicroBatchSizer(
            memory=self._memory,
            policy=options.oom_policy,
            on_change=partial(
                options.report_change, kind="validation_limit", prefix="evaluation: "
            ),
        )
        with distributed.alone():
            self._sharding = sharding_of(model)
        self._retry = OOMRetry(
            self.sizer,
            memory=self._memory,
            sharding=self._sharding,
            retries=options.on_out_of_memory == "shrink",
            remedies="shorten the rows, or keep fewer predictions on the device",
        )
        # The likeliest first.
        self._all_weights = [0, 1, _ROWS, _SUM] if is_shifted else [1, 0, _ROWS, _SUM]
        if is_sum:
            self._all_weights.reverse()
        # Ways that no check has excluded, for each number.
        self._weights: dict[str, list[int]] = {}
        self._num_splits = 0

    def run(
        self,
        batch: Any,
        forward: Callable[[Any], Results],
        *,
        prepare: Callable[[Any], Any],
        snapshot: Callable[[], Callable[[], object]],
    ) -> tuple[Results, list[float]]:
        """Return the results of a batch, and the weight of each part that has run.

        Args:
            batch: batch of the trainer.
            forward: function that returns the results of the batch as it is, or of a prepared part.
            prepare: function that prepares the batch for the split.
            snapshot: function that returns the function which puts everything back as it is now.

        Raises:
            DoesNotFitError: one row alone ran out of memory, or the results of parts are not those
                of the batch.
        """
        rows: BatchSource | None = None
        kept = copy_containers(batch)

        def split() -> BatchSource:
            try:
                split_rows = self._split(prepare(kept))
            except SettingError as error:
                raise self._cannot_split(str(error)) from error
            self.sizer.begin_step(split_rows.num_rows)
            if split_rows.is_packed:
                raise self._cannot_split("documents are packed into one row")
            return split_rows

        with distributed.alone():
            self.sizer.agree()
            self.sizer.begin_step(NO_LIMIT)
            if self.sizer.limit_of_step.amount < NO_LIMIT:
                rows = split()
            undo = snapshot()

            def undo_attempt() -> None:
                nonlocal rows, undo
                self._sharding.reset()
                undo()
                if rows is None:
                    rows = split()
                    undo = snapshot()
                    self._retry.set_suspects([MicroBatch([*range(rows.num_rows)], rows.width)])

            attempts = self._retry.attempts(undo=undo_attempt, doing="in an evaluation")
            for attempt in attempts:
                with attempt:
                    if rows is None:
                        results = forward(batch), [1.0]
                    else:
                        results = self._run_parts(rows, forward, snapshot)
        return results

    def _run_parts(
        self,
        rows: BatchSource,
        forward: Callable[[Any], Results],
        snapshot: Callable[[], Callable[[], object]],
    ) -> tuple[Results, list[float]]:
        pieces = split_by_rows(range(rows.num_rows), self.sizer.limit_of_step.amount)
        self._retry.set_suspects([MicroBatch([*piece], rows.width) for piece in pieces])
        results, counts = self._run_each(rows, pieces, forward)
        if len(pieces) == 1:
            return results[0], [1.0]
        self._num_splits += 1
        joined, is_ambiguous = self._join(results, counts)
        # A check may have left several weights; where these differ now, check again.
        if self._num_splits & (self._num_splits - 1) == 0 or (self._weights and is_ambiguous):
            self._check(rows, pieces[0], forward, snapshot)
            joined, is_ambiguous = self._join(results, counts)
            if self._weights and is_ambiguous:
                self._leave_unchecked("several ways to add up its losses fit the first part")
        weight, *_ = self._weights.get("loss", self._all_weights)
        # Metrics of rows whose losses are added up are means over rows.
        return joined, _factors(min(weight, _ROWS), counts)

    def _run_each(
        self, rows: BatchSource, pieces: Sequence[Sequence[int]], forward: Callable[[Any], Results]
    ) -> tuple[list[Results], list[_Counts]]:
        results = []
        counts = []
        error = self._cannot_split("other ranks would wait for the collectives of its parts")
        for piece in pieces:
            part = rows.part(piece)
            # Before a function pops its labels.
            counts.append((*self._labels.candidates(part, len(piece)), len(piece)))
            with (
                self._sharding.micro_batch(evaluates=True),
                distributed.refuse_collectives(error) if self._has_others else nullcontext(),
            ):
                results.append(forward(part))
        return results, counts

    # --- checks

    def _check(
        self,
        rows: BatchSource,
        piece: Sequence[int],
        forward: Callable[[Any], Results],
        snapshot: Callable[[], Callable[[], object]],
    ) -> None:
        """Compare the results of a part with those of its halves.

        Raises:
            DoesNotFitError: they differ.
        """
        if len(piece) == 1:
            self._leave_unchecked("no two rows fit at once")
            return
        undo = snapshot()
        random_state = RandomState(self._memory.device)
        middle = len(piece) // 2
        (whole,), _ = self._run_each(rows, [piece], forward)
        undo()
        halves, counts = self._run_each(rows, [piece[:middle], piece[middle:]], forward)
        draws = random_state.changed()
        random_state.restore()
        undo()
        if draws:
            self._leave_unchecked("it draws random numbers")
            return
        joined, _ = self._join(halves, counts)
        others = _leaves(joined)
        for name, (value, *parts) in self._by_name([whole, *halves]).items():
            if _is_number(value):
                self._check_weights(name, value, parts, counts)
            elif self._differ(value, others[name]):
                form = tuple(value.shape)
                raise self._cannot_split(f"a row's {name} of {form} depend on others")

    @property
    def _is_float32(self) -> bool:
        # Evaluation may cast the model.
        return self._is_exact and self._parameter.dtype.itemsize >= torch.float32.itemsize

    def _differ(self, whole: torch.Tensor, halves: torch.Tensor) -> bool:
        """Return whether outputs differ by more than rounding."""
        if not whole.is_floating_point():
            # Generated tokens may differ by rounding, in number too.
            is_like = whole.shape == halves.shape
            return is_like and float((whole != halves).double().mean()) > _OTHER_NUMBERS
        tolerance = _TOLERANCE_FLOAT32 if self._is_float32 else _OTHER_OUTPUTS
        if whole.shape != halves.shape:
            return True
        return bool((whole - halves).norm() > tolerance * whole.norm())

    def _check_weights(
        self, name: str, whole: Any, parts: Sequence[Any], counts: Sequence[_Counts]
    ) -> None:
        if math.isnan(float(whole)):
            return
        tolerance = _TOLERANCE_FLOAT32 if self._is_float32 else _TOLERANCE
        totals = self._totals(name, parts, counts)
        # NaN where a half without labels counts; losses of both signs may cancel out.
        values = [abs(float(value)) for value in (whole, *parts)]
        scale = max(filter(math.isfinite, values), default=0.0)
        differences = {weight: abs(float(total - whole)) for weight, total in totals.items()}
        least = min(filter(math.isfinite, differences.values()), default=math.inf)
        if least > tolerance * scale:
            raise self._cannot_split(f"the {name} is not a mean or a sum over rows or labels")
        near = 10 * least + _ROUNDING * scale
        # The nearest first.
        self._weights[name] = sorted(
            (weight for weight in totals if differences[weight] <= near),
            key=differences.__getitem__,
        )

    def _leave_unchecked(self, reason: str) -> None:
        if self._must_check:
            raise self._cannot_split(f"its results cannot be checked, as {reason}")
        if self._num_splits == 1:
            log.warning(
                "evaluation: results of parts are not checked, as %s; they are those of the batch"
                " if no row depends on the others and the loss is a mean over labels",
                reason,
            )

    # --- results

    def _by_name(self, results: Sequence[Results]) -> dict[str, list[Any]]:
        leaves = [_leaves(result) for result in results]
        if any(each.keys() != leaves[0].keys() for each in leaves):
            raise self._cannot_split("its parts have results of different forms")
        return {name: [each[name] for each in leaves] for name in leaves[0]}

    def _join(self, results: Sequence[Results], counts: Sequence[_Counts]) -> tuple[Results, bool]:
        """Join the results of all parts: numbers by their weights, and outputs by rows, whose other
        columns are padded where parts differ.

        Returns:
            The results, and whether the weights that are left give different numbers.
        """
        joined: Results = {}
        is_open = False
        for name, values in self._by_name(results).items():
            if _is_number(values[0]):
                totals = [*self._totals(name, values, counts).values()]
                joined[name] = totals[0]
                difference = float(max(totals) - min(totals))
                is_open |= difference > _ROUNDING * abs(float(min(totals)))
            else:
                joined[name] = self._join_rows(name, values, counts)

        def replace(value: Any, name: str) -> Any:
            return joined[name] if name in joined else rebuild(value, name, replace)

        return {name: replace(value, name) for name, value in results[0].items()}, is_open

    def _join_rows(self, name: str, values: Sequence[Any], counts: Sequence[_Counts]) -> Any:
        for value, (*_, rows) in zip(values, counts, strict=True):
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (rows,):
                form = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value)
                raise self._cannot_split(f"{name}, {form} of {rows} rows, has no entry per row")
        if values[0].dim() == 1:
            return torch.cat([*values])
        all_rows = [row for value in values for row in value]
        return pad_sequence(all_rows, batch_first=True, padding_value=_PADDING)

    def _totals(
        self, name: str, values: Sequence[Any], counts: Sequence[_Counts]
    ) -> dict[int, Any]:
        """Return the number of all parts by each weight that is left."""
        return {
            weight: sum(
                factor * value
                for factor, value in zip(_factors(weight, counts), values, strict=True)
                if factor
            )
            for weight in self._weights.get(name, self._all_weights)
        }

    def _cannot_split(self, problem: str) -> DoesNotFitError:
        """Return the error of a batch that cannot run in parts, for a reason."""
        return DoesNotFitError(
            f"a batch of the evaluation ran out of memory, and cannot run in parts: {problem};"
            f" {self._fix}"
        )


def _leaves(value: Any, name: str = "") -> Results:
    """Return the values in a container by name, without None."""
    if value is not None and not isinstance(value, Mapping | list | tuple):
        return {name: value}
    items = named_items(value, name)
    return {path: leaf for key, item in items for path, leaf in _leaves(item, key).items()}


def _is_number(value: Any) -> bool:
    is_array = isinstance(value, torch.Tensor)
    return (is_array and not value.dim() and value.dtype != torch.bool) or isinstance(
        value, int | float
    )


def _factors(weight: int, counts: Sequence[_Counts]) -> list[float]:
    """Return the factor of each part's number."""
    total: float = 0 if weight == _SUM else sum(count[weight] for count in counts)
    # The loss of no label is NaN or 0, of any part.
    return [count[weight] / total if total else 1.0 for count in counts]
