"""AdaptiveBatches use each row once per epoch while they grow, are prefetched, or resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.processes import run_on_ranks
from support.same_state import bits
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from adaptive_batch import distributed
from adaptive_batch.data import AdaptiveBatches, Sampling
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import at_epochs, by_noise_scale, linear_ramp, seesaw, steps

# With batches of 3, 5 and 7 rows, 22 + 13 + 10 = 45 steps in three epochs.
NUM_ROWS = 64
EPOCHS = 3
NUM_STEPS = 45


class Rows(Dataset[dict[str, Any]]):
    """A dataset of numbered rows of 1 to 12 tokens."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"row": number, "tokens": [1] * (1 + number * 5 % 12)}


def two_more(epoch: int, batch_size: int) -> int:
    return 2 if epoch else 0


def growing(**options: Any) -> AdaptiveBatches:
    return AdaptiveBatches(Rows(), 3, batch_increase_function=two_more, **options)


def num_tokens(row: dict[str, Any]) -> int:
    return len(row["tokens"])


def numbers_of(rows: list[dict[str, Any]]) -> list[int]:
    return [row["row"] for row in rows]


def loader_of(batches: AdaptiveBatches, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_sampler=batches, collate_fn=numbers_of, **options)


def train(
    batches: AdaptiveBatches, *, epochs: int = EPOCHS, until: int = 10**9, **options: Any
) -> list[tuple[int, list[int]]]:
    """Train until an epoch or a step; return the epoch and the rows of each step."""
    seen = []
    loader = loader_of(batches, **options)
    while batches.progress.epoch < epochs and batches.progress.steps < until:
        epoch = batches.progress.epoch
        for rows in loader:
            seen.append((epoch, rows))
            batches.step()
            if batches.progress.steps >= until:
                break
    return seen


def rows_of_epoch(seen: list[tuple[int, list[int]]], epoch: int) -> list[int]:
    return [row for of_epoch, rows in seen if of_epoch == epoch for row in rows]


@examples(30)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_no_row_is_lost_or_repeated(num_rows, batch_size, growth, seed, shuffle):
    sampling = Sampling(shuffle=shuffle, seed=seed)
    grow = lambda epoch, size: growth  # noqa: E731
    rows = Rows(num_rows)
    batches = AdaptiveBatches(rows, batch_size, batch_increase_function=grow, sampling=sampling)
    for epoch in range(3):
        taken = []
        for step in batches:
            taken += step
            batches.step()
        assert sorted(taken) == list(range(num_rows))
        assert shuffle or taken == list(range(num_rows))
        assert batches.progress.epoch == epoch + 1
        assert batches.progress.samples == num_rows * (epoch + 1)


def test_batches_do_not_exceed_a_maximum():
    for beyond, most in ((False, 6), (True, 7)):
        batches = growing(maximum=6, sampling=Sampling(grow_beyond_maximum=beyond))
        assert max(len(rows) for _, rows in train(batches)) == most


def test_a_batch_size_may_be_set_between_epochs():
    batches = AdaptiveBatches(Rows(), 3)
    train(batches, epochs=1)
    batches.set_batch_size(20)
    assert [len(rows) for _, rows in train(batches, epochs=2)] == [20, 20, 20, 4]
    with pytest.raises(SettingError, match=r"batch_size=0: "):
        batches.set_batch_size(0)
    scheduled = AdaptiveBatches(Rows(), 3, batch_size_schedule=steps([3, 4], ["99ba"]))
    with pytest.raises(SettingError, match=r"batch_size=4: batch_size_schedule decides"):
        scheduled.set_batch_size(4)


def test_the_length_is_the_number_of_remaining_steps_of_the_epoch():
    batches = growing()
    assert (len(batches), batches.num_steps(EPOCHS)) == (22, NUM_STEPS)
    assert len(loader_of(batches)) == 22
    train(batches, until=5)
    assert (len(batches), batches.num_steps(EPOCHS)) == (17, NUM_STEPS - 5)
    train(batches, epochs=1)
    assert (len(batches), batches.num_steps(EPOCHS)) == (13, 23)
    by_tokens = AdaptiveBatches(Rows(), 1, sampling=Sampling(batch_tokens=30))
    length = len(by_tokens)
    assert length == len(train(by_tokens, epochs=1))


