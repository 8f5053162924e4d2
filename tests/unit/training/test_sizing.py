"""After memory has run out the limit shrinks by what is needed, and grows back in small steps,
never above what it was.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support.fault_injection import collate
from support.runners import build_runner, question_of
from support.training_cases import CPU
from torch import nn

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import Room
from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.probe import ProbeResult, Trial
from adaptive_batch.training import (
    ConfiguredSize,
    LimitChange,
    MicroBatchRunner,
    MicroBatchSizer,
    OOMPolicy,
)
from adaptive_batch.training.lowered_limit import LimitCost, SmallerLimit

RESIDENT, ROW = 1000, 100  # bytes of a device that is squeezed, in a world of 32 rows
SAID = (
    "CUDA out of memory. Tried to allocate {asked} bytes. GPU 0 has a total capacity of 79.11 GiB"
    " of which 3.59 GiB is free. Including non-PyTorch memory, this process has 75.03 GiB memory in"
    " use. Of the allocated memory {held} bytes is allocated by PyTorch, and 1.29 GiB is reserved"
    " by PyTorch but unallocated."
)


class Squeezed(CountedMemory):
    """A device that says what it has; `says` is False for one that cannot."""

    def __init__(self, *, says: bool = True) -> None:
        super().__init__(CPU)
        self.total, self.says = RESIDENT + 32 * ROW, says

    def room(self) -> Room | None:
        return Room(RESIDENT, self.total - RESIDENT) if self.says else None


class Run:
    """Steps of 32 rows of 4 tokens, on a device where a row takes `ROW` bytes."""

    def __init__(self, *, bound: bool, says: bool = True) -> None:
        torch.manual_seed(0)
        self.memory, self.changes = Squeezed(says=says), []
        self.model = model = nn.Embedding(8, 1)
        self.sizer = MicroBatchSizer(
            ConfiguredSize(micro_batch_size="auto" if bound else 32),
            memory=self.memory,
            on_change=self.changes.append,
        )
        self.sizer.begin_step(32)
        if bound:
            self.sizer.found(found(says=says))

        def loss(batch):
            rows = len(batch["tokens"])
            if RESIDENT + rows * ROW > self.memory.total:
                raise torch.OutOfMemoryError(
                    SAID.format(asked=ROW, held=RESIDENT + (rows - 1) * ROW)
                )
            return model(batch["tokens"]).mean()

        row_loss = build_runner(
            model, MicroBatchLimit(32), collate=collate, mean_loss=loss, memory=self.memory
        ).loss
        self.runner = MicroBatchRunner(model, row_loss, self.sizer, memory=self.memory)

    @property
    def amount(self) -> int:
        """What a micro-batch may hold now."""
        return self.sizer.limit(32).amount

    def lower(self, amount: int, *, rows: int) -> None:
        """Take it that a micro-batch of so many rows ran out of memory, and hold less."""
        self.sizer.lower({0: SmallerLimit(rows, 4, MicroBatchLimit(amount), SAID)})

    def steps(self, number: int) -> list[int]:
        """Run so many steps; return the limit of each."""
        amounts = []
        for _ in range(number):
            self.runner.run(ROWS, question_of(ROWS))
            self.model.zero_grad()
            amounts.append(self.amount)
        return amounts


ROWS = [{"tokens": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 32


def found(*, says: bool = True) -> ProbeResult:
    trials = tuple(Trial(rows, True, RESIDENT + rows * ROW if says else None) for rows in (8, 32))
    return ProbeResult(32, 32, trials, (0.1, 0.1), sequence_length=4, resident_bytes=RESIDENT)


@pytest.mark.parametrize("bound", [True, False], ids=["after a search", "by what failed"])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.6])
def test_memory_that_is_taken_away_and_given_back_costs_the_rows_that_do_not_fit_and_no_more(
    share, bound
):
    run = Run(bound=bound)
    all_of_it = run.memory.total
    assert run.steps(3) == [32] * 3
    run.memory.total -= int(share * 32 * ROW)
    fits = (run.memory.total - RESIDENT) // ROW
    during = run.steps(60)
    assert set(during[1:]) == {fits}  # in one retry, and no row was tried that has no room
    assert [change.out_of_memory for change in run.changes] == [True]
    run.memory.total = all_of_it
    after = run.steps(50)
    assert after[-1] == 32
    assert sorted(after) == after
    assert max(later - sooner for sooner, later in pairwise([fits, *after])) <= 4
    assert run.sizer.state_dict()["lowered"] is run.sizer.state_dict()["ceiling"] is None
    assert run.sizer.num_out_of_memory == 1


@pytest.mark.parametrize(
    ("sizes", "row"), [((8, 31, 32), 100), ((31, 32), 150)], ids=["far apart", "close"]
)
def test_a_row_costs_what_the_sizes_that_are_farthest_apart_say(sizes, row):
    fixed, block = 50 * 32, 700  # whose half may be empty
    peaks = [RESIDENT + fixed + 100 * rows + (block if rows == 31 else 0) for rows in sizes]
    trials = tuple(Trial(rows, True, peak) for rows, peak in zip(sizes, peaks, strict=True))
    sizer = MicroBatchSizer()
    sizer.found(replace(found(), trials=trials))
    assert LimitCost(**sizer.state_dict()["cost"]) == LimitCost(32, peaks[-1], row)


def test_where_no_device_says_what_is_free_it_is_halved_and_grows_back_after_longer_and_longer():
    run = Run(bound=True, says=False)
    run.memory.total = RESIDENT + 17 * ROW
    amounts = run.steps(400)
    assert amounts[0] == 16
    lowered = [change for change in run.changes if not change.grows]
    assert {(change.before.amount, change.after.amount) for change in lowered[1:]} <= {
        (20, 10),
        (18, 9),
        (17, 8),
        (14, 7),
    }
    assert len(lowered) <= 5
    assert max(amounts) <= 17
    tried = [change for change in run.changes if change.grows]
    assert tried[0].before.amount == 16
    assert run.sizer.state_dict()["relapses"] == len(lowered) - 1


def test_a_limit_never_grows_above_what_it_was_lowered_from():
    run = Run(bound=True)
    run.memory.total *= 100
    run.lower(3, rows=32)
    amounts = run.steps(60)
    assert [change.after.amount for change in run.changes] == [3, 7, 11, 15, 19, 23, 27, 31, 32]
    assert amounts[-1] == 32
    assert run.sizer.state_dict()["lowered"] is None


def test_a_run_that_is_resumed_grows_back_as_the_one_before_would_have():
    run, other = Run(bound=True), Run(bound=True)
    run.memory.total -= 20 * ROW
    run.steps(7)
    other.sizer.load_state_dict(run.sizer.state_dict())
    for one in (run, other):
        one.memory.total = RESIDENT + 32 * ROW
    assert run.sizer.state_dict() == other.sizer.state_dict()
    assert run.sizer.state_dict()["good_steps"] == 7
    assert run.steps(30) == other.steps(30)
    assert run.sizer.state_dict() == other.sizer.state_dict()


def test_what_longer_rows_allow_is_never_grown_over():
    run = Run(bound=True)

    def try_longer(fitting_rows):
        longer = replace(found(), max_batch_size=fitting_rows, trials=(), sequence_length=9)
        run.sizer.found_longer(longer, run.sizer.limit(32), tried_rows=32, can_split=True)

    run.lower(4, rows=32)
    try_longer(10)
    assert (run.amount, run.sizer.state_dict()["ceiling"]["amount"]) == (4, 10)
    run.steps(60)
    assert (run.amount, run.sizer.state_dict()["ceiling"]) == (10, None)
    try_longer(7)
    assert (run.amount, run.sizer.state_dict()["ceiling"]) == (7, None)


@pytest.mark.parametrize("again", [2, 3], ids=["while its cache fills", "for long"])
def test_a_limit_that_only_just_fits_is_eased_again_after_it_grew_back(
    again,
):
    asks = [1, *[0] * 5, *[1] * again, *[0] * 20]  # in a step
    counted = [number for i in range(len(asks)) for number in (sum(asks[:i]), sum(asks[: i + 1]))]
    run, retries = Run(bound=True), iter(counted)
    run.memory.num_retries = lambda: next(retries)
    run.steps(12)
    eased = [(32, 30), (30, 32), (32, 30)][:again]
    assert [(change.before.amount, change.after.amount) for change in run.changes] == eased
    assert not any(change.out_of_memory for change in run.changes)


def test_a_change_upwards_is_described():
    change = LimitChange(MicroBatchLimit(4), MicroBatchLimit(8), 0, 0, False, "")
    assert change.grows
    assert (
        change.describe()
        == "memory has sufficed since: a micro-batch holds 8 rows from now on, not 4 rows"
    )


def test_a_policy_of_ones_own_decides_how_it_grows_back():
    policy = OOMPolicy(grow_divisor=2)
    assert policy.after_good_steps(
        MicroBatchLimit(3), ceiling=MicroBatchLimit(9)
    ) == MicroBatchLimit(7)
    assert policy.after_good_steps(
        MicroBatchLimit(7), ceiling=MicroBatchLimit(9)
    ) == MicroBatchLimit(9)
    for key in ("grow_divisor", "grow_after"):
        with pytest.raises(SettingError, match=f"{key}=0: give 1 or more"):
            OOMPolicy(**{key: 0})


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_what_is_known_to_fit_replaces_halving(unit):
    limit, row = MicroBatchLimit(640, unit), 1 if unit == "rows" else 10
    shrink = OOMPolicy().after_out_of_memory
    assert shrink(limit, rows=32, length=10, fits=20 * row) == MicroBatchLimit(20 * row, unit)
    assert shrink(limit, rows=32, length=10, fits=99 * row) == MicroBatchLimit(
        30 * row, unit
    )  # it did not fit
    assert shrink(limit, rows=32, length=10, fits=1) == MicroBatchLimit(row, unit)
    assert shrink(limit, rows=1, length=10, fits=20) is None
