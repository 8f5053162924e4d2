"""The batch as a function of progress, through the real command line: what was planned, what was
said, what was trained.
"""

import math
import shutil
from itertools import accumulate, groupby, pairwise

import pytest
import torch
from support import batch_rules
from support.cli import MODEL, OURS, cosine_after, figures, records, resume_run, same_weights
from support.stops import stopped_after

from adaptive_batch.errors import GrowthFunctionError
from adaptive_batch.report import audit
from adaptive_batch.schedules import Progress, by_noise_scale

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


def cosine(step, *, warmup, total):
    """Hand-written: linear up, then half a cosine down."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


# --- by hand


@pytest.fixture(scope="module")
def doubled(small):
    """bert24's ramp at small scale: 16 -> 32 -> 64 rows over two of three epochs of 128 rows, 16 of
    them at once.
    """
    return small.run_in_process(
        OURS,
        *of_lengths([12] * 128),
        *COSINE,
        *SGD,
        "epochs=3",
        "batch_size=16",
        "micro_batch_size=16",
        "grow_beyond_maximum=True",
        f"{RULE}ramp_by_doubling",
        *ramp(start=16, end=64, over="2ep"),
    )


def test_bert24s_ramp_has_the_steps_samples_micro_batches_and_rates_that_come_out_by_hand(doubled):
    batches = [16] * 8 + [32] * 4 + [64] * 2
    assert figures(doubled, "batch_size") == batches
    assert figures(doubled, "micro_batches") == [1] * 8 + [2] * 4 + [4] * 2
    samples = list(accumulate(batches))
    assert figures(doubled, "samples_seen") == samples
    assert figures(doubled, "tokens_seen") == [12 * rows for rows in samples]
    # the schedule spans 3 epochs of 8 steps of the configured 16 rows, and its clock is samples /
    # 16
    expected = [0.05 * cosine(done / 16, warmup=3, total=24) for done in [0, *samples[:-1]]]
    assert figures(doubled, "lr") == pytest.approx(expected, rel=1e-12)
    for epoch, rows in groupby(records(doubled, "step"), key=lambda step: step["epoch"]):
        assert sorted(row for step in rows for row in step["rows"]) == list(range(128)), epoch


def test_the_loss_of_each_full_batch_of_samples_is_the_mean_over_the_steps_that_make_it(doubled):
    """A full batch is 64 rows, the largest that is planned."""
    assert records(doubled, "step")[0].get("loss_per_full_batch") is None
    full = {
        step["step"]: step["loss_per_full_batch"]
        for step in records(doubled, "step")
        if "loss_per_full_batch" in step
    }
    losses, batches = figures(doubled, "loss"), figures(doubled, "batch_size")
    expected, begin = {}, 0
    for step in range(1, len(batches) + 1):
        if sum(batches[begin:step]) >= 64:
            weighted = sum(
                loss * rows
                for loss, rows in zip(losses[begin:step], batches[begin:step], strict=True)
            )
            expected[step] = weighted / sum(batches[begin:step])
            begin = step
    assert full == pytest.approx(expected)
    assert list(full) == [4, 8, 10, 12, 13, 14]
    assert [full[13], full[14]] == losses[12:]  # steps that are a full batch of their own
    assert [float(value) for value in doubled.figures("loss_per_full_batch")] == list(full.values())


# --- the plan is what happens

RULES = {
    "steps by epochs": steps_rule([4, 6, 12], ["0.5ep", "1.25ep"]),
    "steps by optimizer steps, down and up": steps_rule([12, 4, 20], ["2ba", "8ba"]),
    "steps by samples": steps_rule([4, 10], ["21sp"]),
    "steps by tokens": steps_rule([4, 7, 16], ["200tok", "900tok"]),
    "a ramp by epochs": (f"{RULE}linear_ramp", *ramp(start=4, end=16, over="1.5ep")),
    "a ramp by tokens in pairs": (
        f"{RULE}linear_ramp",
        *ramp(start=4, end=16, over="1000tok", multiple_of=2),
    ),
    "a ramp down by steps": (f"{RULE}linear_ramp", *ramp(start=16, end=2, over="7ba")),
    "doubling by samples": (f"{RULE}ramp_by_doubling", *ramp(start=4, end=32, over="48sp")),
    "doubling from the smallest": (f"{RULE}ramp_by_doubling", *ramp(end=24, over="1ep")),
    "a user's own": (f"{KEY}=support.batch_rules.four_more_each_epoch",),
    "a user's own, up and down": (f"{KEY}=support.batch_rules.waves",),
    "tokens a step": (
        *steps_rule([100, 200, 400], ["0.5ep", "1.25ep"]),
        "batch_tokens=100",
        "micro_batch_size=null",
    ),
    "tokens a step, after so many tokens": (
        *steps_rule([100, 300], ["700tok"]),
        "batch_tokens=100",
    ),
    "seesaw": (f"{RULE}seesaw",),
    "seesaw by doubling, to a cap": (f"{RULE}seesaw", *ramp(factor=2, maximum=12)),
    "seesaw in tokens a step": (f"{RULE}seesaw", "batch_tokens=100"),
    "a growth function": (
        "batch_increase_function=support.components.four_more",
        "probe.device_memory=1GiB",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_what_was_planned_is_what_is_trained(small, rule):
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
        assert part[0]["lr"] == stage["rates_first"]["lr"]
        assert part[-1]["lr"] == stage["rates_last"]["lr"]
        assert part[-1]["samples_seen"] == stage["last"]["samples"]
        assert part[-1]["tokens_seen"] == stage["last"]["tokens"]
        if by_tokens:
            seen = [stage["first"]["tokens"], *(step["tokens_seen"] for step in part)]
            assert max(later - before for before, later in pairwise(seen)) <= stage["batch_most"]
            continue
        ends = {
            steps[-1]["step"],
            *(one["step"] for one, other in pairwise(steps) if one["epoch"] != other["epoch"]),
        }
        for step in part:
            whole = stage["batch_least"] <= step["batch_size"] <= stage["batch_most"]
            assert whole or (step["step"] in ends and step["batch_size"] < stage["batch_least"])
            assert (
                step["micro_batches"] == -(-step["batch_size"] // min(8, stage["batch_most"]))
                or "growth" in rule[0]
            )
            assert step["micro_batches"] <= stage["micro_batches_most"]
    assert sum(figures(finished, "batch_size")) == 64


# --- the bound

CAPPED = ("epochs=2", "probe.maximum=12", *steps_rule([4, 8, 16], ["0.5ep", "1ep"]))


@pytest.mark.slow
def test_a_schedule_is_cut_to_what_fits_and_the_plan_and_the_log_say_so(small):
    finished = small.run_in_process(OURS, *of_lengths(VARIED), *CAPPED)
    assert [record["max_batch_size"] for record in records(finished, "bound")] == [12]
    assert figures(finished, "batch_size") == [4] * 4 + [8] * 2 + [12, 12, 8]
    assert set(figures(finished, "micro_batches")) == {1}
    assert [stage["batch_most"] for stage in stages(finished)] == [4, 8, 12]
    (cut,) = [
        record
        for record in records(finished, "batch_size")
        if record["after"] < record["requested"]
    ]
    assert cut["message"] == "step 6: batch_size 8 -> 12 (asked for 16, cut to the bound 12)"


def test_growth_past_the_bound_is_one_large_batch_to_1e_12_in_float64(small):
    """The gradients of a whole run: with plain SGD they are what its weights have moved by."""
    base = small.fresh_folder()
    before = batch_rules.write_base(
        base, vocab_size=MODEL["vocab_size"], embed_dim=MODEL["embed_dim"]
    )
    settings = (
        *of_lengths(VARIED),
        *SGD,
        "dtype=fp64",
        "epochs=2",
        "clip_grad_norm=0.5",
        "loss=torch.nn.CrossEntropyLoss",
        "model._component_=support.batch_rules.InItsOwnType",
        f"checkpointer.checkpoint_dir={base}",
        "checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpointer.checkpoint_files=[model.pt]",
        *steps_rule([4, 8, 32], ["0.5ep", "1ep"]),
        "grow_beyond_maximum=True",
    )
    split = small.run_in_process(OURS, *settings, "micro_batch_size=3")
    whole = small.run_in_process(OURS, *settings, "micro_batch_size=32")
    assert figures(split, "micro_batches") == [2] * 4 + [3] * 2 + [11]
    assert set(figures(whole, "micro_batches")) == {1}
    assert figures(split, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-12)
    assert figures(split, "grad_norm") == pytest.approx(figures(whole, "grad_norm"), rel=1e-12)
    ours, theirs = (
        torch.load(next((run.output_dir / "epoch_1").glob("*.bin")), weights_only=True)
        for run in (split, whole)
    )
    for name, weight in theirs.items():
        assert weight.dtype == torch.float64
        moved = torch.linalg.norm(weight - before[name])
        assert torch.linalg.norm(ours[name] - weight) <= 1e-12 * moved > 0, name


# --- rules that follow the gradient noise scale

LED = (
    *of_lengths([6 + row % 5 for row in range(96)]),
    "epochs=3",
    "micro_batch_size=1",
    "optimizer.lr=1e-3",
    f"{RULE}by_noise_scale",
    *ramp(start=2, every=5, margin=0.2),
)


@pytest.fixture(scope="module")
def led(small):
    return small.run_in_process(OURS, *LED, f"{KEY}.maximum=8")


@pytest.mark.slow
def test_a_rule_that_follows_the_noise_scale_does_what_it_would_do_by_hand(led):
    rule = by_noise_scale(2, maximum=8, every=5, margin=0.2)
    now, expected = 2, []
    for step in [None, *records(led, "step")[:-1]]:
        if step is not None:
            now = rule(
                Progress(
                    steps=step["step"], batch=now, noise_scale=step.get("gradient_noise_scale")
                )
            )
        expected.append(now)
    asked = [record["after"] for record in records(led, "batch_size")]
    assert len(asked) > 1, "the batch never grew"
    assert [batch for batch, _ in groupby(expected)] == asked
    short = {
        step["step"]
        for step, after in pairwise(records(led, "step"))
        if step["epoch"] != after["epoch"]
    }
    for step, batch in zip(records(led, "step"), expected, strict=True):
        assert step["batch_size"] == batch or step["step"] in {
            *short,
            records(led, "step")[-1]["step"],
        }
    assert all(before < after for before, after in pairwise(asked))
    assert max(figures(led, "batch_size")) <= 8
    assert sum(figures(led, "batch_size")) == 3 * 96


def test_the_noise_scale_is_logged_without_a_rule_that_follows_it(small):
    finished = small.run_in_process(
        OURS,
        *of_lengths([6 + row % 5 for row in range(120)]),
        "epochs=1",
        "batch_size=2",
        "gradient_accumulation_steps=1",
        "micro_batch_size=1",
        "log_gradient_noise_scale=True",
    )
    logged = [step.get("gradient_noise_scale") for step in records(finished, "step")]
    assert logged[:49] == [None] * 49  # of fewer steps an average says nothing
    measured = [value for value in logged if value is not None]
    assert measured
    assert all(value >= 0 for value in measured)
    assert [float(value) for value in finished.figures("gradient_noise_scale")] == measured


def test_steps_of_one_micro_batch_are_named_once_where_the_noise_is_measured(small):
    finished = small.run_in_process(
        OURS,
        *of_lengths([6 + row % 5 for row in range(24)]),
        "epochs=1",
        "batch_size=2",
        "gradient_accumulation_steps=1",
        "micro_batch_size=auto",
        "log_gradient_noise_scale=True",
    )
    (said,) = records(finished, "noise_not_measured")
    assert said["message"] == (
        "step 1 is one micro-batch, which shows no gradient noise: such steps do not count; a"
        " smaller micro_batch_size divides them"
    )


def noise_at_step_58(finished):
    state = torch.load(next((finished.output_dir / "step_58").glob("state.pt")), weights_only=False)
    return state["small"]["adaptive_batch"]["noise_scale"]


@pytest.mark.slow
def test_the_noise_scale_is_resumed_exactly(small):
    settings = (
        *of_lengths([6 + row % 5 * 4 for row in range(240)]),
        "epochs=1",
        "batch_size=4",
        "gradient_accumulation_steps=1",
        "micro_batch_size=2",
        "micro_batch_layout=packed",
        "log_gradient_noise_scale=True",
        "save_every_n_steps=29",
    )
    whole = small.run_in_process(OURS, *settings)
    state = noise_at_step_58(whole)
    assert state["samples"] == 52  # 50, and in the steps after 50 and 55
    folder = small.fresh_folder()
    shutil.copytree(whole.output_dir / "step_29", folder / "step_29")
    rest = resume_run(small, folder, *settings)
    assert noise_at_step_58(rest) == state


# --- what goes wrong in mid-run


@pytest.mark.slow
def test_a_rule_that_fails_in_mid_run_leaves_what_was_saved_whole(small):
    output = small.fresh_folder()
    failing = (
        f"{KEY}=support.batch_rules.raises_in_training",
        "metric_logger._component_=support.batch_rules.Telling",
    )
    with pytest.raises(
        GrowthFunctionError,
        match=r"raises_in_training\(Progress\(.*steps=12.* KeyError: 'lost in mid-run'",
    ):
        small.run_in_process(OURS, *failing, "save_every_n_steps=5", f"output_dir={output}")
    assert sorted(path.name for path in output.glob("*_[0-9]*")) == ["epoch_0", "step_10", "step_5"]
    batch_rules.TRAINED.clear()
    rest = small.run_in_process(
        OURS,
        f"{KEY}=support.batch_rules.raises_in_training",
        "save_every_n_steps=5",
        f"output_dir={output}",
        "resume_from_checkpoint=True",
    )
    whole = small.run_in_process(OURS, f"{KEY}=support.batch_rules.raises_in_training")
    assert same_weights(rest.weights(1), whole.weights(1))


def test_a_rule_that_would_fail_later_is_refused_before_anything_is_trained(small):
    output = small.fresh_folder()
    with pytest.raises(GrowthFunctionError, match="raises_in_second_epoch"):
        small.run_in_process(
            OURS, f"{KEY}=support.batch_rules.raises_in_second_epoch", f"output_dir={output}"
        )
    assert not list(output.rglob("run.jsonl"))


@pytest.mark.nightly
def test_a_resumed_schedule_goes_on_in_the_middle_of_an_epoch(small):
    settings = (
        *of_lengths(VARIED),
        *COSINE,
        *FREE,
        "epochs=2",
        "save_every_n_steps=3",
        "model.attn_dropout=0.2",
    )
    names = (
        "steps by tokens",
        "tokens a step",
        "a user's own, up and down",
        "seesaw",
        "seesaw in tokens a step",
    )
    for rule in map(RULES.get, names):
        whole = small.run_in_process(OURS, *settings, *rule)
        folder = stopped_after(whole, small, 3)
        shutil.rmtree(folder / "logs")
        rest = resume_run(small, folder, *settings, *rule)
        for name in ("loss", "lr", "batch_size", "loss_per_full_batch"):
            seen = whole.figures(name)
            again = rest.figures(name)
            assert again == seen[len(seen) - len(again) :]
            assert name == "loss_per_full_batch" or len(again) == len(seen) - 3
        assert same_weights(rest.weights(1), whole.weights(1))


# --- rules that follow the batch of the step before


def go_on(small, finished, step, *settings):
    """Goes on from a checkpoint within an epoch, with the record of before."""
    folder = small.fresh_folder()
    for name in (f"step_{step}", "adaptive_batch"):
        shutil.copytree(finished.output_dir / name, folder / name)
    return resume_run(small, folder, *settings)


def test_the_plan_of_a_rule_that_follows_the_last_batch_is_what_is_trained(small):
    """Epochs of max_steps_per_epoch=4 end where the rule doubles."""
    finished = small.run_in_process(
        OURS,
        f"{KEY}=support.batch_rules.doubles_every_fourth_step",
        "grow_beyond_maximum=True",
        "micro_batch_size=4",
        "epochs=3",
        "max_steps_per_epoch=4",
        *COSINE,
    )
    assert figures(finished, "batch_size") == [4] * 4 + [8] * 4 + [16] * 2
    planned = [
        (stage["steps"], stage["batch_least"], stage["batch_most"]) for stage in stages(finished)
    ]
    assert planned == [(4, 4, 4), (4, 8, 8), (2, 16, 16)]
    assert [stage["micro_batches_most"] for stage in stages(finished)] == [1, 2, 4]
    edges = [(stage["rates_first"]["lr"], stage["rates_last"]["lr"]) for stage in stages(finished)]
    rates = figures(finished, "lr")
    assert edges == [(rates[0], rates[3]), (rates[4], rates[7]), (rates[8], rates[9])]
    said = [record["message"].split(";")[0] for record in records(finished, "plan")]
    assert said == [
        "epoch 0: 4 steps of 4 rows",
        "epoch 1: 4 steps of 8 rows",
        "epoch 2: 2 steps of 16 rows",
    ]


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


def test_budgets_that_follow_the_last_one_go_on_over_the_start_of_an_epoch(doubling):
    held = [after - before for before, after in pairwise([0, *figures(doubling, "tokens_seen")])]
    budgets = [min(512, 128 * 2 ** (step // 3)) for step in range(len(held))]
    assert all(tokens <= budget for tokens, budget in zip(held, budgets, strict=True))
    begins = [step["step"] - 1 for step in records(doubling, "step") if step["epoch"] > 0]
    assert (begins[0], budgets[begins[0]]) == (5, 256)
    assert held[begins[0]] > 128, "the budget fell back"
    planned = [
        (stage["first"]["steps"], stage["batch_least"], stage["batch_most"])
        for stage in stages(doubling)
    ]
    assert planned == [(0, 128, 128), (3, 256, 256), (6, 512, 512)]


def test_budgets_that_follow_the_last_one_go_on_in_the_middle_of_an_epoch(small, doubling):
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


def test_rows_alike_are_asked_of_the_schedules_steps_and_not_of_the_configured_batch(small):
    finished = small.run_in_process(
        OURS,
        "uniform_micro_batches=rows",
        "micro_batch_size=3",
        "batch_size=7",
        *steps_rule([3, 6], ["1ep"]),
        "grow_beyond_maximum=True",
        "drop_last=True",
    )
    assert figures(finished, "batch_size") == [3] * 10 + [6] * 5
    assert figures(finished, "micro_batches") == [1] * 10 + [2] * 5
