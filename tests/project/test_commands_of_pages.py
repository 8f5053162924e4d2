"""Each command and Python block of a page works as written, in a new folder.

The blocks of a page run in order, with the files of the demo. tests/project/test_pages.py lists
the commands that are not run here.
"""

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
from support.processes import run as run_processes

from adaptive_batch.config_files import config_files

BLOCKS = blocks()
DEMO = ROOT / "examples" / "demo"

pytestmark = pytest.mark.readme


def steps_of(page):
    """Yield (command, the block of its output or None) and (lines to add to a file, None)."""
    here = [block for block in BLOCKS if block.page == page]
    python = [block for block in here if block.language == "python"]
    for block, following in zip_longest(here, here[1:]):
        if block.language == "bash":
            commands = [
                command
                for command in block.commands
                if not command.startswith(("make ", "pip ", "python examples/"))
                and not is_read_only(command)
            ]
            for command in commands:
                is_shown = following and following.is_output and command == commands[-1]
                yield command, following if is_shown else None
        if block.language == "yaml" and block.file:
            yield block, None
        if python and block is python[-1]:
            yield f"python {program_of(page)}", None


def program_of(page):
    """Return the file of a page's Python."""
    return re.sub(r"\W", "_", page) + ".py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the demo's files and the Python of the pages."""
    folder = tmp_path_factory.mktemp("user")
    if (ROOT / demo.DIRECTORY / "tuned" / "epoch_2").is_dir():
        shutil.copytree(ROOT / demo.DIRECTORY, folder / demo.DIRECTORY)
    else:
        subprocess.run([sys.executable, DEMO], cwd=folder, check=True)
    for block in BLOCKS:
        if block.language == "python":
            if block.file:
                (folder / block.file).write_text(block.text)
            with (folder / program_of(block.page)).open("a") as program:
                program.write(block.text)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if any(steps_of(page))])
@pytest.mark.timeout(1800)
def test_each_command_of_a_page_works_and_prints_its_output(folder, page):
    for command, output in steps_of(page):
        if isinstance(command, Block):  # lines to add to the file that a command has made
            with (folder / command.file).open("a") as file:
                file.write(f"\n{command.text}")
            continue
        if command == "tune run adaptive_full_finetune --config my_qwen2.yaml":
            train_the_demo_instead(folder / "my_qwen2.yaml")
        printed = {line.strip() for line in run(folder, command).splitlines()}
        shown = output.text.splitlines() if output is not None else []
        assert [line for line in shown if line.strip() not in printed] == [], command


def run(folder, command):
    """Return the output of a command with an empty cache of searches."""
    (ended,) = run_processes(
        shlex.split(command.replace("OUTPUT_DIR", "adaptive_batch_demo/tuned")),
        folder=folder,
        environment=lambda rank: {"ADAPTIVE_BATCH_CACHE": str(folder / "cache")},
        timeout=500,
    )
    assert ended.exit_status == 0, f"{command}\n{ended.output[-3000:]}"
    return ended.output


def train_the_demo_instead(path):
    """Put the demo's model and data on a CPU into a config for a GPU and downloaded weights."""
    shipped = OmegaConf.load(config_files()["demo_cpu"])
    parts = ["demo_dir", "model", "tokenizer", "checkpointer", "dataset"]
    here = {"device": "cpu", "dtype": "fp32", "output_dir": "./mine", "max_steps_per_epoch": 1}
    small = {"probe": {"device_memory": "256MiB"}}
    merged = OmegaConf.merge(
        OmegaConf.load(path), OmegaConf.masked_copy(shipped, parts), here, small
    )
    OmegaConf.save(merged, path)


def test_the_commands_that_the_demo_ends_with_work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    lines = runpy.run_path(str(DEMO / "__main__.py"))["next_steps"](
        demo.DIRECTORY, Path("adaptive_batch_demo") / "tuned"
    )
    commands = [line.partition("  # ")[0].strip() for line in lines.splitlines()]
    assert commands
    for command in commands:
        program, _, rest = command.partition(" ")
        run(folder, f"{Path(program).name} {rest}")


def test_the_demo_of_preferences_prefers_held_out_pairs(folder):
    printed = run(folder, f"python {DEMO} --dpo micro_batch_tokens=null max_steps_per_epoch=16")
    figures = dict(re.findall(r"^(base|tuned) +(\d\.\d+ +-?[\d.]+)", printed, re.MULTILINE))
    assert figures["base"].split() == ["0.000", "0.000"]
    accuracy, margin = map(float, figures["tuned"].split())
    assert accuracy > 0.8
    assert margin > 0


def test_the_readmes_figure_is_drawn_from_a_run(folder):
    draw = runpy.run_path(str(ROOT / "docs" / "tools" / "readme_figure.py"))["main"]
    draw(folder / "adaptive_batch_demo" / "tuned", folder / "demo.png")
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
