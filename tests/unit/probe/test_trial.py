"""Trials measure the peak of a training step and restore the training state.

benchmarks/traceless.py runs all combinations.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.fakes import FakeBackend
from support.fault_injection import OutOfMemoryMode
from support.same_state import differences
from support.training_cases import (
    CPU,
    LENGTH,
    OPTIMIZERS,
    PLENTY,
    VOCABULARY,
    Case,
    Mishap,
    Training,
    cases,
    traces,
)

from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.memory import GIB, optimizer_state_tensors
from adaptive_batch.memory.device import AcceleratorMemory, CountedMemory

# Each optimizer in step and in backward, with alternating dtype, checkpointing and resumed state.
SHORT_FORM = [
    Case(
        optimizer,
        in_backward=in_backward,
        dtype=torch.bfloat16 if (index + in_backward) % 2 else torch.float32,
        checkpointing=bool(index // 2 % 2) != in_backward,
        resumed=bool((index + 1) // 2 % 2) == in_backward,
    )
    for index, optimizer in enumerate(OPTIMIZERS)
    for in_backward in (False, True)
]
SHORT_FORM += [*cases("adapters")[::37], *cases("tasks")[::37]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.nightly if number % 3 else ())
        for number, case in enumerate(SHORT_FORM)
    ],
    ids=str,
)
def test_a_probe_leaves_no_trace_however_it_ends(case):
    assert {outcome: differing for outcome, differing in traces(case) if differing} == {}


def test_the_comparison_detects_the_changes_of_a_step():
    """This shows that the test above can fail."""
    for case in (
        Case("counting", resumed=True),
        Case("AdamW8bit", resumed=True),
        Case("AdamW", in_backward=True),
    ):
        with torch.compiler.set_stance("force_eager"):
            training = Training(case)
            before = training.everything()
            training.train(1)
        differing = differences(before, training.everything())
        changed = {"torch", "python", "numpy", "parameter embed.weight", "buffer seen", "state 0"}
        assert changed <= set(differing)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD momentum", "AdamW in backward"])
def test_the_peak_of_a_trial_is_that_of_training(name, checkpointing, micro_batches):
    in_backward = name.endswith("in backward")
    optimizer = name.removesuffix(" in backward")
    training = Training(Case(optimizer, in_backward=in_backward, checkpointing=checkpointing))
    if not in_backward:
        training.train(1)
    with training.rehearsal(accumulates=micro_batches > 1 and not in_backward) as trial:
        predicted = {rows: trial(rows) for rows in (1, 2, 7, 40)}
    if in_backward:
        training.train(1)  # the first step of a fresh optimizer takes less
    for rows, tried in predicted.items():
        with CountedMemory(CPU).measure(training.resident(), budget_bytes=PLENTY) as usage:
            for _ in range(1 if in_backward else micro_batches):
                training.forward_backward(rows)
            if not in_backward:
                training.step()
        training.model.zero_grad(set_to_none=True)
        assert (tried.optimizer_peak_bytes is None) == in_backward
        assert max(tried.peak_bytes, tried.optimizer_peak_bytes or 0) == usage.peak_bytes
    assert predicted[40].peak_bytes > predicted[7].peak_bytes > trial.resident_bytes


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_a_failed_trial_frees_its_memory(checkpointing):
    """A failed backward may leave tasks in autograd's engine that keep its graph alive."""
    training = Training(Case("SGD momentum", checkpointing=checkpointing))
    alive, at, phases = [], 0, set()
    for module in training.model.modules():
        module.register_forward_hook(
            lambda module, args, output: alive.append(weakref.ref(output.untyped_storage()))
        )

    def forward_backward(rows):
        with OutOfMemoryMode(at):
            training.forward_backward(rows)

    with training.rehearsal(forward_backward=forward_backward) as trial:
        for at in range(1, 1000, 7):
            if trial(2).fits:
                break
            phases.add(training.phase)
            assert [at for reference in alive if reference() is not None] == []
    assert phases == {"forward", "backward"}


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_smallest_budget_is_the_peak_of_one_row(in_backward):
    training = Training(Case("AdamW", in_backward=in_backward))
    with training.rehearsal() as trial:
        needed = max(trial(1).peak_bytes, trial.optimizer_peak_bytes or 0)
    with pytest.raises(DoesNotFitError), training.rehearsal(budget_bytes=needed - 1):
        pass
    with training.rehearsal(budget_bytes=needed) as trial:
        assert trial(1).fits


