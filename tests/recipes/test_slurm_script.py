"""The Slurm script with fake srun and scontrol: it requeues only a run that was asked to end."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cli import block
from support.paths import ROOT, subprocess_environment

from adaptive_batch.report import audit, read_records

SCRIPT = ROOT / "examples" / "slurm.sh"
STEPS = ("epochs=3", "max_steps_per_epoch=8", "batch_size=2", "save_every_n_steps=5")


@pytest.fixture
def cluster(tmp_path):
    """Yield the environment of a job with two ranks on one node; `requeued` logs its requeues."""
    programs = tmp_path / "bin"
    programs.mkdir()
    play("srun", 'exec "$@"', tmp_path)
    requeues = f'[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> {tmp_path}/requeued'
    play("scontrol", requeues, tmp_path)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1"}
    slurm |= {"SLURM_GPUS_ON_NODE": "2", "OMP_NUM_THREADS": "1"}  # gloo, one core per rank
    with socket.socket() as held:
        # The bound socket reserves the port. torch's store can listen there too, since both
        # sockets set this option.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = str(held.getsockname()[1])
        yield {**subprocess_environment(), **slurm, "PATH": path, "MASTER_PORT": port}


def play(name, text, folder):
    """Write a shell script in place of a Slurm program."""
    program = folder / "bin" / name
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)


def start(small, cluster, folder, *overrides):
    command = [SCRIPT, small.config, folder, *STEPS, *overrides]
    return subprocess.Popen(
        list(map(str, command)),
        cwd=folder.parent,
        env=cluster,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_job_that_is_asked_to_end_is_requeued_and_resumes_and_a_finished_job_is_not(
    small, cluster, tmp_path
):
    folder, waits = tmp_path / "run", tmp_path / "waits"
    waiting = block("metric_logger", "support.stops.WaitingToBeAsked", at_step=3, file=waits)
    job = start(small, cluster, folder, *waiting)
    while not waits.exists():
        assert job.poll() is None, job.stdout.read()[-3000:]
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    printed = job.communicate(timeout=300)[0]
    assert job.returncode != 0
    log = folder / "adaptive_batch" / "run.jsonl"
    assert read_records(log)[-1]["kind"] == "preempted", printed[-3000:]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"

    job = start(small, cluster, folder)
    printed = job.communicate(timeout=300)[0]
    assert job.returncode == 0, printed[-3000:]
    records = read_records(log)
    assert records[-1]["kind"] == "end"
    assert [record["resumed"] for record in records if record["kind"] == "start"] == [False, True]
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, 25))
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert audit(folder).holds


def test_a_job_that_fails_is_not_requeued(small, cluster, tmp_path):
    """The run log does not end with a stop request, and the script returns srun's status."""
    folder = tmp_path / "run"
    (folder / "adaptive_batch").mkdir(parents=True)
    (folder / "adaptive_batch" / "run.jsonl").write_text('{"kind": "step"}\n')
    play("srun", 'echo "$@"; exit 3', tmp_path)
    job = start(small, cluster, folder)
    printed = job.communicate(timeout=60)[0]
    assert job.returncode == 3
    assert f"output_dir={folder}" in printed
    assert not (tmp_path / "requeued").exists()
