"""The recipes on PyTorch's caching allocator, from probe to resume.

These tests check the order of steps, the number of micro-batches and the handling of OOM errors.
Values are not real here; tests/recipes checks them on a CPU.
"""

from __future__ import annotations

import json

import pytest
import torch
from support.adapters import KINDS, LORA
from support.adapters import OURS as OURS_WITH_ADAPTERS
from support.cli import NUM_ROWS, OURS, SmallSetup, make_setup
from support.cuda_stack.squeezing import leave

from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.report import audit, read_records

pytestmark = pytest.mark.cuda_stack

MIB = 2**20
CONTEXT = 500 * MIB  # of the emulated CUDA context
ROOM = 280 * MIB  # for about half of the rows
ON_CUDA = ("device=cuda", "probe.round_to_power_of_two=False")
MAXIMUM = "use_maximum_batch_size=True"
SQUEEZED = (
    "metric_logger._component_=support.cuda_stack.squeezing.Squeezing",
    "metric_logger.after_step=1",
    "metric_logger.share=0.7",
)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> SmallSetup:
    return make_setup(
        tmp_path_factory.mktemp("mid"), num_layers=4, embed_dim=256, intermediate_dim=1024
    )


def records(folder, kind):
    return [
        record
        for record in read_records(folder / "adaptive_batch" / "run.jsonl")
        if record["kind"] == kind
    ]


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


def test_the_bound_of_varying_lengths_runs_without_expandable_segments(setup, monkeypatch):
    lengths = (
        "dataset._component_=support.cuda_stack.squeezing.skewed_rows",
        "dataset.number=4000",
        "dataset.longest=512",
        "dataset.kind=bimodal",
        "model.max_seq_len=512",
        *(
            f"~dataset.{key}"
            for key in ("data_files", "cache_dir", "split", "column_map", "train_on_input")
        ),
    )

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setenv("EMULATE_CAPACITY", str(CONTEXT + 1536 * MIB))
    folder = setup.run(
        OURS, *ON_CUDA, *lengths, MAXIMUM, "max_steps_per_epoch=60", "epochs=1"
    ).output_dir
    # About 30 rows fit with expandable segments.
    assert bound(folder) >= 20
    assert records(folder, "limit") == []
    assert audit(folder).problems == ()


@pytest.mark.parametrize("kind", [*KINDS])
def test_adapters_train_at_their_bound_and_continue_with_less_memory(setup, kind):
    leave(ROOM // 2)
    keys = (
        *LORA,
        *KINDS[kind],
        *ON_CUDA,
        "dtype=bf16",
        MAXIMUM,
        *SQUEEZED,
        "epochs=1",
        "save_every_n_steps=1",
    )
    folder = setup.run_in_process(OURS_WITH_ADAPTERS, *keys).output_dir
    (found,) = records(folder, "bound")
    assert 2 < found["max_batch_size"] < NUM_ROWS
    assert found["trials"] <= 5
    change, *_ = records(folder, "limit")
    assert change["out_of_memory"]
    assert change["after"] < change["before"] == found["max_batch_size"]
    assert audit(folder).problems == ()


def test_a_loss_of_memory_during_a_run_loses_no_row(setup):
    leave(ROOM)
    folder = setup.run_in_process(OURS, *ON_CUDA, MAXIMUM, *SQUEEZED).output_dir
    change, *_ = records(folder, "limit")
    assert change["out_of_memory"]
    assert "GPU 0 has a total capacity of" in change["error"]
    assert change["after"] < change["before"] == bound(folder)
    first, *others = records(folder, "step")
    assert first["micro_batches"] == 1 < others[0]["micro_batches"]
    assert sum(step["batch_size"] for step in [first, *others]) == 2 * NUM_ROWS
    assert audit(folder).problems == ()


@pytest.mark.parametrize(
    "saves", ["enable_async_checkpointing=False", "enable_async_checkpointing=True"]
)
def test_a_preempted_run_resumes_within_its_epoch(setup, saves):
    folder = setup.fresh_folder()
    ends = (
        "metric_logger._component_=support.stops.AskingToEnd",
        "metric_logger.at_step=3",
        "save_every_n_steps=1",
    )
    with pytest.raises(AssertionError, match="exit status"):
        setup.run_in_process(OURS, *ON_CUDA, saves, *ends, f"output_dir={folder}")
    again = ("save_every_n_steps=1", "resume_from_checkpoint=True", f"output_dir={folder}")
    setup.run_in_process(OURS, *ON_CUDA, saves, *again)
    assert [start["progress"]["epoch_steps"] for start in records(folder, "start")] == [0, 3]
    assert [step["step"] for step in records(folder, "step")] == list(
        range(1, 2 * NUM_ROWS // 4 + 1)
    )
    assert audit(folder).problems == ()


def test_two_ranks_probe_survive_an_oom_of_one_and_resume(setup, monkeypatch):
    monkeypatch.setenv("EMULATE_DEVICE_COUNT", "2")
    monkeypatch.setenv("EMULATE_COPIED_BYTES", "65536")
    monkeypatch.setenv("EMULATE_CAPACITY", str(500 * MIB + ROOM - 40 * MIB))
    folder = setup.run(
        OURS, *ON_CUDA, MAXIMUM, *SQUEEZED, "save_every_n_steps=1", "epochs=1", ranks=2
    ).output_dir
    assert 1 < bound(folder) < NUM_ROWS // 2
    change, *_ = records(folder, "limit")
    assert change["out_of_memory"]
    assert change["message"].startswith("out of memory on rank 0 with")
    first, second = (step["micro_batches"] for step in records(folder, "step"))
    assert first == 1 < second
    resumed = (
        "save_every_n_steps=1",
        "epochs=2",
        "resume_from_checkpoint=True",
        f"output_dir={folder}",
    )
    setup.run(OURS, *ON_CUDA, MAXIMUM, *resumed, ranks=2)
    assert [start["resumed"] for start in records(folder, "start")] == [False, True]
    assert sum(step["batch_size"] for step in records(folder, "step")) == 2 * NUM_ROWS
    assert audit(folder).problems == ()
