"""Learning rate of a step: scaled by its batch, also with a scheduler of the script."""

from __future__ import annotations

import copy
import io
import math
from types import SimpleNamespace

import pytest
import torch
import torchao
from hypothesis import given
from hypothesis import strategies as st
from support.loops import RATE, train, training
from support.processes import run_on_ranks
from torch.optim import SGD, Adafactor, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from adaptive_batch import StepOptions, distributed
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress, at_epochs, scale_learning_rate, steps
from adaptive_batch.schedules.learning_rate import scale_beta2
from adaptive_batch.training import AdaptiveRate


@pytest.mark.parametrize(("rule", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_rate_is_scaled_by_the_rows_of_each_step(rule, power):
    one = training(batch_size_schedule=steps([4, 8, 16], ["8sp", "24sp"]), lr_scaling=rule)
    for step in train(one):
        assert step.rate == pytest.approx(RATE * (step.result.rows / 4) ** power, rel=1e-12)


@pytest.mark.parametrize(("reference", "unit"), [(8, "rows"), ("100tok", "tokens")])
def test_the_reference_batch_is_in_rows_or_tokens(reference, unit):
    one = training(lr_scaling="linear", reference_batch_size=reference)
    for step in train(one):
        batch = step.result.rows / 8 if unit == "rows" else step.result.tokens / 100
        assert step.rate == pytest.approx(RATE * batch, rel=1e-12)


def rate_of_rank() -> float:
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
    rate = AdaptiveRate(optimizer, reference_batch_size=4, lr_scaling="linear")
    return rate.set(rows=(4, 0)[distributed.rank()])["lr"]


def test_a_rank_without_rows_does_not_count_in_the_batch_of_the_rate():
    assert run_on_ranks(rate_of_rank, 2) == [RATE, RATE]


def test_the_clock_of_a_scheduler_is_independent_of_the_batch_size():
    """An epoch of 40 rows counts as 10 steps of 4 rows, whatever its batch size."""
    one = training(batch_increase_function=at_epochs({1: 4}), schedule=lambda step: 1 / (1 + step))
    rates = [step.rate for step in train(one, epochs=2)]
    clock = [*range(10), *range(10, 20, 2)]
    assert rates == pytest.approx([RATE / (1 + step) for step in clock], rel=1e-12)


def test_a_call_that_raises_is_no_step_of_the_clock():
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
    factors = {0: 1.0, 1: math.nan, 2: 0.25}
    rate = AdaptiveRate(optimizer, LambdaLR(optimizer, lambda step: factors[step]))
    assert rate.set()["lr"] == RATE
    with pytest.raises(SettingError, match="at step 1"):
        rate.set()
    factors[1] = 0.5
    assert rate.set()["lr"] == RATE / 2


def test_invalid_optimizers_rows_and_states_are_refused():
    for wrong in (None, [], "AdamW", [3]):
        with pytest.raises(SettingError, match=r"^optimizer=.*give an optimizer, or a list of"):
            AdaptiveRate(wrong)
    rate = linear(optimizer(0.1))
    for rows in (-1, 2.5, math.nan, "8", None):
        with pytest.raises(SettingError, match=r"^rows=.*set\(rows=\.\.\.\) of this step, a whole"):
            rate.set(rows=rows)
    for state in (None, {}, {"clock": {}}):
        with pytest.raises(SettingError, match=r"give the result of state_dict\(\) of a rate"):
            rate.load_state_dict(state)


def test_a_state_with_other_scaling_is_refused():
    saved = linear(optimizer(0.1)).state_dict()
    rate = linear(optimizer(0.1), None, "sqrt")
    with pytest.raises(SettingError, match=r"^lr_scaling='sqrt': .* built with linear; resume"):
        rate.load_state_dict(saved)
    rate = AdaptiveRate(optimizer(0.1), lr_scaling="linear", reference_batch_size="1.5e6tok")
    says = "^reference_batch_size='1500000 tokens': .* built with 4 rows"
    with pytest.raises(SettingError, match=says):
        rate.load_state_dict(saved)


class Recording(SGD):
    """An optimizer that records the learning rates of its last step."""

    def step(self, closure=None):
        self.seen = rates(self)
        return super().step(closure)


def optimizer(*rates):
    return Recording(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates],
        momentum=0.9,
    )


def rates(one):
    return [float(group["lr"]) for group in one.param_groups]


def applied(rate, clock, batch=1):
    """Set and return the rate of a step for a clock that may be fractional."""
    return rate.apply(Progress(steps=clock), batch=batch)["lr"]


def linear(optimizers, scheduler=None, rule="linear", **reference):
    settings = {"lr_scaling": rule, "reference_batch_size": 4} | reference
    return AdaptiveRate(optimizers, scheduler, **settings)


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / 10))


