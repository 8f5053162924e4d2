"""Steps by tokens, the order of their rows and their learning rate in runs of the recipe."""

from itertools import chain, pairwise

import pytest
from support import components
from support.cli import (
    OURS,
    figures,
    records,
)

LENGTHS = [5 + (11 * row) % 50 for row in range(32)]  # all different
ROWS = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={LENGTHS}")
WATCHED = (
    "model._component_=support.components.watched",
    "metric_logger._component_=support.components.Watching",
)
SGD = ("optimizer=torch.optim.SGD", "optimizer.lr=0.05")
BUDGET = 150
BASE = (*ROWS, *WATCHED, *SGD, f"batch_tokens={BUDGET}", "micro_batch_tokens=4096")


def epochs_of_steps(finished):
    """For each epoch the row numbers of each of its steps, in the order of use."""
    steps = [
        list(chain.from_iterable(micro_batch.rows for micro_batch in step))
        for step in components.STEPS
    ]
    epochs = figures(finished, "epoch")
    return [
        [rows for rows, at in zip(steps, epochs, strict=True) if at == epoch]
        for epoch in sorted(set(epochs))
    ]


def tokens(rows):
    return sum(LENGTHS[row] for row in rows)


def tokens_of_steps(finished):
    return [after - before for before, after in pairwise([0, *figures(finished, "tokens_seen")])]


# --- which rows a step holds

WAYS = {
    "as they come": (),
    "short to long in windows": ("sample_order=seqlen", "sample_window=16"),
    "three rows or more": ("min_rows_per_batch=3",),
    "four rows or fewer": ("max_rows_per_batch=4", "sample_order=seqlen"),
    "equal micro-batches": ("uniform_micro_batches=both",),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides", WAYS.values(), ids=WAYS)
def test_every_row_is_trained_once_an_epoch_and_no_step_is_over_its_tokens(small, overrides):
    finished = small.run_in_process(OURS, *BASE, "epochs=2", *overrides)
    epochs = epochs_of_steps(finished)
    assert len(epochs) == 2
    for steps in epochs:
        assert sorted(chain.from_iterable(steps)) == list(range(32))
        least = 3 if "min_rows_per_batch=3" in overrides else 0
        assert all(tokens(step) <= BUDGET or len(step) == least for step in steps)
        assert all(len(step) >= least for step in steps[:-1])
        assert len(steps) <= 1.5 * tokens(range(32)) / BUDGET or "max_rows_per_batch=4" in overrides
        if "max_rows_per_batch=4" in overrides:
            assert max(map(len, steps)) == 4
    assert tokens_of_steps(finished) == [tokens(rows) for rows in chain.from_iterable(epochs)]
    assert figures(finished, "batch_size") == [len(rows) for rows in chain.from_iterable(epochs)]


def test_the_micro_batch_changes_no_step(small):
    whole = small.run_in_process(OURS, *BASE, "epochs=1")
    steps = [sorted(step) for step in epochs_of_steps(whole)[0]]
    largest = ("micro_batch_tokens=null", "probe.device_memory=6MiB", "probe.objective=largest")
    for overrides in (("micro_batch_tokens=64",), largest):
        split = small.run_in_process(OURS, *BASE, "epochs=1", *overrides)
        assert [sorted(step) for step in epochs_of_steps(split)[0]] == steps
        assert max(figures(split, "micro_batches")) > 1
        assert figures(split, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-5)
    (plan,) = records(split, "plan")  # nothing said what is run at once: as many tokens as fit
    bound = records(split, "bound")[-1]["max_batch_size"]
    assert (plan["limit"], plan["unit"], plan["batch_tokens"]) == (
        bound * max(LENGTHS),
        "tokens",
        BUDGET,
    )


# --- the learning rate

RATE = 0.01
SHORT_END = (
    *ROWS,
    *WATCHED,
    "optimizer=torch.optim.SGD",
    f"optimizer.lr={RATE}",
    "epochs=1",
    "batch_size=12",
)


def test_the_default_reference_is_the_configured_global_batch(small):
    accumulated = small.run_in_process(
        OURS, *SHORT_END, "lr_scaling=linear", "batch_size=4", "gradient_accumulation_steps=4"
    )
    assert figures(accumulated, "lr") == pytest.approx([RATE, RATE])
    found = small.run_in_process(
        OURS,
        *SHORT_END,
        "lr_scaling=linear",
        "use_maximum_batch_size=True",
        "probe.device_memory=1GiB",
    )
    assert figures(found, "batch_size") == [32]
    assert figures(found, "lr") == pytest.approx([RATE * 32 / 12])
