"""The rate is recomputed from base, schedule, clock and batch; nothing is multiplied into the
optimizer.
"""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import SGD
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    LearningRate,
    Reference,
    parse_reference,
    scale_learning_rate,
    schedule_of,
)


def optimizer(*rates):
    return SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates],
        momentum=0.9,
    )


def rates(one):
    return [float(group["lr"]) for group in one.param_groups]


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / 10))


def warm_up(step):
    return min(1.0, (step + 1) / 4)


def halves(step):
    return 0.5**step


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
    "CosineAnnealingWarmRestarts": lambda one: torchs.CosineAnnealingWarmRestarts(
        one, T_0=2, T_mult=2
    ),
    "CyclicLR": lambda one: torchs.CyclicLR(
        one, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="exp_range", gamma=0.9
    ),
    "OneCycleLR": lambda one: OneCycleLR(one, max_lr=0.1, total_steps=20),
    "ChainedScheduler": chained,
    "SequentialLR": lambda one: SequentialLR(
        one, [LambdaLR(one, warm_up), LambdaLR(one, cosine)], milestones=[3]
    ),
    "SequentialLR of three": lambda one: SequentialLR(
        one,
        [
            torchs.ConstantLR(one, 0.5, total_iters=2),
            torchs.MultiStepLR(one, [1, 2]),
            torchs.ExponentialLR(one, 0.9),
        ],
        [2, 6],
    ),
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


# --- what a batch makes of a rate


def test_scaling_follows_the_batch():
    assert scale_learning_rate(1e-3, 10, 2, "linear") == pytest.approx(
        5e-3
    )  # the worked example of DeepSpeed's pull request 7104
    assert scale_learning_rate(1e-3, 4, 2, "linear") == pytest.approx(2e-3)
    assert scale_learning_rate(1e-3, 8, 2, "sqrt") == pytest.approx(2e-3)
    assert scale_learning_rate(1e-3, 8, 2, "none") == 1e-3


@pytest.mark.parametrize(
    "arguments", [(1e-3, 8, 2, "cubic"), (1e-3, 0, 2, "linear"), (1e-3, 8, 0, "sqrt")]
)
def test_scaling_by_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match=r"give one of|must be above 0"):
        scale_learning_rate(*arguments)


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [
        (64, Reference(64, "rows"), "64 rows"),
        (1, Reference(1, "rows"), "1 row"),
        ("8192tok", Reference(8192, "tokens"), "8192 tokens"),
        ("1.5e6tok", Reference(1.5e6, "tokens"), "1500000 tokens"),
        ("0.5tok", Reference(0.5, "tokens"), "0.5 tokens"),
    ],
)
def test_a_reference_is_rows_or_tokens(value, reference, text):
    assert parse_reference("reference_batch_size", value) == reference
    assert str(reference) == text


@pytest.mark.parametrize(
    "value",
    [
        0,
        -4,
        True,
        64.0,
        "64",
        "tok",
        "0tok",
        "-1tok",
        "nantok",
        "inftok",
        "1e999tok",
        "manytok",
        "8ktok",
        None,
    ],
)
def test_another_reference_is_refused(value):
    with pytest.raises(
        ValueError, match="give a whole number of rows, 1 or more, or tokens as in 8192tok"
    ):
        parse_reference("reference_batch_size", value)


# --- without a scheduler


def test_a_constant_rate_stays_and_its_groups_are_not_touched():
    one = optimizer(0.1)
    before = [dict(group) for group in one.param_groups]
    rate = LearningRate([one], None)
    assert [rate.set(clock) for clock in (0.0, 1.5, 9.0)] == [0.1, 0.1, 0.1]
    assert [dict(group) for group in one.param_groups] == before


@pytest.mark.parametrize("loaded_first", [True, False])
def test_a_scaled_rate_that_was_saved_does_not_become_the_base(loaded_first):
    before = optimizer(0.1, 0.3)
    LearningRate(before, rule="linear", reference=4).set(0, batch=32)
    after = optimizer(0.1, 0.3)
    if loaded_first:
        after.load_state_dict(before.state_dict())
    rate = LearningRate(after, rule="linear", reference=4)
    if not loaded_first:
        after.load_state_dict(before.state_dict())
    rate.set(1, batch=4)
    assert rates(after) == [0.1, 0.3]


# --- a schedule


