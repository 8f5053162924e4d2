import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adaptive_batch.doctor import Finding, check_torchtune, check_versions

PROJECT = Path(__file__).parents[2]
CONSTRAINTS = (PROJECT / "constraints.txt").read_text()
TRIED = dict(re.findall(r"^(\S+)==(\S+)$", CONSTRAINTS, re.MULTILINE))
AGAIN = "pip install --force-reinstall --no-deps"


def wrong(findings):
    return {finding.subject: finding.fix for finding in findings if finding.fix}


def versions(**others):
    return (TRIED | others).get


def test_the_tested_versions_pass():
    assert wrong(check_versions(versions())) == {}
    assert wrong(check_versions(versions(torch="2.100.0", tqdm="4.100"))) == {}


@pytest.mark.parametrize(
    ("name", "version", "fix"),
    [
        ("torchao", "0.12.0", "pip install 'torchao<0.16,>=0.13'"),
        ("torchao", "0.16.0.dev20261001+cpu", "pip install 'torchao<0.16,>=0.13'"),
        ("torchtune", None, "pip install 'torchtune==0.6.1'"),
        ("torch", "2.8.0+cu128", "pip install 'torch>=2.11'"),
        ("datasets", None, "pip install 'datasets>=3.0'"),
    ],
)
def test_an_unsupported_version_is_the_only_problem(name, version, fix):
    assert wrong(check_versions(versions(**{name: version}))) == {name: fix}


def test_both_tune_commands_are_named(tmp_path, monkeypatch):
    other = tmp_path / "tune"
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    tune, imported = check_torchtune()
    assert tune.text == f"{Path(sys.executable).with_name('tune')}; PATH has {other}"
    assert imported == Finding("import torchtune", "works")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "cause", "says"),
    [
        ("torchao", "from torch import no_such_name", f"{AGAIN} 'torchao=="),
        ("torch", "raise OSError('libcudart.so')", f"{AGAIN} 'torch=={torch.__version__}'"),
        ("packaging", "import nothing", "pip install --editable '.[recipes]'"),
    ],
)
def test_a_broken_distribution_exits_with_1_and_the_fix(tmp_path, broken, cause, says):
    (tmp_path / broken).mkdir()
    (tmp_path / broken / "__init__.py").write_text(f"{cause}\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "adaptive_batch", "check"]
    environment = os.environ | {"PYTHONPATH": path}
    finished = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 1, finished.stderr
    (line,) = [line for line in finished.stdout.splitlines() if "WRONG" in line]
    assert f"; fix it with: {says}" in line
