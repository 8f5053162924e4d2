"""The critical batch by branches (Merrill et al. 2025, arXiv 2505.23971): the largest batch that,
on the same rows, ends no worse.

Training goes on from one checkpoint at several batches, with the same tokens each and the rate
scaled with the batch; the critical batch is the largest whose loss afterwards is still within a
tolerance of the best. The smallest would not do for that: with Adam and a fixed beta2 it may end
well above the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_STEPS = 4  # of a branch: in fewer, a rate that is scaled with the batch has no time to act


def batches_of_branches(step_rows: int, rows: int) -> list[int]:
    """Return the batches to branch at: a quarter of a step's rows (as far as whole), doubled while
    `rows` make a few steps of it.
    """
    batches = [step_rows // math.gcd(step_rows, 4)]
    while 2 * batches[-1] * FEWEST_STEPS <= rows:
        batches.append(2 * batches[-1])
    return batches


@dataclass(frozen=True)
class Branch:
    """What a branch of steps of `batch` rows ended with: of each held-out row the sum of its token
    losses, and its label tokens.
    """

    batch: int
    losses: Sequence[float]
    labels: Sequence[int]

    @property
    def loss(self) -> float:
        """The mean loss of a held-out label token."""
        return math.fsum(self.losses) / sum(self.labels) if any(self.labels) else math.nan

    def excess(self, other: Branch) -> tuple[float, float]:
        """Return by which share the loss is above that of another branch, and the standard error of
        that.

        The rows are the same, so what varies is the difference d of a row; with n its labels and D
        = sum(d) / sum(n) the error is that of a ratio, sqrt(m / (m - 1) x sum((d - D n)^2)) /
        sum(n) for m rows (Cochran 1977, section 2.11).
        """
        mean = self.loss - other.loss
        rows = len(self.labels)
        of_rows = zip(self.losses, other.losses, self.labels, strict=True)
        squares = math.fsum((loss - before - mean * count) ** 2 for loss, before, count in of_rows)
        error = math.sqrt(rows / max(1, rows - 1) * squares) / sum(self.labels)
        return mean / other.loss, error / other.loss


def best_branch(branches: Sequence[Branch]) -> Branch:
    """Return the branch of least loss, the first of equals."""
    return min(branches, key=lambda one: one.loss if math.isfinite(one.loss) else math.inf)


def critical_batch(branches: Sequence[Branch], tolerance: float, *, errors: float = 0.0) -> int:
    """Return the largest batch whose loss, and that of all down to the best, is above the best by
    no more than a tolerance.

    Args:
        branches: by rising batch.
        tolerance: a share of the least loss.
        errors: so many standard errors are added to each difference.
    """
    best = best_branch(branches)
    largest = best.batch
    for branch in branches[branches.index(best) + 1 :]:
        excess, error = branch.excess(best)
        if not excess + errors * error <= tolerance:  # nor where the loss is no number
            break
        largest = branch.batch
    return largest
