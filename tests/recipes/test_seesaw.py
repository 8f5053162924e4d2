"""Through the real command line: a batch that grows where the rate decays, with beta2 and weight
decay that follow it.
"""

import math
import shutil
from itertools import pairwise

import pytest
from support.cli import OURS, make_setup, same_weights
from support.launch import launch

from adaptive_batch.errors import SettingError
from adaptive_batch.report import read_records

RULE = "batch_size_schedule._component_=adaptive_batch.schedules.seesaw"
COSINE = (
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
EQUAL = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={[12] * 64}")
FREE = ("micro_batch_size=8", "grow_beyond_maximum=True")
SCALED = "scale_with_batch={beta2: half_life, weight_decay: per_token}"
SEESAW = (*EQUAL, *COSINE, *FREE, RULE, "epochs=2")


def records(output_dir, kind):
    return [
        r for r in read_records(output_dir / "adaptive_batch" / "run.jsonl") if r["kind"] == kind
    ]


def cosine(step, *, warmup=2, total=32):
    return (
        step / warmup
        if step < warmup
        else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
    )


def check_by_hand(steps, *, most=10**9, batch=4, clock="samples_seen"):
    """Each step of 2 epochs of 64 rows: batch, rate, beta2 and weight decay of a half cosine over
    32 steps of 4 rows.
    """
    done = 0
    for step in steps:
        now = done / batch
        left = 64 - done % 64
        asked = min(most, math.floor(batch / (cosine(now) if now >= 2 else 1.0) + 0.5))
        assert step["batch_size"] == min(asked, left)
        ratio = step["batch_size"] / batch
        assert step["lr"] == pytest.approx(0.01 * cosine(now) * math.sqrt(ratio), rel=1e-12)
        assert step["beta2"] == pytest.approx(min(0.9999, 0.999**ratio), rel=1e-12)
        assert step["weight_decay"] == pytest.approx(0.01 * math.sqrt(ratio), rel=1e-12)
        # of each row: the decay of the constant batch at this point of training
        per_row = step["lr"] * step["weight_decay"] / step["batch_size"]
        assert per_row == pytest.approx(0.01 * cosine(now) * 0.01 / batch, rel=1e-9)
        done = step["samples_seen"]
    assert done == 128


SAVES = ("save_every_n_steps=6", "model.attn_dropout=0.2")
BY_TOKENS = (
    *COSINE,
    RULE,
    "batch_size_schedule.maximum=400",
    "epochs=2",
    "batch_tokens=100",
    "lr_clock=tokens",
    SCALED,
)


@pytest.fixture(scope="module")
def grown(small):
    return small.run_in_process(OURS, *SEESAW, SCALED, *SAVES)


@pytest.fixture(scope="module")
def grown_by_tokens(small):
    return small.run_in_process(OURS, *BY_TOKENS, *SAVES)


def test_each_step_is_what_comes_out_by_hand_in_fewer_steps_than_a_constant_batch(grown):
    steps = records(grown.output_dir, "step")
    check_by_hand(steps)
    assert len(steps) == 20 < 32
    assert [float(value) for value in grown.figures("beta2")] == [step["beta2"] for step in steps]
    assert [float(value) for value in grown.figures("weight_decay")] == [
        step["weight_decay"] for step in steps
    ]
    (said,) = records(grown.output_dir, "lr")
    assert (
        said["message"]
        == "lr 0.01 belongs to 4 rows a step, and is scaled by the rule sqrt; beta2 0.999 belongs"
        " to 4 rows a step, and is scaled by the rule half_life; weight_decay 0.01 belongs to 4"
        " rows a step, and is scaled by the rule per_token"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "keys"),
    [("grown", (*SEESAW, SCALED)), ("grown_by_tokens", BY_TOKENS)],
    ids=["by rows", "by tokens"],
)
def test_resumed_in_mid_epoch_it_is_the_whole_run_bit_for_bit(small, request, run, keys):
    run = request.getfixturevalue(run)
    for saved in ("step_6", "step_18"):
        folder = small.fresh_folder()
        shutil.copytree(run.output_dir, folder, dirs_exist_ok=True)
        for path in [
            *folder.glob("epoch_*"),
            *folder.glob("step_*"),
            folder / "recipe_state",
            folder / "logs",
        ]:
            if path.name != saved and path.exists():
                shutil.rmtree(path)
        rest = small.run_in_process(
            OURS, *keys, *SAVES, f"output_dir={folder}", "resume_from_checkpoint=True"
        )
        assert same_weights(rest.weights(1), run.weights(1))
        names = ("loss", "lr", "beta2", "weight_decay", "batch_size", "tokens_seen")
        whole = {
            step["step"]: [step[name] for name in names] for step in records(run.output_dir, "step")
        }
        again = records(folder, "step")[len(whole) :]
        assert [step["step"] for step in again] == list(range(int(saved[5:]) + 1, len(whole) + 1))
        assert all([step[name] for name in names] == whole[step["step"]] for step in again)