@every_scheduler
@pytest.mark.parametrize(("rule", "batch"), [("none", None), ("linear", 6), ("sqrt", 6)])
def test_a_constant_batch_gives_torchs_own_trace(build, rule, batch):
    ours, theirs = optimizer(0.1, 0.3), optimizer(0.1, 0.3)
    rate = LearningRate(ours, build(ours), rule=rule, reference=6)
    scheduler = build(theirs)
    for step in range(12):
        rate.set(float(step), batch=batch)
        assert [{**group, "params": 0} for group in ours.param_groups] == [
            (
                {**group, "params": 0, "initial_lr": own["initial_lr"]}
                if "initial_lr" in own
                else {**group, "params": 0}
            )
            for group, own in zip(theirs.param_groups, ours.param_groups, strict=True)
        ]
        theirs.step()
        if scheduler:
            scheduler.step()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=5))
def test_the_rate_depends_on_the_clock_alone(clocks):
    one = optimizer(0.1, 0.3)
    rate = LearningRate([one], LambdaLR(one, cosine))
    for clock in clocks:
        rate.set(clock)
    assert rates(one) == pytest.approx([0.1 * cosine(clocks[-1]), 0.3 * cosine(clocks[-1])])


def test_a_schedule_without_an_optimizer_is_what_multiplies_the_first_base_rate():
    one = optimizer(0.1, 0.3)
    factor = schedule_of(LambdaLR(one, cosine))
    assert [factor(clock) for clock in (2.5, 3.0)] == [cosine(2.5), cosine(3)]
    assert schedule_of(Wrapped(LambdaLR(one, cosine)))(4) == cosine(4)
    for scheduler, name in (
        (None, "None"),
        (StepLR(one, 2), "'StepLR'"),
        (Wrapped(StepLR(one, 2)), "'StepLR'"),
    ):
        with pytest.raises(SettingError, match=rf"^lr_scheduler={name}: .*needs a LambdaLR"):
            schedule_of(scheduler)


@every_scheduler
@given(batches=batches, rule=st.sampled_from(["linear", "sqrt"]))
def test_nothing_accumulates(build, batches, rule):
    """Whatever batches came before, the rate of a batch is that of a run that had no other; at a
    clock that stands still too.
    """
    one, other = optimizer(0.1, 0.3), optimizer(0.1, 0.3)
    ours = LearningRate(one, build(one), rule=rule, reference=16)
    constant = LearningRate(other, build(other), rule=rule, reference=16)
    for clock, batch in enumerate(batches):
        unscaled = constant.set(clock, batch=16)
        assert ours.set(clock, batch=batch) == scale_learning_rate(unscaled, batch, 16, rule)
        assert ours.set(clock, batch=16) == unscaled
        ours.set(clock, batch=batch)
    ours.set(len(batches), batch=16)
    constant.set(len(batches), batch=16)
    assert rates(one) == rates(other)


@every_scheduler
def test_get_last_lr_is_what_was_applied(build):
    one = optimizer(0.1, 0.3)
    scheduler = build(one)
    if scheduler is None:
        return
    rate = LearningRate(one, scheduler, rule="linear", reference=4)
    for clock, batch in enumerate((4, 8, 8, 2)):
        assert rate.set(clock, batch=batch) == rates(one)[0]
        assert scheduler.get_last_lr() == rates(one)


# --- several groups, several optimizers, tensors


@every_scheduler
def test_every_optimizer_in_backward_has_the_same_rate(build):
    several = [optimizer(0.1), optimizer(0.1), optimizer(0.1)]
    rate = LearningRate(several, build(several[0]), rule="linear", reference=4)
    for clock, batch in enumerate((4, 16, 8, 4)):
        now = rate.set(clock, batch=batch)
        assert [rates(one) for one in several] == [[now]] * 3


def test_each_optimizer_keeps_its_own_base():
    one, other = optimizer(0.1, 0.3), optimizer(0.02)
    rate = LearningRate([one, other], LambdaLR(one, cosine), rule="linear", reference=4)
    for clock, batch in enumerate((4, 16, 8, 8, 8)):
        now = rate.set(clock, batch=batch)
        assert rates(one)[1] == pytest.approx(3 * now)
        assert rates(other) == [pytest.approx(now / 5)]


