"""The rows that a search tries, on fake tensors: the longest, and others in training's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

from adaptive_batch.data import MicroBatch
from adaptive_batch.estimate import Between, Run, TrialPiece
from adaptive_batch.training import WorstRows, varying_steps

from .fake_run import FakeRun, Rows

# Steps of training's own that follow one of the longest rows.
_STEPS = 5


class TriedRows:
    """Forward and backward of rows of each length that steps of a search have.

    Args:
        run: run whose step is traced.
        longest: forward and backward of the longest rows.
        tokens: tokens of each of these.
        lengths: tokens of all rows, in training's order; none where all are of one length.
        rows_of: function that returns rows of a length.
    """

    def __init__(
        self,
        run: FakeRun,
        longest: Run,
        tokens: int,
        *,
        lengths: Sequence[int],
        rows_of: Callable[[int], Rows],
    ) -> None:
        self._run = run
        self._longest = longest
        self._tokens = tokens
        self._lengths = lengths or [tokens]
        self._layout = run.data.configured_layout
        self._padded = cache(lambda length: run.forward_backward(rows_of(length)))
        self._packed = cache(self._pack)
        self._shorter = sorted(self._lengths)[len(self._lengths) // 2]
        if self._layout.padded(self._shorter) == self._layout.padded(tokens):
            # Nothing lies between rows of one padded length.
            self._shorter = min(self._lengths)

    def steps(self, rows: int) -> list[Run | Between]:
        """Return a step of so many of the longest rows, training's first ones, and one of the
        longest again, beside the optimizer's states.
        """
        steps: list[Run | Between] = [self._longest]
        for step in range(_STEPS):
            longest_drawn = max(self._in_order(step * rows, rows))
            steps.append(self._of_piece(MicroBatch(list(range(rows)), longest_drawn)))
        return [*steps, self._longest]

    def trial(self, rows: int, *, accumulates: bool) -> list[list[TrialPiece]]:
        """Return the micro-batches of each step of a search's trial of so many rows."""
        worst = WorstRows(lambda size: [self._tokens] * size, self._tokens, "", self._in_order)
        steps = varying_steps(
            worst,
            rows,
            sizer=self._run.trainer.runner.sizer,
            row_length=int,
            accumulates=accumulates,
        )
        return [
            [TrialPiece(len(piece.rows), self._of_piece(piece), piece.size) for piece, _ in step]
            for step in steps
        ]

    def _in_order(self, begin: int, num_rows: int) -> list[int]:
        numbers = range(begin, begin + num_rows)
        return [self._lengths[number % len(self._lengths)] for number in numbers]

    def _of_piece(self, piece: MicroBatch) -> Run | Between:
        if piece.own_lengths:
            length = Fraction(sum(piece.own_lengths), len(piece.own_lengths))
            own = self._packed(len(piece.own_lengths), sum(piece.own_lengths))
        else:
            length = Fraction(self._layout.padded(piece.length))
            own = self._padded(int(length))
        shortest = self._layout.padded(self._shorter)
        longest = self._layout.padded(self._tokens)
        if length == longest:
            return self._longest
        share = (length - shortest) / (longest - shortest)
        return Between(self._padded(self._shorter), self._longest, share, own)

    def _pack(self, num_rows: int, num_tokens: int) -> Run:
        return self._run.forward_backward(
            lambda _: self._run.job.task.rows_to_pack(num_rows, num_tokens)
        )
