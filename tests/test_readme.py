"""Every command of the README, and of the page on many GPUs, works as it is written, from a folder of the user's own."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = "".join((Path(__file__).parents[1] / path).read_text() for path in ("README.md", "docs/many_gpus.md"))
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.strip().splitlines()]
RUN_BY_CI = {
    "make demo",
    "make check",
    "make test",
    "pip install -c constraints.txt -e '.[recipes,report]'",
}  # make installs too

pytestmark = pytest.mark.readme


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the Python files that the README shows, under the names that they carry."""
    folder = tmp_path_factory.mktemp("user")
    for language, block in BLOCKS:
        if language == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
            (folder / name[1]).write_text(block)
    return folder


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in RUN_BY_CI])
def test_a_command_of_the_readme_works(folder, command):
    program, *arguments = shlex.split(command)
    found = {"tune": [str(Path(sys.executable).parent / "tune")], "python": [sys.executable]}[program]
    done = subprocess.run([*found, *arguments], cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
