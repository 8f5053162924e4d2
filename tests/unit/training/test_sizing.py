"""An OOM lowers the limit to the rows that fit, and the former limit is tried again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from support.examples import LENGTHS, LIMITS, SHAPES
from support.processes import run_on_ranks
from support.runners import build_runner, report_of
from support.sharded_model import collate
from support.training_cases import CPU
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLimit, micro_batches
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB, Room
from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.probe import ProbeResult, Trial
from adaptive_batch.training import MicroBatchSizer, OOMPolicy, RecipeStep
from adaptive_batch.training.sizing import ShrinkRequest

RESIDENT, ROW = 1000, 100  # bytes of the training state and of one row
SAID = (
    "CUDA out of memory. Tried to allocate {asked} bytes. GPU 0 has a total capacity of 79.11 GiB"
    " of which 3.59 GiB is free. Including non-PyTorch memory, this process has 75.03 GiB memory in"
    " use. Of the allocated memory {held} bytes is allocated by PyTorch, and 1.29 GiB is reserved"
    " by PyTorch but unallocated."
)


class Squeezed(CountedMemory):
    """A device of changing size that may report its memory."""

    def __init__(self, held: int = RESIDENT, free: int = 32 * ROW, *, says: bool = True) -> None:
        super().__init__(CPU)
        self.held, self.total, self.says = held, held + free, says

    def room(self) -> Room | None:
        return Room(self.held, self.total) if self.says else None


class Run:
    """Steps of 32 rows of 4 tokens, on a device where a row takes `ROW` bytes."""

    def __init__(self, *, bound: bool, says: bool = True, rows: int = 32) -> None:
        torch.manual_seed(0)
        self.memory, self.changes = Squeezed(says=says), []
        self.model = model = nn.Embedding(8, 1)
        self.sizer = MicroBatchSizer(
            micro_batch_size="auto" if bound else rows,
            memory=self.memory,
            on_change=self.changes.append,
        )
        if bound:
            self.sizer.set_bound(found(says=says))

        def loss(batch):
            rows = len(batch["tokens"])
            if RESIDENT + rows * ROW > self.memory.total:
                said = SAID.format(asked=ROW, held=RESIDENT + (rows - 1) * ROW)
                raise torch.OutOfMemoryError(said)
            return model(batch["tokens"]).mean()

        row_loss = build_runner(
            model, MicroBatchLimit(32), collate=collate, mean_loss=loss, memory=self.memory
        ).loss
        self.engine = RecipeStep(model, row_loss, self.sizer, memory=self.memory)

    @property
    def amount(self) -> int:
        """Current limit of a micro-batch, in rows."""
        return self.sizer.limit(32).amount

    def lower(self, amount: int, *, rows: int) -> None:
        """Lower the limit as after an OOM of a micro-batch of `rows` rows."""
        self.sizer.lower({0: ShrinkRequest(rows, 4, MicroBatchLimit(amount), SAID)})

    def steps(self, number: int) -> list[int]:
        """Run steps; return the limit after each."""
        amounts = []
        for _ in range(number):
            self.engine.run(ROWS, report_of(ROWS))
            self.model.zero_grad()
            amounts.append(self.amount)
        return amounts


ROWS = [{"tokens": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 32


def found(*, says: bool = True) -> ProbeResult:
    trials = tuple(Trial(rows, True, RESIDENT + rows * ROW if says else None) for rows in (8, 32))
    return ProbeResult(32, 32, trials, (0.1, 0.1), sequence_length=4, resident_bytes=RESIDENT)


@pytest.mark.parametrize("bound", [True, False], ids=["after a search", "without a search"])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.6])
def test_the_limit_follows_memory_that_is_taken_away_and_given_back(share, bound):
    run = Run(bound=bound)
    all_of_it = run.memory.total
    assert run.steps(3) == [32] * 3
    run.memory.total -= int(share * 32 * ROW)
    fits = (run.memory.total - RESIDENT) // ROW
    assert set(run.steps(60)) == {fits}  # in one retry
    run.memory.total = all_of_it
    assert run.steps(40)[-1] == 32
    assert set(run.steps(50)) == {32}
    tried = [change.good_steps for change in run.changes if change.grows]
    assert tried[:3] == [5, 10, 20]
    assert run.sizer.state_dict()["lowered"] is None
    assert run.sizer.num_out_of_memory == len(tried) == 4


def test_after_a_restart_a_larger_limit_is_tried_again_later():
    for rows in (4, 32):
        run = Run(bound=False, rows=rows)
        run.memory.total = RESIDENT + 4 * ROW
        run.sizer.start_below(MicroBatchLimit(4))
        assert run.steps(39) == [4] * 39
        assert not run.changes
        run.memory.total *= 100
        assert run.steps(2)[-1] == rows
        assert len(run.changes) == (rows > 4)


def test_without_a_report_of_memory_the_limit_is_halved_and_tried_again_at_longer_intervals():
    run = Run(bound=True, says=False)
    run.memory.total = RESIDENT + 17 * ROW
    run.steps(400)
    tried = [change for change in run.changes if change.grows]
    assert [change.good_steps for change in tried] == [5, 10, 20, 40, 80, 160]
    assert {(change.before.amount, change.after.amount) for change in tried} == {(16, 32)}
    assert len(run.changes) == 2 * len(tried) + 1
    run.memory.total = RESIDENT + 32 * ROW
    run.steps(1000)
    run.memory.total = RESIDENT + 17 * ROW
    run.steps(7)
    assert run.changes[-2].good_steps == 5  # a late OOM restarts the intervals


def test_a_resumed_run_raises_the_limit_like_the_uninterrupted_run():
    run, other = Run(bound=True), Run(bound=True)
    run.memory.total -= 20 * ROW
    run.steps(4)
    other.sizer.load_state_dict(run.sizer.state_dict())
    for one in (run, other):
        one.memory.total = RESIDENT + 32 * ROW
    assert run.sizer.state_dict() == other.sizer.state_dict()
    assert run.sizer.state_dict()["good_steps"] == 4
    assert run.steps(30) == other.steps(30)
    assert run.sizer.state_dict() == other.sizer.state_dict()


def smaller_limit(limit, failed, *, memory=None, error=""):
    """Return the requested limit after an OOM of a micro-batch."""
    size = {f"micro_batch_{'size' if limit.unit == 'rows' else 'tokens'}": limit.amount}
    sizer = MicroBatchSizer(**size, memory=memory)
    return sizer.after_out_of_memory(failed, error, failures=1).limit


def may_hold(capacity, rows, length):
    return (rows if capacity.unit == "rows" else rows * length) <= capacity.amount


@given(LENGTHS, LIMITS, SHAPES)
def test_a_lower_limit_makes_all_micro_batches_smaller(lengths, capacity, shapes):
    for piece in micro_batches(lengths, capacity, shapes):
        lower = smaller_limit(capacity, piece)
        if lower is None:
            assert len(piece.rows) == 1
            continue
        assert 1 <= lower.amount < capacity.amount
        assert lower.unit == capacity.unit
        assert not may_hold(lower, len(piece.rows), piece.length)
        for other in micro_batches(lengths, lower, shapes):
            assert not set(piece.rows) <= set(other.rows)
            assert len(other.rows) < len(piece.rows) or other.length < piece.length


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_the_lower_limit_is_half_or_the_rows_that_fit_and_at_least_one_row(unit):
    limit, row = MicroBatchLimit(640, unit), 1 if unit == "rows" else 10

    def smaller(rows, fits):
        error = (
            f"Tried to allocate {rows}.00 GiB. Of the allocated memory 1.00 GiB is allocated by"
            " PyTorch"
        )
        failed = MicroBatch([*range(rows)], 10)
        memory = Squeezed(GIB, (fits or 0) * GIB, says=fits is not None)
        lower = smaller_limit(limit, failed, memory=memory, error=error)
        return lower and lower.amount / row

    assert smaller(32, None) == 16
    assert smaller(32, 20) == 20
    assert smaller(32, 99) == 30  # it did not fit
    assert (smaller(32, 1), smaller(2, None)) == (1, 1)
    assert smaller(1, None) is smaller(1, 20) is None


def test_a_policy_that_tries_again_immediately_is_refused():
    with pytest.raises(SettingError, match="grow_after=0: give 1 or more"):
        OOMPolicy(grow_after=0)


def limits_of_steps() -> list[int]:
    """Return the limit of each step; rank 1 has the longer ``grow_after``."""
    rank = distributed.rank()
    sizer = MicroBatchSizer(micro_batch_size=32, policy=OOMPolicy(grow_after=2 + 2 * rank))
    sizer.lower({1: ShrinkRequest(32, 4, MicroBatchLimit(16), "no memory")})
    limits = []
    for _ in range(6):
        sizer.retry_if_due()
        limits.append(sizer.limit().amount)
        sizer.after_attempt()
    return limits


def test_a_former_limit_is_retried_once_it_is_due_on_all_ranks():
    assert run_on_ranks(limits_of_steps, 2) == [[16] * 4 + [32] * 2] * 2