def test_a_rate_that_is_a_tensor_is_filled():
    one = optimizer(0.1)
    one.param_groups[0]["lr"] = kept = torch.tensor(0.1)
    scheduler = LambdaLR(one, cosine)
    rate = LearningRate([one], scheduler, rule="linear", reference=1)
    assert rate.set(5.0, batch=1) == kept.item() == pytest.approx(0.05)
    assert rate.set(5.0, batch=4) == scheduler.get_last_lr()[0] == pytest.approx(0.2)
    assert one.param_groups[0]["lr"] is kept


def test_groups_that_share_a_tensor_are_scaled_once():
    """As torch builds them of one ``lr=torch.tensor(...)``."""
    both = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    one = torch.optim.AdamW(both, lr=torch.tensor(0.5), capturable=False, foreach=False)
    rate = LearningRate(one, rule="linear", reference=4)
    for batch in (8, 16):
        assert rate.set(0, batch=batch) == 0.5 * batch / 4
        assert rates(one) == [0.5 * batch / 4] * 2
        one.step()
        assert rates(one) == [0.5, 0.5]


# --- between two steps


@every_counting_scheduler
@pytest.mark.parametrize("make", ["numbers", "tensors"])
def test_a_scheduler_that_is_left_out_reads_and_writes_rates_that_are_not_scaled(build, make):
    """It is stepped by the script, after each step of its optimizer, which sees its rate x batch /
    reference.
    """
    ours, theirs = (
        optimizer(0.1, 0.3) if make == "numbers" else with_tensors(0.1, 0.3) for _ in range(2)
    )
    rate = LearningRate(ours, rule="linear", reference=4)
    own, torchs_own = build(ours), build(theirs)
    for clock, batch in enumerate((4, 16, 8, 8, 2, 12, 4)):
        unscaled = rates(theirs)
        assert rate.set(clock, batch=batch) == pytest.approx(unscaled[0] * batch / 4, rel=1e-6)
        assert rates(ours) == pytest.approx([each * batch / 4 for each in unscaled], rel=1e-6)
        for each in (ours, theirs):
            each.step()
        assert rates(ours) == unscaled
        own.step()
        torchs_own.step()
        assert own.get_last_lr() == torchs_own.get_last_lr()


@every_scheduler
def test_after_a_step_the_groups_hold_what_they_hold_without_a_rule(build):
    one, other = optimizer(0.1, 0.3), optimizer(0.1, 0.3)
    scaled, plain = (
        LearningRate(one, build(one), rule="linear", reference=4),
        LearningRate(other, build(other)),
    )
    for clock, batch in enumerate((4, 16, 8, 1)):
        plain.set(clock)
        assert scaled.set(clock, batch=batch) == rates(other)[0] * (batch / 4)
        one.step()
        assert rates(one) == rates(other)


def test_what_is_saved_or_copied_is_not_scaled_whenever_that_is():
    one = optimizer(0.1, 0.3)
    rate = LearningRate(one, rule="linear", reference=4)
    for is_stepped in (False, True):
        rate.set(0, batch=8)
        assert rates(one) == [0.2, 0.6]
        if is_stepped:
            one.step()
            assert rates(pickle.loads(pickle.dumps(one))) == rates(copy.deepcopy(one)) == [0.1, 0.3]
        assert [group["lr"] for group in one.state_dict()["param_groups"]] == [0.1, 0.3]


def test_a_rate_that_is_written_between_the_step_and_what_it_is_set_by_is_refused():
    """It would be stepped without the rule, and what a scheduler multiplies there would be scaled
    again and again.
    """
    one = optimizer(0.1)
    rate = LearningRate(one, rule="linear", reference=4)
    torchs_own = torchs.ExponentialLR(one, 0.9)
    rate.set(0, batch=8)
    one.step()
    torchs_own.step()
    assert rate.set(1, batch=8) == pytest.approx(0.18)
    torchs_own.step()
    weights = [parameter.clone() for group in one.param_groups for parameter in group["params"]]
    with pytest.raises(
        SettingError,
        match=r"^lr_scaling='linear': another lr was set after the step's own and before",
    ):
        one.step()
    held = [parameter for group in one.param_groups for parameter in group["params"]]
    assert all(map(torch.equal, held, weights))


def test_a_scheduler_that_gives_no_finite_number_is_refused():
    one = optimizer(0.1)
    rate = LearningRate(one, LambdaLR(one, lambda step: math.nan if step > 1 else 1.0))
    rate.set(1)
    with pytest.raises(
        SettingError, match=r"^lr_scheduler='LambdaLR': at step 2 it gives \[nan\]; give"
    ):
        rate.set(2)


