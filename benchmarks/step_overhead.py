"""Time that the objects add to a plain training loop.

    python benchmarks/step_overhead.py [--pairs N] [--quick] [--output DIR]

On one thread, the CPU time of a step of AdaptiveStep and of AdaptiveLoop is divided by that of a
plain loop, for a short and a long step. The ratio is the median over pairs of new objects that run
alternately. The wall time of an epoch of AdaptiveBatches with two workers is divided by that of a
plain DataLoader, with a dataset that takes 10 ms to read a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from adaptive_batch import AdaptiveBatches, AdaptiveLoop, AdaptiveStep

# Largest ratio, by the least milliseconds of a step.
TARGETS = {50.0: 1.02, 0.0: 1.05}
WALL_TARGET = 1.05
# Turns of each side in a pair, and seconds of a turn.
TURNS = 12
TURN_SECONDS = 0.1
WARM_UP_STEPS = 3
# Width of the model and tokens of a row: steps of about 3 and 90 ms.
SIZES = ((32, 16), (256, 192))
NUM_ROWS = 10**5
# Rows of an epoch with workers, and seconds to read one.
EPOCH_ROWS, ROW_SECONDS = 240, 0.01

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
    """A compared loop, with its model.

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
        """Train more steps; return the CPU time of one, in seconds."""
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


def overhead(kind: type[Side], size: tuple[int, int], pairs: int) -> dict[str, Any]:
    """Return the CPU time of both sides' steps, and the ratio of each pair."""
    seconds: list[tuple[float, float]] = []
    for pair in range(pairs):
        sides = plain, own = Side(*size), kind(*size)
        for side in (own, plain):
            side.train(WARM_UP_STEPS)
        num_steps = max(1, round(TURN_SECONDS / plain.train(WARM_UP_STEPS)))
        turns: dict[Side, list[float]] = {plain: [], own: []}
        for turn in range(TURNS):
            # The first side changes with each turn, as what slows the machine may last for several.
            for side in sides if (pair + turn) % 2 else reversed(sides):
                turns[side].append(side.train(num_steps))
        seconds.append((statistics.mean(turns[plain]), statistics.mean(turns[own])))
    milliseconds = 1e3 * statistics.median(plain for plain, _ in seconds)
    return {
        "case": f"{kind.name}, width {size[0]}, {size[1]} tokens",
        "milliseconds": milliseconds,
        "added_milliseconds": 1e3 * statistics.median(own - plain for plain, own in seconds),
        "ratios": [own / plain for plain, own in seconds],
        "target": next(ratio for least, ratio in TARGETS.items() if milliseconds >= least),
    }


# --- wall time with workers


def epoch_seconds(kind: str) -> float:
    """Return the wall time of an epoch with two workers."""
    rows = Rows(EPOCH_ROWS, 16, seconds=ROW_SECONDS)
    model = Model(32)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = AdaptiveBatches(rows, BATCH_SIZE) if kind == "adaptive" else None
    of_batches: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True}
    if batches is not None:
        of_batches = {"batch_sampler": batches}
    begin = time.perf_counter()
    for batch in DataLoader(rows, num_workers=2, collate_fn=collate, **of_batches):
        mean_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if batches is not None:
            batches.step()
    return time.perf_counter() - begin


def wall_time(pairs: int) -> dict[str, Any]:
    kinds = ("plain", "adaptive")
    seconds = [
        {kind: epoch_seconds(kind) for kind in (kinds if pair % 2 else reversed(kinds))}
        for pair in range(pairs)
    ]
    return {
        "case": "AdaptiveBatches, 2 workers",
        "ratios": [pair["adaptive"] / pair["plain"] for pair in seconds],
        "target": WALL_TARGET,
    }


def main() -> None:
    parser = harness.parser(__doc__, quick="3 pairs")
    parser.add_argument("--pairs", type=int, default=15)
    arguments = parser.parse_args()
    pairs = 3 if arguments.quick else arguments.pairs
    cases: list[Callable[[], dict[str, Any]]] = [
        *(partial(overhead, kind, size, pairs) for size in SIZES for kind in (StepSide, LoopSide)),
        partial(wall_time, min(pairs, 7)),
    ]

    def measure(case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        row = case()
        low, median, high = statistics.quantiles(row["ratios"], n=4)
        return row | {"median": median, "quartiles": f"{low:.3f} to {high:.3f}"}

    harness.run(
        "step_overhead",
        arguments.output,
        cases,
        measure,
        columns="case:<36 milliseconds:>12.2f added_milliseconds:>18.3f median:>7.3f"
        " quartiles:>15 target:>7.2f",
        figures=lambda rows: {row["case"]: round(row["median"], 4) for row in rows},
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
