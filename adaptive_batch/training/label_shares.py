"""The weighting of scripts: each part of a batch has its share of the labels, so that the gradients
of the parts add up to those of the batch. One part keeps the script's own bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, micro_batches, split_by_rows
from adaptive_batch.errors import SettingError

from .oom_retry import OutOfMemoryElsewhereError
from .parts import BatchSource, LabelCounter, Part, copy_containers
from .step import MicroBatchPlan, Step, StepSnapshot, Weighting

if TYPE_CHECKING:
    from .split_check import SplitCheck

Statistics = dict[str, Any]

# The kind of micro-batch by which ranks know its collectives: the function need not run the model
# as often as the loss does.
STATISTICS = "statistics"

_REMEDY = (
    "return a mapping of names to numbers or tensors that add up over parts, such as"
    ' {"loss": losses.sum(), "labels": count}, the same names and shapes for each part'
)


LENGTHS_REMEDY = (
    "nothing shows the tokens of a row; give split=, whose SplitBatch has lengths, or"
    " micro_batch_size"
)


class BatchStatistics:
    """Runs a function on each part of a batch, and adds up what it returns.

    The model is in the mode in which it is trained. Random numbers and persistent buffers are as
    before afterwards, so that the loss draws the same numbers, as if one forward had served both.

    Args:
        function: ``function(part)`` returns a mapping of names to numbers or tensors; None where a
            loss needs no statistics.
        step: runs the parts of a batch.
        over_ranks: whether sums are taken over all ranks, and not over this rank's batch.
    """

    def __init__(
        self,
        function: Callable[[Part], Mapping[str, Any]] | None,
        step: Step,
        *,
        over_ranks: bool,
    ) -> None:
        self._function = function
        self._step = step
        self._over_ranks = over_ranks
        self._snapshot = StepSnapshot(step.model, step.memory.device)

    @property
    def are_needed(self) -> bool:
        """Whether there is a function."""
        return self._function is not None

    def of_part(self, part: Part) -> Statistics:
        """Return the statistics of a part alone; empty where none are needed.

        Raises:
            SettingError: the function returned no mapping.
        """
        if self._function is None:
            return {}
        with torch.no_grad():
            statistics = self._function(part._replace(batch=copy_containers(part.batch)))
        if not isinstance(statistics, Mapping):
            raise SettingError("statistics", type(statistics).__name__, _REMEDY)
        return dict(statistics)

    def of_batch(
        self, rows: BatchSource, parts: Sequence[Part | None], plan: MicroBatchPlan
    ) -> Statistics:
        """Return the sums over the parts of a batch; empty where none are needed. A collective.

        Args:
            rows: rows of the batch.
            parts: parts of the batch, on all ranks as many; None where this rank has fewer.
            plan: their micro-batches.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory, and all came to the end.
            SettingError: parts have different statistics.
        """
        if self._function is None:
            return {}
        left = list(parts)

        def forward(_: MicroBatch | None) -> Statistics:
            part = left.pop(0)
            if part is not None:
                return self.of_part(part)
            if self._step.sharding.needs_dummy(is_last=not left):
                return self.of_part(Part(rows.dummy(), 1, share=0.0))
            return {}

        restore = self._snapshot.take()
        results = self._step.run_forward(
            plan, forward, retry=self._step.retry, evaluates=STATISTICS
        )
        restore()
        of_parts = [statistics for micro_batch, statistics in results if micro_batch is not None]
        if self._over_ranks:
            return self._sum_over_ranks(of_parts)
        # A rank without rows runs dummies alone, whose loss has weight 0.
        return sum_of(of_parts) or next((each for _, each in results if each), {})

    def _sum_over_ranks(self, of_parts: Sequence[Statistics]) -> Statistics:
        device = self._step.memory.device
        on_host = [_moved(statistics, torch.device("cpu")) for statistics in of_parts]
        return _moved(sum_of(list(chain(*distributed.all_gather(on_host)))), device)


def sum_of(statistics: Sequence[Statistics]) -> Statistics:
    """Return the sums by name; one alone as it is.

    Raises:
        SettingError: names or shapes differ.
    """
    if not statistics:
        return {}
    total, *others = statistics
    for other in others:
        if other.keys() != total.keys():
            names = " and ".join(str(sorted(each)) for each in (total, other))
            raise SettingError("statistics", f"of two parts {names}", _REMEDY)
        for name in total:
            shapes = [tuple(torch.as_tensor(each[name]).shape) for each in (total, other)]
            if shapes[0] != shapes[1]:
                value = f"{name} of shapes {shapes[0]} and {shapes[1]} of two parts"
                raise SettingError("statistics", value, _REMEDY)
        total = {name: value + other[name] for name, value in total.items()}
    return total


def _moved(statistics: Statistics, device: torch.device) -> Statistics:
    """Return statistics with their tensors on a device."""
    moved = {}
    for name, value in statistics.items():
        moved[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    return moved


class LabelShares(Weighting[list[Any]]):
    """The rows of a batch: makes its parts with their shares, and collects what the script's
    function returns of them.

    Args:
        step: runs the parts.
        forward_backward: function that runs forward and backward of a part.
        rows: rows of this rank.
        labels: counts the labels of a part.
        statistics: statistics of a batch.
        check: checks that a batch may be split.
        counts_over_ranks: whether labels and statistics are those of all ranks.
    """

    def __init__(
        self,
        step: Step,
        forward_backward: Callable[[Part], Any],
        rows: BatchSource,
        *,
        labels: LabelCounter,
        statistics: BatchStatistics,
        check: SplitCheck,
        counts_over_ranks: bool,
    ) -> None:
        self._step = step
        self._forward_backward = forward_backward
        self._rows = rows
        self._labels = labels
        self._statistics = statistics
        self._check = check
        self._counts_over_ranks = counts_over_ranks
        self._parts: list[Part | None] = []
        self._sums: Statistics = {}
        self._results: list[Any] = []

    @property
    def _rows_to_split(self) -> BatchSource:
        return self._rows.uncut() if self._check.keeps_columns else self._rows

    def divide(self) -> list[MicroBatch]:
        """Divide the rows within the limit.

        Raises:
            SettingError: the limit is in tokens, and lengths of rows are not known.
        """
        rows = self._rows_to_split
        sizer = self._step.sizer
        layout = sizer.layout
        if rows.is_packed:
            layout = layout.of_kind("packed", time=layout.time)
        limit = sizer.limit_of_step
        if rows.knows_lengths or not layout.keeps_order(limit):
            if rows.lengths is None:
                raise SettingError("micro_batch_tokens", "of a batch", LENGTHS_REMEDY)
            return micro_batches(rows.lengths, limit, layout)
        width = rows.width
        return [
            MicroBatch(piece, width) for piece in split_by_rows(range(rows.num_rows), limit.amount)
        ]

    def begin(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        """Make the parts with their shares and statistics, before the first backward.

        Returns:
            The plan; another one if the split check finds that parts keep all columns.

        Raises:
            SettingError: the loss of the batch is not the sum of its parts' shares.
        """
        keeps_columns = self._check.keeps_columns
        self._parts = self._make_parts(plan)
        if self._check.keeps_columns and not keeps_columns:
            return self.begin(MicroBatchPlan.agreed(self.divide(), ends=plan.ends))
        self._sums = self._statistics.of_batch(self._rows_to_split, self._parts, plan)
        return plan

    def drop(self) -> None:
        """Free the parts, statistics and results of a failed attempt."""
        self._parts = []
        self._sums = {}
        self._results = []

    def _make_parts(self, plan: MicroBatchPlan) -> list[Part | None]:
        """Return the parts with their shares of the labels: 0 of one that has no label. None where
        this rank has fewer than others.
        """
        rows = self._rows_to_split
        own = plan.micro_batches

        def make() -> list[Any]:
            return [rows.part(micro_batch.rows) for micro_batch in own]

        # Where this rank has no memory for them, it takes part in what ranks do together as one
        # without rows.
        batches = self._step.retry.prepare(make) or []
        if plan.number == 1 and not self._counts_over_ranks:
            return [Part(batch, rows.num_rows) for batch in batches] or [None]
        counts = [
            self._labels.candidates(batch, len(micro_batch.rows))
            for batch, micro_batch in zip(batches, own, strict=False)
        ]
        if plan.number > 1:
            self._check.check(rows, own, counts, num_parts=plan.number)
        labels = [count[self._check.counts_first_label] for count in counts]
        shares = self._shares(labels)
        labelled = [number for number, share in enumerate(shares) if share]
        parts: list[Part | None] = [None] * plan.number
        for number, (batch, share) in enumerate(zip(batches, shares, strict=True)):
            num_rows = len(own[number].rows)
            if len(own) == 1 and not self._counts_over_ranks:
                parts[number] = Part(batch, num_rows)
            else:
                # Without a share no loss is run, but statistics may count something else.
                parts[number] = Part(
                    batch,
                    num_rows,
                    share=share,
                    is_first=number in labelled[:1],
                    is_last=number in labelled[-1:],
                )
        return parts

    def _shares(self, labels: Sequence[float]) -> list[float]:
        total: float = sum(labels)
        if self._counts_over_ranks:
            # FSDP takes the mean over ranks.
            total = sum(distributed.all_gather(total)) / distributed.world_size()
        return [count / total if count else 0.0 for count in labels]

    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Call the function with the next part, or with a dummy of share 0 if other ranks wait."""
        # Drop our reference, so that this part is freed before the next one runs.
        part = self._parts.pop(0)
        if part is not None and part.share:
            self._results.append(self._forward_backward(part._replace(statistics=self._sums)))
        elif self._step.sharding.needs_dummy(is_last=is_last):
            dummy = Part(
                self._rows_to_split.dummy(),
                1,
                share=0.0,
                is_first=False,
                is_last=is_last,
                statistics=self._sums,
            )
            self._forward_backward(dummy)

    def end(self) -> list[Any]:
        """Return what the function returned of each part that has labels."""
        if distributed.any_of_ranks(self._step.retry.has_failed):
            raise OutOfMemoryElsewhereError
        return self._results
