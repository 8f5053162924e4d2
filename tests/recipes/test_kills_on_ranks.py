"""Ranks that are killed or asked to end: the run goes on by itself, to the same bits. The long
form: benchmarks/kills_on_ranks.py.
"""

import random
import signal

import pytest
from support import killed_runs
from support.killed_runs_on_ranks import (
    RANKS,
    WAYS,
    Killer,
    killed_before_its_first_save,
    killed_under_torchrun,
    run_killed,
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
def test_a_killed_rank_ends_the_others_with_one_message_and_the_restarted_run_has_no_difference(
    small, whole
):
    aims = [("among steps", (0,)), ("in a save", (1,))]
    killer = Killer(small.fresh_folder(), random.Random(0), whole, kills=len(aims), aims=aims)
    assert run_killed(small, PLAIN, killer) == []
    assert [kill.victims for kill in killer.done] == [(0,), (1,)]
    for kill in killer.done:
        (said,) = kill.said
        assert "has gone" in said


@pytest.mark.nightly
def test_a_run_that_is_killed_before_its_first_save_begins_again_and_leaves_earlier_ones_alone(
    small, whole
):
    found = killed_before_its_first_save(small, whole)
    assert [kill["hit"] for kill in found["kills"]] == [
        "before its first line",
        "before its first save",
    ]
    assert found["differing"] == []


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


@pytest.mark.nightly
def test_under_torchrun_a_killed_rank_leaves_no_process_and_the_run_goes_on_by_itself(small, whole):
    found = killed_under_torchrun(small, whole, kills=1, seed=0)
    assert found["differing"] == []
