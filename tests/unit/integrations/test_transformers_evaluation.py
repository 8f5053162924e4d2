"""AdaptiveTrainer evaluates what Trainer evaluates, in parts where a batch runs out of memory."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from support.padded_rows import collate
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from adaptive_batch import StepOptions
from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer

NUM_ROWS = 20
# More than any machine has: allocating it is an out-of-memory error.
TOO_MUCH = 2**50


def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 17, (NUM_ROWS,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(3, 64, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def llama():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            attention_dropout=0.1,
        )
    )
    # Rows whose losses differ.
    nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


def limited(model, num_rows):
    """Return a model that runs out of memory in evaluation for more rows than so many."""
    forward = model.forward
    model.num_forwards = 0

    @functools.wraps(forward)
    def limited_forward(*arguments, **keywords):
        model.num_forwards += not model.training
        batch_size = len(next(value for value in keywords.values() if torch.is_tensor(value)))
        if num_rows and not model.training and batch_size > num_rows:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return forward(*arguments, **keywords)

    model.forward = limited_forward
    return model


def trainer_of(kind, model, folder, data=None, collator=collate, **arguments):
    keywords = {name: arguments.pop(name) for name in ("adaptive",) if name in arguments}
    kind_of_arguments = Seq2SeqTrainingArguments if issubclass(kind, Seq2SeqTrainer) else None
    defaults = {
        "per_device_eval_batch_size": 8,
        "per_device_train_batch_size": 6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(
        model,
        (kind_of_arguments or TrainingArguments)(str(folder), **defaults | arguments),
        train_dataset=data or rows(),
        eval_dataset=data or rows(),
        data_collator=collator,
        **keywords,
    )


def assert_same(ours, plain):
    """Assert that predictions, labels and the loss are equal to rounding, in the same order."""
    assert ours.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-6)
    np.testing.assert_array_equal(ours.label_ids, plain.label_ids)
    np.testing.assert_allclose(ours.predictions, plain.predictions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("limit", [3, 1])
def test_predictions_of_parts_are_those_of_the_batch(tmp_path, caplog, limit):
    plain = trainer_of(Trainer, llama(), tmp_path).predict(rows())
    trainer = trainer_of(AdaptiveTrainer, limited(llama(), limit), tmp_path)
    assert_same(trainer.predict(rows()), plain)
    first, *_ = [text for text in caplog.messages if "out of memory" in text]
    assert first.startswith("evaluation: out of memory with 8 rows of 16 tokens at once")
    assert ("no two rows fit at once" in caplog.text) == (limit == 1)


def test_a_batch_that_fits_is_evaluated_as_by_trainer(tmp_path):
    plain = trainer_of(Trainer, limited(llama(), None), tmp_path)
    ours = trainer_of(AdaptiveTrainer, limited(llama(), None), tmp_path)
    expected, results = plain.predict(rows()), ours.predict(rows())
    assert results.metrics["test_loss"] == expected.metrics["test_loss"]
    assert np.array_equal(results.predictions, expected.predictions)
    assert ours.model.num_forwards == plain.model.num_forwards == 3


def test_evaluation_during_training_has_a_limit_of_its_own_and_leaves_training_as_it_was(tmp_path):
    runs = []
    for kind, limit in ((Trainer, None), (AdaptiveTrainer, 3)):
        model = limited(llama(), limit)
        arguments = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1, "max_steps": 4}
        trainer = trainer_of(kind, model, tmp_path, **arguments)
        trainer.train()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        logged = trainer.state.log_history
        losses = [entry["loss"] for entry in logged if "loss" in entry]
        eval_losses = [entry["eval_loss"] for entry in logged if "eval_loss" in entry]
        runs.append((losses, weights, eval_losses, trainer))
    (losses, weights, eval_losses, _), (own_losses, own_weights, own_eval_losses, trainer) = runs
    assert own_losses == losses
    assert torch.equal(own_weights, weights)
    assert own_eval_losses == pytest.approx(eval_losses, rel=1e-6)
    assert trainer.adaptive_step.sizer.num_out_of_memory == 0
    # From 8 rows to 4 and 2; of 12 batches the former limit is tried again in a later one.
    assert 2 < trainer._evaluation.sizer.num_out_of_memory < 6


def linear_rows():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_ROWS, 4, generator=generator)
    return [
        {"x": x, "labels": torch.tensor([-100] * (number % 3) + [1] * (3 - number % 3))}
        for number, x in enumerate(inputs)
    ]


class Linear(nn.Module):
    """A model whose loss is reduced in some way, and that returns something beside its logits."""

    def __init__(self, reduction="labels", extra=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.reduction = reduction
        self.extra = extra

    def forward(self, x, labels):
        logits = self.linear(x)
        is_label = labels != -100
        errors = (logits - labels).square() * is_label
        loss = {
            "labels": lambda: errors.sum() / is_label.sum(),
            "later labels": lambda: errors[:, 1:].sum() / is_label[:, 1:].sum(),
            "rows": lambda: (errors.sum(1) / is_label.sum(1)).mean(),
            "sum": lambda: errors.sum(),
            "noise": lambda: (errors + 0.1 * torch.rand_like(errors)).mean(),
            "pairs of rows": lambda: torch.cdist(logits, logits).mean(),
        }[self.reduction]()
        outputs = {"loss": loss, "logits": {"of": (logits, x.sum(1))}}
        if self.extra is not None:
            outputs["extra"] = self.extra(logits)
        return outputs


@pytest.mark.parametrize("reduction", ["labels", "later labels", "rows", "sum"])
def test_the_loss_of_parts_is_weighted_as_the_batch_shows(tmp_path, reduction):
    arguments = {"data": linear_rows(), "collator": default_data_collator}
    plain = trainer_of(Trainer, Linear(reduction), tmp_path, **arguments).evaluate()
    trainer = trainer_of(AdaptiveTrainer, limited(Linear(reduction), 4), tmp_path, **arguments)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


def test_nested_outputs_are_joined(tmp_path):
    arguments = {"data": linear_rows(), "collator": default_data_collator}
    plain = trainer_of(Trainer, Linear(), tmp_path, **arguments).predict(linear_rows())
    trainer = trainer_of(AdaptiveTrainer, limited(Linear(), 3), tmp_path, **arguments)
    results = trainer.predict(linear_rows())
    for ours, whole in zip(results.predictions["of"], plain.predictions["of"], strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Linear("pairs of rows"), "the loss is not a mean or a sum over rows or labels"),
        (Linear(extra=lambda logits: logits.mean()), "an output has no entry per row"),
        (Linear(extra=lambda logits: logits.mean(0)), "an output has no entry per row"),
        (Linear(extra=lambda logits: logits @ logits.T), r"\(4, 4\) depend on other rows"),
        (Linear(extra=lambda logits: logits - logits.mean(0)), "depend on other rows"),
    ],
    ids=["loss", "a number", "a mean", "similarities", "centred"],
)
def test_results_that_parts_do_not_have_are_refused_with_the_fix(tmp_path, model, problem):
    arguments = {"data": linear_rows(), "collator": default_data_collator}
    trainer = trainer_of(AdaptiveTrainer, limited(model, 4), tmp_path, **arguments)
    with pytest.raises(DoesNotFitError, match=f"{problem}.*lower per_device_eval_batch_size"):
        trainer.predict(linear_rows())


def test_a_row_that_does_not_fit_and_an_error_that_is_let_through_end_the_evaluation(tmp_path):
    trainer = trainer_of(AdaptiveTrainer, limited(llama(), -1), tmp_path)
    with pytest.raises(DoesNotFitError, match="one row of 16 tokens ran out of memory"):
        trainer.evaluate()
    trainer.adaptive = AdaptiveArguments(options=StepOptions(on_out_of_memory="raise"))
    with pytest.raises(RuntimeError, match="allocate") as caught:
        trainer.evaluate()
    assert not isinstance(caught.value, DoesNotFitError)


class Counts(Trainer):
    """Counts a metric in its loss as TRL's trainers do, and trims what it predicts."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._metrics = {"eval": {"mean_token": []}}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        lengths = inputs["attention_mask"].sum(1)
        is_label = inputs["labels"][:, 1:] != -100
        mean = inputs["input_ids"][:, 1:][is_label].float().mean()
        self._metrics["eval"]["mean_token"].append(mean.item())
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.log({"longest_max": lengths.max().item()})
        return result

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        width = int(inputs["attention_mask"].sum(1).max())
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        return loss, logits.argmax(-1)[:, :width], labels[:, :width]


