"""The batch as a function of progress, through the real command line: what was planned, what was
said, what was trained.
"""

import shutil
from itertools import pairwise

import pytest
from support.cli import OURS, cosine_after, figures, records, resume_run

from adaptive_batch.report import audit

KEY = "batch_size_schedule"
RULE = f"{KEY}._component_=adaptive_batch.schedules."
FREE = ("micro_batch_size=8", "grow_beyond_maximum=True")
SGD = ("optimizer=torch.optim.SGD", "optimizer.lr=0.05")
COSINE = cosine_after(3)
VARIED = [5 + (11 * row) % 40 for row in range(32)]


def of_lengths(lengths):
    return ("dataset._component_=support.components.OfLengths", f"dataset.lengths={list(lengths)}")


def steps_rule(batch_sizes, thresholds):
    return (
        f"{RULE}steps",
        f"{KEY}.batch_sizes={batch_sizes}",
        f"{KEY}.thresholds=[{','.join(thresholds)}]",
    )


def ramp(**arguments):
    return tuple(f"{KEY}.{name}={value}" for name, value in arguments.items())


def stages(finished):
    (record,) = records(finished, "stages")
    return record["stages"]


# --- the loss of each full batch


# --- the plan is what happens

RULES = {
    "steps by optimizer steps, down and up": steps_rule([12, 4, 20], ["2ba", "8ba"]),
    "steps by tokens, warm-up in steps": (
        *steps_rule([4, 7, 16], ["200tok", "900tok"]),
        "lr_clock={warmup: steps, decay: tokens}",
    ),
    "a ramp by tokens in pairs": (
        f"{RULE}linear_ramp",
        *ramp(start=4, end=16, over="1000tok", multiple_of=2),
    ),
    "tokens a step": (
        *steps_rule([100, 200, 400], ["0.5ep", "1.25ep"]),
        "batch_tokens=100",
        "micro_batch_size=null",
    ),
    "seesaw by doubling, to a cap": (f"{RULE}seesaw", *ramp(factor=2, maximum=12)),
    "seesaw in tokens a step": (f"{RULE}seesaw", "batch_tokens=100"),
    "a user's own, after the step before": (
        f"{KEY}=support.batch_rules.doubles_every_fourth_step",
    ),
    "a growth function": (
        "batch_increase_function=support.components.four_more",
        "probe.device_memory=1GiB",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_run_trains_the_steps_that_were_planned(small, rule):
    """Stage by stage: steps, samples, tokens, batches and, to the last bit, rates."""
    finished = small.run_in_process(
        OURS,
        *of_lengths(VARIED),
        *FREE,
        *SGD,
        *COSINE,
        "epochs=2",
        "lr_clock=tokens",
        "drop_last=False",
        *rule,
    )
    steps, planned = records(finished, "step"), stages(finished)
    assert planned[0]["first"]["steps"] == 0
    assert planned[-1]["last"]["steps"] == len(steps)
    assert sum(stage["steps"] for stage in planned) == len(steps)
    by_tokens = "batch_tokens=100" in rule
    for stage, after in [*pairwise(planned), (planned[-1], None)]:
        for place in ("steps", "samples", "tokens"):
            assert after is None or after["first"][place] == stage["last"][place]
        part = steps[stage["first"]["steps"] : stage["last"]["steps"]]
        assert len(part) == stage["steps"] > 0
        # A clock of two units is not shown.
        if stage["rates_first"]:
            assert part[0]["lr"] == stage["rates_first"]["lr"]
            assert part[-1]["lr"] == stage["rates_last"]["lr"]
        assert part[-1]["samples_seen"] == stage["last"]["samples"]
        assert part[-1]["tokens_seen"] == stage["last"]["tokens"]
        if by_tokens:
            seen = [stage["first"]["tokens"], *(step["tokens_seen"] for step in part)]
            assert max(later - before for before, later in pairwise(seen)) <= stage["batch"]
            continue
        ends = {
            steps[-1]["step"],
            *(one["step"] for one, other in pairwise(steps) if one["epoch"] != other["epoch"]),
        }
        for step in part:
            whole = step["batch_size"] == stage["batch"]
            assert whole or (step["step"] in ends and step["batch_size"] < stage["batch"])
            assert (
                step["micro_batches"] == -(-step["batch_size"] // min(8, stage["batch"]))
                or "growth" in rule[0]
            )
    assert sum(figures(finished, "batch_size")) == 64


# --- the gradient noise scale


# --- rules that follow the batch of the step before


def go_on(small, finished, step, *settings):
    """Goes on from a checkpoint within an epoch, with the record of before."""
    folder = small.fresh_folder()
    for name in (f"step_{step}", "adaptive_batch"):
        shutil.copytree(finished.output_dir / name, folder / name)
    return resume_run(small, folder, *settings)


BY_TOKENS = (
    *of_lengths(VARIED),
    "batch_tokens=300",
    "micro_batch_tokens=200",
    "grow_beyond_maximum=True",
    "save_every_n_steps=2",
)
DOUBLING = (*BY_TOKENS, f"{KEY}=support.batch_rules.doubles_its_tokens", "epochs=3")


@pytest.fixture(scope="module")
def doubling(small):
    return small.run_in_process(OURS, *DOUBLING)


def test_budgets_that_follow_the_previous_step_resume_within_an_epoch(small, doubling):
    steps = records(doubling, "step")
    for epoch in range(2):
        saved = next(s["step"] for s in steps if s["epoch"] == epoch and s["step"] % 2 == 0)
        assert steps[saved]["epoch"] == epoch, "no checkpoint within the epoch"
        rest = go_on(small, doubling, saved, *DOUBLING)
        again = records(rest, "step")[len(steps) :]
        for name in ("step", "rows", "loss", "lr", "tokens_seen"):
            assert [step[name] for step in again] == [step[name] for step in steps[saved:]]
        assert audit(rest.output_dir).holds


# --- what is not refused and not said
