"""Time that the objects add to a script's own loop.

    python benchmarks/step_overhead.py [--milliseconds MS ...] [--pairs N] [--quick] [--output DIR]

Two measurements, on one thread:

* CPU time of a step over that of the plain loop, of AdaptiveStep and of AdaptiveLoop, at steps of
  several sizes: the median over pairs that take turns, each built anew.
* Wall time of an epoch of AdaptiveBatches with two workers over that of a plain DataLoader, where a
  row takes a while.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import records
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from adaptive_batch import AdaptiveBatches, AdaptiveLoop, AdaptiveStep

# Largest ratio of a step that takes so many milliseconds or more.
TARGETS = {50.0: 1.02, 0.0: 1.05}
WALL_TARGET = 1.05
# In each pair the sides take so many turns, each of about so long.
TURNS = 12
TURN_SECONDS = 0.1
WARM_UP_STEPS = 3
# Width of the model and tokens of a row, from the fastest step to the slowest.
SIZES = (
    (16, 8),
    (32, 8),
    (32, 16),
    (64, 16),
    (64, 32),
    (64, 64),
    (128, 64),
    (128, 128),
    (192, 128),
    (256, 128),
    (256, 192),
    (256, 256),
    (384, 256),
    (512, 256),
)
NUM_ROWS = 10**5

VOCABULARY = 256
BATCH_SIZE = 8
Row = dict[str, list[int]]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    """A transformer of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*[Layer(width) for _ in range(2)])
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(self.embedding(tokens)))


