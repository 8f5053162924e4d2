"""Trials, OOMs and time that searches for the largest batch take: ours beside Lightning's and
accelerate's.

    python benchmarks/search.py [--quick] [--output DIR]

Part (a) runs each search, the peers' through their own packages, on an ideal device whose memory
follows a known curve. Part (b) searches for the largest batch of a small transformer under a
counted CPU budget, and measures the time.
"""

from __future__ import annotations

import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import records
import torch
from accelerate.utils import find_executable_batch_size
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.probe import (
    BinarySearch,
    DryRun,
    Halving,
    Predictive,
    Search,
    Trial,
    run_search,
)

BUDGET = 16 * 1024**3
MAXIMUM = 4096  # the default of probe.maximum
TRUE_MAXIMA = (1, 2, 37, 700, 3000)
FIXED = 0.2  # share of the budget that is there before the first row

Peak = Callable[[int], float]
CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB."
)


@dataclass(frozen=True)
class Run:
    """What one search did: sizes in the order in which they were tried, whether each fitted, and
    what it returned.
    """

    found: int
    sizes: tuple[int, ...]
    fitted: tuple[bool, ...]

    @property
    def tried(self) -> bool:
        return any(
            fits and size == self.found for size, fits in zip(self.sizes, self.fitted, strict=True)
        )


class Device:
    """An ideal device: a size fits exactly when its peak is within the budget. Remembers what was
    tried.
    """

    def __init__(self, peak: Peak, *, noise: float = 0.0, seed: int = 0) -> None:
        self._peak, self._noise, self._random = peak, noise, random.Random(seed)
        self.sizes: list[int] = []
        self.fitted: list[bool] = []

    def trial(self, rows: int) -> Trial:
        fits = self._peak(rows) <= BUDGET
        self.sizes.append(rows)
        self.fitted.append(fits)
        reported = self._peak(rows) * (1 + self._random.uniform(-self._noise, self._noise))
        return Trial(rows, fits, round(reported) if fits else None)

    def step(self, rows: int) -> None:
        if not self.trial(rows).fits:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)

    def run(self, found: int) -> Run:
        return Run(found, tuple(self.sizes), tuple(self.fitted))


def curves(true_maximum: int) -> dict[str, Peak]:
    """Peaks in bytes; each leaves the budget half-way between the true maximum and the next row."""
    end = true_maximum + 0.5

    def power(exponent: float) -> Peak:
        return lambda rows: BUDGET * (FIXED + (1 - FIXED) * (rows / end) ** exponent)

    steep = 0.9 / end
    return {
        "linear": power(1),
        "b^0.9": power(0.9),
        "b^1.1": power(1.1),
        "b^1.3": power(1.3),
        "flat to 3/8, then linear": lambda rows: BUDGET * max(3 / 8, 0.1 + steep * rows),
    }


# --- the searches


def ours(make: Callable[[], Search]) -> Callable[[Device], Run]:
    def search(device: Device) -> Run:
        machine = make()
        while (rows := machine.candidate) is not None:
            machine.record(device.trial(rows))
        return device.run(machine.best)

    return search


def accelerate_search(device: Device) -> Run:
    @find_executable_batch_size  # starts at 128
    def train(batch_size: int) -> int:
        device.step(batch_size)
        return batch_size

    try:
        return device.run(train())
    except RuntimeError as error:  # "No executable batch size found, reached zero."
        if "reached zero" not in str(error):
            raise
        return device.run(0)


class IdealModule(pl.LightningModule):
    """A model that weighs nothing, on an ideal device: the first step of a fit is a trial."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.batch_size = 2
        self._ideal = device
        self._weight = nn.Parameter(torch.zeros(1))

    def train_dataloader(self) -> DataLoader[Any]:
        rows = TensorDataset(torch.zeros(3 * 8192, 1))
        return DataLoader(
            rows, batch_size=self.batch_size, sampler=range(len(rows)), collate_fn=len
        )

    def training_step(self, batch: int, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            self._ideal.step(batch)
        return self._weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def lightning_search(mode: str) -> Callable[[Device], Run]:
    def search(device: Device) -> Run:
        with quiet(), tempfile.TemporaryDirectory() as folder:
            return device.run(scale(IdealModule(device), mode=mode, folder=folder))

    return search


def scale(module: pl.LightningModule, *, mode: str, folder: str, **options: Any) -> int:
    """Run Lightning's batch size finder with its own defaults."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    return int(Tuner(trainer).scale_batch_size(module, mode=mode, **options) or 0)


@contextmanager
def quiet() -> Iterator[None]:
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


