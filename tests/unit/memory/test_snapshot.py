"""Snapshots put back the same bits into the same tensors; random state goes through a file."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
import torch
import torchao.optim
from torch import nn

from adaptive_batch.memory import RandomState, TensorSnapshot, TrainingSnapshot, plain_tensors
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


def test_tensors_are_put_back_in_place_and_bit_for_bit():
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]).reshape(2, 2).t()
    bits = odd.clone().view(torch.int32)
    snapshot = TensorSnapshot([odd])
    address = odd.data_ptr()
    odd.fill_(1)
    snapshot.restore()
    assert torch.equal(odd.view(torch.int32), bits)
    assert odd.data_ptr() == address


def test_low_bit_states_are_put_back_by_their_inner_tensors():
    parameter = nn.Parameter(torch.randn(128, 128))
    optimizer = torchao.optim.AdamW4bit([parameter])
    with torch.compiler.set_stance("force_eager"):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        state = optimizer.state[parameter]["exp_avg"]
        before = [plain.clone() for plain in plain_tensors(state)]
        snapshot = OptimizerSnapshot(optimizer)
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert not all(map(torch.equal, plain_tensors(state), before))
        snapshot.restore()
    assert optimizer.state[parameter]["exp_avg"] is state
    assert all(map(torch.equal, plain_tensors(state), before))


def test_an_optimizer_without_state_is_without_state_again():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    groups, own = [dict(group) for group in optimizer.param_groups], dict(vars(optimizer))
    snapshot = OptimizerSnapshot(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step()
    optimizer.param_groups[0].update(lr=7.0, betas=(0.1, 0.2), added=1)
    optimizer.counted = 1
    snapshot.restore()
    assert dict(optimizer.state) == {}
    assert optimizer.param_groups == groups
    assert {k: v for k, v in vars(optimizer).items() if k in own or k == "counted"} == own


def test_a_buffer_that_a_forward_replaced_is_the_same_tensor_again():
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


def test_random_state_goes_on_after_a_file(tmp_path):
    draw()  # leaves a second normal variate waiting in Python's and NumPy's generators
    state = RandomState(CPU)
    torch.save(state.state_dict(), tmp_path / "state.pt")
    expected = [draw() for _ in range(3)]
    RandomState(CPU).load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected
    state.restore()
    assert [draw() for _ in range(3)] == expected


def test_numpy_goes_on_where_each_snapshot_was_taken_whatever_was_drawn_since_the_last():
    numbers = [np.random.rand, np.random.normal, np.random.normal, lambda: np.random.randint(9)]
    for number in numbers * 3:
        for _ in range(2):
            state = RandomState(CPU)
            expected = [np.random.normal() for _ in range(3)]
            state.restore()
            assert [np.random.normal() for _ in range(3)] == expected
            state.restore()
        number()


def another_python_state(state):
    version, (*words, position), normal = state
    words[600] ^= 1
    return version, (*words, position), normal


def another_numpy_state(state):
    name, words, *rest = state
    words = words.copy()
    words[600] ^= 1
    return name, words, *rest


@pytest.mark.parametrize(
    ("get_state", "set_state", "another", "draw_word"),
    [
        (random.getstate, random.setstate, another_python_state, lambda: random.getrandbits(32)),
        (
            np.random.get_state,
            np.random.set_state,
            another_numpy_state,
            lambda: int.from_bytes(np.random.bytes(4), "little"),
        ),
    ],
    ids=["python", "numpy"],
)
def test_a_state_that_a_script_sets_is_restored_even_if_one_late_word_differs(
    get_state, set_state, another, draw_word
):
    begin = get_state()
    states = []
    for state in (begin, another(begin)):
        set_state(state)
        states.append((RandomState(CPU), [draw_word() for _ in range(624)]))
    assert states[0][1] != states[1][1]
    for state, expected in states:
        state.restore()
        assert [draw_word() for _ in range(624)] == expected


@pytest.mark.parametrize("module", [random, np.random])
def test_two_seeds_give_two_states(module):
    states = []
    for seed in (1, 2):
        module.seed(seed)
        states.append((RandomState(CPU), module.random()))
    for state, expected in states:
        state.restore()
        assert module.random() == expected


def test_a_checkpoint_of_an_earlier_version_holds_numpys_tuple():
    state = RandomState(CPU).state_dict()
    name, words, *rest = np.random.get_state()
    expected = [draw() for _ in range(3)]
    RandomState(CPU).load_state_dict({**state, "numpy": (name, words.tolist(), *rest)})
    assert [draw() for _ in range(3)] == expected


def test_numpy_has_no_state_where_it_is_not_loaded_and_nothing_can_have_been_drawn(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = RandomState(CPU)
    assert "numpy" not in state.state_dict()
    state.restore()


def test_numpy_with_another_generator_goes_on_too(tmp_path):
    generator = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = RandomState(CPU)
        torch.save(state.state_dict(), tmp_path / "state.pt")
        expected = np.random.rand()
        state.restore()
        assert np.random.rand() == expected
        RandomState(CPU).load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert np.random.rand() == expected
    finally:
        np.random.set_bit_generator(generator)


def test_a_fresh_paged_state_is_set_back_in_place_since_its_buffers_are_never_given_back():
    """bitsandbytes registers each paged buffer for good; it starts with zeros, step 0 and constant
    maps.
    """
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
