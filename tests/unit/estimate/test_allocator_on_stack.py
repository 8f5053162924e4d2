"""The simulated allocator equals PyTorch's own segment by segment."""

import json
import subprocess
import sys

import pytest
from support.paths import TESTS, subprocess_environment

pytestmark = pytest.mark.cuda_stack

SEEDS = (2, 5, 6, 10)


def compared(*seeds, conf):
    """Return the counts of allocator_on_stack.py for each seed; none may differ."""
    command = [sys.executable, str(TESTS / "support/allocator_on_stack.py"), *map(str, seeds)]
    environment = subprocess_environment(
        PYTORCH_CUDA_ALLOC_CONF=conf, EMULATE_CAPACITY=str(64 * 2**30)
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == len(seeds)
    assert [case for case in cases if case["difference"]] == []
    return cases


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_after_random_calls(conf):
    cases = compared(*SEEDS, conf=conf)
    assert max(case["reserved"] for case in cases) > 2**30


def test_settings_are_read_as_pytorch_reads_them(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    compared(5, conf="pinned_use_background_threads:True")
