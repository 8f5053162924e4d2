"""A training loop of one's own: the bound, steps that grow, micro-batches, the rate, going on."""

from __future__ import annotations

import copy
import io
import math
import random
import re
from collections import namedtuple
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import run_on_ranks
from support.sharded_model import (
    Decoder,
    by_hand,
    collate,
    divided,
    make_rows,
    relative_error,
    token_losses,
    training_state,
    whole_gradients,
    whole_parameters,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    MultiplicativeLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive_batch import distributed
from adaptive_batch.data import Sampling, move_to_device
from adaptive_batch.errors import (
    DoesNotFitError,
    GrowthFunctionError,
    NonfiniteLossError,
    SettingError,
)
from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.schedules import at_epochs, geometric, linear_ramp, steps
from adaptive_batch.training import AdaptiveLoop, StepOptions
from adaptive_batch.training.parts import LabelCounter

ROWS = make_rows([3 + (5 * number) % 13 for number in range(40)])
RATE = 0.05


pytestmark = pytest.mark.usefixtures("one_thread")


def seed_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def training(
    *,
    model: nn.Module | None = None,
    rows: Any = ROWS,
    optimizer: Any = torch.optim.AdamW,
    **options: Any,
) -> SimpleNamespace:
    """A model, its optimizer and the loop around them."""
    model = model or Decoder()
    seed_all()
    optimizer = optimizer(model.parameters(), lr=RATE)
    options.setdefault("mean_loss", lambda batch: token_losses(model, batch, "mean"))
    options.setdefault("collate", collate)
    options.setdefault("batch_size", 4)
    if schedule := options.pop("schedule", None):
        options["lr_scheduler"] = LambdaLR(optimizer, schedule)
    for name, group in (("sampling", Sampling), ("options", StepOptions)):
        given = {
            field.name: options.pop(field.name) for field in fields(group) if field.name in options
        }
        options.setdefault(name, group(**given))
    return SimpleNamespace(
        model=model, optimizer=optimizer, loop=AdaptiveLoop(model, optimizer, rows, **options)
    )


def train(one: SimpleNamespace, *, epochs: int = 1, until: int = 10**9) -> list[SimpleNamespace]:
    """Train to the end of so many epochs, or until so many steps are done: what each step held and came to."""
    seen: list[SimpleNamespace] = []
    while one.loop.progress.epoch < epochs and one.loop.progress.steps < until:
        epoch = one.loop.progress.epoch
        for rows in one.loop:
            result = one.loop.run(rows)
            one.optimizer.step()
            one.optimizer.zero_grad()
            numbers = [row["row"] for row in rows]
            rate = one.loop.learning_rate
            seen.append(
                SimpleNamespace(
                    epoch=epoch, rows=numbers, result=result, rate=rate, loss=result.loss
                )
            )
            if one.loop.progress.steps >= until:
                return seen
    return seen


def of_ranks(state: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The state of a loop as if it had been saved on so many ranks."""
    changed = copy.deepcopy(state)
    changed["batches"]["steps"]["ranks"] = ranks
    return changed


def sizes(seen: list[SimpleNamespace], epoch: int | None = None) -> list[int]:
    return [step.result.rows for step in seen if epoch is None or step.epoch == epoch]


class RunsOut:
    """A mean loss that runs out of memory, as a device does, where a micro-batch has too many rows."""

    def __init__(self, model: nn.Module, *, most: int, after: int = 0, times: int = 10**9) -> None:
        self.model, self.most, self.left, self.times = model, most, after, times

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = len(batch["tokens"])
        loss = token_losses(self.model, batch, "mean")
        self.left -= 1
        if rows > self.most and self.left < 0 and self.times > 0:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


# --- the bound --------------------------------------------------------------------------------------------------------


def peak_by_hand(one: SimpleNamespace, size: int, *, accumulates: bool) -> int:
    """Of forward and backward of the longest rows in plain torch, with the optimizer's state there."""
    longest = sorted(ROWS, key=lambda row: -len(row["tokens"]))[:size]
    for parameter in one.model.parameters():
        parameter.grad = (
            torch.zeros_like(parameter) if accumulates and parameter.requires_grad else None
        )
    state = [value for state in one.optimizer.state.values() for value in state.values()]
    gradients = [
        parameter.grad for parameter in one.model.parameters() if parameter.grad is not None
    ]
    resident = [*one.model.parameters(), *one.model.buffers(), *gradients, *state]
    with CountedMemory(torch.device("cpu")).measure(resident, budget_bytes=2**60) as usage:
        batch = collate(longest)
        count = (batch["labels"][:, 1:] != -100).sum()
        (token_losses(one.model, batch, "mean") * count).backward()
    one.optimizer.zero_grad()
    return usage.peak_bytes


@pytest.mark.parametrize("beyond", [False, True])
def test_the_bound_is_what_trying_every_size_finds(beyond):
    reference = training()
    train(reference, until=1)  # the optimizer's state is there
    peaks = [peak_by_hand(reference, size, accumulates=beyond) for size in range(1, 41)]
    for expected in (5, 17, 39):
        budget = (peaks[expected - 1] + peaks[expected]) // 2
        one = training(grow_beyond_maximum=beyond)
        found = one.loop.find_bound(device_memory=budget, headroom=0.0)
        assert found.max_batch_size == one.loop.max_batch_size == expected
        assert found.sequence_length == max(len(row["tokens"]) for row in ROWS)
        assert found.budget_bytes == budget
    assert (
        training().loop.find_bound(device_memory="1GiB").max_batch_size == 40
    )  # an epoch has no more
    assert training().loop.find_bound(device_memory="1GiB", maximum=9).max_batch_size == 9


@pytest.mark.parametrize("steps_before", [0, 3])
def test_finding_the_bound_leaves_no_trace(steps_before):
    one = training(
        model=Decoder(draws=True),
        max_grad_norm=0.1,
        schedule=lambda step: 0.5**step,
        lr_scaling="sqrt",
    )
    train(one, until=steps_before)
    before = training_state(one.model, one.optimizer), one.loop.progress, one.loop.batch_size
    found = one.loop.find_bound(device_memory="400KiB")
    assert 1 < found.max_batch_size < 40
    assert (
        training_state(one.model, one.optimizer),
        one.loop.progress,
        one.loop.batch_size,
    ) == before


def test_training_after_a_search_is_training_without_one():
    one, other = (training(model=Decoder(draws=True)) for _ in range(2))
    for each in (one, other):
        seed_all()
        if each is one:
            one.loop.find_bound(device_memory="1GiB")
        train(each)
    assert (
        training_state(one.model, one.optimizer)["parameters"]
        == training_state(other.model, other.optimizer)["parameters"]
    )


def test_a_batch_above_the_bound_is_tried_with_gradients_there_and_runs_as_micro_batches():
    reference = training()
    train(reference, until=1)
    budget = peak_by_hand(reference, 10, accumulates=False)
    fits = {
        (batch_size, beyond): training(batch_size=batch_size, grow_beyond_maximum=beyond)
        .loop.find_bound(device_memory=budget, headroom=0.0)
        .max_batch_size
        for batch_size, beyond in ((4, False), (4, True), (40, False))
    }
    assert fits[4, False] == 10
    assert fits[40, False] == fits[4, True] < 10
    splits = training(batch_size=40)
    splits.loop.find_bound(device_memory=budget, headroom=0.0)
    (step,) = train(splits)
    assert (step.result.rows, step.result.micro_batches) == (40, -(-40 // fits[40, False]))
    assert splits.loop.limit.amount == fits[40, False]


def test_a_bound_of_whole_steps_is_not_used_for_steps_of_several_micro_batches():
    """Beside the gradients of earlier micro-batches fewer rows fit."""
    reference = training()
    train(reference, until=1)
    budget = {"device_memory": peak_by_hand(reference, 10, accumulates=False), "headroom": 0.0}
    larger = training()
    larger.loop.batch_size = 24
    saved = larger.loop.state_dict()

    def searched(one: SimpleNamespace) -> SimpleNamespace:
        assert one.loop.find_bound(**budget).max_batch_size == 10
        return one

    def is_set() -> SimpleNamespace:
        one = searched(training())
        one.loop.batch_size = 24
        return one

    def is_loaded() -> SimpleNamespace:
        one = searched(training())
        one.loop.load_state_dict(saved)
        return one

    def bound_is_loaded() -> SimpleNamespace:
        """Which the saved loop tried for steps of 4 rows."""
        one, other = training(), searched(training())
        other.loop.batch_size = 24
        one.loop.load_state_dict(other.loop.state_dict())
        assert one.loop.max_batch_size == 10
        return one

    def grows_beyond() -> SimpleNamespace:
        one = training(grow_beyond_maximum=True, batch_increase_function=at_epochs({0: 20}))
        one.loop.load_state_dict(searched(training()).loop.state_dict())
        return one

    def begun_on_six_ranks() -> SimpleNamespace:
        one, state = searched(training()), training().loop.state_dict()
        one.loop.load_state_dict(of_ranks(state, 6))
        return one

    for begin in (is_set, is_loaded, bound_is_loaded, grows_beyond, begun_on_six_ranks):
        one = begin()
        rows = next(iter(one.loop))
        with pytest.raises(
            SettingError,
            match=r"batch_size=24: 10 rows fit at once where no gradients.*find_bound again",
        ):
            one.loop.run(rows)
        beside_gradients = one.loop.find_bound(**budget).max_batch_size
        assert 0 < beside_gradients < 10
        result = one.loop.run(rows)  # the same rows
        assert (result.rows, result.micro_batches) == (24, -(-24 // beside_gradients))
        other = training()
        other.loop.load_state_dict(
            one.loop.state_dict()
        )  # what was tried with gradients is known to have been
        assert other.loop.run(next(iter(other.loop))).micro_batches > 1
    one = training()
    one.loop.load_state_dict(saved)
    assert one.loop.find_bound(**budget).max_batch_size == 9


def test_modules_that_are_frozen_in_evaluation_mode_are_so_in_a_trial_and_after_it():
    options, rows = classes("tuples")
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net[1].eval()
    modes = []
    net[1].register_forward_hook(lambda module, *_: modes.append((net.training, module.training)))
    one = training(
        model=net,
        rows=rows,
        mean_loss=lambda batch: cross_entropy(net(batch[0]), batch[1]),
        row_length=1,
        **options,
    )
    found = one.loop.find_bound(
        device_memory="1GiB"
    )  # in training mode one row has no statistics, and torch refuses it
    assert found.max_batch_size == 32
    assert set(modes) == {(True, False)}
    assert [module.training for module in net.modules()] == [True, True, False, True]


def test_a_dataset_that_draws_as_it_is_read_leaves_no_trace_in_a_search():
    class Draws(list):
        def __getitem__(self, number: int) -> Any:
            torch.rand(1), random.random(), np.random.rand()
            return super().__getitem__(number)

    for options in (
        {},
        {"micro_batch_tokens": "auto"},
        {"batch_tokens": 60},
        {"sample_order": "seqlen"},
        {"micro_batch_layout": "grouped"},
    ):
        one = training(rows=Draws(ROWS), **options)
        before = training_state(one.model, one.optimizer)
        one.loop.find_bound(device_memory="1GiB", maximum=8)
        assert training_state(one.model, one.optimizer) == before


def test_one_row_that_does_not_fit_is_said_with_numbers():
    with pytest.raises(DoesNotFitError) as caught:
        training().loop.find_bound(device_memory="40KiB", headroom=0.0)
    said, remedies = str(caught.value).split("; ")
    assert re.fullmatch(r"one row of 15 tokens needs 0\.\d\d\d MiB, cpu allows 40\.00 KiB", said)
    assert not re.search("tokenizer|optimizer_in_bwd|enable_", remedies)  # which nobody has here
    with pytest.raises(DoesNotFitError, match=r"^one row needs \d"):
        training(row_length=1).loop.find_bound(device_memory="40KiB")


def test_the_power_of_two_below_the_bound_is_tried_too():
    one = training()
    found = one.loop.find_bound(device_memory="1GiB", maximum=11, round_to_power_of_two=True)
    assert (found.max_batch_size, found.batch_size) == (11, 8)
    assert found.batch_size in {trial.batch_size for trial in found.trials if trial.fits}
    one.loop.batch_size = found.batch_size
    assert sizes(train(one))[0] == found.batch_size


# --- steps that grow --------------------------------------------------------------------------------------------------


def test_an_increment_is_asked_once_an_epoch_and_cut_to_the_bound():
    asked = []

    def grow(epoch: int, batch_size: int) -> int:
        asked.append((epoch, batch_size))
        return 0 if epoch == 0 else batch_size

    one = training(batch_increase_function=grow)
    one.loop.find_bound(device_memory="1GiB", maximum=11)
    assert one.loop.num_steps(4) == 10 + 5 + 4 + 4
    asked.clear()
    seen = train(one, epochs=4)
    assert [sizes(seen, epoch)[0] for epoch in range(4)] == [4, 8, 11, 11]
    assert asked == [(0, 4), (1, 4), (2, 8), (3, 11)]
    assert len(seen) == 10 + 5 + 4 + 4
    iter_twice = training(batch_increase_function=grow)
    for _ in range(2):
        next(iter(iter_twice.loop))
    assert iter_twice.loop.batch_size == 4
    assert len(asked) == 5


def test_an_increment_may_pass_the_bound_in_micro_batches():
    one = training(batch_increase_function=at_epochs({1: 20}), grow_beyond_maximum=True)
    one.loop.find_bound(device_memory="1GiB", maximum=11)
    seen = train(one, epochs=2)
    assert sizes(seen, 1) == [24, 16]
    assert [step.result.micro_batches for step in seen if step.epoch == 1] == [3, 2]


def test_a_schedule_is_asked_for_each_step_and_cut_to_the_bound():
    one = training(batch_size_schedule=steps([2, 6, 16], ["10sp", "20sp"]))
    one.loop.find_bound(device_memory="1GiB", maximum=13)
    expected = [2] * 5 + [6] * 2 + [13, 5]
    assert one.loop.num_steps(1) == len(expected)
    assert sizes(train(one)) == expected


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=15)
def test_each_row_is_handed_out_once_an_epoch_in_the_order_of_torchs_sampler(counts, shuffle, seed):
    one = training(
        model=Decoder(width=4),
        batch_size_schedule=lambda progress: counts[progress.steps % len(counts)],
        shuffle=shuffle,
        seed=seed,
    )
    sampler = DistributedSampler(ROWS, 1, 0, shuffle=shuffle, seed=seed)
    seen = train(one, epochs=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [number for step in seen if step.epoch == epoch for number in step.rows] == list(
            sampler
        )
    assert [step.result.rows for step in seen] == [len(step.rows) for step in seen]
    progress = one.loop.progress
    assert (progress.epoch, progress.epoch_rows, progress.samples, progress.steps) == (
        2,
        0,
        80,
        len(seen),
    )
    assert progress.tokens == 2 * sum(len(row["tokens"]) for row in ROWS)


def test_rows_that_are_taken_ahead_change_nothing():
    """As a trainer that looks one batch ahead takes them; a rule over tokens counts those that were handed out."""
    rule = linear_ramp(2, 12, "300tok")
    one, other = (training(batch_size_schedule=rule) for _ in range(2))
    seen = train(one)
    ahead = list(other.loop)
    assert [len(rows) for rows in ahead] == sizes(seen)
    assert len(set(sizes(seen))) > 3
    for rows in ahead:
        other.loop.run(rows)
        other.optimizer.step()
        other.optimizer.zero_grad()
    assert (
        training_state(one.model, one.optimizer)["parameters"]
        == training_state(other.model, other.optimizer)["parameters"]
    )
    assert one.loop.progress == other.loop.progress


def test_only_rows_that_were_handed_out_are_run():
    one = training()
    with pytest.raises(ValueError, match="4 rows were given, and none are waiting"):
        one.loop.run(ROWS[:4])
    rows = next(iter(one.loop))
    with pytest.raises(ValueError, match="3 rows were given, and 4 rows come next"):
        one.loop.run(rows[:3])
    one.loop.run(rows)
    assert one.loop.progress.samples == 4


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_gradients_are_those_of_the_mean_over_the_label_tokens_of_a_step(micro_batch_size):
    one = training(batch_size=7, micro_batch_size=micro_batch_size)
    rows = next(iter(one.loop))
    result = one.loop.run(rows)
    found = whole_gradients(one.model)
    expected, loss, label_tokens = by_hand(one.model, rows)
    assert relative_error(found, expected) < 1e-7  # one count divides them, a float32
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert int(result.label_tokens) == label_tokens
    assert result.micro_batches == {None: 1, 1: 7, 3: 3}[micro_batch_size]


@pytest.mark.parametrize("micro_batch_size", [None, 4, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_loss_of_a_model_in_16_bits_does_not_drift_with_the_number_of_micro_batches(
    dtype, micro_batch_size
):
    net = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64)).to(dtype)
    rows = make_rows([30] * 256)
    seen = []

    def mean_loss(batch: Any) -> torch.Tensor:
        loss = token_losses(net, batch, "mean")
        if not one.loop.is_trial:
            seen.append(float(loss))
        return loss

    one = training(
        model=net,
        rows=rows,
        mean_loss=mean_loss,
        num_labels=lambda batch: batch["labels"].numel(),
        batch_size=256,
        micro_batch_size=micro_batch_size,
    )
    result = one.loop.run(next(iter(one.loop)))
    assert result.micro_batches == 256 // (micro_batch_size or 256)
    assert len(seen) == result.micro_batches
    assert result.loss == pytest.approx(sum(seen) / len(seen), rel=1e-6)
    assert {parameter.grad.dtype for parameter in net.parameters()} == {dtype}


@pytest.mark.parametrize("most", [4, 2])
@pytest.mark.parametrize("goes_well", [0, 2], ids="after {} steps".format)
def test_a_step_that_runs_out_of_memory_leaves_the_bits_of_a_run_with_a_lower_limit(
    most, goes_well
):
    """With dropout, running statistics and random numbers of all kinds; one or two replays."""
    options: dict[str, Any] = {"batch_size": 8, "max_grad_norm": 0.5, "lr_scaling": "linear"}
    model = Decoder(draws=True)
    one = training(model=model, mean_loss=RunsOut(model, most=most, after=goes_well), **options)
    seen = train(one, epochs=2)
    other = training(model=Decoder(draws=True), **options)
    train(other, until=goes_well)
    state = other.loop.state_dict()
    state["step"]["sizer"]["lowered"] = {"amount": most, "unit": "rows"}
    other.loop.load_state_dict(state)
    train(other, epochs=2)
    assert one.loop.num_out_of_memory == {4: 1, 2: 2}[most]
    assert [step.result.micro_batches for step in seen] == [1] * goes_well + [8 // most] * (
        10 - goes_well
    )
    assert training_state(one.model, one.optimizer) == training_state(other.model, other.optimizer)
    assert one.loop.progress == other.loop.progress


def test_an_out_of_memory_error_is_let_through_where_that_is_asked_for():
    model = Decoder()
    one = training(model=model, mean_loss=RunsOut(model, most=2), on_out_of_memory="raise")
    with pytest.raises(torch.OutOfMemoryError):
        train(one)
    model = Decoder()
    one = training(model=model, mean_loss=RunsOut(model, most=0))
    with pytest.raises(DoesNotFitError, match=r"one row of \d+ tokens ran out of memory") as caught:
        train(one)
    assert not re.search(
        "tokenizer|optimizer_in_bwd|enable_", str(caught.value)
    )  # which nobody has here


# --- the rate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_rate_follows_the_rows_of_each_step(rule, power):
    one = training(batch_size_schedule=steps([4, 8, 16], ["8sp", "24sp"]), lr_scaling=rule)
    for step in train(one):
        assert step.rate == pytest.approx(RATE * (step.result.rows / 4) ** power, rel=1e-12)


@pytest.mark.parametrize(("reference", "unit"), [(8, "rows"), ("100tok", "tokens")])
def test_the_rate_belongs_to_a_reference_of_rows_or_tokens(reference, unit):
    one = training(lr_scaling="linear", reference_batch_size=reference)
    for step in train(one):
        batch = step.result.rows / 8 if unit == "rows" else step.result.tokens / 100
        assert step.rate == pytest.approx(RATE * batch, rel=1e-12)


def test_the_time_of_a_scheduler_is_the_part_of_training_that_is_done():
    """Of 40 rows by 4, an epoch is 10 of its steps however large the batch has become."""
    one = training(batch_increase_function=at_epochs({1: 4}), schedule=lambda step: 1 / (1 + step))
    rates = [step.rate for step in train(one, epochs=2)]
    clock = [*range(10), *range(10, 20, 2)]
    assert rates == pytest.approx([RATE / (1 + step) for step in clock], rel=1e-12)


def stepped_rates(one: SimpleNamespace, after: Any = lambda step: None) -> list[float]:
    """The rate that the optimizer has at each of its steps, in a loop that calls `after` when a step is done."""
    found: list[float] = []
    one.optimizer.register_step_pre_hook(
        lambda optimizer, *_: found.append(float(optimizer.param_groups[0]["lr"]))
    )
    for number, rows in enumerate(one.loop):
        one.loop.run(rows)
        one.optimizer.step()
        one.optimizer.zero_grad()
        after(number)
    return found


def test_a_rate_that_the_script_writes_is_scaled_and_is_there_again_after_the_step():
    one = training(batch_size=8, lr_scaling="linear", reference_batch_size=4)
    (group,) = one.optimizer.param_groups

    def warm_up(number: int) -> None:
        assert group["lr"] == (RATE if number == 0 else 0.1 * number)
        group["lr"] = 0.1 * (number + 1)

    assert stepped_rates(one, warm_up) == [2 * RATE, *(2 * 0.1 * number for number in range(1, 5))]


def accelerated(scheduler: Any, optimizer: Any) -> AcceleratedScheduler:
    Accelerator(cpu=True)
    return AcceleratedScheduler(scheduler, AcceleratedOptimizer(optimizer))


@pytest.mark.parametrize(
    ("build", "factor"),
    [
        (lambda one: StepLR(one, 2, gamma=0.5), lambda step: 0.5 ** (step // 2)),
        (lambda one: MultiplicativeLR(one, lambda step: 0.5), lambda step: 0.5**step),
        (
            lambda one: CosineAnnealingLR(one, 5),
            lambda step: 0.5 * (1 + math.cos(math.pi * step / 5)),
        ),
        (lambda one: LambdaLR(one, lambda step: 1 / (1 + step)), lambda step: 1 / (1 + step)),
    ],
    ids=["StepLR", "MultiplicativeLR", "CosineAnnealingLR", "LambdaLR"],
)
@pytest.mark.parametrize(
    "wrap", [lambda scheduler, optimizer: scheduler, accelerated], ids=["plain", "accelerated"]
)
def test_a_scheduler_of_the_scripts_own_reads_and_multiplies_rates_that_are_not_scaled(
    build, factor, wrap
):
    one = training(batch_size=8, lr_scaling="linear", reference_batch_size=4)
    scheduler = wrap(build(one.optimizer), one.optimizer)
    rates = stepped_rates(one, lambda number: scheduler.step())
    assert rates == pytest.approx([2 * RATE * factor(step) for step in range(5)], rel=1e-12)


def with_scheduler(
    build: Any, wrap: Any = lambda scheduler, optimizer: scheduler, **options: Any
) -> SimpleNamespace:
    """Training whose scheduler is given to the loop, and kept for the script to step."""
    one = training()
    one.scheduler = wrap(build(one.optimizer), one.optimizer)
    wrapped = AcceleratedOptimizer(one.optimizer) if wrap is accelerated else one.optimizer
    given = {"optimizer": lambda *_, **__: wrapped, "lr_scheduler": one.scheduler, "batch_size": 8}
    one.loop = training(model=one.model, **given, **options).loop
    return one


def test_what_accelerate_wraps_is_seen_through():
    """As its scripts have it, which step both; the rate is that of the clock, however often they do."""
    factor = lambda step: 1 / (1 + step)  # noqa: E731
    one = with_scheduler(
        lambda optimizer: LambdaLR(optimizer, factor), accelerated, lr_scaling="linear"
    )
    rates = stepped_rates(one, lambda number: one.scheduler.step())
    assert rates == pytest.approx([RATE * factor(step) for step in range(5)], rel=1e-12)


@pytest.mark.parametrize(
    "wrap", [lambda scheduler, optimizer: scheduler, accelerated], ids=["plain", "accelerated"]
)
@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: StepLR(optimizer, 2),
        lambda optimizer: CosineAnnealingLR(optimizer, 5),
        ReduceLROnPlateau,
    ],
    ids=["StepLR", "CosineAnnealingLR", "ReduceLROnPlateau"],
)
def test_a_scheduler_that_keeps_its_own_count_is_refused(build, wrap):
    remedy = r"it keeps its own count; leave it out here and step it in your own loop after optimizer\.step\(\)"
    with pytest.raises(SettingError, match=rf"^lr_scheduler='[A-Z]\w+': {remedy}"):
        with_scheduler(build, wrap)


def test_a_step_that_the_script_leaves_out_leaves_its_rate_too():
    one = training(batch_size=8, lr_scaling="linear", reference_batch_size=4)
    for rows in one.loop:
        one.loop.run(rows)
        assert one.loop.learning_rate == one.optimizer.param_groups[0]["lr"] == 2 * RATE
        one.optimizer.zero_grad()
    assert one.optimizer.state_dict()["param_groups"][0]["lr"] == RATE
    one.loop.find_bound(device_memory="1GiB", maximum=2)
    assert one.optimizer.param_groups[0]["lr"] == RATE


# --- what is not finite -----------------------------------------------------------------------------------------------


def spoiled(at: int, **options: Any) -> SimpleNamespace:
    """Training whose loss is NaN when it is computed for the so-manieth time."""
    model, calls = Decoder(), []

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        return token_losses(model, batch, "mean") * (float("nan") if len(calls) == at else 1.0)

    return training(model=model, mean_loss=mean_loss, **options)


def test_a_loss_that_is_not_finite_is_logged_and_trained_on(caplog):
    one = spoiled(3)
    assert [step.result.is_finite for step in train(one)] == [True] * 2 + [False] * 8
    assert caplog.text.count("the loss is nan") == 1
    assert "step 3: the loss is nan, lr 0.05; step 2 had loss" in caplog.text


def test_a_step_that_is_skipped_leaves_no_gradients_and_its_rows_are_consumed():
    one = spoiled(3, on_nonfinite_loss="skip", lr_scaling="linear")
    train(one, until=2)
    before = training_state(one.model, one.optimizer)
    third = train(one, until=3)
    assert not third[0].result.is_finite
    assert training_state(one.model, one.optimizer) == before
    assert all(step.result.is_finite for step in train(one))
    assert one.loop.progress.samples == len(ROWS)


def test_a_step_that_stops_can_be_run_again():
    one = spoiled(
        2, on_nonfinite_loss="stop", batch_size=8, lr_scaling="linear", reference_batch_size=4
    )
    steps_of_epoch = iter(one.loop)
    one.loop.run(next(steps_of_epoch))
    one.optimizer.step()
    one.optimizer.zero_grad()
    rows = next(steps_of_epoch)
    with pytest.raises(NonfiniteLossError, match="step 2: the loss is nan"):
        one.loop.run(rows)
    assert one.optimizer.param_groups[0]["lr"] == RATE
    assert one.loop.run(rows).is_finite
    assert one.loop.progress.steps == 2


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped_after", [2, 10, 13])
@pytest.mark.parametrize("rule", ["increment", "schedule"])
def test_going_on_from_a_saved_state_gives_the_bits_of_training_without_a_stop(stopped_after, rule):
    """In mid-epoch, between two epochs, with a growing batch, a lowered capacity, dropout and a scheduler."""
    rules: dict[str, dict[str, Any]] = {
        "increment": {"batch_increase_function": geometric(2.0)},
        "schedule": {"batch_size_schedule": linear_ramp(2, 9, "50sp")},
    }

    def begin() -> SimpleNamespace:
        model = Decoder(draws=True)
        loss = RunsOut(model, most=3)
        options: dict[str, Any] = {
            "mean_loss": loss,
            "lr_scaling": "sqrt",
            "schedule": lambda step: 0.9**step,
        }
        one = training(model=model, **options, **rules[rule])
        one.loop.find_bound(device_memory="1GiB", maximum=3)
        return one

    whole = begin()
    train(whole, epochs=3)
    first = begin()
    train(first, until=stopped_after)
    file = io.BytesIO()
    state = {
        "loop": first.loop.state_dict(),
        "model": first.model.state_dict(),
        "optimizer": first.optimizer.state_dict(),
    }
    torch.save(state, file)
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    goes_on = begin()
    goes_on.model.load_state_dict(saved["model"])
    goes_on.optimizer.load_state_dict(saved["optimizer"])
    goes_on.loop.load_state_dict(saved["loop"])
    torch.set_rng_state(random_states[0])
    random.setstate(random_states[1])
    np.random.set_state(random_states[2])
    train(goes_on, epochs=3)
    assert training_state(goes_on.model, goes_on.optimizer) == training_state(
        whole.model, whole.optimizer
    )
    assert goes_on.loop.state_dict() == whole.loop.state_dict()


def test_a_saved_bound_below_what_is_configured_now_is_found_anew_and_not_refused():
    """As on a device that holds more: find_bound comes after load_state_dict."""
    small = training(batch_size=4)
    small.loop.find_bound(device_memory="1GiB", maximum=2)
    large = training(batch_size=4, micro_batch_size=3)
    large.loop.load_state_dict(small.loop.state_dict())
    assert large.loop.find_bound(device_memory="1GiB", maximum=8).max_batch_size > 2


def test_a_lowered_limit_goes_on_unless_another_bound_is_found():
    model = Decoder()
    loss = RunsOut(model, most=5, after=10**6)
    one = training(model=model, mean_loss=loss, batch_size=10)
    one.loop.find_bound(device_memory="1GiB", maximum=10)
    loss.left = 0  # what fitted then
    train(one)
    assert one.loop.limit.amount == 5
    for before, after, lowered in (
        (None, None, True),
        (None, 10, True),
        (None, 8, False),
        (10, None, True),
        (8, None, False),
    ):
        other = training(batch_size=10)
        if before is not None:
            other.loop.find_bound(device_memory="1GiB", maximum=before)
        other.loop.load_state_dict(one.loop.state_dict())
        if after is not None:
            other.loop.find_bound(device_memory="1GiB", maximum=after)
        train(other, epochs=2)
        assert other.loop.limit.amount == (5 if lowered else 8)


@pytest.mark.parametrize(
    ("option", "value"), [("seed", 3), ("shuffle", False), ("rows", ROWS[:39])]
)
def test_rows_in_another_order_are_refused_when_going_on(option, value):
    state = training().loop.state_dict()
    key = {"rows": "dataset"}.get(option, option)
    with pytest.raises(SettingError, match=f"{key}=.*resume with that"):
        training(**{option: value}).loop.load_state_dict(state)


# --- rows and batches of any kind -------------------------------------------------------------------------------------


def classes(kind: str) -> tuple[dict[str, Any], Any]:
    """Rows of three classes, as tuples or as mappings, and what a loop needs to know of them."""
    generator = torch.Generator().manual_seed(0)
    points = [(torch.randn(5, generator=generator), number % 3) for number in range(32)]
    if kind == "tuples":
        options = {
            "collate": lambda rows: (
                torch.stack([point for point, _ in rows]),
                torch.tensor([one for _, one in rows]),
            ),
            "num_labels": lambda batch: len(batch[1]),
        }
        return options, points
    rows = [{"point": point, "label": one} for point, one in points]
    collate = lambda rows: {  # noqa: E731
        "point": torch.stack([row["point"] for row in rows]),
        "labels": torch.tensor([row["label"] for row in rows]),
    }
    return {"collate": collate}, rows


@pytest.mark.parametrize("kind", ["tuples", "mappings"])
def test_a_classifier_trains_as_it_does_by_hand(kind):
    options, rows = classes(kind)
    nets = [nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())

    def mean_loss(batch: Any) -> torch.Tensor:
        points, labels = batch if isinstance(batch, tuple) else (batch["point"], batch["labels"])
        return cross_entropy(nets[0](points.double()), labels)

    one = training(
        model=nets[0],
        rows=rows,
        mean_loss=mean_loss,
        batch_size=12,
        micro_batch_size=5,
        row_length=1,
        **options,
    )
    found = one.loop.find_bound(device_memory="1GiB")
    assert (found.max_batch_size, found.sequence_length) == (32, 1)
    for rows_of_step in one.loop:
        one.loop.run(rows_of_step)
        one.optimizer.step()
        one.optimizer.zero_grad()
    by_hand = torch.optim.AdamW(nets[1].parameters(), lr=RATE)
    sampler = DistributedSampler(rows, 1, 0, seed=0)
    for numbers in torch.tensor(list(sampler)).split(12):
        batch = options["collate"]([rows[number] for number in numbers.tolist()])
        points, labels = batch if isinstance(batch, tuple) else (batch["point"], batch["labels"])
        cross_entropy(nets[1](points.double()), labels).backward()
        by_hand.step()
        by_hand.zero_grad()
    for parameter, expected in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=1e-6, atol=1e-9)


def test_labels_of_sequences_are_counted_after_the_shift():
    """Or before it, if the check of the first split shows that; what has none counts its rows."""
    labels = torch.tensor([[1, 2, -100], [3, -100, 4]])
    counter = LabelCounter(None)
    assert counter.counts({"labels": labels}, 2) == (2, 4)
    assert counter.counts({"labels": labels[:, 2]}, 2) == (1,)
    for batch in ({"labels": torch.rand(4, 3)}, {"points": labels}, (labels, labels)):
        assert counter.counts(batch, 4) == (4,)


def test_batches_go_to_the_device_as_they_are_nested():
    Pair = namedtuple("Pair", "first second")
    batch = {"a": [torch.ones(2), "text"], "b": Pair(torch.ones(1), (torch.ones(3), None))}
    on_device = move_to_device(batch, torch.device("meta"))
    assert on_device["a"][0].is_meta
    assert on_device["a"][1] == "text"
    assert type(on_device["b"]) is Pair
    assert on_device["b"].second[0].is_meta


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: "),
        ({"mean_loss": 5}, "mean_loss=5: give a function"),
        ({"collate": None}, "collate=None: give a function"),
        (
            {"optimizer": lambda parameters, lr: [torch.optim.SGD(parameters)]},
            "optimizer='list': give one torch.optim",
        ),
        ({"micro_batch_size": 2.5}, "micro_batch_size=2.5: "),
        ({"rows": []}, "dataset='list': it has no rows"),
        ({"lr_scaling": "square"}, "lr_scaling='square': give one of none, linear, sqrt"),
        ({"on_out_of_memory": "skip"}, "on_out_of_memory='skip': give one of shrink, raise"),
        ({"reference_batch_size": "8k"}, "reference_batch_size='8k': "),
        (
            {"batch_increase_function": lambda epoch: 1},
            "batch_increase_function=.*of positional arguments",
        ),
        (
            {"batch_increase_function": max, "batch_size_schedule": sum},
            "batch_size_schedule=.*not both",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_refused_by_name(options, message):
    with pytest.raises(SettingError, match=f"^{message}"):
        training(**options)


def test_what_rows_and_batches_do_not_say_is_asked_for():
    tuples = [(row["tokens"], row["labels"]) for row in ROWS]
    pairs = {
        "collate": lambda rows: tuple(
            collate([{"tokens": one, "labels": two} for one, two in rows]).values()
        )
    }
    with pytest.raises(
        SettingError,
        match=r"row_length=None: a row is a tuple without `tokens` or `input_ids` of one dimension; give",
    ):
        training(rows=tuples, **pairs).loop.find_bound()
    model = Decoder()

    def mean_loss(batch: Any) -> torch.Tensor:
        tokens, labels = batch
        return token_losses(model, {"tokens": tokens, "labels": labels}, "mean")

    given = {
        "model": model,
        "rows": tuples,
        "row_length": lambda row: len(row[0]),
        "mean_loss": mean_loss,
        "micro_batch_size": 2,
        **pairs,
    }
    # Rows are counted, and this is no mean over them.
    one = training(**given)
    with pytest.raises(
        SettingError,
        match=r"as a whole and .* as the sum of its parts' shares.*; give num_labels=,",
    ):
        one.loop.run(next(iter(one.loop)))
    one = training(**given, num_labels=lambda batch: (batch[1][:, 1:] != -100).sum())
    assert one.loop.run(next(iter(one.loop))).micro_batches == 2


def test_a_micro_batch_that_does_not_fit_is_refused_and_a_rule_that_answers_nonsense():
    one = training(micro_batch_size=12)
    with pytest.raises(SettingError, match="micro_batch_size=12: 7 rows fit; give 7 or less"):
        one.loop.find_bound(device_memory="1GiB", maximum=7)
    for option, value in {"headroom": 2, "device_memory": "lots", "maximum": 0}.items():
        with pytest.raises(SettingError, match=f"^{option}={value!r}: "):
            one.loop.find_bound(**{option: value})
    with pytest.raises(
        SettingError, match=r"^device_memory='999TiB': .* or null \(None\) for what is available"
    ):
        one.loop.find_bound(device_memory="999TiB")
    one = training(batch_increase_function=lambda epoch, batch_size: -1)
    with pytest.raises(GrowthFunctionError, match=r"epoch=0, batch_size=4\) returned -1"):
        next(iter(one.loop))


# --- several ranks ----------------------------------------------------------------------------------------------------

UNLABELLED = make_rows(
    [3 + (5 * number) % 13 for number in range(33)], unlabelled=[n for n in range(33) if n % 3]
)


def masked_mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A mean whose gradient is not a number where there is no label; that of torch's cross-entropy is zero."""
    labels = batch["labels"][:, 1:]
    picked = (
        model(batch["tokens"])[:, :-1]
        .log_softmax(-1)
        .gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    )
    return -(picked * (labels >= 0)).sum() / (labels != -100).sum()


def on_ranks(**options: Any) -> SimpleNamespace:
    """Global batches of 8 rows, of which the last of an epoch has one: some rank has none of it."""
    ranks = distributed.world_size()
    model = divided(Decoder())
    loss = options.pop("loss", None)
    loss = loss(model) if loss else (lambda batch: masked_mean(model, batch))
    options = {
        "lr_scaling": "sqrt",
        "max_grad_norm": 0.5,
        "batch_increase_function": at_epochs({1: 8 // ranks}),
        **options,
    }
    return training(model=model, rows=UNLABELLED, batch_size=8 // ranks, mean_loss=loss, **options)


def spoils_gradients_on_rank_one(model: nn.Module) -> Any:
    """A loss that is finite everywhere; the gradients of one rank are not, once."""
    calls: list[int] = []

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        loss = masked_mean(model, batch)
        return loss + torch.sqrt(0 * loss) if distributed.rank() == 1 and len(calls) == 4 else loss

    return mean_loss


def facts(one: SimpleNamespace, seen: list[SimpleNamespace]) -> dict[str, Any]:
    return {
        "rows": [step.rows for step in seen],
        "losses": [step.loss for step in seen],
        "rates": [step.rate for step in seen],
        "micro_batches": [step.result.micro_batches for step in seen],
        "progress": one.loop.progress.state_dict(),
        "parameters": whole_parameters(one.model),
        "capacity": one.loop.limit.amount,
        "out_of_memory": one.loop.num_out_of_memory,
    }


def on_two_ranks() -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = {}
    one = on_ranks(grow_beyond_maximum=True)
    found["bound"] = one.loop.find_bound(device_memory="1GiB", maximum=3).max_batch_size
    found["steps"] = one.loop.num_steps(2)
    found["whole"] = facts(one, train(one, epochs=2))

    def fails_on_rank_one(model: nn.Module) -> Any:
        return RunsOut(model, most=2 if distributed.rank() == 1 else 99, after=5)

    for syncs in (True, False):
        one = on_ranks(
            loss=fails_on_rank_one, grow_beyond_maximum=True, sync_gradients_every_micro_batch=syncs
        )
        found[f"fails, {syncs}"] = facts(one, train(one, epochs=2))
    one = on_ranks(loss=spoils_gradients_on_rank_one, on_nonfinite_loss="skip", max_grad_norm=None)
    found["skipped"] = facts(one, seen := train(one)) | {
        "finite": [step.result.is_finite for step in seen]
    }
    one = on_ranks(sync_gradients_every_micro_batch=False, grow_beyond_maximum=True)
    found["bound, gradients kept"] = one.loop.find_bound(
        device_memory="1GiB", maximum=5
    ).max_batch_size
    one = on_ranks()
    found["begun"] = facts(one, train(one, epochs=2, until=3))
    found["state"] = one.loop.state_dict()
    found["optimizer"] = {
        name: {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value
            for key, value in state.items()
        }
        for name, state in (
            (n, one.optimizer.state[p]) for n, p in one.model.named_parameters() if p.requires_grad
        )
    }
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    models = {"whole": Decoder(), "over fewer ranks": divided(Decoder(), mesh=mesh["data"])}
    models["twice"] = divided(tensor_parallel(Decoder(), mesh["tensor"]), mesh=mesh["data"])
    for name, model in models.items():
        try:
            training(model=model)
        except SettingError as error:
            found[f"refused, {name}"] = str(error)
    partly = Decoder()
    for layer in partly.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    try:
        training(model=partly)
    except SettingError as error:
        found["refused, partly"] = str(error)
    found["after a validation"] = after_a_validation()
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    one = training(model=divided(Decoder(), mesh=both), rows=UNLABELLED)
    found["replicated"] = [step.loss for step in train(one)]
    return found


def after_a_validation() -> dict[str, Any]:
    """Of a model whose root a forward without a backward has left with whole parameters, as FSDP2 does by default."""
    mesh = init_device_mesh("cpu", (distributed.world_size(),))
    model = Decoder()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def validate() -> bool:
        with torch.no_grad():
            model(torch.ones(2, 4, dtype=torch.int64))
        return all(hasattr(parameter, "device_mesh") for parameter in model.parameters())

    stays_divided = [validate()]
    one = SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loop=AdaptiveLoop(
            model,
            optimizer,
            ROWS,
            collate=collate,
            mean_loss=lambda batch: token_losses(model, batch, "mean"),
            batch_size=4,
        ),
    )
    before = whole_parameters(model)
    stays_divided.append(validate())
    bound = one.loop.find_bound(device_memory="1GiB", maximum=3).max_batch_size
    after = whole_parameters(model)
    one.loop.run(next(iter(one.loop)))
    stays_divided.append(validate())
    try:
        one.loop.run(next(iter(one.loop)))
    except ValueError as error:
        said = str(error)
    return {
        "stays divided": stays_divided,
        "bound": bound,
        "changed": [
            name for name, tensor in before.items() if not torch.equal(tensor, after[name])
        ],
        "said": said,
    }


def tensor_parallel(model: Decoder, mesh: Any) -> Decoder:
    parallelize_module(model.layers[0].mlp, mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return model


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    one = on_ranks()
    return facts(one, train(one, epochs=2))


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-12)
    assert found["progress"]["samples"] == expected["progress"]["samples"]
    assert found["progress"]["tokens"] == expected["progress"]["tokens"]
    for name, parameter in expected["parameters"].items():
        assert torch.allclose(found["parameters"][name], parameter, rtol=1e-5, atol=1e-8), name


def test_two_ranks_train_as_one_device_does(two_ranks, alone):
    for rank in two_ranks:
        assert rank["bound"] == 3
        assert rank["steps"] == len(rank["whole"]["losses"]) == 5 + 3
        assert rank["whole"]["micro_batches"] == [2, 2, 2, 2, 0, 3, 3, 1]
        assert_alike(rank["whole"], alone)
    for number, rows in enumerate(alone["rows"]):
        assert sorted(
            two_ranks[0]["whole"]["rows"][number] + two_ranks[1]["whole"]["rows"][number]
        ) == sorted(rows)


@pytest.mark.parametrize("syncs", [True, False])
def test_a_step_that_runs_out_of_memory_on_one_rank_is_retried_on_all(two_ranks, alone, syncs):
    for rank in two_ranks:
        found = rank[f"fails, {syncs}"]
        assert_alike(found, alone)
        assert (found["capacity"], found["out_of_memory"]) == (2, 1)
        assert found["micro_batches"] == [
            1,
            1,
            1,
            2,
            0,
            4,
            4,
            1,
        ]  # the last row of the first epoch has no label


def test_gradients_that_are_not_finite_on_one_rank_are_skipped_on_all(two_ranks):
    for rank in two_ranks:
        found = rank["skipped"]
        assert found["finite"].count(False) == 1
        assert all(map(math.isfinite, found["losses"]))
        assert all(parameter.isfinite().all() for parameter in found["parameters"].values())
        assert found["progress"] == two_ranks[0]["skipped"]["progress"]


def test_gradients_that_are_kept_unsharded_are_there_in_a_trial(two_ranks):
    assert [rank["bound, gradients kept"] for rank in two_ranks] == [5, 5]


@pytest.mark.parametrize("name", ["whole", "over fewer ranks", "twice"])
def test_a_model_that_is_not_divided_by_rows_alone_is_refused_on_several_ranks(two_ranks, name):
    assert (
        "fully_shard, and nothing else, has divided over all of them"
        in two_ranks[0][f"refused, {name}"]
    )


def test_a_model_of_which_a_part_was_not_divided_is_refused_by_the_names_of_its_parameters(
    two_ranks,
):
    for rank in two_ranks:
        said = rank["refused, partly"]
        assert (
            "1 parameters (embed.weight) are not divided by fully_shard" in said
        )  # and one that is frozen need not be
        assert said.endswith("call fully_shard on the whole model too, after its parts")


def on_one_rank() -> dict[str, Any]:
    """Of a model that FSDP2 divides over a single rank, and that runs out of memory in its midst."""
    found = {"after a validation": after_a_validation()}
    for phase in ("forward", "backward"):
        weights = []
        for fails in (False, True):
            model = Decoder()
            for module in (*model.layers, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            one = training(model=model, micro_batch_size=2)
            calls: list[int] = []

            def runs_out(
                loop: AdaptiveLoop = one.loop,
                calls: list[int] = calls,
                at: int = 3 if fails else -1,
            ) -> None:
                if loop.is_trial:
                    return
                calls.append(1)
                if len(calls) == at:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

            model.burden[phase] = runs_out
            train(one, until=3)
            assert one.loop.num_out_of_memory == fails
            before = whole_parameters(model)
            model.burden.clear()
            one = training(model=model, mean_loss=RunsOut(model, most=2), grow_beyond_maximum=True)
            assert one.loop.find_bound(device_memory="1GiB").max_batch_size == 2
            after = whole_parameters(model)
            found[f"{phase}, {fails}"] = [
                name for name in before if not torch.equal(before[name], after[name])
            ]
            weights.append(after)
        found[phase] = relative_error(weights[1], weights[0])
    return found


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return run_on_ranks(on_one_rank, 1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_model_that_is_divided_over_one_rank_goes_on_after_running_out_of_memory(one_rank, phase):
    assert one_rank[phase] < 1e-12
    assert (
        one_rank[f"{phase}, False"] == one_rank[f"{phase}, True"] == []
    )  # what a search has changed


def test_a_loop_goes_well_after_a_forward_of_the_user(two_ranks, one_rank):
    alone = one_rank["after a validation"]
    for found in (alone, *(rank["after a validation"] for rank in two_ranks)):
        assert found["stays divided"] == [False, False, False]  # else there is nothing to hold
        assert found["bound"] == 3
        assert found["changed"] == []
        assert "call optimizer.step() and optimizer.zero_grad()" in found["said"]


def test_a_model_that_is_replicated_and_divided_trains(two_ranks):
    one = training(rows=UNLABELLED, batch_size=8)
    assert two_ranks[0]["replicated"] == pytest.approx([step.loss for step in train(one)], rel=1e-6)


def test_one_device_goes_on_with_what_two_ranks_began(two_ranks, alone):
    begun = two_ranks[0]
    model = Decoder()
    model.load_state_dict(begun["begun"]["parameters"], strict=False)
    one = training(
        model=model,
        rows=UNLABELLED,
        batch_size=4,
        lr_scaling="sqrt",
        max_grad_norm=0.5,
        batch_increase_function=at_epochs({1: 4}),
    )
    for name, parameter in model.named_parameters():
        if name in begun["optimizer"]:
            one.optimizer.state[parameter] = begun["optimizer"][name]
    one.loop.load_state_dict(begun["state"])
    seen = train(one, epochs=2)
    found = facts(one, seen)
    assert sizes(seen) == [8, 1, 16, 16, 1]
    found["losses"] = begun["begun"]["losses"] + found["losses"]
    found["rates"] = begun["begun"]["rates"] + found["rates"]
    assert_alike(found, alone)


# --- what would train something else than was meant ---------------------------------------------------------------------


def test_all_that_the_optimizer_steps_must_be_of_the_model() -> None:
    body, head = Decoder(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(
        SettingError, match=r"model='Decoder': 2 tensors of the optimizer are no parameters of it"
    ):
        AdaptiveLoop(
            body, optimizer, ROWS, collate=collate, mean_loss=lambda batch: batch, batch_size=4
        )


def test_what_the_optimizer_leaves_out_is_said_and_its_gradients_too(caplog) -> None:
    options, rows = classes("tuples")
    net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    options |= {
        "mean_loss": lambda batch: cross_entropy(net(batch[0]), batch[1]),
        "row_length": 1,
        "batch_size": 8,
    }
    head = torch.optim.SGD(net[2].parameters(), lr=RATE)

    def leaves_out() -> list[str]:
        caplog.clear()
        AdaptiveLoop(net, head, rows, **options)
        return [record.getMessage() for record in caplog.records]

    (warning,) = leaves_out()
    assert warning.startswith(
        "4 parameters (0.weight, 0.bias, 1.weight and 1 more) need gradients and are not the optimizer's"
    )
    loop = AdaptiveLoop(net, head, rows, **options)
    steps_of_loop = iter(loop)
    loop.run(next(steps_of_loop))
    second = next(steps_of_loop)
    with pytest.raises(ValueError, match=r"there before a step: call optimizer\.step\(\)"):
        loop.run(second)
    head.step()
    head.zero_grad()
    expected = r"there before a step: 4 parameters \(0\.weight, .*\) are not the optimizer's.*requires_grad_\(False\)"
    with pytest.raises(ValueError, match=expected):
        loop.run(second)
    net.zero_grad()
    assert loop.run(second).rows == 8
    net[:2].requires_grad_(False)
    assert leaves_out() == []


def test_gradients_that_are_there_are_not_added_to() -> None:
    one = training()
    rows = iter(one.loop)
    one.loop.run(next(rows))
    second = next(rows)
    with pytest.raises(
        ValueError,
        match=r"gradients are there before a step: .*set gradient_accumulation_steps=1 in a trainer",
    ):
        one.loop.run(second)
    one.optimizer.step()
    one.optimizer.zero_grad(set_to_none=False)
    assert one.loop.run(second).rows == 4


def test_a_step_that_failed_can_be_run_again_and_none_is_skipped() -> None:
    one = training(on_out_of_memory="raise")
    undisturbed = [step.rows for step in train(training())]
    loss = RunsOut(one.model, most=0, times=1)
    failing = training(model=one.model, on_out_of_memory="raise", mean_loss=loss)
    seen = []
    for rows in failing.loop:
        try:
            failing.loop.run(rows)
        except torch.OutOfMemoryError:
            failing.optimizer.zero_grad()
            failing.loop.run(rows)
        failing.optimizer.step()
        failing.optimizer.zero_grad()
        seen.append([row["row"] for row in rows])
    assert seen == undisturbed
    assert failing.loop.progress.epoch == 1


def test_a_step_that_is_skipped_is_noticed_with_the_next() -> None:
    loop = training().loop
    rows = iter(loop)
    next(rows)
    second = next(rows)
    with pytest.raises(ValueError, match="has not been run"):
        loop.run(second)


def test_another_batch_or_rule_does_not_go_on_in_silence() -> None:
    state = training(lr_scaling="linear").loop.state_dict()
    with pytest.raises(SettingError, match=r"batch_size=8: the saved loop was built with 4"):
        training(lr_scaling="linear", batch_size=8).loop.load_state_dict(state)
    with pytest.raises(SettingError, match=r"lr_scaling='none'"):
        training().loop.load_state_dict(state)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_grad_norm", -1.0),
        ("max_grad_norm", 0),
        ("max_grad_norm", "1"),
        ("row_length", 0),
        ("row_length", "tokens"),
        ("grow_beyond_maximum", "false"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(SettingError, match=f"{option}={value!r}"):
        training(**{option: value})


def test_labels_that_cannot_be_counted_are_refused() -> None:
    one = training(num_labels=lambda batch: 0.8)
    with pytest.raises(
        SettingError, match=r"num_labels=0\.8: give a function that returns a whole number"
    ):
        one.loop.run(next(iter(one.loop)))


def test_a_dataset_without_rows_by_number_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(ROWS)

    with pytest.raises(
        SettingError, match=r"dataset='Stream': a Stream has no row by its number; give a map-style"
    ):
        training(rows=Stream())


def test_a_collate_function_may_take_from_its_rows() -> None:
    def takes(rows: list[Any]) -> Any:
        return collate([{"row": row.pop("row"), **row} for row in rows])

    one, other = training(collate=takes, rows=[dict(row) for row in ROWS]), training()
    assert one.loop.find_bound(device_memory="8MiB").max_batch_size > 0
    assert [step.loss for step in train(one)] == [step.loss for step in train(other)]


# --- steps by tokens, other orders and clocks -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
def test_steps_by_tokens_hold_them_and_each_row_is_trained_once_an_epoch(order: str) -> None:
    one = training(sample_order=order, sample_window=20, batch_tokens=60, micro_batch_tokens=40)
    seen = train(one, epochs=2)
    lengths = {number: len(row["tokens"]) for number, row in enumerate(ROWS)}
    for epoch in (0, 1):
        steps_of_epoch = [step for step in seen if step.epoch == epoch]
        assert sorted(number for step in steps_of_epoch for number in step.rows) == list(
            range(len(ROWS))
        )
        assert all(sum(lengths[number] for number in step.rows) <= 60 for step in steps_of_epoch)
    assert max(step.result.micro_batches for step in seen) > 1
    assert one.loop.progress.tokens == 2 * sum(lengths.values())


def test_steps_by_tokens_resume_to_the_bit() -> None:
    options: dict[str, Any] = {
        "batch_tokens": 60,
        "micro_batch_tokens": 60,
        "sample_order": "seqlen",
        "lr_clock": "tokens",
    }
    whole = training(schedule=lambda step: 0.9**step, **options)
    train(whole, epochs=2)
    first = training(schedule=lambda step: 0.9**step, **options)
    train(first, until=4)
    second = training(schedule=lambda step: 0.9**step, **options)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.loop.load_state_dict(first.loop.state_dict())
    train(second, epochs=2)
    assert training_state(second.model, second.optimizer) == training_state(
        whole.model, whole.optimizer
    )


def test_as_many_tokens_at_once_as_fit_need_a_bound_first() -> None:
    one = training(batch_tokens=60)
    with pytest.raises(SettingError, match="micro_batch_tokens='auto': call find_bound first"):
        one.loop.run(next(iter(one.loop)))
    bound = one.loop.find_bound(device_memory="400KiB")
    (rows, *_) = list(one.loop)
    one.loop.run(rows)
    assert one.loop.limit.amount == bound.max_batch_size * bound.sequence_length
    assert one.loop.limit.unit == "tokens"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"micro_batch_tokens": 8, "micro_batch_size": 2},
            "micro_batch_tokens=8: micro_batch_size is given too",
        ),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens=0: give auto, or a whole number"),
        ({"batch_tokens": 3}, "batch_tokens=3: row .* has .* tokens"),
        (
            {"sample_order": "longest"},
            "sample_order='longest': give one of dataloader, random, seqlen",
        ),
        ({"lr_clock": "epochs"}, "lr_clock='epochs': give one of"),
    ],
)
def test_settings_of_tokens_and_orders_that_cannot_be_used_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        list(training(**options).loop)


def test_a_trial_can_be_told_from_training() -> None:
    calls: list[bool] = []
    model = Decoder()

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(one.loop.is_trial)
        return token_losses(model, batch, "mean")

    one = training(model=model, mean_loss=loss)
    one.loop.find_bound(device_memory="400KiB")
    assert calls
    assert all(calls)
    calls.clear()
    (first,) = train(one, until=1)
    # The whole batch and its parts are tried before the first split.
    parts = first.result.micro_batches
    assert calls == [True] * (1 + parts) + [False] * parts
    calls.clear()
    train(one, until=3)
    assert calls
    assert not any(calls)


def test_a_schedule_that_resumes_where_less_fits_follows_the_new_bound() -> None:
    larger = training(batch_size_schedule=lambda progress: 4 if progress.steps < 1 else 12)
    larger.loop.find_bound(device_memory="1GiB", maximum=16)
    train(larger, until=1)
    smaller = training(batch_size_schedule=lambda progress: 4 if progress.steps < 1 else 12)
    smaller.loop.load_state_dict(larger.loop.state_dict())
    smaller.loop.find_bound(device_memory="1GiB", maximum=8)
    assert sizes(train(smaller)) == [8, 8, 8, 8, 4]


def test_steps_by_tokens_that_were_counted_before_a_state_was_loaded_are_planned_again() -> None:
    saved = training(batch_tokens=60, micro_batch_tokens=60).loop.state_dict()
    saved = of_ranks(saved, 2)
    one, fresh = (training(batch_tokens=60, micro_batch_tokens=60) for _ in range(2))
    assert one.loop.num_steps(1) > 0
    for loop in (one.loop, fresh.loop):
        loop.load_state_dict(saved)
    assert one.loop.num_steps(1) == fresh.loop.num_steps(1)
    assert [len(rows) for rows in one.loop] == [len(rows) for rows in fresh.loop]


# --- layouts ----------------------------------------------------------------------------------------------------------


def llama(**options: Any) -> SimpleNamespace:
    """Training of a small model of transformers, on rows that it names as it does."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=53, num_key_value_heads=2, attn_implementation="sdpa", **shape)
    model = LlamaForCausalLM(config)

    def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate([{"tokens": row["input_ids"], "labels": row["labels"]} for row in rows])
        return {"input_ids": batch["tokens"], "labels": batch["labels"]}

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return cross_entropy(logits, batch["labels"][:, 1:].flatten())

    given = {
        "model": model,
        "collate": padded,
        "mean_loss": mean_loss,
        "optimizer": torch.optim.SGD,
        "batch_size": 8,
    }
    rows = [
        {"row": row["row"], "input_ids": row["tokens"], "labels": row["labels"]} for row in ROWS
    ]
    return training(**{"rows": rows, **given, **options})


@pytest.mark.parametrize("limit", [{"micro_batch_size": 3}, {"micro_batch_tokens": 40}], ids=str)
@pytest.mark.parametrize("layout", ["packed", "grouped"])
def test_a_model_of_transformers_trains_alike_in_each_layout(
    layout: str, limit: dict[str, int]
) -> None:
    found, expected = (llama(micro_batch_layout=kind, **limit) for kind in (layout, "padded"))
    seen, padded = train(found), train(expected)
    assert [step.rows for step in seen] == [step.rows for step in padded]
    assert [step.loss for step in seen] == pytest.approx([step.loss for step in padded], rel=1e-5)
    assert all(step.result.padding_fraction == 0 for step in seen) == (layout == "packed")
    assert relative_error(whole_parameters(found.model), whole_parameters(expected.model)) < 1e-4


def test_packed_micro_batches_that_run_out_of_memory_are_run_again() -> None:
    one = llama(micro_batch_layout="packed", micro_batch_tokens=100)

    def runs_out(module: nn.Module, positional: Any, named: dict[str, Any]) -> None:
        if named["input_ids"].numel() > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    one.model.register_forward_pre_hook(runs_out, with_kwargs=True)
    seen, padded = train(one), train(llama(micro_batch_size=8))
    assert [step.rows for step in seen] == [step.rows for step in padded]
    assert [step.loss for step in seen] == pytest.approx([step.loss for step in padded], rel=1e-5)
    assert one.loop._sizer.limit(8).amount <= 30


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [{"input_ids": [1, 2, 3]} for _ in range(8)],
            "rows are no mappings with `labels` and `tokens` or `input_ids`",
        ),
        ([torch.arange(5) for _ in range(8)], "rows are no mappings"),
    ],
)
def test_rows_that_cannot_be_packed_are_refused(rows: list[Any], says: str) -> None:
    with pytest.raises(
        SettingError, match=f"^micro_batch_layout='packed': {says}.*; or give grouped$"
    ):
        llama(rows=rows, micro_batch_layout="packed", row_length=len)


def test_an_unknown_layout_or_objective_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"^micro_batch_layout='loose': give one of padded, grouped, packed$"
    ):
        StepOptions(micro_batch_layout="loose")
    with pytest.raises(SettingError, match=r"^objective='fast': give one of throughput, largest$"):
        llama(micro_batch_tokens="auto").loop.find_bound(objective="fast")


def test_what_is_fastest_is_chosen_and_kept_in_the_saved_state() -> None:
    one = llama(micro_batch_tokens="auto")
    before = training_state(one.model, one.optimizer)
    found = one.loop.find_bound(device_memory="1GiB", maximum=8)
    assert training_state(one.model, one.optimizer) == before
    fastest = found.throughput
    assert fastest is not None
    assert {trial.kind for trial in fastest.trials} <= {"grouped", "packed"}
    assert one.loop._sizer.layout.kind == fastest.kind
    assert one.loop._sizer.limit(8) == fastest.limit
    train(one, until=2)
    state, weights = (torch.load(saved(each.state_dict())) for each in (one.loop, one.model))
    rest = train(one)
    for finds_again in (False, True):
        again = llama(micro_batch_tokens="auto")
        again.model.load_state_dict(weights)
        again.loop.load_state_dict(state)
        if finds_again:
            assert again.loop.find_bound(device_memory="1GiB", maximum=8).throughput is None
        assert again.loop._sizer.layout == one.loop._sizer.layout
        assert again.loop._sizer.limit(8) == fastest.limit
        went_on = train(again)
        assert [(step.rows, step.loss) for step in went_on] == [
            (step.rows, step.loss) for step in rest
        ]


def test_a_saved_choice_does_not_replace_what_was_found_before_it_was_loaded() -> None:
    one = llama(micro_batch_tokens="auto")
    one.loop.find_bound(device_memory="1GiB", maximum=8)
    smaller = llama(micro_batch_tokens="auto")
    found = smaller.loop.find_bound(device_memory="1GiB", maximum=1)
    smaller.loop.load_state_dict(one.loop.state_dict())
    assert found.throughput is not None
    assert smaller.loop._sizer.throughput == found.throughput
    assert smaller.loop.max_batch_size == 1


def saved(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    "now",
    [{"micro_batch_tokens": 30}, {"micro_batch_tokens": "auto", "micro_batch_layout": "padded"}],
)
def test_what_is_set_now_counts_more_than_what_a_saved_loop_found_fastest(
    now: dict[str, Any],
) -> None:
    one = llama(micro_batch_tokens="auto")
    one.loop.find_bound(device_memory="1GiB", maximum=8)
    again = llama(**now)
    again.loop.load_state_dict(one.loop.state_dict())
    assert again.loop._sizer.layout.kind == "padded"
    assert again.loop._sizer.throughput is None


def test_the_largest_is_taken_where_that_is_asked_for() -> None:
    one = llama(micro_batch_tokens="auto")
    found = one.loop.find_bound(device_memory="1GiB", maximum=8, objective="largest")
    assert found.throughput is None
    assert one.loop._sizer.limit(8).amount == found.max_batch_size * max(
        len(row["tokens"]) for row in ROWS
    )
