"""The exit and the error record of ranks that fail, hang or are killed under torchrun."""

import json
import textwrap
from pathlib import Path

import pytest
from support.processes import run_python

PROGRAM = """
    import json, os, signal, time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from adaptive_batch.distributed import Watchdog, init_process_group
    from adaptive_batch.errors import RankLostError

    folder, rank = Path(__file__).parent, int(os.environ["RANK"])
    watch = Watchdog()

    def on_end(*reason):
        (folder / "end.json").write_text(json.dumps([rank, *reason]))

    def reduce_until_it_fails():
        try:
            while True:
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            watch.fail(error)

    watch.on_end = on_end
    init_process_group("gloo")
    dist.barrier()
    # Let the other rank enter its collective before this rank fails.
    time.sleep(0.5 * (rank == 1))
    """


def torchrun(
    folder: Path, program: str, *arguments: str, ranks: int, expect: int = 1, before: str = PROGRAM
) -> tuple[str, str]:
    """Run a program; return the ranks' output and the root cause in torchrun's summary."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(before) + textwrap.dedent(program))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    done = run_python(*launch, *arguments, script, expect=expect, timeout=150)
    text, _, root_cause = (done.stdout + done.stderr).partition("Root Cause")
    return text, root_cause


def recorded(folder: Path) -> list:
    return json.loads((folder / "end.json").read_text())


@pytest.mark.slow
def test_a_rank_that_fails_ends_those_that_hang_and_a_restart_trains(tmp_path):
    program = """
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            print(f"<rank {rank} trained>", flush=True)
            dist.destroy_process_group()
            raise SystemExit
        if rank == 1:
            watch.fail(RankLostError("one row needs 25.1 GiB", {"limit": 1}))
        if rank == 0:
            dist.recv(torch.ones(1), src=2)  # rank 2 lives, until torchrun ends it
        reduce_until_it_fails()
    """
    text, _ = torchrun(tmp_path, program, "--max-restarts", "1", ranks=3, expect=0)
    assert text.splitlines().count("RankLostError: one row needs 25.1 GiB") == 1
    assert "Traceback" not in text
    assert "another rank" not in text
    assert all(text.count(f"<rank {rank} trained>") == 1 for rank in range(3))
    message = "RankLostError: one row needs 25.1 GiB"
    assert recorded(tmp_path) == [1, "out_of_memory", message, {"limit": 1}]


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_the_summary_names_it(tmp_path):
    program = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        reduce_until_it_fails()
    """
    text, root_cause = torchrun(tmp_path, program, ranks=3)
    assert text.count("another rank exited without an error message") == 1
    assert "rank      : 1 (local_rank: 1)" in root_cause
    assert "Signal 9 (SIGKILL)" in root_cause
    assert recorded(tmp_path)[1] == "lost_peer"


@pytest.mark.slow
def test_a_rank_whose_collective_times_out_names_the_rank_that_hangs(tmp_path):
    program = """
        from datetime import timedelta

        def read_a_row():
            time.sleep(1000)

        def on_a_full_disk(*reason):
            on_end(*reason)
            raise OSError("no space left")

        watch.on_end = on_a_full_disk

        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
        if rank == 1:
            read_a_row()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            watch.fail(error)
    """
    before = PROGRAM.replace(
        "watch = Watchdog()",
        "import adaptive_batch.distributed.endings as endings\n"
        "    endings._SECONDS_BETWEEN_LINES = 0.2\n"
        "    watch = Watchdog()",
    )
    text, root_cause = torchrun(tmp_path, program, ranks=3, before=before)
    assert text.count("a collective timed out") == 1
    assert "; rank 1 is in read_a_row (" in text
    assert text.count(" is in ") == 1
    assert "rank 1 is in read_a_row" in root_cause
    assert text.count("the reason could not be recorded: OSError: no space left") == 1
    assert recorded(tmp_path)[1] == "stalled"
