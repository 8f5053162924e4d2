"""Commands of docs/many_gpus.md name what exists."""

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchtune._cli.tune import TuneCLIParser

from adaptive_batch.config_files import config_path
from adaptive_batch.torchtune.keys import TORCHTUNE_KEYS
from adaptive_batch.torchtune.settings import OURS

pytestmark = pytest.mark.slow

DOCS = (Path(__file__).parents[2] / "docs" / "many_gpus.md").read_text()
COMMANDS = [
    line[line.index("tune run") :]
    for line in re.findall(r"^(?:    )?(?:srun )?tune run .*$", DOCS, re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_docs_names_a_recipe_a_config_and_keys_that_there_are(command):
    _, *arguments = shlex.split(command)
    parsed = TuneCLIParser()._parser.parse_args(arguments)
    assert parsed.recipe in ("adaptive_full_finetune", "adaptive_probe", "adaptive_estimate")
    assert int(parsed.nproc_per_node) > 1
    option, name, *overrides = parsed.recipe_args
    assert option == "--config"
    keys = {override.split("=")[0] for override in overrides}
    assert keys <= {*OURS, *TORCHTUNE_KEYS}
    assert OmegaConf.load(config_path(name))
