"""Scripts of TRL's, Lightning's and torchdata's trainers train the same with adaptive_batch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.commands import run_command
from support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "names",
    [
        ["sft", "lightning_module"],
        pytest.param(["dpo", "grpo", "stream"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_scripts_of_what_pip_installs_train_the_same(tmp_path, names):
    command = [sys.executable, ROOT / "benchmarks" / "scripts.py", "--output", tmp_path]
    done = subprocess.run([*command, "--only", *names], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for name in names:
        assert f"\n{name} " in done.stdout


def test_a_script_that_is_missing_is_named(tmp_path):
    command = ["python", "benchmarks/scripts.py", "--output", str(tmp_path), "--only", "mnist"]
    status, _, errors = run_command(command, folder=ROOT, environment={}, timeout=100)
    assert status == 1
    assert "mnist: missing" in errors
