"""AdaptiveCallback trains like Lightning, bit for bit if no batch is split."""

from __future__ import annotations

import math
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.lightning_modules import NUM_ROWS, Module, rows, trained, trainer_in
from support.loops import Scaler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from adaptive_batch import DoesNotFitError, SettingError, StepOptions
from adaptive_batch.errors import AdaptiveBatchError
from adaptive_batch.integrations.lightning import AdaptiveArguments, AdaptiveCallback

# Number of the batch whose gradients overflow.
OVERFLOWS = 2


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulation, clipping", "bf16"],
)
def test_training_without_splits_equals_lightnings_bit_for_bit(tmp_path, arguments):
    plain = Module(dropout=0.1)
    trainer, weights = trained(plain, tmp_path, **arguments)
    ours = Module(dropout=0.1)
    own_trainer, own_weights = trained(ours, tmp_path, [AdaptiveCallback()], **arguments)
    assert ours.losses == plain.losses
    assert torch.equal(own_weights, weights)
    assert own_trainer.logged_metrics == trainer.logged_metrics


class LogsMetrics(Module):
    """Log metrics of torchmetrics in each way, per step and per epoch."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.accuracy = MulticlassAccuracy(4, average="micro")
        # A collection whose metrics share state.
        self.several = MetricCollection(
            [kind(4, average="micro") for kind in (MulticlassAccuracy, MulticlassF1Score)]
        )
        self.extremes = nn.ModuleList([SumMetric(), MaxMetric(), MinMetric()])
        self.updated = MeanMetric()
        self.logged = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        logits = self(inputs)
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.several(logits, targets)
        self.log_dict(self.several, on_step=True)
        for metric in self.extremes:
            metric(inputs[:, 0])
            self.log(type(metric).__name__, metric, on_step=True, on_epoch=True)
        self.updated.update(inputs[:, 1])
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        for function in (torch.mean, "min", max, torch.sum):
            name = getattr(function, "__name__", function)
            value = getattr(inputs[:, 2], name)()
            self.log(name, value, on_step=True, on_epoch=True, reduce_fx=function)
        loss = cross_entropy(logits, targets)
        # Lightning counts both values.
        self.log("twice", loss, on_step=True, on_epoch=True)
        self.log("twice", 2 * loss, on_step=True, on_epoch=True)
        self.log("of rows", loss, on_step=True, on_epoch=True, batch_size=len(inputs))
        if self.training and 0 in targets:
            self.log("seven", 7.0)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        logged = {**self.trainer.logged_metrics, **self.trainer.progress_bar_metrics}
        self.logged.append({name: float(value) for name, value in logged.items()})


@pytest.mark.parametrize(
    ("adaptive", "limit", "num_parts"),
    [
        (AdaptiveArguments(), None, 1),
        (AdaptiveArguments(), 3, 3),
        (AdaptiveArguments(micro_batch_size=3), None, 2),
        (AdaptiveArguments(micro_batch_size="auto", row_length=1), None, 1),
    ],
    ids=["whole", "out of memory", "parts", "auto"],
)
def test_metrics_of_a_split_step_are_those_of_the_batch(tmp_path, adaptive, limit, num_parts):
    plain = LogsMetrics()
    trainer, weights = trained(plain, tmp_path)
    ours = LogsMetrics(limit=limit)
    callback = AdaptiveCallback(adaptive)
    own_trainer, own_weights = trained(ours, tmp_path, [callback])
    assert callback.step.num_micro_batches == num_parts
    assert (own_weights - weights).abs().max() < 1e-5
    assert len(ours.logged) == len(plain.logged) == 8
    for own, logged in zip(ours.logged, plain.logged, strict=True):
        assert own == (logged if num_parts == 1 else pytest.approx(logged, rel=1e-5))
    for name, value in trainer.callback_metrics.items():
        assert own_trainer.callback_metrics[name] == pytest.approx(value.item(), rel=1e-5), name


class Keeps(Module):
    """Stores numbers of each batch, and may return its inputs."""

    def __init__(self, *, returns_inputs=False, **keywords):
        super().__init__(**keywords)
        self.settings = {}
        self.settings["itself"] = self.settings
        self.returns_inputs = returns_inputs
        self.outputs, self.num_rows = [], {"train": torch.zeros(1)}
        self.returned = []

    def training_step(self, batch, batch_idx):
        inputs, _ = batch
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.item())
        self.num_rows["train"] += len(inputs)
        return {"loss": loss, "inputs": inputs} if self.returns_inputs else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append(outputs.keys())


def test_outputs_other_than_the_loss_require_whole_batches(tmp_path):
    message = "training_step='returns inputs': a batch that may be split returns only the loss"
    with pytest.raises(SettingError, match=message):
        trained(Keeps(returns_inputs=True), tmp_path, [AdaptiveCallback()])
    module = Keeps(returns_inputs=True)
    options = StepOptions(on_out_of_memory="raise")
    trained(module, tmp_path, [AdaptiveCallback(AdaptiveArguments(options=options))])
    assert module.returned == [{"loss", "inputs"}] * 8


@pytest.mark.parametrize("limit", [None, 4])
def test_trials_and_failed_attempts_do_not_change_attributes(tmp_path, limit, caplog):
    class KeepsLosses(Keeps):
        pass

    adaptive = AdaptiveArguments(micro_batch_size="auto", row_length=1)
    module = KeepsLosses(limit=limit)
    trained(module, tmp_path, [AdaptiveCallback(adaptive)])
    assert module.num_rows["train"] == 2 * NUM_ROWS
    assert len(module.outputs) == (16 if limit else 8)
    assert ("KeepsLosses.outputs got one number for each micro-batch" in caplog.text) == bool(limit)


class Unpacks:
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch["rows"]


class ModuleUnpacks(Unpacks, Module):
    pass


class DataUnpacks(Unpacks, lightning.LightningDataModule):
    pass


@pytest.mark.parametrize("in_module", [True, False])
def test_hooks_change_the_batch_of_a_trial(tmp_path, in_module):
    module = ModuleUnpacks() if in_module else Module()
    data = lightning.LightningDataModule() if in_module else DataUnpacks()
    data.train_dataloader = lambda: DataLoader(
        rows(), batch_size=8, collate_fn=lambda some: {"rows": default_collate(some)}
    )
    callback = AdaptiveCallback(AdaptiveArguments(micro_batch_size="auto", row_length=1))
    trainer_in(tmp_path, [callback], max_steps=1).fit(module, datamodule=data)
    assert callback.step.max_batch_size == NUM_ROWS


class Sums(Module):
    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = cross_entropy(self.layers(inputs), targets, reduction="sum")
        self.log("mean", inputs.mean(), on_step=True)
        return loss


@pytest.mark.parametrize("accumulates", [1, 2])
def test_a_loss_that_is_declared_a_sum_is_summed_over_micro_batches(tmp_path, accumulates):
    arguments = {"accumulate_grad_batches": accumulates}
    plain = Sums()
    trainer, weights = trained(plain, tmp_path, **arguments)
    ours = Sums()
    callback = AdaptiveCallback(AdaptiveArguments(micro_batch_size=3, loss_reduction="sum"))
    own_trainer, own_weights = trained(ours, tmp_path, [callback], **arguments)
    assert callback.step.num_micro_batches == 2
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert (own_weights - weights).abs().max() < 1e-5
    assert own_trainer.logged_metrics["mean"] == pytest.approx(trainer.logged_metrics["mean"])
    with pytest.raises(SettingError, match=r"'Sums\.training_step'"):
        trained(Sums(), tmp_path, [AdaptiveCallback(AdaptiveArguments(micro_batch_size=3))])


def test_manual_optimization_and_growing_batches_are_refused(tmp_path):
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(SettingError, match="automatic_optimization=False: call an AdaptiveStep"):
        trained(manual, tmp_path, [AdaptiveCallback()])
    with pytest.raises(SettingError, match="adaptive=2: give AdaptiveArguments"):
        AdaptiveCallback(2)
    with pytest.raises(SettingError, match="batch_sampler=AdaptiveBatches"):
        AdaptiveCallback(AdaptiveArguments(batch_increase_function=lambda epoch, size: size))


def test_on_after_backward_runs_once_per_batch_with_all_gradients(tmp_path):
    class Clipping(Module):
        num_calls = 0

        def on_after_backward(self):
            self.num_calls += 1
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    split = Clipping()
    callback = AdaptiveCallback(AdaptiveArguments(micro_batch_size=2))
    _, weights = trained(split, tmp_path, [callback])
    assert callback.step.num_micro_batches == 3
    whole = Clipping()
    _, expected = trained(whole, tmp_path)
    assert split.num_calls == whole.num_calls > 0
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def test_a_release_of_lightning_without_required_names_is_refused(tmp_path, monkeypatch):
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization

    monkeypatch.delattr(_AutomaticOptimization, "_make_backward_fn")
    with pytest.raises(AdaptiveBatchError, match=r"lightning 2\..* has no _make_backward_fn in"):
        trained(Module(), tmp_path, [AdaptiveCallback()])


class Overflows(Module):
    """A module with overflowing gradients in one batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss.requires_grad and batch_idx == OVERFLOWS:
            loss.register_hook(lambda grad: grad * math.inf)
        return loss


