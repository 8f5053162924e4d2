"""Estimate the mean of tokens with a noise scale in closed form, on one device or on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from support.runners import IGNORED, build_runner
from support.sharded_model import Row, padded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit, balance_by_rows
from adaptive_batch.distributed import Sharding
from adaptive_batch.schedules import NoiseSample

DIMENSIONS = 48
# The mean of rows twice as long as the average is larger by this part of it.
SLOPE = 0.5


class Mean(nn.Module):
    """Returns the loss ``0.5 * |theta - x|^2`` of each token at a fixed theta of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.theta - x).square().sum(-1)


class TokenMeans:
    """Rows of 2 to 14 label tokens, each length as likely; tokens of a row have noise in common,
    and longer rows another mean.

    A row of l label tokens has l * (mean of its length + normal noise of variances v_k / 4) and the
    noise of its tokens, of variances v_k from 1/4 to 7/4. So |G|^2 and S = E|d|^2
    (:mod:`adaptive_batch.schedules.noise_scale`) are sums over the lengths.

    Args:
        limit: of a micro-batch.
        kind: of its layout.
        noise_scale: the true one, S / |G|^2, in rows; above 1.
        seed: of the rows.
        syncs_every_micro_batch: reduce gradients after each micro-batch.
    """

    def __init__(
        self,
        limit: MicroBatchLimit,
        kind: str,
        *,
        noise_scale: float,
        seed: int,
        syncs_every_micro_batch: bool = True,
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._variances = torch.linspace(0.25, 1.75, DIMENSIONS, dtype=torch.float64)
        lengths = torch.arange(2, 15, dtype=torch.float64)
        mean = lengths.mean()
        size = 1 + SLOPE * (lengths - mean) / mean  # of the mean of a length, along one direction
        gradient = (lengths * size).mean() / mean
        between = (lengths * (size - gradient)).square().mean() / mean**2
        within = self._variances.sum() * (lengths.square() / 4 + lengths).mean() / mean**2
        direction = torch.randn(DIMENSIONS, generator=self._generator, dtype=torch.float64)
        norm = (within / (noise_scale * gradient**2 - between)).sqrt()
        self._mean, self._average = direction / direction.norm() * norm, float(mean)
        self._model = Mean()
        if distributed.world_size() > 1:
            fully_shard(self._model, mesh=init_device_mesh("cpu", (distributed.world_size(),)))
        dummy = {"tokens": [0, 0], "labels": [IGNORED, 0], "x": torch.zeros(1, DIMENSIONS)}
        self._engine = build_runner(
            self._model,
            limit,
            collate=partial(padded, tokens=0, labels=IGNORED, x=0),
            mean_loss=self._mean_loss,
            dummy_row=lambda: dummy,
            layout=MicroBatchLayout(kind=kind),
            measures_noise=True,
            sharding=Sharding(self._model, syncs_every_micro_batch=syncs_every_micro_batch),
        )
        self._engine.loss = replace(self._engine.loss, pack=pack)

    def _mean_loss(self, batch: Row) -> torch.Tensor:
        has_label = batch["labels"][:, 1:] != IGNORED
        loss: torch.Tensor = self._model(batch["x"])[:, : has_label.shape[1]][has_label].mean()
        return loss

    def _normal(self, *size: int) -> torch.Tensor:
        size = (*size, DIMENSIONS)
        drawn = torch.randn(*size, generator=self._generator, dtype=torch.float64)
        return drawn * self._variances.sqrt()

    def sample(self, count: int) -> NoiseSample:
        """Draw the rows of a step, divide them over the ranks, and sample their noise."""
        rows = []
        for labels in torch.randint(2, 15, (count,), generator=self._generator).tolist():
            mean = self._mean * (1 + SLOPE * (labels / self._average - 1))
            x = mean + self._normal() / 2 + self._normal(labels)
            rows.append({"tokens": [0] * (labels + 1), "labels": [IGNORED] + [0] * labels, "x": x})
        self._model.zero_grad()
        mine = balance_by_rows(len(rows), distributed.world_size())[distributed.rank()]
        sample = self._engine.run([rows[position] for position in mine]).noise
        assert sample is not None
        return sample


def pack(rows: Sequence[Row]) -> tuple[Row, list[int]]:
    # A row's last token predicts the next row's first.
    zero = torch.zeros(1, DIMENSIONS, dtype=torch.float64)
    x = torch.cat([part for row in rows for part in (row["x"], zero)])
    labels = torch.cat([torch.as_tensor(row["labels"]) for row in rows])
    batch = {"tokens": torch.zeros_like(labels)[None], "labels": labels[None], "x": x[None]}
    return batch, [len(row["labels"]) for row in rows]
