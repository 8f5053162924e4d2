"""The fastest micro-batches on a simulated machine."""

import random
from dataclasses import asdict

from adaptive_batch._util import from_json
from adaptive_batch.data import MicroBatch, MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.probe import FastestSearch, Throughput

LAYOUTS = [MicroBatchLayout(kind=kind) for kind in ("grouped", "packed")]
LIMITS = (MicroBatchLimit(256, "tokens"), MicroBatchLimit(8192, "tokens"))


def drawn_lengths() -> list[int]:
    random.seed(0)
    return [min(256, 1 + int(random.lognormvariate(4.2, 1.0))) for _ in range(256)]


def search(*, fits: int = 10**9) -> Throughput | None:
    """Search on a machine with a second per micro-batch and room for `fits` tokens."""

    def run(layout: MicroBatchLayout, batches: list[MicroBatch]) -> float | None:
        # Each row of the two steps is timed once.
        assert sorted(row for batch in batches for row in batch.rows) == list(range(256))
        if any(batch.run_tokens > fits for batch in batches):
            return None
        return sum(1.0 + 1e-4 * batch.run_tokens for batch in batches)

    found = FastestSearch(
        run, lengths=drawn_lengths(), step_rows=128, layouts=LAYOUTS, limits=lambda layout: LIMITS
    )()
    return found[0] if found else None


def test_the_fastest_choice_fits() -> None:
    found = search(fits=1500)
    assert found is not None
    layout = MicroBatchLayout(kind=found.kind, time=found.time)
    pieces = micro_batches(drawn_lengths(), found.limit, layout)
    assert all(piece.run_tokens <= 1500 for piece in pieces)
    assert search(fits=1) is None


def test_large_micro_batches_are_chosen_if_each_takes_long() -> None:
    found = search()
    assert found is not None
    assert found.limit.amount > 8 * LIMITS[0].amount
    assert from_json(Throughput, asdict(found)) == found
    assert f"fastest: {found.kind}" in found.table()
