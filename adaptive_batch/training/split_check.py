"""Whether the loss of a batch is the sum of its parts' shares: what does not decompose is refused
before it is split.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState

from .batch_statistics import BatchStatistics
from .evaluated_pieces import EvaluatedPieces
from .parts import LabelCounter, Part, Splittable, has_shifted_labels
from .step_runner import StepRunner

log = logging.getLogger("adaptive_batch")

# Batches after which the likelier way to count labels is taken, if all have given the same loss.
_MOST_CHECKS = 3
# Splits that are checked again: the first batch may have been one of equal parts by chance.
_CHECKED_AGAIN = frozenset({2, 4, 8, 16, 32, 64})


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
        self._way: int | None = None
        self._sees_loss = True
        self._num_splits = 0
        # Which tensors of a batch were divided, of each batch that was checked.
        self._divided: set[tuple[bool, ...]] = set()

    @property
    def way(self) -> int:
        """The way in which labels are counted, as far as batches have shown it."""
        if self._way is not None:
            return self._way
        ways = range(len(self._differences))
        return min(ways, key=self._differences.__getitem__, default=0)

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
        if self._way is not None:
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
        random_state = RandomState(self._runner.memory.device)
        with self._runner.cache.apart():
            try:
                self._compare(rows.to_check(), pieces)
            finally:
                random_state.restore()

    def _compare(self, rows: Splittable, pieces: Sequence[Sequence[int]]) -> None:
        """Compare the whole batch with its parts; where it does not fit, the largest half that does
        with its halves.

        Where a device has a cache and what fits is known, the largest part is compared with its
        halves from the first.
        """
        self._evaluated.learn_collectives(rows)
        whole = list(range(rows.num_rows))
        has_cache = self._runner.memory.granularity_bytes > 1
        if has_cache and self._runner.sizer.max_batch_size is not None:
            # The allocator would give back the cache that trials have left for training, where the
            # whole does not fit.
            sizes = [len(piece) for piece in pieces]
            largest = list(pieces[sizes.index(max(sizes))]) if sizes else []
            if distributed.any_of_ranks(len(largest) > 1):
                whole = largest
                pieces = _halves(whole)
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
            pieces = _halves(whole)

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
            self._way = 0
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
        if self._way is not None:
            sums = [sums[self._way]]
            differences = [differences[self._way]]
        fitting = [difference for difference in differences if difference <= rounding * scale]
        if not fitting:
            raise self._refusal(whole_loss, sums)
        if self._way is not None:
            return
        earlier = self._differences or [0.0] * len(sums)
        self._differences = [total + new for total, new in zip(earlier, differences, strict=True)]
        self._num_checks += 1
        if len(fitting) == 1 or self._num_checks == _MOST_CHECKS:
            self._way = self.way
            if num_ways > 1 and len(fitting) == 1 and self._way == 0:
                self._refuse_labels_shifted_twice(rows)
            if self._way > 0 and distributed.is_rank_zero():
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


def _halves(rows: list[int]) -> list[list[int]]:
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
