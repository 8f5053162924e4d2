"""The gradient noise scale: how many rows a step needs before its noise is no larger than its gradient.

Measured from what accumulation has anyway: the gradient of the first micro-batch of a step and that of the whole step
(McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv 1812.06162, appendix A.1). A batch of B rows has
a gradient whose squared norm is, expected, |G|^2 + S / B: of the true gradient G, and of the noise, S = tr(covariance of one
row's gradient). Two batch sizes tell the two apart, and B_simple = S / |G|^2 (its equation 2.9).

Why the first micro-batch: with a share r of the step's B rows as the small batch, T = tr(covariance^2), the variance of one
step's |G|^2 is 4 T / (B^2 (1 - r)) + 4 G'CG / (B (1 - r)) and that of its S is T (2 (1 + r)^2 + 2 r^2 + 4 r^3 / (1 - r)) +
4 G'CG B r / (1 - r) for normal noise of covariance C: both rise with r, so the smallest small batch is the best one. Keeping
every row's gradient apart would lower the first term of |G|^2's variance, the larger one, to half and no further; norms
after more micro-batches lie in between, and cost a pass over the gradients each.

Rows of unequal length: gradients are means over label tokens, so the small batch counts as its share of the step's label
tokens, in rows. Then, rows in random order, the estimate is right to first order in 1 / rows of the small batch, and low
with few (docs/how_it_decides.md has numbers); counted by rows it was off further, and varied more from step to step. Rows
that are sorted or grouped by length within a step make the small batch no random sample of it, and estimates worthless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adaptive_batch._torch import foreach_norm


@dataclass(frozen=True)
class NoiseSample:
    """The norms of one step; numbers, or scalar tensors that have not been waited for.

    Attributes:
        small_rows: rows of the small batch, the first micro-batch of the step: its share of the step's label tokens, in rows.
        small_squared_norm: squared norm of its gradient, a mean over its label tokens.
        big_rows: rows of the whole step.
        big_squared_norm: squared norm of its gradient before clipping, a mean over its label tokens.
    """

    small_rows: float | torch.Tensor
    small_squared_norm: float | torch.Tensor
    big_rows: int
    big_squared_norm: float | torch.Tensor

    def estimates(self) -> tuple[float, float]:
        """Return S, the trace of the covariance of one row's gradient, and |G|^2, the squared norm of the true gradient.

        Both are without bias, and below zero by chance (equations A.3 and A.2).

        Raises:
            ValueError: not 0 < `small_rows` < `big_rows`.
        """
        small, big = float(self.small_rows), self.big_rows
        of_small, of_big = float(self.small_squared_norm), float(self.big_squared_norm)
        if not 0 < small < big:
            raise ValueError(f"small_rows={small}, big_rows={big}: the small batch must be the smaller one")
        return (of_small - of_big) / (1 / small - 1 / big), (big * of_big - small * of_small) / (big - small)


class NoiseScale:
    """The noise scale of a run so far, smoothed.

    S and |G|^2 are averaged apart and then divided: the ratio of one step's estimates is biased, and has no mean where
    |G|^2 may be near zero. The averages are exponential moving ones, corrected for their start.

    Args:
        decay: what an average keeps at each sample, 0 or more and below 1; about 1 / (1 - decay) samples count.
        min_samples: before so many there is no value: where the scale is several times the step, a value after 20 samples
            was found to be off by a factor of 3 in one run of ten, after 50 by less than 2.
    """

    def __init__(self, *, decay: float = 0.99, min_samples: int = 50) -> None:
        assert 0 <= decay < 1
        assert min_samples >= 1
        self._decay = decay
        self._min_samples = min_samples
        self._samples = 0
        self._weight = self._noise = self._squared_gradient = 0.0

    def update(self, sample: NoiseSample) -> None:
        """Add one step, waiting for its norms; one whose norms are not finite is left out."""
        estimates = (1.0, *sample.estimates())
        if not all(map(math.isfinite, estimates)):
            return
        averages = (self._weight, self._noise, self._squared_gradient)
        self._weight, self._noise, self._squared_gradient = (
            self._decay * average + (1 - self._decay) * estimate
            for average, estimate in zip(averages, estimates, strict=True)
        )
        self._samples += 1

    @property
    def value(self) -> float | None:
        """The noise scale in rows, 0 or more.

        None while there are too few samples, and where the average of |G|^2 is not above zero: the gradient is lost in the
        noise: the scale is large, but how large is not known.
        """
        if self._samples < self._min_samples or self._squared_gradient <= 0:
            return None
        return max(0.0, self._noise / self._squared_gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers; resuming from them is bit-identical."""
        return {
            "samples": self._samples,
            "weight": self._weight,
            "noise": self._noise,
            "squared_gradient": self._squared_gradient,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; the decay may be another one from then on."""
        self._samples = int(state["samples"])
        self._weight = float(state["weight"])
        self._noise = float(state["noise"])
        self._squared_gradient = float(state["squared_gradient"])


def squared_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared norm of all of them together, in float32 at least; a scalar tensor that is not waited for.

    Their own type would not do where it has 16 bits: the noise is a small difference of squared norms.
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(torch.promote_types(gradient.dtype, torch.float32), []).append(gradient)
    norms = [norm for dtype, those in by_type.items() for norm in foreach_norm(those, 2, dtype=dtype)]
    return torch.stack([norm.to(gradients[0].device) for norm in norms]).square().sum()
