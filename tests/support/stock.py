"""Run torchtune's distributed recipes and ours on the same gloo ranks, which start once for many
runs.

    tasks = [(recipe, "clip_grad_norm=0.5") for recipe in (STOCK_ON_RANKS, OURS)]
    stock, ours = run_tasks(setup, tasks, ranks=2)
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from support.cli import Finished, SmallSetup
from support.processes import hosted_store, run
from torchtune import training

from adaptive_batch._util import replaced

STOCK_ON_RANKS = "full_finetune_distributed"
# Name of a recipe, and overrides key=value.
Task = tuple[str, ...]


def run_tasks(
    setup: SmallSetup, tasks: Sequence[Task], *, ranks: int, timeout: float = 600.0
) -> list[Finished]:
    """Run tasks one after another in the same processes, each with a new process group and store.

    Raises:
        AssertionError: a rank failed; the message has its output.
    """
    if not tasks:
        return []
    folders = [setup._arguments(task[0], task[1:], None)[1] for task in tasks]
    own = [(*task, f"output_dir={folder}") for task, folder in zip(tasks, folders, strict=True)]
    stores = [hosted_store() for _ in tasks]
    ports = [store.port for store in stores]
    for rank, one in enumerate(run(_run_tasks, setup, own, ports, ranks=ranks, timeout=timeout)):
        assert one.exit_status == 0, (
            f"rank {rank} ended with {one.exit_status}:\n{one.output[-3000:]}"
        )
    return [Finished("", folder) for folder in folders]


def _run_tasks(setup: SmallSetup, tasks: Sequence[Task], ports: Sequence[int]) -> None:
    with on_a_cpu():
        for task, port in zip(tasks, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            print(*task, flush=True)
            setup.run_in_process(*task)
            assert not dist.is_initialized(), f"{task} has left its process group"


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Replace calls of the stock recipes that fail on a CPU."""
    init_process_group = dist.init_process_group
    with (
        replaced(
            training,
            get_memory_stats=lambda device: {},
            log_memory_stats=lambda stats, **options: None,
            cleanup_before_training=gc.collect,
        ),
        replaced(
            dist,
            init_process_group=lambda backend, **options: init_process_group("gloo", **options),
        ),
    ):
        yield
