"""Snapshots restore the same bits into the same tensors."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from adaptive_batch.memory import RandomState, TrainingSnapshot
from adaptive_batch.memory.snapshot import OptimizerSnapshot

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [
        float(torch.rand(())),
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
    ]


def test_a_replaced_buffer_is_the_original_tensor_again():
    model = nn.BatchNorm1d(2)
    old, gradient = model.running_mean, torch.ones(2)
    model.weight.grad = gradient
    model.eval()
    snapshot = TrainingSnapshot(model, [], device=CPU)
    assert model.weight.grad is None
    model.train()
    model(torch.randn(4, 2))
    model.running_mean = model.running_mean + 1
    snapshot.restore()
    assert model.running_mean is old
    assert model.running_mean.tolist() == [0.0, 0.0]
    assert model.num_batches_tracked == 0
    assert model.weight.grad is gradient
    assert not model.training


def test_random_state_is_restored_from_a_file(tmp_path):
    draw()  # the generators of Python and NumPy now hold a second normal variate
    state = RandomState(CPU)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    name, words, *rest = np.random.get_state()
    numpy_state = (name, words.tolist(), *rest)
    expected = [draw() for _ in range(3)]
    RandomState(CPU).load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected
    # Earlier checkpoints have a tuple of numpy's state.
    RandomState(CPU).load_state_dict({**state.state_dict(), "numpy": numpy_state})
    assert [draw() for _ in range(3)] == expected
    state.restore()
    assert [draw() for _ in range(3)] == expected


def test_a_new_paged_state_is_reset_in_place():
    """bitsandbytes never frees a paged buffer; it starts with zeros, step 0 and constant maps."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    snapshot = OptimizerSnapshot(optimizer)
    paged, quantiles = torch.ones(2, dtype=torch.uint8), torch.arange(4.0)
    paged.is_paged = True
    optimizer.state[parameter] = {
        "step": 1,
        "state1": paged,
        "absmax1": torch.ones(1),
        "qmap1": quantiles,
    }
    snapshot.restore()
    state = optimizer.state[parameter]
    assert state["state1"] is paged
    assert (state["step"], paged.tolist(), state["absmax1"].tolist()) == (0, [0, 0], [0.0])
    assert state["qmap1"].tolist() == [0, 1, 2, 3]
