"""AdaptiveTrainer trains like Trainer, bit for bit if no batch is split."""

from __future__ import annotations

import functools
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.loops import Scaler
from support.loops import collate_features as collate
from support.trainers import NUM_ROWS, limited, llama, rows, trained, trainer_of
from torch import nn
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedConfig,
    Trainer,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

from adaptive_batch import AdaptiveBatches, Sampling, SettingError, StepOptions, geometric
from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer, adopt


class MeanOfRows(nn.Module):
    """A model whose loss is a mean over rows and ignores Trainer's number of items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x, y):
        return {"loss": (self.linear(x).squeeze(1) - y).square().mean()}


def assert_trains_alike(run, plain, rel=None):
    """Assert that losses and weights are equal, exactly or within a relative difference."""
    if rel is None:
        assert run.losses == plain.losses
        assert torch.equal(run.weights, plain.weights)
    else:
        assert run.losses == pytest.approx(plain.losses, rel=rel)
        assert (run.weights - plain.weights).abs().max() < 5 * rel


def in_parts(kind):
    """Return a class that combines another trainer with AdaptiveTrainer."""
    return type(f"{kind.__name__}InParts", (kind, AdaptiveTrainer), {})


def fails_above(num_rows):
    return limited(llama(), num_rows, modes=[True])


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2},
        pytest.param({"gradient_checkpointing": True, "bf16": True}, marks=pytest.mark.slow),
        pytest.param({"max_grad_norm": 0.1, "dataloader_num_workers": 1}, marks=pytest.mark.slow),
        {"train_sampling_strategy": "group_by_length"},
    ],
    ids=["accumulation", "checkpointing, bf16", "clipping, a worker", "its own sampler"],
)
def test_training_without_splits_equals_trainers_bit_for_bit(tmp_path, arguments):
    plain = trained(Trainer, tmp_path, llama(dropout=0.1), **arguments)
    assert_trains_alike(trained(AdaptiveTrainer, tmp_path, llama(dropout=0.1), **arguments), plain)


class ScalesLoss(Trainer):
    """A user's trainer."""

    def compute_loss(self, *arguments, **keywords):
        return 2 * super().compute_loss(*arguments, **keywords)


@pytest.mark.parametrize("kind", [Trainer, ScalesLoss])
def test_an_existing_trainer_is_adopted_once(tmp_path, kind):
    def adopted(*arguments, adaptive=None, **keywords):
        trainer = kind(*arguments, **keywords)
        assert adopt(trainer, adaptive) is trainer
        assert adopt(trainer, AdaptiveArguments(micro_batch_size=1)) is trainer
        assert isinstance(trainer, kind)
        assert type(trainer).__name__ == kind.__name__
        assert type(trainer).__module__ == kind.__module__
        return trainer

    plain = trained(kind, tmp_path)
    assert_trains_alike(trained(adopted, tmp_path), plain)
    adaptive = AdaptiveArguments(micro_batch_size=2)
    run = trained(adopted, tmp_path, adaptive=adaptive)
    assert run.trainer.adaptive_step.num_micro_batches == 3
    assert_trains_alike(run, plain, rel=2e-6)
    with pytest.raises(SettingError, match=r"^trainer='Linear': give a transformers.Trainer"):
        adopt(nn.Linear(1, 1))


@pytest.mark.parametrize("keys", [(), ("return_flash_attn_kwargs",), ("return_seq_idx",)])
def test_flattened_rows_are_split_at_row_boundaries(tmp_path, keys):
    data = [{**row, "labels": row["input_ids"]} for row in rows()]
    collator = DataCollatorWithFlattening(**dict.fromkeys(keys, True))
    given = {"data": data, "collator": collator}
    plain = trained(Trainer, tmp_path, **given)
    assert_trains_alike(trained(AdaptiveTrainer, tmp_path, **given), plain)
    for sizes in ({"micro_batch_size": 2}, {"micro_batch_tokens": 16}):
        adaptive = AdaptiveArguments(**sizes)
        run = trained(AdaptiveTrainer, tmp_path, adaptive=adaptive, **given)
        assert run.trainer.adaptive_step.num_micro_batches > 1
        assert_trains_alike(run, plain, rel=5e-6)


