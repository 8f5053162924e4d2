"""Preference pairs and distillation: the gradient of a step does not depend on its split."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from support.exact_tasks import (
    EXACT,
    KINDS,
    LORA,
    RATIO,
    Wired,
    config_of_distillation,
    config_of_pairs,
    distilling,
    job_on_pairs,
    of_all_pairs_at_once,
    of_all_tokens_at_once,
    pair,
    pairs,
    rows_of,
)
from support.fault_injection import OutOfMemoryMode, in_attempts
from support.runners import set_limit
from support.same_state import assert_same
from support.sharded_model import relative_error
from torch import nn
from torchtune.rlhf.loss import DPOLoss

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import Distillation, Job, PreferencePairs, Settings
from adaptive_batch.torchtune.checks import TO_PLAN, complete
from adaptive_batch.training import ProbeOptions, SearchScope, StepResult
from adaptive_batch.training.bound_search import BoundSearch, LongestRows


@pytest.mark.parametrize("layout", ["padded", "grouped", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_has_the_gradient_loss_and_metrics_of_all_pairs(kind, layout):
    rows = pairs(11)
    wired = job_on_pairs(kind, rows, layout=layout, limit=MicroBatchLimit(len(rows)))
    loss, expected = of_all_pairs_at_once(wired, rows)
    whole = wired.run(rows)
    assert whole.micro_batches == 1
    assert float(whole.loss) == pytest.approx(float(loss), rel=EXACT)
    assert relative_error(wired.gradients(), expected) < EXACT
    drawn = random.Random(0)
    for _ in range(8):
        shuffled = drawn.sample(rows, len(rows))
        limit = MicroBatchLimit(drawn.randrange(60, 400), "tokens")
        if drawn.random() < 0.5:
            limit = MicroBatchLimit(drawn.randrange(1, len(rows)))
        set_limit(wired.trainer.engine.sizer, limit)
        split = wired.run(shuffled)
        assert split.micro_batches > 1
        assert relative_error(wired.gradients(), expected) < EXACT
        assert split.loss == pytest.approx(whole.loss, rel=EXACT)
        assert split.num_labels == split.rows == len(rows)
        assert layout != "packed" or split.padding_fraction == whole.padding_fraction == 0
        for name, value in whole.metrics.items():
            # Means of logits include padding, and a split has less padding.
            if layout == "packed" or not name.startswith("logits/"):
                assert split.metrics[name] == pytest.approx(value, rel=1e-9), name


def failed_steps(
    build: Callable[[], Wired], rows: Sequence[Any], *, every: int
) -> list[tuple[Wired, StepResult]]:
    """Run steps in which one of `every` operations runs out of memory; return jobs and results."""
    steps = []
    for operation in range(1, 2000, every):
        mode = OutOfMemoryMode(operation)
        wired = build()
        with in_attempts(mode):
            result = wired.run(rows)
        if mode.left > 0:
            break
        adapters = [part for part in wired.model.modules() if hasattr(part, "disabled")]
        assert not any(part.disabled for part in adapters)
        steps.append((wired, result))
    assert len(steps) > 4
    return steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("job_on", "rows"), [(job_on_pairs, pairs(8)), (distilling, rows_of(8))])
def test_a_retried_step_equals_a_step_of_smaller_micro_batches(job_on, rows, kind):
    expected = job_on(kind, rows, limit=MicroBatchLimit(4))
    result = expected.run(rows)
    build = partial(job_on, kind, rows, limit=MicroBatchLimit(8))
    for failed, after in failed_steps(build, rows, every=47):
        assert (after.loss, after.metrics) == (result.loss, result.metrics)
        assert_same(failed.gradients(), expected.gradients())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("job_on", "rows"), [(job_on_pairs, pairs(2)), (distilling, rows_of(2))])
def test_a_search_counts_the_memory_of_both_models_and_the_optimizer(job_on, rows, kind):
    trainer = job_on(kind, rows, limit=MicroBatchLimit(1)).trainer
    longest = LongestRows(lambda size: rows[:size], 2, "one row")
    result = BoundSearch(trainer.tried(), SearchScope(longest), ProbeOptions("1GiB")).run()
    moments = [*trainer.model.parameters()] * 2
    held = [*trainer.models.parameters(), *(one for one in moments if one.requires_grad)]
    assert result.resident_bytes >= sum(tensor.nbytes for tensor in held)


def test_both_answers_of_the_longest_pairs_are_filled_to_one_length():
    rows = [pair((4, 29), torch.Generator()), pair((29, 28), torch.Generator())]
    wired = job_on_pairs("LoRA", rows, limit=MicroBatchLimit(1))
    task = wired.job.task
    for row in wired.data.longest(2):
        assert task.num_real_tokens(row) == task.length(row) == 58
        assert task.filled(row) == row
    first, *_ = wired.data.trial_rows("longest").first(1)
    assert task.num_real_tokens(first) == 58


@pytest.mark.parametrize("kind", KINDS)
def test_the_packing_check_of_pairs_finds_a_model_that_mixes_answers(kind):
    wired = job_on_pairs(kind, pairs(2), limit=MicroBatchLimit(2))
    # With zero adapters the policy equals the reference, so all pairs have the same loss.
    with torch.no_grad():
        for name, parameter in wired.model.named_parameters():
            if "lora_b" in name:
                parameter.zero_()
    assert wired.trainer.why_not_packed() == ""
    wired.model.output.register_forward_pre_hook(lambda _, given: (given[0].cumsum(1),))
    assert "mix tokens by torch's" in wired.trainer.why_not_packed()


def test_the_length_of_a_pair_counts_both_answers_after_padding():
    rows = pairs(5)
    cfg = config_of_pairs("LoRA")
    task = PreferencePairs(cfg, DPOLoss())
    collate = task.collate_function(0)
    for row in rows:
        assert task.length(row) == collate([row])["tokens"].numel()
    lengths = [task.length(row) for row in rows]
    assert collate(rows)["tokens"].numel() == len(rows) * max(lengths)
    longer = collate(task.lengthened(rows, 90, pad_id=0))
    assert longer["tokens"].shape == longer["labels"].shape == (2 * len(rows), 45)
    assert (longer["labels"][:, 30:] == -100).all()
    assert task.length(task.resized(rows[0], 24)) == 24
    assert task.length(task.synthetic_row(24)) == 24


def reference_calls(wired: Wired) -> list[tuple[int, int]]:
    """Return a list that receives the pairs and the padded tokens of each reference forward."""
    calls: list[tuple[int, int]] = []
    logits = wired.trainer.reference_logits

    def noted(tokens: torch.Tensor) -> Any:
        calls.append((len(tokens) // 2, tokens.numel()))
        return logits(tokens=tokens)

    wired.trainer.reference_logits = noted
    return calls


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_separate_micro_batches_of_the_reference_do_not_change_a_step(kind, layout):
    rows = pairs(11, seed=5)
    job_on = partial(job_on_pairs, kind, rows, layout=layout, limit=MicroBatchLimit(2))
    within = job_on()
    expected = within.run(rows)
    gradients = within.gradients()
    for limit in (MicroBatchLimit(1), MicroBatchLimit(5), MicroBatchLimit(350, "tokens")):
        apart = job_on(reference_limit=limit)
        calls = reference_calls(apart)
        result = apart.run(rows)
        assert sum(num_pairs for num_pairs, _ in calls) == len(rows)
        held = [call[limit.unit == "tokens"] for call in calls]
        assert max(held) <= limit.amount
        assert limit.amount != 5 or len(calls) == 3
        assert result.micro_batches == expected.micro_batches == 6
        assert relative_error(apart.gradients(), gradients) < EXACT
        assert result.loss == pytest.approx(expected.loss, rel=EXACT)
        assert result.metrics == pytest.approx(expected.metrics, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_an_oom_lowers_the_limit_of_the_reference_or_of_training(kind):
    rows = pairs(8)
    build = partial(job_on_pairs, kind, rows, limit=MicroBatchLimit(4))
    expected = build(reference_limit=MicroBatchLimit(4))
    result = expected.run(rows)
    build = partial(build, reference_limit=MicroBatchLimit(len(rows)))
    for failed, after in failed_steps(build, rows, every=23):
        engine = failed.trainer.engine
        reference_is_lowered = engine.reference.sizer.limit(1).amount < len(rows)
        assert reference_is_lowered == (engine.sizer.limit() == MicroBatchLimit(4))
        assert after.loss == pytest.approx(result.loss, rel=EXACT)
        assert relative_error(failed.gradients(), expected.gradients()) < EXACT


@pytest.mark.parametrize(
    ("kind", "keys", "key", "says"),
    [
        ("LoRA", {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}, "loss", "not a loss of"),
        ("LoRA", {"collate_fn": "torchtune.data.padded_collate_sft"}, "collate_fn", "remove it"),
        ("full", {"tensor_parallel_dim": 2}, "tensor_parallel_dim", "give 1, and ranks divide"),
        ("full", {"ref_checkpointer": None}, "ref_checkpointer", "give a block with _component_"),
        ("LoRA", {"ref_checkpointer": {"_component_": "x"}}, "ref_checkpointer", "their base"),
        ("full", {"ref_checkpointer": "mine"}, "ref_checkpointer", "give a block with _component_"),
    ],
)
def test_keys_that_conflict_with_pairs_are_refused_with_a_reason(kind, keys, key, says):
    cfg = config_of_pairs(kind)
    settings = Settings.from_config(cfg)
    cfg.update(keys)
    complete(cfg, needs=TO_PLAN)
    job = Job(cfg, settings, task=PreferencePairs, needs=TO_PLAN)
    with pytest.raises(SettingError, match=says) as refused:
        job.check_model()
    assert refused.value.key == key


def mean_of_batch(
    policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps
):
    return (policy_chosen_logps.mean(),) * 3


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda a, b, c, d: None, "not a loss of preference pairs"),
        (1, "not a loss of preference pairs"),
        (mean_of_batch, r"of two pairs it returns shapes \[\(\), \(\), \(\)\]"),
    ],
)
def test_a_loss_of_another_task_is_refused(loss, says):
    with pytest.raises(SettingError, match=says):
        PreferencePairs(config_of_pairs("LoRA"), loss).check_loss()


CHUNKED = {
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
}


def check(cfg: DictConfig) -> Job:
    """Build the job of a configuration and check its models."""
    settings = Settings.from_config(cfg)
    job = Job(cfg, settings, task=Distillation, needs=TO_PLAN)
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
        set_limit(wired.trainer.engine.sizer, limit)
        result = wired.run(drawn.sample(rows, len(rows)))
        assert (result.micro_batches > 1) == (limit != limits[0])
        assert layout != "packed" or result.padding_fraction == 0
        assert relative_error(wired.gradients(), expected) < EXACT
        # Means are computed in float32, as in torchtune.
        means = {"class_loss": float(class_loss), "kd_loss": float(kd_loss)}
        assert result.metrics == pytest.approx(means, rel=1e-6)
        loss = (1 - RATIO) * means["class_loss"] + RATIO * means["kd_loss"]
        assert result.loss == pytest.approx(loss, rel=1e-6)


def test_kd_ratio_defaults_to_that_of_torchtune():
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
                "support.exact_tasks.SumOfTokens",
                "support.exact_tasks.MeanOfAllTokens",
            )
        ),
        ("full", "tensor_parallel_dim", {"tensor_parallel_dim": 2}),
        ("full", "ref_checkpointer", {"ref_checkpointer": {"_component_": "x"}}),
        ("LoRA", "reference_micro_batch_size", {"reference_micro_batch_size": "auto"}),
    ],
    ids=str,
)
def test_keys_that_conflict_with_distillation_are_refused(kind, key, keys):
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
def test_an_invalid_teacher_is_refused_by_its_key(changed):
    cfg = config_of_distillation("LoRA")
    cfg.teacher_model.update(changed)
    with pytest.raises(SettingError) as refused:
        check(cfg)
    assert refused.value.key == "teacher_model"


def test_rows_are_limited_to_the_shorter_max_seq_len_of_both_models():
    cfg = config_of_distillation("LoRA")
    cfg.teacher_model.max_seq_len = 48
    job = check(cfg)
    assert job.max_seq_len == job.max_row_length == 48