class Rows(Dataset[Row]):
    """Rows of random tokens, about as long as asked.

    Args:
        num_rows: rows of an epoch.
        length: tokens of the longest row.
        seconds: time that reading a row takes.
    """

    def __init__(self, num_rows: int, length: int, *, seconds: float = 0.0) -> None:
        self._num_rows = num_rows
        self._length = length
        self._seconds = seconds

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> Row:
        if self._seconds:
            time.sleep(self._seconds)
        generator = torch.Generator().manual_seed(number)
        length = self._length - number % max(1, self._length // 8)
        tokens = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        return {"tokens": tokens, "labels": tokens}


def collate(rows: list[Row]) -> dict[str, torch.Tensor]:
    return {
        "tokens": pad_sequence([torch.tensor(row["tokens"]) for row in rows], batch_first=True),
        "labels": pad_sequence(
            [torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=-100
        ),
    }


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


# --- CPU time of a step


class Side:
    """A loop that is compared, with a model of its own.

    Args:
        width: of the model.
        length: tokens of a row.
    """

    name = "plain"

    def __init__(self, width: int, length: int) -> None:
        self.model = Model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.rows = Rows(NUM_ROWS, length)
        self._steps = self.steps()

    def train(self, num_steps: int) -> float:
        """Train so many steps more; return the CPU time of one, in seconds."""
        begin = time.process_time()
        for _ in range(num_steps):
            next(self._steps)
        return (time.process_time() - begin) / num_steps

    def steps(self) -> Iterator[None]:
        """Train a step each time."""
        for batch in DataLoader(self.rows, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate):
            self.run(batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def run(self, batch: dict[str, torch.Tensor]) -> float:
        loss = mean_loss(self.model, batch)
        loss.backward()
        return loss.item()


class StepSide(Side):
    name = "AdaptiveStep"

    def __init__(self, width: int, length: int) -> None:
        super().__init__(width, length)

        @AdaptiveStep.of(self.model)
        def step(part: Any) -> float:
            loss = mean_loss(self.model, part.batch) * part.share
            loss.backward()
            return loss.item()

        self.step = step

    def run(self, batch: dict[str, torch.Tensor]) -> float:
        return sum(self.step(batch))


class LoopSide(Side):
    name = "AdaptiveLoop"

    def __init__(self, width: int, length: int) -> None:
        super().__init__(width, length)
        self.loop = AdaptiveLoop(
            self.model,
            self.optimizer,
            self.rows,
            collate=collate,
            mean_loss=lambda batch: mean_loss(self.model, batch),
            batch_size=BATCH_SIZE,
            row_length=lambda row: len(row["tokens"]),
        )

    def steps(self) -> Iterator[None]:
        for rows in self.loop:
            self.loop.run(rows)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield


def calibrated(milliseconds: float) -> tuple[int, int]:
    """Return the width and the row length of which a plain step takes about so long."""
    nearest = SIZES[0]
    nearest_error = float("inf")
    for size in SIZES:
        side = Side(*size)
        side.train(WARM_UP_STEPS)
        measured = 1e3 * min(side.train(3) for _ in range(3))
        error = abs(measured / milliseconds - 1)
        if error < nearest_error:
            nearest = size
            nearest_error = error
        if measured > 1.5 * milliseconds:
            break
    return nearest


def overhead(kind: type[Side], size: tuple[int, int], *, pairs: int) -> dict[str, Any]:
    """CPU time of each side's steps, and the ratio of each pair."""
    plain_seconds: list[float] = []
    own_seconds: list[float] = []
    for pair in range(pairs):
        plain = Side(*size)
        own = kind(*size)
        own.train(WARM_UP_STEPS)
        plain.train(WARM_UP_STEPS)
        num_steps = max(1, round(TURN_SECONDS / plain.train(WARM_UP_STEPS)))
        seconds: dict[str, list[float]] = {plain.name: [], own.name: []}
        for turn in range(TURNS):
            # Who is first changes with each turn, as what slows the machine may last for several.
            for side in (plain, own) if (pair + turn) % 2 else (own, plain):
                seconds[side.name].append(side.train(num_steps))
        plain_seconds.append(statistics.mean(seconds[plain.name]))
        own_seconds.append(statistics.mean(seconds[own.name]))
    ratios = [own / plain for own, plain in zip(own_seconds, plain_seconds, strict=True)]
    added = [own - plain for own, plain in zip(own_seconds, plain_seconds, strict=True)]
    milliseconds = 1e3 * statistics.median(plain_seconds)
    return {
        "kind": kind.name,
        "width": size[0],
        "length": size[1],
        "milliseconds": milliseconds,
        "added_milliseconds": 1e3 * statistics.median(added),
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "target": next(ratio for least, ratio in TARGETS.items() if milliseconds >= least),
        "ratios": ratios,
    }


# --- wall time with workers


def epoch_seconds(kind: str, *, num_rows: int, row_seconds: float) -> float:
    """Time on the clock of an epoch with two workers."""
    rows = Rows(num_rows, 16, seconds=row_seconds)
    model = Model(32)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = AdaptiveBatches(rows, BATCH_SIZE) if kind == "adaptive" else None
    of_batches: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True}
    if batches is not None:
        of_batches = {"batch_sampler": batches}
    loader = DataLoader(rows, num_workers=2, collate_fn=collate, **of_batches)
    begin = time.perf_counter()
    for batch in loader:
        mean_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if batches is not None:
            batches.step()
    return time.perf_counter() - begin


def wall_ratios(*, pairs: int, num_rows: int, row_seconds: float) -> list[float]:
    ratios = []
    for pair in range(pairs):
        seconds = {}
        for kind in ("plain", "adaptive") if pair % 2 else ("adaptive", "plain"):
            seconds[kind] = epoch_seconds(kind, num_rows=num_rows, row_seconds=row_seconds)
        ratios.append(seconds["adaptive"] / seconds["plain"])
    return ratios


def main() -> None:
    parser = records.parser(__doc__, quick="3 pairs")
    add = parser.add_argument
    add("--milliseconds", type=float, nargs="+", default=[90.0, 3.0], help="of a plain step")
    add("--pairs", type=int, default=15)
    add("--row-milliseconds", type=float, default=10.0, help="time that a worker takes for a row")
    add("--rows", type=int, default=240, help="rows of an epoch with workers")
    arguments = parser.parse_args()
    steps = []
    table = records.Table(
        "kind:<14 milliseconds:>12.2f added_milliseconds:>18.3f ratio_median:>12.4f"
        " quartiles:>15 target:>7.2f"
    )
    for size in map(calibrated, arguments.milliseconds):
        for kind in (StepSide, LoopSide):
            result = overhead(kind, size, pairs=3 if arguments.quick else arguments.pairs)
            low, _, high = result["ratio_quartiles"]
            table.print(result, quartiles=f"{low:.3f} to {high:.3f}")
            steps.append(result)
    walls = wall_ratios(
        pairs=3 if arguments.quick else 7,
        num_rows=arguments.rows,
        row_seconds=1e-3 * arguments.row_milliseconds,
    )
    wall = statistics.median(walls)
    print(
        f"AdaptiveBatches, 2 workers, {arguments.row_milliseconds:g} ms a row: wall time {wall:.4f}"
        f" of plain; target {WALL_TARGET}"
    )
    records.write(
        "step_overhead",
        arguments.output,
        steps=steps,
        wall_ratio_median=wall,
        wall_ratios=walls,
        row_milliseconds=arguments.row_milliseconds,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
