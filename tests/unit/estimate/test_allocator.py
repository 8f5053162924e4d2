"""The simulated allocator equals PyTorch's own segment by segment."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_steps import LENGTH, WORDS, Decoder, fake_step
from support.paths import TESTS, subprocess_environment
from support.step_logs import peak_bytes

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate.allocator import (
    STREAM,
    AllocatorSettings,
    CachingAllocator,
    Phase,
)

MIB = 2**20


@pytest.mark.parametrize("expandable_segments", [False, True])
def test_streams_share_no_blocks(expandable_segments):
    device = CachingAllocator(AllocatorSettings(expandable_segments=expandable_segments))
    device.replay([STREAM + 40 * MIB, ~0, STREAM + 40 * MIB, ~1])
    assert device.reserved_bytes == 40 * MIB
    device.replay([40 * MIB])
    assert device.reserved_bytes == 80 * MIB


def test_the_last_block_of_an_expandable_segment_counts_with_the_rest_of_its_addresses():
    device = CachingAllocator(AllocatorSettings(expandable_segments=True))
    first, between, last = (device.malloc(size * MIB) for size in (500, 20, 100))
    device.free(first)
    device.free(last)
    assert device.malloc(50 * MIB).address == first.address
    assert between.is_allocated


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
        "expandable_segments:yes",
        "anything:1",
        "max_split_size_mb:64",
        "roundup_power2_divisions:[1:2,>:2]",
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


def alive(log):
    """Return the sizes that remain; fail if a storage is freed twice."""
    sizes, left = [], {}
    for entry in log:
        if entry > 0:
            left[len(sizes)] = entry
            sizes.append(entry)
        else:
            del left[~entry]
    return sorted(left.values())


@pytest.mark.parametrize("options", [{}, {"accumulates": True}, {"in_backward": True}])
def test_only_weights_and_states_remain_after_a_step(options):
    step = fake_step("AdamW foreach", **options)
    logs = [
        step.log(4, step.forward_backward, num_steps=steps, micro_batches=3) for steps in (1, 2, 5)
    ]
    assert alive(logs[0]) == alive(logs[1]) == alive(logs[2])
    assert peak_bytes(logs[1]) == peak_bytes(logs[2])
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    frozen = sum(parameter.nbytes for parameter in step.model.frozen.parameters())
    assert sum(alive(logs[0])) >= 3 * weights - 2 * frozen


def test_interpolated_sizes_are_those_of_a_trace():
    traced, between = fake_step(), fake_step()
    traced.trace(7, traced.forward_backward)
    for rows in (2, 3):
        between.trace(rows, between.forward_backward)
    assert traced.is_traced(7, traced.forward_backward)
    assert not between.is_traced(7, between.forward_backward)
    assert between.log(7, between.forward_backward) == traced.log(7, traced.forward_backward)


@given(
    sizes=st.lists(st.tuples(*[st.integers(1, 2**40)] * 2), min_size=1, max_size=8),
    share=st.fractions(-4, 8, max_denominator=2**14),
)
def test_interpolated_sizes_are_rounded_up_exactly(sizes, share):
    few, more = (Phase(array("q", [*column, ~0]), (), {}) for column in zip(*sizes, strict=True))
    log = few.interpolate(more, share).log
    assert log[-1] == ~0
    for size, larger, between in zip(few.log[:-1], more.log[:-1], log[:-1], strict=True):
        assert between == max(1, math.ceil(size + (larger - size) * share))


ROWS = 4
# In float32.
LOGITS = ROWS * LENGTH * WORDS * 4
GRADIENTS = sum(4 * each.numel() for each in Decoder().parameters() if each.requires_grad)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_kinds_add_up_to_the_peak(checkpointing, accumulates):
    step = fake_step(checkpointing=checkpointing, accumulates=accumulates)
    peak = max(step.trace(ROWS, step.forward_backward).live_bytes)
    composition = step.composition(ROWS, step.forward_backward)
    assert sum(composition.values()) == peak
    assert composition["parameters"] == step.resident.parameters
    assert composition["optimizer state"] == step.resident.optimizer
    assert composition["activations"] >= LOGITS
    if accumulates:
        assert composition["gradients"] == GRADIENTS
    elif checkpointing:
        # Some exist when a layer is recomputed.
        assert 0 < composition["gradients"] < GRADIENTS
    else:
        # Backward of the loss.
        assert composition["gradients"] == 0
        assert composition["backward temporaries"] >= LOGITS
