"""However the rows of a step are split, what a student learns from its teacher is that of all of
them.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from omegaconf import DictConfig
from support.exact_tasks import (
    EXACT,
    KINDS,
    LORA,
    RATIO,
    config_of_distillation,
    distilling,
    of_all_tokens_at_once,
    rows_of,
)
from support.wired_jobs import check_bounds, check_that_halves_are_run, largest_difference
from torch import nn

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import (
    Distillation,
    Job,
    Settings,
    builder_of,
)
from adaptive_batch.torchtune.changes import candidates
from adaptive_batch.torchtune.checks import TO_PLAN

CHUNKED = {
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
}


def check(cfg: DictConfig) -> Job:
    """All that is checked of what a configuration trains."""
    settings = Settings.from_config(cfg)
    job = Job(cfg, settings, builder_of(cfg), task=Distillation, needs=TO_PLAN)
    job.check_model()
    return job


@pytest.mark.parametrize("layout", ["padded", "grouped", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_has_the_gradient_loss_and_metrics_of_all_rows(kind, layout):
    rows = rows_of(11)
    wired = distilling(kind, rows, layout=layout, limit=MicroBatchLimit(len(rows)))
    class_loss, kd_loss, expected = of_all_tokens_at_once(wired, rows)
    drawn = random.Random(0)
    limits = [MicroBatchLimit(len(rows))]
    limits += [MicroBatchLimit(drawn.randrange(1, len(rows))) for _ in range(5)]
    limits += [MicroBatchLimit(drawn.randrange(40, 200), "tokens") for _ in range(5)]
    for limit in limits:
        wired.trainer.engine.sizer.current = limit
        result = wired.run(drawn.sample(rows, len(rows)))
        assert (result.micro_batches > 1) == (limit != limits[0])
        assert layout != "packed" or result.padding_fraction == 0
        assert largest_difference(expected, wired.gradients()) < EXACT
        # Means are divided in float32, as torchtune's are.
        means = {"class_loss": float(class_loss), "kd_loss": float(kd_loss)}
        assert result.metrics == pytest.approx(means, rel=1e-6)
        loss = (1 - RATIO) * means["class_loss"] + RATIO * means["kd_loss"]
        assert result.loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_runs_out_of_memory_is_that_of_smaller_micro_batches(kind):
    rows = rows_of(8)
    # In the student, in the teacher, in either loss and in backward.
    check_that_halves_are_run(partial(distilling, kind, rows), rows)


def test_the_teacher_gets_no_gradient_and_drops_nothing():
    rows = rows_of(4)
    wired = distilling("full", rows, limit=MicroBatchLimit(2))
    student, teacher = wired.trainer.models
    wired.run(rows)
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert student.training
    assert not teacher.training


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_that_of_brute_force(kind):
    row = max(rows_of(9), key=lambda row: len(row["tokens"]))
    wired = distilling(kind, [row], limit=MicroBatchLimit(1))
    check_bounds(wired, row, (1, 5))


# --- what is taken and what is refused


def test_the_ratio_is_torchtunes_where_none_is_given():
    cfg = config_of_distillation("LoRA", kd_ratio=None)
    assert Distillation(cfg, nn.CrossEntropyLoss()).kd_ratio == 0.5
    del cfg.kd_ratio
    assert Distillation(cfg, nn.CrossEntropyLoss()).kd_ratio == 0.5


@pytest.mark.parametrize(
    ("kind", "key", "keys"),
    [
        ("LoRA", "teacher_model", {"teacher_model": None}),
        ("full", "teacher_checkpointer", {"teacher_checkpointer": None}),
        ("LoRA", "kd_loss", {"kd_loss": None}),
        ("LoRA", "kd_loss", {"kd_loss": "mine.loss"}),
        *(("LoRA", "kd_ratio", {"kd_ratio": ratio}) for ratio in (1.5, "half", True)),
        ("LoRA", "kd_rate", {"kd_rate": 0.5}),
        ("LoRA", "kd_loss", {"loss": CHUNKED["loss"]}),
        ("LoRA", "kd_loss", {"kd_loss": CHUNKED["kd_loss"]}),
        *(
            ("LoRA", "kd_loss", {**CHUNKED, "kd_loss": {**CHUNKED["kd_loss"], **other}})
            for other in ({"num_output_chunks": 4}, {"num_output_chunks": "abc"})
        ),
        (
            "LoRA",
            "kd_loss.ignore_index",
            {"kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLLoss", "ignore_index": 0}},
        ),
        *(
            ("LoRA", "kd_loss", {"kd_loss": {"_component_": component}})
            for component in (
                "torch.nn.MSELoss",
                "support.distillation.SumOfTokens",
                "support.distillation.MeanOfAllTokens",
            )
        ),
        ("full", "tensor_parallel_dim", {"tensor_parallel_dim": 2}),
        ("full", "ref_checkpointer", {"ref_checkpointer": {"_component_": "x"}}),
        ("LoRA", "reference_micro_batch_size", {"reference_micro_batch_size": "auto"}),
    ],
    ids=str,
)
def test_keys_that_do_not_go_with_distillation_are_refused(kind, key, keys):
    cfg = config_of_distillation(kind)
    cfg.update(keys)
    with pytest.raises(SettingError) as refused:
        check(cfg)
    assert refused.value.key == key
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab_size": 999},
        LORA,
        {"num_head": 3},
        {"num_layers": "two"},
        {"_component_": "mine.teacher"},
    ],
    ids=str,
)
def test_a_teacher_that_cannot_be_one_is_refused_by_its_key(changed):
    cfg = config_of_distillation("LoRA")
    cfg.teacher_model.update(changed)
    with pytest.raises(SettingError) as refused:
        check(cfg)
    assert refused.value.key == "teacher_model"


def test_rows_are_as_long_as_both_models_take():
    cfg = config_of_distillation("LoRA")
    cfg.teacher_model.max_seq_len = 48
    job = check(cfg)
    assert job.max_seq_len == job.max_row_length == 48


def test_both_losses_are_tried_in_as_many_chunks():
    cfg = config_of_distillation("LoRA", **CHUNKED, device="cpu")
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
    typed = [change.overrides for change in candidates(cfg, model, tokens=64, world_size=1)]
    in_chunks = ("loss.num_output_chunks=32", "kd_loss.num_output_chunks=32")
    assert [overrides for overrides in typed if "chunks" in str(overrides)] == [in_chunks]
    cfg = config_of_distillation("LoRA", device="cpu")
    typed = [change.overrides for change in candidates(cfg, model, tokens=64, world_size=1)]
    assert not [overrides for overrides in typed if "loss" in str(overrides)]
