"""AdaptiveLoop: growing steps, resuming, and refused arguments."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.loops import RATE, ROWS, RunsOut, of_ranks, sizes, train, training
from support.same_state import assert_same
from support.sharded_model import Decoder, collate, token_losses, training_state
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from adaptive_batch.errors import GrowthFunctionError, NonfiniteLossError, SettingError
from adaptive_batch.report import RunLog, audit, read_records, write_report
from adaptive_batch.schedules import at_epochs, geometric
from adaptive_batch.training import AdaptiveLoop


def test_batch_size_max_searches_when_an_epoch_begins_or_len_is_called():
    one = training(batch_size="max")
    assert one.loop.max_batch_size is None
    assert len(one.loop) == 1
    assert one.loop.max_batch_size == len(ROWS)
    assert sizes(train(one)) == [len(ROWS)]
    assert sizes(train(training(batch_size="max"))) == [len(ROWS)]


def test_a_batch_grows_beyond_the_bound_in_micro_batches():
    one = training(batch_increase_function=at_epochs({1: 20}), grow_beyond_maximum=True)
    one.loop.find_bound(device_memory="1GiB", maximum=11)
    seen = train(one, epochs=2)
    assert sizes(seen, 1) == [24, 16]
    assert [step.result.micro_batches for step in seen if step.epoch == 1] == [3, 2]


def test_only_the_rows_of_the_next_step_are_accepted():
    one = training()
    with pytest.raises(
        ValueError, match="these 4 rows are not those of the next step, which has 0"
    ):
        one.loop.run(ROWS[:4])
    rows = next(iter(one.loop))
    with pytest.raises(
        ValueError, match="these 3 rows are not those of the next step, which has 4"
    ):
        one.loop.run(rows[:3])
    one.loop.run(rows)
    assert one.loop.progress.samples == 4
    steps_of_epoch = iter(one.loop)
    next(steps_of_epoch)
    with pytest.raises(ValueError, match="run each step once, in the order of the loop"):
        one.loop.run(next(steps_of_epoch))


class Wrapped(torch.optim.SGD):
    """A wrapper of an optimizer, like accelerate's, which has no hooks."""

    def __init__(self, weights: Any, lr: float) -> None:
        self.optimizer = torch.optim.SGD(weights, lr)
        self.param_groups = self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Wrapped])
def test_a_state_cannot_be_saved_before_optimizer_step(optimizer):
    """A run resumed from such a state would lose the step."""
    one = training(optimizer=optimizer)
    for rows in one.loop:
        one.loop.run(rows)
        with pytest.raises(ValueError, match=r"call optimizer\.step\(\) and optimizer\.zero_grad"):
            one.loop.state_dict()
        if one.loop.progress.steps % 2:
            one.optimizer.step()
            one.loop.state_dict()
        one.model.zero_grad(set_to_none=False)
        one.loop.state_dict()


def test_a_state_saved_before_zero_grad_resumes_bit_for_bit():
    options = {"lr_scaling": "sqrt", "batch_increase_function": geometric(2.0)}
    one, other = training(**options), training(**options)
    for rows in one.loop:
        one.optimizer.zero_grad()
        one.loop.run(rows)
        one.optimizer.step()
        if one.loop.progress.steps == 3:
            # Save between optimizer.step() and zero_grad().
            other.loop.load_state_dict(copy.deepcopy(one.loop.state_dict()))
            other.model.load_state_dict(one.model.state_dict())
            other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    one.optimizer.zero_grad()
    seen, seen_by_other = train(one, epochs=2), train(other, epochs=2)
    assert seen == seen_by_other[-len(seen) :]
    assert (len(seen_by_other), other.loop.progress) == (7 + len(seen), one.loop.progress)
    assert_same(
        training_state(other.model, other.optimizer), training_state(one.model, one.optimizer)
    )


@pytest.mark.parametrize("state", [None, {}, [], {"batches": {}}], ids=str)
def test_an_invalid_state_is_refused(state):
    with pytest.raises(SettingError, match=r"^state='\w+': give the result of state_dict\(\) of a"):
        training().loop.load_state_dict(state)


@pytest.mark.parametrize("change", [lambda rows: rows.pop(), lambda rows: rows.append(rows[0])])
def test_a_dataset_whose_length_changes_is_refused_before_the_next_step(change):
    rows = list(ROWS)
    steps = iter(training(rows=rows).loop)
    next(steps)
    change(rows)
    with pytest.raises(SettingError, match=rf"dataset='{len(rows)} rows': it had {len(ROWS)} when"):
        next(steps)


def spoiled(at: int, **options: Any) -> SimpleNamespace:
    """Return training with a NaN loss in its `at`-th computation."""
    model, calls = Decoder(), []

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        return token_losses(model, batch, "mean") * (float("nan") if len(calls) == at else 1.0)

    return training(model=model, mean_loss=mean_loss, **options)


