"""Batch schedules through the command line: the plan, the log and the training agree."""

from itertools import pairwise

import pytest
from support.cli import OURS, cosine_after, figures, records, resume_run, same_weights, weights
from support.stops import stopped_after
from support.trajectories import run_differences

KEY = "batch_size_schedule"
RULE = f"{KEY}._component_=adaptive_batch.schedules."
FREE = ("micro_batch_size=8", "grow_beyond_maximum=True")
SGD = ("optimizer=torch.optim.SGD", "optimizer.lr=0.05")
COSINE = cosine_after(3)
VARIED = [5 + (11 * row) % 40 for row in range(32)]


def of_lengths(lengths):
    return ("dataset._component_=support.components.OfLengths", f"dataset.lengths={list(lengths)}")


RULES = {
    "tokens per step": (
        *(f"{RULE}steps", f"{KEY}.batch_sizes=[100,200,400]", f"{KEY}.thresholds=[0.5ep,1.25ep]"),
        *("batch_tokens=100", "micro_batch_size=null"),
    ),
    "seesaw that doubles up to a maximum": (
        *(f"{RULE}seesaw", f"{KEY}.factor=2", f"{KEY}.maximum=12"),
        "optimizer=torch.optim.AdamW",
        "scale_with_batch={beta2: half_life, weight_decay: per_token}",
    ),
    "a user's rule that reads the previous step": (
        f"{KEY}=support.components.doubles_every_fourth_step",
    ),
    "a growth function": (
        "batch_increase_function=support.components.four_more",
        "probe.device_memory=1GiB",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_training_follows_the_planned_stages(small, rule):
    """Each stage has the planned steps, samples, tokens and, bit for bit, learning rates."""
    keys = (*of_lengths(VARIED), *FREE, *SGD, *COSINE, "epochs=2", "lr_clock=tokens")
    finished = small.run_in_process(OURS, *keys, "drop_last=False", *rule)
    steps = records(finished, "step")
    (planned,) = (record["stages"] for record in records(finished, "stages"))
    assert planned[0]["first"]["steps"] == 0
    assert planned[-1]["last"]["steps"] == len(steps)
    for stage, after in pairwise(planned):
        for place in ("steps", "samples", "tokens"):
            assert after["first"][place] == stage["last"][place]
    for stage in planned:
        part = steps[stage["first"]["steps"] : stage["last"]["steps"]]
        assert len(part) == stage["steps"] > 0
        assert part[0]["lr"] == stage["rates_first"]["lr"]
        assert part[-1]["lr"] == stage["rates_last"]["lr"]
        assert part[-1]["samples_seen"] == stage["last"]["samples"]
        assert part[-1]["tokens_seen"] == stage["last"]["tokens"]
    assert sum(figures(finished, "batch_size")) == 64
    for step in steps if "scale_with_batch" in rule[-1] else ():
        ratio = step["batch_size"] / 4
        assert step["beta2"] == pytest.approx(0.999**ratio, rel=1e-12)
        assert step["weight_decay"] == pytest.approx(0.01 * ratio**0.5, rel=1e-12)


BY_TOKENS = (
    *of_lengths(VARIED),
    "batch_tokens=300",
    "micro_batch_tokens=200",
    "grow_beyond_maximum=True",
    "save_every_n_steps=2",
)
DOUBLING = (*BY_TOKENS, f"{KEY}=support.components.doubles_its_tokens", "epochs=3")


def test_a_rule_that_reads_the_previous_step_resumes_within_an_epoch(small):
    whole = small.run_in_process(OURS, *DOUBLING)
    steps = records(whole, "step")
    for epoch in range(2):
        in_epoch = [step["step"] for step in steps if step["epoch"] == epoch]
        saved = next(step for step in in_epoch[:-1] if step % 2 == 0)
        folder = stopped_after(whole, small, saved)
        resume_run(small, folder, *DOUBLING)
        assert records(folder, "start")[-1]["progress"]["steps"] == saved
        assert run_differences(folder, whole.output_dir) == []


def test_the_reference_batch_defaults_to_the_first_configured_batch_size(small):
    base = (*of_lengths([12] * 32), *SGD, "drop_last=False", "lr_scaling=linear", "epochs=1")
    searched = ("use_maximum_batch_size=True", "probe.device_memory=1GiB")
    found = small.run_in_process(OURS, *base, *searched, "batch_size=12")
    assert figures(found, "batch_size") == [32]
    assert figures(found, "lr") == pytest.approx([0.05 * 32 / 12])
    keys = (*base, "max_steps_per_epoch=4", "save_every_n_steps=2")
    begun = small.run_in_process(OURS, *keys, "batch_size=2")
    folder = stopped_after(begun, small, 2)
    resume_run(small, folder, *keys, "batch_size=4")
    assert figures(folder, "lr")[2] == pytest.approx(2 * figures(folder, "lr")[1])
    (said,) = records(folder, "batch_size")
    assert said["message"] == "batch_size 2 -> 4: differs from the checkpoint"


def test_with_the_optimizer_in_backward_the_first_warmup_step_changes_no_weights(small):
    """torchtune's recipe uses the full learning rate in this step."""
    one_step = ("optimizer_in_bwd=True", "epochs=1", "max_steps_per_epoch=1")
    done = small.run_in_process(OURS, *of_lengths([12] * 32), *SGD, *COSINE, *one_step)
    assert figures(done, "lr") == [0]
    trained, base = done.weights(0), weights(small.base)
    assert same_weights(trained, {name: base[name] for name in trained})
