"""Preference pairs through the real command line: resumes and refused settings.

tests/unit/torchtune/test_task.py tests steps, tests/parity/ compares their bits with torchtune.
"""

from __future__ import annotations

import pytest
from support.cli import figures, records, resume_run, same_weights
from support.stops import stopped_after
from support.tasks import FULL_PAIRS, PAIRS

from adaptive_batch.errors import SettingError


@pytest.fixture(scope="module")
def lora(small):
    return PAIRS.overrides(small)


def resumed_after_step_three(small, begun, *own):
    """Resume a copy of the run from the checkpoint of step 3."""
    return resume_run(small, stopped_after(begun, small, 3), *own, recipe=PAIRS.ours)


def test_a_run_resumes_within_an_epoch_bit_for_bit(small, lora):
    own = (*lora, "reference_micro_batch_size=auto", "probe.device_memory=24MiB")
    own += ("epochs=1", "save_every_n_steps=3")
    begun = small.run_in_process(PAIRS.ours, *own)
    resumed = resumed_after_step_three(small, begun, *own)
    for name in ("loss", *PAIRS.metrics):
        assert figures(resumed, name)[-5:] == figures(begun, name)[-5:]
    assert same_weights(resumed.weights(0), begun.weights(0))
    bounds = {record["max_batch_size"] for record in records(resumed, "reference_bound")}
    assert len(bounds) == 1


def test_a_run_resumes_if_the_reference_moves_into_or_out_of_the_step(small, lora):
    """The log has the change of the reference's limit."""
    within = (*lora, "epochs=1", "save_every_n_steps=3", "optimizer.lr=1e-3")
    for first, second, sizes in (
        ((), ("reference_micro_batch_size=4",), (None, 4)),
        (("reference_micro_batch_size=4",), (), (4, None)),
    ):
        begun = small.run_in_process(PAIRS.ours, *within, *first)
        resumed = resumed_after_step_three(small, begun, *within, *second)
        expected = pytest.approx(figures(begun, "loss")[-5:], rel=1e-5)
        assert figures(resumed, "loss")[-5:] == expected
        (change,) = records(resumed, "reference_micro_batch_size")
        assert (change["before"], change["after"]) == sizes


@pytest.mark.parametrize(
    ("recipe", "key", "overrides"),
    [
        (PAIRS.ours, "dataset", ("dataset.packed=True",)),
        (PAIRS.ours, "micro_batch_layout", ("micro_batch_layout=packed", "pad_to_multiple_of=8")),
        (PAIRS.ours, "loss", ("loss=torch.nn.CrossEntropyLoss",)),
        (PAIRS.ours, "loss", ("loss.beta=abc",)),
        ("adaptive_lora_finetune", "loss", ()),
    ],
)
def test_keys_of_another_recipe_are_refused_before_weights_load(
    small, lora, recipe, key, overrides
):
    with pytest.raises(SettingError) as refused:
        small.run_in_process(recipe, *lora, *overrides, "checkpointer.checkpoint_dir=nowhere")
    assert refused.value.key == key


def test_full_fine_tuning_without_a_reference_is_refused(small):
    full = FULL_PAIRS.overrides(small)
    without = [override for override in full if not override.startswith("ref_checkpointer")]
    for own in (
        (*without, "checkpointer.checkpoint_dir=nowhere"),
        (*full, "ref_checkpointer.checkpoint_dir=nowhere"),
    ):
        with pytest.raises(SettingError) as refused:
            small.run_in_process(PAIRS.ours, *own)
        assert refused.value.key.startswith("ref_checkpointer")
