"""What the recipe's steps ask of the allocator: as estimated on fake tensors, and on CUDA, be it the stack without a device."""

from __future__ import annotations

import difflib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.estimate import CudaKernels, FakeDevice
from adaptive_batch.torchtune import Settings, Trainer
from adaptive_batch.torchtune.checks import TO_PLAN, complete
from adaptive_batch.torchtune.data import Data
from adaptive_batch.torchtune.fake_run import FakeRun, made_up_row
from adaptive_batch.torchtune.job import Job
from adaptive_batch.torchtune.model import FullModel

from .stack_runs import NoWeights

CONFIGS = Path(__file__).parents[2] / "configs"


def read(name: str, *overrides: str) -> DictConfig:
    """Return a shipped configuration for rows of any length."""
    given = OmegaConf.from_dotlist(["dataset.packed=False", *overrides])
    cfg = OmegaConf.merge(OmegaConf.load(CONFIGS / f"{name}.yaml"), given)
    assert isinstance(cfg, DictConfig)
    complete(cfg, needs=TO_PLAN)
    return cfg


def peak_bytes(log: Sequence[int]) -> int:
    """Return the most bytes that are alive at once."""
    sizes, alive, peak = array("q"), 0, 0
    for entry in log:
        if entry > 0:
            sizes.append(entry)
            alive += entry
            peak = max(peak, alive)
        else:
            alive -= sizes[~entry]
    return peak


def estimated(
    cfg: DictConfig, rows: int, tokens: int, *, steps: int = 3, micro_batches: int = 1, traced: Sequence[int] = ()
) -> array[int]:
    """Return the log of a run on fake tensors of the device that PyTorch uses; rows that are not `traced` follow from those that are."""
    run = FakeRun(
        cfg, Settings.from_config(cfg), FakeDevice(CudaKernels.of_this_device()), reads_data=False, builder=None
    )
    row = made_up_row(tokens, packed=False)
    step = run.step(lambda size: [row] * size, accumulates=micro_batches > 1)
    for size in traced or (rows,):
        step.trace(size)
    return step.log(rows, [step.forward_backward] * steps, micro_batches=micro_batches)


def on_cuda(cfg: DictConfig, rows: int, tokens: int, *, steps: int = 3, micro_batches: int = 1) -> array[int]:
    """Return the log of a run on CUDA, from loading on."""
    memory: Any = torch.cuda.memory
    torch._C._cuda_clearCublasWorkspaces()
    memory._record_memory_history(context=None, max_entries=10_000_000, clear_history=True)
    job = Job(cfg, Settings.from_config(cfg), needs=TO_PLAN)
    data = Data(job, [made_up_row(8, packed=False)], packed=False)
    model = FullModel().build(cfg, NoWeights(), dtype=job.dtype, device=job.device)
    trainer = Trainer(job, data, model, limit=lambda: MicroBatchLimit(rows))
    for _ in range(steps):
        trainer.runner.run([made_up_row(tokens, packed=False)] * rows * micro_batches)
        trainer.step()
    log, numbers, count = array("q"), {}, 0
    for event in memory._snapshot()["device_traces"][torch.cuda.current_device()]:
        if event["action"] == "alloc":
            numbers[event["addr"]] = count
            log.append(event["size"])
            count += 1
        elif event["action"] == "free_completed" and event["addr"] in numbers:
            log.append(~numbers.pop(event["addr"]))
    memory._record_memory_history(enabled=None)
    for optimizer in trainer.optimizers:  # in backward it is held by hooks of the parameters, and they by it
        optimizer.state.clear()
    for parameter in model.parameters():
        parameter.data = torch.empty(0, device=job.device)
    return log


def differences(one: Sequence[int], other: Sequence[int], *, smallest: int = 0) -> list[str]:
    """Return where two logs differ, tensors of fewer bytes left out; each free stands for the size that it frees."""
    first, second = (_readable(log, smallest) for log in (one, other))
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    return [
        f"at {a} of {len(first)}: {first[a:b]} instead of {second[x:y]}"
        for tag, a, b, x, y in matcher.get_opcodes()
        if tag != "equal"
    ]


def _readable(log: Sequence[int], smallest: int) -> list[int]:
    sizes: list[int] = []
    entries = []
    for entry in log:
        if entry > 0:
            sizes.append(entry)
        entries.append(entry if entry > 0 else -sizes[~entry])
    return [entry for entry in entries if abs(entry) >= smallest]
