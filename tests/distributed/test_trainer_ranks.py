"""AdaptiveTrainer under DDP trains the same as Trainer, and both ranks retry together."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_on_ranks
from support.trainers import limited, llama, trained, trainer_of
from transformers import Trainer

from adaptive_batch import DoesNotFitError
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer

TOKENS = torch.randint(1, 64, (32, 8), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = [{"input_ids": tokens} for tokens in TOKENS]


def differences(accumulates: int) -> list[float]:
    """Return the largest differences from Trainer's losses and weights, unsplit and split."""
    given = {"data": ROWS, "gradient_accumulation_steps": accumulates}
    given["per_device_train_batch_size"] = 4
    found = []
    with tempfile.TemporaryDirectory() as folder:
        plain = trained(Trainer, folder, **given)
        for limit in (None, 2):
            adaptive = AdaptiveArguments(micro_batch_size=None if limit else "auto")
            model = limited(llama(), limit, modes=[True], rank=1)
            own = trained(AdaptiveTrainer, folder, model, adaptive=adaptive, **given)
            assert own.trainer.adaptive_step.num_micro_batches == (2 if limit else 1)
            losses = zip(plain.losses, own.losses, strict=True)
            found += [max(abs(one - other) / one for one, other in losses)]
            found += [(plain.weights - own.weights).abs().max().item()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("accumulates", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_two_ranks_train_what_trainer_does_and_retry_together(accumulates):
    for loss, weights, loss_in_parts, weights_in_parts in run_on_ranks(differences, 2, accumulates):
        assert loss <= 1e-7
        assert weights <= 1e-5
        assert loss_in_parts <= 2e-6
        assert weights_in_parts <= 1e-5


class Gathers(AdaptiveTrainer):
    """Gathers a metric of all ranks in its loss, as some of TRL's trainers do."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        result = super().compute_loss(model, inputs, *given, **named)
        self.accelerator.gather(inputs["input_ids"].sum())
        return result


def evaluated(kind: type[Trainer], limit: int | None, rank: int | None = 1) -> Any:
    """Return metrics and predictions with OOMs on one rank or on all, or the error's text."""
    with tempfile.TemporaryDirectory() as folder:
        model = limited(llama(), limit, rank=rank)
        trainer = trainer_of(kind, folder, model, per_device_eval_batch_size=4)
        try:
            output = trainer.predict(ROWS[:30])
        except DoesNotFitError as error:
            return str(error)
    return output.metrics["test_loss"], output.predictions


def evaluations() -> list[Any]:
    whole, parts = evaluated(Trainer, None), evaluated(AdaptiveTrainer, 2)
    return [*whole, *parts, evaluated(Gathers, 2, rank=None)]


@pytest.mark.slow
def test_a_rank_evaluates_its_batches_in_parts_alone_but_none_with_collectives():
    for loss, predictions, own_loss, own_predictions, error in run_on_ranks(evaluations, 2):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        np.testing.assert_allclose(own_predictions, predictions, rtol=1e-4, atol=1e-5)
        assert error.endswith(
            "cannot run in parts: other ranks would wait for the collectives of its parts; lower"
            " per_device_eval_batch_size"
        )
