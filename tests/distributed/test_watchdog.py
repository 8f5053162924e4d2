"""Ranks as processes that fail, hang, are killed or end well: how each ends, what is said, what
rank zero writes down.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.paths import subprocess_environment
from support.ranks import SPAWNED, reserved_port

from adaptive_batch.distributed import End, Watchdog
from adaptive_batch.errors import DoesNotFitError

# What they write to stderr is read.
end_of_ranks = partial(ranks.end_of_ranks, context=SPAWNED)

# Ranks end within this time; without the watch they would hang for longer.
PROMPT_SECONDS = 30
ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started(folder: Path, **settings: object) -> Watchdog:
    """A watch whose rank zero writes into `folder` why the run ended."""
    watch = Watchdog(
        on_end=lambda end: (folder / "end.json").write_text(json.dumps(asdict(end))), **settings
    )
    watch.start()
    return watch


def written(folder: Path) -> End:
    return End(**json.loads((folder / "end.json").read_text()))


def seconds_since(folder: Path) -> float:
    """Since a rank noted that it fails; the clock is that of the machine."""
    return time.monotonic() - float((folder / "failed").read_text())


def note_failure(folder: Path) -> None:
    time.sleep(0.5)  # the others are where they hang by then
    (folder / "failed").write_text(str(time.monotonic()))


def reduce_until_it_fails(watch: Watchdog) -> None:
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        watch.fail(error)


def how(ended: list) -> list:
    """The exit status of each rank, and what it raised, which an end by the watch leaves no time
    for.
    """
    return [(one.exit_status, one.error) for one in ended]


# one rank fails


def one_of_three_fails(folder: Path) -> None:
    started(folder).stop()  # what was said then is not heard again
    watch = started(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=2)  # which nothing but the watch would end: rank 2 lives
    if dist.get_rank() == 1:
        note_failure(folder)
        watch.fail(
            DoesNotFitError("one row of 4096 tokens needs 25.1 GiB"),
            kind="out_of_memory",
            facts={"rows": 1, "length": 4096},
        )
    reduce_until_it_fails(watch)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_where_they_hang(tmp_path, capfd):
    ended = end_of_ranks(one_of_three_fails, 3, tmp_path, timeout=60)
    assert how(ended) == [(1, None)] * 3
    assert seconds_since(tmp_path) < PROMPT_SECONDS
    message = "DoesNotFitError: one row of 4096 tokens needs 25.1 GiB"
    assert capfd.readouterr().err == f"\n{message}\n"  # an error of ours, once, and nothing else
    assert written(tmp_path) == End(1, "out_of_memory", message, {"rows": 1, "length": 4096})


def one_is_killed(folder: Path) -> None:
    watch = started(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        note_failure(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    reduce_until_it_fails(watch)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others(tmp_path, capfd):
    ended = end_of_ranks(one_is_killed, 2, tmp_path, timeout=60)
    assert how(ended) == [(1, None), (-signal.SIGKILL, None)]
    assert seconds_since(tmp_path) < PROMPT_SECONDS
    said = capfd.readouterr().err
    assert said.startswith("\nrank 0: another rank exited without an error message")
    assert said.strip().count("\n") == 0
    assert written(tmp_path).kind == "lost_peer"


def one_is_killed_while_the_others_do_not_notice(folder: Path) -> None:
    started(folder)
    if os.environ["RANK"] == "2":
        note_failure(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)  # as in a collective of NCCL, where nobody hears that another has gone


@pytest.mark.slow
def test_a_killed_rank_ends_ranks_of_its_machine_that_hang(tmp_path, capfd):
    ended = end_of_ranks(
        one_is_killed_while_the_others_do_not_notice, 3, tmp_path, timeout=60, begins_group=False
    )
    assert how(ended) == [(1, None), (1, None), (-signal.SIGKILL, None)]
    assert seconds_since(tmp_path) < PROMPT_SECONDS
    said = capfd.readouterr().err
    assert (
        said.count("another rank exited without an error message")
        == said.count("(rank 2 is gone)")
        == 1
    )
    assert written(tmp_path).kind == "lost_peer"


# one rank hangs


def one_hangs_within_a_limit(folder: Path) -> None:
    watch = started(folder, stall_seconds=10.0)
    if os.environ["RANK"] == "0":
        with watch.time_limit(None, "waiting"):
            time.sleep(100)
    with watch.time_limit(None, "saving"):
        time.sleep(10.7)
    with watch.time_limit(3.0, "reading"):
        for _ in range(7):
            time.sleep(0.5)
            watch.beat()
    time.sleep(3.5)  # longer than that limit, which no longer holds
    watch.beat()
    (folder / "reached").touch()
    note_failure(folder)
    with watch.time_limit(0.8, "reading the lengths"):
        time.sleep(100)


@pytest.mark.nightly
def test_a_rank_that_stands_still_longer_than_its_limit_ends_all(tmp_path, capfd):
    ended = end_of_ranks(one_hangs_within_a_limit, 2, tmp_path, timeout=60, begins_group=False)
    assert how(ended) == [(1, None)] * 2
    assert (tmp_path / "reached").exists()
    assert 0.8 < seconds_since(tmp_path) < PROMPT_SECONDS
    message = "no progress for 0.8 s, since reading the lengths"
    said = capfd.readouterr().err
    assert said.startswith(f"\nrank 1: {message}; stack:\n")
    assert said.endswith("in one_hangs_within_a_limit\n    time.sleep(100)\n")
    assert said.count("no progress") == 1
    assert written(tmp_path) == End(
        1, "stalled", message, {"seconds": 0.8, "doing": "reading the lengths"}
    )


def all_hang(folder: Path) -> None:
    watch = Watchdog(
        stall_seconds=1.0, on_end=lambda end: (folder / "not" / "there").write_text(end.kind)
    )
    dist.barrier()
    watch.start()
    watch.beat("step 3")
    time.sleep(100)


@pytest.mark.slow
def test_simultaneous_failures_are_reported_once_even_if_they_cannot_be_saved(tmp_path, capfd):
    ended = end_of_ranks(all_hang, 2, tmp_path, timeout=60)
    assert how(ended) == [(1, None)] * 2
    said = capfd.readouterr().err
    assert said.count("no progress for 1 s, since step 3") == 1
    assert said.count("the reason for the end could not be recorded: FileNotFoundError") == 1


# all ranks end well


def ranks_end_at_different_times(folder: Path) -> list:
    facts = []
    # Rank zero, which hosts the store here, goes last, and then first: its process ends at once.
    for first in (1, 0):
        watch = started(folder)
        dist.barrier()
        if dist.get_rank() != first:
            # It would wait for ever if the first waited for it.
            while not (folder / f"{first} has stopped").exists():
                time.sleep(0.05)
            time.sleep(2.5)
        watch.stop()
        watch.stop()
        (folder / f"{dist.get_rank()} has stopped").touch()
        facts.append(threading.active_count())
    return [*facts, (folder / "end.json").exists()]


@pytest.mark.nightly
def test_ranks_that_end_well_at_different_times_end_no_other(tmp_path, capfd):
    ended = end_of_ranks(ranks_end_at_different_times, 2, tmp_path, timeout=60)
    assert how(ended) == [(0, None)] * 2
    assert [one.result for one in ended] == [[1, 1, False]] * 2
    assert capfd.readouterr().err == ""


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


def test_one_rank_alone_is_watched_too(monkeypatch, port):
    for name, value in zip(ENVIRONMENT, ("0", "1", "127.0.0.1", str(port)), strict=True):
        monkeypatch.setenv(name, value)
    threads = threading.active_count()
    watch = Watchdog(stall_seconds=60)
    watch.start()
    assert threading.active_count() == threads + 2
    watch.stop()
    assert threading.active_count() == threads


# the store


def rank_zero_is_killed(folder: Path) -> None:
    started(folder)
    if os.environ["RANK"] == "0":
        note_failure(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


@pytest.mark.slow
def test_a_rank_whose_store_has_gone_ends(tmp_path, capfd):
    ended = end_of_ranks(rank_zero_is_killed, 2, tmp_path, timeout=60, begins_group=False)
    assert how(ended) == [(-signal.SIGKILL, None), (1, None)]
    assert seconds_since(tmp_path) < PROMPT_SECONDS
    assert (
        capfd.readouterr().err.count(
            "rank 1: torchrun, or rank 0 if it hosts the store, has exited"
        )
        == 1
    )


ON_ONE_NODE = ("--standalone", "--nproc-per-node", "2")


def torchrun(
    folder: Path, program: str, *arguments: str, nodes: Sequence[str] = ON_ONE_NODE
) -> subprocess.Popen:
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal, sys, time
            from pathlib import Path

            import torch.distributed as dist
            from test_watchdog import note_failure, reduce_until_it_fails, started

            folder, rank = Path(__file__).parent, int(os.environ["RANK"])
            watch = started(folder)
            """)
        + textwrap.dedent(program)
    )
    command = [sys.executable, "-m", "torch.distributed.run", *nodes]
    paths = os.pathsep.join([str(Path(__file__).parent), subprocess_environment()["PYTHONPATH"]])
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    variables |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with open(folder / "said", "a") as said:
        return subprocess.Popen(
            [*command, *arguments, str(script)], env=variables, stdout=said, stderr=said
        )