class CountsInParts(Counts, AdaptiveTrainer):
    pass


def test_what_an_evaluation_counts_and_logs_is_that_of_the_batch(tmp_path):
    plain = trainer_of(Counts, llama(), tmp_path)
    ours = trainer_of(CountsInParts, limited(llama(), 3), tmp_path)
    expected = plain.predict(rows())
    results = ours.predict(rows())
    for own, whole in (
        (results.predictions, expected.predictions),
        (results.label_ids, expected.label_ids),
    ):
        # Columns that a part has not are padded, as those of batches.
        is_there = own != -100
        np.testing.assert_array_equal(own[is_there], whole[is_there])
    for row, own in zip(rows(), results.predictions, strict=True):
        assert (own[: len(row["input_ids"])] != -100).all()
    # A mean over the labels of the loss is weighted by them.
    means = plain._metrics["eval"]["mean_token"]
    assert ours._metrics["eval"]["mean_token"] == pytest.approx(means, rel=1e-6)
    logs = [
        [entry["longest_max"] for entry in trainer.state.log_history if "longest_max" in entry]
        for trainer in (plain, ours)
    ]
    assert logs[1] == logs[0]


class CountsBatches(AdaptiveTrainer):
    """Counts the batches that may run in parts."""

    num_batches = 0

    def _predict_parts(self, *arguments, **keywords):
        self.num_batches += 1
        return super()._predict_parts(*arguments, **keywords)