def test_a_gradient_scaler_scales_micro_batches_and_keeps_its_sequence_of_scales(tmp_path):
    def scaled(limit, *callbacks):
        module, scaler = Overflows(limit=limit), Scaler(init_scale=2.0**10)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        _, weights = trained(module, tmp_path, callbacks, plugins=[plugin], gradient_clip_val=0.1)
        return module, scaler.scales, weights

    plain, scales, weights = scaled(None)
    assert scales == [2.0**exponent for exponent in (10, 10, 11, 10, 10, 11, 11, 10)]
    callback = AdaptiveCallback(AdaptiveArguments(micro_batch_size="auto", row_length=1))
    whole, own_scales, own_weights = scaled(None, callback)
    assert callback.step.max_batch_size == NUM_ROWS
    assert (whole.losses, own_scales) == (plain.losses, scales)
    assert torch.equal(own_weights, weights)
    callback = AdaptiveCallback()
    _, own_scales, own_weights = scaled(2, callback)
    assert callback.step.sizer.num_out_of_memory
    assert own_scales == scales
    assert (own_weights - weights).abs().max() < 2e-3


class Masks(Metric):
    """Keeps tuples, as torchmetrics' mean average precision of masks does."""

    def __init__(self):
        super().__init__()
        self.add_state("masks", default=[])

    def update(self, targets):
        self.masks += [(target,) for target in targets.tolist()]

    def compute(self):
        return torch.tensor(len(self.masks))

    def _apply(self, *_, **__):
        return self


