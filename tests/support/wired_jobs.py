"""A job of torchtune's parts on rows that are given, its models filled with numbers that do not
depend on the test: for gradients to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torchtune
from omegaconf import DictConfig
from support.fault_injection import RunsOutAt
from support.runners import HeldSizer, report_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import DeviceMemory
from adaptive_batch.probe import DryRun, Predictive, run_search
from adaptive_batch.torchtune import Data, FullModel, Job, Settings, Trainer
from adaptive_batch.torchtune.checks import TO_PLAN
from adaptive_batch.training import StepResult


class Wired:
    """Model, task and runner of a configuration; on several ranks FSDP2 divides the models.

    Args:
        cfg: the configuration.
        rows: its rows.
        builder: of the model that trains.
        limit: what a micro-batch holds.
        memory: in place of the device's.
        reference_limit: what a micro-batch of the reference holds, where it runs apart.
    """

    def __init__(
        self,
        cfg: DictConfig,
        rows: Sequence[Any],
        *,
        builder: FullModel | None,
        limit: MicroBatchLimit,
        memory: DeviceMemory | None = None,
        reference_limit: MicroBatchLimit | None = None,
    ) -> None:
        if reference_limit is not None:
            cfg.reference_micro_batch_size = 1
        job = Job(cfg, Settings.from_config(cfg), builder, needs=TO_PLAN)
        if memory is not None:
            job.memory = memory
        self.job = job
        self.data = Data(job, rows, packed=False)
        model = self._filled(cfg.model, job.dtype, seed=1)
        job.builder.freeze(model)
        second = None
        if job.second is not None:
            second = self._filled(job.second.cfg.model, job.dtype, seed=2)
        if distributed.world_size() > 1:
            for part in filter(None, (model, second)):
                fully_shard(part)
        sizer = HeldSizer(limit, layout=self.data.configured_layout, memory=job.memory)
        sizer.limit_of_others = reference_limit
        self.trainer = Trainer(job, self.data, model, sizer, second=second)
        self.model = model

    @staticmethod
    def _filled(block: DictConfig, dtype: torch.dtype, *, seed: int) -> nn.Module:
        with torch.device("cpu"), torchtune.training.set_default_dtype(dtype):
            model: nn.Module = torchtune.config.instantiate(block)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.2 * drawn)
        return model

    def run(self, rows: Sequence[Any], limit: int | None = None) -> StepResult:
        """Leave the gradients of a step of these rows, so many at once."""
        self.model.zero_grad()
        sizer = self.trainer.engine.sizer
        assert isinstance(sizer, HeldSizer)
        if limit is not None:
            sizer.current = MicroBatchLimit(limit)
        return self.trainer.engine.run(rows, report_of(rows))

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: parameter.grad.clone()
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two gradients, over the largest number in them."""
    assert one.keys() == other.keys() != set()
    largest = max(float(gradient.abs().max()) for gradient in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def check_bounds(wired: Wired, row: Any, largest: Sequence[int]) -> None:
    """A search finds the bound that trials of each size show, under each budget that holds so many
    rows and not one more; a trial leaves no trace, in a second model neither.
    """
    before = {name: tensor.clone() for name, tensor in wired.trainer.models.state_dict().items()}
    runner = wired.trainer.engine
    optimizer = torch.optim.AdamW(wired.model.parameters(), lr=1e-3)

    def dry_run(budget_bytes: int) -> DryRun:
        return DryRun(
            model=wired.model,
            optimizer=optimizer,
            forward_backward=lambda rows: runner.try_rows([row] * rows),
            step=optimizer.step,
            accumulates=False,
            memory=runner.memory,
            budget_bytes=budget_bytes,
            row="one row",
            frozen_modules=wired.trainer.tried().frozen_modules,
        )

    with dry_run(2**40) as trial:
        peaks = [trial(size).peak_bytes or 0 for size in range(1, max(largest) + 2)]
    assert peaks == sorted(set(peaks))
    for size in largest:
        budget = (peaks[size - 1] + peaks[size]) // 2
        with dry_run(budget) as trial:
            resident = trial.resident_bytes
            search = Predictive(budget_bytes=budget, maximum=4096, resident_bytes=resident)
            result = run_search(trial, search=search, resident_bytes=resident)
        assert result.max_batch_size == size
    after = wired.trainer.models.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def check_that_halves_are_run(build: Callable[..., Wired], rows: Sequence[Any]) -> None:
    """A step of 8 rows at once that runs out of memory is that of 4 at once, wherever it does."""
    expected = build(limit=MicroBatchLimit(4))
    result = expected.run(rows)
    failures = 0
    for operation in range(1, 2000, 47):
        mode = RunsOutAt(operation)
        faulted = build(limit=MicroBatchLimit(8))
        with mode:
            after = faulted.run(rows)
        if not mode.failed_in:
            break
        failures += 1
        assert (after.loss, after.metrics) == (result.loss, result.metrics)
        ours, theirs = faulted.gradients(), expected.gradients()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        adapters = [part for part in faulted.model.modules() if hasattr(part, "disabled")]
        assert not any(part.disabled for part in adapters)
    assert failures > 4