def test_metrics_may_predict_within_an_evaluation(tmp_path):
    trainer = trainer_of(CountsBatches, limited(llama(), 3), tmp_path)
    plain = trainer_of(Trainer, llama(), tmp_path).predict(rows())

    def compute_metrics(_):
        trainer.compute_metrics = None
        assert_same(trainer.predict(rows()), plain)
        return {"has_predicted": 1}

    trainer.compute_metrics = compute_metrics
    assert trainer.evaluate()["eval_has_predicted"] == 1
    assert trainer.num_batches == 6


class MakesRows(Trainer):
    """Makes its rows in each step, from random numbers, as trainers that generate."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        noise = torch.randn(len(inputs["x"]), 1)
        # Of the whole batch.
        return inputs | {"x": inputs["x"] + noise - noise.mean()}


class MakesRowsInParts(MakesRows, AdaptiveTrainer):
    pass


def test_rows_that_a_trainer_makes_are_those_of_the_batch(tmp_path):
    losses = []
    for kind, limit in ((MakesRows, None), (MakesRowsInParts, 3)):
        arguments = {"data": linear_rows(), "collator": default_data_collator}
        trainer = trainer_of(kind, limited(Linear(), limit), tmp_path, **arguments)
        torch.manual_seed(5)
        losses.append(trainer.evaluate()["eval_loss"])
        losses.append(torch.rand(()).item())
    plain, plain_next, ours, own_next = losses
    assert ours == pytest.approx(plain, rel=1e-6)
    assert own_next == plain_next


def test_a_loss_that_draws_random_numbers_runs_in_parts_with_a_warning(tmp_path, caplog):
    arguments = {"data": linear_rows(), "collator": default_data_collator}
    plain = trainer_of(Trainer, Linear("noise"), tmp_path, **arguments).evaluate()
    trainer = trainer_of(AdaptiveTrainer, limited(Linear("noise"), 4), tmp_path, **arguments)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=0.2)
    assert caplog.text.count("as it draws random numbers") == 1


class GeneratesInParts(Seq2SeqTrainer, AdaptiveTrainer):
    pass


def test_generation_runs_in_parts(tmp_path):
    torch.manual_seed(0)
    shape = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    config = BartConfig(
        vocab_size=64,
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        init_std=1.0,
        **shape,
    )
    weights = BartForConditionalGeneration(config).state_dict()
    results = []
    for kind, limit in ((Seq2SeqTrainer, None), (GeneratesInParts, 3)):
        model = BartForConditionalGeneration(config)
        model.load_state_dict(weights)
        model.generation_config.max_length = 20
        model = limited(model, limit)
        trainer = trainer_of(kind, model, tmp_path, predict_with_generate=True)
        results.append(trainer.predict(rows()))
    assert_same(results[1], results[0])
    assert results[0].predictions.shape == (NUM_ROWS, 20)
    assert len(np.unique(results[0].predictions)) > 5
