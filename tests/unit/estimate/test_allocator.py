"""The simulated allocator equals PyTorch's own segment by segment."""

import json
import subprocess
import sys

import pytest
from support.allocator_on_stack import segments_of
from support.paths import TESTS, subprocess_environment

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate.allocator import AllocatorSettings, CachingAllocator

MIB = 2**20


def allocator(**settings):
    return CachingAllocator(AllocatorSettings(**settings))


def sizes(allocator):
    """Return segments in order as tuples of their blocks in MiB, allocated ones negative."""
    return [
        tuple(
            block["size"] / MIB * (1 if block["state"] == "inactive" else -1)
            for block in segment["blocks"]
        )
        for segment in reversed(segments_of(allocator))
    ]


def test_an_expandable_segment_grows_by_granules():
    device = allocator(expandable_segments=True)
    device.malloc(25 * MIB)
    device.malloc(1)
    assert device.reserved_bytes == 42 * MIB
    device.malloc(30 * MIB)
    assert (sizes(device), device.reserved_bytes) == (
        [(-25, -30, 5), (-512 / MIB, 2 - 512 / MIB)],
        62 * MIB,
    )


def test_the_environment_is_read(monkeypatch):
    text = "pinned_use_background_threads:True, expandable_segments:True,backend:native"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    assert AllocatorSettings.from_environment() == AllocatorSettings(expandable_segments=True)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert AllocatorSettings.from_environment() == AllocatorSettings()


@pytest.mark.parametrize(
    "setting",
    [
        "backend:cudaMallocAsync",
        "throw_on_cudamalloc_oom:True",
        "expandable_segments:yes",
        "anything:1",
        "max_split_size_mb:64",
        "max_non_split_rounding_mb:64",
        "large_segment_size_mb:64",
        "roundup_power2_divisions:[1:2,>:2]",
        "garbage_collection_threshold:0.5",
        "per_process_memory_fraction:0.7",
    ],
)
def test_other_settings_are_refused(monkeypatch, setting):
    text = f"expandable_segments:True,{setting}"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    with pytest.raises(SettingError) as caught:
        AllocatorSettings.from_environment()
    assert str(caught.value) == f"PYTORCH_ALLOC_CONF={text!r}: {setting} is not simulated; unset it"


def test_a_disabled_cache_is_refused(monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(SettingError, match="unset it"):
        AllocatorSettings.from_environment()


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


@pytest.mark.cuda_stack
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_segments_and_peaks_after_random_calls_are_those_of_pytorch(conf):
    cases = compared(*SEEDS, conf=conf)
    assert max(case["reserved"] for case in cases) > 2**30


@pytest.mark.cuda_stack
def test_settings_are_read_as_pytorch_reads_them(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    compared(5, conf="pinned_use_background_threads:True")