class Floor(LambdaLR):
    """A LambdaLR with another formula."""

    def get_lr(self):
        return [max(rate, 0.06) for rate in super().get_lr()]


FUNCTIONS_OF_THE_STEP = {
    "none": lambda one: None,
    "LambdaLR": lambda one: LambdaLR(one, cosine),
    "LambdaLR of integers": lambda one: LambdaLR(
        one, [0.7**step for step in range(13)].__getitem__
    ),
}
COUNTING = {
    "Floor": lambda one: Floor(one, cosine),
    "StepLR": lambda one: StepLR(one, step_size=2, gamma=0.5),
    "OneCycleLR": lambda one: OneCycleLR(one, max_lr=0.1, total_steps=20),
}
every_scheduler = pytest.mark.parametrize(
    "build", FUNCTIONS_OF_THE_STEP.values(), ids=FUNCTIONS_OF_THE_STEP
)


batches = st.lists(st.integers(1, 10_000), min_size=1, max_size=8)


@every_scheduler
@pytest.mark.parametrize(("rule", "batch"), [("none", 1), ("linear", 6), ("sqrt", 6)])
def test_a_constant_batch_has_the_rates_of_torch(build, rule, batch):
    ours, theirs = optimizer(0.1, 0.3), optimizer(0.1, 0.3)
    rate = linear(ours, build(ours), rule, reference_batch_size=6)
    scheduler = build(theirs)
    for step in range(12):
        # Some schedules accept only integers.
        assert applied(rate, float(step), batch) == rates(theirs)[0]
        assert rates(ours) == rates(theirs)
        ours.step()
        theirs.step()
        assert ours.seen == theirs.seen
        assert rates(ours) == rates(theirs)
        if scheduler:
            scheduler.step()


@every_scheduler
@given(batches=batches, rule=st.sampled_from(["linear", "sqrt"]))
def test_a_rate_does_not_depend_on_earlier_batches(build, batches, rule):
    """A rate may also be set several times."""
    one, other = optimizer(0.1, 0.3), optimizer(0.1, 0.3)
    ours = linear(one, build(one), rule, reference_batch_size=16)
    constant = linear(other, build(other), rule, reference_batch_size=16)
    for clock, batch in enumerate(batches):
        unscaled = applied(constant, clock, 16)
        assert applied(ours, clock, batch) == scale_learning_rate(unscaled, batch, 16, rule)
        assert applied(ours, clock, 16) == unscaled
        applied(ours, clock, batch)
        one.step()
        assert rates(one) == rates(other)
        assert one.seen == [scale_learning_rate(each, batch, 16, rule) for each in rates(other)]


def test_each_optimizer_keeps_its_own_base_rates():
    several = [optimizer(0.1, 0.3), optimizer(0.02), optimizer(0.1)]
    rate = linear(several, LambdaLR(several[0], cosine))
    for clock, batch in enumerate((4, 16, 8, 8, 8)):
        now = applied(rate, clock, batch)
        for one, bases in zip(several, ((0.1, 0.3), (0.02,), (0.1,)), strict=True):
            one.step()
            assert one.seen == pytest.approx([now * base / 0.1 for base in bases])
            assert rates(one) == pytest.approx([base * cosine(clock) for base in bases])


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_tensor_rate_keeps_its_identity_and_is_scaled_once(is_shared):
    """torch shares one ``lr=torch.tensor(...)`` among groups."""
    one = with_tensors(0.5, 0.5)
    kept = one.param_groups[0]["lr"]
    if is_shared:
        one.param_groups[1]["lr"] = kept
    rate = linear([one], LambdaLR(one, cosine))
    for batch in (4, 8, 16):
        assert applied(rate, 5.0, batch) == pytest.approx(0.25 * batch / 4)
        one.step()
        assert one.seen == pytest.approx([0.25 * batch / 4] * 2)
        assert one.param_groups[0]["lr"] is kept
        assert rates(one) == pytest.approx([0.25] * 2)


def test_a_rate_that_a_step_writes_is_kept_and_a_failed_step_restores_the_rate():
    one = optimizer(0.1)
    applied(linear(one), 0, 8)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            one.step(lambda: 1 / 0)
        assert (one.seen, rates(one)) == ([0.2], [0.1])
        one.step()
        assert (one.seen, rates(one)) == ([0.2], [0.1])
    one.param_groups[0]["lr"] = 0.7
    one.step()
    assert (one.seen, rates(one)) == ([1.4], [0.7])
    one.step(lambda: one.param_groups[0].update(lr=0.3))
    assert rates(one) == [0.3]


