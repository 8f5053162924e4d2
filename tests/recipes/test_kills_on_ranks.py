"""Two ranks that are killed or stopped by a signal resume bit for bit.

benchmarks/kills.py kills one process at random moments.
"""

import re
import signal

import pytest
from support.cli import OURS, cosine_after, records
from support.killed_runs import DROPOUT, MOMENTS, SAVES, ending
from support.trajectories import run_differences

from adaptive_batch.distributed import EXIT_STATUS

PLAIN = (*SAVES, *DROPOUT, *cosine_after(3), "batch_size=2", "epochs=2")


@pytest.fixture(scope="module")
def whole(small):
    return small.run(OURS, *PLAIN, ranks=2).output_dir


@pytest.mark.parametrize(
    ("aim", "killed"),
    [
        ("among steps", 1),
        pytest.param("in a save", 0, marks=pytest.mark.slow),
        pytest.param("in an epoch's save", 1, marks=pytest.mark.slow),
    ],
)
def test_a_restart_after_a_killed_rank_equals_the_undisturbed_run(small, whole, aim, killed):
    folder = small.fresh_folder()
    keys = (OURS, *PLAIN, f"output_dir={folder}", "resume_from_checkpoint=auto")
    kill = ending(aim, call=MOMENTS[aim].calls, seconds=0.01)
    statuses = [-signal.SIGALRM if rank == killed else 1 for rank in range(2)]
    first = small.run(
        *keys,
        ranks=2,
        environment=lambda rank: kill if rank == killed else {},
        before="support.killed_runs.arm",
        expect=statuses,
    )
    assert first.spread < 60
    messages = re.findall(r"^(?:rank \d+:.*|Traceback.*)$", first.output, flags=re.MULTILINE)
    assert len(messages) == 1, first.output[-5000:]
    small.run(*keys, ranks=2)
    assert [start["resumed"] for start in records(folder, "start")] == [False, True]
    assert run_differences(folder, whole) == []


@pytest.mark.slow
def test_ranks_that_are_asked_to_end_save_one_checkpoint_and_resume_bit_for_bit(small, whole):
    folder = small.fresh_folder()
    keys = (OURS, *PLAIN, "save_every_n_steps=null", f"output_dir={folder}")
    for asked in ((1,), (0, 1)):
        small.run(
            *keys,
            ranks=2,
            environment=lambda rank, asked=asked: (
                ending("among steps", call=3) if rank in asked else {}
            ),
            before="support.killed_runs.arm",
            expect=EXIT_STATUS,
        )
        last = records(folder, "preempted")[-1]["step"]
        assert (folder / f"step_{last}" / "resume.json").exists()
        keys = (*keys, "resume_from_checkpoint=True")
    small.run(*keys, ranks=2)
    assert run_differences(folder, whole) == []