def test_a_skipped_step_consumes_its_rows_and_does_not_change_training():
    one = spoiled(3, on_nonfinite_loss="skip", lr_scaling="linear")
    train(one, until=2)
    before = training_state(one.model, one.optimizer)
    (third,) = train(one, until=3)
    assert not third.result.is_finite
    assert training_state(one.model, one.optimizer) == before
    assert all(step.result.is_finite for step in train(one))
    assert one.loop.progress.samples == len(ROWS)


def test_a_stopped_step_can_run_again():
    scaling = {"lr_scaling": "linear", "reference_batch_size": 4}
    one = spoiled(2, on_nonfinite_loss="stop", batch_size=8, **scaling)
    train(one, until=1)
    rows = next(iter(one.loop))
    with pytest.raises(NonfiniteLossError, match="step 2: the loss is nan"):
        one.loop.run(rows)
    assert one.optimizer.param_groups[0]["lr"] == RATE
    assert one.loop.run(rows).is_finite
    assert one.loop.progress.steps == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", 3),
        ("shuffle", False),
        ("rows", ROWS[:39]),
        ("lr_scaling", "linear"),
        ("batch_size", 8),
    ],
)
def test_a_state_of_other_rows_or_settings_is_refused_by_its_key(option, value):
    state = training().loop.state_dict()
    with pytest.raises(SettingError, match=f"^{'dataset' if option == 'rows' else option}="):
        training(**{option: value}).loop.load_state_dict(state)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


COLUMNS = {key: [row[key] for row in ROWS] for key in ROWS[0]}


REFUSED: dict[str, list[Any]] = {
    "batch_size": [0],
    "mean_loss": [5],
    "collate": [None],
    "optimizer": [lambda weights, lr: [torch.optim.SGD(weights)]],
    "micro_batch_size": [2.5],
    "micro_batch_tokens": [0],
    "micro_batch_layout": ["loose"],
    "batch_tokens": [3],
    "dataset": [[], COLUMNS, Stream()],
    "sample_order": ["longest"],
    "lr_clock": ["epochs"],
    "lr_scaling": ["square"],
    "on_out_of_memory": ["skip"],
    "reference_batch_size": ["8k"],
    "batch_increase_function": [1],
    "max_grad_norm": [-1.0, 0, "1"],
    "row_length": [0, "tokens"],
    "grow_beyond_maximum": ["false"],
    "to_device": ["cuda"],
    "oom_policy": ["shrink"],
    "memory": [1],
    "sync_gradients_every_micro_batch": ["no"],
    "overlap_reduction": [1],
    "event": [3],
}


@pytest.mark.parametrize("key", REFUSED)
def test_an_invalid_argument_is_refused_by_name(key):
    for value in REFUSED[key]:
        with pytest.raises(SettingError, match=f"^{key}="):
            list(training(**{"rows" if key == "dataset" else key: value}).loop)


def test_options_that_exclude_each_other_are_refused_by_name():
    rules = {"batch_increase_function": max, "batch_size_schedule": sum}
    for options in ({"micro_batch_size": 2, "micro_batch_tokens": 8}, rules):
        with pytest.raises(SettingError, match=f"^{[*options][1]}="):
            training(**options)
    for length in (2.5, None, -1):
        one = training(row_length=lambda row, length=length: length, micro_batch_tokens=64)
        with pytest.raises(SettingError, match=f"row_length={length!r}: "):
            one.loop.run(next(iter(one.loop)))


def test_a_micro_batch_that_does_not_fit_and_an_invalid_increment_are_refused():
    one = training(micro_batch_size=12)
    finding = r"a search of up to 7 rows of \d+ tokens found that 7 rows fit; give 7 or less"
    with pytest.raises(SettingError, match=f"micro_batch_size=12: {finding}"):
        one.loop.find_bound(device_memory="1GiB", maximum=7)
    unusable = {"headroom": 2, "device_memory": "lots", "maximum": 0, "objective": "fast"}
    for option, value in unusable.items():
        with pytest.raises(SettingError, match=f"^{option}={value!r}: "):
            one.loop.find_bound(**{option: value})
    with pytest.raises(SettingError, match=r"^device_memory='999TiB': .* or null \(None\) for all"):
        one.loop.find_bound(device_memory="999TiB")
    one = training(batch_increase_function=lambda epoch, batch_size: -1)
    with pytest.raises(GrowthFunctionError, match=r"epoch=0, batch_size=4\) returned -1"):
        next(iter(one.loop))


def test_an_optimizer_with_tensors_outside_of_the_model_is_refused() -> None:
    foreign = nn.Linear(2, 2).parameters()
    with pytest.raises(SettingError, match="model='Decoder': 2 tensors of the optimizer are no"):
        training(optimizer=lambda weights, lr: torch.optim.SGD([*weights, *foreign], lr))


