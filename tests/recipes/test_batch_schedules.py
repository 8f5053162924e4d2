"""The batch as a function of progress, through the real command line: what was planned, what was
said, what was trained.
"""

from itertools import pairwise

import pytest
from support.cli import OURS, cosine_after, figures, records, resume_run
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


def steps_rule(batch_sizes, thresholds):
    return (
        f"{RULE}steps",
        f"{KEY}.batch_sizes={batch_sizes}",
        f"{KEY}.thresholds=[{','.join(thresholds)}]",
    )


def stages(finished):
    (record,) = records(finished, "stages")
    return record["stages"]


# --- the plan is what happens

RULES = {
    "steps by tokens, warm-up in steps": (
        *steps_rule([4, 7, 16], ["200tok", "900tok"]),
        "lr_clock={warmup: steps, decay: tokens}",
    ),
    "tokens a step": (
        *steps_rule([100, 200, 400], ["0.5ep", "1.25ep"]),
        "batch_tokens=100",
        "micro_batch_size=null",
    ),
    "seesaw by doubling, to a cap": (
        f"{RULE}seesaw",
        f"{KEY}.factor=2",
        f"{KEY}.maximum=12",
        "optimizer=torch.optim.AdamW",
        "scale_with_batch={beta2: half_life, weight_decay: per_token}",
    ),
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
            ratio = step["batch_size"] / 4
            assert step.get("beta2", 0.999**ratio) == pytest.approx(0.999**ratio, rel=1e-12)
            decay = 0.01 * ratio**0.5
            assert step.get("weight_decay", decay) == pytest.approx(decay, rel=1e-12)
            whole = step["batch_size"] == stage["batch"]
            assert whole or (step["step"] in ends and step["batch_size"] < stage["batch"])
            assert (
                step["micro_batches"] == -(-step["batch_size"] // min(8, stage["batch"]))
                or "growth" in rule[0]
            )
    assert sum(figures(finished, "batch_size")) == 64
    assert ("beta2" in steps[0]) == any("scale_with_batch" in key for key in rule)


BY_TOKENS = (
    *of_lengths(VARIED),
    "batch_tokens=300",
    "micro_batch_tokens=200",
    "grow_beyond_maximum=True",
    "save_every_n_steps=2",
)
DOUBLING = (*BY_TOKENS, f"{KEY}=support.batch_rules.doubles_its_tokens", "epochs=3")


def test_budgets_that_follow_the_previous_step_resume_within_an_epoch(small):
    whole = small.run_in_process(OURS, *DOUBLING)
    steps = records(whole, "step")
    for epoch in range(2):
        in_epoch = [step["step"] for step in steps if step["epoch"] == epoch]
        saved = next(step for step in in_epoch[:-1] if step % 2 == 0)
        folder = stopped_after(whole, small, saved)
        resume_run(small, folder, *DOUBLING)
        assert records(folder, "start")[-1]["progress"]["steps"] == saved
        assert run_differences(folder, whole.output_dir) == []
