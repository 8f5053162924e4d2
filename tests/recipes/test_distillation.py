"""Distillation through the real command line: runs resume, both models are estimated, and mistakes
are refused.

Steps are proved in tests/unit/torchtune/test_task_distillation.py, their bits in tests/parity/.
"""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from support.cli import FINDS, figures, same_weights
from support.distillation import FULL, LORA, METRICS, OURS, write_teacher
from support.stops import stopped_after

from adaptive_batch.errors import SettingError


@pytest.fixture(scope="module")
def lora(small):
    return (*LORA, *write_teacher(small))


@pytest.fixture(scope="module")
def full(small):
    return (*FULL, *write_teacher(small))


@pytest.mark.slow
def test_an_estimate_holds_both_models_as_trials_do(small, lora):
    """A wider teacher takes its memory from the rows."""
    estimated = []
    for width in (3000, 80):
        finished = small.run_in_process(
            "adaptive_estimate", *lora, f"teacher_model.intermediate_dim={width}",
            "estimate.devices=[16MiB]", "estimate.context=0", "estimate.changes=False",
        )  # fmt: skip
        path = finished.output_dir / "adaptive_batch" / "estimate.json"
        estimated += json.loads(path.read_text())["devices"][0]["lengths"]
    bounds = [length["max_batch_size"] for length in estimated]
    assert 0 < bounds[0] < bounds[1]
    found = small.run_in_process(
        OURS, *lora, *FINDS, "probe.device_memory=16MiB", "probe.headroom=0",
        "probe.search=binary", "probe.cache=False",
    )  # fmt: skip
    result = json.loads((found.output_dir / "adaptive_batch" / "probe.json").read_text())
    peaks = {trial["batch_size"]: trial["peak_bytes"] for trial in result["trials"]}
    assert result["max_batch_size"] == bounds[1]
    assert peaks[bounds[1]] == estimated[1]["allocated_bytes"]


def test_a_run_resumes_from_a_point_within_an_epoch_with_the_same_bits(small, full):
    own = (*full, "epochs=1", "save_every_n_steps=3", "optimizer.lr=1e-3")
    begun = small.run_in_process(OURS, *own)
    folder = stopped_after(begun, small, 3)
    resumed = small.run_in_process(
        OURS, *own, f"output_dir={folder}", "resume_from_checkpoint=True"
    )
    for name in ("loss", *METRICS):
        assert figures(resumed, name)[-5:] == figures(begun, name)[-5:]
    assert same_weights(resumed.weights(0), begun.weights(0))


def test_a_changed_ratio_is_named_when_a_run_resumes(small, lora, capsys):
    own = (*lora, "epochs=2", "max_steps_per_epoch=1", "save_every_n_steps=1")
    begun = small.run_in_process(OURS, *own)
    shutil.rmtree(begun.output_dir / "epoch_1")
    small.run_in_process(
        OURS, *own, f"output_dir={begun.output_dir}", "resume_from_checkpoint=True",
        "kd_ratio=0.9", "preview=True",
    )  # fmt: skip
    assert "kd_ratio" in capsys.readouterr().out


def test_a_teacher_of_another_shape_than_its_checkpoint_is_refused(small, lora):
    with pytest.raises(SettingError, match="in the checkpoint; give the model that") as refused:
        small.run_in_process(OURS, *lora, "teacher_model.embed_dim=32")
    assert refused.value.key == "teacher_model"


def test_the_teacher_is_read_from_its_own_files(small, lora):
    """Another teacher is another loss, and the same cross-entropy in the first step."""
    path = small.folder / "teacher" / "model.safetensors"
    saved = load_file(path)
    runs = []
    try:
        for factor in (1.0, 0.0):
            scaled = {name: tensor * factor for name, tensor in saved.items()}
            save_file(scaled, path, metadata={"format": "pt"})
            runs.append(small.run_in_process(OURS, *lora, "max_steps_per_epoch=1", "epochs=1"))
    finally:
        save_file(saved, path, metadata={"format": "pt"})
    class_losses, kd_losses = ([figures(run, name) for run in runs] for name in METRICS)
    assert class_losses[0] == class_losses[1]
    assert kd_losses[0] != kd_losses[1]