@pytest.mark.parametrize("build", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("make", ["numbers", "tensors"])
def test_a_scheduler_stepped_by_the_script_reads_and_writes_unscaled_rates(build, make):
    """The script steps the scheduler each time, also if it skips the optimizer step."""
    ours, theirs = (
        optimizer(0.1, 0.3) if make == "numbers" else with_tensors(0.1, 0.3) for _ in range(2)
    )
    rate = linear(ours)
    own, plain = build(ours), build(theirs)
    for clock, batch in enumerate((4, 16, 8, 8, 2, 12, 4)):
        unscaled = rates(theirs)
        assert applied(rate, clock, batch) == pytest.approx(unscaled[0] * batch / 4, rel=1e-6)
        if clock % 3 != 1:
            for each in (ours, theirs):
                each.step()
            assert ours.seen == pytest.approx([each * batch / 4 for each in unscaled], rel=1e-6)
        assert rates(ours) == unscaled
        own.step()
        plain.step()
        assert own.get_last_lr() == plain.get_last_lr()


def test_a_step_that_a_grad_scaler_skips_does_not_change_the_rate():
    one = optimizer(0.1)
    scheduler = CosineAnnealingLR(one, 10)
    scaler = torch.amp.GradScaler("cpu")
    rate = linear(one)
    seen = []
    for clock, gradient in enumerate((1.0, math.inf, 1.0)):
        unscaled = rates(one)
        one.seen = None
        applied(rate, clock, 8)
        weight = one.param_groups[0]["params"][0]
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(one)
        scaler.update()
        one.zero_grad()
        seen.append(one.seen and one.seen[0] / unscaled[0])
        assert rates(one) == unscaled
        scheduler.step()
    assert seen == [2.0, None, 2.0]


def test_a_second_rate_for_an_optimizer_replaces_the_first():
    one = optimizer(0.1)
    applied(linear(one), 0, 8)
    second = linear(one)
    one.step()
    assert one.seen == [0.1]
    applied(second, 0, 16)
    one.step()
    assert one.seen == [0.4]
    applied(AdaptiveRate(one), 0)
    one.step()
    assert one.seen == [0.1]


def test_a_compiled_step_is_scaled_and_restored():
    """The hooks that restore rates must not be traced."""
    traces = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        one = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        rate, weight = linear(one), one.param_groups[0]["params"][0]
        step = torch.compile(one.step, backend="eager") if is_compiled else one.step
        traces.append([])
        for batch in (4, 8, 16):
            applied(rate, 0, batch)
            weight.grad = torch.ones(2)
            step()
            traces[-1] += weight.tolist()
            assert rates(one) == [0.1]
    assert traces[0] == pytest.approx(traces[1], rel=1e-4)


def without_hooks(one):
    """Change an optimizer to be like torchao's CPUOffloadOptimizer, which lacks torch's setup."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        delattr(one, name)
    # Its step calls no hooks.
    one.step = lambda closure=None: setattr(one, "seen", rates(one))


def without_its_method(one):
    """Restore the method that was found, as accelerate's optimizer does."""
    found = one.step
    applied(linear(one), 0, 4)
    one.step = found


@pytest.mark.parametrize("change", [without_hooks, without_its_method])
def test_an_optimizer_without_hooks_or_whose_method_is_replaced_is_scaled_and_restored(change):
    one = optimizer(0.1)
    change(one)
    rate = linear(one)
    for batch in (8, 16):
        assert applied(rate, 0, batch) == 0.1 * batch / 4
        one.step()
        assert one.seen == [0.1 * batch / 4]
        assert rates(one) == [0.1]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def with_tensors(*base):
    one = optimizer(*base)
    for group in one.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return one


CHANGING = (4, 4, 8, 16, 16, 2, 32, 32, 4, 7)


@every_scheduler
@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.parametrize("optimizers_first", [True, False])
@pytest.mark.parametrize("make", [optimizer, with_tensors])
def test_rates_do_not_depend_on_saving_and_loading(build, rule, optimizers_first, make):
    ours = make(0.1, 0.3)
    rate = linear(ours, build(ours), rule)
    saved, trace = [], []
    for clock, batch in enumerate(CHANGING):
        # The state is saved after the rate of the step is set.
        applied(rate, float(clock), batch)
        saved.append(through_a_file(ours.state_dict()))
        ours.step()
        trace.append((ours.seen, rates(ours)))
    for start, state in enumerate(saved):
        ours = make(0.1, 0.3)
        if optimizers_first:
            ours.load_state_dict(state)
        rate = linear(ours, build(ours), rule)
        if not optimizers_first:
            ours.load_state_dict(state)
        for clock in range(start, len(CHANGING)):
            applied(rate, float(clock), CHANGING[clock])
            ours.step()
            assert (ours.seen, rates(ours)) == trace[clock]


@pytest.mark.parametrize(
    "build", [*COUNTING.values(), ReduceLROnPlateau], ids=[*COUNTING, "ReduceLROnPlateau"]
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_scheduler_that_counts_its_steps_is_refused(build, is_wrapped):
    one = optimizer(0.1)
    scheduler = build(one)
    with pytest.raises(
        SettingError, match=f"^lr_scheduler='{type(scheduler).__name__}': it counts"
    ):
        # accelerate and Lightning wrap schedulers.
        AdaptiveRate(one, SimpleNamespace(scheduler=scheduler) if is_wrapped else scheduler)


def test_a_scheduler_of_another_optimizer_and_added_groups_are_refused():
    one = optimizer(0.1)
    for reference in (None, 0):
        with pytest.raises(SettingError, match=rf"^reference_batch_size={reference}: give "):
            linear(one, reference_batch_size=reference)
    with pytest.raises(ValueError, match="another optimizer"):
        AdaptiveRate(one, LambdaLR(optimizer(0.1), cosine))
    rate = AdaptiveRate(one, LambdaLR(one, lambda step: math.nan if step > 1 else 1.0))
    applied(rate, 1)
    with pytest.raises(SettingError, match=r"^lr_scheduler='LambdaLR': at step 2 it returns \[nan"):
        applied(rate, 2)
    one.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(SettingError, match="it was built for 1 parameter groups, and the"):
        applied(rate, 1)


BOTH = {"beta2": "half_life", "weight_decay": "per_token"}


def parameters():
    return [torch.nn.Parameter(torch.randn(4, 4))]


def scaled(optimizer, rule="none", follow=BOTH):
    return AdaptiveRate(optimizer, lr_scaling=rule, reference_batch_size=8, scale_with_batch=follow)


def stepped(optimizer, weights, batches):
    """Return the options of each step."""
    rate, seen = scaled(optimizer, "sqrt"), []
    optimizer.register_step_pre_hook(
        lambda one, *_: seen.append(copy.deepcopy(one.param_groups[0]))
    )
    for batch in batches:
        weights[0].grad = torch.randn_like(weights[0])
        values = rate.set(rows=batch)
        optimizer.step()
        group = seen[-1]
        assert values["lr"] == float(group["lr"])
        assert values["beta2"] == float(group["betas"][1])
        assert values["weight_decay"] == float(group["weight_decay"])
    return seen


def test_beta2_is_bounded_and_a_configured_value_widens_the_bounds():
    assert scale_beta2(0.99, 1e6) == 0.9
    assert scale_beta2(0.99, 1e-6) == 0.9999
    assert scale_beta2(0.8, 4) == scale_beta2(0.8, 1) == 0.8
    assert scale_beta2(0.99999, 0.5) == scale_beta2(0.99999, 1) == 0.99999


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_each_step_has_the_options_of_its_batch_and_base_values_are_saved(kind):
    weights = parameters()
    optimizer = kind(weights, lr=0.1, betas=(0.9, 0.99), weight_decay=0.02)
    before = {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "weight_decay")}
    seen = stepped(optimizer, weights, [8, 16, 4, 32])
    for group, ratio in zip(seen, [1, 2, 0.5, 4], strict=True):
        assert group["betas"] == (0.9, min(0.9999, 0.99**ratio))
        assert group["weight_decay"] == pytest.approx(0.02 * math.sqrt(ratio), rel=1e-12)
        assert group["lr"] == 0.1 * math.sqrt(ratio)
    assert {key: optimizer.param_groups[0][key] for key in before} == before
    scaled(optimizer, "sqrt").set(rows=32)
    assert {key: optimizer.state_dict()["param_groups"][0][key] for key in before} == before


def test_invalid_values_of_scale_with_batch_are_refused_with_the_fix():
    sgd, adamw = SGD(parameters(), lr=0.1), AdamW(parameters())
    for optimizer, names, message in (
        (sgd, {"beta2": "half_life"}, r"scale_with_batch\.beta2='half_life': .*SGD have no betas"),
        (Adafactor(parameters()), {"beta2": "half_life"}, "Adafactor have no betas"),
        (torchao.optim.AdamW8bit(parameters()), BOTH, "AdamW8bit compiles its step for constant"),
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
