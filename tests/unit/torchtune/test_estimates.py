"""Activation offloading on fake tensors, which runs torchtune's code."""

from __future__ import annotations

import pytest
import torch
from torchtune.training import OffloadActivations

from adaptive_batch.estimate import FakeDevice
from adaptive_batch.estimate.allocator import STREAM
from adaptive_batch.torchtune.estimates import offloading_fake_tensors

OPERATIONS = 12
# Tensors that torchtune keeps on the device until their copies are complete.
STASHED = 5


@pytest.mark.parametrize(
    ("elements", "kept", "brought_back"),
    # torchtune offloads tensors of 1024 bytes or more. The last one stays on the device.
    [(256, STASHED, OPERATIONS - 1), (255, OPERATIONS, 0)],
)
def test_only_the_last_offloaded_tensors_are_on_the_device_until_backward(
    elements, kept, brought_back
):
    num_bytes = 4 * elements
    with FakeDevice().counting() as counter:
        leaf = torch.ones(elements, requires_grad=True)
        result = leaf  # exp keeps its result for backward
        with offloading_fake_tensors():
            with OffloadActivations():
                for _ in range(OPERATIONS):
                    result = result.exp()
            assert counter.live_bytes == (1 + kept) * num_bytes
            result.sum().backward()
        del result
        assert counter.live_bytes == 2 * num_bytes  # the leaf and its gradient
        log = counter.phase(()).log
    assert sum(entry > STREAM for entry in log) == brought_back
