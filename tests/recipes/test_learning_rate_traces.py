"""The rate of each step, through the real command line: torch's own trace for a constant batch, and
what a ramp makes of it.
"""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support import batch_rules
from support.cli import OURS, resume_run
from support.stops import stopped_after
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from adaptive_batch.report import read_records

RATE = 0.01
ROWS = 30  # 8 steps of 4 rows, the last one short
EPOCHS = 2
BASE = (
    "dataset._component_=support.components.OfLengths",
    "optimizer=torch.optim.SGD",
    f"optimizer.lr={RATE}",
    "drop_last=False",
)
EQUAL = f"dataset.lengths={[12] * ROWS}"
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
WARM = ("lr_scheduler.num_warmup_steps=3",)
KEY = "batch_size_schedule"
CONSTANT = (
    f"{KEY}._component_=adaptive_batch.schedules.steps",
    f"{KEY}.batch_sizes=[4]",
    f"{KEY}.thresholds=[]",
    "micro_batch_size=4",
    "grow_beyond_maximum=True",
)
MIXED = "lr_clock={warmup: steps, decay: tokens}"

SCHEDULERS = {
    "cosine": (
        (f"lr_scheduler._component_={COSINE}", *WARM),
        lambda one, total: get_cosine_schedule_with_warmup(one, 3, total),
    ),
    "OneCycleLR": (
        ("lr_scheduler._component_=support.batch_rules.one_cycle",),
        batch_rules.one_cycle,
    ),
}
EVERY = ("lr_clock=samples", "lr_clock=tokens", "lr_clock=steps")
CASES = {
    "cosine": (*EVERY, MIXED),
    "OneCycleLR": ("lr_clock=steps",),
}
TRACES = [(name, clock, ()) for name, clocks in CASES.items() for clock in clocks]
TRACES += [("cosine", clock, CONSTANT) for clock in CASES["cosine"]]


def rates(finished):
    """Return the rate of each step by its number, of the last start that did it."""
    records = read_records(finished.output_dir / "adaptive_batch" / "run.jsonl")
    return {step["step"]: step["lr"] for step in records if step["kind"] == "step"}


def torchs_own(build, steps):
    """The rate of each step where torch's scheduler is stepped after each."""
    one = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = build(one, steps)
    found = []
    for _ in range(steps):
        found.append(one.param_groups[0]["lr"])
        one.step()
        scheduler.step()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "clock", "schedule"),
    TRACES,
    ids=[f"{name} {clock}{' of a schedule' * bool(schedule)}" for name, clock, schedule in TRACES],
)
def test_a_constant_batch_has_the_rates_of_torch_also_after_resuming(small, name, clock, schedule):
    overrides, build = SCHEDULERS[name]
    settings = (
        *BASE,
        EQUAL,
        *overrides,
        clock,
        f"epochs={EPOCHS}",
        "save_every_n_steps=5",
        *schedule,
    )
    whole = small.run_in_process(OURS, *settings)
    expected = torchs_own(build, 2 * 8)
    assert len(set(expected)) > 8
    assert list(rates(whole).values()) == expected
    folder = stopped_after(whole, small, 5)
    (folder / "adaptive_batch" / "run.jsonl").unlink()
    rest = resume_run(small, folder, *settings)
    assert rates(rest) == {step + 1: rate for step, rate in enumerate(expected) if step >= 5}


# --- a batch that grows


def cosine(step, *, warmup, total):
    """Hand-written: linear up, then half a cosine down."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


# --- a run that goes on


def go_on(small, finished, step, *settings):
    """The rates from a checkpoint within an epoch, by the number of the step."""
    folder = small.fresh_folder()
    shutil.copytree(finished.output_dir / f"step_{step}", folder / f"step_{step}")
    rest = resume_run(small, folder, *settings)
    assert min(rates(rest)) == step + 1
    return rates(rest)


WARM_COSINE = (f"lr_scheduler._component_={COSINE}", *WARM)


ENDS = (*WARM_COSINE, "lr_clock=steps", "epochs=2")


def ends_at(found, total):
    """Assert that each rate is that of a cosine over `total` steps."""
    assert max(found) == total
    expected = {step: RATE * cosine(step - 1, warmup=3, total=total) for step in found}
    assert found == pytest.approx(expected)


def test_a_schedule_by_steps_ends_at_the_last_step_after_the_batch_size_changed(small):
    """18 of 2 x 16 steps of 2 rows are done; the last 28 rows are 4 steps of 8."""
    settings = (*BASE, f"dataset.lengths={[12] * 32}", *ENDS, "save_every_n_steps=6")
    first = small.run_in_process(OURS, *settings, "batch_size=2")
    ends_at(rates(first), 32)
    ends_at(go_on(small, first, 18, *settings, "batch_size=8"), 22)


def test_a_resumed_run_keeps_the_reference_batch_of_its_rate(small):
    """The rate was chosen for it, whatever is configured now."""
    scaled = ("lr_scaling=linear", "epochs=1", "max_steps_per_epoch=4", "save_every_n_steps=2")
    begun = small.run_in_process(OURS, *scaled, "batch_size=2")
    folder = stopped_after(begun, small, 2)
    keys = (*scaled, "batch_size=4", f"output_dir={folder}", "resume_from_checkpoint=True")
    small.run_in_process(OURS, *keys)
    log = read_records(folder / "adaptive_batch" / "run.jsonl")
    steps = {record["step"]: record for record in log if record["kind"] == "step"}
    assert steps[3]["lr"] == pytest.approx(2 * steps[2]["lr"])
    kinds = {record["kind"]: record for record in log if record["kind"] != "step"}
    assert "reference_batch_size" not in kinds
    assert kinds["batch_size"]["message"] == "batch_size 2 -> 4: differs from the checkpoint"


def test_the_first_step_of_a_warm_up_changes_nothing_with_the_optimizer_in_backward(small):
    """In torchtune's recipe it has the full rate."""
    warm, _ = SCHEDULERS["cosine"]
    one_step = ("optimizer_in_bwd=True", "epochs=1", "max_steps_per_epoch=1", "batch_size=4")
    done = small.run_in_process(OURS, *BASE, EQUAL, *warm, *one_step)
    assert rates(done) == {1: 0}
    (saved,) = (done.output_dir / "epoch_0").glob("*.safetensors")
    trained = load_file(saved)
    for name, weight in load_file(small.folder / "base" / "model.safetensors").items():
        assert torch.equal(trained[name], weight)
