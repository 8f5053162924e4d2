"""Ranks that fail, hang or are killed under torchrun: how each ends, what is printed, and what is
recorded.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.paths import subprocess_environment
from support.ranks import reserved_port

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
    # A rank that ends before others hang would end them where they are not.
    time.sleep(0.5 * (rank == 1))
    """


def torchrun(
    folder: Path,
    program: str,
    *arguments: str,
    ranks: int = 2,
    nodes: Sequence[str] = ("--standalone",),
    before: str = PROGRAM,
) -> subprocess.Popen:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(before) + textwrap.dedent(program))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    variables |= {"PYTHONPATH": subprocess_environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}
    with open(folder / "printed", "a") as printed:
        return subprocess.Popen(
            [*command, *nodes, *arguments, str(script)],
            env=variables,
            stdout=printed,
            stderr=printed,
        )


def printed(folder: Path) -> tuple[str, str]:
    """Return what ranks printed, and the root cause in torchrun's summary."""
    text, _, root_cause = (folder / "printed").read_text().partition("Root Cause")
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
    process = torchrun(tmp_path, program, "--max-restarts", "1", ranks=3)
    assert process.wait(60) == 0, (tmp_path / "printed").read_text()
    text, _ = printed(tmp_path)
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
    assert torchrun(tmp_path, program, ranks=3).wait(60) == 1
    text, root_cause = printed(tmp_path)
    assert text.count("another rank exited without an error message") == 1
    assert "rank      : 1 (local_rank: 1)" in root_cause
    assert "Signal 9 (SIGKILL)" in root_cause
    assert recorded(tmp_path)[1] == "lost_peer"


@pytest.mark.slow
def test_a_rank_whose_collective_times_out_names_the_rank_that_hangs(tmp_path):
    program = """
        from datetime import timedelta

        def read_a_row():
            time.sleep(100)

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
        "    endings._SECONDS_BETWEEN_PLACES = 0.2\n"
        "    watch = Watchdog()",
    )
    assert torchrun(tmp_path, program, ranks=3, before=before).wait(60) == 1
    text, root_cause = printed(tmp_path)
    assert text.count("a collective timed out") == 1
    assert "; rank 1 is in read_a_row (" in text
    assert text.count(" is in ") == 1
    assert "rank 1 is in read_a_row" in root_cause
    assert text.count("the reason could not be recorded: OSError: no space left") == 1
    assert recorded(tmp_path)[1] == "stalled"


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


@pytest.mark.nightly
def test_nodes_that_count_their_restarts_differently_meet_again(tmp_path, port):
    program = """
        import os, signal, time
        from pathlib import Path

        from adaptive_batch import distributed

        folder, rank = Path(__file__).parent, int(os.environ["RANK"])
        is_first = not (folder / f"started{rank}").exists()
        (folder / f"started{rank}").touch()
        if is_first and rank == 1:
            while not (folder / "started0").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)  # only its node counts that
        if is_first:
            time.sleep(100)
        distributed.init_process_group("gloo")
        counts = distributed.all_gather(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if rank == 0:
            print(f"<met with {'+'.join(sorted(counts))}>", flush=True)
        distributed.destroy_process_group()
    """
    nodes = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    both = [
        torchrun(tmp_path, program, "--max-restarts", "1", ranks=1, nodes=nodes, before="")
        for _ in range(2)
    ]
    assert [process.wait(90) for process in both] == [0, 0], (tmp_path / "printed").read_text()
    assert "<met with 0+1>" in (tmp_path / "printed").read_text()