class KeepsAnswers(Trainer):
    """Cuts a prepared batch to its longest answer, like ms-swift's trainers."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        first = int((inputs["labels"] != -100).int().argmax(-1).min())
        keep = inputs["labels"].shape[1] - first + 1
        return {**inputs, "labels": inputs["labels"][:, -keep:], "logits_to_keep": keep}

    _prepare_inputs.__module__ = "swift.trainers.seq2seq_trainer"


def answers(features):
    batch = collate(features)
    for row, prompt in enumerate(range(1, len(features) + 1)):
        batch["labels"][row, : prompt % 4 + 1] = -100
    return batch


def test_micro_batches_are_cut_to_their_longest_answer(tmp_path):
    given = {"collator": answers}
    plain = trained(KeepsAnswers, tmp_path, **given)
    assert_trains_alike(trained(in_parts(KeepsAnswers), tmp_path, **given), plain)
    adaptive = AdaptiveArguments(micro_batch_size="auto", device_memory="1GiB")
    for given["adaptive"] in (AdaptiveArguments(micro_batch_size=2), adaptive):
        run = trained(in_parts(KeepsAnswers), tmp_path, **given)
        assert_trains_alike(run, plain, rel=2e-6)
    assert run.trainer.adaptive_step.max_batch_size > 6
    given["adaptive"] = AdaptiveArguments()
    run = trained(in_parts(KeepsAnswers), tmp_path, fails_above(2), **given)
    assert run.trainer.adaptive_step.num_micro_batches == 6
    assert_trains_alike(run, plain, rel=2e-6)


def test_a_batch_without_labels_does_not_change_weights(tmp_path):
    adaptive = AdaptiveArguments(micro_batch_size=2)

    def collate_without_labels(features):
        batch = collate(features)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}

    given = {"collator": collate_without_labels, "adaptive": adaptive}
    before = torch.cat([p.detach().reshape(-1) for p in llama().parameters()])
    _, losses, weights = trained(AdaptiveTrainer, tmp_path, **given)
    assert set(losses) == {0.0}
    assert torch.equal(weights, before)


class MeanOfLabels(MeanOfRows):
    """Accepts the number of labels, like models of Transformers, but ignores it."""

    def forward(self, x, labels, **counts):
        return super().forward(x, labels)


class SumOfRows(MeanOfRows):
    """A model whose loss is a sum over rows."""

    def forward(self, x, y):
        return {"loss": (self.linear(x).squeeze(1) - y).square().sum()}


class SumForCTC(SumOfRows):
    """A model with the name of a CTC model in Transformers and `ctc_loss_reduction="sum"`."""

    config = PreTrainedConfig(ctc_loss_reduction="sum")


def regression_rows(target):
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), target: float(y)} for y in range(NUM_ROWS)]


@pytest.mark.parametrize("accumulates", [1, 2])
@pytest.mark.parametrize(
    ("model", "reduction"),
    [
        (SumOfRows, "sum"),
        (MeanOfRows, "mean"),
        (MeanOfRows, "auto"),
        (MeanOfLabels, "auto"),
        (SumForCTC, "auto"),
    ],
)
def test_loss_reduction_must_match_the_loss(tmp_path, model, reduction, accumulates):
    given = {
        "data": regression_rows("labels" if model is MeanOfLabels else "y"),
        "collator": default_data_collator,
        "per_device_train_batch_size": 5,
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": accumulates,
    }
    plain = trained(Trainer, tmp_path, model(), **given)
    adaptive = AdaptiveArguments(micro_batch_size=2, loss_reduction=reduction)
    run = trained(AdaptiveTrainer, tmp_path, model(), adaptive=adaptive, **given)
    assert run.trainer.adaptive_step.num_micro_batches > 1
    assert_trains_alike(run, plain, rel=2e-6)
    other = {SumOfRows: "auto", SumForCTC: "mean"}.get(model, "sum")
    adaptive = AdaptiveArguments(micro_batch_size=2, loss_reduction=other)
    with pytest.raises(SettingError, match=r"'AdaptiveTrainer\.compute_loss'"):
        trained(AdaptiveTrainer, tmp_path, model(), adaptive=adaptive, **given)


class StepsAlone(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


class Bypassed(StepsAlone, AdaptiveTrainer):
    pass


class Reached(AdaptiveTrainer, StepsAlone):
    pass


@pytest.mark.parametrize(("kind", "warnings"), [(Bypassed, 1), (Reached, 0)])
def test_a_training_step_that_bypasses_ours_causes_one_warning(tmp_path, caplog, kind, warnings):
    trainer, *_ = trained(kind, tmp_path)
    trainer.train()
    assert caplog.text.count("does not call AdaptiveTrainer.training_step") == warnings
    assert ("StepsAlone.training_step does not" in caplog.text) == bool(warnings)
    assert (trainer.adaptive_step is None) == bool(warnings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"headroom": 2}, "headroom=2"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"micro_batch_size": 1, "micro_batch_tokens": 2}, "is set too"),
        ({"device_memory": "much"}, "device_memory='much'"),
        ({"options": 3}, "options=3"),
        ({"loss_reduction": "none"}, "loss_reduction='none': give one of auto, mean, sum"),
        ({"options": StepOptions(max_grad_norm=1.0)}, "max_grad_norm=1.0: only AdaptiveLoop"),
    ],
)
def test_invalid_arguments_are_refused(given, message):
    with pytest.raises(SettingError, match=message):
        AdaptiveArguments(**given)


class LogsInItsLoss(Trainer):
    """Logs, counts and collects numbers of a batch, like TRL's trainers."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._metrics = {"train": defaultdict(list)}
        self.num_tokens = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:]
        labels = labels[labels != -100].double()
        values = {
            "mean_label": labels.mean(),
            "labels/min": labels.min(),
            "max_label": labels.max(),
            "minutes": labels.mean(),
            "lr_scaled": torch.ones((), requires_grad=True),
        }
        self.log({name: value.item() for name, value in values.items()}, 0.0)
        self.log({"norm": values["mean_label"]})
        self.log({"norm": 2 * values["mean_label"], "note": "text"})
        if labels.min() < 4:
            self.log({"few": 4.0})
            self._metrics["train"]["few"].append(4.0)
        for name, value in values.items():
            self._metrics["train"][name].append(value.item())
        self._metrics["train"]["notes"].append("text")
        self._metrics["train"]["last"].extend(labels[-2:].tolist())
        self.num_tokens += len(labels)
        self._metrics["train"]["num_tokens"] = [self.num_tokens]
        num_rows = len(inputs["input_ids"])
        seen = getattr(self.state, "tokens", {"total": torch.zeros(1)})
        self.state.tokens = {"total": seen["total"] + num_rows}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("adaptive", "limit", "num_parts"),
    [
        (AdaptiveArguments(), 6, 1),
        (AdaptiveArguments(), 2, 6),
        (AdaptiveArguments(micro_batch_size=4), 6, 2),
        (AdaptiveArguments(micro_batch_size="auto"), 6, 1),
    ],
    ids=["whole", "out of memory", "parts", "auto"],
)
def test_logs_and_counts_of_a_split_loss_are_those_of_the_batch(
    tmp_path, adaptive, limit, num_parts
):
    given = {"gradient_accumulation_steps": 2, "num_train_epochs": 1}
    plain, _, _ = trained(LogsInItsLoss, tmp_path, **given)
    ours, _, _ = trained(
        in_parts(LogsInItsLoss), tmp_path, fails_above(limit), adaptive=adaptive, **given
    )
    assert ours.adaptive_step.num_micro_batches == num_parts
    assert ours.num_tokens == plain.num_tokens
    assert ours.state.tokens == plain.state.tokens
    history = plain.state.log_history[:-1]
    assert len(ours.state.log_history[:-1]) == len(history)
    for entry, own in zip(history, ours.state.log_history, strict=False):
        assert own.pop("note", "") == entry.pop("note", "")
        own, entry = ({key: float(one[key]) for key in one} for one in (own, entry))
        assert own == (entry if num_parts == 1 else pytest.approx(entry, rel=1e-5))
    metrics = dict(plain._metrics["train"])
    own_metrics = dict(ours._metrics["train"])
    # A micro-batch adds texts to `notes` and several numbers to `last`.
    assert len(metrics.pop("notes")) * num_parts == len(own_metrics.pop("notes"))
    assert set(own_metrics.pop("last")) >= set(metrics.pop("last"))
    assert own_metrics.keys() == metrics.keys()
    for name, values in metrics.items():
        assert own_metrics[name] == pytest.approx(values, rel=1e-12), name


