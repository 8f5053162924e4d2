"""Time of an optimizer step: our recipe over torchtune's stock one, with everything adaptive off.

    python benchmarks/step_time.py [--pairs N] [--quick] [--device cuda] [--output DIR] [key=value ...]

Both recipes train in one process, each in a thread of its own, one step each in turns: what slows the machine slows both.
A turn is everything from one logged step to the next: data, forward, backward, optimizer, progress bar, logs. The first
turn of an epoch, which saves a checkpoint, is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import adaptive_demo
import records
import torch
import torchtune
from adaptive_full_finetune import AdaptiveFullFinetuneRecipe
from omegaconf import DictConfig, OmegaConf
from torchtune.training.metric_logging import DiskLogger

from adaptive_batch.shipped import config_path

STOCK, OURS = "stock", "ours"
WARM_UP = 5  # pairs: allocators and lazy initialisation
NUM_RESAMPLES = 10_000
TARGET = 1.01

Seconds = dict[str, list[float]]


class Relay:
    """Lets two threads run in turns, and times each turn.

    Attributes:
        seconds: of every turn of each thread that ended with :meth:`hand_over`.
        cpu_seconds: of the processor in the same turns, which other programs on the machine lengthen less.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, list[float]] = {STOCK: [], OURS: []}
        self.cpu_seconds: dict[str, list[float]] = {STOCK: [], OURS: []}
        self._device = device
        self._may_run = {STOCK: threading.Semaphore(0), OURS: threading.Semaphore(0)}
        self._alone = False
        self._start = self._cpu_start = 0.0

    def begin(self, name: str) -> None:
        """Wait for the turn of a thread; the clock starts when it has come."""
        self._may_run[name].acquire()
        self._start_clocks()

    def hand_over(self, name: str) -> None:
        """End a turn, let the other thread run, and wait for the next one."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds[name].append(time.perf_counter() - self._start)
        self.cpu_seconds[name].append(time.process_time() - self._cpu_start)
        if self._alone:
            self._start_clocks()
            return
        self._may_run[_other(name)].release()
        self.begin(name)

    def _start_clocks(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def leave(self, name: str) -> None:
        """Let the other thread run to its end."""
        self._alone = True
        self._may_run[_other(name)].release()

    def run(self, recipes: dict[str, Any]) -> None:
        """Train both recipes in turns, the stock one first."""
        errors: list[BaseException] = []

        def train(name: str) -> None:
            self.begin(name)
            try:
                recipes[name].train()
            except BaseException as error:
                errors.append(error)
            finally:
                self.leave(name)

        threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in recipes]
        for thread in threads:
            thread.start()
        self._may_run[STOCK].release()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class HandOver(DiskLogger):
    """torchtune's logger to disk, after whose line the other recipe has its turn."""

    relay: Relay

    def __init__(self, log_dir: str, name: str) -> None:
        super().__init__(log_dir)
        self._name = name

    def log_dict(self, payload: Any, step: int) -> None:
        super().log_dict(payload, step)
        self.relay.hand_over(self._name)


def _other(name: str) -> str:
    return OURS if name == STOCK else STOCK


def configuration(folder: Path, name: str, overrides: list[str]) -> DictConfig:
    """The demo's configuration with everything adaptive off."""
    path = config_path("demo_cpu")
    assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
    own = [
        f"demo_dir={folder}",
        f"output_dir={folder / name}",
        f"metric_logger._component_={__name__}.HandOver",  # in this very module, which is the one that runs
        f"metric_logger.name={name}",
    ]
    cfg = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist([*overrides, *own]))
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
    recipe = AdaptiveFullFinetuneRecipe(cfg=cfg)
    recipe.setup()
    return recipe


def measure(folder: Path, *, pairs: int, device: str, overrides: list[str]) -> tuple[Seconds, Seconds, int]:
    """Seconds of each recipe's steps on the clock and of the processor, in pairs; and rows of a step."""
    adaptive_demo.prepare(folder)
    rows = len(adaptive_demo.read_rows(folder / "data" / "train.jsonl"))
    overrides = [f"device={device}", *overrides]
    cfg = configuration(folder, STOCK, overrides)
    step_rows = cfg.batch_size * cfg.gradient_accumulation_steps
    steps = rows // step_rows
    epochs = -(-(pairs + WARM_UP) // (steps - 1))
    HandOver.relay = relay = Relay(torch.device(device))
    overrides.append(f"epochs={epochs}")
    relay.run(
        {
            STOCK: stock_recipe(configuration(folder, STOCK, overrides)),
            OURS: our_recipe(configuration(folder, OURS, overrides)),
        }
    )
    kept = [step for step in range(epochs * steps) if step % steps][WARM_UP:][:pairs]
    on_clock, of_processor = (
        {name: [seconds[name][step] for step in kept] for name in (STOCK, OURS)}
        for seconds in (relay.seconds, relay.cpu_seconds)
    )
    return on_clock, of_processor, step_rows


def ratio_with_interval(seconds: Seconds) -> tuple[float, float, float]:
    """Median over the pairs of ours / stock, and the bounds of its 95% bootstrap confidence interval."""
    values = [ours / stock for ours, stock in zip(seconds[OURS], seconds[STOCK], strict=True)]
    generator = torch.Generator().manual_seed(0)
    sample = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(len(values), (NUM_RESAMPLES, len(values)), generator=generator)
    medians = sample[drawn].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return statistics.median(values), low, high


@contextmanager
def printing_into(path: Path) -> Iterator[None]:
    """What the recipes print goes into a file, so that no terminal is waited for."""
    sys.stdout.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with path.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            for descriptor, original in zip((1, 2), kept, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="steps of each recipe (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="30 pairs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the demo's configuration, for both")
    arguments = parser.parse_args()
    pairs = 30 if arguments.quick else arguments.pairs

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with printing_into(folder / "printed.txt"):
            on_clock, of_processor, step_rows = measure(
                folder, pairs=pairs, device=arguments.device, overrides=arguments.overrides
            )
    ratio, low, high = ratio_with_interval(on_clock)
    ratio_cpu, low_cpu, high_cpu = ratio_with_interval(of_processor)

    print(
        f"{len(on_clock[OURS])} pairs of steps of {step_rows} rows on {arguments.device}, {torch.get_num_threads()} thread"
    )
    print(f"{'':<8} {'median ms':>10} {'10% ms':>8} {'90% ms':>8} {'processor ms':>13}")
    for name in (STOCK, OURS):
        tenths = statistics.quantiles(on_clock[name], n=10)
        print(
            f"{name:<8} {1e3 * statistics.median(on_clock[name]):>10.2f} {1e3 * tenths[0]:>8.2f} {1e3 * tenths[-1]:>8.2f} "
            f"{1e3 * statistics.median(of_processor[name]):>13.2f}"
        )
    verdict = "met" if low <= TARGET else "NOT met"
    print(
        f"ours / stock: median {ratio:.4f}, 95% interval {low:.4f} to {high:.4f}; target {TARGET} within it: {verdict}"
    )
    print(f"of the processor's time: median {ratio_cpu:.4f}, 95% interval {low_cpu:.4f} to {high_cpu:.4f}")

    records.write(
        "step_time",
        arguments.output,
        pairs=len(on_clock[OURS]),
        step_rows=step_rows,
        overrides=arguments.overrides,
        ratio_median=ratio,
        ratio_interval_95=[low, high],
        target=TARGET,
        processor_ratio_median=ratio_cpu,
        processor_ratio_interval_95=[low_cpu, high_cpu],
        seconds=on_clock,
        processor_seconds=of_processor,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
