"""Another recipe file passes another model builder; probe, loop, retry after an OOM and resuming
are as they are.
"""

import pytest
import torch
from omegaconf import OmegaConf
from support.cli import OURS, interrupted_after_first_epoch, losses, same_weights, weights
from support.model_families import Combination
from support.norms_finetune import NormsAlone

from adaptive_batch.report import read_records
from adaptive_batch.torchtune import estimate_devices

RECIPE = "support/norms_finetune"
GROWS = (
    "epochs=2",
    "max_steps_per_epoch=3",
    "use_maximum_batch_size=True",
    "probe.device_memory=6MiB",
    "clip_grad_norm=0.5",
    "lr_scaling=sqrt",
    "batch_increase_function=support.components.four_more",
)


@pytest.fixture(scope="module")
def norms(small):
    return small.run_in_process(RECIPE, *GROWS)


def bound(finished):
    path = finished.output_dir / "adaptive_batch" / "run.jsonl"
    return next(
        record["max_batch_size"] for record in read_records(path) if record["kind"] == "bound"
    )


def test_only_what_the_builder_trains_is_changed(small, norms):
    before, after = weights(small.base), norms.weights(1)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert changed == {name for name in after if "norm" in name}


def test_gradients_and_states_that_are_not_there_leave_room_for_more_rows(small, norms):
    assert bound(norms) > bound(small.run_in_process(OURS, *GROWS)) > 0


def test_a_run_that_was_interrupted_resumes_to_the_bit(small, norms):
    folder = interrupted_after_first_epoch(norms, small)
    resumed = small.run_in_process(
        RECIPE, *GROWS, f"output_dir={folder}", "resume_from_checkpoint=True"
    )
    assert same_weights(resumed.weights(1), norms.weights(1))
    assert losses(folder) == norms.losses[3:]


def test_the_estimate_takes_another_builder_too():
    asked = {"estimate": {"devices": ["1GiB"], "changes": False}}
    cfg = OmegaConf.merge(
        Combination("qwen2", 32, "AdamW").to_estimate(sequence_lengths=[32]), asked
    )
    whole, norms = (
        estimate_devices(cfg, show=lambda text: None, builder=one) for one in (None, NormsAlone())
    )
    assert norms.lengths[0].max_rows(2**30) > whole.lengths[0].max_rows(2**30)
    assert norms.lengths[0].optimizer_peak_bytes < whole.lengths[0].optimizer_peak_bytes
