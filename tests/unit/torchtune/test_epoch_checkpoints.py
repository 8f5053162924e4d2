"""An epoch is complete or absent: damage to any file of it is named, and a save that is killed
anywhere loses nothing.
"""

import contextlib
import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torchtune import training

from adaptive_batch._util import atomic_write
from adaptive_batch.checkpoint import SkippedCheckpoint, changed_content
from adaptive_batch.distributed import launch_name
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.torchtune import Checkpoints
from adaptive_batch.torchtune.epoch_checkpoints import (
    EpochCheckpoints,
    inspect_epoch,
    manifests_in,
)
from adaptive_batch.torchtune.settings import SavingSettings

WEIGHTS, STATE = "epoch_0/model-00001-of-00001.safetensors", "recipe_state/recipe_state.pt"


@pytest.fixture
def block(small, tmp_path):
    """The `checkpointer` block of a run in a folder of its own."""
    cfg = OmegaConf.load(small.config)
    cfg.output_dir = str(tmp_path / "out")
    OmegaConf.resolve(cfg)
    return cfg.checkpointer


@pytest.fixture
def out(block, tmp_path):
    save(block, 0, order=4)
    return tmp_path / "out"


def save(block, epoch, *, order, **own):
    """Save an epoch whose weights and optimizer are all its order."""
    epochs = EpochCheckpoints(block)
    weights = {
        name: torch.full_like(tensor, float(order))
        for name, tensor in epochs.load_weights().items()
    }
    state = {
        training.SEED_KEY: 7,
        training.EPOCHS_KEY: epoch + 1,
        training.MAX_STEPS_KEY: None,
        training.OPT_KEY: {"moments": torch.full((30_000,), float(order))},
        "adaptive_batch": {"run": "a"},
        **own,
    }
    epochs.save(
        {training.MODEL_KEY: weights},
        recipe_state=state,
        epoch=epoch,
        order=order,
        run="a",
        ends_run=False,
    )


