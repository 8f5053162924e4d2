"""The rate is computed from base, schedule, clock and batch, and held during the optimizer's step
alone.
"""

import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress, scale_learning_rate
from adaptive_batch.training import AdaptiveRate


class Recording(SGD):
    """Records the rates that its last step had."""

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
    """Set the rate of a step, by a clock that may be fractional; return it."""
    return rate.apply(Progress(steps=clock), batch=batch)["lr"]


def linear(optimizers, scheduler=None, rule="linear", **reference):
    settings = {"lr_scaling": rule, "reference_batch_size": 4} | reference
    return AdaptiveRate(optimizers, scheduler, **settings)


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / 10))


def warm_up(step):
    return min(1.0, (step + 1) / 4)


class Callable:
    """A schedule that is an object, whose state torch saves."""

    def __init__(self):
        self.scale = 0.7

    def __call__(self, step):
        return self.scale**step


def chained(one):
    return torchs.ChainedScheduler(
        [torchs.ConstantLR(one, 0.1, total_iters=3), torchs.ExponentialLR(one, 0.9)]
    )


class Floor(LambdaLR):
    """A LambdaLR that computes otherwise."""

    def get_lr(self):
        return [max(rate, 0.06) for rate in super().get_lr()]


FUNCTIONS_OF_THE_STEP = {
    "none": lambda one: None,
    "LambdaLR": lambda one: LambdaLR(one, cosine),
    "LambdaLR of objects": lambda one: LambdaLR(one, Callable()),
}
RESTARTS = torchs.CosineAnnealingWarmRestarts
CYCLE = {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "mode": "exp_range", "gamma": 0.9}


def of_two(one):
    return SequentialLR(one, [LambdaLR(one, warm_up), LambdaLR(one, cosine)], milestones=[3])


def of_three(one):
    steps = torchs.MultiStepLR(one, [1, 2])
    first, last = torchs.ConstantLR(one, 0.5, total_iters=2), torchs.ExponentialLR(one, 0.9)
    return SequentialLR(one, [first, steps, last], [2, 6])


