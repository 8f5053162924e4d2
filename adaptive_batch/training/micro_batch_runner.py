"""Runs a step as micro-batches: gradients are sums of token losses over one count of label tokens,
or means over rows, each weighted by its share of the step's rows.

Several ranks each run their own rows, all in the same number of micro-batches: a rank that has
fewer runs dummy batches of weight 0, and one that runs out of memory issues dummy collectives until
the ranks count their label tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, micro_batches

from .agreement import Division, Question
from .clipping import clip_gradients
from .gradients import SummedGradients
from .oom_retry import OutOfMemoryElsewhereError
from .reference_pass import REFERENCE_VALUES, ReferencePass, RowReference
from .row_loss import Batch, Row, RowLoss
from .sizing import MicroBatchSizer
from .step_result import StepResult
from .step_runner import StepRunner
from .step_sums import SmallBatch, StepSums


class MicroBatchRunner(StepRunner):
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
        options: see :class:`StepRunner`.

    Attributes:
        loss: as given.
        scales_gradients: as given.
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
        self.scales_gradients = scale_gradients
        self._max_grad_norm = max_grad_norm
        self._measures_noise = measures_noise
        self.reference: ReferencePass | None = None
        if reference is not None:
            self.reference = ReferencePass(self, loss, reference)

    def divide(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Divide rows of this rank within the limit."""
        lengths = list(map(self.loss.row_length, rows))
        return micro_batches(lengths, self.sizer.limit_of_step, self.sizer.layout)

    def run(
        self,
        rows: Sequence[Row],
        question: Question,
        *,
        measures_noise: bool = False,
    ) -> StepResult:
        """Leave in the gradients the mean over the label tokens of all `rows`, or over these,
        clipped; all ranks agree on the step before.

        Args:
            rows: rows of this rank; none where other ranks have some.
            question: what this rank says of the step to the others; its batch size is, with
                accumulation, that of one of its batches.
            measures_noise: whether the noise is sampled with the first micro-batch of each rank.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            GrowthFunctionError: a rule has answered differently on some rank.
            RankLostError: out of memory on this rank where the others cannot be told.
        """
        assert not measures_noise or self._measures_noise
        # It is what their losses are divided by.
        assert question.num_rows or not self.loss.counts_rows
        divide = partial(self.divide, rows)
        division = self.agree_on(divide, question)
        values = None
        if self.reference is not None:
            values = self.reference.of_rows(rows)

        def attempt(division: Division) -> StepResult:
            run = _StepAttempt(self, rows, values, global_rows=question.num_rows).run
            return run(division, measures_noise=measures_noise)

        return self.run_step(attempt, divide, division)._replace(ends=division.ends)

    def learn_from_a_row(self) -> None:
        """Let even the first micro-batch be brought to its end; all of several ranks call it, where
        no trial has run.

        Raises:
            RankLostError: out of memory.
        """
        assert self.scales_gradients
        row = self.loss.some_row()

        def run() -> None:
            for is_last in (False, True):
                self.try_rows([row], is_last=is_last)
            self.evaluate([row], is_trial=True)
            if self.reference is not None:
                self.reference.try_rows([row])

        self.learn_collectives(run, MicroBatch([0], self.loss.row_length(row)))

    def try_rows(self, rows: Sequence[Row], *, is_last: bool = True) -> None:
        """Run one micro-batch as :meth:`run` does, whether it has labels or not, and forget what it
        computed.
        """
        # The batch is there until the micro-batch has ended, as in training.
        with self.trial(is_last=is_last), self.loss.collated(rows, self.sizer.layout) as batch:
            self.make_up_values(batch, len(rows))
            loss, count = self.loss.loss_and_labels(batch)
            if self.scales_gradients and not self.loss.counts_rows:
                loss = loss * count
            loss.backward()  # type: ignore[no-untyped-call]

    def keep_gradients(self, rows: Sequence[Row]) -> None:
        """Leave what is there in mid-step: unsharded gradients and, where noise is measured, the
        first micro-batch's reduced ones.
        """
        if self._measures_noise:
            self.try_rows(rows)
        self.try_rows(rows, is_last=False)

    def evaluate(
        self,
        rows: Sequence[Row],
        *,
        loss: RowLoss | None = None,
        length: int = 0,
        is_trial: bool = False,
    ) -> tuple[float, int]:
        """Return the sum of the token losses of a micro-batch and its label tokens, without
        gradients.

        One without any label is run only in a trial, or where other ranks may have some.

        Args:
            rows: of the micro-batch.
            loss: how they become a batch; None as in training.
            length: tokens that they are padded to at least.
            is_trial: whether this is one.
        """
        own_loss = loss or self.loss
        with own_loss.collated(rows, self.sizer.layout, length) as batch:
            if not is_trial and distributed.world_size() == 1 and not self.loss.count_labels(batch):
                return 0.0, 0
            running = self.trial if is_trial else self.sharding.micro_batch
            with torch.no_grad(), running(evaluates=True):
                mean, count = self.loss.loss_and_labels(batch)
                if not count:
                    return 0.0, 0
                return (mean * count).item(), int(count)

    def make_up_values(self, batch: Batch, num_rows: int) -> None:
        """Add to a batch whose loss does not count what it takes from the reference that runs
        apart.
        """
        if self.reference is not None:
            batch[REFERENCE_VALUES] = self.reference.made_up(num_rows)

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients as configured; return the norm that they had."""
        return clip_gradients(self.model, self._max_grad_norm)


class _StepAttempt:
    """One attempt at a step: runs its micro-batches, and sums what they leave.

    Args:
        runner: runs them.
        rows: rows of this rank.
        values: numbers of each of them that the reference has computed, if it runs apart.
        global_rows: rows of all ranks, where the loss counts rows.
    """

    def __init__(
        self,
        runner: MicroBatchRunner,
        rows: Sequence[Row],
        values: torch.Tensor | None,
        *,
        global_rows: int,
    ) -> None:
        self._runner = runner
        self._loss = runner.loss
        self._rows = rows
        self._values = values
        self._gradients = SummedGradients(runner.model)
        self._sums = StepSums(
            rows=len(rows),
            tokens=sum(map(self._loss.num_real_tokens, rows)),
            device=runner.memory.device,
            global_rows=global_rows,
            metrics=self._loss.metrics,
        )

    def run(self, division: Division, *, measures_noise: bool) -> StepResult:
        """Run the micro-batches; where a rank fails, all of them come to its end."""
        num_pieces = division.num_pieces
        assert self._runner.scales_gradients or num_pieces == 1, (
            "with the optimizer in backward a step is one micro-batch"
        )
        sizer = self._runner.sizer
        measures_noise = measures_noise and num_pieces > 1
        # Elsewhere the first micro-batch is no random part of the step.
        assert not measures_noise or sizer.layout.keeps_order(sizer.limit_of_step)

        def run(piece: MicroBatch | None, is_last: bool) -> None:
            self._run_piece(piece)
            if measures_noise and is_last and self._sums.small is None:
                self._sums.small = self._small_batch(division.pieces[:1])

        idle = MicroBatch([], 0)
        if not self._rows:
            idle = MicroBatch([0], self._loss.row_length(self._loss.some_row()))
        self._runner.run_micro_batches(division, run, idle=idle, reduces_first=measures_noise)
        return self._finish(num_pieces)

    def _small_batch(self, pieces: Sequence[MicroBatch]) -> SmallBatch:
        """Return the small batch, whose gradients are all that there are so far, and reduced."""
        sums = self._sums
        num_rows = sum(len(piece.rows) for piece in pieces)
        squared = self._gradients.squared_norm()
        if self._loss.counts_rows:
            # As if losses had been summed.
            squared = squared * (sums.global_rows / distributed.world_size()) ** 2
        return SmallBatch(num_rows, sums.label_tokens, squared, sums.micro_batches)

    def _run_piece(self, piece: MicroBatch | None) -> None:
        """Add the gradients of one micro-batch; of a dummy one, with weight 0, where `piece` is
        None or has no label.
        """
        loss = self._loss
        layout = self._runner.sizer.layout
        if piece is not None:
            own_rows = [self._rows[i] for i in piece.rows]
            with loss.collated(own_rows, layout, piece.length) as batch:
                padded = batch["tokens"].numel() if "tokens" in batch else piece.run_tokens
                self._sums.padded += padded
                labels = loss.count_labels(batch)
                if labels:
                    if self._values is not None:
                        batch[REFERENCE_VALUES] = self._values[piece.rows]
                    self._backward(batch, labels)
                    return
        if distributed.world_size() > 1:
            # Its mean would be 0/0, and 0 times that is no zero.
            with loss.collated([loss.some_row()], layout) as batch:
                self._runner.make_up_values(batch, 1)
                self._backward(batch, None)

    def _backward(self, batch: Batch, labels: torch.Tensor | None) -> None:
        """Add the gradients of a batch of so many labels; None for one of weight 0."""
        sums = self._sums
        if self._loss.counts_rows:
            self._backward_of_share(batch, labels)
            return
        together = distributed.world_size() > 1
        mean, count = self._loss.loss_and_labels(batch)
        token_loss = mean * (0 if labels is None else count)
        if labels is not None:
            sums.add(token_loss.detach(), labels if together else count)
            sums.add_metrics(batch, weight=count)
        # With the optimizer in backward each parameter is stepped as soon as its gradient is there.
        if not self._runner.scales_gradients and not together:
            token_loss = mean
        elif not self._runner.scales_gradients:
            sums.all_reduce_sum()
            # On no rank is there anything to step by.
            if not sums.label_tokens:
                return
            token_loss = token_loss * (distributed.world_size() / sums.label_tokens)
        token_loss.backward()  # type: ignore[no-untyped-call]

    def _backward_of_share(self, batch: Batch, num_rows: torch.Tensor | None) -> None:
        """Add the gradients of a mean over rows, by its share of the rows of all ranks.

        The order of operations is torchtune's: the mean, divided by how many such micro-batches a
        step has. FSDP then takes the mean over ranks.
        """
        sums = self._sums
        mean, _ = self._loss.loss_and_labels(batch)
        loss = mean * 0
        if num_rows is not None:
            # Whole, and exact, where micro-batches are alike.
            num_such = sums.global_rows / (distributed.world_size() * int(num_rows))
            loss = mean / num_such
            sums.add(loss.detach(), num_rows)
            sums.add_metrics(batch, weight=1 / num_such)
        # With the optimizer in backward this is the step's only micro-batch.
        if not self._runner.scales_gradients:
            sums.all_reduce_sum()
        loss.backward()  # type: ignore[no-untyped-call]

    def _finish(self, num_pieces: int) -> StepResult:
        """Count the label tokens of all ranks and divide the gradients by them; fails where any
        rank has failed.
        """
        runner = self._runner
        sums = self._sums
        if runner.scales_gradients:
            sums.failed = int(runner.retry.has_failed)
            sums.all_reduce_sum()
            if sums.failed:
                raise OutOfMemoryElsewhereError
        ranks = distributed.world_size()
        # FSDP has taken the mean over the ranks.
        has_labels = sums.have_labels
        if has_labels and runner.scales_gradients and not self._loss.counts_rows:
            self._gradients.multiply_by(ranks / sums.label_tokens)
        elif not has_labels and ranks > 1:
            runner.drop_gradients()
        noise = None
        if sums.small is not None:
            noise = sums.noise(self._gradients.squared_norm(), device=runner.memory.device)
        return sums.result(self._loss, num_pieces, grad_norm=runner.clip(), noise=noise)
