"""Estimates print the output of the pages. They need no weights and take minutes."""

import shlex
from itertools import pairwise

import pytest
from support.pages import blocks, is_read_only
from support.processes import run

SHOWN = [
    pytest.param(block.commands[0], following.text, id=block.name)
    for block, following in pairwise(blocks())
    if following.is_output and is_read_only(block.commands[0])
]


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "text"), SHOWN)
def test_an_estimate_prints_what_its_page_shows(tmp_path, command, text):
    program, *arguments = shlex.split(command)
    (done,) = run([program, *arguments, f"output_dir={tmp_path}"], folder=tmp_path, timeout=500)
    assert done.exit_status == 0, done.output[-3000:]
    printed = [line.rstrip() for line in done.output.splitlines()]
    assert [line for line in text.splitlines() if line.rstrip() not in printed] == []
    assert (tmp_path / "adaptive_batch" / "estimate.json").is_file()


def test_pages_show_estimates():
    assert len(SHOWN) >= 2
