"""Runs rows without gradients in micro-batches of their own, with a limit apart from training's.

With several ranks each runs its own rows, and all run the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLayout, micro_batches

from .oom_retry import OOMRetry, OutOfMemoryElsewhereError
from .sizing import MicroBatchSizer
from .step_runner import StepRunner

Result = TypeVar("Result")


class ForwardPasses:
    """Runs a function on rows in as large micro-batches as their own limit allows; where memory
    runs out, all of them again in smaller ones, whatever training does there.

    Args:
        runner: runner that trains the model.
        sizer: decides what one micro-batch may hold.
        row_length: tokens of a row.
        evaluates: kind of micro-batch by which ranks know its collectives, see
            :meth:`Sharding.micro_batch`.

    Attributes:
        sizer: as given.
    """

    def __init__(
        self,
        runner: StepRunner,
        sizer: MicroBatchSizer,
        *,
        row_length: Callable[[Any], int],
        evaluates: bool | str = True,
    ) -> None:
        self.sizer = sizer
        self._runner = runner
        self._row_length = row_length
        self._evaluates = evaluates
        self._retry = OOMRetry(
            sizer, memory=runner.memory, sharding=runner.sharding, is_of_training=False
        )

    def run(
        self,
        rows: Sequence[Any],
        forward: Callable[[Sequence[Any], int], Result],
        *,
        kind: str,
        dummy_row: Callable[[], Any] | None,
        doing: str,
        undo: Callable[[], object] = lambda: None,
    ) -> list[tuple[MicroBatch, Result]]:
        """Return what a function returns for each micro-batch of the rows; ranks call it together.

        Args:
            rows: rows of this rank; none where other ranks have some.
            forward: ``forward(rows, length)`` runs rows, padded to at least so many tokens each, as
                a micro-batch of the kind of this object.
            kind: kind of the layout of micro-batches.
            dummy_row: function that returns what a rank runs that has fewer micro-batches than
                another; needed where there are several.
            doing: end of a sentence, for a rank that is lost.
            undo: function that takes back what a failed attempt has changed besides results.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told.
        """

        def undo_all() -> None:
            self._runner.sharding.reset()
            undo()

        # Rows are cut by what training's micro-batches were found to take: more at once are not
        # faster where they are padded more.
        layout = self.sizer.layout.of_kind(kind, time=self._runner.sizer.layout.time)
        attempt = partial(self._attempt, rows, forward, layout, dummy_row)
        with self._runner.compilations.without_garbage():
            return self._retry.run(attempt, undo=undo_all, doing=doing)

    def _attempt(
        self,
        rows: Sequence[Any],
        forward: Callable[[Sequence[Any], int], Result],
        layout: MicroBatchLayout,
        dummy_row: Callable[[], Any] | None,
    ) -> list[tuple[MicroBatch, Result]]:
        lengths = list(map(self._row_length, rows))
        own = micro_batches(lengths, self.sizer.limit_of_step, layout)
        num_pieces = distributed.maximum(len(own))
        pieces: list[MicroBatch | None] = [*own, *[None] * (num_pieces - len(own))]
        idle = MicroBatch([], 0)
        dummy_rows = []
        if len(own) < num_pieces:
            assert dummy_row is not None, "several ranks need a dummy row"
            dummy_rows = [dummy_row()]
            idle = MicroBatch([0], layout.padded(self._row_length(dummy_rows[0])))
        results: list[tuple[MicroBatch, Result]] = []

        def run(number: int) -> None:
            piece = pieces[number]
            if piece is None:
                forward(dummy_rows, idle.length)
                return
            piece_rows = [rows[position] for position in piece.rows]
            results.append((piece, forward(piece_rows, piece.length)))

        kinds = [{"evaluates": self._evaluates}] * num_pieces
        self._retry.run_in_turn(
            pieces, run, drop=self._runner.sharding.reset, idle=idle, kinds=kinds
        )
        if distributed.any_of_ranks(self._retry.has_failed):
            raise OutOfMemoryElsewhereError
        return results