class NotesTheMode(Trainer):
    """Records the model's mode in `_prepare_inputs`, where TRL's GRPOTrainer reads it."""

    def _prepare_inputs(self, inputs):
        self.modes = [*getattr(self, "modes", []), self.model.training]
        return super()._prepare_inputs(inputs)


def test_each_batch_is_prepared_once_and_in_training_mode(tmp_path):
    model, given = limited(llama().eval(), 2, modes=[True]), {"num_train_epochs": 1}
    run = trained(in_parts(NotesTheMode), tmp_path, model, **given)
    assert run.trainer.adaptive_step.num_micro_batches > 1
    assert run.trainer.modes == [True] * 4


class DividesBySteps(Trainer):
    """Divides a sum over tokens by the tokens of the whole batch, like TRL's GRPOTrainer."""

    loss_type = "dapo"
    loss_is_scaled_for_ga = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        logits = model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits[:, :-1]
        labels = inputs["targets"][:, 1:]
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return losses / inputs["num_tokens"]


def test_a_loss_divided_by_the_tokens_of_the_whole_batch_is_not_weighted(tmp_path):
    def counted(features):
        batch = collate(features)
        # Trainer would count the labels of the step under the name `labels`.
        targets = batch.pop("labels")
        return {**batch, "targets": targets, "num_tokens": batch["attention_mask"].sum()}

    given = {"collator": counted, "remove_unused_columns": False}
    plain = trained(DividesBySteps, tmp_path, **given)
    assert_trains_alike(
        trained(in_parts(DividesBySteps), tmp_path, fails_above(2), **given), plain, rel=2e-6
    )