OURS: dict[str, Callable[[Device], Run]] = {
    "ours: predict": ours(lambda: Predictive(budget_bytes=BUDGET, maximum=MAXIMUM)),
    "ours: binary": ours(lambda: BinarySearch(maximum=MAXIMUM)),
    "ours: halve": ours(lambda: Halving(start=MAXIMUM)),
}
PEERS: dict[str, Callable[[Device], Run]] = {
    "Lightning binsearch": lightning_search("binsearch"),
    "Lightning power": lightning_search("power"),
    "accelerate x0.9": accelerate_search,
}


def measure_curves(*, seeds: int, true_maxima: tuple[int, ...]) -> list[dict[str, Any]]:
    """Part (a). Only `ours: predict` reads peaks, so what the others do depends on the true maximum
    alone: run once.
    """
    rows = []
    for true_maximum in true_maxima:
        blind = {
            name: search(Device(curves(true_maximum)["linear"])) for name, search in PEERS.items()
        }
        for curve, peak in curves(true_maximum).items():
            for noise in (0.0, 0.01):
                runs = {
                    name: [
                        search(Device(peak, noise=noise, seed=seed))
                        for seed in range(seeds if noise else 1)
                    ]
                    for name, search in OURS.items()
                }
                runs |= {name: [run] for name, run in blind.items()}
                for name, results in runs.items():
                    case = {"true": true_maximum, "curve": curve, "noise": noise, "search": name}
                    rows.append({**case, **summary(results)})
    return rows


def summary(runs: list[Run]) -> dict[str, Any]:
    trials, ooms = [len(run.sizes) for run in runs], [run.fitted.count(False) for run in runs]
    return {
        "found": round(statistics.median(run.found for run in runs)),
        "found_worst": min(run.found for run in runs),
        "tried": all(run.tried for run in runs),
        "trials": statistics.median(trials),
        "trials_worst": max(trials),
        "ooms": statistics.median(ooms),
        "ooms_worst": max(ooms),
    }


# --- part (b): a real model

LENGTH, VOCABULARY = 32, 1024