def test_by_tokens_the_steps_grow_in_tokens(grown_by_tokens):
    steps = records(grown_by_tokens.output_dir, "step")
    tokens = [after["tokens_seen"] - before["tokens_seen"] for before, after in pairwise(steps)]
    assert max(tokens[:3]) <= 100
    assert 200 < max(tokens) <= 400
    for step, before in zip(steps[1:], steps, strict=False):
        ratio = (step["tokens_seen"] - before["tokens_seen"]) / 100
        assert step["beta2"] == pytest.approx(min(0.9999, 0.999**ratio), rel=1e-12)


def test_the_preview_shows_batch_rate_beta2_and_weight_decay_before_weights_load(
    small, grown, capsys
):
    capsys.readouterr()
    output = small.fresh_folder()
    small.run_in_process(
        OURS,
        *SEESAW,
        SCALED,
        "preview=True",
        f"output_dir={output}",
        "checkpointer.checkpoint_dir=/none",
    )
    shown = capsys.readouterr().out.strip().splitlines()
    (head,) = [line for line in shown if line.strip().startswith("from")]
    columns = [
        "lr at start",
        "at end",
        "beta2 at start",
        "at end",
        "weight_decay at start",
        "at end",
        "steps",
    ]
    assert [cell.strip() for cell in head.split("  ") if cell.strip()][-7:] == columns
    assert shown[-2:] == [
        "in all: 2.00 epochs, 20 steps, 128 samples, 1,536 tokens",
        "all epochs with the configured batch would be 32 steps",
    ]
    (stages,) = records(grown.output_dir, "stages")
    table = [line for line in shown if line.strip()[:1].isdigit() and "ep" in line]
    assert table == [
        line
        for line in stages["message"].splitlines()
        if line.strip()[:1].isdigit() and "ep" in line
    ]
    last, steps = stages["stages"][-1], records(grown.output_dir, "step")
    assert last["rates_last"] == {name: steps[-1][name] for name in ("lr", "beta2", "weight_decay")}


