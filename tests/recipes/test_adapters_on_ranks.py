"""Adapters on a base that FSDP2 divides: runs go on with other numbers of ranks."""

from __future__ import annotations

import shutil

import pytest
from support.adapters import KINDS, LORA, OURS, make_wide_setup
from support.cli import SmallSetup
from support.launch import Attempt, launch

from adaptive_batch.report import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> SmallSetup:
    return make_wide_setup(tmp_path_factory.mktemp("wide"))


def run(setup: SmallSetup, ranks: int, *overrides: str, ends: int = 0, **options) -> Attempt:
    (attempt,) = launch(setup, ranks, *LORA, "epochs=1", *overrides, recipe=OURS, **options)
    assert attempt.exit_statuses == [ends] * ranks, attempt.output[-6000:]
    return attempt


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("DoRA", 2, 1), pytest.param("QLoRA", 1, 2, marks=pytest.mark.nightly)],
)
def test_another_number_of_ranks_resumes_adapters(setup, kind, before, after):
    keys = (*KINDS[kind], "save_every_n_steps=2", "save_adapter_weights_only=True", "batch_size=4")
    whole = run(setup, before, *keys)
    folder = setup.fresh_folder()
    shutil.copytree(whole.output_dir, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "epoch_0")
    for path in folder.glob("step_*"):
        if path.name != "step_2":
            shutil.rmtree(path)
    gone_on = run(setup, after, *keys, f"output_dir={folder}", "resume_from_checkpoint=True")
    assert audit(folder).holds
    pairs = zip(map(float, gone_on.losses[2:]), map(float, whole.losses[2:]), strict=False)
    assert all(abs(a - b) <= (0.02 if kind == "QLoRA" else 2e-5) * abs(b) for a, b in pairs)
