"""Runs a script in this process and records what it trains; the script knows nothing of it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from adaptive_batch.training import AdaptiveStep
from adaptive_batch.training.split_check import SplitCheck

MOST_SECONDS = 120


@dataclass(frozen=True)
class MemoryLimit:
    """Where memory runs out: in modules of a class, called with gradients for more rows than fit.

    Attributes:
        module: name of the class in ``torch.nn``.
        dimension: dimension of its input that is the rows.
        max_rows: the most rows that fit.
        rank: rank on which it runs out.
    """

    module: str
    dimension: int
    max_rows: int
    rank: int

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if type(module) is not getattr(nn, self.module) or inputs[0].dim() < 2:
            return
        num_rows = inputs[0].size(self.dimension)
        if torch.is_grad_enabled() and num_rows > self.max_rows:
            raise torch.OutOfMemoryError(f"{num_rows} rows do not fit")


class Observer:
    """Records the loss of each optimizer's step: what ``backward`` was called on before it, in the
    attempts that counted.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_checks = 0
        self.most_parts = 0
        self._optimizer: torch.optim.Optimizer | None = None
        self._pending: list[float] = []

    def attach(self) -> None:
        """Observe the rest of this process."""
        backward = torch.Tensor.backward
        call = AdaptiveStep.__call__
        begin = SplitCheck._begin_split

        def observed_backward(loss: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
            self._pending.append(loss.item())
            backward(loss, *arguments, **keywords)

        def observed_call(step: AdaptiveStep, batch: Any) -> list[Any]:
            num_before = len(self._pending)
            results = call(step, batch)
            # Those of failed attempts came before.
            self._pending[num_before:] = self._pending[-len(results) :]
            self.most_parts = max(self.most_parts, len(results))
            return results

        def observed_begin(split_check: SplitCheck, *arguments: Any, **keywords: Any) -> bool:
            is_due: bool = begin(split_check, *arguments, **keywords)
            self.num_checks += is_due
            return is_due

        torch.Tensor.backward = observed_backward
        AdaptiveStep.__call__ = observed_call
        SplitCheck._begin_split = observed_begin
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = optimizer
        self.losses.append(sum(self._pending))
        self._pending.clear()

    def save(self, path: Path) -> None:
        assert self._optimizer is not None, "the script has stepped no optimizer"
        groups = self._optimizer.param_groups
        weights = [tensor.detach().flatten() for group in groups for tensor in group["params"]]
        torch.save(
            {
                "losses": self.losses,
                "weights": torch.cat(weights),
                "num_checks": self.num_checks,
                "most_parts": self.most_parts,
            },
            path,
        )


def without_dropout() -> None:
    """Let ``nn.Dropout`` keep all from here on."""
    nn.Dropout.forward = lambda self, values: values  # type: ignore[method-assign]


def run(
    folder: Path,
    command: list[str],
    environment: dict[str, str],
    prepare: Callable[[], None],
    limit: MemoryLimit | None,
    has_dropout: bool,
) -> None:
    """Run a script in a folder: ``FILE.py ARGUMENTS`` or ``-m MODULE ARGUMENTS``; write what was
    recorded and what it printed there, by rank.
    """
    os.environ.update(environment)
    rank = int(environment.get("RANK", 0))
    # What the script starts is started as in a process of its own.
    multiprocessing.set_start_method("fork", force=True)
    os.chdir(folder)
    output = os.open(f"output.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Of a process that hangs, the output says where.
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(rank)
    prepare()
    if not has_dropout:
        without_dropout()
    if limit is not None and limit.rank == rank:
        nn.modules.module.register_module_forward_pre_hook(limit)
    observer = Observer()
    observer.attach()
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
    observer.save(Path(f"record.{rank}"))
    sys.stdout.flush()
    # A thread of gloo's that lets go of a tensor while Python ends would abort the process.
    os._exit(0)
