"""Allocations of the recipe's steps on CUDA or on the CUDA stack without a device.

python -m torch.distributed.run --nproc_per_node 2 tests/support/step_logs.py NAME ROWS TOKENS
    [KEY=VALUE ...]

Rank 0 prints its log and its peak.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from support.processes import run_torchrun
from support.runners import report_of, sizer_of
from support.stack_runs import no_weights

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.estimate.allocator import STREAM
from adaptive_batch.torchtune import AdapterModel, Data, Job, Settings, Trainer
from adaptive_batch.torchtune.checks import TO_PLAN, complete

CONFIGS = Path(__file__).parents[2] / "configs"
# Steps of a log.
STEPS = 3


class Unloaded(AdapterModel):
    """Adapters on an uninitialized base."""

    def _load(self, *_: object) -> None:
        pass

    def _load_sharded(self, *args: Any, **options: Any) -> None:
        # Skip the initialization of adapters: all weights stay uninitialized.
        super(AdapterModel, self)._load_sharded(*args, **options)


def read(name: str, *overrides: str) -> DictConfig:
    """Return a shipped configuration for rows of any length."""
    given = OmegaConf.from_dotlist(["dataset.packed=False", *overrides])
    cfg = OmegaConf.merge(OmegaConf.load(CONFIGS / f"{name}.yaml"), given)
    assert isinstance(cfg, DictConfig)
    complete(cfg, needs=TO_PLAN)
    return cfg


def peak_bytes(log: Sequence[int]) -> int:
    """Return the peak of the allocated bytes."""
    sizes, alive, peak = array("q"), 0, 0
    for entry in log:
        if entry > 0:
            sizes.append(entry % STREAM)
            alive += sizes[-1]
            peak = max(peak, alive)
        else:
            alive -= sizes[~entry]
    return peak


def made_up_rows(job: Job, rows: int, tokens: int | Sequence[int]) -> list[dict[str, Any]]:
    """Return rows of `tokens` tokens; with several numbers, rows use them in turn."""
    lengths = [tokens] if isinstance(tokens, int) else tokens
    return [job.task.synthetic_row(lengths[number % len(lengths)]) for number in range(rows)]


def on_cuda(
    cfg: DictConfig, rows: int, tokens: int | Sequence[int], *, micro_batches: int = 1
) -> array[int]:
    """Return the log of a run on CUDA, including loading. PyTorch's peaks are those from the second
    step on, which compiles nothing and tunes no kernel.
    """
    memory: Any = torch.cuda.memory
    torch._C._cuda_clearCublasWorkspaces()
    memory._record_memory_history(context=None, max_entries=10_000_000, clear_history=True)
    builder = Unloaded() if "lora_attn_modules" in cfg.model else None
    job = Job(cfg, Settings.from_config(cfg), builder, needs=TO_PLAN)
    data = Data(job, made_up_rows(job, 1, 8), packed=False)
    model = job.builder.build(cfg, no_weights(), dtype=job.dtype, device=job.device)
    sizer = sizer_of(MicroBatchLimit(rows), layout=data.configured_layout, memory=job.memory)
    trainer = Trainer(job, data, model, sizer)
    for step in range(STEPS):
        step_rows = made_up_rows(job, rows, tokens) * micro_batches
        trainer.engine.run(step_rows, report_of(step_rows))
        trainer.step()
        if step == 0:
            torch.cuda.reset_peak_memory_stats()
    log, numbers, count = array("q"), {}, 0
    streams: dict[int, int] = {torch.cuda.default_stream().cuda_stream: 0}
    for event in memory._snapshot()["device_traces"][torch.cuda.current_device()]:
        if event["action"] == "alloc":
            numbers[event["addr"]] = count
            log.append(streams.setdefault(event["stream"], len(streams)) * STREAM + event["size"])
            count += 1
        elif event["action"] == "free_completed" and event["addr"] in numbers:
            log.append(~numbers.pop(event["addr"]))
    memory._record_memory_history(enabled=None)
    for (
        optimizer
    ) in trainer.optimizers:  # in backward it is held by hooks of the parameters, and they by it
        optimizer.state.clear()
    for parameter in model.parameters():
        parameter.data = torch.empty(0, device=job.device)
    return log


def on_ranks(
    name: str, rows: int, tokens: int, *overrides: str, ranks: int
) -> tuple[array[int], int]:
    """Return the log of rank 0 of several processes, and its peak of requested bytes from the
    second step on.
    """
    words = (__file__, name, rows, tokens, *overrides)
    done = run_torchrun(ranks, *words, timeout=None, EMULATE_DEVICE_COUNT=str(ranks))
    log, peak = json.loads(done.stdout.splitlines()[-1])
    return array("q", log), peak


def main() -> None:
    """Print the log of rank 0."""
    name, rows, tokens, *overrides = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cuda:nccl,cpu:gloo")
    log = on_cuda(read(name, *overrides), int(rows), int(tokens))
    if torch.distributed.get_rank() == 0:
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        print(json.dumps([log.tolist(), peak]), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