def test_progress_counts_used_batches_and_not_prefetched_ones():
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
    batches = growing()
    for number, rows in enumerate(loader_of(batches, **options)):
        assert (batches.progress.steps, batches.progress.samples) == (number, 3 * number)
        batches.step()
        assert batches.progress.samples == 3 * number + len(rows)
        if number == 6:
            break
    rest = train(batches, epochs=1, **options)
    assert [rows for _, rows in rest] == [rows for _, rows in train(growing(), epochs=1)][7:]


@pytest.mark.parametrize(("calls_step", "warnings"), [(False, 3), (True, 0)])
def test_each_epoch_without_calls_of_step_causes_a_warning(calls_step, warnings, caplog):
    batches = growing()
    for _ in range(4):
        num_read = len(list(batches))
        for _ in range(num_read * calls_step):
            batches.step()
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == warnings
    assert all("call step() after each batch" in message for message in messages)


class ByEpoch:
    """A sampler with a seed per epoch, like DistributedSampler."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM_ROWS

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_ROWS))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Each process builds its sampler with another seed.
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "drawn here": lambda seed: None,
    "generator": lambda seed: RandomSampler(range(NUM_ROWS), generator=seeded(seed)),
    "torch's random numbers": lambda seed: RandomSampler(range(NUM_ROWS)),
    "weighted": lambda seed: WeightedRandomSampler(
        [1.0, 2.0] * (NUM_ROWS // 2), NUM_ROWS, generator=seeded(seed)
    ),
    "by epoch": lambda seed: ByEpoch(),
    "in order": lambda seed: SequentialSampler(range(NUM_ROWS)),
}


@pytest.mark.parametrize(
    ("done", "num_workers"), [*((done, 0) for done in (5, 22, 25, 44)), (22, 2), (44, 2)]
)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_resumed_run_takes_the_remaining_batches(sampler, done, num_workers, tmp_path):
    torch.manual_seed(0)
    # Counting tokens reads the order ahead.
    batches = growing(sampler=SAMPLERS[sampler](1), row_length=num_tokens)
    before = train(batches, until=done, num_workers=num_workers)
    torch.save(batches.state_dict(), tmp_path / "state.pt")
    random_state = torch.get_rng_state()
    after = train(batches, num_workers=num_workers)
    assert len(before) + len(after) == NUM_STEPS

    torch.manual_seed(99)
    resumed = growing(sampler=SAMPLERS[sampler](2), row_length=num_tokens)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.set_rng_state(random_state)
    assert resumed.progress.steps == done
    assert train(resumed, num_workers=num_workers) == after
    assert bits(resumed.state_dict()) == bits(batches.state_dict())
    # The clock of a learning rate is the same.
    assert resumed.constant_epoch == batches.constant_epoch


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_progress_and_counting_steps_do_not_change_the_order_of_a_sampler(sampler):
    orders = []
    for looks in (False, True):
        torch.manual_seed(0)
        rule = linear_ramp(3, 9, over=f"{2 * NUM_ROWS}tok")
        batches = AdaptiveBatches(Rows(), 3, batch_size_schedule=rule, sampler=SAMPLERS[sampler](1))
        if looks:
            assert batches.progress.steps == 0
            len(batches)
        # A sampler that was drawn already would ignore this seed.
        torch.manual_seed(1)
        orders.append([])
        for _ in range(EPOCHS):
            for rows in batches:
                orders[-1].append(rows)
                batches.step()
                if looks:
                    batches.num_steps(EPOCHS)
    assert orders[0] == orders[1]


def test_batches_use_the_order_of_a_sampler_that_may_omit_rows():
    seen = train(growing(sampler=ByEpoch()))
    for epoch in range(EPOCHS):
        order = list(range(NUM_ROWS))
        random.Random(epoch).shuffle(order)
        assert rows_of_epoch(seen, epoch) == order
    subset = SubsetRandomSampler(range(10, 30))
    batches = AdaptiveBatches(Rows(), 6, sampler=subset)
    assert len(batches) == 4
    assert sorted(rows_of_epoch(train(batches, epochs=1), 0)) == list(range(10, 30))


@pytest.mark.parametrize("num_rows", [NUM_ROWS - 1, NUM_ROWS + 1])
def test_a_sampler_that_yields_other_numbers_of_rows_than_its_first_length_is_refused(num_rows):
    order = list(range(NUM_ROWS))
    batches = AdaptiveBatches(Rows(), 3, sampler=SequentialSampler(order))
    assert len(train(batches, epochs=1)) == 22
    order[:] = range(num_rows)
    with pytest.raises(SettingError, match=rf"^sampler='SequentialSampler': .* {NUM_ROWS} rows"):
        next(iter(batches))


def test_a_state_after_a_failed_draw_of_a_sampler_resumes():
    order: list[int] = list(range(NUM_ROWS))
    sampler = SubsetRandomSampler(order, seeded(1))
    batches = AdaptiveBatches(Rows(), 3, sampler=sampler)
    train(batches, epochs=1)
    sampler.indices = order[:1]
    with pytest.raises(SettingError):
        next(iter(batches))
    sampler = SubsetRandomSampler(order, seeded(2))
    resumed = AdaptiveBatches(Rows(), 3, sampler=sampler)
    resumed.load_state_dict(batches.state_dict())


def batches_of_rank(done: int) -> list[list[int]]:
    batches = growing(row_length=num_tokens)
    # One rank alone may read the progress, between collectives of all ranks.
    if distributed.is_rank_zero():
        assert batches.progress.steps == 0
    assert distributed.any_of_ranks(True)
    before = train(batches, until=done)
    state = batches.state_dict()
    assert state == distributed.all_gather(state)[0]
    resumed = growing()
    resumed.load_state_dict(state)
    with pytest.raises(SettingError, match=r"^sampler='ByEpoch': on several ranks leave it out"):
        AdaptiveBatches(Rows(), 3, sampler=ByEpoch())
    return [rows for _, rows in [*before, *train(resumed)]]


def test_ranks_divide_the_rows_of_a_step_and_refuse_a_sampler():
    grow = lambda epoch, size: 4 * (epoch > 0)  # noqa: E731
    whole = train(AdaptiveBatches(Rows(), 6, batch_increase_function=grow))
    ranks = run_on_ranks(batches_of_rank, 2, 4)
    assert len(ranks[0]) == len(ranks[1]) == len(whole)
    for own, other, (_, step) in zip(*ranks, whole, strict=True):
        assert sorted(own + other) == sorted(step)
        assert abs(len(own) - len(other)) <= 1


class Unending:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


RAMP = steps([3, 4], ["99ba"])
REFUSED: dict[str, list[Any]] = {
    "batch_size": [0],
    "maximum": [0, 1.5],
    "sampling": [{"shuffle": False}],
    "sampler": [
        "random",
        Unending(),
        SubsetRandomSampler([]),
        BatchSampler(range(NUM_ROWS), 4, False),
        # Batches of other types.
        [range(4), range(4, 8)],
        torch.arange(8).split(4),
        {"sampler": ByEpoch(), "sampling": Sampling(batch_tokens=30)},
        {"sampler": ByEpoch(), "sampling": Sampling(sample_order="random")},
    ],
    "batch_size_schedule": [
        by_noise_scale(3, maximum=8),
        {"batch_size_schedule": RAMP, "batch_increase_function": at_epochs({1: 2})},
    ],
}


@pytest.mark.parametrize("key", REFUSED)
def test_invalid_arguments_are_refused(key):
    for value in REFUSED[key]:
        is_whole = isinstance(value, dict) and key in value
        options = {"batch_size": 3, **(value if is_whole else {key: value})}
        with pytest.raises(SettingError, match=f"^{key}="):
            next(iter(AdaptiveBatches(Rows(), **options)))


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("shuffle", ["no"]),
        ("seed", [None, 1.5, 2**64]),
        ("sample_window", [0]),
        ("min_rows_per_batch", [0, 9]),
        ("max_rows_per_batch", ["8"]),
    ],
)
def test_an_invalid_sampling_is_refused(key, values):
    for value in values:
        with pytest.raises(SettingError, match=f"^{key}="):
            Sampling(**{"batch_tokens": 100, "max_rows_per_batch": 8, key: value})


def test_a_seesaw_counts_the_tokens_of_the_rows_that_a_sampler_draws():
    # The rows of an epoch are equally long, so both clocks show the same.
    row_length = lambda row: 100 if row["row"] < 32 else 1  # noqa: E731
    sizes = {}
    for clock in ("samples", "tokens"):
        sampler = SubsetRandomSampler(range(32, 64))
        batches = AdaptiveBatches(
            Rows(), 4, row_length=row_length, sampler=sampler, batch_size_schedule=seesaw()
        )
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        rate = LambdaLR(optimizer, lambda step: 1 - step / 16)
        batches.couple(rate, lr_clock=clock)
        seen = train(batches, epochs=1)
        sampler.indices = range(32)
        seen += train(batches, epochs=2)
        sizes[clock] = [len(rows) for _, rows in seen]
    assert sizes["samples"] == [4, 4, 5, 5, 6, 6, 2, 8, 11, 13]
    assert sizes["tokens"] == sizes["samples"]


def test_a_seesaw_without_a_schedule_of_the_rate_is_refused():
    batches = AdaptiveBatches(Rows(), 3, batch_size_schedule=seesaw())
    for use in (len, lambda batches: next(iter(batches))):
        with pytest.raises(
            SettingError, match=r"^batch_size_schedule=seesaw.* call batches.couple"
        ):
            use(batches)


def test_an_epoch_without_rows_that_fit_is_refused():
    sampling = Sampling(batch_tokens=8, long_rows="drop")
    with pytest.raises(SettingError, match=r"^batch_tokens=8: no row"):
        next(iter(AdaptiveBatches(Rows(), 3, row_length=9, sampling=sampling)))


def test_step_without_a_batch_is_refused():
    batches = growing()
    with pytest.raises(ValueError, match="no batch is waiting: call step"):
        batches.step()
    next(iter(batches))
    batches.step()
    with pytest.raises(ValueError, match="no batch is waiting"):
        batches.step()


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (NUM_ROWS, {"batch_size": 4}, "batch_size=4: .* built with 3"),
        (NUM_ROWS, {"sampling": Sampling(seed=1)}, "seed=1: the saved state was built with 0"),
        (65, {}, "dataset='65 rows': the saved state was built with 64 rows"),
        (NUM_ROWS, {"sampler": ByEpoch()}, "sampler='ByEpoch': the saved state was built with"),
    ],
)
def test_a_state_of_other_arguments_or_another_object_is_refused(rows, options, message):
    batches = AdaptiveBatches(Rows(), 3)
    train(batches, until=2)
    other = AdaptiveBatches(Rows(rows), **{"batch_size": 3, **options})
    with pytest.raises(SettingError, match=message):
        other.load_state_dict(batches.state_dict())
    for state in (None, {}, {"progress": {}}):
        with pytest.raises(SettingError, match=r"give the result of state_dict\(\) of batches"):
            other.load_state_dict(state)


class Unrepeatable(ByEpoch):
    """A sampler whose order cannot be repeated."""

    source = random.Random(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.source.sample(range(NUM_ROWS), NUM_ROWS))


def test_resuming_a_sampler_with_unrepeatable_order_is_refused():
    batches = AdaptiveBatches(Rows(), 3, sampler=Unrepeatable())
    train(batches, until=5)
    resumed = AdaptiveBatches(Rows(), 3, sampler=Unrepeatable())
    with pytest.raises(SettingError, match=r"sampler='Unrepeatable': it yields other rows .*seed"):
        resumed.load_state_dict(batches.state_dict())
