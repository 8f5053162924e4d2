"""After an OOM a step runs again as if its limit had been lower from the start.

benchmarks/faults.py lets every operation run out of memory.
"""

from __future__ import annotations

import pytest
import torch
from support.fault_injection import Training, Way, sweep
from support.runners import build_runner
from support.same_state import differences
from support.sharded_model import Decoder, collate, make_rows, token_losses

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError

BOTH = (False, True)
FOUR = MicroBatchLimit(4)
LORA = ("rows", "LoRA", "")
TASKS = [("rows", "LoRA", "DPO"), ("tokens", "", "distillation")]


@pytest.mark.parametrize(
    "nested", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["once", "twice"]
)
@pytest.mark.parametrize(
    ("unit", "adapters", "task", "checkpointing"),
    [
        *((unit, "", "", checkpointing) for unit in ("rows", "tokens") for checkpointing in BOTH),
        *(pytest.param(*task, True, marks=pytest.mark.slow) for task in TASKS),
        *(pytest.param(*task, False, marks=pytest.mark.nightly) for task in TASKS),
        *(pytest.param(*LORA, checkpointing, marks=pytest.mark.nightly) for checkpointing in BOTH),
    ],
)
def test_a_retry_trains_as_with_a_lower_limit(unit, checkpointing, nested, adapters, task):
    swept = list(sweep(Way(unit, checkpointing, nested, adapters, task), every=79))
    assert {phase for phase, _ in swept} > {"forward", "backward"}
    assert [differing for _, differing in swept if differing] == []


def test_the_comparison_detects_another_step_and_another_limit():
    """This shows that the test above can fail."""
    training = Training(Way("rows", checkpointing=False))
    trained = training.two_steps(None, FOUR)
    assert differences(trained, training.two_steps(None, FOUR)) == []
    seen = {"parameter embed.weight", "buffer seen", "state 0", "torch", "python", "numpy"}
    training.run_step(3)
    assert seen <= set(differences(trained, training.everything()))
    other = training.two_steps(None, MicroBatchLimit(2))
    assert {"parameter embed.weight", "state 0", "python", "numpy", "steps"} <= set(
        differences(trained, other)
    )


SAID = "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has none."


class Step:
    """A small model and its runner, which runs out of memory if `too_large` returns true."""

    def __init__(self, *, capacity=FOUR, **settings):
        self.model = Decoder()
        self.too_large = lambda tokens: False
        self.shapes_run = []
        self.changes = []
        settings.setdefault("on_change", self.changes.append)
        self.engine = build_runner(
            self.model, capacity, collate=collate, mean_loss=self.mean_loss, **settings
        )

    def mean_loss(self, batch):
        self.shapes_run.append(tuple(batch["tokens"].shape))
        if self.too_large(batch["tokens"]):
            raise torch.OutOfMemoryError(SAID)
        return token_losses(self.model, batch)

    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]


def rows(*lengths):
    return [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]


@pytest.mark.parametrize("capacity", [MicroBatchLimit(8), MicroBatchLimit(72, "tokens")], ids=str)
def test_the_error_of_a_row_that_does_not_fit_has_numbers_and_remedies(capacity):
    step = Step(capacity=capacity)
    step.too_large = lambda tokens: tokens.shape[1] >= 9
    with pytest.raises(DoesNotFitError) as caught:
        step.engine.run(make_rows((9, 7, 9, 9, 6, 9, 8, 9)))
    alone = "one row of 9 tokens ran out of memory on cpu, alone in its micro-batch"
    assert str(caught.value) == f"{alone}: {SAID}; {MEMORY_REMEDIES}"
    assert step.shapes_run[-1] == (1, 9)
    assert step.gradients() == [None] * len(step.gradients())


@pytest.mark.parametrize(
    ("retries", "error"),
    [
        (True, RuntimeError("CUDA error: device-side assert triggered")),
        (False, torch.OutOfMemoryError(SAID)),
    ],
)
def test_other_errors_and_an_oom_without_retries_are_raised_unchanged(retries, error):
    step = Step(retries=retries)

    def fail(tokens):
        if len(step.shapes_run) == 2:
            raise error

    step.too_large = fail
    with pytest.raises(type(error)) as caught:
        step.engine.run(make_rows((9, 7, 9, 9, 6, 9, 8, 9)))
    assert caught.value is error
    assert (len(step.shapes_run), step.changes, step.engine.sizer.limit()) == (2, [], FOUR)


def test_an_attempt_after_an_oom_makes_room_for_its_largest_micro_batch(monkeypatch):
    """The allocator's cache was emptied, so that also a smaller micro-batch needs new blocks."""
    step = Step()
    sizes = []

    def make_room():
        sizes.append(step.engine.largest_size)

    monkeypatch.setattr(step.engine.memory, "make_room_for_larger", make_room)
    step.too_large = lambda tokens: len(tokens) > 2
    for _ in range(2):
        step.engine.run(rows(8, 8, 8, 8))
    assert sizes == [4 * 8, 2 * 8]
