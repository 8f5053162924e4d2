"""Commands of docs/many_gpus.md name what exists, and its figures follow from their formulas."""

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
SENTENCES = " ".join(DOCS.split())
NUM_PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496}
GIB = 1024**3


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


def test_the_figures_of_the_docs_follow_from_their_formulas():
    s = {name: number * 2 * 7 / 8 / GIB for name, number in NUM_PARAMETERS.items()}
    assert f"S = {s['8B']:.1f} GiB; with 70B, {s['70B']:.1f} GiB" in SENTENCES
    n = 8
    assert (
        f"{3 * n * s['8B']:.0f} GiB become {(2 * n + 1) * s['8B']:.0f}"
        f" ({1 - (2 * n + 1) / (3 * n):.0%} less)" in SENTENCES
    )
    assert (
        f"{2 * n * s['8B']:.0f} become {(n + 1) * s['8B']:.0f} ({1 - (n + 1) / (2 * n):.0%} less)"
        in SENTENCES
    )
    saved = (n - 1) * s["8B"]
    assert (
        f"the {saved:.0f} GiB are {saved / 200:.1f} s a step; at 25 GiB/s, as between nodes,"
        f" {saved / 25:.1f} s" in SENTENCES
    )
    for size, ranks in ((8, 8), (6, 8), (4, 8), (8, 16)):
        assert f"| {size} | {NUM_PARAMETERS['70B'] * size / ranks / GIB:.1f} GiB |" in SENTENCES
    for size in (8, 6):
        assert f"{NUM_PARAMETERS['70B'] * size / GIB:.1f} GiB" in SENTENCES