def test_gradients_of_parameters_without_an_optimizer_are_refused(
    caplog,
) -> None:
    rows = [(torch.randn(5), number % 3) for number in range(32)]
    net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    head = torch.optim.SGD(net[2].parameters(), lr=RATE)
    options = {
        "collate": default_collate,
        "mean_loss": lambda batch: cross_entropy(net(batch[0]), batch[1]),
        "num_labels": lambda batch: len(batch[1]),
    }
    loop = AdaptiveLoop(net, head, rows, row_length=1, batch_size=8, **options)
    (record,) = caplog.records
    left_out = "the optimizer leaves out 4 parameters (0.weight, 0.bias, 1.weight and 1 more)"
    assert record.getMessage().startswith(f"{left_out}:")
    steps_of_loop = iter(loop)
    loop.run(next(steps_of_loop))
    second = next(steps_of_loop)
    with pytest.raises(ValueError, match=r"are not zero: call optimizer\.step\(\)"):
        loop.run(second)
    head.step()
    head.zero_grad(set_to_none=False)
    with pytest.raises(ValueError, match=r"of 4 parameters .*requires_grad_\(False\)"):
        loop.run(second)
    net.zero_grad(set_to_none=False)
    assert loop.run(second).rows == 8
    net[:2].requires_grad_(False)
    caplog.clear()
    AdaptiveLoop(net, head, rows, row_length=1, batch_size=8, **options)
    assert not caplog.records


def test_a_failed_step_can_run_again_with_the_same_random_numbers() -> None:
    undisturbed = train(training(model=Decoder(draws=True)))
    model = Decoder(draws=True)
    loss = RunsOut(model, most=0, times=1)
    one = training(model=model, on_out_of_memory="raise", mean_loss=loss)
    rows = next(iter(one.loop))
    with pytest.raises(torch.OutOfMemoryError):
        one.loop.run(rows)
    one.optimizer.zero_grad()
    first = one.loop.run(rows)
    one.optimizer.step()
    one.optimizer.zero_grad()
    rest = train(one)
    assert [[row["row"] for row in rows], *(step.rows for step in rest)] == [
        step.rows for step in undisturbed
    ]
    assert [first.loss, *(step.loss for step in rest)] == [step.loss for step in undisturbed]
    assert one.loop.progress.epoch == 1


def test_a_collate_function_may_pop_keys_from_its_rows() -> None:
    def takes(rows: list[Any]) -> Any:
        return collate([{"row": row.pop("row"), **row} for row in rows])

    one, other = training(collate=takes, rows=[dict(row) for row in ROWS]), training()
    assert one.loop.find_bound(device_memory="8MiB").max_batch_size > 0
    assert [step.loss for step in train(one)] == [step.loss for step in train(other)]


def test_a_resumed_schedule_follows_a_smaller_bound() -> None:
    rule = lambda progress: 4 if progress.steps < 1 else 12  # noqa: E731
    larger, smaller = (training(batch_size_schedule=rule) for _ in range(2))
    larger.loop.find_bound(device_memory="1GiB", maximum=16)
    train(larger, until=1)
    smaller.loop.load_state_dict(larger.loop.state_dict())
    smaller.loop.find_bound(device_memory="1GiB", maximum=8)
    assert sizes(train(smaller)) == [8, 8, 8, 8, 4]


def test_loading_a_state_discards_an_earlier_plan_of_token_steps() -> None:
    saved = training(batch_tokens=60, micro_batch_tokens=60).loop.state_dict()
    saved = of_ranks(saved, 2)
    one, fresh = (training(batch_tokens=60, micro_batch_tokens=60) for _ in range(2))
    assert one.loop.num_steps(1) > 0
    for loop in (one.loop, fresh.loop):
        loop.load_state_dict(saved)
    assert one.loop.num_steps(1) == fresh.loop.num_steps(1)
    assert [len(rows) for rows in one.loop] == [len(rows) for rows in fresh.loop]


def logged(folder, *, state=None, epochs=2, until=10**9, **options):
    """Train a loop that logs into a folder, from `state` if it is given; return the loop."""
    with RunLog(folder) as run_log:
        made = training(event=run_log, batch_increase_function=geometric(2.0), **options)
        if state is not None:
            made.loop.load_state_dict(state)
        train(made, epochs=epochs, until=until)
    return made.loop


def test_the_audit_of_a_logged_loop_holds_and_its_report_is_written(tmp_path):
    logged(tmp_path, micro_batch_size=3)
    proof = audit(tmp_path)
    assert proof.holds, proof.lines
    epochs = [line[:8] for line in proof.lines if line.startswith("epoch ")]
    assert epochs == ["epoch 0 ", "epoch 1 "]
    assert all(path.stat().st_size for path in write_report(tmp_path))
    records = read_records(tmp_path / "adaptive_batch" / "run.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    assert [step["batch_size"] for step in steps] == [4] * 10 + [8] * 5
    assert all(step["lr"] > 0 and step["seconds"] > 0 for step in steps)
    assert steps[0]["micro_batches"] == 2


@pytest.mark.parametrize("steps", [3, 10, 12])
def test_the_audit_of_a_resumed_loop_holds(tmp_path, steps):
    loop = logged(tmp_path, until=steps)
    # The restart repeats the step after the save.
    state = loop.state_dict()
    logged(tmp_path, state=state, until=steps + 1)
    logged(tmp_path, state=state)
    proof = audit(tmp_path)
    assert proof.holds, proof.lines
    assert f"starts   at step 0, {steps}, {steps}" in proof.lines
