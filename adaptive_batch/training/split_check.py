"""Whether the loss of a batch is the sum of its parts' shares: what does not decompose is refused
before it is split.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState, is_out_of_memory, recover

from .batch_statistics import STATISTICS, BatchStatistics, Statistics, sum_of
from .model_checks import evaluation_mode
from .oom_retry import OOMRetry
from .parts import LabelCounter, Part, Splittable, has_shifted_labels
from .sizing import MicroBatchSizer
from .snapshot import StepSnapshot
from .step_runner import StepRunner

log = logging.getLogger("adaptive_batch")

# Difference that may be rounding, as a share of the losses: of float32, and in epsilons of the
# coarsest type that forward computes in, which is less of a mean over more labels.
_ROUNDING = 1e-4
_EPSILONS = 8
# Epsilons of the type of the loss, which is rounded however many labels it is a mean over.
_LOSS_EPSILONS = 2
# Batches after which the likelier way to count labels is taken, if all have given the same loss.
_MOST_CHECKS = 3
# Splits that are checked again: the first batch may have been one of equal parts by chance.
_CHECKED_AGAIN = frozenset({2, 4, 8, 16, 32, 64})


class BackwardCatcher(TorchFunctionMode):
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
        self._retry.expect([MicroBatch([0], 1)])
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

        def part(number: int) -> tuple[Callable[[], Any], int, float]:
            # A rank that has fewer pieces runs one that does not count.
            if number >= len(pieces):
                return rows.dummy, 1, 1.0
            return partial(rows.part, pieces[number]), len(pieces[number]), shares[number]

        def measure(number: int) -> None:
            of_pieces[number] = self._statistics_of(*part(number))

        def run(number: int) -> None:
            # The whole has its own, and each of the others their sum.
            is_one_of_others = 0 < number < len(pieces)
            statistics = of_others if is_one_of_others else of_pieces[number]
            losses.append(self._loss(*part(number), statistics=statistics))

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
                    kinds=[{"evaluates": evaluates}] * num_pieces,
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
        self, make_batch: Callable[[], Any], num_rows: int, share: float = 1.0
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
        share: float = 1.0,
        *,
        statistics: Statistics,
    ) -> float | None:
        """Return the loss that the function calls backward on; None where no backward is seen."""
        with self._runner.trial(evaluates=True), BackwardCatcher() as catcher:
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


class SplitCheck:
    """Compares the loss of a batch with that of its parts, in evaluation mode and without
    gradients.

    All ranks call it alike, and decide alike.

    Args:
        runner: runs the parts of a batch.
        forward_backward: function that runs a part, see :class:`.AdaptiveStep`; what it returns
            does not count.
        labels: counts the labels of a part, perhaps in several ways.
        statistics: statistics of a batch, which must be the sums of its parts' too.
        name: name of the function in errors.

    Attributes:
        way: way in which labels are counted, as far as batches have shown it.
    """

    def __init__(
        self,
        runner: StepRunner,
        forward_backward: Callable[[Part], object],
        labels: LabelCounter,
        statistics: BatchStatistics,
        *,
        name: str,
    ) -> None:
        self._runner = runner
        self._labels = labels
        self._name = name
        self._evaluated = EvaluatedPieces(runner, forward_backward, statistics)
        # By the way of counting labels, summed over the batches that were checked.
        self._differences: list[float] = []
        self._num_checks = 0
        self.way = 0
        self._is_decided = False
        self._sees_loss = True
        self._num_splits = 0
        # Which tensors of a batch were divided, of each batch that was checked.
        self._divided: set[tuple[bool, ...]] = set()

    def begin_split(self, counts: Sequence[Sequence[int]], divided: tuple[bool, ...]) -> bool:
        """Count a split; return whether its parts have to be checked before they run. A collective.

        Args:
            counts: labels of each part, counted in each way; none on a rank without rows.
            divided: whether each tensor of the batch is divided.
        """
        if not self._sees_loss:
            return False
        self._num_splits += 1
        is_new = divided not in self._divided
        self._divided.add(divided)
        if self._is_decided:
            return distributed.any_of_ranks(is_new or self._num_splits in _CHECKED_AGAIN)
        num_ways = len(counts[0]) if counts else 1
        differs = len({_shares(counts, way) for way in range(num_ways)}) > 1
        return distributed.any_of_ranks(differs or not self._num_checks)

    def check(self, rows: Splittable, pieces: Sequence[Sequence[int]]) -> None:
        """Compare a batch with its parts, and leave random numbers as they were, of which
        collating may draw some.

        Args:
            rows: rows of the batch.
            pieces: rows of each part.

        Raises:
            SettingError: the loss is another one when it is split; with both losses.
        """
        with RandomState(self._runner.memory.device):
            self._compare(rows.to_check(), pieces)

    def _compare(self, rows: Splittable, pieces: Sequence[Sequence[int]]) -> None:
        """Compare the whole batch with its parts; where it does not fit, the largest half that does
        with its halves.
        """
        self._evaluated.learn_collectives(rows)
        whole = list(range(rows.num_rows))
        has_cache = self._runner.memory.granularity_bytes > 1
        if has_cache and self._runner.sizer.max_batch_size is not None:
            largest, halves_of_largest = largest_part(pieces)
            if distributed.any_of_ranks(len(halves_of_largest) > 1):
                whole = largest
                pieces = halves_of_largest
        while distributed.any_of_ranks(len(pieces) > 1):
            counts = [self._labels.counts(rows.part(piece), len(piece)) for piece in pieces]
            # A part without labels in the likelier way may have some in the other.
            shares = [share or 1.0 for share in _shares(counts, 0)]
            losses = self._evaluated.losses(rows, [whole, *pieces] if whole else [], [1.0, *shares])
            if losses is not None:
                self._runner.retry.disregard_allocator_retries()
                self._decide(rows, counts, shares, losses)
                return
            whole = whole[: (len(whole) + 1) // 2]
            pieces = halves(whole)

    def _decide(
        self,
        rows: Splittable,
        counts: Sequence[Sequence[int]],
        shares: Sequence[float],
        losses: Sequence[float | None],
    ) -> None:
        """Choose how labels are counted: the way that gives the loss of the whole batch.

        Args:
            rows: rows of the batch.
            counts: labels of each part, counted in each way.
            shares: with which the parts ran.
            losses: of the whole and of each part.
        """
        seen = [loss for loss in losses if loss is not None]
        if distributed.any_of_ranks(len(seen) < len(losses)):
            self.way = 0
            self._is_decided = True
            self._sees_loss = False
            if distributed.is_rank_zero():
                log.warning(
                    "no loss.backward() is seen in forward_backward: whether a split changes the"
                    " loss is not known"
                )
            return
        whole_loss = seen[0] if seen else 0.0
        num_ways = len(self._labels.counts(rows.dummy(), 1))
        sums = [_weighted_sum(_shares(counts, way), shares, seen[1:]) for way in range(num_ways)]
        scale = max((abs(loss) for loss in seen if not math.isnan(loss)), default=0.0)
        num_labels = sum(count[0] for count in counts)
        gathered = distributed.all_gather([whole_loss, scale, num_labels, *sums])
        whole_loss, scale, num_labels, *sums = (
            torch.tensor(gathered, dtype=torch.float64).sum(dim=0).tolist()
        )
        if not math.isfinite(whole_loss) or any(map(math.isinf, sums)):
            return
        rounding = self._evaluated.rounding(num_labels)
        # Where a part has a share and its loss is no number, its labels are counted wrong.
        differences = [math.inf if math.isnan(total) else abs(total - whole_loss) for total in sums]
        if self._is_decided:
            sums = [sums[self.way]]
            differences = [differences[self.way]]
        fitting = [difference for difference in differences if difference <= rounding * scale]
        if not fitting:
            raise self._refusal(whole_loss, sums)
        if not self._is_decided:
            self._learn_way(rows, differences, num_fitting=len(fitting))

    def _learn_way(
        self, rows: Splittable, differences: Sequence[float], *, num_fitting: int
    ) -> None:
        """Add what a batch has shown of each way of counting labels; decide where one way alone
        fits, or enough batches were checked.
        """
        earlier = self._differences or [0.0] * len(differences)
        self._differences = [total + new for total, new in zip(earlier, differences, strict=True)]
        self.way = self._differences.index(min(self._differences))
        self._num_checks += 1
        if num_fitting == 1 or self._num_checks == _MOST_CHECKS:
            self._is_decided = True
            if len(differences) > 1 and num_fitting == 1 and self.way == 0:
                self._refuse_labels_shifted_twice(rows)
            if self.way > 0 and distributed.is_rank_zero():
                log.info(
                    "labels are shifted already where they reach the model, so the first of each"
                    " row counts too"
                )

    def _refuse_labels_shifted_twice(self, rows: Splittable) -> None:
        """Refuse labels that collate has shifted where the loss leaves the first of each row out,
        which is to shift them again.
        """
        has_shifted = bool(rows.num_rows) and has_shifted_labels(rows.part(range(rows.num_rows)))
        if distributed.any_of_ranks(has_shifted):
            remedy = (
                "each is the token after its own already, and the loss shifts them again, so that"
                " it predicts the token after the next; shift them in one of the two, or give"
                " num_labels= where that is meant"
            )
            raise SettingError("labels", "shifted twice", remedy)

    def _refusal(self, whole_loss: float, sums: Sequence[float]) -> SettingError:
        parts = " or ".join(f"{total:.6g}" for total in sums)
        remedy = (
            f"the loss of a batch is {whole_loss:.6g} as a whole and {parts} as the sum of its"
            " parts' shares, so a split would train something else; multiply a mean by part.share"
            " before backward; give num_labels=, how many"
            " labels the mean is taken over, or split=, where rows belong together or the model"
            " sees padding, of which a part has less; a loss that compares rows, such as a"
            ' contrastive one, must stay whole: on_out_of_memory="raise", without micro_batch_size'
            " and micro_batch_tokens"
        )
        return SettingError("forward_backward", self._name, remedy)


def largest_part(pieces: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return the rows of the largest part and its halves, which are compared from the first where a
    device has a cache and what fits is known.

    Where the whole does not fit, the allocator would give back the cache that trials have left for
    training.
    """
    largest = max(map(list, pieces), key=len, default=[])
    return largest, halves(largest)


def halves(rows: list[int]) -> list[list[int]]:
    """Return the two halves of a piece, of which the first may have a row more; one of one row."""
    middle = (len(rows) + 1) // 2
    return [half for half in (rows[:middle], rows[middle:]) if half]


def _shares(counts: Sequence[Sequence[int]], way: int) -> tuple[float, ...]:
    """Return the share of each part, labels counted in one way; zeros where there are none."""
    total = sum(count[way] for count in counts)
    return tuple(count[way] / total if total else 0.0 for count in counts)


def _weighted_sum(
    shares: Sequence[float], ran_with: Sequence[float], losses: Sequence[float]
) -> float:
    """Return the sum of losses with these shares, of parts that ran with others."""
    # The mean of a part without labels is no number, and does not count.
    return sum(
        share / divisor * loss
        for share, divisor, loss in zip(shares, ran_with, losses, strict=True)
        if share
    )
