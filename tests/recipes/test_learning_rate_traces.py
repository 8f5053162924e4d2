"""The rate of each step where the batch or the end of training changes, through the real command
line.

Rates of a constant batch: tests/unit/training/test_rate_of_steps.py, and tests/parity/.
"""

import math

import pytest
from support.cli import OURS, cosine_after, figures, records, resume_run, same_weights, weights
from support.stops import stopped_after

RATE = 0.01
BASE = (
    "dataset._component_=support.components.OfLengths",
    f"dataset.lengths={[12] * 32}",
    "optimizer=torch.optim.SGD",
    f"optimizer.lr={RATE}",
    "drop_last=False",
)


def assert_cosine(steps, total):
    """Assert that the rates are those of a cosine over `total` steps."""
    assert steps[-1]["step"] == total
    for step in steps:
        done = step["step"] - 1
        factor = 0.5 * (1 + math.cos(math.pi * (done - 3) / (total - 3)))
        assert step["lr"] == pytest.approx(RATE * (done / 3 if done < 3 else factor))


def test_a_schedule_by_steps_ends_at_the_last_step_after_the_batch_size_changed(small):
    """18 of 2 x 16 steps of 2 rows are done; the last 28 rows are 4 steps of 8."""
    settings = (*BASE, *cosine_after(3), "lr_clock=steps", "epochs=2", "save_every_n_steps=6")
    first = small.run_in_process(OURS, *settings, "batch_size=2")
    assert_cosine(records(first, "step"), 32)
    folder = stopped_after(first, small, 18)
    resume_run(small, folder, *settings, "batch_size=8")
    assert_cosine(records(folder, "step")[18:], 22)


def test_the_default_reference_is_the_configured_batch_before_a_search_and_after_a_resume(small):
    scaled = (*BASE, "lr_scaling=linear", "epochs=1")
    searched = ("use_maximum_batch_size=True", "probe.device_memory=1GiB")
    found = small.run_in_process(OURS, *scaled, *searched, "batch_size=12")
    assert figures(found, "batch_size") == [32]
    assert figures(found, "lr") == pytest.approx([RATE * 32 / 12])
    keys = (*scaled, "max_steps_per_epoch=4", "save_every_n_steps=2")
    begun = small.run_in_process(OURS, *keys, "batch_size=2")
    folder = stopped_after(begun, small, 2)
    resume_run(small, folder, *keys, "batch_size=4")
    assert figures(folder, "lr")[2] == pytest.approx(2 * figures(folder, "lr")[1])
    assert not records(folder, "reference_batch_size")
    (said,) = records(folder, "batch_size")
    assert said["message"] == "batch_size 2 -> 4: differs from the checkpoint"


def test_the_first_step_of_a_warm_up_changes_nothing_with_the_optimizer_in_backward(small):
    """In torchtune's recipe it has the full rate."""
    one_step = ("optimizer_in_bwd=True", "epochs=1", "max_steps_per_epoch=1")
    done = small.run_in_process(OURS, *BASE, *cosine_after(3), *one_step)
    assert figures(done, "lr") == [0]
    trained, base = done.weights(0), weights(small.base)
    assert same_weights(trained, {name: base[name] for name in trained})
