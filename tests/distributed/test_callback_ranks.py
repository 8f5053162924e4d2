"""AdaptiveCallback on two ranks trains what Lightning does, and both ranks retry together."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from support.lightning_modules import Module, rows, trainer_in
from support.processes import run_on_ranks
from support.sharded_model import run_out_of_memory
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from adaptive_batch import SettingError, distributed
from adaptive_batch.integrations.lightning import AdaptiveArguments, AdaptiveCallback

STRATEGIES = {
    "ddp": DDPStrategy,
    "fsdp2": partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1),
    "tensor parallel": ModelParallelStrategy,
}


class Sharded(Module):
    """A classifier that runs out of memory on rank 1, and that FSDP2 may shard."""

    def __init__(self, limit: int | None, *, is_sharded: bool) -> None:
        super().__init__(limit=limit, rank=1)
        self.is_sharded = is_sharded

    def configure_model(self) -> None:
        if self.is_sharded:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def trained(
    strategy: str, limit: int | None, callback: AdaptiveCallback | None, accumulates: int
) -> tuple[list[float], torch.Tensor]:
    module = Sharded(limit, is_sharded=strategy != "ddp")
    trainer = fitted(module, strategy, callback, accumulates)
    # Rows of this rank in the last epoch, without those of failed attempts.
    assert trainer.logged_metrics["rows_epoch"] == 16
    weights = [
        getattr(parameter, "full_tensor", lambda own=parameter: own)().detach().reshape(-1)
        for parameter in module.parameters()
    ]
    return module.losses, torch.cat(weights)


def fitted(
    module: Sharded, strategy: str, callback: AdaptiveCallback | None, accumulates: int
) -> lightning.Trainer:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_in(
            folder,
            [callback] if callback else [],
            max_epochs=2,
            devices=2,
            strategy=STRATEGIES[strategy](),
            plugins=[TorchElasticEnvironment()],
            accumulate_grad_batches=accumulates,
        )
        loader = DataLoader(rows(32), batch_size=4, shuffle=False)
        trainer.fit(module, loader, loader if isinstance(module, Validates) else None)
    return trainer


def differences(strategy: str, accumulates: int) -> dict[str, float]:
    """Return the differences from Lightning's own run and from rank 0, whole and in parts."""
    losses, weights = trained(strategy, None, None, accumulates)
    found = {}
    for name, limit in (("whole", None), ("parts", 2)):
        adaptive = AdaptiveArguments()
        if limit is None:
            adaptive = AdaptiveArguments(micro_batch_size="auto", row_length=1)
        callback = AdaptiveCallback(adaptive)
        own_losses, own_weights = trained(strategy, limit, callback, accumulates)
        assert callback.step is not None
        assert len(own_losses) == len(losses) == 8
        assert callback.step.num_micro_batches == (2 if limit else 1)
        found[f"loss, {name}"] = max(
            abs(ours - plain) / plain for ours, plain in zip(own_losses, losses, strict=True)
        )
        found[f"weights, {name}"] = (weights - own_weights).abs().max().item()
        of_rank_zero = own_weights.clone()
        dist.broadcast(of_rank_zero, 0)
        found[f"ranks, {name}"] = (of_rank_zero - own_weights).abs().max().item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("accumulates", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_train_what_lightning_does_and_retry_together(strategy, accumulates):
    for found in run_on_ranks(differences, 2, strategy, accumulates):
        # Lightning sums the gradients of two batches before it takes their mean over ranks.
        assert found["loss, whole"] <= (1e-7 if accumulates == 1 else 1e-6)
        assert found["weights, whole"] <= 1e-5
        assert found["loss, parts"] <= 2e-6
        assert found["weights, parts"] <= 1e-5
        assert found["ranks, whole"] == found["ranks, parts"] == 0


class Validates(Sharded):
    """Has different buffers on each rank; runs out of memory on rank 1 in validation."""

    def __init__(self, strategy: str, *, fails: bool) -> None:
        super().__init__(None, is_sharded=strategy != "ddp")
        if not self.is_sharded:
            self.layers.insert(1, nn.BatchNorm1d(64))
        self.fails = fails and not self.is_sharded

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        if self.fails and distributed.rank() == 1 and len(inputs) > 2:
            run_out_of_memory()
        self.log("val_loss", cross_entropy(self.layers(inputs), targets), sync_dist=True)


def validated(strategy: str) -> list[Any]:
    metrics = [
        fitted(
            Validates(strategy, fails=callback is not None), strategy, callback, 1
        ).logged_metrics
        for callback in (None, AdaptiveCallback())
    ]
    return [each["val_loss"].item() for each in metrics]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_validation_begins_with_the_buffers_of_rank_zero_and_runs_in_parts_on_one_rank(strategy):
    for loss, own_loss in run_on_ranks(validated, 2, strategy):
        assert own_loss == pytest.approx(loss, rel=1e-6)


def refusal() -> str:
    with pytest.raises(SettingError) as refused:
        trained("tensor parallel", None, AdaptiveCallback(), 1)
    return str(refused.value)


@pytest.mark.slow
def test_ranks_that_share_rows_are_refused():
    # Lightning's default is one data-parallel group of all ranks.
    for message in run_on_ranks(refusal, 2):
        assert "model='Sharded': several ranks need a DDP module" in message
