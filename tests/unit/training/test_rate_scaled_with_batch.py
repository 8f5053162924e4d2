"""beta2 and weight decay that follow the batch: recomputed for each step from what the groups hold,
which the step alone sees.
"""

import copy
import math

import pytest
import torch
import torchao
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, Adafactor, Adam, AdamW

from adaptive_batch import StepOptions
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules.learning_rate import scale_beta2, scale_weight_decay
from adaptive_batch.training import AdaptiveRate

BOTH = {"beta2": "half_life", "weight_decay": "per_token"}


def parameters(size=4):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, size))]


def scaled(optimizer, rule="none", follow=BOTH):
    return AdaptiveRate(optimizer, lr_scaling=rule, reference_batch_size=8, scale_with_batch=follow)


def train(optimizer, weights, batches, *, first=0):
    """Step with gradients that depend on the step's number alone; return what each step saw."""
    rate, seen = scaled(optimizer, "sqrt"), []
    optimizer.register_step_pre_hook(
        lambda one, *_: seen.append(copy.deepcopy(one.param_groups[0]))
    )
    for step, batch in enumerate(batches, start=first):
        generator = torch.Generator().manual_seed(step)
        weights[0].grad = torch.randn(weights[0].shape, generator=generator)
        values = rate.set(rows=batch)
        optimizer.step()
        group = seen[-1]
        assert values["lr"] == float(group["lr"])
        assert values["beta2"] == float(group["betas"][1])
        assert values["weight_decay"] == float(group["weight_decay"])
    return seen


@given(st.floats(0.9, 0.9999), st.floats(1 / 64, 64))
def test_the_half_life_of_beta2_stays_in_rows(beta2, ratio):
    scaled = scale_beta2(beta2, ratio)
    if 0.9 < scaled < 0.9999:
        assert math.log(0.5) / math.log(scaled) * ratio == pytest.approx(
            math.log(0.5) / math.log(beta2), rel=1e-6
        )
    assert 0.9 <= scaled <= 0.9999
    assert scale_beta2(beta2, 1.0) == beta2


def test_beta2_is_kept_within_bounds_that_what_is_configured_widens():
    assert scale_beta2(0.99, 1e6) == 0.9
    assert scale_beta2(0.99, 1e-6) == 0.9999
    assert scale_beta2(0.8, 4) == scale_beta2(0.8, 1) == 0.8
    assert scale_beta2(0.99999, 0.5) == scale_beta2(0.99999, 1) == 0.99999


@pytest.mark.parametrize(("rule", "expected"), [("none", 4.0), ("sqrt", 2.0), ("linear", 1.0)])
def test_weights_that_nothing_trains_decay_alike_over_the_same_rows_under_each_rule(rule, expected):
    assert scale_weight_decay(0.1, 4.0, 4.0 / expected) == pytest.approx(0.1 * expected)
    left = {}
    for batch in (8, 32):
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = AdamW([weight], lr=1e-4, weight_decay=0.1)
        rate = scaled(optimizer, rule)
        for _ in range(1024 // batch):
            weight.grad = torch.zeros_like(weight)
            rate.set(rows=batch)
            optimizer.step()
        left[batch] = 1 - float(weight)
    assert left[32] == pytest.approx(left[8], rel=1e-4)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_each_step_sees_what_belongs_to_its_batch_and_what_is_saved_is_the_base(kind):
    weights = parameters()
    optimizer = kind(weights, lr=0.1, betas=(0.9, 0.99), weight_decay=0.02)
    before = {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "weight_decay")}
    seen = train(optimizer, weights, [8, 16, 4, 32])
    for group, ratio in zip(seen, [1, 2, 0.5, 4], strict=True):
        assert group["betas"] == (0.9, min(0.9999, 0.99**ratio))
        assert group["weight_decay"] == pytest.approx(0.02 * math.sqrt(ratio), rel=1e-12)
        assert group["lr"] == 0.1 * math.sqrt(ratio)
    assert {key: optimizer.param_groups[0][key] for key in before} == before
    scaled(optimizer, "sqrt").set(rows=32)
    assert {key: optimizer.state_dict()["param_groups"][0][key] for key in before} == before


