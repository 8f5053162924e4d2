"""No page has a block of code that nothing runs or checks.

What is in a block, and what holds it:

    bash     each command is run by tests/project/test_commands_of_pages.py (`pytest -m readme`),
             but for
               make           run by CI, and the site by tests/project/test_docs_site.py; that
                              there is such a target is checked here
               pip            run by CI through make; that there are such extras and such a file
                              is checked here
               tune run       for more than two ranks, or of a model that is not here: needs GPUs
                              and weights of many GB. Its words are checked here, by the parsers
                              that read them: torchrun's, torchtune's and ours
               tune download  fetches weights; its words are checked here, too
    python   run by tests/project/test_commands_of_pages.py, the blocks of a page one after another
    yaml     keys and values are checked here, by what reads a configuration; lines for a file are
             added to it before it is run
    text     that follows commands: held against what they print, by
             tests/project/test_commands_of_pages.py; elsewhere nothing runs it
"""

import re
import shlex
import subprocess
from importlib import import_module
from itertools import pairwise

import pytest
import yaml
from omegaconf import OmegaConf
from support.pages import PAGES, ROOT, Block, blocks, blocks_of, is_read_only
from torchtune import config
from torchtune._cli.tune import TuneCLIParser

from adaptive_batch.config_files import config_path
from adaptive_batch.torchtune import Settings
from adaptive_batch.torchtune.keys import TORCHTUNE_KEYS
from adaptive_batch.torchtune.settings import OURS

HELD = {"bash", "python", "yaml", "text"}
PROGRAMS = {"tune", "adaptive-batch", "python", "make", "pip"}
BLOCKS = blocks()
COMMANDS = [
    (block, command) for block in BLOCKS if block.language == "bash" for command in block.commands
]
THEIRS = {*TORCHTUNE_KEYS, "model_dir", "teacher_dir", "demo_dir"}


def unheld(block):
    """What of a block nothing runs or checks."""
    if block.language not in HELD:
        return [f"{block.name}: nothing runs {block.language or 'a block without a language'}"]
    commands = block.commands if block.language == "bash" else []
    return [
        f"{block.name}: nothing runs {command}"
        for command in commands
        if not is_read_only(command) and shlex.split(command)[0] not in PROGRAMS
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_held_by_some_test(page):
    found, indented = blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))
    assert [line for block in found for line in unheld(block)] == []
    assert indented == [], (
        "code that is indented says no language, and so nothing runs it: fence it"
    )


@pytest.mark.parametrize(
    ("block", "command"),
    COMMANDS,
    ids=[f"{block.name}-{command[:50]}" for block, command in COMMANDS],
)
def test_what_a_shell_would_take_for_names_of_files_is_quoted(block, command):
    """zsh refuses a command in which such a pattern matches nothing."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    assert re.findall(r"\S*[\[\]{}*?]\S*", bare) == []


def test_a_block_that_nothing_runs_is_found():
    page = (
        "A\n```rust\nfn\n```\n```\nx\n```\nB\n\n    tune run it\n\n```bash\n# why\ntune cat x \\\n "
        " y\ncurl z\n```\n\n```text\nz\n```\nC\n```text\nc\n```\n"
    )
    found, indented = blocks_of("page.md", page)
    assert found[2] == Block("page.md", 12, "bash", "# why\ntune cat x \\\n  y\ncurl z\n")
    assert [block.is_output for block in found] == [False, False, False, True, False]
    assert indented == [10]
    assert [line for block in found[:2] for line in unheld(block)] == [
        "page.md:2: nothing runs rust",
        "page.md:5: nothing runs a block without a language",
    ]
    assert unheld(Block("page.md", 1, "bash", "curl z\nmake test\n")) == [
        "page.md:1: nothing runs curl z"
    ]


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda block: block.name
)
def test_what_a_yaml_block_sets_is_read_as_settings(block, tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(
        "def my_function(epoch, batch_size): return 0\ndef my_rule(progress): return 8\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = yaml.safe_load(block.text)
    assert set(given) - THEIRS - set(OURS) == set()
    whole = OmegaConf.merge(OmegaConf.load(config_path("demo_cpu")), OmegaConf.create(block.text))
    Settings.from_config(OmegaConf.to_container(whole, resolve=True))


READ_ONLY = [
    block for block in BLOCKS if block.language == "bash" and any(map(is_read_only, block.commands))
]


@pytest.mark.parametrize("block", READ_ONLY, ids=lambda block: block.name)
def test_a_command_for_a_larger_machine_is_read_as_it_is_meant(block):
    """The shell puts the words together, and the parsers read them."""
    played = 'tune() { printf "%q " "$@"; echo; }\n'
    done = subprocess.run(
        ["bash", "-euc", played + block.text],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(re.findall(r"tune (run|download) ", block.text))
    for line in lines:
        read = TuneCLIParser()._parser.parse_args(shlex.split(line))
        if line.startswith("download "):
            continue
        assert read.recipe in {
            "adaptive_full_finetune",
            "adaptive_lora_finetune",
            "adaptive_dpo",
            "adaptive_distill",
            "adaptive_probe",
            "adaptive_estimate",
        }
        assert read.rdzv_endpoint in {"", "node0:29500"}
        flag, name, *settings = read.recipe_args
        assert (flag, [setting for setting in settings if "=" not in setting]) == ("--config", [])
        cfg = OmegaConf.merge(OmegaConf.load(config_path(name)), OmegaConf.from_dotlist(settings))
        assert set(cfg) - THEIRS - set(OURS) == set()
        config.validate(cfg)
        Settings.from_config(OmegaConf.to_container(cfg, resolve=True))


def test_a_target_of_make_on_a_page_is_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        word
        for _, command in COMMANDS
        if command.startswith("make ")
        for word in command.split()[1:]
    }
    assert "demo" in named
    assert named <= targets


def test_what_pip_is_told_to_install_is_there():
    project = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))
    told = [shlex.split(command) for _, command in COMMANDS if command.startswith("pip ")]
    assert ["pip", "install", "-c", "constraints.txt", "-e", ".[recipes,report]"] in told
    for words in told:
        assert words[1] == "install"
        assert all((ROOT / file).is_file() for flag, file in pairwise(words) if flag == "-c")
        assert {
            extra
            for word in words
            for extra in re.sub(r".*\[(.*)]|.*", r"\1", word).split(",")
            if extra
        } <= extras


def test_the_architecture_names_public_names_and_paths_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text().split("## Architecture")[1]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / "adaptive_batch").glob("*/__init__.py")}
    assert {name for name, _ in rows} == packages | {"recipes"}
    for package, names in rows:
        if package == "recipes":
            held = {path.stem for path in (ROOT / "recipes").glob("*.py")}
        else:
            held = set(import_module(f"adaptive_batch.{package}").__all__)
        assert set(re.findall(r"`(\w+)`", names)) - held == set(), package
    for path in re.findall(r"`(\w+(?:/\w+)+\.py)`", page):
        assert any(
            (folder / path).exists() for folder in (ROOT, ROOT / "adaptive_batch", ROOT / "tests")
        ), path
