"""Logging and skipping of nonfinite steps, and the mean loss of full batches."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.schedules import Progress
from adaptive_batch.training import FullBatchLoss, NonfiniteSteps, StepResult

NAN, INF = float("nan"), float("inf")


def steps_of(policy, **options):
    events, dropped = [], []

    def event(kind, message, *, prints=True, **facts):
        events.append(SimpleNamespace(kind=kind, message=message, prints=prints, **facts))

    steps = NonfiniteSteps(policy, lambda: dropped.append(1), event=event, **options)
    return steps, events, dropped


def result(loss, norm=None):
    labels = torch.tensor(8)
    return StepResult(
        loss, labels, 4, 8, 1, 0.0, {}, grad_norm=None if norm is None else torch.tensor(norm)
    )


def test_the_first_of_several_nonfinite_steps_is_printed_and_all_are_counted():
    steps, events, dropped = steps_of("warn")
    losses = [2.0, NAN, INF, -INF, -3.0, NAN]
    for step, loss in enumerate(losses):
        assert not steps.drop_if_nonfinite(result(loss), Progress(steps=step), lr=0.1)
    assert [(event.kind, event.step, event.prints, event.skipped) for event in events] == [
        ("nonfinite_loss", 2, True, False),
        ("nonfinite_loss", 3, False, False),
        ("nonfinite_loss", 4, False, False),
        ("nonfinite_loss", 6, True, False),
    ]
    for _ in range(2):
        steps.end_epoch(Progress(epoch_steps=7))
    assert [(event.kind, event.steps) for event in events[4:]] == [("nonfinite_steps", 4)]
    assert dropped == []


def test_gradients_are_checked_only_if_nonfinite_steps_are_skipped():
    steps, events, dropped = steps_of("skip")
    for norm, drops in ((None, False), (3.0, False), (NAN, True), (INF, True)):
        assert steps.drop_if_nonfinite(result(1.0, norm), Progress(), lr=0.1) == drops
    assert (len(dropped), [event.skipped for event in events]) == (2, [True, True])
    steps, events, _ = steps_of("warn")
    assert not steps.drop_if_nonfinite(result(1.0, NAN), Progress(), lr=0.1)
    assert not events


STEPS = st.lists(st.tuples(st.floats(0, 10), st.integers(0, 50), st.integers(1, 9)), max_size=60)


@given(STEPS, st.integers(1, 20), st.data())
def test_each_step_counts_in_one_mean_weighted_by_its_label_tokens(steps, rows, data):
    cut = data.draw(st.integers(0, len(steps)))
    meter, open_steps = FullBatchLoss(rows), []
    for number, (loss, labels, size) in enumerate(steps):
        if number == cut:  # a restart between two steps changes no bit
            state, meter = meter.state_dict(), FullBatchLoss(1)
            meter.load_state_dict(state)
        mean = meter.add(loss, label_tokens=labels, rows=size)
        open_steps.append((loss, labels, size))
        full = sum(size for *_, size in open_steps) >= rows
        total = sum(labels for _, labels, _ in open_steps)
        assert (mean is not None) == (full and total > 0)
        if mean is not None:
            expected = sum(loss * labels for loss, labels, _ in open_steps) / total
            assert mean == (loss if len(open_steps) == 1 else pytest.approx(expected))
        if full:
            open_steps = []
