"""The simulated allocator equals PyTorch's own segment by segment: retries, OOMs and peaks too."""

import json
import subprocess
import sys

import pytest
from support.paths import TESTS, subprocess_environment

pytestmark = pytest.mark.cuda_stack

GIB = 2**30
SEEDS = (2, 5, 6, 10)  # those of the first ten that fill the device


def compared(kind, *numbers, conf, capacity):
    """What allocator_on_stack.py counted in each case, in none of which anything differs."""
    command = [
        sys.executable,
        str(TESTS / "support/allocator_on_stack.py"),
        kind,
        *map(str, numbers),
    ]
    environment = subprocess_environment(
        PYTORCH_CUDA_ALLOC_CONF=conf, EMULATE_CAPACITY=str(capacity)
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == len(numbers)
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
    cases = compared("random", *SEEDS, conf=conf, capacity=capacity)
    assert sum(case["retries"] for case in cases) > 0
    assert sum(case["ooms"] for case in cases) > 0


def test_settings_are_read_as_pytorch_reads_them(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    compared("random", 5, conf="pinned_use_background_threads:True", capacity=4 * GIB)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize(("capacity", "num_given_up"), [(17, 2), (15, 3)])
def test_after_each_step_of_training(conf, capacity, num_given_up):
    cases = compared(
        "training", 300, 512, 1024, 2048, 900, 1500, conf=conf, capacity=capacity * GIB
    )
    given_up = sum(case["out_of_memory"] for case in cases)
    assert given_up >= num_given_up
    assert given_up < len(cases)
    assert cases[-1]["retries"] >= given_up
