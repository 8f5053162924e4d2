"""Distillation through the real command line: teacher files and refused settings.

tests/unit/torchtune/test_task.py tests steps, tests/parity/ compares their bits with torchtune, and
benchmarks/kills.py kills and resumes runs.
"""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file
from support.cli import figures, resume_run
from support.tasks import DISTILLATION

from adaptive_batch.errors import SettingError


@pytest.fixture(scope="module")
def lora(small):
    return DISTILLATION.overrides(small)


def test_a_resumed_run_shows_a_changed_kd_ratio(small, lora, capsys):
    own = (*lora, "epochs=2", "max_steps_per_epoch=1", "save_every_n_steps=1")
    begun = small.run_in_process(DISTILLATION.ours, *own)
    shutil.rmtree(begun.output_dir / "epoch_1")
    resume_run(
        small, begun.output_dir, *own, "kd_ratio=0.9", "preview=True", recipe=DISTILLATION.ours
    )
    assert "kd_ratio" in capsys.readouterr().out


def test_a_teacher_checkpoint_of_another_shape_is_refused(small, lora):
    with pytest.raises(SettingError, match="in the checkpoint; give the model that") as refused:
        small.run_in_process(DISTILLATION.ours, *lora, "teacher_model.embed_dim=32")
    assert refused.value.key == "teacher_model"


def test_the_teacher_is_loaded_from_its_own_files(small, lora):
    """A changed teacher changes the KD loss, not the cross-entropy of the first step."""
    path = small.folder / "teacher" / "model.safetensors"
    saved = load_file(path)
    runs = []
    try:
        for factor in (1.0, 0.0):
            scaled = {name: tensor * factor for name, tensor in saved.items()}
            save_file(scaled, path, metadata={"format": "pt"})
            runs.append(
                small.run_in_process(DISTILLATION.ours, *lora, "max_steps_per_epoch=1", "epochs=1")
            )
    finally:
        save_file(saved, path, metadata={"format": "pt"})
    class_losses, kd_losses = (
        [figures(run, name) for run in runs] for name in DISTILLATION.metrics
    )
    assert class_losses[0] == class_losses[1]
    assert kd_losses[0] != kd_losses[1]
