"""The gallery's pictures are those that its tool makes, and its blocks what the commands print.

Its commands of the demo are run by tests/project/test_commands_of_pages.py.
"""

import re
import runpy
import shlex
from itertools import pairwise

import pytest
from support.commands import run_command
from support.pages import ROOT, blocks, is_read_only

BLOCKS = [block for block in blocks() if block.page == "docs/gallery.md"]
TOOL = runpy.run_path(str(ROOT / "docs" / "tools" / "gallery.py"))


def test_its_pictures_are_drawn_by_its_tool_and_small():
    page = (ROOT / "docs" / "gallery.md").read_text()
    pictures = re.findall(r"!\[[^]]{50,}\]\(images/(\S+)\)", page)
    assert sorted(pictures) == sorted(TOOL["PICTURES"].values())
    for name in pictures:
        picture = (ROOT / "docs" / "images" / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 200_000


def test_each_of_its_commands_shows_what_it_prints():
    commands = [block for block in BLOCKS if block.language == "bash"]
    assert len(commands) == 3
    assert sum(block.is_output for block in BLOCKS) == 3
    assert len(TOOL["SHOWN"].findall((ROOT / "docs" / "gallery.md").read_text())) == 3


@pytest.mark.readme
def test_the_estimate_prints_and_draws_what_the_gallery_shows(tmp_path):
    (shown,) = [
        (block.commands[0], following.text)
        for block, following in pairwise(BLOCKS)
        if block.language == "bash" and is_read_only(block.commands[0])
    ]
    command, text = shown
    status, printed, errors = run_command(
        shlex.split(command), folder=tmp_path, environment={}, timeout=300
    )
    assert status == 0, errors[-3000:]
    assert set(text.splitlines()) - {line.rstrip() for line in printed.splitlines()} == set()
    assert (tmp_path / "estimated" / "adaptive_batch" / "estimate.png").is_file()