COUNTING = {
    "Floor": lambda one: Floor(one, cosine),
    "MultiplicativeLR": lambda one: torchs.MultiplicativeLR(one, lambda step: 0.95),
    "StepLR": lambda one: StepLR(one, step_size=2, gamma=0.5),
    "MultiStepLR": lambda one: torchs.MultiStepLR(one, milestones=[2, 5, 5], gamma=0.3),
    "ConstantLR": lambda one: torchs.ConstantLR(one, factor=0.1, total_iters=4),
    "LinearLR": lambda one: torchs.LinearLR(one, start_factor=0.1, total_iters=4),
    "ExponentialLR": lambda one: torchs.ExponentialLR(one, gamma=0.9),
    "PolynomialLR": lambda one: torchs.PolynomialLR(one, total_iters=9, power=2.0),
    "CosineAnnealingLR": lambda one: torchs.CosineAnnealingLR(one, T_max=4, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda one: RESTARTS(one, T_0=2, T_mult=2),
    "CyclicLR": lambda one: torchs.CyclicLR(one, **CYCLE),
    "OneCycleLR": lambda one: OneCycleLR(one, max_lr=0.1, total_steps=20),
    "ChainedScheduler": chained,
    "SequentialLR": of_two,
    "SequentialLR of three": of_three,
}
every_scheduler = pytest.mark.parametrize(
    "build", FUNCTIONS_OF_THE_STEP.values(), ids=FUNCTIONS_OF_THE_STEP
)
every_counting_scheduler = pytest.mark.parametrize("build", COUNTING.values(), ids=COUNTING)


class Wrapped:
    """As accelerate's and Lightning's schedulers hold the one that they step."""

    def __init__(self, scheduler):
        self.scheduler = scheduler


batches = st.lists(st.integers(1, 10_000), min_size=1, max_size=8)


# --- without a scheduler


# --- a schedule


@every_scheduler
@pytest.mark.parametrize(("rule", "batch"), [("none", 1), ("linear", 6), ("sqrt", 6)])
def test_a_constant_batch_gives_torchs_own_trace(build, rule, batch):
    ours, theirs = optimizer(0.1, 0.3), optimizer(0.1, 0.3)
    rate = linear(ours, build(ours), rule, reference_batch_size=6)
    scheduler = build(theirs)
    for step in range(12):
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
def test_nothing_accumulates(build, batches, rule):
    """The rate of a batch does not depend on the batches before it, nor on how often it is set."""
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


# --- several groups, several optimizers, tensors


def test_each_optimizer_keeps_its_own_base():
    several = [optimizer(0.1, 0.3), optimizer(0.02), optimizer(0.1)]
    rate = linear(several, LambdaLR(several[0], cosine))
    for clock, batch in enumerate((4, 16, 8, 8, 8)):
        now = applied(rate, clock, batch)
        for one, bases in zip(several, ((0.1, 0.3), (0.02,), (0.1,)), strict=True):
            one.step()
            assert one.seen == pytest.approx([now * base / 0.1 for base in bases])
            assert rates(one) == pytest.approx([base * cosine(clock) for base in bases])


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_rate_that_is_a_tensor_stays_the_same_tensor_and_is_scaled_once(is_shared):
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


# --- what a step leaves


def test_what_is_written_before_or_by_the_step_stays_and_a_step_that_raises_restores():
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


# --- between two steps


@every_counting_scheduler
@pytest.mark.parametrize("make", ["numbers", "tensors"])
def test_a_scheduler_that_is_left_out_reads_and_writes_rates_that_are_not_scaled(build, make):
    """It is stepped by the script after each step, also after those that the script leaves out."""
    ours, theirs = (
        optimizer(0.1, 0.3) if make == "numbers" else with_tensors(0.1, 0.3) for _ in range(2)
    )
    rate = linear(ours)
    own, torchs_own = build(ours), build(theirs)
    for clock, batch in enumerate((4, 16, 8, 8, 2, 12, 4)):
        unscaled = rates(theirs)
        assert applied(rate, clock, batch) == pytest.approx(unscaled[0] * batch / 4, rel=1e-6)
        if clock % 3 != 1:
            for each in (ours, theirs):
                each.step()
            assert ours.seen == pytest.approx([each * batch / 4 for each in unscaled], rel=1e-6)
        assert rates(ours) == unscaled
        own.step()
        torchs_own.step()
        assert own.get_last_lr() == torchs_own.get_last_lr()


def test_a_step_that_a_grad_scaler_skips_leaves_the_rate():
    one = optimizer(0.1)
    scheduler = torchs.CosineAnnealingLR(one, 10)
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
    """As traced code, what restores a rate would not."""
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


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_own_distributed_state_which_takes_a_step_of_none_leaves_the_rate(make):
    """``get_optimizer_state_dict`` steps with a rate of 0 where there is no state."""
    model = torch.nn.Linear(2, 2)
    one = make(model.parameters(), lr=0.1)
    rate = linear(one)
    torchs_own = torchs.ExponentialLR(one, 0.9)
    applied(rate, 0, 8)
    get_optimizer_state_dict(model, one)
    assert rates(one) == [0.1]
    one.step()
    torchs_own.step()
    assert applied(rate, 1, 8) == pytest.approx(0.18)


def without_hooks(one):
    """As torchao's CPUOffloadOptimizer, which is an Optimizer that torch has not set up."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        delattr(one, name)
    # Its step has none either.
    one.step = lambda closure=None: setattr(one, "seen", rates(one))


def without_its_method(one):
    """As accelerate's optimizer, which puts the method back that it found."""
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


# --- saved and loaded


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
def test_saved_and_loaded_anywhere_the_trace_is_the_same(build, rule, optimizers_first, make):
    ours = make(0.1, 0.3)
    rate = linear(ours, build(ours), rule)
    saved, trace = [], []
    for clock, batch in enumerate(CHANGING):
        # After the rate of the step was set, too.
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


def test_a_scheduler_that_is_rebuilt_at_the_steps_so_far_goes_on_too():
    """As torchtune's recipes do, whose optimizer is loaded before its scheduler is built."""
    ours = optimizer(0.1)
    rate = linear(ours, LambdaLR(ours, cosine))
    trace, saved = [], []
    for clock, batch in enumerate(CHANGING):
        saved.append(through_a_file(ours.state_dict()))
        trace.append(applied(rate, clock, batch))
    for start, state in enumerate(saved):
        ours = optimizer(0.1)
        ours.load_state_dict(state)
        rate = linear(ours, LambdaLR(ours, cosine, start - 1))
        rest = [applied(rate, clock, CHANGING[clock]) for clock in range(start, len(CHANGING))]
        assert rest == trace[start:]


# --- refused


@pytest.mark.parametrize(
    "build", [*COUNTING.values(), ReduceLROnPlateau], ids=[*COUNTING, "ReduceLROnPlateau"]
)
@pytest.mark.parametrize("wrap", [lambda scheduler: scheduler, Wrapped], ids=["plain", "wrapped"])
def test_a_scheduler_that_keeps_its_own_count_is_refused(build, wrap):
    one = optimizer(0.1)
    scheduler = build(one)
    with pytest.raises(
        SettingError, match=f"^lr_scheduler='{type(scheduler).__name__}': it counts"
    ):
        AdaptiveRate(one, wrap(scheduler))


def test_what_does_not_belong_together_is_refused():
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
