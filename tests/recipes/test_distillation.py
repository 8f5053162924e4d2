"""Distillation through the real command line: what adapts the batch works as for other rows."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file
from support.cli import FINDS, figures, records, same_weights
from support.distillation import FULL, LORA, METRICS, OURS, write_teacher
from support.stops import stopped_after

from adaptive_batch.errors import SettingError
from adaptive_batch.report import audit

# AdamW would turn rounding into steps.
SGD = ("optimizer=torch.optim.SGD", "optimizer.lr=0.05", "epochs=1")
SPLITS = {
    "rows": ("micro_batch_size=3",),
    "tokens, packed": ("micro_batch_tokens=150", "micro_batch_layout=packed"),
    "as much as fits": ("micro_batch_size=auto", "probe.device_memory=8MiB"),
    "as many tokens as fit": ("micro_batch_tokens=auto", "probe.device_memory=8MiB"),
}


@pytest.fixture(scope="module")
def lora(small):
    return (*LORA, *write_teacher(small))


@pytest.fixture(scope="module")
def full(small):
    return (*FULL, *write_teacher(small))


@pytest.fixture(scope="module")
def whole(small, lora):
    return small.run_in_process(OURS, *lora, *SGD, "batch_size=16")


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(split, marks=[pytest.mark.slow] * (split == "as many tokens as fit"))
        for split in SPLITS
    ],
)
def test_losses_and_metrics_do_not_depend_on_the_split(small, lora, whole, split):
    divided = small.run_in_process(OURS, *lora, *SGD, "batch_size=16", *SPLITS[split])
    assert min(figures(divided, "micro_batches")) > 1
    for name in ("loss", *METRICS):
        assert figures(divided, name) == pytest.approx(figures(whole, name), rel=1e-5), name
    assert audit(divided.output_dir).holds


def test_every_weight_of_a_student_is_trained(small, full):
    """The order of a step's rows does not change with its split."""
    own = (*full, *SGD, "batch_size=16")
    whole, divided = (
        small.run_in_process(OURS, *own, f"micro_batch_size={size}") for size in (16, 5)
    )
    assert figures(divided, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-5)
    assert figures(whole, "loss")[-1] < figures(whole, "loss")[0]


def test_the_bound_is_the_same_whatever_searches_for_it(small, lora):
    bounds = {}
    for search in ("predict", "binary"):
        found = small.run_in_process(
            OURS, *lora, *FINDS, f"probe.search={search}", "probe.cache=False"
        )
        (bounds[search],) = (record["max_batch_size"] for record in records(found, "bound"))
    assert bounds["predict"] == bounds["binary"] > 1
    probed = small.run_in_process(
        "adaptive_probe", *lora, "probe.device_memory=24MiB", "probe.cache=False",
        "probe.round_to_power_of_two=False",
    )  # fmt: skip
    saved = json.loads((probed.output_dir / "adaptive_batch" / "probe.json").read_text())
    assert saved["max_batch_size"] == bounds["binary"]


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


def test_another_ratio_is_named_on_resuming(small, lora, capsys):
    own = (*lora, "epochs=2", "max_steps_per_epoch=1", "save_every_n_steps=1")
    begun = small.run_in_process(OURS, *own)
    shutil.rmtree(begun.output_dir / "epoch_1")
    small.run_in_process(
        OURS, *own, f"output_dir={begun.output_dir}", "resume_from_checkpoint=True",
        "kd_ratio=0.9", "preview=True",
    )  # fmt: skip
    assert "kd_ratio" in capsys.readouterr().out


def test_the_batch_grows_with_its_rate_and_is_validated(small, lora):
    held_out = (
        "dataset_val._component_=torchtune.datasets.instruct_dataset",
        "dataset_val.source=json",
        f"dataset_val.data_files={small.folder}/train.jsonl",
        "dataset_val.column_map.input=signature",
        "dataset_val.column_map.output=docstring",
        "dataset_val.split=train",
        "dataset_val.train_on_input=False",
        "run_val_every_n_steps=4",
        "batch_size_val=5",
    )
    finished = small.run_in_process(
        OURS, *lora, *held_out, "epochs=2", "grow_beyond_maximum=True",
        "batch_increase_function=support.components.four_more", "probe.device_memory=24MiB",
        "lr_scaling=sqrt", "log_gradient_noise_scale=True",
    )  # fmt: skip
    sizes = figures(finished, "batch_size")
    assert sizes[-1] == sizes[0] + 4
    (first, *_) = map(float, finished.figures("val_loss"))
    assert first == pytest.approx(figures(finished, "loss")[0], rel=0.1)


@pytest.mark.parametrize(
    ("recipe", "overrides", "key", "says"),
    [
        ("adaptive_lora_finetune", (), "teacher_model", "`tune run adaptive_distill`"),
        (OURS, ("~teacher_model",), "teacher_model", "it is missing"),
        (OURS, ("kd_ratio=2",), "kd_ratio", "give a number from 0 to 1"),
        (OURS, ("teacher_model.vocab_size=77",), "teacher_model", "it has 77 token embeddings"),
        (
            OURS,
            ("teacher_checkpointer.checkpoint_dir=nowhere",),
            "teacher_checkpointer",
            "nowhere",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_before_weights_load(
    small, lora, recipe, overrides, key, says
):
    own = [*lora, *overrides]
    if "~teacher_model" in own:
        own = [override for override in own if not override.startswith("teacher_model")]
        own.remove("~teacher_model")
    if key != "teacher_checkpointer":
        own.append("checkpointer.checkpoint_dir=nowhere")
    with pytest.raises(SettingError, match=says) as refused:
        small.run_in_process(recipe, *own)
    assert refused.value.key == key


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
