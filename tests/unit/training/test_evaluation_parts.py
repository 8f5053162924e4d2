"""An evaluation that runs out of memory beside its parts."""

import pytest
import torch
from torch import nn

from adaptive_batch import StepOptions
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.training import EvaluationParts


@pytest.mark.parametrize("place", ["check", "outputs"])
def test_out_of_memory_in_the_check_or_as_outputs_are_joined_halves_the_parts(place, monkeypatch):
    model = nn.Linear(4, 1)
    left = [place]

    def fail(at):
        if left and left[0] == at:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def forward(batch):
        if len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        outputs = model(batch["x"]).detach()
        return outputs.square().mean(), outputs, None

    def trial(batch):
        fail("check")
        return forward(batch)

    names = ["split", "num_labels", "is_sum", "is_shifted", "fix"]
    options = {"is_exact": True, "options": StepOptions(), **dict.fromkeys(names)}
    evaluation = EvaluationParts(model, **options)
    join = evaluation._outputs
    monkeypatch.setattr(evaluation, "_outputs", lambda *args: fail("outputs") or join(*args))
    batch = {"x": torch.randn(8, 4)}
    (loss, outputs, _), weights = evaluation.run(
        batch, forward, trial=trial, prepare=lambda batch: batch, snapshot=lambda: lambda: None
    )
    expected = model(batch["x"]).detach()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(loss, expected.square().mean())
    assert weights == [0.25] * 4
    assert evaluation.sizer.limit_of_step == MicroBatchLimit(2)
