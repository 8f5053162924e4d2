"""Through the real command line: a batch that grows where the rate decays, with beta2 and weight
decay that follow it.
"""

import math

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


def test_each_step_of_seesaw_equals_a_computation_by_hand(grown):
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
        == "lr 0.01: chosen for 4 rows per step, scaled by sqrt; beta2 0.999: chosen for 4 rows per"
        " step, scaled by half_life; weight_decay 0.01: chosen for 4 rows per step, scaled by"
        " per_token"
    )
