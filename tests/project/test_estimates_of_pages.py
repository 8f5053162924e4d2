"""Estimates print the output on the pages. They need no weights, and take minutes."""

import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from support.pages import blocks, is_read_only

SHOWN = [
    pytest.param(block.commands[0], following.text, id=block.name)
    for block, following in pairwise(blocks())
    if following.is_output and is_read_only(block.commands[0])
]


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "text"), SHOWN)
def test_an_estimate_prints_what_its_page_shows(tmp_path, command, text):
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments, f"output_dir={tmp_path}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert [line for line in text.splitlines() if line.rstrip() not in printed] == []
    assert (tmp_path / "adaptive_batch" / "estimate.png").is_file()


def test_pages_show_estimates():
    assert len(SHOWN) >= 2
