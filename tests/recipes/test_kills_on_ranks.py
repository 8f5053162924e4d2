"""Ranks that are asked to end save one point, and the run resumes to the same bits. Ranks that are
killed: benchmarks/kills_on_ranks.py.
"""

import signal

import pytest
from support import killed_runs
from support.killed_runs_on_ranks import (
    RANKS,
    WAYS,
    send_after,
    undisturbed,
)
from support.launch import launch

from adaptive_batch.distributed import EXIT_STATUS
from adaptive_batch.report import read_records
from adaptive_batch.report.auditing import RECORD

pytestmark = pytest.mark.slow

PLAIN = WAYS["plain"]
KINDS = ("preempted", "resume_point")


@pytest.fixture(scope="module")
def whole(small):
    return undisturbed(small, PLAIN)


@pytest.mark.nightly
def test_ranks_of_which_one_or_all_are_asked_to_end_save_one_point_and_resume_to_the_same_bits(
    small, whole
):
    folder, overrides = small.fresh_folder(), (*PLAIN, "save_every_n_steps=null")
    for number, victims in enumerate([(1,), tuple(range(RANKS))]):
        goes_on = ("resume_from_checkpoint=True",) if number else ()
        asks = send_after(folder, 3, signal.SIGTERM, victims)
        (ended,) = launch(small, RANKS, *overrides, f"output_dir={folder}", *goes_on, during=asks)
        assert ended.exit_statuses == [EXIT_STATUS] * RANKS, ended.output
        asked, saved = (
            [r["step"] for r in read_records(folder / RECORD) if r["kind"] == kind]
            for kind in KINDS
        )
        epochs = [r["steps"] for r in read_records(folder / RECORD) if r["kind"] == "checkpoint"]
        assert len(asked) == number + 1
        assert set(saved) <= set(asked)
        assert asked[-1] in epochs or (folder / f"step_{asked[-1]}" / "resume.json").exists()
    (done,) = launch(
        small, RANKS, *overrides, f"output_dir={folder}", "resume_from_checkpoint=True"
    )
    assert done.exit_statuses == [0] * RANKS, done.output
    assert killed_runs.differences(folder, whole.folder) == []
