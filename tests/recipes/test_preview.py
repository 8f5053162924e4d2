"""`preview=True` shows the plan of training before weights load."""

import json
import math
import re
import shutil

import pytest
from support.cli import OURS, block, cosine_after, records, resume_run
from support.stops import stopped_after
from support.trajectories import SCHEDULE, STEPS

RAMP = block(SCHEDULE, STEPS, batch_sizes="[4,8,16]", thresholds="[0.5ep,1ep]")
COSINE = cosine_after(2)
EQUAL = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={[12] * 32}")
HEAD = ["from", "step", "sample", "to", "step", "sample", "batch (rows)", "micro-batches"]
HEAD += ["global batch", "lr at start", "at end", "steps"]


@pytest.fixture
def plan(small, capsys):
    """Return a function that runs a preview with unreadable weights."""

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
    """Return the rows of the printed table without its header."""
    start = next(number for number, line in enumerate(lines) if line.strip().startswith("from "))
    rows = [[cell for cell in re.split(r" {2,}", line.strip()) if cell] for line in lines[start:]]
    assert rows[0] == HEAD
    end = next(number for number, row in enumerate(rows) if row[0].startswith("total"))
    return rows[1:end]


def test_a_preview_prints_the_expected_table_and_writes_nothing(small, plan):
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
    expected = f"""
        0.00ep 0  0  0.50ep  4 16  4 1  4           0  {rates[3]:.3g} 4
        0.50ep 4 16  1.00ep  6 32  8 1  8  {rates[4]:.3g}  {rates[6]:.3g} 2
        1.00ep 6 32  3.00ep 10 96 16 2 16  {rates[8]:.3g} {rates[20]:.3g} 4
    """
    assert cells(lines) == [line.split() for line in expected.strip().splitlines()]
    assert lines[-1] == "total: 3.00 epochs, 10 steps, 96 samples, 1,152 tokens"
    assert not list(output.iterdir())


def test_a_run_logs_its_preview_and_a_resumed_preview_shows_the_remaining_steps(small, plan):
    settings = (
        *RAMP,
        *COSINE,
        "epochs=2",
        "grow_beyond_maximum=True",
        "micro_batch_size=4",
        "save_every_n_steps=5",
    )
    run = small.run_in_process(OURS, *settings)
    (stages,) = records(run, "stages")
    whole = cells(plan(*settings))
    assert cells(stages["message"].splitlines()) == whole
    for path in (run.output_dir / "step_6", *run.output_dir.glob("epoch_*")):
        shutil.rmtree(path)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.output_dir.rglob("*"))
    resumes = (*settings, "resume_from_checkpoint=True")
    first, *rest = cells(plan(*resumes, output=run.output_dir, base=small.base))
    assert [row[:9] + row[10:] for row in rest] == [row[:9] + row[10:] for row in whole[2:]]
    assert first[:9] == ["0.75ep", "5", "24", "1.00ep", "6", "32", "8", "2", "8"]
    assert (first[10], first[11]) == (whole[1][10], "1")
    assert sorted((path, path.stat().st_mtime_ns) for path in run.output_dir.rglob("*")) == before


def test_previews_searches_and_runs_show_that_a_lost_trial_halves_the_rows(
    small, plan, capsys, monkeypatch
):
    monkeypatch.setattr("adaptive_batch.torchtune.limit_finder.settings_name", lambda *run: "name")
    keys = ("use_maximum_batch_size=True", "save_every_n_steps=1", "epochs=2")
    folder = stopped_after(small.run_in_process(OURS, *keys), small, 2)
    lost = folder / "adaptive_batch" / "lost.json"
    lost.write_text(json.dumps({"trial_rows": 16, "trial_settings": "name"}))
    note = "trial_rows=16: this trial ended all ranks, "
    resumes = (*keys, "resume_from_checkpoint=True")
    first, second, *_ = plan(*resumes, output=folder, base=small.base)
    assert first.startswith(note)
    assert second == "bound: 8"
    small.run_in_process("adaptive_probe", *resumes, f"output_dir={folder}")
    shown = capsys.readouterr().out
    assert note in shown
    assert "max_batch_size: 8+" in shown
    resume_run(small, folder, *keys)
    (logged,) = records(folder, "indeterminate")
    assert logged["message"].startswith(note)
    assert records(folder, "bound")[-1]["max_batch_size"] == 8
