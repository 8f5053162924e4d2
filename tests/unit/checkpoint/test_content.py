"""Optimizer states use parameter names and load into other arrangements of groups."""

from __future__ import annotations

import io
import re

import pytest
import torch
import torchao.optim
from support.same_state import assert_same
from torch import nn

from adaptive_batch.checkpoint import load_named_optimizer_state, named_optimizer_state
from adaptive_batch.errors import CheckpointError

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "adamw, tensor lr": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.1), fused=True
    ),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "adamw 8 bit": lambda parameters: torchao.optim.AdamW8bit(parameters, lr=0.1),
}
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def made(optimizer="adamw", *, wrap=lambda module: module, in_backward=False, groups=1, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(wrap(nn.Linear(64, 128)), wrap(nn.Linear(128, 2)))
    names = {parameter: name for name, parameter in model.named_parameters()}
    make, parameters = OPTIMIZERS[optimizer], list(names)
    if in_backward:
        return model, [make([parameter]) for parameter in parameters], names
    if groups == 2:
        return (
            model,
            [make([{"params": parameters[::2], "lr": 0.3}, {"params": parameters[1::2]}])],
            names,
        )
    return model, [make(parameters)], names


def trained(*arguments, steps=2, **options):
    model, optimizers, names = made(*arguments, **options)
    train(model, optimizers, steps)
    return model, optimizers, names


def train(model, optimizers, steps=2):
    with torch.compiler.set_stance("force_eager"):
        for step in range(steps):
            model(torch.full((3, 64), 0.1 * step + 0.1)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_state_continues_training_bit_for_bit(optimizer, in_backward):
    model, optimizers, names = trained(optimizer, in_backward=in_backward)
    file = io.BytesIO()
    torch.save(named_optimizer_state(optimizers, names), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert list(state["state"]) in ([], NAMES)
    assert [name for group in state["param_groups"] for name in group["params"]] == NAMES
    again, its_optimizers, its_names = trained(optimizer, in_backward=in_backward, steps=1, seed=1)
    again.load_state_dict(model.state_dict())
    load_named_optimizer_state(state, its_optimizers, its_names)
    assert_same(named_optimizer_state(its_optimizers, its_names), state)
    for one, its in [(model, optimizers), (again, its_optimizers)]:
        train(one, its)
    assert_same(dict(again.state_dict()), dict(model.state_dict()))


def test_the_state_of_one_optimizer_loads_into_one_per_parameter():
    _, optimizers, names = trained(groups=2)
    _, again, its_names = made(in_backward=True, seed=1)
    state = named_optimizer_state(optimizers, names)
    load_named_optimizer_state(state, again, its_names)
    its_state = named_optimizer_state(again, its_names)["state"]
    assert_same(its_state, {name: state["state"][name] for name in NAMES})
    assert [optimizer.param_groups[0]["lr"] for optimizer in again] == [0.3, 0.1, 0.3, 0.1]


def test_a_parameter_without_state_is_saved_and_loaded():
    _, optimizers, names = trained()
    parameter = optimizers[0].param_groups[0]["params"][3]
    del optimizers[0].state[parameter]
    state = named_optimizer_state(optimizers, names)
    assert list(state["state"]) == NAMES[:3]
    _, again, its_names = made(seed=1)
    load_named_optimizer_state(state, again, its_names)
    assert_same(named_optimizer_state(again, its_names), state)


def renamed(state):
    state["state"]["head.weight"] = state["state"].pop("1.weight")
    state["param_groups"][0]["params"][2] = "head.weight"
    return state


def without_last(state):
    del state["state"]["1.bias"]
    state["param_groups"][0]["params"].pop()
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "has the parameter head.weight, but this model does not train it"),
        (without_last, "has no parameter 1.bias; it belongs to another model"),
    ],
)
def test_a_state_of_other_parameters_is_refused_and_not_loaded(change, message):
    _, optimizers, names = trained()
    _, again, its_names = trained(seed=1)
    before = named_optimizer_state(again, its_names)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_named_optimizer_state(
            change(named_optimizer_state(optimizers, names)), again, its_names
        )
    assert_same(named_optimizer_state(again, its_names), before)


def test_loading_two_groups_into_one_is_refused():
    _, optimizers, names = trained(in_backward=True)
    _, again, its_names = made()
    with pytest.raises(
        CheckpointError,
        match=r"0.weight and 0.bias in two groups, this optimizer has .* in one.*optimizer_in_bwd",
    ):
        load_named_optimizer_state(named_optimizer_state(optimizers, names), again, its_names)


def test_an_optimizer_with_an_unknown_form_of_state_is_refused():
    _, optimizers, names = made()
    optimizers[0].state_dict = lambda: {"offloaded": []}
    with pytest.raises(CheckpointError, match="AdamW does not store its state by parameter"):
        named_optimizer_state(optimizers, names)
