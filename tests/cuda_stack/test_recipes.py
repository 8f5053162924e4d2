"""The recipes on PyTorch's caching allocator, from probe to resume.

These tests check the order of steps, the number of micro-batches and the handling of OOM errors.
Values are not real here; tests/recipes checks them on a CPU.
"""

from __future__ import annotations

import json

import pytest
import torch
from support.cli import NUM_ROWS, OURS, TUNE, SmallSetup, block, make_setup, records
from support.cuda_stack.squeezing import leave
from support.processes import run_python
from support.tasks import ADAPTERS, KINDS

from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.report import audit

pytestmark = pytest.mark.cuda_stack

MIB = 2**20
CONTEXT = 500 * MIB  # of the emulated CUDA context
ROOM = 280 * MIB  # for about half of the rows
ON_CUDA = ("device=cuda", "probe.round_to_power_of_two=False")
MAXIMUM = "use_maximum_batch_size=True"
SQUEEZING = "support.cuda_stack.squeezing"
SQUEEZED = block("metric_logger", f"{SQUEEZING}.Squeezing", after_step=1, share=0.7)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> SmallSetup:
    return make_setup(
        tmp_path_factory.mktemp("mid"), num_layers=4, embed_dim=256, intermediate_dim=1024
    )


def run_in_new_interpreter(setup, *overrides, ranks=None, **variables):
    """Run the recipe with variables of the emulated CUDA; return its folder."""
    folder = setup.fresh_folder()
    keys = ("--config", setup.config, f"output_dir={folder}", *overrides)
    launch = () if ranks is None else ("--nproc_per_node", ranks)
    run_python(TUNE, "run", *launch, OURS, *keys, **setup._environment(), **variables)
    return folder


def bound(folder) -> int:
    return json.loads((folder / "adaptive_batch" / "probe.json").read_text())["max_batch_size"]


def test_training_uses_the_bound_and_twice_the_rows_do_not_fit(setup):
    leave(ROOM)
    folder = setup.run_in_process(OURS, *ON_CUDA, MAXIMUM, "epochs=1").output_dir
    found = bound(folder)
    assert 2 < found < NUM_ROWS
    assert records(folder, "step")[0]["batch_size"] == found
    assert not any(change["out_of_memory"] for change in records(folder, "limit"))
    assert audit(folder).problems == ()
    torch.cuda.empty_cache()
    too_many = min(2 * found, NUM_ROWS)
    with pytest.raises((DoesNotFitError, torch.OutOfMemoryError)):
        setup.run_in_process(
            OURS, *ON_CUDA, f"batch_size={too_many}", "on_out_of_memory=raise", "epochs=1"
        )


def test_the_bound_of_varying_lengths_runs_without_expandable_segments(setup):
    rows = block("dataset", f"{SQUEEZING}.bimodal_rows", number=4000, longest=512)
    folder = run_in_new_interpreter(
        setup,
        *(*ON_CUDA, *rows, "model.max_seq_len=512", MAXIMUM, "max_steps_per_epoch=60", "epochs=1"),
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False",
        EMULATE_CAPACITY=str(CONTEXT + 1536 * MIB),
    )
    # About 30 rows fit with expandable segments.
    assert bound(folder) >= 20
    assert records(folder, "limit") == []
    assert audit(folder).problems == ()


TRAINED = {
    "full": (OURS, ()),
    **{
        kind: (ADAPTERS.ours, (*ADAPTERS.keys, *keys, "dtype=bf16")) for kind, keys in KINDS.items()
    },
}


@pytest.mark.parametrize("kind", TRAINED)
def test_a_loss_of_memory_during_a_run_loses_no_row(setup, kind):
    recipe, keys = TRAINED[kind]
    leave(ROOM if kind == "full" else ROOM // 2)
    keys = (*keys, *ON_CUDA, MAXIMUM, *SQUEEZED, "save_every_n_steps=1")
    folder = setup.run_in_process(recipe, *keys).output_dir
    (found,) = records(folder, "bound")
    assert 2 < found["max_batch_size"] < NUM_ROWS
    assert found["trials"] <= (8 if kind == "full" else 6)  # as measured
    change, *_ = records(folder, "limit")
    assert change["out_of_memory"]
    assert "GPU 0 has a total capacity of" in change["error"]
    assert change["after"] < change["before"] == found["max_batch_size"]
    first, *others = records(folder, "step")
    assert first["micro_batches"] == 1 < others[0]["micro_batches"]
    assert sum(step["batch_size"] for step in [first, *others]) == 2 * NUM_ROWS
    assert audit(folder).problems == ()


def test_two_ranks_probe_survive_an_oom_of_one_and_resume(setup):
    two_devices = {"EMULATE_DEVICE_COUNT": "2", "EMULATE_COPIED_BYTES": "65536"}
    two_devices["EMULATE_CAPACITY"] = str(CONTEXT + ROOM - 40 * MIB)
    keys = (*ON_CUDA, MAXIMUM, "save_every_n_steps=1")
    folder = run_in_new_interpreter(setup, *keys, *SQUEEZED, "epochs=1", ranks=2, **two_devices)
    assert 1 < bound(folder) < NUM_ROWS // 2
    change, *_ = records(folder, "limit")
    assert change["out_of_memory"]
    assert change["message"].startswith("out of memory on rank 0 with")
    first, second = (step["micro_batches"] for step in records(folder, "step"))
    assert first == 1 < second
    resumed = ("epochs=2", "resume_from_checkpoint=True", f"output_dir={folder}")
    run_in_new_interpreter(setup, *keys, *resumed, ranks=2, **two_devices)
    assert [start["resumed"] for start in records(folder, "start")] == [False, True]
    assert sum(step["batch_size"] for step in records(folder, "step")) == 2 * NUM_ROWS
    assert audit(folder).problems == ()
