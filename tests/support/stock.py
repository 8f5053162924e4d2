"""torchtune's distributed recipe and ours, in turns on the same gloo ranks: processes start once
for many runs.

tasks = [Task(recipe, setup.fresh_folder(), ("clip_grad_norm=0.5",)) for recipe in (STOCK_ON_RANKS,
OURS)] stock, ours = run_tasks(setup, tasks, ranks=2) same_weights(ours.weights(1),
stock.weights(1))
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.cli import OURS, Finished, SmallSetup, interrupted, typed_files
from support.ranks import end_of_ranks, reserved_port
from torchtune import training
from torchtune.datasets import SFTDataset, instruct_dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer

STOCK_ON_RANKS = "full_finetune_distributed"


@dataclass(frozen=True)
class Task:
    """A run to do on all ranks.

    Attributes:
        recipe: its name.
        output_dir: where it writes.
        overrides: key=value.
    """

    recipe: str
    output_dir: Path
    overrides: tuple[str, ...] = ()


class RunsFailedError(AssertionError):
    """A run that should have ended well did not; its text has what the ranks printed."""


def run_tasks(
    setup: SmallSetup, tasks: Sequence[Task], *, ranks: int, timeout: float = 600.0
) -> list[Finished]:
    """Do runs one after another in the same processes, each with a process group and a store of its
    own.

    Args:
        setup: what they run on.
        tasks: the runs.
        ranks: how many there are.
        timeout: seconds for all of them.

    Raises:
        RunsFailedError: one of them did not end well.
    """
    if not tasks:
        return []
    printed = setup.fresh_folder()
    with ExitStack() as held:
        ports = [held.enter_context(reserved_port()) for _ in tasks]
        ended = end_of_ranks(
            _run_tasks,
            ranks,
            setup,
            tuple(tasks),
            ports,
            printed,
            timeout=timeout,
            begins_group=False,
        )
    if any(one.exit_status != 0 for one in ended):
        said = [
            f"rank {rank} ended with {one.exit_status}:\n{_end_of(printed, rank)}"
            for rank, one in enumerate(ended)
        ]
        raise RunsFailedError("\n\n".join(said))
    return [Finished("", task.output_dir) for task in tasks]


def resuming(setup: SmallSetup, recipe: str, begun: Finished, overrides: Sequence[str]) -> Task:
    """The second epoch of a run that was stopped after its first, each recipe in its own way."""
    folder = interrupted(begun, setup)
    own = () if recipe == OURS else typed_files(folder)
    return Task(recipe, folder, (*overrides, "resume_from_checkpoint=True", *own))


def _end_of(printed: Path, rank: int) -> str:
    return (printed / f"{rank}.txt").read_text(errors="replace")[-3000:]


def _run_tasks(
    setup: SmallSetup, tasks: Sequence[Task], ports: Sequence[int], printed: Path
) -> None:
    with (printed / f"{os.environ['RANK']}.txt").open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    with on_a_cpu():
        for task, port in zip(tasks, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            try:
                setup.run_in_process(task.recipe, *task.overrides, f"output_dir={task.output_dir}")
            except BaseException:
                print(
                    f"{task.recipe} {' '.join(task.overrides)}\n{traceback.format_exc()}",
                    file=sys.stderr,
                    flush=True,
                )
                raise
            assert not dist.is_initialized(), f"{task.recipe} has left its process group"


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """Replace calls of the stock recipes that fail on a CPU."""
    init_process_group = dist.init_process_group
    instead = {
        "get_memory_stats": lambda device: {},
        "log_memory_stats": lambda stats, **options: None,
        "cleanup_before_training": gc.collect,
    }
    usual = {name: getattr(training, name) for name in instead}
    vars(training).update(instead)
    dist.init_process_group = lambda backend, **options: init_process_group("gloo", **options)
    try:
        yield
    finally:
        vars(training).update(usual)
        dist.init_process_group = init_process_group


def partly_labelled(
    tokenizer: ModelTokenizer, *, without_labels: Sequence[int], **options: Any
) -> SFTDataset:
    """torchtune's dataset of instructions, some of whose rows have no label, as rows that are cut
    within the prompt have.
    """
    dataset = instruct_dataset(tokenizer, **options)
    prepare = dataset._prepare_sample
    unlabelled = [dataset._data[row] for row in without_labels]

    @functools.wraps(prepare)
    def prepare_row(sample: Any) -> dict[str, Any]:
        row = prepare(sample)
        if sample in unlabelled:
            row = {**row, "labels": [-100] * len(row["labels"])}
        return row

    dataset._prepare_sample = prepare_row
    return dataset
