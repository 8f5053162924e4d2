"""Adapters on a base that FSDP2 divides: runs go on with other numbers of ranks."""

from __future__ import annotations

import shutil

import pytest
from support.adapters import KINDS, LORA, OURS, make_wide_setup
from support.cli import SmallSetup

from adaptive_batch.report import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> SmallSetup:
    return make_wide_setup(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("DoRA", 2, 1), pytest.param("QLoRA", 1, 2, marks=pytest.mark.nightly)],
)
def test_another_number_of_ranks_resumes_adapters(setup, kind, before, after):
    keys = (*KINDS[kind], "save_every_n_steps=2", "save_adapter_weights_only=True", "batch_size=4")
    keys = (OURS, *LORA, "epochs=1", *keys)
    whole = setup.run(*keys, ranks=before)
    folder = setup.fresh_folder()
    shutil.copytree(whole.output_dir, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "epoch_0")
    for path in folder.glob("step_*"):
        if path.name != "step_2":
            shutil.rmtree(path)
    goes_on = (f"output_dir={folder}", "resume_from_checkpoint=True")
    gone_on = setup.run(*keys, *goes_on, ranks=after)
    assert audit(folder).holds
    pairs = zip(map(float, gone_on.losses[2:]), map(float, whole.losses[2:]), strict=False)
    assert all(abs(a - b) <= (0.02 if kind == "QLoRA" else 2e-5) * abs(b) for a, b in pairs)
