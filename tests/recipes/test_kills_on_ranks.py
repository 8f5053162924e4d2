"""Two ranks that are killed, or asked to end, resume to the bits of ranks that nothing happened to.

Kills of one process at random moments: benchmarks/kills.py.
"""

import re
import signal

import pytest
from support.cli import cosine_after
from support.killed_runs import DROPOUT, SAVES, signal_ranks
from support.launch import launch
from support.trajectories import run_differences

from adaptive_batch.distributed import EXIT_STATUS
from adaptive_batch.report import read_records
from adaptive_batch.report.auditing import RECORD

PLAIN = (*SAVES, *DROPOUT, *cosine_after(3), "batch_size=2", "epochs=2")


@pytest.fixture(scope="module")
def whole(small):
    (whole,) = launch(small, 2, *PLAIN)
    assert whole.exit_statuses == [0, 0], whole.output[-5000:]
    return whole.output_dir


def messages(output):
    return re.findall(r"^(?:rank \d+:.*|Traceback.*)$", output, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("aim", "killed"),
    [
        ("among steps", (1,)),
        pytest.param("in a save", (0,), marks=pytest.mark.slow),
        pytest.param("in an epoch's save", (1,), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_restart_after_ranks_were_killed_has_the_bits_of_the_undisturbed_run(
    small, whole, aim, killed
):
    folder = small.fresh_folder()
    kill = signal_ranks(folder, aim, killed, count=5)
    first, second = launch(small, 2, *PLAIN, f"output_dir={folder}", restarts=1, during=kill)
    expected = [-signal.SIGKILL if rank in killed else 1 for rank in range(2)]
    assert first.exit_statuses == expected, first.output[-5000:]
    assert first.spread < 60
    assert len(messages(first.output)) == (len(killed) == 1), first.output[-5000:]
    assert second.exit_statuses == [0, 0], second.output[-5000:]
    starts = [r for r in read_records(folder / RECORD) if r["kind"] == "start"]
    assert [start["resumed"] for start in starts] == [False, True]
    assert run_differences(folder, whole) == []


@pytest.mark.slow
def test_ranks_that_are_asked_to_end_save_one_resume_point_and_resume_to_the_same_bits(
    small, whole
):
    folder, keys = small.fresh_folder(), (*PLAIN, "save_every_n_steps=null")
    resumes = ()
    for asked in ((1,), (0, 1)):
        asks = signal_ranks(folder, "among steps", asked, count=3, number=signal.SIGTERM)
        (ended,) = launch(small, 2, *keys, *resumes, f"output_dir={folder}", during=asks)
        assert ended.exit_statuses == [EXIT_STATUS] * 2, ended.output[-5000:]
        last = [r for r in read_records(folder / RECORD) if r["kind"] == "preempted"][-1]["step"]
        assert (folder / f"step_{last}" / "resume.json").exists()
        resumes = ("resume_from_checkpoint=True",)
    (done,) = launch(small, 2, *keys, *resumes, f"output_dir={folder}")
    assert done.exit_statuses == [0, 0], done.output[-5000:]
    assert run_differences(folder, whole) == []
