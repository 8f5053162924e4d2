"""Estimating a mean from tokens whose noise scale is known in closed form, on one device or divided
over ranks.

Shared by the tests of the noise scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from support.runners import IGNORED, build_runner
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit, balance_by_rows
from adaptive_batch.distributed import Sharding
from adaptive_batch.schedules import NoiseSample

Row = dict[str, Any]


class Mean(nn.Module):
    """Returns the loss ``0.5 * |theta - x|^2`` of each token at a fixed theta of zeros."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(dimensions, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.theta - x).square().sum(-1)


class TokenMeans:
    """Rows of 2 to 14 label tokens, each length as likely; tokens of a row have noise in common,
    and longer rows another mean.

    A row of l label tokens has l * (mean of its length + normal noise of variances v_k / 4) and the
    noise of its tokens, of variances v_k from 1/4 to 7/4. So |G|^2 and S = E|d|^2
    (:mod:`adaptive_batch.schedules.noise_scale`) are sums over the lengths.

    Args:
        noise_scale: the true one, S / |G|^2, in rows; above 1.
        seed: of the rows.
        slope: the mean of rows twice as long as the average is larger by this part of it.
        dimensions: of a token.
    """

    def __init__(
        self, *, noise_scale: float, seed: int, slope: float = 0.5, dimensions: int = 48
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._variances = torch.linspace(0.25, 1.75, dimensions, dtype=torch.float64)
        lengths = torch.arange(2, 15, dtype=torch.float64)
        mean = lengths.mean()
        size = 1 + slope * (lengths - mean) / mean  # of the mean of a length, along one direction
        gradient = (lengths * size).mean() / mean
        between = (lengths * (size - gradient)).square().mean() / mean**2
        within = self._variances.sum() * (lengths.square() / 4 + lengths).mean() / mean**2
        direction = torch.randn(dimensions, generator=self._generator, dtype=torch.float64)
        self._mean = (
            direction / direction.norm() * (within / (noise_scale * gradient**2 - between)).sqrt()
        )
        self._slope, self._average = slope, float(mean)
        self.model = Mean(dimensions)
        if dist.is_initialized() and dist.get_world_size() > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def rows(self, count: int) -> list[Row]:
        """Draw the rows of a step, over all ranks."""

        def normal(*size: int) -> torch.Tensor:
            return (
                torch.randn(*size, generator=self._generator, dtype=torch.float64)
                * self._variances.sqrt()
            )

        rows = []
        for labels in torch.randint(2, 15, (count,), generator=self._generator).tolist():
            mean = self._mean * (1 + self._slope * (labels / self._average - 1))
            x = mean + normal(len(mean)) / 2 + normal(labels, len(mean))
            rows.append({"tokens": [0] * (labels + 1), "labels": [IGNORED] + [0] * labels, "x": x})
        return rows

    def sampler(self, limit: MicroBatchLimit, kind: str = "padded", **options: Any) -> _Sampler:
        """Return what samples the noise of steps in micro-batches of this limit and layout."""
        return _Sampler(self.model, limit, MicroBatchLayout(kind=kind), **options)


class _Sampler:
    def __init__(
        self, model: nn.Module, limit: MicroBatchLimit, layout: MicroBatchLayout, **options: Any
    ) -> None:
        self._model = model
        syncs = options.pop("syncs_every_micro_batch", True)
        self.engine = build_runner(
            model,
            limit,
            collate=_collate,
            mean_loss=self._mean_loss,
            dummy_row=lambda: {
                "tokens": [0, 0],
                "labels": [IGNORED, 0],
                "x": torch.zeros(1, len(model.theta)),
            },
            layout=layout,
            measures_noise=True,
            sharding=Sharding(model, syncs_every_micro_batch=syncs),
            **options,
        )
        self.engine.loss = replace(self.engine.loss, pack=_pack)

    def _mean_loss(self, batch: Row) -> torch.Tensor:
        has_label = batch["labels"][:, 1:] != IGNORED
        loss: torch.Tensor = self._model(batch["x"])[:, : has_label.shape[1]][has_label].mean()
        return loss

    def __call__(self, rows: Sequence[Row]) -> NoiseSample:
        """Return what a step of these rows, divided over the ranks as in training, says of its
        noise.
        """
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self._model.zero_grad()
        mine = balance_by_rows(len(rows), ranks)[rank]
        sample = self.engine.run([rows[position] for position in mine]).noise
        assert sample is not None
        return sample


def _collate(rows: Sequence[Row]) -> Row:
    def padded(key: str, value: int) -> torch.Tensor:
        return pad_sequence(
            [torch.as_tensor(row[key]) for row in rows], batch_first=True, padding_value=value
        )

    return {"tokens": padded("tokens", 0), "labels": padded("labels", IGNORED), "x": padded("x", 0)}


def _pack(rows: Sequence[Row]) -> tuple[Row, list[int]]:
    zero = torch.zeros(
        1, rows[0]["x"].shape[1], dtype=torch.float64
    )  # where a row's last token predicts the next row's first
    x = torch.cat([part for row in rows for part in (row["x"], zero)])
    labels = torch.cat([torch.as_tensor(row["labels"]) for row in rows])
    batch = {"tokens": torch.zeros_like(labels)[None], "labels": labels[None], "x": x[None]}
    return batch, [len(row["labels"]) for row in rows]