def low_bit(weights):
    return torchao.optim.AdamW8bit(weights, lr=0.01, weight_decay=0.1)


def adamw(weights):
    return AdamW(weights, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("build", [adamw, pytest.param(low_bit, marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_is_bit_for_bit_the_whole_one(build):
    batches, weights = [8, 16, 24, 40, 8, 64], parameters(64)
    optimizer = build(weights)
    train(optimizer, weights, batches)
    half = parameters(64)
    first = build(half)
    train(first, half, batches[:3])
    rest = [torch.nn.Parameter(half[0].detach().clone())]
    second = build(rest)
    second.load_state_dict(first.state_dict())
    train(second, rest, batches[3:], first=3)
    assert torch.equal(rest[0], weights[0])


@pytest.mark.slow
def test_torchaos_low_bit_steps_are_compiled_once_and_follow_too():
    """They compile for each number that is no tensor; a tensor is float32, so 1 - beta2 is off by
    1e-5 of itself.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    weights = parameters(64)
    seen = train(low_bit(weights), weights, [8, 16, 24, 40])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for group, ratio in zip(seen, [1, 2, 3, 5], strict=True):
        assert float(group["betas"][1]) == pytest.approx(0.999**ratio, rel=1e-7)
        assert float(group["weight_decay"]) == pytest.approx(0.1 * math.sqrt(ratio), rel=1e-6)
    reference = parameters(64)
    train(AdamW(reference, lr=0.01, weight_decay=0.1), reference, [8, 16, 24, 40])
    assert torch.allclose(
        weights[0], reference[0], atol=0.01
    )  # four steps of at most 0.02, states of 8 bits


def test_what_is_reported_is_of_the_first_group_that_has_any():
    groups = [{"params": parameters(), "weight_decay": decay} for decay in (0.0, 0.1, 0.2)]
    rate = scaled(AdamW(groups), follow={"weight_decay": "per_token"})
    adamw = torchao.optim._AdamW(parameters(), betas=(0.9, 0.99))
    of_torchao = scaled(adamw, follow={"beta2": "half_life"})
    assert of_torchao.set(rows=16)["beta2"] == pytest.approx(0.99**2)
    assert rate.describe().startswith("weight_decay 0.1: chosen for 8 rows per step")
    assert rate.set(rows=16)["weight_decay"] == 0.2


def test_an_optimizer_without_them_and_what_is_not_known_are_refused_with_key_value_and_fix():
    sgd, adamw = SGD(parameters(), lr=0.1), AdamW(parameters())
    for optimizer, names, message in (
        (sgd, {"beta2": "half_life"}, r"scale_with_batch\.beta2='half_life': .*SGD have no betas"),
        (Adafactor(parameters()), {"beta2": "half_life"}, "Adafactor have no betas"),
        (sgd, {"weight_decay": "per_token"}, "weight_decay of SGD is 0; set it, or remove this"),
        (adamw, {"beta1": "half_life"}, r"scale_with_batch\.beta1='half_life': give beta2"),
        (adamw, {"beta2": True}, r"scale_with_batch\.beta2=True: give beta2: half_life"),
        (adamw, "beta2", "scale_with_batch='beta2': give a block of beta2: half_life"),
    ):
        with pytest.raises(SettingError, match=message):
            scaled(optimizer, follow=names)
    with pytest.raises(SettingError, match=r"scale_with_batch='beta2': give a block"):
        StepOptions(scale_with_batch="beta2")
    with pytest.raises(SettingError, match=r"^reference_batch_size=None: give the global batch"):
        AdaptiveRate(AdamW(parameters()), scale_with_batch=BOTH)
