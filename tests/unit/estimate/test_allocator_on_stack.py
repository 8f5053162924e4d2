"""The simulated allocator equals PyTorch's own segment by segment: retries, OOMs and peaks too."""

import json
import subprocess
import sys

import pytest
from support.paths import TESTS, subprocess_environment

pytestmark = pytest.mark.cuda_stack

GIB = 2**30
SEEDS = (2, 5, 6, 10)  # those of the first ten that fill the device


def compared(*seeds, conf, capacity):
    """Return the counts of allocator_on_stack.py for each seed; none may differ."""
    command = [sys.executable, str(TESTS / "support/allocator_on_stack.py"), *map(str, seeds)]
    environment = subprocess_environment(
        PYTORCH_CUDA_ALLOC_CONF=conf, EMULATE_CAPACITY=str(capacity)
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == len(seeds)
    assert [case for case in cases if case["difference"]] == []
    return cases


@pytest.mark.parametrize(
    ("conf", "capacity"),
    [
        ("", 4 * GIB),
        ("expandable_segments:True", 4 * GIB),
        ("expandable_segments:True", GIB + GIB // 8),
    ],
)
def test_after_random_calls(conf, capacity):
    cases = compared(*SEEDS, conf=conf, capacity=capacity)
    assert sum(case["retries"] for case in cases) > 0
    assert sum(case["ooms"] for case in cases) > 0


def test_settings_are_read_as_pytorch_reads_them(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    compared(5, conf="pinned_use_background_threads:True", capacity=4 * GIB)
