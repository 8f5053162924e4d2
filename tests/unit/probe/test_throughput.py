"""The fastest micro-batches on simulated machines, compared with all choices."""

import random
from dataclasses import asdict, dataclass, field

import pytest

from adaptive_batch._util import from_json
from adaptive_batch.data import (
    LAYOUT_KINDS,
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    micro_batches,
)
from adaptive_batch.probe import FastestSearch, Pieces, Throughput

LIMITS = [MicroBatchLimit(256 << power, "tokens") for power in range(6)]
LAYOUTS = [MicroBatchLayout(kind=kind) for kind in ("grouped", "packed")]


@dataclass
class Machine:
    """A machine with a time model for each layout and a slowdown of large micro-batches."""

    times: dict[str, MicroBatchTime]
    slowdown: float = 0.0  # for each 1000 tokens
    noise: float = 0.0
    fits: int = 10**9
    trials: set[tuple[str, str]] = field(default_factory=set)

    def seconds(self, piece: MicroBatch, kind: str) -> float:
        time = self.times[kind]
        seconds = time.fixed + time.token * piece.run_tokens
        return seconds * (1 + self.slowdown * piece.run_tokens / 1000)

    def run(self, layouts: list[Pieces]) -> list[list[float] | None]:
        found: list[list[float] | None] = []
        for pieces, layout in layouts:
            self.trials.add((layout.kind, str(pieces)))
            fits = all(piece.run_tokens <= self.fits for piece in pieces)
            seconds = (
                self.seconds(piece, layout.kind) * (1 + random.uniform(0, self.noise))
                for piece in pieces
            )
            found.append(list(seconds) if fits else None)
        return found

    def of_steps(
        self, steps: list[list[int]], kind: str, limit: MicroBatchLimit, time: MicroBatchTime
    ) -> float:
        layout = MicroBatchLayout(kind=kind, time=time)
        return sum(
            self.seconds(piece, kind)
            for lengths in steps
            for piece in micro_batches(lengths, limit, layout)
        )


def drawn_steps(sigma: float) -> list[list[int]]:
    return [
        [min(256, 1 + int(random.lognormvariate(4.2, sigma))) for _ in range(32)] for _ in range(8)
    ]


def search(machine: Machine, steps: list[list[int]]) -> Throughput | None:
    found = FastestSearch(
        machine.run,
        steps=steps,
        layouts=LAYOUTS,
        limits=lambda layout: (LIMITS[0], LIMITS[-1]),
    )()
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.nightly if seed > 3 else ()) for seed in range(12)],
)
@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_the_choice_is_near_the_best_of_all_in_few_trials(sigma: float, seed: int) -> None:
    random.seed(seed)
    steps = drawn_steps(sigma)
    token = 1e-4
    times = {
        kind: MicroBatchTime(token * random.choice([20, 200, 2000]), token) for kind in LAYOUT_KINDS
    }
    machine = Machine(times, slowdown=random.choice([0, 0.02, 0.05]), noise=0.01)
    found = search(machine, steps)
    assert found is not None
    assert len(found.trials) <= 4 * len(LAYOUTS) + 3
    took = machine.of_steps(steps, found.kind, found.limit, found.time)
    every = [
        machine.of_steps(steps, layout.kind, limit, times[layout.kind])
        for layout in LAYOUTS
        for limit in LIMITS
    ]
    assert took <= 1.03 * min(every)


def test_a_choice_that_does_not_fit_is_not_taken() -> None:
    random.seed(0)
    times = dict.fromkeys(LAYOUT_KINDS, MicroBatchTime(1.0, 1e-4))
    steps, machine = drawn_steps(1.0), Machine(times, fits=1500)
    found = search(machine, steps)
    assert found is not None
    layout = MicroBatchLayout(kind=found.kind, time=found.time)
    assert all(piece.run_tokens <= 1500 for piece in micro_batches(steps[0], found.limit, layout))
    assert search(Machine(times, fits=1), drawn_steps(1.0)) is None


def test_a_result_is_read_from_its_json() -> None:
    random.seed(0)
    found = search(Machine(dict.fromkeys(LAYOUT_KINDS, MicroBatchTime())), drawn_steps(1.0))
    assert found is not None
    assert from_json(Throughput, asdict(found)) == found
    assert f"fastest: {found.kind}" in found.with_peak(2**30).table()
