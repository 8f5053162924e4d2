"""The critical batch: the largest batch that, on the same rows, ends no worse.

It is found by branches (Merrill et al. 2025, arXiv 2505.23971). Training continues from one
checkpoint at several batches, with the same tokens each and the rate scaled with the batch; the
critical batch is the largest whose loss afterwards is still within a tolerance of the best. The
smallest is no measure: with Adam and a fixed beta2 it may end well above the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Steps of a branch: in fewer, a rate that is scaled with the batch has no time to act.
FEWEST_STEPS = 4


def batches_of_branches(global_rows: int, rows: int) -> list[int]:
    """Return the batches to branch at, from small to large.

    The first is a quarter of a step's rows, as far as that is whole; it is doubled while `rows`
    make a few steps of it.
    """
    batches = [global_rows // math.gcd(global_rows, 4)]
    while 2 * batches[-1] * FEWEST_STEPS <= rows:
        batches.append(2 * batches[-1])
    return batches


@dataclass(frozen=True)
class Branch:
    """What a branch of steps of `batch` rows ended with.

    Attributes:
        batch: rows of a step.
        losses: sum of the token losses of each held-out row.
        labels: number of label tokens of each held-out row.
    """

    batch: int
    losses: Sequence[float]
    labels: Sequence[int]

    @property
    def loss(self) -> float:
        """The mean loss of a held-out label token."""
        if not any(self.labels):
            return math.nan
        return math.fsum(self.losses) / sum(self.labels)

    def excess(self, other: Branch) -> tuple[float, float]:
        """Return by which share the loss is above another branch's, and its standard error.

        The rows are the same, so what varies is the difference d of a row; with n its labels and D
        = sum(d) / sum(n) the error is that of a ratio, sqrt(m / (m - 1) x sum((d - D n)^2)) /
        sum(n) for m rows (Cochran 1977, section 2.11).
        """
        mean = self.loss - other.loss
        rows = len(self.labels)
        held_out_rows = zip(self.losses, other.losses, self.labels, strict=True)
        squares = math.fsum(
            (loss - other_loss - mean * count) ** 2 for loss, other_loss, count in held_out_rows
        )
        error = math.sqrt(rows / max(1, rows - 1) * squares) / sum(self.labels)
        return mean / other.loss, error / other.loss


def best_branch(branches: Sequence[Branch]) -> Branch:
    """Return the branch of least loss, the first of equals."""

    def loss(branch: Branch) -> float:
        # min() does not know its way with NaN.
        if not math.isfinite(branch.loss):
            return math.inf
        return branch.loss

    return min(branches, key=loss)


def critical_batch(branches: Sequence[Branch], tolerance: float, *, errors: float = 0.0) -> int:
    """Return the largest batch whose loss is above the best by no more than a tolerance.

    That holds also for all batches between the best and the largest.

    Args:
        branches: branches by rising batch.
        tolerance: share of the least loss.
        errors: number of standard errors that are added to each difference.
    """
    best = best_branch(branches)
    largest = best.batch
    for branch in branches[branches.index(best) + 1 :]:
        excess, error = branch.excess(best)
        # "not ... <=" and no ">", so that a loss that is no number ends it too.
        if not excess + errors * error <= tolerance:
            break
        largest = branch.batch
    return largest
