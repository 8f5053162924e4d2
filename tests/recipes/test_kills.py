"""Killed at random moments and resumed each time, a run is the one that was never killed. The long
form: benchmarks/kills.py.
"""

import json
import subprocess
import sys

import pytest
from support.paths import subprocess_environment

KILLS = 3


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_is_the_one_that_was_not_bit_for_bit(tmp_path):
    command = [
        sys.executable,
        "-m",
        "support.killed_runs",
        "--kills",
        str(KILLS),
        "--seed",
        "0",
        "--folder",
        str(tmp_path),
        "growth",
    ]
    done = subprocess.run(
        command, env=subprocess_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    (found,) = map(json.loads, done.stdout.splitlines())
    assert (found["kills"], found["differing"]) == (KILLS, [])