@pytest.mark.nightly
def test_a_restart_under_torchrun_does_not_hear_the_earlier_failure(tmp_path):
    program = """
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            # As a recipe that saves when it is asked to end.
            signal.signal(signal.SIGTERM, lambda number, frame: None)
            dist.init_process_group("gloo")
            dist.barrier()
            if rank == 1:
                note_failure(folder)
                watch.fail("this attempt is lost", facts={"attempt": 0})
            reduce_until_it_fails(watch)
        time.sleep(1.0)
        watch.stop()
        print(f"<rank {rank} ended well>", flush=True)
    """
    process = torchrun(tmp_path, program, "--max-restarts", "1")
    assert process.wait(60) == 0
    said = (tmp_path / "said").read_text()
    assert said.splitlines().count("rank 1: this attempt is lost") == 1
    assert all(said.count(f"<rank {rank} ended well>") == 1 for rank in (0, 1))
    assert written(tmp_path) == End(1, "error", "this attempt is lost", {"attempt": 0})


@pytest.mark.nightly
def test_nodes_that_count_their_restarts_differently_meet_again(tmp_path, port):
    program = """
        from adaptive_batch import distributed

        is_first = not (folder / f"started{rank}").exists()
        (folder / f"started{rank}").touch()
        if is_first and rank == 1:
            while not (folder / "started0").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)  # without a word; its node alone counts that
        if is_first:
            time.sleep(100)
        distributed.init_process_group("gloo")
        counts = distributed.all_gather(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if rank == 0:
            print(f"<met with {'+'.join(sorted(counts))}>", flush=True)
        watch.stop()
        distributed.destroy_process_group()
    """
    endpoint = f"localhost:{port}"
    nodes = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        endpoint,
    )
    both = [torchrun(tmp_path, program, "--max-restarts", "1", nodes=nodes) for _ in range(2)]
    assert [process.wait(90) for process in both] == [0, 0], (tmp_path / "said").read_text()
    assert "<met with 0+1>" in (tmp_path / "said").read_text()


