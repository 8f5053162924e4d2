"""A run log of AdaptiveTrainer and AdaptiveCallback is audited and drawn as that of a loop is."""

from __future__ import annotations

import json

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import TrainingArguments

from adaptive_batch import StepOptions, geometric
from adaptive_batch.integrations.lightning import AdaptiveCallback
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer
from adaptive_batch.report import RunLog, audit, read_records, write_report

NUM_ROWS = 22


class Model(nn.Module):
    """Keeps which rows it has seen in training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)
        self.seen = []

    def forward(self, x, number):
        if torch.is_grad_enabled():
            self.seen += number.tolist()
        return {"loss": self.linear(x).square().mean()}


def collate(features):
    numbers = torch.tensor([row["number"] for row in features])
    return {"x": torch.stack([row["x"] for row in features]), "number": numbers}


def dataset():
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, generator=generator), "number": number} for number in range(NUM_ROWS)
    ]


def logged(folder, log, resume=None, kind=AdaptiveTrainer, **arguments):
    adaptive = arguments.pop("adaptive", {})
    defaults = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    with RunLog(log) as run_log:
        trainer = kind(
            Model(),
            TrainingArguments(str(folder), **defaults | arguments),
            train_dataset=dataset(),
            data_collator=collate,
            adaptive=AdaptiveArguments(options=StepOptions(event=run_log), **adaptive),
        )
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_of(log):
    records = read_records(log / "adaptive_batch" / "run.jsonl")
    return [record for record in records if record["kind"] == "step"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1},
        {"adaptive": {"batch_increase_function": geometric(2.0)}},
        {"adaptive": {"micro_batch_size": 3}, "train_sampling_strategy": "sequential"},
    ],
    ids=["plain", "accumulation, a worker", "growth", "parts, in order"],
)
def test_rows_are_those_that_were_trained_across_a_restart_in_mid_epoch(tmp_path, arguments):
    log = tmp_path / "log"
    trainer = logged(tmp_path, log, **arguments)
    steps = steps_of(log)
    assert len(steps) == trainer.state.global_step
    assert [row for step in steps for row in step["rows"]] == trainer.model.seen[-3 * NUM_ROWS :]
    proof = audit(log)
    assert proof.holds, proof.lines
    assert "each of 22 rows exactly once in epochs 0 to 2" in proof.lines[-1]
    page, picture = write_report(log)
    assert page.stat().st_size
    assert picture.stat().st_size
    for step in (4, 8):
        checkpoint = tmp_path / f"checkpoint-{step}"
        resumed = logged(tmp_path, log, resume=str(checkpoint), **arguments)
        assert resumed.model.seen[-5:] == trainer.model.seen[-5:]
        proof = audit(log)
        assert proof.holds, proof.lines
    assert any("resumed at step 4, 8" in line for line in proof.lines)
    assert all(step["lr"] > 0 and step["seconds"] > 0 for step in steps)


def test_rows_that_are_dropped_at_the_end_of_an_epoch_are_left_out_as_recorded(tmp_path):
    logged(tmp_path, tmp_path, dataloader_drop_last=True)
    proof = audit(tmp_path)
    assert proof.holds, proof.lines
    assert "20 of 22 rows exactly once in epochs 0 to 2, 2 left out" in proof.lines[-1]


def test_a_run_told_to_stop_within_an_epoch_holds_so_far(tmp_path):
    logged(tmp_path, tmp_path, max_steps=8)
    proof = audit(tmp_path)
    assert proof.holds, proof.lines


def test_an_epoch_whose_rows_are_read_again_on_resuming_is_named(tmp_path):
    logged(tmp_path, tmp_path / "log")
    checkpoint = str(tmp_path / "checkpoint-8")
    logged(tmp_path, tmp_path / "log", resume=checkpoint, ignore_data_skip=True)
    proof = audit(tmp_path / "log")
    assert not proof.holds
    assert any("resumed at step 8, 0 rows into epoch 1" in line for line in proof.problems)


class SkipsAnEpoch(AdaptiveTrainer):
    """Resumes at the end of an epoch with a loader that is at its end: nothing is left to read."""

    def _run_epoch(self, *, epoch, epochs_trained, **keywords):
        if epoch > epochs_trained or not epoch:
            super()._run_epoch(epoch=epoch, epochs_trained=epochs_trained, **keywords)


@pytest.mark.parametrize("epochs", [2, 3])
def test_an_epoch_that_is_skipped_on_resuming_is_named_though_training_ends_well(tmp_path, epochs):
    given = {"num_train_epochs": epochs, "save_steps": 6}
    logged(tmp_path, tmp_path / "log", **given)
    path = tmp_path / "log" / "adaptive_batch" / "run.jsonl"
    lines = path.read_text().splitlines()
    ends = next(n for n, line in enumerate(lines) if json.loads(line)["kind"] == "epoch")
    path.write_text("\n".join(lines[: ends + 1]) + "\n")
    checkpoint = str(tmp_path / "checkpoint-6")
    logged(tmp_path, tmp_path / "log", resume=checkpoint, kind=SkipsAnEpoch, **given)
    proof = audit(tmp_path / "log")
    assert not proof.holds
    assert any("epoch 1" in problem and "not in the log" in problem for problem in proof.problems)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(log, *, saves=None, resumes=None, drop_last=False, loader=None, **arguments):
    module = Module()
    callbacks = []
    if saves is not None:
        callbacks.append(
            lightning.pytorch.callbacks.ModelCheckpoint(
                saves, filename="{step}", every_n_train_steps=2, save_top_k=-1
            )
        )
    with RunLog(log) as run_log:
        adaptive = AdaptiveArguments(micro_batch_size=3, options=StepOptions(event=run_log))
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=saves is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=log,
            callbacks=[AdaptiveCallback(adaptive), *callbacks],
            **arguments,
        )
        if loader is None:
            loader = DataLoader(
                dataset(), batch_size=4, shuffle=True, collate_fn=collate, drop_last=drop_last
            )
        trainer.fit(module, loader, ckpt_path=resumes)
    return trainer, module.model


@pytest.mark.parametrize("accumulates", [1, 2])
def test_rows_that_lightning_trains_are_proved_to_be_used_once(tmp_path, accumulates):
    trainer, model = fitted(tmp_path, accumulate_grad_batches=accumulates)
    steps = steps_of(tmp_path)
    assert len(steps) == trainer.global_step
    # Before, the split was checked.
    assert [row for step in steps for row in step["rows"]] == model.seen[-3 * NUM_ROWS :]
    assert all(step["lr"] == 1e-2 and step["micro_batches"] >= 1 for step in steps)
    proof = audit(tmp_path)
    assert proof.holds, proof.lines
    assert "each of 22 rows exactly once in epochs 0 to 2" in proof.lines[-1]
    page, _ = write_report(tmp_path)
    assert page.stat().st_size


def test_rows_that_lightning_drops_and_steps_it_is_told_to_leave_are_no_gap(tmp_path):
    fitted(tmp_path / "drops", drop_last=True)
    proof = audit(tmp_path / "drops")
    assert proof.holds, proof.lines
    assert "20 of 22 rows exactly once in epochs 0 to 2, 2 left out" in proof.lines[-1]
    fitted(tmp_path / "stops", max_steps=8)
    proof = audit(tmp_path / "stops")
    assert proof.holds, proof.lines


def test_rows_of_a_batch_sampler_of_the_scripts_own_are_proved_to_be_used_once(tmp_path):
    batches = BatchSampler(RandomSampler(range(NUM_ROWS)), 4, drop_last=True)
    fitted(tmp_path, loader=DataLoader(dataset(), batch_sampler=batches, collate_fn=collate))
    proof = audit(tmp_path)
    assert proof.holds, proof.lines
    assert "20 of 22 rows exactly once in epochs 0 to 2, 2 left out" in proof.lines[-1]


def test_rows_that_lightning_reads_twice_as_it_resumes_in_mid_epoch_are_named(tmp_path):
    fitted(tmp_path / "log", saves=tmp_path)
    fitted(tmp_path / "log", resumes=str(tmp_path / "step=8.ckpt"))
    proof = audit(tmp_path / "log")
    assert not proof.holds
    assert any("epoch 1, step" in line and "used twice" in line for line in proof.problems)
