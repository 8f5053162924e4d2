"""Offloading of activations on fake tensors, where torchtune's own code says what stays."""

from __future__ import annotations

import pytest
import torch
from torchtune.training import OffloadActivations

from adaptive_batch.estimate import FakeDevice
from adaptive_batch.estimate.allocator import STREAM
from adaptive_batch.torchtune.estimates import offloading_fake_tensors

OPERATIONS = 12
# Tensors that torchtune keeps until their copies are sure to be made.
STASHED = 5


@pytest.mark.parametrize(
    ("elements", "kept", "brought_back"),
    # Of 1024 bytes on. Backward begins with the last, which is still there.
    [(256, STASHED, OPERATIONS - 1), (255, OPERATIONS, 0)],
)
def test_only_the_last_offloaded_tensors_are_on_the_device_until_backward(
    elements, kept, brought_back
):
    num_bytes = 4 * elements
    with FakeDevice().counting() as counter:
        leaf = torch.ones(elements, requires_grad=True)
        # Each operation keeps its result for backward.
        result = leaf
        with offloading_fake_tensors():
            with OffloadActivations():
                for _ in range(OPERATIONS):
                    result = result.exp()
            assert counter.live_bytes == (1 + kept) * num_bytes
            result.sum().backward()
        del result
        # The leaf and its gradient.
        assert counter.live_bytes == 2 * num_bytes
        log = counter.phase(()).log
    assert sum(entry > STREAM for entry in log) == brought_back
