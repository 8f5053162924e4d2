"""Every command and Python block of the pages works as it is written, from a folder of the user's.

Each page is gone through from its top, in a folder such as `make demo` leaves. What is not run
here, and why, is in tests/project/test_pages.py.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import demo
import pytest
from omegaconf import OmegaConf
from support.pages import PAGES, ROOT, Block, blocks, is_read_only

from adaptive_batch.config_files import config_path

BLOCKS = blocks()
BY_CI = ("make ", "pip ")

pytestmark = pytest.mark.readme


def parts():
    """Of each page in its order: its commands, with what they print where the page says so; and its
    Python as one program. With ``--dist loadgroup`` a page is run by one worker.
    """
    found = []
    for page in PAGES:
        first = len(found)
        here = [block for block in BLOCKS if block.page == page]
        python = [block for block in here if block.language == "python"]
        for block, following in zip_longest(here, here[1:]):
            if block.language == "bash":
                commands = [
                    c for c in block.commands if not c.startswith(BY_CI) and not is_read_only(c)
                ]
                for command in commands:
                    says = (
                        following
                        if following and following.is_output and command == commands[-1]
                        else None
                    )
                    found.append(pytest.param(command, says, id=f"{block.name}-{command[:60]}"))
            if block.language == "yaml" and block.file:
                found.append(pytest.param(block, None, id=f"{block.name}-{block.file}"))
            if python and block is python[-1]:
                found.append(pytest.param(f"python {program_of(page)}", None, id=f"{page}-python"))
        of_page = pytest.mark.xdist_group(page)
        found[first:] = [part._replace(marks=(of_page,)) for part in found[first:]]
    return found


def program_of(page):
    """The file of a page's Python."""
    return re.sub(r"\W", "_", page) + ".py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what `make demo` has left, or leaves now, and the Python that the pages show:
    under the name that a block carries, and as one program for each page.
    """
    folder = tmp_path_factory.mktemp("user")
    if not (ROOT / demo.DIRECTORY / "tuned" / "epoch_2").is_dir():
        subprocess.run([sys.executable, "examples/demo"], cwd=ROOT, check=True)
    shutil.copytree(ROOT / demo.DIRECTORY, folder / demo.DIRECTORY)
    for block in BLOCKS:
        if block.language == "python":
            if block.file:
                (folder / block.file).write_text(block.text)
            with (folder / program_of(block.page)).open("a") as program:
                program.write(block.text)
    return folder


@pytest.mark.parametrize(("command", "says"), parts())
def test_a_command_works_and_prints_what_its_page_says(folder, command, says):
    if isinstance(command, Block):  # lines to add to the file that a command has made
        with (folder / command.file).open("a") as file:
            file.write(f"\n{command.text}")
        return
    if command == "tune run adaptive_full_finetune --config my_qwen2.yaml":
        train_the_demo_instead(folder / "my_qwen2.yaml")
    printed = [without_times(line) for line in run(folder, command).splitlines()]
    if says is not None:
        assert [line for line in says.text.splitlines() if without_times(line) not in printed] == []


def run(folder, command):
    """Run a command in a folder, as on a machine that has searched nothing yet; return what it
    prints.
    """
    program, *arguments = shlex.split(command.replace("OUTPUT_DIR", "adaptive_batch_demo/tuned"))
    found = {"tune": [str(Path(sys.executable).parent / "tune")], "python": [sys.executable]}[
        program
    ]
    fresh = {**os.environ, "ADAPTIVE_BATCH_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [*found, *arguments],
        cwd=folder,
        env=fresh,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train_the_demo_instead(config):
    """In a config for a GPU and weights of the hub, put the demo's model and data on a CPU; all
    else stays.
    """
    shipped = OmegaConf.load(config_path("demo_cpu"))
    demo_parts = OmegaConf.masked_copy(
        shipped, ["demo_dir", "model", "tokenizer", "checkpointer", "dataset"]
    )
    here = {"device": "cpu", "dtype": "fp32", "output_dir": "./mine", "max_steps_per_epoch": 1}
    OmegaConf.save(
        OmegaConf.merge(
            OmegaConf.load(config), demo_parts, here, {"probe": {"device_memory": "256MiB"}}
        ),
        config,
    )


@pytest.mark.xdist_group("README.md")
def test_the_commands_that_the_demo_ends_with_work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    output_dir = Path("adaptive_batch_demo") / "tuned"
    lines = runpy.run_path(str(ROOT / "examples" / "demo" / "__main__.py"))["next_steps"](
        demo.DIRECTORY, output_dir
    )
    commands = [
        line.strip() for line in lines.splitlines() if line.startswith("  ") and "# " not in line
    ]
    assert len(commands) == 3
    for command in commands:
        program, _, rest = command.partition(" ")
        assert Path(program).exists(), program
        run(folder, f"{Path(program).name} {rest}")


def without_times(line):
    """A line of output without the two columns of a trial that tell how long it took."""
    return re.sub(r" +\d+\.\d\d +[\d,]+\.\d$", "", line).strip()


@pytest.mark.xdist_group("README.md")
def test_the_readmes_figure_is_drawn_from_a_run_by_the_command_that_contributing_gives(folder):
    assert "python docs/tools/readme_figure.py" in (ROOT / "CONTRIBUTING.md").read_text()
    draw = runpy.run_path(str(ROOT / "docs" / "tools" / "readme_figure.py"))["main"]
    draw(folder / "adaptive_batch_demo" / "tuned", folder / "demo.png")
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