@pytest.mark.slow
def test_at_a_cap_in_steps_and_with_the_optimizer_in_backward(small):
    capped = small.run_in_process(
        OURS, *SEESAW, SCALED, "batch_size_schedule.maximum=8", "lr_clock=tokens"
    )
    check_by_hand(records(capped.output_dir, "step"), most=8)
    settings = (
        *EQUAL,
        *COSINE,
        RULE,
        SCALED,
        "epochs=2",
        "probe.maximum=8",
        "batch_size_schedule.maximum=8",
    )
    backward = small.run_in_process(OURS, *settings, "optimizer_in_bwd=True")
    check_by_hand(records(backward.output_dir, "step"), most=8)
    losses = [
        [step["loss"] for step in records(run.output_dir, "step")] for run in (backward, capped)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_what_it_cannot_follow_is_refused_with_key_value_and_fix(small):
    for overrides, message in (
        (
            ("lr_clock=steps",),
            (
                r"lr_clock='steps': seesaw\(factor=None, maximum=None\) takes fewer steps for the"
                r" same data"
            ),
        ),
        (("lr_clock={warmup: steps, decay: tokens}",), r"lr_clock=.*give samples or tokens"),
        (("lr_scaling=linear",), r"lr_scaling='linear': seesaw.*leave lr_scaling out"),
        (
            ("max_steps_per_epoch=3",),
            r"max_steps_per_epoch=3: seesaw.*set it to null, in a new run, and take fewer rows",
        ),
        (
            ("lr_scheduler=null",),
            r"lr_scheduler=None: a batch that follows the decay of the rate needs a LambdaLR",
        ),
        (
            ("batch_size_schedule.maximum=2",),
            r"batch_size_schedule\.maximum=2: training starts with 4; give that or more",
        ),
        (
            ("batch_size_schedule.factor=1",),
            r"batch_size_schedule\.factor=1: must be a number above 1",
        ),
        (
            ("gradient_accumulation_steps=2",),
            r"gradient_accumulation_steps=2: batch_size_schedule gives the rows",
        ),
        (
            ("scale_with_batch={beta1: half_life}",),
            r"scale_with_batch\.beta1='half_life': give beta2: half_life, weight_decay",
        ),
        (
            ("scale_with_batch={beta2: sqrt}",),
            r"scale_with_batch\.beta2='sqrt': give beta2: half_life",
        ),
        (("scale_with_batch=True",), r"scale_with_batch=True: give a block of beta2: half_life"),
        (
            (SCALED, "optimizer=torch.optim.SGD", "~optimizer.fused"),
            r"scale_with_batch\.beta2='half_life': .*SGD have no betas",
        ),
        (
            (SCALED, "optimizer.weight_decay=0"),
            r"scale_with_batch\.weight_decay='per_token': weight_decay of AdamW is 0",
        ),
    ):
        output = small.fresh_folder()
        with pytest.raises(SettingError, match=message):
            small.run_in_process(OURS, *SEESAW, *overrides, f"output_dir={output}")
        assert not list(output.rglob("run.jsonl"))


def test_a_change_of_what_follows_the_batch_is_logged_on_resuming(small):
    output = small.fresh_folder()
    small.run_in_process(OURS, *EQUAL, "epochs=2", "save_every_n_steps=20", f"output_dir={output}")
    shutil.rmtree(output / "epoch_1")
    small.run_in_process(
        OURS, *EQUAL, "epochs=2", SCALED, f"output_dir={output}", "resume_from_checkpoint=True"
    )
    (said,) = records(output, "scale_with_batch")
    assert (
        "None -> {'beta2': 'half_life', 'weight_decay': 'per_token'}: not what the checkpoint was"
        " trained with" in said["message"]
    )


def test_what_follows_the_batch_belongs_to_what_the_checkpoint_keeps_also_in_the_preview(
    small, grown, capsys
):
    folder = small.fresh_folder()
    shutil.copytree(grown.output_dir / "step_6", folder / "step_6")
    capsys.readouterr()
    small.run_in_process(
        OURS,
        *SEESAW,
        SCALED,
        "model.attn_dropout=0.2",
        "preview=True",
        f"output_dir={folder}",
        "resume_from_checkpoint=True",
        "optimizer.weight_decay=0.5",
        "optimizer.betas=[0.9,0.95]",
    )
    (stage,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "ep" in line and line.strip()[:1].isdigit()
    ][:1]
    step = records(grown.output_dir, "step")[6]
    assert [f"{step[name]:.4g}" for name in ("beta2", "weight_decay")] == [
        stage.split()[-5],
        stage.split()[-3],
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_take_the_steps_of_one(tmp_path):
    setup = make_setup(tmp_path)
    attempt = launch(
        setup,
        2,
        *SEESAW,
        SCALED,
        "batch_size=2",
        "batch_size_schedule.maximum=8",
        "micro_batch_size=4",
    )[-1]
    assert attempt.exit_statuses == [0, 0], attempt.output[-6000:]
    steps = records(attempt.output_dir, "step")
    assert [step["batch_size"] for step in steps] == expected_on_two_ranks()
    for step in steps:
        ratio = step["batch_size"] / 4
        assert step["beta2"] == pytest.approx(min(0.9999, 0.999**ratio), rel=1e-12)


def expected_on_two_ranks():
    """Rows over both: each rank's part is rounded by itself."""
    sizes, done = [], 0
    while done < 128:
        left, now = 64 - done % 64, done / 4
        each = min(8, math.floor(2 / (cosine(now) if now >= 2 else 1.0) + 0.5))
        sizes.append(min(2 * each, left))
        done += sizes[-1]
    return sizes
