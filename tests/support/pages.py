"""The pages of the documentation, and their blocks of code."""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise

from support.paths import ROOT

PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    "CONTRIBUTING.md",
]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # path of the page
    line: int  # line of the opening fence
    language: str
    text: str
    is_output: bool = False  # whether it is the output of the commands before it

    @property
    def name(self):
        return f"{self.page}:{self.line}"

    @property
    def file(self):
        """Name of the file in the block's first line, or None."""
        found = re.match(r"# ([\w/]+\.(?:py|yaml))\n", self.text)
        return found and found[1]

    @property
    def commands(self):
        """Commands of a shell block, with continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page, text):
    """Return the fenced blocks of a page, and the lines of indented code outside them."""
    blocks, indented = [], []
    begin, before, after_blank = None, "prose", True
    for number, line in enumerate(text.splitlines(), 1):
        if fence := re.match(r" *(?:```+|~~~+) *(\S*)", line):
            if begin is None:
                begin, language, content = number, fence[1], []
            else:
                is_output = language == "text" and before == "bash"
                blocks.append(Block(page, begin, language, "\n".join(content) + "\n", is_output))
                begin, before = None, language
        elif begin is not None:
            content.append(line)
        elif line.strip():
            if after_blank and re.match(r" {4}|\t", line):
                indented.append(number)
            before = "prose"
        after_blank = not line.strip()
    assert begin is None, f"{page}:{begin}: a block that is not closed"
    return blocks, indented


def blocks():
    """Return the fenced blocks of all pages, in order."""
    return [
        block
        for page in PAGES
        for block in blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))[0]
    ]


def is_read_only(command):
    """Return whether a command needs a cluster, more than two ranks, or downloaded weights."""
    words = shlex.split(command)
    if words[:2] == ["tune", "download"]:
        return True
    given = {word: following for word, following in pairwise(words) if word.startswith("-")}
    large = int(given.get("--nproc_per_node", 1)) > 2 or "--nnodes" in given
    return words[:2] == ["tune", "run"] and (
        large or given["--config"] not in ("demo_cpu", "my_qwen2.yaml")
    )