class Evaluates(LogsMetrics):
    """Logs the same metrics in evaluations, and changes state or outputs by `kind`."""

    kind = "counter"

    def __init__(self, **keywords):
        super().__init__(**keywords)
        self.counts = {"rows": 0}
        self.meter = SimpleNamespace(num_losses=0)
        # torch has no tensor of either.
        self.seed, self.names = 2**70, np.array(["loss"])
        self.sums = {"val": [0.0]}
        self.in_list = [MeanMetric()]
        self.masks = Masks()
        self.num_losses = 2**24

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        self.masks.update(batch[1])
        self.log("masks", self.masks)
        if self.kind == "metric":
            self.updated.update(loss)
        elif self.kind == "list":
            self.logged.append(loss)
        elif self.kind == "counter":
            self.counts["rows"] += len(batch[0])
        elif self.kind == "meter":
            self.meter.num_losses += 1
        elif self.kind == "sum":
            self.sums["val"][0] += loss.item()
        elif self.kind == "metric in a list":
            self.in_list[0].update(loss)
        elif self.kind == "count":
            self.num_losses += 1
        elif self.kind == "buffer":
            self.buffer += len(batch[0])
        elif self.kind == "square":
            self.log("square", loss.square())
        elif self.kind == "names" and batch[1][0] == 0:
            self.log("first class", 1.0)
        return ["row"] if self.kind == "text" else loss

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs.item())


