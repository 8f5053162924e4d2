"""What is going to be trained can be seen before anything is loaded: `preview=True`."""

import json
import math
import re
import shutil

import pytest
from support.cli import OURS, cosine_after

KEY = "batch_size_schedule"
RAMP = (
    f"{KEY}._component_=adaptive_batch.schedules.steps",
    f"{KEY}.batch_sizes=[4,8,16]",
    f"{KEY}.thresholds=[0.5ep,1ep]",
)
COSINE = cosine_after(2)
EQUAL = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={[12] * 32}")
HEAD = [
    "from",
    "step",
    "sample",
    "to",
    "step",
    "sample",
    "batch (rows)",
    "micro-batches",
    "global batch",
]
HEAD += ["lr at start", "at end", "steps"]


@pytest.fixture
def plan(small, capsys):
    """Plans with weights that cannot be read: what loads them fails."""

    def plan(*overrides, output=None, base=None):
        output = output or small.fresh_folder()
        if base is None:
            base = small.fresh_folder()
            (base / "model.safetensors").write_bytes(b"not weights")
            (base / "config.json").write_text((small.base / "config.json").read_text())
        capsys.readouterr()
        settings = (
            f"output_dir={output}",
            f"checkpointer.checkpoint_dir={base}",
            "preview=True",
            *overrides,
        )
        small.run_in_process(OURS, *settings)
        return capsys.readouterr().out.strip().splitlines()

    return plan


def cells(lines):
    """The rows of the table, under its head."""
    start = next(number for number, line in enumerate(lines) if line.strip().startswith("from "))
    rows = [[cell for cell in re.split(r" {2,}", line.strip()) if cell] for line in lines[start:]]
    assert rows[0] == HEAD
    end = next(number for number, row in enumerate(rows) if row[0].startswith("in all"))
    return rows[1:end]


def test_the_table_is_what_comes_out_by_hand_and_nothing_is_loaded_or_written(small, plan):
    output = small.fresh_folder()
    lines = plan(
        *EQUAL,
        *RAMP,
        *COSINE,
        "epochs=3",
        "grow_beyond_maximum=True",
        "micro_batch_size=8",
        output=output,
    )
    rates = {
        clock: 0.01 * 0.5 * (1 + math.cos(math.pi * (clock - 2) / 22)) for clock in (3, 4, 6, 8, 20)
    }
    expected = [
        ["0.00ep", "0", "0", "0.50ep", "4", "16", "4", "1", "4", "0", f"{rates[3]:.3g}", "4"],
        [
            "0.50ep",
            "4",
            "16",
            "1.00ep",
            "6",
            "32",
            "8",
            "1",
            "8",
            f"{rates[4]:.3g}",
            f"{rates[6]:.3g}",
            "2",
        ],
        [
            "1.00ep",
            "6",
            "32",
            "3.00ep",
            "10",
            "96",
            "16",
            "2",
            "16",
            f"{rates[8]:.3g}",
            f"{rates[20]:.3g}",
            "4",
        ],
    ]
    assert cells(lines) == expected
    assert lines[-1] == "in all: 3.00 epochs, 10 steps, 96 samples, 1,152 tokens"
    assert not list(output.iterdir())


def test_no_base_checkpoint_is_needed(plan):
    assert plan(*EQUAL, base="/nowhere")[-1].startswith("in all: 2.00 epochs")


def test_a_plan_is_what_the_run_then_writes_down(small, plan):
    settings = (
        *RAMP,
        *COSINE,
        "epochs=2",
        "grow_beyond_maximum=True",
        "micro_batch_size=4",
        "lr_clock=steps",
    )
    planned = cells(plan(*settings))
    run = small.run_in_process(OURS, *settings)
    lines = (run.output_dir / "adaptive_batch" / "run.jsonl").read_text().splitlines()
    (stages,) = [record for record in map(json.loads, lines) if record["kind"] == "stages"]
    assert cells(stages["message"].splitlines()) == planned


def test_a_constant_batch_is_one_stage(plan):
    (row,) = cells(plan("epochs=2"))
    assert row == ["0.00ep", "0", "0", "2.00ep", "16", "64", "4", "1", "4", "0.01", "0.01", "16"]


def test_accumulation_is_micro_batches(plan):
    (row,) = cells(plan("epochs=2", "gradient_accumulation_steps=2"))
    assert row[6:9] == ["8", "2", "8"]


def test_a_bound_that_is_assumed_cuts_and_makes_micro_batches(plan):
    lines = plan(*RAMP, "epochs=2", "probe.assumed_maximum=12")
    assert "bound: 12 (probe.assumed_maximum says so)" in lines
    assert [(row[6], row[7]) for row in cells(lines)] == [("4", "1"), ("8", "1"), ("12", "1")]
    free = plan(*RAMP, "epochs=2", "probe.assumed_maximum=6", "grow_beyond_maximum=True")
    assert [(row[6], row[7]) for row in cells(free)] == [("4", "1"), ("8", "2"), ("16", "3")]
    found = plan("use_maximum_batch_size=True", "epochs=1", "probe.assumed_maximum=12")
    assert [row[6] for row in cells(found)] == ["8"]


@pytest.mark.slow
def test_a_bound_that_was_found_before_is_taken(small, plan):
    output = small.fresh_folder()
    memory = ("probe.device_memory=12MiB", "probe.maximum=32")
    small.run_in_process("adaptive_probe", f"output_dir={output}", *memory, *RAMP)
    path = output / "adaptive_batch" / "probe.json"
    before, bound = path.read_bytes(), json.loads(path.read_text())["max_batch_size"]
    assert bound < 16
    lines = plan(*RAMP, *memory, output=output, base=small.base)
    assert f"bound: {bound} (a search found that before ({path}))" in lines
    assert [int(row[6]) for row in cells(lines)] == sorted(
        {4, min(8, bound), bound}
    )  # stages alike are one
    assert path.read_bytes() == before
    another = plan(*RAMP, *memory, "tokenizer.max_seq_len=32", output=output, base=small.base)
    assert any(line.startswith("bound: not known") for line in another)


