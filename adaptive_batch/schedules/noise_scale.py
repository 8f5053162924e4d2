"""The gradient noise scale: the batch in rows at which noise and gradient are equally large.

It is measured from gradients that accumulation computes anyway: that of some rows of a step, the
small batch, and that of all rows (McCandlish et al. 2018, An Empirical Model of Large-Batch
Training, arXiv 1812.06162, appendix A.1). The expected squared norm of the gradient of B rows is
|G|^2 + S / B, with the true gradient G and the noise S = tr(covariance of one row's gradient). Two
batch sizes give both, and B_simple = S / |G|^2 (equation 2.9).

Rows of unequal length: a batch of b rows with L label tokens has the gradient g = s / L, the sum s
over its rows. With l expected label tokens in a row, G = E[s] / (b l), and the noise of a row is d
= (its part of s - its label tokens x G) / l, with mean 0. To first order, such a ratio of sums has
S = E|d|^2. Then

    E[L |g|^2]   = b l |G|^2 + l S (1 + order of 1 / b)
    E[L^2 |g|^2] = b^2 l^2 |G|^2 + b tr(covariance of a row's part of s)

The first follows from L |g|^2 = L |G|^2 + 2 l G . sum(d) + |l sum(d)|^2 / L. The second is exact,
even if the gradients of rows depend on their lengths. Two batch sizes in the first give S and in
the second |G|^2, with l = L / B of the step, which leaves an error of order 1 / B. For rows of
equal length, both are the paper's formulas. The formulas assume that rows are independent and that
the small batch is chosen independently of lengths. So only a micro-batch with a fixed number of
rows in random order qualifies. With few rows in the small batch, S is too low, by up to the squared
coefficient of variation of lengths / rows. Apart from this bias, the smallest small batch is the
best one (docs/how_it_decides.md has figures).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class NoiseSample:
    """Gradient norms of one step, as numbers or as scalar tensors (which do not force a sync).

    Attributes:
        small_rows: rows of the small batch.
        small_squared_norm: squared norm of its gradient, a mean over its label tokens.
        big_rows: rows of the whole step.
        big_squared_norm: squared norm of its gradient before clipping, a mean over its label
            tokens.
        label_ratio: mean label tokens per row of the small batch / of the whole step.
    """

    small_rows: float | torch.Tensor
    small_squared_norm: float | torch.Tensor
    big_rows: int
    big_squared_norm: float | torch.Tensor
    label_ratio: float | torch.Tensor = 1.0

    def estimates(self) -> tuple[float, float]:
        """Return S, the trace of the covariance of one row's gradient, and |G|^2, the squared norm
        of the true gradient.

        For rows of equal length both are unbiased (equations A.3 and A.2). Either can be negative.
        """
        small_rows, big_rows = float(self.small_rows), self.big_rows
        small_square, big_square = float(self.small_squared_norm), float(self.big_squared_norm)
        ratio = float(self.label_ratio)
        assert 0 < small_rows < big_rows, (small_rows, big_rows)
        noise = (ratio * small_square - big_square) / (1 / small_rows - 1 / big_rows)
        difference = big_rows * big_square - small_rows * ratio**2 * small_square
        squared_gradient = difference / (big_rows - small_rows)
        return noise, squared_gradient


class NoiseScale:
    """The smoothed noise scale of a run.

    S and |G|^2 are averaged separately and then divided: the ratio of one step's estimates is
    biased, and has no mean if |G|^2 can be near zero. The averages are exponential moving averages
    that begin at 0; their bias cancels in the ratio.

    Args:
        decay: decay of the averages, from 0 to below 1; about 1 / (1 - decay) samples count.
        min_samples: samples before the first value. If the scale is several times the step, one run
            of ten was off by a factor of 4 after 20 samples, 3 after 50 and 1.7 after 200.
        every: steps between two later samples; a sample costs up to 4% of a small step in bf16.
    """

    def __init__(self, *, decay: float = 0.99, min_samples: int = 50, every: int = 5) -> None:
        assert 0 <= decay < 1
        assert min_samples >= 1
        self._decay = decay
        self._min_samples = min_samples
        self._every = every
        self._samples = 0
        self._noise = 0.0
        self._squared_gradient = 0.0

    def is_due(self, steps: int) -> bool:
        """Return whether to sample the step after `steps` steps: each one until `min_samples`."""
        return self._samples < self._min_samples or steps % self._every == 0

    def update(self, sample: NoiseSample) -> None:
        """Add one step and skip it if its norms are not finite; syncs with the device."""
        noise, squared_gradient = sample.estimates()
        if not (math.isfinite(noise) and math.isfinite(squared_gradient)):
            return
        self._noise = self._average(self._noise, noise)
        self._squared_gradient = self._average(self._squared_gradient, squared_gradient)
        self._samples += 1

    def _average(self, average: float, estimate: float) -> float:
        return self._decay * average + (1 - self._decay) * estimate

    @property
    def value(self) -> float | None:
        """The noise scale in rows, 0 or more.

        None before `min_samples`, and if the average of |G|^2 is not positive: the scale is then
        large but unknown.
        """
        if self._samples < self._min_samples or self._squared_gradient <= 0:
            return None
        return max(0.0, self._noise / self._squared_gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, from which a run resumes bit-identically."""
        return {
            "samples": self._samples,
            "noise": self._noise,
            "squared_gradient": self._squared_gradient,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; `decay` may differ."""
        self._samples = int(state["samples"])
        self._noise = float(state["noise"])
        self._squared_gradient = float(state["squared_gradient"])


def squared_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the total squared norm of the gradients as a scalar tensor, without a device sync.

    It is computed in float32 or wider: the noise is a small difference of squared norms.
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
