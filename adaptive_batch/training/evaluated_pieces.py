"""The losses of pieces of a batch, in evaluation mode and without gradients: what the check of a
split compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.memory import is_out_of_memory, recover

from .batch_statistics import STATISTICS, BatchStatistics, Statistics, sum_of
from .model_checks import evaluation_mode
from .oom_retry import OOMRetry
from .parts import Part, Splittable
from .sizing import MicroBatchSizer
from .snapshot import StepSnapshot
from .step_runner import StepRunner

# Difference that may be rounding, as a share of the losses: of float32, and in epsilons of the
# coarsest type that forward computes in, which is less of a mean over more labels.
_ROUNDING = 1e-4
_EPSILONS = 8
# Epsilons of the type of the loss, which is rounded however many labels it is a mean over.
_LOSS_EPSILONS = 2


class _BackwardCatcher(TorchFunctionMode):
    """Catches ``Tensor.backward``, where GradScaler, accelerate and Fabric arrive too, and sums up
    its losses.

    Attributes:
        loss: sum of the losses; None where no backward was called.
        epsilon: rounding of the coarsest type that a function returned.
        loss_epsilon: rounding of the coarsest 16-bit type of a single number that one returned; 0
            without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss: torch.Tensor | None = None
        self.epsilon = torch.finfo(torch.float32).eps
        self.loss_epsilon = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            loss = args[0].detach().double().sum()
            if self.loss is not None:
                loss = loss + self.loss
            self.loss = loss
            return None
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in (torch.bfloat16, torch.float16):
            epsilon = torch.finfo(result.dtype).eps
            self.epsilon = max(self.epsilon, epsilon)
            if result.numel() == 1:
                self.loss_epsilon = max(self.loss_epsilon, epsilon)
        return result


class EvaluatedPieces:
    """Runs pieces of a batch, on all ranks as many, and undoes what they change.

    Args:
        runner: runs the parts of a batch.
        forward_backward: function that runs a part; see :class:`.SplitCheck`.
        statistics: statistics of a batch.
    """

    def __init__(
        self,
        runner: StepRunner,
        forward_backward: Callable[[Part], object],
        statistics: BatchStatistics,
    ) -> None:
        self._runner = runner
        self._forward_backward = forward_backward
        self._statistics = statistics
        self._sharding = runner.sharding
        self._retry = OOMRetry(
            MicroBatchSizer(), memory=runner.memory, sharding=runner.sharding, is_of_training=False
        )
        self._snapshot = StepSnapshot(runner.model, runner.memory.device)
        self._epsilon = torch.finfo(torch.float32).eps
        self._loss_epsilon = 0.0

    def learn_collectives(self, rows: Splittable) -> None:
        """Run once, so that even the first piece can fail on one rank and be brought to its end."""
        kinds: list[bool | str] = [True]
        if self._statistics.are_needed:
            kinds.append(STATISTICS)
        if all(self._sharding.knows(evaluates=kind) for kind in kinds):
            return
        restore = self._snapshot.take()
        self._retry.current = MicroBatch([0], 1)
        try:
            with self._evaluating():
                statistics = self._statistics_of(rows.dummy, 1)
                self._loss(rows.dummy, 1, statistics=statistics)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._retry.lost(error, "in the check of a split") from error
        restore()

    def losses(
        self, rows: Splittable, pieces: Sequence[Sequence[int]], shares: Sequence[float]
    ) -> list[float | None] | None:
        """Return the loss that the function calls backward on, of each piece with its share; None
        where memory ran out on any rank.
        """
        # Empty where none are needed.
        of_pieces: defaultdict[int, Statistics] = defaultdict(dict)
        losses: list[float | None] = []

        def measure(number: int) -> None:
            piece = pieces[number] if number < len(pieces) else None
            if piece is None:
                of_pieces[number] = self._statistics_of(rows.dummy, 1)
                return
            part = partial(rows.part, piece)
            share = shares[number]
            of_pieces[number] = self._statistics_of(part, len(piece), share=share)

        def run(number: int) -> None:
            # A rank that has fewer pieces runs one that does not count.
            piece = pieces[number] if number < len(pieces) else None
            if piece is None:
                losses.append(self._loss(rows.dummy, 1, statistics=of_pieces[number]))
                return
            part = partial(rows.part, piece)
            share = shares[number]
            # The whole has its own, and each of the others their sum.
            statistics = of_others if number else of_pieces[0]
            losses.append(self._loss(part, len(piece), share=share, statistics=statistics))

        if self._statistics.are_needed and not self._run_pieces(pieces, measure, STATISTICS):
            return None
        of_others = sum_of([of_pieces[number] for number in range(1, len(pieces))])
        if not self._run_pieces(pieces, run, True):
            return None
        return losses[: len(pieces)]

    def _run_pieces(
        self,
        pieces: Sequence[Sequence[int]],
        run: Callable[[int], None],
        evaluates: bool | str,
    ) -> bool:
        """Run pieces, on all ranks as many, and undo what they change; return whether memory
        sufficed on all ranks.
        """
        restore = self._snapshot.take()
        num_pieces = distributed.maximum(len(pieces))
        largest = MicroBatch(list(pieces[0]) if pieces else [], 0)
        has_failed = False
        try:
            with self._evaluating():
                self._retry.run_in_turn(
                    [largest] * num_pieces,
                    run,
                    drop=self._sharding.reset,
                    idle=largest,
                    evaluates=evaluates,
                )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if distributed.world_size() > 1:
                raise self._retry.lost(error, "in the check of a split") from error
            has_failed = True
        restore()
        if has_failed:
            # Outside of the except block, which keeps the failed forward's tensors alive.
            recover(self._runner.memory)
        if distributed.any_of_ranks(has_failed or self._retry.has_failed):
            self._retry.forget_failure()
            return False
        return True

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with (
            evaluation_mode(self._runner.model),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            yield

    def _statistics_of(
        self, make_batch: Callable[[], Any], num_rows: int, *, share: float = 1.0
    ) -> Statistics:
        """Return the statistics of a piece alone; empty where none are needed."""
        if not self._statistics.are_needed:
            return {}
        with self._runner.trial(evaluates=STATISTICS):
            part = Part(make_batch(), num_rows, share=share, is_trial=True)
            return self._statistics.of_part(part)

    def _loss(
        self,
        make_batch: Callable[[], Any],
        num_rows: int,
        *,
        share: float = 1.0,
        statistics: Statistics,
    ) -> float | None:
        """Return the loss that the function calls backward on; None where no backward is seen."""
        with self._runner.trial(evaluates=True), _BackwardCatcher() as catcher:
            part = Part(make_batch(), num_rows, share=share, is_trial=True, statistics=statistics)
            try:
                self._forward_backward(part)
            except RuntimeError as error:
                # torch.autograd.backward and .grad are not caught, and have no graph here.
                if "does not require grad" not in str(error):
                    raise
        self._epsilon = max(self._epsilon, catcher.epsilon)
        self._loss_epsilon = max(self._loss_epsilon, catcher.loss_epsilon)
        return None if catcher.loss is None else float(catcher.loss)

    def rounding(self, num_labels: float) -> float:
        """Return the difference between losses that may be rounding, as a share of them. A
        collective.

        Args:
            num_labels: labels that the loss is a mean over.
        """
        epsilon = max(distributed.all_gather(self._epsilon))
        loss_epsilon = max(distributed.all_gather(self._loss_epsilon))
        rounding: float = (
            _ROUNDING
            + _EPSILONS * epsilon / max(1.0, num_labels) ** 0.5
            + _LOSS_EPSILONS * loss_epsilon
        )
        return rounding