@pytest.mark.parametrize("losses", ["kto", ["sigmoid", "aot"]])
def test_a_loss_of_trl_that_compares_rows_is_refused_before_the_first_step(tmp_path, losses):
    kind = type("Compares", (AdaptiveTrainer,), {"loss_type": losses})
    for adaptive in (
        AdaptiveArguments(),
        AdaptiveArguments(micro_batch_size=8, options=StepOptions(on_out_of_memory="raise")),
    ):
        trainer = trainer_of(kind, tmp_path, adaptive=adaptive)
        name = losses if isinstance(losses, str) else losses[-1]
        message = f'^loss_type={name!r}: .* options=StepOptions.on_out_of_memory="raise"'
        with pytest.raises(SettingError, match=message):
            trainer.train()
        assert trainer.adaptive_step is None
    adaptive = AdaptiveArguments(options=StepOptions(on_out_of_memory="raise"))
    assert trained(kind, tmp_path, adaptive=adaptive).losses == trained(Trainer, tmp_path).losses


class DataCollatorForPreference:
    """A collator with TRL's name and layout: all chosen rows, then all rejected rows."""

    ids = "ids"

    def __call__(self, features):
        answers = [row[f"chosen_{self.ids}"] for row in features]
        answers += [row[f"rejected_{self.ids}"] for row in features]
        prompts = [row.get("prompt_ids", []) for row in features] * 2
        batch = collate([{"input_ids": a + b} for a, b in zip(prompts, answers, strict=True)])
        if self.ids == "ids":
            del batch["labels"]
        return {**batch, "margins": torch.tensor([row["margin"] for row in features])}


