"""The page on planning says what the code says: its table of devices, its table of changes, and
what its commands print.
"""

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.pages import ROOT, blocks, is_read_only

from adaptive_batch.config_files import config_path
from adaptive_batch.estimate.devices import DEVICES
from adaptive_batch.memory import GIB
from adaptive_batch.torchtune import FullModel
from adaptive_batch.torchtune.estimate_changes import candidates

PAGE = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8")
BLOCKS = [block for block in blocks() if block.page == "docs/estimate.md"]
# Those that a plan can run here, although tests/project/test_commands_of_pages.py does not: no
# weights are needed. It takes minutes.
SHOWN = [
    pytest.param(
        block.commands[0],
        following.text,
        id=f"{block.name}-{block.commands[0][:70]}",
        marks=pytest.mark.nightly,
    )
    for block, following in pairwise(BLOCKS)
    if following.is_output and is_read_only(block.commands[0])
]


def table_of_devices():
    """The page's table, made from the code's; a source is an address, and where it is there."""
    lines = [
        "| name | architecture | GiB | source |",
        "|---|---|---|---|",
    ]
    for device in DEVICES:
        address, _, rest = device.source.partition(", ")
        text = re.sub(r"^https://(?:github\.com/)?", "", address)
        source = f"[{text}]({address})" + (f", {rest}" if rest else "")
        size = f"{device.total_bytes / GIB:.2f}"
        lines.append(f"| {device.name} | {device.architecture} | {size} | {source} |")
    return "\n".join(lines)


def test_the_table_of_devices_is_that_of_the_code():
    assert PAGE.split("## Known devices")[1].split("\n\n")[-1].strip() == table_of_devices()


@pytest.mark.parametrize(
    ("changed", "world_size", "number"),
    [
        ([], 1, 8),
        (["loss._component_=torch.nn.CrossEntropyLoss"], 1, 8),
        (["fsdp_reshard_after_forward=False", "sync_gradients_every_micro_batch=False"], 2, 9),
    ],
)
def test_each_change_that_is_estimated_is_in_the_table_of_changes(changed, world_size, number):
    cfg = OmegaConf.merge(OmegaConf.load(config_path("demo_cpu")), OmegaConf.from_dotlist(changed))
    model = FullModel().skeleton(cfg, dtype=torch.float32)
    typed = {one.overrides[0] for one in candidates(cfg, model, tokens=512, world_size=world_size)}
    assert len(typed) >= number
    rows = re.findall(
        r"^\| `(.*?)\|", PAGE.split("## What one change would bring")[1], re.MULTILINE
    )
    named = {re.split(r"[= `]", row)[0] for row in rows}
    assert {re.split(r"[= ]", one)[0] for one in typed} - named == set()


@pytest.mark.parametrize(("command", "says"), SHOWN)
def test_a_plan_prints_what_the_page_says(tmp_path, command, says):
    program, *arguments = shlex.split(command)
    assert program == "tune"
    done = subprocess.run(
        [Path(sys.executable).parent / "tune", *arguments, f"output_dir={tmp_path}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert [line for line in says.splitlines() if line.rstrip() not in printed] == []
    assert (tmp_path / "adaptive_batch" / "estimate.png").is_file()
    assert f"drawn in {tmp_path / 'adaptive_batch' / 'estimate.png'}" in printed


def test_the_page_has_commands_with_what_they_print():
    assert len(SHOWN) == 2