def test_a_scheduler_that_multiplied_a_scaled_rate_is_pointed_out_once(caplog):
    one = optimizer(0.1)
    rate = LearningRate(one, rule="linear", reference=4)
    torchs_own = torchs.ExponentialLR(one, 0.9)
    for clock in range(3):
        rate.set(clock, batch=8)
        if clock:
            torchs_own.step()
    assert caplog.text.count("a step was left out, and another rate was written since") == 1
    caplog.clear()
    two = optimizer(0.1)
    rate = LearningRate(two, rule="linear", reference=4)
    torchs_own = torchs.ExponentialLR(two, 0.9)
    for clock in range(3):
        assert rate.set(clock, batch=8) == pytest.approx(0.2 * 0.9**clock)
        rate.restore()
        torchs_own.step()
    assert not caplog.records


def test_a_rate_that_is_written_after_a_step_that_was_left_out_is_taken():
    one = optimizer(0.1)
    rate = LearningRate(one, rule="linear", reference=4)
    rate.set(0, batch=8)
    one.param_groups[0]["lr"] = 0.7
    assert rate.set(1, batch=8) == 1.4
    one.step()
    assert rates(one) == [0.7]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_torchs_own_distributed_state_which_takes_a_step_of_none_leaves_the_rate(make):
    """``get_optimizer_state_dict`` steps with a rate of 0 where there is no state."""
    model = torch.nn.Linear(2, 2)
    one = make(model.parameters(), lr=0.1)
    rate = LearningRate(one, rule="linear", reference=4)
    rate.set(0, batch=8)
    get_optimizer_state_dict(model, one)
    assert rate.set(1, batch=16) == pytest.approx(0.4)
    one.step()
    assert rates(one) == [0.1]


def test_after_torchs_step_of_none_an_own_scheduler_multiplies_what_is_not_scaled():
    model = torch.nn.Linear(2, 2)
    one = torch.optim.AdamW(model.parameters(), lr=0.1)
    rate = LearningRate(one, rule="linear", reference=4)
    torchs_own = torchs.ExponentialLR(one, 0.9)
    rate.set(0, batch=8)
    get_optimizer_state_dict(model, one)
    one.step()
    assert rates(one) == [0.1]
    torchs_own.step()
    assert rate.set(1, batch=8) == pytest.approx(0.18)


def test_an_optimizer_without_hooks_is_restored_by_the_next_step_or_by_hand():
    """As torchao's CPUOffloadOptimizer, which is an Optimizer that torch has not set up."""
    one = optimizer(0.1)
    for name in ("_optimizer_step_post_hooks", "_optimizer_state_dict_post_hooks"):
        delattr(one, name)
    rate = LearningRate(one, rule="linear", reference=4)
    assert [rate.set(clock, batch=8) for clock in range(2)] == [0.2, 0.2]
    rate.restore()
    assert rates(one) == [0.1]


def test_without_a_rule_an_optimizer_has_no_hook_of_ours():
    one = optimizer(0.1)
    LearningRate(one, LambdaLR(one, cosine)).set(1.0)
    assert not one._optimizer_step_post_hooks
    assert not one._optimizer_state_dict_post_hooks