def test_a_run_that_torchrun_starts_again_finds_its_epoch_whatever_recipe_checkpoint_says(
    block, out, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    atomic_write(
        out / "adaptive_batch" / "job.json", json.dumps({"run": "a", "launch": launch_name()})
    )
    block.recipe_checkpoint = "recipe_state_0.pt"
    cfg = OmegaConf.create(
        {"output_dir": str(out), "checkpointer": block, "resume_from_checkpoint": False}
    )
    settings = SimpleNamespace(saving=SavingSettings(), preview=True)
    assert Checkpoints(cfg, settings).found.source == str(out / "epoch_0")


def order_of(block):
    """The order of what is resumed from, after both files were read and are of the same save."""
    found = inspect_epoch(block)
    assert changed_content(found.path, found.files) is None
    (weights,) = found.weights
    moments = torch.load(found.state_file, weights_only=True)[training.OPT_KEY]["moments"]
    values = {float(tensor.max()) for tensor in [*load_file(weights).values(), moments]}
    assert values == {float(found.order)}
    return found.order


def why_not(block):
    found = inspect_epoch(block)
    return (
        found.reason
        if isinstance(found, SkippedCheckpoint)
        else changed_content(found.path, found.files)
    )


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 4
    path.write_bytes(content)


def test_what_was_saved_is_found_with_its_order(block, out):
    assert order_of(block) == 4
    ((folder, manifest),) = manifests_in(out)
    assert folder == out / "epoch_0"
    assert (manifest.identity["order"], manifest.run, manifest.ends_run) == (4, "a", False)


def test_where_nothing_was_saved_nothing_is_found(block):
    assert inspect_epoch(block) is None


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
@pytest.mark.parametrize("at", [0.0, 0.001, 0.003, 0.1, 0.5, 0.99, 0.9999])
def test_a_flipped_bit_is_named_with_its_file(block, out, name, at):
    flip(out / name, at)
    assert f"{name.rpartition('/')[2]} has another checksum (crc32 " in why_not(block)


@pytest.mark.parametrize("at", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_flipped_bit_in_the_manifest_is_no_epoch(block, out, at):
    flip(out / "epoch_0" / "adaptive_batch.json", at)
    assert why_not(block) == "adaptive_batch.json is truncated or changed"


def test_a_recipe_state_that_lost_the_name_of_its_save_is_not_taken_for_one_of_torchtune(
    block, out
):
    content = (out / STATE).read_bytes()
    assert content.count(b"adaptive_batch") == 1
    (out / STATE).write_bytes(content.replace(b"adaptive_batch", b"adaptive_batbh"))
    assert "recipe_state.pt has another checksum" in why_not(block)


HARM = {
    "a file is truncated": (lambda out: os.truncate(out / WEIGHTS, 1000), "has 1,000 bytes, "),
    "a file is renamed": (
        lambda out: (out / WEIGHTS).rename(out / "epoch_0" / "a.bin"),
        "safetensors is missing",
    ),
    "the recipe state is gone": (lambda out: (out / STATE).unlink(), "recipe_state.pt is missing"),
    "the recipe state is no archive": (
        lambda out: (out / STATE).write_bytes(b"\x80\x00"),
        "has 2 bytes, ",
    ),
    "the manifest is gone": (
        lambda out: (out / "epoch_0" / "adaptive_batch.json").unlink(),
        "No such file",
    ),
    "the folder is gone": (
        lambda out: shutil.rmtree(out / "epoch_0"),
        "cannot be read (No such file",
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_damage_is_named(block, out, harm):
    act, reason = HARM[harm]
    act(out)
    assert reason in why_not(block)


def test_a_folder_of_weights_may_lie_elsewhere(block, out, tmp_path):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    shutil.move(out / "epoch_0", tmp_path / "disk" / "deep")
    (out / "epoch_0").symlink_to(tmp_path / "disk" / "deep" / "epoch_0")
    assert order_of(block) == 4


def test_an_extra_file_is_not_loaded(block, out):
    (out / "epoch_0" / "merged.safetensors").write_bytes(b"of something else")
    assert [path.name for path in inspect_epoch(block).weights] == [WEIGHTS.rpartition("/")[2]]


def test_a_corrupt_state_without_a_manifest_is_named_without_its_bytes_or_torchs_advice(block, out):
    shutil.rmtree(out / "epoch_0")
    for content in (b"\x80\x02c__builtin__\nprint\n\x07.", bytes(range(256)) * 20, b""):
        (out / STATE).write_bytes(content)
        described = inspect_epoch(block).describe()
        assert described.isprintable()
        assert "recipe_state.pt is skipped: it cannot be read" in described
        assert "`weights_only`" not in described


def test_each_of_several_files_of_weights_is_checked(block, small, tmp_path):
    base, names = tmp_path / "base", ["one.safetensors", "two.safetensors"]
    base.mkdir()
    shutil.copy(small.base / "config.json", base)
    weights = load_file(small.base / "model.safetensors")
    for name, keys in zip(names, (sorted(weights)[::2], sorted(weights)[1::2]), strict=True):
        save_file({key: weights[key] for key in keys}, base / name)
    block.checkpoint_dir, block.checkpoint_files = str(base), names
    save(block, 0, order=4)
    found = inspect_epoch(block)
    second = "model-00002-of-00002.safetensors"
    assert [path.name for path in found.weights] == ["model-00001-of-00002.safetensors", second]
    assert (
        EpochCheckpoints(block, found).load_weights().keys()
        == EpochCheckpoints(block).load_weights().keys()
    )
    flip(found.weights[1], 0.5)
    assert f"{second} has another checksum" in why_not(block)
    found.weights[1].unlink()
    assert why_not(block) == f"{second} is missing"


# --- torchtune's own


@pytest.fixture
def of_torchtune(block, out):
    """As a recipe of torchtune's own has it: no checksums, and no word of ours in the
    recipe state.
    """
    (out / "epoch_0" / "adaptive_batch.json").unlink()
    state = torch.load(out / STATE, weights_only=True)
    del state["adaptive_batch"]
    torch.save(state, out / STATE)
    return out


def test_an_epoch_of_torchtune_is_found_and_older_than_all_of_ours(block, of_torchtune):
    found = inspect_epoch(block)
    assert (found.order, changed_content(found.path, found.files)) == (0, None)
    assert found.weights == [of_torchtune / WEIGHTS]


def test_a_file_that_its_index_names_must_be_there(block, of_torchtune):
    (of_torchtune / WEIGHTS).rename(of_torchtune / "epoch_0" / "other.safetensors")
    assert why_not(block) == "model-00001-of-00001.safetensors is missing"


def test_a_manifest_that_torchtune_copied_from_the_base_says_nothing(block, of_torchtune, tmp_path):
    shutil.move(of_torchtune, tmp_path / "aside")
    save(
        block, 0, order=9, more=torch.zeros(10)
    )  # the base: an epoch of ours, with the same sizes of weights
    shutil.copy(of_torchtune / "epoch_0" / "adaptive_batch.json", tmp_path / "aside" / "epoch_0")
    shutil.rmtree(of_torchtune)
    shutil.move(tmp_path / "aside", of_torchtune)
    assert inspect_epoch(block).order == 0


# --- kills and full disks


class Killed(BaseException):
    """After which nothing on the disk is changed."""


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_save_that_is_killed_anywhere_leaves_an_epoch_to_resume_from(
    block, out, tmp_path, monkeypatch, epoch
):
    """Before any operation that renames or removes a folder; also where the epoch is saved again by
    another run.
    """
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
                save(block, epoch, order=5)
        found.add(order_of(block))
        was_killed = left[0] < 0
        save(block, epoch, order=6)
        assert order_of(block) == 6
        assert not list(out.glob(".*"))
        if not was_killed:
            break
    assert found == {4, 5}
    assert last >= 5


def test_a_second_save_does_not_lose_what_a_killed_one_has_left_aside(block, out, monkeypatch):
    (out / "epoch_0").rename(out / ".replaced-epoch_0")  # killed between the two renames
    save_again = EpochCheckpoints(block)
    monkeypatch.setattr(save_again._checkpointer, "save_checkpoint", lambda *args, **rest: 1 / 0)
    with pytest.raises(CheckpointError, match="division by zero"):
        save_again.save(
            {training.MODEL_KEY: {}},
            recipe_state=None,
            epoch=0,
            order=9,
            run="a",
            ends_run=True,
        )
    assert order_of(block) == 4
    assert not list(out.glob(".*"))


def test_a_full_disk_says_what_is_needed_and_free_and_leaves_what_was_saved(block, out):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", out], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    told = (
        r"\(No space left on device\): it needs 1,\d{3},\d{3} bytes and a little more, and"
        r" 1,048,576 bytes were free;"
    )
    try:
        with pytest.raises(CheckpointError, match=told):
            save(block, 0, order=5, more=torch.zeros(300_000))
        assert not list(out.iterdir())
    finally:
        subprocess.run(["umount", "-l", out], check=True)  # the error holds torch's open file
    assert order_of(block) == 4


# --- the base


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("checkpoint_dir", "/nowhere", "there is no such folder; see `tune download`"),
        ("checkpoint_dir", "/etc", "config.json"),
        (
            "checkpoint_files",
            ["nothing.safetensors"],
            "No file with name: nothing.safetensors found in ",
        ),
        ("output_dir", "/proc/nothing", "cannot be made"),
    ],
)
def test_a_base_that_is_not_there_is_named_with_its_key(block, key, value, told):
    block[key] = value
    with pytest.raises(SettingError, match=told) as error:
        EpochCheckpoints(block)
    assert error.value.key == f"checkpointer.{key}"