class PairwiseDataCollatorWithPadding(DataCollatorForPreference):
    """A collator like LLaMA-Factory's and ms-swift's: answers contain the prompt."""

    ids, mode, padding_free = "input_ids", "rlhf", False


class Prefers(Trainer):
    """Compares each row of the first half with its pair in the second, like TRL's DPOTrainer."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask = inputs["attention_mask"]
        logits = model(inputs["input_ids"], attention_mask=mask).logits
        scores = (logits[..., 1] * mask).sum(dim=1) / mask.sum(dim=1)
        chosen, rejected = scores.chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected - inputs["margins"]).mean()


@pytest.mark.parametrize(
    ("collator", "adaptive", "parts"),
    [
        (DataCollatorForPreference(), AdaptiveArguments(micro_batch_size=2), 3),
        (DataCollatorForPreference(), AdaptiveArguments(micro_batch_tokens=2 * 16), 5),
        (PairwiseDataCollatorWithPadding(), AdaptiveArguments(micro_batch_size="auto"), 1),
        (PairwiseDataCollatorWithPadding(), AdaptiveArguments(micro_batch_size=2), 3),
        (
            functools.partial(PairwiseDataCollatorWithPadding().__call__),
            AdaptiveArguments(micro_batch_size=2),
            3,
        ),
    ],
)
def test_the_pairs_of_a_preference_collator_stay_together(tmp_path, collator, adaptive, parts):
    ids = getattr(collator, "ids", "input_ids")
    data = [
        {
            **({"prompt_ids": row["input_ids"][:2]} if ids == "ids" else {}),
            f"chosen_{ids}": row["input_ids"][2:],
            f"rejected_{ids}": other["input_ids"],
            "margin": number / 10,
        }
        for number, (row, other) in enumerate(zip(rows(), reversed(rows()), strict=True))
    ]
    given = {
        "data": data,
        "collator": collator,
        "remove_unused_columns": False,
        "num_train_epochs": 1,
    }
    plain = trained(Prefers, tmp_path, **given)
    run = trained(in_parts(Prefers), tmp_path, adaptive=adaptive, **given)
    assert run.trainer.adaptive_step.num_micro_batches == parts
    assert_trains_alike(run, plain, rel=2e-6)


def test_a_given_split_replaces_the_split_by_pairs(tmp_path):
    adaptive = AdaptiveArguments(split=lambda batch: None, loss_reduction="mean")
    given = {"adaptive": adaptive, "collator": DataCollatorForPreference()}
    assert trainer_of(AdaptiveTrainer, tmp_path, **given)._arguments is adaptive


class Makes(NotesTheMode, AdaptiveTrainer):
    adaptive = AdaptiveArguments(micro_batch_size="auto")


def test_trainers_and_datasets_without_a_search_are_refused_with_the_key(tmp_path):
    with pytest.raises(SettingError, match="micro_batch_size='auto': this trainer generates"):
        trained(Makes, tmp_path)
    with pytest.raises(SettingError, match=r"adaptive=2: give AdaptiveArguments"):
        trained(AdaptiveTrainer, tmp_path, adaptive=2)
    with pytest.raises(SettingError, match=r"Wrong\.adaptve=.*: .*; name it adaptive"):
        type("Wrong", (AdaptiveTrainer,), {"adaptve": AdaptiveArguments()})

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows())

    adaptive = AdaptiveArguments(micro_batch_tokens="auto")
    with pytest.raises(SettingError, match="the search needs one map-style training dataset"):
        trained(AdaptiveTrainer, tmp_path, data=Stream(), max_steps=2, adaptive=adaptive)


def scaled(kind, folder, model, **arguments):
    """Train with a gradient scaler, as Trainer does on a GPU; return the run and its scales."""
    # It overflows in the first steps.
    scaler = Scaler(init_scale=2.0**66)

    class Scales(kind):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.accelerator.scaler = scaler

    return trained(Scales, folder, model, max_grad_norm=0.0, **arguments), scaler.scales


@pytest.mark.parametrize("accumulates", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gradient_scaler_scales_micro_batches_and_keeps_its_sequence_of_scales(
    tmp_path, accumulates
):
    given = {"gradient_accumulation_steps": accumulates, "num_train_epochs": 4}
    plain, scales = scaled(Trainer, tmp_path, llama(), **given)
    # The scale shrinks after overflows and grows again.
    assert min(scales) < scales[0]
    assert any(later > earlier for earlier, later in pairwise(scales))
    adaptive = AdaptiveArguments(micro_batch_size="auto")
    run, own_scales = scaled(AdaptiveTrainer, tmp_path, llama(), adaptive=adaptive, **given)
    assert run.trainer.adaptive_step.max_batch_size == NUM_ROWS
    assert own_scales == scales
    assert_trains_alike(run, plain)
    run, own_scales = scaled(AdaptiveTrainer, tmp_path, fails_above(2), **given)
    assert run.trainer.adaptive_step.num_micro_batches == 6
    assert own_scales == scales
    assert_trains_alike(run, plain, rel=2e-6)


GROWS = {"batch_increase_function": geometric(2.0), "lr_scaling": "sqrt"}


def grown(folder, **arguments):
    given = {"num_train_epochs": 3, "per_device_train_batch_size": 3}
    adaptive = AdaptiveArguments(**GROWS)
    return trained(AdaptiveTrainer, folder, adaptive=adaptive, **given | arguments)


def test_a_growing_batch_trains_like_a_loop_with_adaptive_batches(tmp_path):
    trainer, losses, weights = grown(tmp_path, max_grad_norm=0.0, weight_decay=0.1)
    model = llama()
    optimizer = Trainer(
        model, trainer.args, train_dataset=rows(), data_collator=collate
    ).create_optimizer()
    batches = AdaptiveBatches(
        rows(), 3, batch_increase_function=geometric(2.0), sampling=Sampling(seed=trainer.args.seed)
    )
    num_steps = batches.num_steps(3)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, num_steps)
    own = []
    rates = []
    for _ in range(3):
        for numbers in batches:
            rate = 1e-2 * (1 - len(own) / num_steps) * (len(numbers) / 3) ** 0.5
            rates.append(rate)
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = rate
            loss = model(**collate([rows()[number] for number in numbers])).loss
            loss.backward()
            own.append(loss.item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            batches.step()
    assert len(own) == num_steps == trainer.state.global_step == trainer.state.max_steps
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(own, rel=1e-6)
    assert [entry["learning_rate"] for entry in logged] == pytest.approx(rates)
    plain = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert (weights - plain).abs().max() < 1e-5
    assert trainer.state.epoch == 3
    assert [entry["epoch"] for entry in logged][:2] == pytest.approx([3 / NUM_ROWS, 6 / NUM_ROWS])


class Reversed(AdaptiveTrainer):
    def _get_train_sampler(self, dataset=None):
        return list(reversed(range(NUM_ROWS)))


class Loads(AdaptiveTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(rows(), 6, collate_fn=collate)


class SamplesAsTrainersDo(Trainer):
    def _get_train_sampler(self, dataset=None):
        return super()._get_train_sampler(dataset)


class FromOneOfOthers(SamplesAsTrainersDo, AdaptiveTrainer):
    pass


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Reversed, "Reversed._get_train_sampler"),
        (Loads, "Loads.get_train_dataloader"),
        (FromOneOfOthers, "SamplesAsTrainersDo._get_train_sampler"),
    ],
)
def test_a_trainer_with_its_own_order_refuses_a_growing_batch(tmp_path, kind, name):
    refusal = f"^batch_increase_function='{name}': growing batches draw their own order"
    with pytest.raises(SettingError, match=refusal):
        trained(kind, tmp_path, adaptive=AdaptiveArguments(**GROWS))
    trainer = trainer_of(AdaptiveTrainer, tmp_path, adaptive=AdaptiveArguments(**GROWS))
    trainer._get_train_sampler = lambda dataset=None: None
    with pytest.raises(SettingError, match=r"'the trainer\._get_train_sampler'"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("arguments", [{"max_steps": 10}, {"num_train_epochs": 1.5}])
def test_a_run_with_a_growing_batch_ends_at_max_steps_or_num_train_epochs(tmp_path, arguments):
    trainer, losses, _ = grown(tmp_path, **arguments)
    # Eight steps of epoch 0, and two of the four steps of epoch 1.
    assert len(losses) == trainer.state.global_step == trainer.state.max_steps == 10
    assert trainer.state.epoch == 1.5


def test_arguments_that_conflict_with_a_growing_batch_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"lr_scaling='sqrt': batches do not grow"):
        AdaptiveArguments(lr_scaling="sqrt")
    with pytest.raises(SettingError, match=r"batch_increase_function=2: give a function"):
        trained(AdaptiveTrainer, tmp_path, adaptive=AdaptiveArguments(batch_increase_function=2))
    for key, value in {
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "dataloader_drop_last": True,
    }.items():
        with pytest.raises(SettingError, match=f"^{key}={value!r}: with batch_increase_function"):
            grown(tmp_path, **{key: value})
    given = {"save_strategy": "steps", "save_steps": 3}
    trained(AdaptiveTrainer, tmp_path / "constant", max_steps=3, **given)
    checkpoint = str(tmp_path / "constant" / "checkpoint-3")
    with pytest.raises(SettingError, match="it was saved without batch_increase_function"):
        grown(tmp_path, resume=checkpoint)
    grown(tmp_path / "grown", max_steps=3, **given)
    checkpoint = str(tmp_path / "grown" / "checkpoint-3")
    with pytest.raises(SettingError, match="its batch grew; give AdaptiveArguments the same"):
        trained(AdaptiveTrainer, tmp_path, resume=checkpoint)
    adaptive = AdaptiveArguments(**GROWS | {"lr_scaling": "linear"})
    with pytest.raises(SettingError, match=r"^lr_scaling='linear': .* built with sqrt; resume"):
        trained(AdaptiveTrainer, tmp_path, resume=checkpoint, adaptive=adaptive)
    state = Path(checkpoint, "trainer_state.json")
    state.write_text(state.read_text().replace("lr_scaling", "of_another_version"))
    with pytest.raises(SettingError, match=r"^lr_scaling='sqrt': the saved trainer has no lr_scal"):
        grown(tmp_path, resume=checkpoint)


def llama_whose_rows_differ():
    """Return a model whose rows have different losses."""
    model = llama(dropout=0.1)
    nn.init.normal_(model.lm_head.weight, std=0.5)
    return model


@pytest.mark.parametrize("limit", [3, 1])
def test_predictions_of_a_split_batch_are_those_of_the_batch(tmp_path, caplog, limit):
    plain = trainer_of(Trainer, tmp_path, llama_whose_rows_differ()).predict(rows())
    trainer = trainer_of(AdaptiveTrainer, tmp_path, limited(llama_whose_rows_differ(), limit))
    ours = trainer.predict(rows())
    assert ours.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-6)
    np.testing.assert_array_equal(ours.label_ids, plain.label_ids)
    np.testing.assert_allclose(ours.predictions, plain.predictions, rtol=1e-4, atol=1e-5)
    first, *_ = [text for text in caplog.messages if "out of memory" in text]
    assert first.startswith("evaluation: out of memory with 8 rows of 16 tokens at once")
    assert ("no two rows fit at once" in caplog.text) == (limit == 1)


def test_a_batch_that_fits_is_evaluated_once_with_trainers_results(tmp_path):
    plain = trainer_of(Trainer, tmp_path, limited(llama_whose_rows_differ(), None))
    ours = trainer_of(AdaptiveTrainer, tmp_path, limited(llama_whose_rows_differ(), None))
    expected, results = plain.predict(rows()), ours.predict(rows())
    assert results.metrics["test_loss"] == expected.metrics["test_loss"]
    assert np.array_equal(results.predictions, expected.predictions)
    assert ours.model.num_evaluations == plain.model.num_evaluations == 3


def test_evaluation_has_its_own_limit_and_does_not_change_training(tmp_path):
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1, "max_steps": 4}
    plain = trained(Trainer, tmp_path, llama_whose_rows_differ(), **arguments)
    model = limited(llama_whose_rows_differ(), 3)
    run = trained(AdaptiveTrainer, tmp_path, model, **arguments)
    assert_trains_alike(run, plain)
    eval_losses, own_eval_losses = (
        [entry["eval_loss"] for entry in one.trainer.state.log_history if "eval_loss" in entry]
        for one in (plain, run)
    )
    assert len(eval_losses) == 4
    assert own_eval_losses == pytest.approx(eval_losses, rel=1e-6)
    trainer = run.trainer
    assert trainer.adaptive_step.sizer.num_out_of_memory == 0
    # The limit falls from 8 rows to 4 and 2, and a later batch tries the former limit again.
    assert 2 < trainer._evaluation.sizer.num_out_of_memory < 6


def linear_rows():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_ROWS, 4, generator=generator)
    return [
        {"x": x, "labels": torch.tensor([-100] * (number % 3) + [1] * (3 - number % 3))}
        for number, x in enumerate(inputs)
    ]


class Linear(nn.Module):
    """A model with a choice of loss reduction and an optional extra output."""

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
def test_the_loss_of_a_split_evaluation_is_that_of_the_batch(tmp_path, reduction):
    arguments = {"data": linear_rows(), "collator": default_data_collator}
    plain = trainer_of(Trainer, tmp_path, Linear(reduction), **arguments).evaluate()
    trainer = trainer_of(AdaptiveTrainer, tmp_path, limited(Linear(reduction), 4), **arguments)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (Linear("pairs of rows"), "not a mean or a sum over rows or labels"),
        (Linear(extra=lambda logits: logits.mean()), "an output has no entry per row"),
        (Linear(extra=lambda logits: logits.mean(0)), "an output has no entry per row"),
        (Linear(extra=lambda logits: logits @ logits.T), r"\(4, 4\) depend on other rows"),
        (Linear(extra=lambda logits: logits - logits.mean(0)), "depend on other rows"),
    ],
    ids=["loss", "a number", "a mean", "similarities", "centred"],
)
def test_results_that_a_split_would_change_are_refused_with_the_fix(tmp_path, model, problem):
    arguments = {"data": linear_rows(), "collator": default_data_collator}
    trainer = trainer_of(AdaptiveTrainer, tmp_path, limited(model, 4), **arguments)
    with pytest.raises(DoesNotFitError, match=f"{problem}.*lower per_device_eval_batch_size"):
        trainer.predict(linear_rows())


def test_a_row_that_does_not_fit_or_on_out_of_memory_raise_ends_the_evaluation(tmp_path):
    trainer = trainer_of(AdaptiveTrainer, tmp_path, limited(llama_whose_rows_differ(), -1))
    with pytest.raises(DoesNotFitError, match="one row of 16 tokens ran out of memory"):
        trainer.evaluate()
    trainer.adaptive = AdaptiveArguments(options=StepOptions(on_out_of_memory="raise"))
    with pytest.raises(RuntimeError, match="allocate") as caught:
        trainer.evaluate()
    assert not isinstance(caught.value, DoesNotFitError)


def test_a_random_loss_is_split_with_a_warning(tmp_path, caplog):
    arguments = {"data": linear_rows(), "collator": default_data_collator}
    plain = trainer_of(Trainer, tmp_path, Linear("noise"), **arguments).evaluate()
    trainer = trainer_of(AdaptiveTrainer, tmp_path, limited(Linear("noise"), 4), **arguments)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain["eval_loss"], rel=0.2)
    assert caplog.text.count("as it draws random numbers") == 1
