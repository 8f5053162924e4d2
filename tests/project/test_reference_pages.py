"""The reference lists all public names, and the fields of files and estimates."""

import json
import re
from importlib import import_module

import torch
from support.paths import ROOT
from support.torch_versions import PAIRS

import adaptive_batch
from adaptive_batch.checkpoint.checkpoint import FORMAT_VERSION

PAGE = (ROOT / "docs" / "configuration.md").read_text()


def rows_of(header):
    """Return the rows of the table that begins with this cell: {first cell: second cell}."""
    table = PAGE.split(f"| {header} |", 1)[1].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {first: (rest or [""])[0] for first, *rest in cells}


def names_in(cell):
    return re.findall(r"`(\w+)`", cell)


def test_the_reference_lists_each_public_name():
    listed = re.findall(r"^::: ([\w.]+)$", PAGE, re.MULTILINE)
    public = [name for name in listed if name.count(".") == 1]
    assert sorted(public) == sorted(f"adaptive_batch.{name}" for name in adaptive_batch.__all__)
    for module, _, name in (name.rpartition(".") for name in listed):
        assert hasattr(import_module(module), name)


def test_the_files_have_the_fields_that_are_stable(small):
    run = small.run_in_process(
        "adaptive_full_finetune",
        "epochs=2",
        "max_steps_per_epoch=2",
        "save_every_n_steps=1",
        "batch_increase_function._component_=adaptive_batch.schedules.geometric",
        "batch_increase_function.factor=2",
        "grow_beyond_maximum=True",
        "use_maximum_batch_size=True",
        "probe.maximum=2",
    )
    folder = run.output_dir / "adaptive_batch"
    records = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert all({"kind", "time"} <= record.keys() for record in records)
    assert all("message" in record for record in records if record["kind"] != "step")
    # Both a search and a growth function set sizes; their fields differ.
    sizes = [record for record in records if record["kind"] == "batch_size"]
    assert {"bound" in record for record in sizes} == {True, False}
    for kind, fields in rows_of("record of `run.jsonl`").items():
        of_kind = [record for record in records if record["kind"] == kind.strip("`")]
        assert of_kind, kind
        for record in of_kind:
            assert set(names_in(fields)) <= record.keys()
    files = rows_of("file")
    probe = json.loads((folder / "probe.json").read_text())
    assert set(names_in(files["`adaptive_batch/probe.json`"])) <= probe.keys()
    (checkpoint,) = run.output_dir.glob("step_1")
    manifest = json.loads((checkpoint / "resume.json").read_text())
    assert manifest["format_version"] == FORMAT_VERSION
    assert f"`format_version` {FORMAT_VERSION} in `resume.json`" in files["`step_N/`"]
    assert (run.output_dir / "epoch_0" / "adaptive_batch.json").is_file()


def test_an_estimate_has_the_fields_that_are_stable(tmp_path):
    model = torch.nn.Linear(8, 8)
    estimate = adaptive_batch.estimate_memory(
        model,
        torch.zeros(2, 8),
        torch.optim.SGD(model.parameters(), lr=0.1),
        ["24GiB", "H100"],
        mean_loss=lambda batch: model(batch).square().mean(),
    )
    estimate.save(tmp_path / "estimate.json")
    written = json.loads((tmp_path / "estimate.json").read_text())
    fields = {
        part: set(names_in(cell)) for part, cell in rows_of("part of `estimate.json`").items()
    }
    assert fields["the whole"] <= written.keys()
    for device in written["devices"]:
        assert fields["each of `devices`"] <= device.keys()
        for length in device["lengths"]:
            assert fields["each of `lengths` of a device"] <= length.keys()


def test_the_versions_are_those_that_the_tests_run_on():
    assert list(rows_of("torch")) == [torch for torch, _ in PAIRS]
    assert [cell.strip() for cell in rows_of("torch").values()] == [python for _, python in PAIRS]
