"""The critical batch by branches: the largest batch that, on the same rows, ends no worse than the smallest.

Merrill et al. 2025, arXiv 2505.23971, measure it so: train on from one checkpoint at several batches, with the same tokens each and
the learning rate scaled by the square root of the batch, and take the largest whose loss is still within a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_STEPS = 4  # of a branch: below that its rate, that of a whole run, has no time to act
_STANDARD_ERRORS = 2.0


def batches_of_branches(step_rows: int, rows: int) -> list[int]:
    """Return the batches to branch at: a quarter of a step's rows (as far as whole), doubled while `rows` make a few steps of it."""
    batches = [step_rows // math.gcd(step_rows, 4)]
    while 2 * batches[-1] * FEWEST_STEPS <= rows:
        batches.append(2 * batches[-1])
    return batches


@dataclass(frozen=True)
class Branch:
    """What a branch ended with.

    Attributes:
        batch: rows of each of its steps, on all ranks.
        losses: of each held-out row, the sum over its label tokens.
        labels: of each held-out row, its label tokens; the same in all branches.
    """

    batch: int
    losses: Sequence[float]
    labels: Sequence[int]

    @property
    def loss(self) -> float:
        """The mean loss of a held-out label token."""
        return math.fsum(self.losses) / sum(self.labels) if sum(self.labels) else math.nan

    def excess(self, smallest: Branch) -> tuple[float, float]:
        """Return how far the loss is above that of another branch, as a share of that, and the standard error.

        Both are of the same rows, so the difference of each row is what varies: with d the difference of a row's loss, n its labels
        and D = sum(d) / sum(n) this is the error of a ratio, sqrt(m / (m - 1) x sum((d - D n)^2)) / sum(n) for m rows (Cochran 1977,
        section 2.11). It tells what other held-out rows would change, not what other rows to train on would.
        """
        labels, rows = sum(self.labels), len(self.labels)
        mean = self.loss - smallest.loss
        of_rows = zip(self.losses, smallest.losses, self.labels, strict=True)
        squares = math.fsum((loss - other - mean * count) ** 2 for loss, other, count in of_rows)
        error = math.sqrt(rows / max(1, rows - 1) * squares) / labels
        return mean / smallest.loss, error / smallest.loss


@dataclass(frozen=True)
class CriticalBatch:
    """The critical batch that some branches show.

    Attributes:
        branches: by rising batch.
        tolerance: by which share a loss may be above that of the smallest batch.
    """

    branches: tuple[Branch, ...]
    tolerance: float

    @property
    def rows(self) -> int:
        """The largest batch that is within the tolerance, as all below it are."""
        return self._largest(0)

    @property
    def at_least(self) -> int:
        """The largest batch that is within it even with two standard errors more."""
        return self._largest(_STANDARD_ERRORS)

    @property
    def at_most(self) -> int | None:
        """The largest batch that is within it with two standard errors less; None where that is the largest that was tried."""
        most = self._largest(-_STANDARD_ERRORS)
        return None if most == self.branches[-1].batch else most

    def _largest(self, errors: float) -> int:
        largest = self.branches[0].batch
        for branch in self.branches[1:]:
            excess, error = branch.excess(self.branches[0])
            if not excess + errors * error <= self.tolerance:  # nor where the loss is no number
                break
            largest = branch.batch
        return largest
