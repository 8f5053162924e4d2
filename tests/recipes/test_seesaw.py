"""Through the real command line: a batch that grows where the rate decays, with beta2 and weight
decay that follow it.
"""

import math
import shutil

import pytest
from support.cli import OURS, cosine_after, records

RULE = "batch_size_schedule._component_=adaptive_batch.schedules.seesaw"
COSINE = cosine_after(2)
EQUAL = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={[12] * 64}")
FREE = ("micro_batch_size=8", "grow_beyond_maximum=True")
SCALED = "scale_with_batch={beta2: half_life, weight_decay: per_token}"
SEESAW = (*EQUAL, *COSINE, *FREE, RULE, "epochs=2")


def cosine(step, *, warmup=2, total=32):
    return (
        step / warmup
        if step < warmup
        else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
    )


SAVES = ("save_every_n_steps=6", "model.attn_dropout=0.2")


@pytest.fixture(scope="module")
def grown(small):
    return small.run_in_process(OURS, *SEESAW, SCALED, *SAVES)


def check_by_hand(steps, *, most=10**9):
    """Batch, rate, beta2 and weight decay of a half cosine over 32 steps of 4 rows."""
    done = 0
    for step in steps:
        now = done / 4
        asked = math.floor(4 / (cosine(now) if now >= 2 else 1.0) + 0.5)
        assert step["batch_size"] == min(asked, most, 64 - done % 64)
        ratio = step["batch_size"] / 4
        assert step["lr"] == pytest.approx(0.01 * cosine(now) * math.sqrt(ratio), rel=1e-12)
        assert step["beta2"] == pytest.approx(min(0.9999, 0.999**ratio), rel=1e-12)
        assert step["weight_decay"] == pytest.approx(0.01 * math.sqrt(ratio), rel=1e-12)
        # of each row: the decay of the constant batch at this point of training
        per_row = step["lr"] * step["weight_decay"] / step["batch_size"]
        assert per_row == pytest.approx(0.01 * cosine(now) * 0.01 / 4, rel=1e-9)
        done = step["samples_seen"]
    assert done == 128


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
def test_at_a_cap_with_the_optimizer_in_backward_each_step_is_what_comes_out_by_hand(small):
    whole = ("optimizer_in_bwd=True", "probe.maximum=8", "batch_size_schedule.maximum=8")
    finished = small.run_in_process(OURS, *EQUAL, *COSINE, RULE, SCALED, "epochs=2", *whole)
    check_by_hand(records(finished.output_dir, "step"), most=8)