class Wrapper(torch.optim.Optimizer):
    """As accelerate's and Lightning's: an Optimizer that torch has not set up, around one that it
    has.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("wrap", [lambda one: one, Wrapper, lambda one: Wrapper(Wrapper(one))])
def test_a_wrapped_optimizer_is_the_one_inside(wrap):
    one = optimizer(0.1)
    rate = LearningRate(wrap(one), LambdaLR(one, cosine), rule="linear", reference=4)
    assert rate.set(4.0, batch=8) == pytest.approx(0.2 * cosine(4))
    one.step()
    assert rates(one) == [0.1 * cosine(4)]


@pytest.mark.parametrize("name", ["LambdaLR", "LambdaLR of objects"])
def test_whether_somebody_else_steps_the_scheduler_too_makes_no_difference(name):
    one, other = optimizer(0.1), optimizer(0.1)
    scheduler = FUNCTIONS_OF_THE_STEP[name](one)
    rate, alone = (
        LearningRate(one, scheduler),
        LearningRate(other, FUNCTIONS_OF_THE_STEP[name](other)),
    )
    for clock in range(9):
        assert rate.set(clock) == alone.set(clock)
        one.step()
        scheduler.step()
        scheduler.step()


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


def build_run(build, rule, *, make, load=None, optimizers_first):
    """Optimizer, scheduler and rate as a recipe or a library user makes them, resumed where `load`
    is given.
    """
    ours = make(0.1, 0.3)
    if load and optimizers_first:
        ours.load_state_dict(load)
    rate = LearningRate(ours, build(ours), rule=rule, reference=4)
    if load and not optimizers_first:
        ours.load_state_dict(load)
    return ours, rate


@every_scheduler
@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.parametrize("optimizers_first", [True, False])
@pytest.mark.parametrize("make", [optimizer, with_tensors])
def test_saved_and_loaded_anywhere_the_trace_is_the_same(build, rule, optimizers_first, make):
    ours, rate = build_run(build, rule, make=make, optimizers_first=False)
    saved, trace = [], []
    for clock, batch in enumerate(CHANGING):
        saved.append(through_a_file(ours.state_dict()))
        rate.set(float(clock), batch=batch)
        trace.append(
            [{**group, "lr": float(group["lr"]), "params": 0} for group in ours.param_groups]
        )
        ours.step()
    for start, state in enumerate(saved):
        ours, rate = build_run(
            build, rule, make=make, load=state, optimizers_first=optimizers_first
        )
        for clock in range(start, len(CHANGING)):
            rate.set(float(clock), batch=CHANGING[clock])
            now = [{**group, "lr": float(group["lr"]), "params": 0} for group in ours.param_groups]
            assert [group["lr"] for group in now] == [group["lr"] for group in trace[clock]]
            ours.step()
            assert now == trace[clock]


def test_a_scheduler_that_is_rebuilt_at_the_steps_so_far_goes_on_too():
    """As torchtune's recipes do, whose optimizer is loaded before its scheduler is built."""
    ours = optimizer(0.1)
    rate = LearningRate(ours, LambdaLR(ours, cosine), rule="linear", reference=4)
    trace, saved = [], []
    for clock, batch in enumerate(CHANGING):
        saved.append(through_a_file(ours.state_dict()))
        trace.append(rate.set(clock, batch=batch))
    for start, state in enumerate(saved):
        ours = optimizer(0.1)
        ours.load_state_dict(state)
        rate = LearningRate(ours, LambdaLR(ours, cosine, start - 1), rule="linear", reference=4)
        assert [
            rate.set(clock, batch=CHANGING[clock]) for clock in range(start, len(CHANGING))
        ] == trace[start:]


# --- refused


@pytest.mark.parametrize(
    "build", [*COUNTING.values(), ReduceLROnPlateau], ids=[*COUNTING, "ReduceLROnPlateau"]
)
@pytest.mark.parametrize("wrap", [lambda scheduler: scheduler, Wrapped], ids=["plain", "wrapped"])
def test_a_scheduler_that_keeps_its_own_count_is_refused(build, wrap):
    one = optimizer(0.1)
    scheduler = build(one)
    with pytest.raises(SettingError) as error:
        LearningRate(one, wrap(scheduler))
    assert (
        str(error.value)
        == f"lr_scheduler='{type(scheduler).__name__}': it keeps its own count; leave it out here"
        " and step it in your own loop after optimizer.step(): the rate that it sets is scaled"
    )


def test_a_rule_needs_a_reference_and_a_batch():
    one = optimizer(0.1)
    with pytest.raises(AssertionError, match="what is scaled has a reference"):
        LearningRate(one, rule="linear")
    with pytest.raises(ValueError, match="0: give a whole number of rows"):
        LearningRate(one, rule="linear", reference=0)
    with pytest.raises(ValueError, match="another optimizer"):
        LearningRate(one, LambdaLR(optimizer(0.1), cosine))


def test_a_group_that_the_scheduler_does_not_know_is_refused():
    one = optimizer(0.1)
    rate = LearningRate(one, LambdaLR(one, cosine))
    rate.set(0)
    one.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(
        SettingError, match="it was built for 1 parameter groups, and the optimizer has 2"
    ):
        rate.set(1)


@pytest.mark.parametrize("batch", [0, -1, math.nan])
def test_a_batch_that_is_refused_moves_nothing(batch):
    one = optimizer(0.1)
    rate = LearningRate(one, LambdaLR(one, halves), rule="linear", reference=Reference(4, "tokens"))
    rate.set(0, batch=8)
    with pytest.raises(ValueError, match="must be above 0"):
        rate.set(1, batch=batch)
    assert rates(one) == [0.2]
    assert rate.set(1, batch=4) == 0.05