def test_a_retry_of_the_allocator_does_not_fit():
    training = Training(Case("SGD momentum"))
    backend = FakeBackend(total=16 * GIB)

    def forward_backward(rows):
        training.forward_backward(rows)
        backend.hold(rows * GIB)
        backend.hold(0)
        backend.retries += rows == 4

    memory = AcceleratorMemory(CPU, backend=backend)
    with training.rehearsal(
        forward_backward=forward_backward, memory=memory, budget_bytes=8 * GIB
    ) as trial:
        tried = [trial(rows) for rows in (2, 4, 3, 9, 8)]
        assert [one.fits for one in tried] == [True, False, True, False, True]
        assert [one.retried for one in tried[:3]] == [False, True, False]
        assert trial(7).peak_bytes == 7 * GIB
    assert backend.fraction == 1.0


def evaluate(training, rows):
    training.phase = "evaluation"
    with torch.no_grad():
        training.model(torch.randint(VOCABULARY, (rows, LENGTH)))


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "in backward"])
@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
def test_trials_of_evaluation_restore_the_training_state(in_backward, resumed):
    training = Training(Case("AdamW", in_backward=in_backward, resumed=resumed))
    before, objects = training.everything(), training.objects()

    def fail(rows):
        evaluate(training, rows)
        raise Mishap("index out of range")

    with training.rehearsal(budget_bytes=GIB) as trial:
        assert trial.evaluation(lambda rows: evaluate(training, rows), 5).fits
        training.model.burden = {"forward": GIB}
        assert not trial.evaluation(lambda rows: evaluate(training, rows), 3).fits
        training.model.burden = {}
        assert trial(2).fits
        assert trial.evaluation(lambda rows: evaluate(training, rows), 3).fits
    says = "a trial of evaluating 3 rows failed.*: index out"
    with pytest.raises(RuntimeError, match=says), training.rehearsal() as trial:
        trial.evaluation(fail, 3)
    assert differences(before, training.everything()) == []
    assert differences(objects, training.objects()) == []


def test_modules_keep_their_mode_of_training_and_evaluation():
    """Frozen normalization layers stay in evaluation mode."""
    training = Training(Case("AdamW"))
    modules = list(training.model.modules())
    training.model.layers[0].eval()
    before = [module.training for module in modules]
    seen = []

    def forward_backward(rows):
        seen.append([module.training for module in modules])
        training.forward_backward(rows)

    def evaluates(rows):
        evaluate(training, rows)
        if rows == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with training.rehearsal(forward_backward=forward_backward) as trial:
        assert trial(2).fits
        for rows in (3, 5):
            assert trial.evaluation(evaluates, rows).fits == (rows == 5)
            assert trial(2).fits
    assert [module.training for module in modules] == before
    assert all(modes == before for modes in seen)
    assert len(seen) == 5


def test_the_memory_of_trial_states_is_kept_until_the_first_step():
    training = Training(Case("AdamW"))
    rehearsal = training.rehearsal()
    rehearsal._varying_steps = lambda rows: iter([[lambda: training.forward_backward(rows)]])
    with rehearsal as trial:
        trial(2)
        states = [weakref.ref(state) for state in optimizer_state_tensors([training.optimizer])]
    gc.collect()
    assert training.optimizer.state == {}
    assert all(state() is not None for state in states)
    training.forward_backward(2)
    training.step()
    gc.collect()
    assert {state() for state in states} == {None}


def test_an_interrupt_is_raised_after_the_training_state_is_restored():
    training = Training(Case("AdamW", resumed=True))
    before = training.everything()

    def interrupted(rows):
        training.forward_backward(rows)
        if rows == 2:
            raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        training.rehearsal(forward_backward=interrupted) as trial,
    ):
        trial(2)
    assert differences(before, training.everything()) == []


def test_the_copies_must_fit_on_the_host(monkeypatch):
    training = Training(Case("AdamW"))
    before = training.objects()
    monkeypatch.setattr("adaptive_batch.memory.snapshot.host_available_bytes", lambda: 2**10)
    says = r"copies 0\.\d+ MiB of weights .* to the host; only 1\.00 KiB are"
    with pytest.raises(DoesNotFitError, match=says), training.rehearsal():
        pass
    assert training.objects() == before
