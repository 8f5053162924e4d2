"""Every command and Python block of the pages works as it is written, from a folder of the user's.

Each page is gone through from its top, in a folder such as `make demo` leaves. What is not run
here, and why, is in tests/project/test_pages.py.
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
from support.processes import run_command

from adaptive_batch.config_files import config_path

BLOCKS = blocks()
BY_CI = ("make ", "pip ")

pytestmark = pytest.mark.readme


def parts(page):
    """What a reader of a page does, in its order: each command, with the block of what it prints
    where the page shows that; lines for a file; and the page's Python as one program.
    """
    here = [block for block in BLOCKS if block.page == page]
    python = [block for block in here if block.language == "python"]
    for block, following in zip_longest(here, here[1:]):
        if block.language == "bash":
            commands = [
                c for c in block.commands if not c.startswith(BY_CI) and not is_read_only(c)
            ]
            for command in commands:
                is_shown = following and following.is_output and command == commands[-1]
                yield command, following if is_shown else None
        if block.language == "yaml" and block.file:
            yield block, None
        if python and block is python[-1]:
            yield f"python {program_of(page)}", None


def program_of(page):
    """The file of a page's Python."""
    return re.sub(r"\W", "_", page) + ".py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with what `make demo` has left, or leaves now, and the Python that the pages show:
    under the name that a block carries, and as one program for each page.
    """
    folder = tmp_path_factory.mktemp("user")
    if (ROOT / demo.DIRECTORY / "tuned" / "epoch_2").is_dir():
        shutil.copytree(ROOT / demo.DIRECTORY, folder / demo.DIRECTORY)
    else:
        subprocess.run([sys.executable, ROOT / "examples" / "demo"], cwd=folder, check=True)
    for block in BLOCKS:
        if block.language == "python":
            if block.file:
                (folder / block.file).write_text(block.text)
            with (folder / program_of(block.page)).open("a") as program:
                program.write(block.text)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if any(parts(page))])
@pytest.mark.timeout(1800)
def test_each_command_of_a_page_works_and_prints_what_the_page_says(folder, page):
    for command, says in parts(page):
        if isinstance(command, Block):  # lines to add to the file that a command has made
            with (folder / command.file).open("a") as file:
                file.write(f"\n{command.text}")
            continue
        if command == "tune run adaptive_full_finetune --config my_qwen2.yaml":
            train_the_demo_instead(folder / "my_qwen2.yaml")
        printed = [without_times(line) for line in run(folder, command).splitlines()]
        shown = says.text.splitlines() if says is not None else []
        missing = [line for line in shown if without_times(line) not in printed]
        assert missing == [], command


def run(folder, command):
    """Run a command in a folder, as on a machine that has searched nothing yet; return what it
    prints.
    """
    status, printed, errors = run_command(
        shlex.split(command.replace("OUTPUT_DIR", "adaptive_batch_demo/tuned")),
        folder=folder,
        environment={"ADAPTIVE_BATCH_CACHE": str(folder / "cache")},
        timeout=500,
    )
    assert status == 0, f"{command}\n{errors[-3000:]}"
    return printed


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


def test_the_commands_that_the_demo_ends_with_work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    output_dir = Path("adaptive_batch_demo") / "tuned"
    lines = runpy.run_path(str(ROOT / "examples" / "demo" / "__main__.py"))["next_steps"](
        demo.DIRECTORY, output_dir
    )
    commands = [line.partition("  # ")[0].strip() for line in lines.splitlines()]
    assert len(commands) == 3
    for command in commands:
        program, _, rest = command.partition(" ")
        assert Path(program).exists(), program
        run(folder, f"{Path(program).name} {rest}")


def test_the_demo_shows_all_that_it_promises_in_few_lines(folder):
    passed_over = runpy.run_path(str(ROOT / "examples" / "demo" / "__main__.py"))["PASSED_OVER"]
    printed = (folder / "adaptive_batch_demo" / "tuned.log").read_text().splitlines()
    shown = [line for line in printed if line.strip() and not passed_over.match(line)]
    # Beside these are the 15 lines of the demo itself. A second demo says three lines more: of the
    # earlier run, of the lengths that are known, and of the bound that is tried again.
    assert len(shown) <= 48
    text = "\n".join(shown)
    (bound,) = re.findall(r"max_batch_size: (\d+)", text)
    for promise in (" packed ", "fastest: ", "16 -> 20", f"cut to the bound {bound}", "rule sqrt"):
        assert promise in text, promise


def test_the_demo_of_preferences_has_held_out_pairs_preferred(folder):
    """In a few steps, as CI has it train all of them."""
    command = f"python {ROOT / 'examples' / 'demo'} --dpo micro_batch_tokens=null"
    printed = run(folder, f"{command} max_steps_per_epoch=16")
    figures = dict(re.findall(r"^(base|tuned) +(\d\.\d+ +-?[\d.]+)", printed, re.MULTILINE))
    assert figures["base"].split() == ["0.000", "0.000"]
    accuracy, margin = map(float, figures["tuned"].split())
    assert accuracy > 0.8
    assert margin > 0


def without_times(line):
    """A line of output without the two columns of a trial that tell how long it took."""
    return re.sub(r" +\d+\.\d\d +[\d,]+\.\d$", "", line).strip()


def test_the_readmes_figure_is_drawn_from_a_run_by_the_command_that_contributing_gives(folder):
    assert "python docs/tools/readme_figure.py" in (ROOT / "CONTRIBUTING.md").read_text()
    draw = runpy.run_path(str(ROOT / "docs" / "tools" / "readme_figure.py"))["main"]
    draw(folder / "adaptive_batch_demo" / "tuned", folder / "demo.png")
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
