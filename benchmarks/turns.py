"""Recipes that train in turns: in one process, each in a thread of its own, so that what slows the
machine slows all.

A step is everything from one logged step to the next: data, forward, backward, optimizer, progress
bar, logs.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torchtune
from adaptive_full_finetune import AdaptiveFullFinetuneRecipe
from omegaconf import DictConfig, OmegaConf
from torchtune.training.metric_logging import DiskLogger

from adaptive_batch.config_files import config_path
from adaptive_batch.torchtune import NextTokens, builder_of

NUM_RESAMPLES = 10_000
# For what goes on in the background when a turn ends.
WAIT_SECONDS, MOST_WAITS = 0.005, 200


class Enough(Exception):
    """Raised where a step is logged, to end a recipe's training there."""


class Relay:
    """Lets threads run in turns, and times each step.

    Args:
        names: of the recipes, in the order of their turns.
        device: waited for at the end of each step.
        after_step: told a recipe's name and how many steps it has done, while no clock runs; says
            whether its turn is over, or raises :class:`Enough`. None hands over after each step.

    Attributes:
        seconds: of every step of each recipe.
        cpu_seconds: of the processor in the same steps, all threads and workers included, which
            other programs on the machine lengthen less. What a recipe still does in the background
            when its turn ends is waited for and counts here, but in no `seconds`.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        *,
        after_step: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
        self._device = device
        self._after_step = after_step
        self._running = list(names)
        self._may_run = {name: threading.Semaphore(0) for name in names}
        self._errors: list[BaseException] = []
        self._start = self._cpu_start = 0.0

    def run(self, recipes: dict[str, Any]) -> None:
        """Train all recipes, to the end or until they have :class:`Enough`."""
        threads = [
            threading.Thread(target=self._train, args=item, daemon=True) for item in recipes.items()
        ]
        for thread in threads:
            thread.start()
        self._may_run[self._running[0]].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def step_done(self, name: str) -> None:
        """End a step; where it ends a turn, let the next recipe run and wait for the next turn."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds[name].append(time.perf_counter() - self._start)
        self.cpu_seconds[name].append(processor_seconds() - self._cpu_start)
        if self._after_step is None or self._after_step(name, len(self.seconds[name])):
            self.cpu_seconds[name][-1] += idle_after()
            self._may_run[self._following(name)].release()
            self._begin(name)
        else:
            self._start_clocks()

    def _train(self, name: str, recipe: Any) -> None:
        try:
            self._begin(name)
            recipe.train()
        except Enough:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            following = self._following(name)
            self._running.remove(name)
            self._may_run[following].release()

    def _begin(self, name: str) -> None:
        self._may_run[name].acquire()
        if self._errors:
            raise Enough
        self._start_clocks()

    def _start_clocks(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), processor_seconds()

    def _following(self, name: str) -> str:
        return self._running[(self._running.index(name) + 1) % len(self._running)]


def processor_seconds() -> float:
    """CPU time of this process and its workers so far."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    if sys.platform == "linux":  # a process's clock has a number: clock_getcpuclockid(3)
        total += sum(
            time.clock_gettime((~worker.pid << 3) | 2)
            for worker in multiprocessing.active_children()
        )
    return total


def idle_after() -> float:
    """Wait until neither another thread nor a worker computes; return the CPU time that
    this took.
    """
    start = last = processor_seconds()
    for _ in range(MOST_WAITS):
        time.sleep(WAIT_SECONDS)
        before, last = last, processor_seconds()
        if last - before < WAIT_SECONDS / 5:
            break
    return last - start


class TurnLogger(DiskLogger):
    """torchtune's logger to disk, after whose line another recipe may have its turn."""

    relay: Relay

    def __init__(self, log_dir: str, name: str) -> None:
        super().__init__(log_dir)
        self._name = name

    def log_dict(self, payload: Any, step: int) -> None:
        super().log_dict(payload, step)
        self.relay.step_done(self._name)


def configuration(folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    """Return the demo's configuration in a folder, logging by turns."""
    path = config_path("demo_cpu")
    assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
    own = {
        "demo_dir": str(folder),
        "output_dir": str(folder / name.replace(" ", "_")),
        "metric_logger": {"_component_": "turns.TurnLogger", "name": name},
    }
    cfg = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist([*overrides]), own)
    assert isinstance(cfg, DictConfig)
    return cfg


def stock_recipe(cfg: DictConfig) -> Any:
    """torchtune's recipe, which lies in a file beside its package."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("stock_full_finetune", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = module.FullFinetuneRecipeSingleDevice(cfg=cfg)
    recipe.setup(cfg=cfg)
    return recipe


def our_recipe(cfg: DictConfig) -> AdaptiveFullFinetuneRecipe:
    recipe = AdaptiveFullFinetuneRecipe(cfg, builder_of(cfg), task=NextTokens)
    recipe.setup()
    return recipe


def resampled_interval(
    statistic: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor
) -> tuple[float, float, float]:
    """A statistic of paired values, and the bounds of its 95% bootstrap confidence interval.

    Rounds are drawn, and pairs of each round that was drawn.

    Args:
        statistic: of values `[..., rounds x pairs, columns]`, for each of the leading dimensions.
        values: float64, `[rounds, pairs, columns]`.
    """
    num_rounds, num_pairs, _ = values.shape
    generator = torch.Generator().manual_seed(0)
    rounds = torch.randint(num_rounds, (NUM_RESAMPLES, num_rounds, 1), generator=generator)
    pairs = torch.randint(num_pairs, (NUM_RESAMPLES, num_rounds, num_pairs), generator=generator)
    low, high = (
        statistic(values[rounds, pairs].flatten(1, 2))
        .quantile(torch.tensor([0.025, 0.975]).double())
        .tolist()
    )
    return float(statistic(values.flatten(0, 1))), low, high
