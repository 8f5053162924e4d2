"""AdaptiveTrainer under DDP trains the same as Trainer, and both ranks retry together."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_on_ranks
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from adaptive_batch import DoesNotFitError, distributed
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer


def collate(features: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in features])
    return {"input_ids": ids, "labels": ids}


def limited(limit: int | None, ranks: tuple[int, ...] = (1,)) -> LlamaForCausalLM:
    """Return a model that runs out of memory above a number of rows on some ranks."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, **heads))
    forward = model.forward

    @functools.wraps(forward)
    def limited_forward(*given: Any, **named: Any) -> Any:
        if limit and distributed.rank() in ranks and len(named["input_ids"]) > limit:
            torch.empty(2**50, dtype=torch.uint8)
        return forward(*given, **named)

    model.forward = limited_forward
    return model


def trained(kind: type[Trainer], limit: int | None, **arguments: Any) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 64, (32, 8), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            limited(limit),
            TrainingArguments(
                folder,
                per_device_train_batch_size=4,
                num_train_epochs=2,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                **arguments,
            ),
            train_dataset=[{"input_ids": row} for row in rows],
            data_collator=collate,
        )
        if isinstance(trainer, AdaptiveTrainer) and limit is None:
            trainer.adaptive = AdaptiveArguments(micro_batch_size="auto")
        trainer.train()
    if isinstance(trainer, AdaptiveTrainer):
        assert trainer.adaptive_step.num_micro_batches == (2 if limit else 1)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
    return losses, weights


def differences(accumulates: int) -> list[float]:
    """Return the largest differences from Trainer's losses and weights, unsplit and split."""
    arguments = {"gradient_accumulation_steps": accumulates}
    losses, weights = trained(Trainer, None, **arguments)
    found = []
    for limit in (None, 2):
        own_losses, own_weights = trained(AdaptiveTrainer, limit, **arguments)
        assert len(own_losses) == len(losses)
        found += [max(abs(a - b) / a for a, b in zip(losses, own_losses, strict=True))]
        found += [(weights - own_weights).abs().max().item()]
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


def evaluated(kind: type[Trainer], limit: int | None, ranks: tuple[int, ...] = (1,)) -> Any:
    """Return metrics and predictions with OOMs on some ranks, or the error's text."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, 64, (30, 8), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"per_device_eval_batch_size": 4, "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(folder, report_to="none", **arguments)
        trainer = kind(limited(limit, ranks), arguments, data_collator=collate)
        try:
            output = trainer.predict([{"input_ids": row} for row in rows])
        except DoesNotFitError as error:
            return str(error)
    return output.metrics["test_loss"], output.predictions


def evaluations() -> list[Any]:
    whole, parts = evaluated(Trainer, None), evaluated(AdaptiveTrainer, 2)
    return [*whole, *parts, evaluated(Gathers, 2, (0, 1))]


@pytest.mark.slow
def test_a_rank_evaluates_its_batches_in_parts_alone_but_none_with_collectives():
    for loss, predictions, own_loss, own_predictions, error in run_on_ranks(evaluations, 2):
        assert own_loss == pytest.approx(loss, rel=1e-6)
        np.testing.assert_allclose(own_predictions, predictions, rtol=1e-4, atol=1e-5)
        assert error.endswith(
            "cannot run in parts: other ranks would wait for the collectives of its parts; lower"
            " per_device_eval_batch_size"
        )
