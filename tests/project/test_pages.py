"""Every block of code of a page is run or checked.

bash     tests/project/test_commands_of_pages.py runs each command (`pytest -m readme`), except
           make           CI runs it; this file checks its targets
           pip            CI runs it through make; this file checks its extras and files
           tune run       with more than two ranks or downloaded weights; this file parses it
           tune download  this file parses it
python   tests/project/test_commands_of_pages.py runs the blocks of a page as one program
yaml     keys and values are checked here
text     after commands: their output; elsewhere an example that nothing runs
"""

import re
import shlex
import subprocess
from importlib import import_module
from itertools import pairwise

import pytest
import yaml
from omegaconf import OmegaConf
from support.pages import PAGES, ROOT, blocks, blocks_of, is_read_only
from torchtune import config
from torchtune._cli.tune import TuneCLIParser

from adaptive_batch.config_files import config_files
from adaptive_batch.torchtune import Settings
from adaptive_batch.torchtune.configuration import TORCHTUNE_KEYS
from adaptive_batch.torchtune.settings import OURS

PROGRAMS = {"tune", "adaptive-batch", "python", "make", "pip"}
BLOCKS = blocks()
COMMANDS = [command for block in BLOCKS if block.language == "bash" for command in block.commands]
THEIRS = {*TORCHTUNE_KEYS, "model_dir", "teacher_dir", "demo_dir"}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_checked(page):
    found, indented = blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))
    assert {block.language for block in found} <= {"bash", "python", "yaml", "text"}
    assert indented == [], "fence this code: without a language nothing runs it"


def test_every_command_is_of_a_known_program_and_quoted():
    """zsh refuses an unquoted pattern that matches no file."""
    for command in COMMANDS:
        assert shlex.split(command)[0] in PROGRAMS, command
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
        assert re.findall(r"\S*[\[\]{}*?]\S*", bare) == [], command


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "yaml"], ids=lambda block: block.name
)
def test_a_yaml_block_is_read_as_settings(block, tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(
        "def my_function(epoch, batch_size): return 0\ndef my_rule(progress): return 8\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert set(yaml.safe_load(block.text)) - THEIRS - set(OURS) == set()
    whole = OmegaConf.merge(
        OmegaConf.load(config_files()["demo_cpu"]), OmegaConf.create(block.text)
    )
    Settings.from_config(OmegaConf.to_container(whole, resolve=True))


READ_ONLY = [
    block for block in BLOCKS if block.language == "bash" and any(map(is_read_only, block.commands))
]


@pytest.mark.parametrize("block", READ_ONLY, ids=lambda block: block.name)
def test_a_command_for_a_larger_machine_is_read_by_its_parsers(block):
    """The shell joins the words."""
    played = 'tune() { printf "%q " "$@"; echo; }\n'
    command = ["bash", "-euc", played + block.text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    recipes = {path.stem for path in (ROOT / "recipes").glob("adaptive_*.py")}
    for line in done.stdout.splitlines():
        read = TuneCLIParser()._parser.parse_args(shlex.split(line))
        if line.startswith("download "):
            continue
        assert read.recipe in recipes
        flag, name, *settings = read.recipe_args
        assert (flag, [setting for setting in settings if "=" not in setting]) == ("--config", [])
        cfg = OmegaConf.merge(
            OmegaConf.load(config_files()[name]), OmegaConf.from_dotlist(settings)
        )
        assert set(cfg) - THEIRS - set(OURS) == set()
        config.validate(cfg)
        Settings.from_config(OmegaConf.to_container(cfg, resolve=True))


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for c in COMMANDS if c.startswith("make ") for word in c.split()[1:]}
    assert "test" in named
    assert named <= targets


def test_extras_and_files_of_pip_exist():
    project = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    extras = set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))
    told = [shlex.split(command) for command in COMMANDS if command.startswith("pip ")]
    assert told
    for words in told:
        assert all((ROOT / file).is_file() for flag, file in pairwise(words) if flag == "-c")
        named = re.findall(r"\[(.*?)]", " ".join(words))
        assert {extra for names in named for extra in names.split(",")} <= extras


def test_the_architecture_names_public_names_and_paths_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text().split("## Architecture")[1]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / "adaptive_batch").glob("*/__init__.py")}
    assert {name for name, _ in rows} == packages | {"recipes"}
    for package, names in rows:
        if package == "recipes":
            public = {path.stem for path in (ROOT / "recipes").glob("*.py")}
        else:
            public = set(import_module(f"adaptive_batch.{package}").__all__)
        assert set(re.findall(r"`(\w+)`", names)) <= public, package
    for path in re.findall(r"`(\w+(?:/\w+)+\.py)`", page):
        folders = (ROOT, ROOT / "adaptive_batch", ROOT / "tests")
        assert any((folder / path).exists() for folder in folders), path