def evaluated(module, folder, run):
    trainer = trainer_in(folder, [AdaptiveCallback()])
    return getattr(trainer, run)(module, DataLoader(rows(), batch_size=8))


def test_a_split_evaluation_has_the_results_of_whole_batches(tmp_path):
    for run in ("validate", "test"):
        plain, ours = Evaluates(), Evaluates(limit=3)
        (expected,) = evaluated(plain, tmp_path, run)
        (found,) = evaluated(ours, tmp_path, run)
        assert found == pytest.approx(expected, rel=1e-5)
        assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
        assert ours.counts == plain.counts
    expected = torch.cat(evaluated(Evaluates(), tmp_path, "predict"))
    torch.testing.assert_close(torch.cat(evaluated(ours, tmp_path, "predict")), expected)


class EvaluatesLoaders(Module):
    """Logs the mean of the rows of the first loader, and their sum in the second."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        inputs, targets = batch
        reduction = ("mean", "sum")[dataloader_idx]
        self.log("loss", cross_entropy(self(inputs), targets, reduction=reduction))


def test_each_loader_of_a_split_evaluation_has_its_own_weighting(tmp_path):
    def validated(limit):
        trainer = trainer_in(tmp_path, [AdaptiveCallback()])
        loaders = [DataLoader(rows(), batch_size=8) for _ in range(2)]
        return trainer.validate(EvaluatesLoaders(limit=limit), loaders)

    for found, expected in zip(validated(3), validated(None), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


OF_ATTRIBUTES = ("metric", "list", "meter", "sum", "metric in a list", "count", "buffer")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *(
            (kind, "it changes an attribute, or counts batches in a metric")
            for kind in OF_ATTRIBUTES
        ),
        ("square", "a loss or logged number is not a mean or a sum over rows or labels"),
        ("names", "it logs or returns other names for other rows"),
        ("text", "it returns list, and only tensors can be joined"),
    ],
)
def test_evaluations_that_a_split_would_change_are_refused(tmp_path, kind, message):
    module = Evaluates(limit=4)
    module.kind = kind
    # Large sums over earlier batches must not hide a difference.
    module.updated.update(torch.zeros(5000))
    module.register_buffer("buffer", torch.zeros(()))
    with pytest.raises(DoesNotFitError, match=f"{message}; lower batch_size of the DataLoader"):
        evaluated(module, tmp_path, "validate")


def test_a_module_without_parameters_is_evaluated(tmp_path):
    class Baseline(lightning.LightningModule):
        def test_step(self, batch, batch_idx):
            self.log("largest", batch[0].max())

    (found,) = evaluated(Baseline(), tmp_path, "test")
    assert found.keys() == {"largest"}


def test_lightnings_error_names_a_logged_value_of_another_type(tmp_path):
    class LogsText(Module):
        def validation_step(self, batch, batch_idx):
            self.log("name", "text")

    with pytest.raises(ValueError, match=r"self\.log\(name, text\)` was called, but `str` values"):
        evaluated(LogsText(), tmp_path, "validate")


def test_a_given_split_also_splits_evaluations(tmp_path):
    trainer = trainer_in(tmp_path, [AdaptiveCallback(AdaptiveArguments(split=lambda batch: None))])
    with pytest.raises(DoesNotFitError, match="split='NoneType'"):
        trainer.validate(Evaluates(limit=3), DataLoader(rows(), batch_size=8))
