"""adaptive_full_finetune through the real command line."""

import json
import shutil
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file
from support import components
from support.cli import NUM_ROWS, OURS, block, records
from support.tasks import ADAPTERS

from adaptive_batch.errors import DoesNotFitError, SettingError

KEY = "batch_increase_function"


def probe_file(finished):
    return json.loads((finished.output_dir / "adaptive_batch" / "probe.json").read_text())


def test_the_run_log_has_the_steps_without_a_metric_logger(small, tmp_path):
    config = tmp_path / "silent.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(small.config), {"metric_logger": None}), config)
    finished = small.run_in_process(OURS, "epochs=1", "max_steps_per_epoch=1", config=str(config))
    assert [record["step"] for record in records(finished, "step")] == [1]


def test_the_searched_batch_is_a_power_of_two_and_grows_each_epoch_up_to_the_bound(small):
    components.ASKED.clear()
    keys = ("use_maximum_batch_size=True", "probe.device_memory=24MiB", "epochs=3")
    grown = small.run_in_process(OURS, f"{KEY}=support.components.four_more", *keys)
    found = probe_file(grown)
    bound = found["max_batch_size"]
    fitting = {trial["batch_size"] for trial in found["trials"] if trial["fits"]}
    assert {bound, found["batch_size"]} <= fitting
    assert found["batch_size"] == 2 ** (bound.bit_length() - 1)
    assert records(grown, "step")[0]["batch_size"] == found["batch_size"]
    changes = [record for record in records(grown, "batch_size") if "epoch" in record]
    assert [record["epoch"] for record in changes] == [0, 1, 2]
    for record in changes:
        assert record["requested"] == record["before"] + (4 if record["epoch"] else 0)
        assert record["after"] == min(record["requested"], bound)
    # The calls before weights load, at the start with the plan, and at each later epoch.
    assert [epoch for epoch, _ in components.ASKED] == [0, 1, 2, 0, 1, 2, 1, 2]


def test_the_bound_of_a_search_accounts_for_gradient_accumulation(small):
    finished = small.run_in_process(
        OURS,
        "use_maximum_batch_size=True",
        "gradient_accumulation_steps=4",
        "epochs=1",
        "probe.device_memory=1GiB",
    )
    assert (
        probe_file(finished)["max_batch_size"] == NUM_ROWS // 4
    )  # one step of four micro-batches per epoch
    (step,) = records(finished, "step")
    assert (step["batch_size"], step["micro_batches"]) == (NUM_ROWS, 4)


@pytest.mark.slow
def test_the_search_recipe_refuses_a_length_that_does_not_fit(small, capsys):
    longer = ("model.max_seq_len=2048", "probe.sequence_lengths=[8,2048]")
    with pytest.raises(DoesNotFitError, match="one row of 2048 tokens needs"):
        small.run_in_process("adaptive_probe", *longer, "probe.device_memory=12MiB")
    assert "max_batch_size: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_terminal_shows_the_configuration_only_if_verbose(small):
    keys = ("use_maximum_batch_size=True", "probe.device_memory=64MiB", "max_steps_per_epoch=3")
    run = small.run(OURS, *keys)
    lines = run.output.splitlines()
    assert len(lines) <= 40, run.output
    assert "resolved config" not in run.output
    folder = run.output_dir
    report = f"adaptive-batch report {folder}"
    assert lines[-1] == f"saved in {folder / 'epoch_1'}; next: {report}"
    (record,) = records(run, "config")
    assert f"run {OURS} --config {small.config} " in record["settings"]["command"]
    assert "with resolved config:" in small.run(OURS, *keys, "verbose=True").output


def test_a_dataset_without_labels_is_refused_and_a_step_without_one_is_logged(small):
    output = small.fresh_folder()
    rows = block("dataset", "support.components.OfLengths", lengths=[3] * 8)
    masked = (*rows, f"dataset.unlabelled={list(range(8))}", f"output_dir={output}")
    with pytest.raises(SettingError, match="no row has a label after its first token"):
        small.run_in_process(OURS, *masked)
    assert not list(output.iterdir())
    one_label = (*masked, f"dataset.unlabelled={list(range(1, 8))}")
    left_out = ("shuffle=True", "batch_size=1", "max_steps_per_epoch=1")
    finished = small.run_in_process(OURS, *one_label, *left_out)
    assert [record["step"] for record in records(finished, "no_labels")] == [1, 2]


def test_weights_of_another_model_are_refused_in_one_line(small):
    with pytest.raises(
        SettingError,
        match=r"^model='torchtune.models.qwen2.qwen2': the checkpoint is of another model: Missing"
        r" key\(s\) .*layers\.2\..* give the model",
    ) as error:
        small.run_in_process(OURS, "model.num_layers=3")
    assert str(error.value).isprintable()


def test_the_error_names_a_truncated_base_checkpoint(small):
    base = small.fresh_folder() / "base"
    shutil.copytree(small.folder / "base", base)
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(SettingError, match=r"model\.safetensors.* copy or download them again"):
        small.run_in_process(OURS, f"checkpointer.checkpoint_dir={base}")


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        (OURS, ()),
        (ADAPTERS.ours, ADAPTERS.keys),
        (ADAPTERS.ours, (*ADAPTERS.keys, "save_adapter_weights_only=True")),
    ],
    ids=["weights", "merged", "adapters"],
)
def test_an_epoch_that_the_disk_cannot_hold_is_refused_before_the_first_step(
    small, monkeypatch, recipe, keys
):
    keys = (*keys, "epochs=1", "max_steps_per_epoch=1")
    epoch = small.run_in_process(recipe, *keys).output_dir / "epoch_0"
    files = epoch.glob("*.safetensors")
    saved = sum(tensor.nbytes for path in files for tensor in load_file(path).values())
    free = SimpleNamespace(free=saved - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    folder = small.fresh_folder()
    says = r"^output_dir='.*': an epoch takes [\d.]+ [KM]iB, but only [\d.]+ [KM]iB are free"
    with pytest.raises(SettingError, match=says):
        small.run_in_process(recipe, *keys, f"output_dir={folder}")
    assert not records(folder, "step")
    free.free = saved
    assert records(small.run_in_process(recipe, *keys), "step")
