"""A step of the recipes: rows whose token losses are summed, and divided once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, micro_batches

from .agreement import RankReport
from .clipping import clip_gradients
from .oom_retry import OOMRetry
from .reference_pass import REFERENCE_VALUES, ReferencePass, RowReference
from .row_loss import Row, RowLoss
from .sizing import MicroBatchSizer
from .step import Step
from .step_result import StepResult
from .sum_then_divide import SumThenDivide

Result = TypeVar("Result")


class RecipeStep(Step):
    """Forward and backward of the rows of one step, in as many micro-batches as the sizer asks for.

    Args:
        model: model whose gradients are summed; they must be clear when :meth:`run` begins.
        loss: loss of its rows.
        sizer: decides what one micro-batch may hold.
        max_grad_norm: norm that all gradients are clipped to; infinity measures it, None does
            neither.
        scale_gradients: False with the optimizer in backward, whose only micro-batch is stepped as
            it comes.
        measures_noise: whether steps may sample the gradient's noise.
        reference: what the loss takes of each row from a frozen reference, if that runs in
            micro-batches of its own; None where the loss runs it, or there is none.
        options: see :class:`Step`.

    Attributes:
        loss: as given.
        reference: runs the reference; None where the loss does, or there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: RowLoss,
        sizer: MicroBatchSizer,
        *,
        max_grad_norm: float | None = None,
        scale_gradients: bool = True,
        measures_noise: bool = False,
        reference: RowReference | None = None,
        **options: Any,
    ) -> None:
        assert scale_gradients or not measures_noise, (
            "there are no gradients to measure with the optimizer in backward"
        )
        super().__init__(model, sizer, **options)
        self.loss = loss
        self._scales_gradients = scale_gradients
        self._max_grad_norm = max_grad_norm
        self._measures_noise = measures_noise
        self.reference: ReferencePass | None = None
        if reference is not None:
            self.reference = ReferencePass(self, loss, reference)

    def run(
        self,
        rows: Sequence[Row],
        report: RankReport,
        *,
        measures_noise: bool = False,
    ) -> StepResult:
        """Compute and clip the gradients of the mean loss over all label tokens, or over all rows
        if the loss counts rows. All ranks agree on the step before.

        Args:
            rows: rows of this rank; none where other ranks have some.
            report: what this rank reports to the others; its batch size is, with accumulation, that
                of one of its batches.
            measures_noise: whether the noise is sampled with the first micro-batch of each rank.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            GrowthFunctionError: a rule has answered differently on some rank.
            RankLostError: out of memory on this rank where the others cannot be told.
        """
        assert not measures_noise or self._measures_noise
        # It is what their losses are divided by.
        assert report.num_rows or not self.loss.counts_rows
        weighting = SumThenDivide(
            self,
            self.loss,
            rows,
            global_rows=report.num_rows,
            scales_gradients=self._scales_gradients,
            measures_noise=measures_noise,
            clip=self.clip,
        )
        plan = self.agree(weighting, report)
        if self.reference is not None:
            weighting.reference_values = self.reference.of_rows(rows)
        return self.run_step(weighting, plan)

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients as configured; return the norm that they had."""
        return clip_gradients(self.model, self._max_grad_norm)

    # --- without gradients

    def evaluate_rows(
        self,
        rows: Sequence[Row],
        forward: Callable[[Sequence[Row], int], Result],
        *,
        retry: OOMRetry,
        loss: RowLoss,
        kind: str,
        doing: str,
        evaluates: bool | str = True,
        undo: Callable[[], object] = lambda: None,
    ) -> list[tuple[MicroBatch, Result]]:
        """Run a function on rows without gradients, in micro-batches within the limit of `retry`.

        Args:
            rows: rows of this rank; none where other ranks have some.
            forward: ``forward(rows, length)`` runs rows, padded to at least `length` tokens each.
            retry: runs micro-batches.
            loss: knows the lengths of rows, and the dummy of a rank that has fewer micro-batches.
            kind: kind of the layout of micro-batches.
            doing, evaluates, undo: see :meth:`Step.evaluate`, which also says what is raised.

        Returns:
            Each micro-batch with what the function returned.
        """
        # Rows are divided by what training's micro-batches were found to take: more at once are not
        # faster where they are padded more.
        layout = retry.sizer.layout.of_kind(kind, time=self.sizer.layout.time)
        lengths = list(map(loss.row_length, rows))
        idle = MicroBatch([], 0)
        dummies: list[Row] = []
        if distributed.world_size() > 1:
            dummies = [loss.some_row()]
            idle = MicroBatch([0], layout.padded(loss.row_length(dummies[0])))

        @torch.no_grad()
        def run(micro_batch: MicroBatch | None) -> Result:
            if micro_batch is None:
                return forward(dummies, idle.length)
            return forward([rows[number] for number in micro_batch.rows], micro_batch.length)

        results = self.evaluate(
            lambda: micro_batches(lengths, retry.sizer.limit_of_step, layout),
            run,
            retry=retry,
            doing=doing,
            evaluates=evaluates,
            idle=idle,
            undo=undo,
        )
        return [(micro_batch, result) for micro_batch, result in results if micro_batch is not None]

    def sum_losses(self, rows: Sequence[Row], length: int, *, loss: RowLoss) -> tuple[float, int]:
        """Return the sum of the token losses of a micro-batch and its label tokens.

        One without any label is not run on one rank.

        Args:
            rows: of the micro-batch.
            length: tokens that they are padded to at least.
            loss: how they become a batch.
        """
        with loss.collated(rows, self.sizer.layout, length) as batch:
            if distributed.world_size() == 1 and not self.loss.count_labels(batch):
                return 0.0, 0
            mean, count = self.loss.loss_and_labels(batch)
            if not count:
                return 0.0, 0
            return (mean * count).item(), int(count)

    # --- trials

    def record_collectives_of_row(self) -> None:
        """Let even the first micro-batch be brought to its end; all of several ranks call it, where
        no trial has run.

        Raises:
            RankLostError: out of memory.
        """
        assert self._scales_gradients
        row = self.loss.some_row()

        def run() -> None:
            for is_last in (False, True):
                self.try_rows([row], is_last=is_last)
            self.try_evaluation([row])
            if self.reference is not None:
                self.reference.try_rows([row])

        self.record_collectives(run, MicroBatch([0], self.loss.row_length(row)))

    def try_rows(self, rows: Sequence[Row], *, is_last: bool = True) -> None:
        """Run one micro-batch as :meth:`run` does, whether it has labels or not, and forget what it
        computed.
        """
        # The batch is there until the micro-batch has ended, as in training.
        with self.trial(is_last=is_last), self.loss.collated(rows, self.sizer.layout) as batch:
            if self.reference is not None:
                batch[REFERENCE_VALUES] = self.reference.dummy_values(len(rows))
            loss, count = self.loss.loss_and_labels(batch)
            if self._scales_gradients and not self.loss.counts_rows:
                loss = loss * count
            loss.backward()  # type: ignore[no-untyped-call]

    def try_evaluation(
        self, rows: Sequence[Row], *, loss: RowLoss | None = None, length: int = 0
    ) -> None:
        """Run one micro-batch without gradients, whether it has labels or not, and forget what it
        computed; the arguments are those of :meth:`sum_losses`.
        """
        own_loss = loss or self.loss
        collated = own_loss.collated(rows, self.sizer.layout, length)
        with collated as batch, torch.no_grad(), self.trial(evaluates=True):
            mean, count = self.loss.loss_and_labels(batch)
            if count:
                (mean * count).item()

    def keep_gradients(self, rows: Sequence[Row]) -> None:
        """Leave what is there in mid-step: unsharded gradients and, where noise is measured, the
        first micro-batch's reduced ones.
        """
        if self._measures_noise:
            self.try_rows(rows)
        self.try_rows(rows, is_last=False)