class Transformer(nn.Module):
    """A causal transformer of about three million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            192, 4, 768, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embed = nn.Embedding(VOCABULARY, 192)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(192, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token, ``[batch, sequence]``, from those before it."""
        logits = self.head(self.layers(self.embed(tokens), mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class CountedSteps:
    """Runs steps of the transformer under the counted budget: forward, backward and the optimizer's
    step.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.model = Transformer()
        self.sizes: list[int] = []
        self.fitted: list[bool] = []
        self._budget_bytes = budget_bytes
        self._memory = CountedMemory(torch.device("cpu"))

    @contextmanager
    def counted(
        self, rows: int, optimizer: torch.optim.Optimizer, *, new_trial: bool
    ) -> Iterator[None]:
        if new_trial:
            self.sizes.append(rows)
            self.fitted.append(True)
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        optimizer.zero_grad()
        try:
            with self._memory.measure(
                [*self.model.parameters(), *states], budget_bytes=self._budget_bytes
            ):
                yield
        except torch.OutOfMemoryError as error:
            self.fitted[-1] = False
            raise torch.OutOfMemoryError(
                CUDA_MESSAGE
            ) from error  # the words that the peers look for


class CountedModule(pl.LightningModule):
    """The transformer in Lightning; the closure that it steps with holds forward and backward."""

    def __init__(self, steps: CountedSteps) -> None:
        super().__init__()
        self.batch_size = 2
        self.model = steps.model
        self._steps = steps

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(VOCABULARY, (2048, LENGTH))
        return DataLoader(TensorDataset(tokens), batch_size=self.batch_size, drop_last=True)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch[0])

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        with self._steps.counted(self.batch_size, optimizer, new_trial=batch_idx == 0):
            optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def search_ours(make: Callable[[DryRun], Search], budget_bytes: int) -> Run:
    """Our whole probe: snapshot, rehearsal of a step, trials, restoring."""
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (2048, LENGTH))
    rehearsal = DryRun(
        model=model,
        optimizer=optimizer,
        forward_backward=lambda rows: model(tokens[:rows]).backward(),
        step=lambda: optimizer.step(),
        accumulates=False,
        memory=CountedMemory(torch.device("cpu")),
        budget_bytes=budget_bytes,
    )
    with rehearsal:
        result = run_search(rehearsal, search=make(rehearsal))
    return Run(
        result.max_batch_size, *zip(*((t.batch_size, t.fits) for t in result.trials), strict=True)
    )


def search_lightning(mode: str, budget_bytes: int, **options: Any) -> Run:
    steps = CountedSteps(budget_bytes)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        found = scale(CountedModule(steps), mode=mode, folder=folder, **options)
    return Run(found, tuple(steps.sizes), tuple(steps.fitted))


def search_accelerate(budget_bytes: int) -> Run:
    """accelerate's decorator around one step, from its default of 128 rows."""
    steps = CountedSteps(budget_bytes)
    optimizer = torch.optim.AdamW(steps.model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (2048, LENGTH))

    @find_executable_batch_size
    def train(batch_size: int) -> int:
        with steps.counted(batch_size, optimizer, new_trial=True):
            steps.model(tokens[:batch_size]).backward()
            optimizer.step()
        return batch_size

    return Run(train(), tuple(steps.sizes), tuple(steps.fitted))


def measure_real_model(*, budget_mib: int, repeats: int) -> list[dict[str, Any]]:
    """Part (b): the same model, optimizer, rows and counted budget for all; the true maximum by our
    bisection.

    Ours includes its snapshot, the rehearsal of a step and the restoring. Lightning takes 3 steps a
    trial unless told.
    """
    budget = budget_mib * 2**20
    maximum = 256
    searches: dict[str, Callable[[], Run]] = {
        "ours: predict": lambda: search_ours(
            lambda r: Predictive(
                budget_bytes=r.budget_bytes, maximum=maximum, resident_bytes=r.resident_bytes
            ),
            budget,
        ),
        "ours: binary": lambda: search_ours(lambda _: BinarySearch(maximum=maximum), budget),
        "ours: halve": lambda: search_ours(lambda _: Halving(start=maximum), budget),
        "Lightning binsearch": lambda: search_lightning("binsearch", budget),
        "Lightning binsearch, 1 step": lambda: search_lightning(
            "binsearch", budget, steps_per_trial=1
        ),
        "Lightning power": lambda: search_lightning("power", budget),
        "accelerate x0.9": lambda: search_accelerate(budget),
    }
    seconds: dict[str, list[float]] = {name: [] for name in searches}
    runs: dict[str, Run] = {}
    searches["Lightning power"](), searches["ours: predict"]()  # first calls import and warm up
    for _ in range(repeats):  # in turns, so that a busy machine slows all alike
        for name, search in searches.items():
            start = time.perf_counter()
            runs[name] = search()
            seconds[name].append(time.perf_counter() - start)
    true_maximum = runs["ours: binary"].found
    reference = statistics.median(seconds["ours: predict"])
    return [
        {
            "true": true_maximum,
            "budget_mib": budget_mib,
            "search": name,
            **summary([run]),
            "sizes": run.sizes,
            "seconds": statistics.median(seconds[name]),
            "seconds_all": seconds[name],
            "times_ours": statistics.median(seconds[name]) / reference,
        }
        for name, run in runs.items()
    ]


# --- output


def print_curves(rows: list[dict[str, Any]]) -> None:
    print("(a) ideal device; median, and the worst in brackets where noise makes runs differ")
    table = records.Table(
        "true:>5 curve:<24 noise:>5 search:<20 found:>13 tried:>5 trials:>9 ooms:>8"
    )
    for row in rows:
        cells = {
            name: cell(row[name], row[f"{name}_worst"]) for name in ("found", "trials", "ooms")
        }
        tried = "yes" if row["tried"] else "NO"
        table.print(row, noise="1%" if row["noise"] else "-", tried=tried, **cells)


def cell(value: float, worst: float) -> str:
    return f"{value:g}" if value == worst else f"{value:g} ({worst:g})"


def print_real_model(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n(b) transformer of 3 million parameters, AdamW, {rows[0]['budget_mib']} MiB counted on"
        " the CPU"
    )
    table = records.Table(
        "search:<28 found:>6 true:>5 tried:>5 trials:>6g ooms:>5g seconds:>8.2f times_ours:>10.2f"
    )
    for row in rows:
        table.print(row, tried="yes" if row["tried"] else "NO")
    unsafe = [row["search"] for row in rows if row["found"] > row["true"]]
    if unsafe:
        print(f"found more than fits once the optimizer's state is there: {', '.join(unsafe)}")


def main() -> None:
    parser = records.parser(__doc__, quick="fewer seeds, sizes and repeats")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    true_maxima = (2, 37) if arguments.quick else TRUE_MAXIMA
    on_curves = measure_curves(seeds=5 if arguments.quick else 30, true_maxima=true_maxima)
    print_curves(on_curves)
    on_model = measure_real_model(
        budget_mib=90 if arguments.quick else 150, repeats=1 if arguments.quick else 3
    )
    print_real_model(on_model)
    records.write(
        "search",
        arguments.output,
        settings={"maximum": MAXIMUM, "fixed_share": FIXED, "budget_bytes": BUDGET},
        curves=on_curves,
        real_model=on_model,
    )


if __name__ == "__main__":
    main()