def test_what_is_left_of_a_run_is_planned(small, plan):
    settings = (
        *RAMP,
        *COSINE,
        "epochs=2",
        "grow_beyond_maximum=True",
        "micro_batch_size=4",
        "save_every_n_steps=5",
    )
    run = small.run_in_process(OURS, *settings)
    for path in (*run.output_dir.glob("epoch_*"), run.output_dir / "recipe_state"):
        shutil.rmtree(path)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.output_dir.rglob("*"))
    lines = plan(*settings, "resume_from_checkpoint=True", output=run.output_dir, base=small.base)
    whole = cells(plan(*settings))
    assert [row[:9] + row[10:] for row in cells(lines)[1:]] == [
        row[:9] + row[10:] for row in whole[2:]
    ]
    first = cells(lines)[0]
    assert first[:9] == ["0.75ep", "5", "24", "1.00ep", "6", "32", "8", "2", "8"]
    assert (first[10], first[11]) == (whole[1][10], "1")
    assert sorted((path, path.stat().st_mtime_ns) for path in run.output_dir.rglob("*")) == before


def test_the_rate_ends_with_the_steps_of_the_batch_that_is_configured_now(small, plan):
    settings = (*EQUAL, *COSINE, "epochs=2", "lr_clock=steps")
    run = small.run_in_process(OURS, *settings, "batch_size=4", "save_every_n_steps=4")
    for path in (*run.output_dir.glob("epoch_*"), *run.output_dir.glob("step_*")):
        if path.name != "step_4":
            shutil.rmtree(path)
    resumed = (*settings, "resume_from_checkpoint=True")
    for batch_size, steps in (("4", 16), ("8", 10)):
        lines = plan(*resumed, f"batch_size={batch_size}", output=run.output_dir, base=small.base)
        assert f"the schedule of the learning rate ends at step {steps}" in lines


def test_an_assumed_bound_is_no_more_than_an_epochs_rows(plan):
    lines = plan("use_maximum_batch_size=True", "epochs=2", "probe.assumed_maximum=4096")
    assert "bound: 32 (probe.assumed_maximum says so)" in lines
    (row,) = cells(lines)
    assert (row[6], row[7], row[-1]) == ("32", "1", "2")


@pytest.mark.parametrize(
    ("settings", "batch"),
    [(("micro_batch_size=auto", "batch_size=16"), "16"), (("batch_tokens=400",), "400")],
    ids=["micro_batch_size=auto", "batch_tokens"],
)
def test_where_no_bound_is_known_micro_batches_are_not_known(plan, settings, batch):
    lines = plan("epochs=1", *settings)
    assert any(
        line.startswith("bound: not known") and "micro-batches are not known" in line
        for line in lines
    )
    head = next(number for number, line in enumerate(lines) if line.strip().startswith("from "))
    (row,) = [re.split(r" {2,}", line.strip()) for line in lines[head + 1 : -1]]
    assert (row[6], row[7]) == (batch, "?")


def test_a_plan_of_what_is_left_shows_the_checkpoints_rate(small, plan):
    settings = (
        *RAMP,
        "epochs=1",
        "grow_beyond_maximum=True",
        "micro_batch_size=4",
        "save_every_n_steps=3",
    )
    run = small.run_in_process(OURS, *settings)
    for path in (*run.output_dir.glob("epoch_*"), run.output_dir / "step_6"):
        shutil.rmtree(path)
    asked = (*settings, "resume_from_checkpoint=True", "optimizer.lr=0.5")
    rows = cells(plan(*asked, output=run.output_dir, base=small.base))
    assert rows[0][1] == "3"
    assert {(row[9], row[10]) for row in rows} == {("0.01", "0.01")}


def test_a_scheduler_that_counts_is_stepped_along_and_its_rates_are_scaled(plan):
    """Eight steps of 4 rows, four of 8 and two of 16 in an epoch each; the rate is divided by ten
    every second step.
    """
    settings = (
        *RAMP[:2],
        f"{KEY}.thresholds=[1ep,2ep]",
        "lr_scheduler._component_=support.schedulers.step_lr",
    )
    rows = cells(
        plan(
            *EQUAL,
            *settings,
            "lr_scaling=linear",
            "epochs=3",
            "grow_beyond_maximum=True",
            "micro_batch_size=4",
        )
    )
    assert [row[-1] for row in rows] == ["8", "4", "2"]
    stages = ((0, 7, 1), (8, 11, 2), (12, 13, 4))
    expected = [
        [0.01 * 0.1 ** (step // 2) * batch for step in (first, last)]
        for first, last, batch in stages
    ]
    assert [[float(rate) for rate in row[-3:-1]] for row in rows] == [
        pytest.approx(pair, rel=1e-3) for pair in expected
    ]


def test_a_scheduler_that_refuses_a_warm_up_above_its_total_is_called_with_no_smaller_total(
    plan,
):
    settings = (
        "lr_scheduler._component_=support.batch_rules.refuses_a_long_warm_up",
        "lr_scheduler.num_warmup_steps=1500",
    )
    (row,) = cells(plan(*settings, "epochs=200"))
    assert row[-1] == "1,600"
    with pytest.raises(ValueError, match="1500 steps of warm-up are more than all 16"):
        plan(*settings, "epochs=2")
