"""An export is complete or absent: a killed export leaves the previous export."""

import contextlib
import json
import os
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torchtune import training

from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune.model_files import Export, ModelFiles, exports_in


@pytest.fixture
def block(small, tmp_path):
    """Return the `checkpointer` block of a run in a new folder."""
    cfg = OmegaConf.load(small.config)
    cfg.output_dir = str(tmp_path / "out")
    OmegaConf.resolve(cfg)
    return cfg.checkpointer


@pytest.fixture
def out(block, tmp_path):
    export(block, 4)
    return tmp_path / "out"


def export(block, value, **more):
    """Export epoch 0 with weights that all have the value `value`."""
    files = ModelFiles(block)
    weights = {
        name: torch.full_like(tensor, float(value)) for name, tensor in files.load_weights().items()
    }
    content = {training.MODEL_KEY: weights, **more}
    files.export(content, epoch=0, run="a", step=8, order=2)


def value_of(out):
    (weights,) = (out / "epoch_0").glob("*.safetensors")
    (value,) = {float(tensor.max()) for tensor in load_file(weights).values()}
    return value


def test_an_export_records_its_run(block, out):
    assert exports_in(out) == [Export(out / "epoch_0", "a", 8, 2)]
    assert value_of(out) == 4


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"other": 1}), None])
def test_an_export_without_a_valid_manifest_has_an_unknown_run(out, content):
    manifest = out / "epoch_0" / "adaptive_batch.json"
    manifest.unlink()
    if content is not None:
        manifest.write_text(content)
    assert exports_in(out) == [Export(out / "epoch_0")]


def test_only_folders_of_epochs_are_exports(out):
    (out / "epoch_10").mkdir()
    (out / "epoch_2").mkdir()
    (out / "epoch_last").mkdir()
    assert [export.epoch for export in exports_in(out)] == [0, 2, 10]


class Killed(BaseException):
    """A kill: no later operation changes the disk."""


def test_a_kill_during_an_export_leaves_the_old_or_the_new_export(
    block, out, tmp_path, monkeypatch
):
    """Kill it before each operation that renames or removes a folder."""
    before, found = tmp_path / "before", set()
    shutil.copytree(out, before)
    for last in range(1000):
        shutil.rmtree(out)
        shutil.copytree(before, out)
        left = [last]

        def counted(operation, left=left):
            def act(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return operation(*args, **kwargs)

            return act

        with monkeypatch.context() as patched:
            for name in ("rename", "replace", "rmdir"):
                patched.setattr(os, name, counted(getattr(os, name)))
            with contextlib.suppress(Killed):
                export(block, 5)
        ModelFiles(block).clean_up()
        found.add(value_of(out))
        assert not list(out.glob(".*"))
        if left[0] >= 0:
            break
    assert found == {4, 5}
    assert last >= 4


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("checkpoint_dir", "/nowhere", "give what `tune download` wrote"),
        ("checkpoint_dir", "/etc", "config.json"),
        ("checkpoint_dir", None, "give what `tune download` wrote"),
        ("output_dir", "/proc/nothing", "give a folder of yours"),
        ("output_dir", None, "give a folder of yours"),
        ("model_type", "QWEN9", "give one of .*QWEN2"),
    ],
)
def test_an_invalid_base_is_refused_by_its_key(block, key, value, told):
    block[key] = value
    with pytest.raises(SettingError, match=told) as error:
        ModelFiles(block)
    assert error.value.key in ("checkpointer", f"checkpointer.{key}")


def test_the_error_names_a_missing_file(block):
    block.checkpoint_files = ["nothing.safetensors"]
    with pytest.raises(SettingError, match=r"No file with name: nothing\.safetensors found in "):
        ModelFiles(block)
