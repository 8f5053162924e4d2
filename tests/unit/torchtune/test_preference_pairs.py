"""A preference pair is a row: its tokens are both answers, and however the pairs of a step are
split, the gradient and the metrics are those of all.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torchtune
from omegaconf import OmegaConf
from support.exact_tasks import (
    EXACT,
    KINDS,
    config_of_pairs,
    job_on_pairs,
    of_all_pairs_at_once,
    pair,
    pairs,
)
from support.fault_injection import AttemptedMemory, RunsOutAt
from support.wired_jobs import bounds, largest_difference

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.torchtune import (
    AdapterModel,
    Data,
    FullModel,
    Job,
    PreferencePairs,
    Settings,
    builder_of,
    without_effect,
)
from adaptive_batch.torchtune.checks import TO_PLAN, complete

STOCK = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
CONFIGS = sorted(str(path.relative_to(STOCK)) for path in STOCK.glob("*/*dpo*.yaml"))


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_has_the_gradient_loss_and_metrics_of_all_pairs(kind):
    rows = pairs(11)
    wired = job_on_pairs(kind, rows, limit=MicroBatchLimit(len(rows)))
    loss, expected = of_all_pairs_at_once(wired, rows)
    whole = wired.run(rows)
    assert whole.micro_batches == 1
    assert float(whole.loss) == pytest.approx(float(loss), rel=EXACT)
    assert largest_difference(expected, wired.gradients()) < EXACT
    drawn = random.Random(0)
    for _ in range(8):
        shuffled = drawn.sample(rows, len(rows))
        limit = MicroBatchLimit(drawn.randrange(60, 400), "tokens")
        if drawn.random() < 0.5:
            limit = MicroBatchLimit(drawn.randrange(1, len(rows)))
        wired.trainer.runner.sizer.current = limit
        split = wired.run(shuffled)
        assert split.micro_batches > 1
        assert largest_difference(expected, wired.gradients()) < EXACT
        assert split.loss == pytest.approx(whole.loss, rel=EXACT)
        assert split.label_tokens == split.rows == len(rows)
        for name, value in whole.metrics.items():
            # Means of logits cover padding, of which a split has less.
            if not name.startswith("logits/"):
                assert split.metrics[name] == pytest.approx(value, rel=1e-9), name


def test_parts_that_weigh_alike_would_be_another_step():
    """The fault of other trainers: each part weighs as much as any other, whatever it holds."""
    rows = pairs(7, seed=3)
    wired = job_on_pairs("LoRA", rows, limit=MicroBatchLimit(len(rows)))
    _, expected = of_all_pairs_at_once(wired, rows)
    wired.model.zero_grad()
    for part in (rows[:1], rows[1:]):
        loss = wired.trainer.mean_loss(wired.data.collate(part)) / 2
        loss.backward()
    assert largest_difference(expected, wired.gradients()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_runs_out_of_memory_is_that_of_smaller_micro_batches(kind):
    rows = pairs(8)
    expected = job_on_pairs(kind, rows, limit=MicroBatchLimit(4))
    result = expected.run(rows)
    failures = 0
    for operation in range(1, 2000, 47):
        mode = RunsOutAt(operation)
        memory = AttemptedMemory(mode.begin)
        faulted = job_on_pairs(kind, rows, limit=MicroBatchLimit(8), memory=memory)
        with mode:
            after = faulted.run(rows)
        if not mode.failed_in:
            break
        failures += 1
        assert after.metrics == result.metrics
        assert after.loss == result.loss
        ours, theirs = faulted.gradients(), expected.gradients()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        adapters = [part for part in faulted.model.modules() if hasattr(part, "disabled")]
        assert not any(part.disabled for part in adapters)
    assert failures > 4


def test_one_pair_that_does_not_fit_is_not_divided():
    rows = pairs(1)
    mode = RunsOutAt(*[40] * 20)
    wired = job_on_pairs("LoRA", rows, limit=MicroBatchLimit(1), memory=AttemptedMemory(mode.begin))
    with mode, pytest.raises(DoesNotFitError):
        wired.run(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_that_of_brute_force(kind):
    (row,) = [pair((24, 30), torch.Generator())]
    wired = job_on_pairs(kind, [row], limit=MicroBatchLimit(1))
    before = {name: tensor.clone() for name, tensor in wired.trainer.models.state_dict().items()}
    for largest, found in bounds(wired, row, (1, 2, 11)).items():
        assert found == largest
    # A trial leaves no trace, in the reference neither.
    after = wired.trainer.models.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_tokens_of_a_row_are_both_answers_as_they_are_collated():
    rows = pairs(5)
    cfg = config_of_pairs("LoRA")
    task = PreferencePairs(cfg, torchtune.rlhf.loss.DPOLoss())
    collate = task.collate_function(0)
    for row in rows:
        assert task.length(row) == collate([row])["tokens"].numel()
    lengths = [task.length(row) for row in rows]
    assert collate(rows)["tokens"].numel() == len(rows) * max(lengths)
    longer = collate(task.lengthened(rows, 90, pad_id=0))
    assert longer["tokens"].shape == longer["labels"].shape == (2 * len(rows), 45)
    assert (longer["labels"][:, 30:] == -100).all()
    assert task.length(task.resized(rows[0], 24)) == 24
    assert task.length(task.made_up_row(24)) == 24


# --- what is taken and what is refused


def test_there_are_configs_of_torchtune():
    assert len(CONFIGS) >= 5


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_torchtune_is_taken(name):
    cfg = OmegaConf.load(STOCK / name)
    cfg.update({"device": "cpu", "dtype": "fp32"})
    settings = Settings.from_config(cfg)
    assert without_effect(settings, cfg, ranks=8) == []
    job = Job(cfg, settings, builder_of(cfg), task=PreferencePairs)
    assert type(job.builder) is (FullModel if "full" in name else AdapterModel)
    job.check_model()


@pytest.mark.parametrize(
    ("kind", "keys", "key", "says"),
    [
        ("LoRA", {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}, "loss", "not a loss of"),
        ("LoRA", {"collate_fn": "torchtune.data.padded_collate_sft"}, "collate_fn", "remove it"),
        ("full", {"tensor_parallel_dim": 2}, "tensor_parallel_dim", "give 1, and ranks divide"),
        ("full", {"ref_checkpointer": None}, "ref_checkpointer", "the reference is a model of its"),
        ("LoRA", {"ref_checkpointer": {"_component_": "x"}}, "ref_checkpointer", "their base"),
        (
            "full",
            {"ref_checkpointer": "mine"},
            "ref_checkpointer",
            "give ref_checkpointer._component_=mine",
        ),
    ],
)
def test_what_pairs_do_not_take_is_refused_with_its_reason(kind, keys, key, says):
    cfg = config_of_pairs(kind)
    settings = Settings.from_config(cfg)
    cfg.update(keys)
    complete(cfg, needs=TO_PLAN)
    job = Job(cfg, settings, builder_of(cfg), task=PreferencePairs, needs=TO_PLAN)
    with pytest.raises(SettingError, match=says) as refused:
        job.check_model()
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda a, b, c, d: None, "not a loss of preference pairs"),
        (1, "not a loss of preference pairs"),
    ],
)
def test_what_is_no_loss_of_pairs_is_refused(loss, says):
    cfg = config_of_pairs("LoRA")
    with pytest.raises(SettingError, match=says):
        PreferencePairs(cfg, loss).check(None)


def test_a_loss_of_pairs_that_returns_other_shapes_is_refused():
    def mean(
        policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps
    ):
        return (policy_chosen_logps.mean(),) * 3

    with pytest.raises(SettingError, match=r"of two pairs it returns shapes \[\(\), \(\), \(\)\]"):
        PreferencePairs(config_of_pairs("LoRA"), mean).check(None)


def test_both_answers_are_padded_to_a_multiple():
    cfg = config_of_pairs("LoRA", dtype="fp64")
    cfg.pad_to_multiple_of = 8
    job = Job(cfg, Settings.from_config(cfg), builder_of(cfg), needs=TO_PLAN)
    rows = [pair((9, 5), torch.Generator().manual_seed(0))]
    data = Data(job, rows, packed=False)
    length = data.shapes.padded(job.task.length(rows[0]))
    batch = data.collate(job.task.lengthened(rows, length, pad_id=0))
    assert batch["tokens"].shape == (2, 16)
