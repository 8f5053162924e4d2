"""A step on fake tensors takes no memory and counts that of a real one to the byte."""

from __future__ import annotations

import pytest
import torch
from support.fake_steps import OPTIMIZERS, Decoder, fake_step, step_arguments
from torch._subclasses.fake_tensor import FakeTensor

from adaptive_batch.estimate import DevicesAsHost, FakeDevice
from adaptive_batch.memory import (
    MemoryCurve,
    device_memory,
    optimizer_state_tensors,
    plain_tensors,
)
from adaptive_batch.probe import DryRun

PLENTY = 2**40


def rehearsal(*, checkpointing=False, **how):
    arguments = step_arguments(Decoder(checkpointing=checkpointing), None, **how)
    memory = device_memory(torch.device("cpu"))
    return DryRun(memory=memory, budget_bytes=PLENTY, **arguments)


CASES = [
    *({"optimizer": optimizer} for optimizer in OPTIMIZERS),
    *({"optimizer": optimizer, "in_backward": True} for optimizer in ("AdamW", "SGD momentum")),
    {"accumulates": True},
    {"checkpointing": True},
    {"checkpointing": True, "accumulates": True, "optimizer": "AdamW foreach"},
    {"checkpointing": True, "in_backward": True, "optimizer": "AdamW fused"},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case.values())))
def test_a_fake_step_counts_a_real_one_after_each_operation(case):
    step = fake_step(**case)
    traces = {rows: step.trace(rows, step.forward_backward) for rows in (1, 2, 3, 9)}
    curve = MemoryCurve.from_traces((2, traces[2]), (3, traces[3]))
    with rehearsal(**case) as trial:
        assert step.resident.total == trial.resident_bytes
        assert step.optimizer_peak_bytes == trial.optimizer_peak_bytes
        assert (step.optimizer_peak_bytes is None) == case.get("in_backward", False)
        for rows, fake in traces.items():
            real = trial(rows)
            assert max(fake.live_bytes) == real.peak_bytes
            if case.get("in_backward"):  # a dry run restores each parameter in its hook
                continue
            assert list(fake.live_bytes) == list(real.trace.live_bytes)
        assert curve.peak_bytes(37) == trial(37).peak_bytes


@pytest.mark.parametrize("in_backward", [False, True])
def test_no_tensor_of_a_fake_step_is_real(in_backward):
    with torch.device("meta"):
        model = Decoder()
    step = fake_step("AdamW8bit", in_backward=in_backward, model=model)
    step.trace(2, step.forward_backward)
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    tensors += [
        plain
        for state in optimizer_state_tensors(step._optimizers)
        for plain in plain_tensors(state)
    ]
    assert len(tensors) > 3 * len(list(model.parameters()))
    assert all(isinstance(tensor, FakeTensor) for tensor in tensors)


@pytest.mark.parametrize(
    "move",
    [
        lambda tensor: tensor.cuda(),
        lambda tensor: tensor[:, :].to(torch.device("cuda", 0), torch.int64),
        lambda tensor: tensor.type_as(tensor),
        lambda tensor: torch.as_tensor(tensor, device="cuda"),
    ],
)
def test_a_batch_counts_once_if_a_script_moves_it(move):
    device = FakeDevice()
    batch = {"tokens": torch.zeros(2, 3, dtype=torch.int64)}
    with device.counting() as counter:
        counter.add([])
        device.move_batch(batch)
        with DevicesAsHost():
            moved = move(batch["tokens"])
            again = move(moved)
    assert list(counter.log) == [48]
    assert again.shape == moved.shape == (2, 3)
