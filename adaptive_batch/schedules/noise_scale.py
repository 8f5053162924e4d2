"""The gradient noise scale: how many rows a step needs before its noise is no larger than its
gradient.

Measured from what accumulation has anyway: the gradient of a part of a step's rows, the small
batch, and that of all of them (McCandlish et al. 2018, An Empirical Model of Large-Batch Training,
arXiv 1812.06162, appendix A.1). A batch of B rows has a gradient whose squared norm is, expected,
|G|^2 + S / B: of the true gradient G, and of the noise, S = tr(covariance of one row's gradient).
Two batch sizes tell the two apart, and B_simple = S / |G|^2 (its equation 2.9).

Rows of unequal length: a batch of b rows that have L label tokens has the gradient g = s / L, s
being the sum of what its rows give. With l the expected label tokens of a row, G = E[s] / (b l),
and the noise of a row is d = (its part of s - its label tokens x G) / l, which is 0 on average: a
ratio of sums, to first order, has S = E|d|^2. Then

    E[L |g|^2]   = b l |G|^2 + l S (1 + order of 1 / b)
    E[L^2 |g|^2] = b^2 l^2 |G|^2 + b tr(covariance of a row's part of s)

The first holds as L |g|^2 = L |G|^2 + 2 l G . sum(d) + |l sum(d)|^2 / L, and the second exactly,
whatever length and gradient of a row have to do with each other. Two sizes of the first give S and
two of the second |G|^2, with the step's own L / B for l, which leaves an error of order 1 / B.
Where rows are equally long, both are the paper's. The formulas assume that rows are independent,
and that the rows of the small batch and their number do not depend on their length. So only a
micro-batch of a given number of rows, in a random order, can be the small batch. S is low with few
rows in the small batch, by up to the share of squared variation of lengths / rows; but for that the
smallest small batch is the best one (docs/how_it_decides.md has numbers, and why).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class NoiseSample:
    """The norms of one step; numbers, or scalar tensors that have not been waited for.

    Attributes:
        small_rows: rows of the small batch.
        small_squared_norm: squared norm of its gradient, a mean over its label tokens.
        big_rows: rows of the whole step.
        big_squared_norm: squared norm of its gradient before clipping, a mean over its label
            tokens.
        label_ratio: label tokens of a row of the small batch, on average, over those of a row of
            the whole step.
    """

    small_rows: float | torch.Tensor
    small_squared_norm: float | torch.Tensor
    big_rows: int
    big_squared_norm: float | torch.Tensor
    label_ratio: float | torch.Tensor = 1.0

    def estimates(self) -> tuple[float, float]:
        """Return S, the trace of the covariance of one row's gradient, and |G|^2, the squared norm
        of the true gradient.

        Both are without bias where rows are equally long, and below zero by chance (equations A.3
        and A.2).
        """
        small = float(self.small_rows)
        big = self.big_rows
        of_small, of_big, ratio = map(
            float, (self.small_squared_norm, self.big_squared_norm, self.label_ratio)
        )
        assert 0 < small < big, (small, big)
        noise = (ratio * of_small - of_big) / (1 / small - 1 / big)
        return noise, (big * of_big - small * ratio**2 * of_small) / (big - small)


class NoiseScale:
    """The noise scale of a run so far, smoothed.

    S and |G|^2 are averaged apart and then divided: the ratio of one step's estimates is biased,
    and has no mean where |G|^2 may be near zero. The averages are exponential moving ones,
    corrected for their start.

    Args:
        decay: what an average keeps at each sample, 0 or more and below 1; about 1 / (1 - decay)
            samples count.
        min_samples: before so many there is no value: where the scale is several times the step, a
            value after 20 samples was found to be off by a factor of 4 in one run of ten, after 50
            by 3 and after 200 by 1.7.
        every: from then on, steps from one sample to the next: a sample costs up to 4% of a small
            step in bf16.
    """

    def __init__(self, *, decay: float = 0.99, min_samples: int = 50, every: int = 5) -> None:
        assert 0 <= decay < 1
        assert min_samples >= 1
        self._decay = decay
        self._min_samples = min_samples
        self._every = every
        self._samples = 0
        self._weight = 0.0
        self._noise = 0.0
        self._squared_gradient = 0.0

    def is_due(self, steps: int) -> bool:
        """Return whether the step after so many is sampled: each, until there may be a value."""
        return self._samples < self._min_samples or steps % self._every == 0

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

        None while there are too few samples, and where the average of |G|^2 is not above zero: the
        gradient is lost in the noise: the scale is large, but how large is not known.
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
    """Return the squared norm of all of them together, in float32 at least; a scalar tensor that is
    not waited for.

    Their own type would not do where it has 16 bits: the noise is a small difference of squared
    norms.
    """
    wide = [gradient for gradient in gradients if gradient.dtype.itemsize >= 4]
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.float32)
        for gradient in gradients
        if gradient.dtype.itemsize < 4
    ]
    if wide:
        # One kernel for many gradients.
        norms.append(torch.nn.utils.get_total_norm(wide))
    return torch.stack([norm.to(gradients[0].device) for norm in norms]).square().sum()