@pytest.mark.slow
def test_the_summary_of_torchrun_names_the_rank_that_failed_and_why(tmp_path):
    program = """
        write = watch._on_end
        # Longer than torchrun takes to end rank zero.
        watch.call_at_end(lambda end: (time.sleep(0.6), write(end)))
        if rank == 1:
            note_failure(folder)
            watch.fail("no such device")
        time.sleep(100)
    """
    process = torchrun(tmp_path, program)
    assert process.wait(60) == 1
    root_cause = (tmp_path / "said").read_text().partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in root_cause
    assert "traceback : rank 1: no such device" in root_cause
    assert written(tmp_path).message == "no such device"


@pytest.mark.slow
def test_workers_that_torchrun_has_left_alone_end(tmp_path):
    program = """
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        if rank == 1:
            while not (folder / "pid0").exists():
                time.sleep(0.05)
            note_failure(folder)
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)
    """
    process = torchrun(tmp_path, program)
    assert process.wait(60) == -signal.SIGKILL
    left = [int((tmp_path / f"pid{rank}").read_text()) for rank in (0, 1)]
    while left and seconds_since(tmp_path) < PROMPT_SECONDS:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    said = (tmp_path / "said").read_text()
    assert [said.count(f"rank {rank}: torchrun, or rank 0 if") for rank in (0, 1)] == [1, 1]
    assert written(tmp_path).kind == "lost_store"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def _no_torchrun_around(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        monkeypatch.delenv(name)
