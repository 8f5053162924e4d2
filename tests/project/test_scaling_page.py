"""What grows with ranks is measured by the functions that training calls (long form:
benchmarks/scale.py), and docs/many_gpus.md says so.
"""

import json
import re
import shlex
import subprocess
import sys
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

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "scale.py"
PARTS = ("steps", "epochs", "exchange", "store", "objects", "sync", "memory")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    command = [sys.executable, BENCHMARK, "--quick", "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.iterdir()
    return done.stdout, json.loads(path.read_text())


@pytest.mark.nightly
def test_every_part_says_what_it_assumes_and_is_written_down(measured):
    printed, record = measured
    for part in PARTS:
        assert f"\n{part}: " in printed
        assert record[part]


@pytest.mark.nightly
def test_dealing_by_tokens_has_ranks_wait_less_than_dealing_in_turn(measured):
    _, record = measured
    by = {(row["ranks"], row["dealt_by"]): row for row in record["steps"]}
    for ranks in (8, 64):
        assert by[ranks, "tokens"]["waiting"] < by[ranks, "rows"]["waiting"] / 2
        assert by[ranks, "tokens"]["rows"] == 16 * ranks


@pytest.mark.nightly
def test_our_collectives_of_a_step_send_no_more_bytes_with_more_ranks_than_twice_their_own(
    measured,
):
    _, record = measured
    sent = [row["bytes_of_a_rank"] for row in record["exchange"]]
    assert sent == sorted(sent)
    assert sent[-1] < 2 * 108


@pytest.mark.nightly
def test_a_watchdog_holds_one_connection_to_the_store(measured):
    _, record = measured
    assert record["store"]["connections_of_watch"] == 1
    assert record["sync"]["connections_of_a_group"] == 1
    assert [row["connections"] for row in record["store"]["ranks"]] == [2 * 8, 2 * 64]


@pytest.mark.nightly
def test_what_is_sent_with_gradients_reduced_once_a_step_is_what_the_formula_says(measured):
    _, record = measured
    sync = record["sync"]
    share = (
        sync["parameters"] * 4 * (sync["ranks"] - 1) // sync["ranks"]
    )  # of an all-gather or a reduce-scatter
    assert sync["sent_bytes"]["every micro-batch"] == 3 * sync["micro_batches"] * share
    assert sync["sent_bytes"]["last"] == (2 * sync["micro_batches"] + 1) * share
    assert sync["kept_bytes"] == share


@pytest.mark.nightly
def test_what_a_config_says_of_a_forward_and_backward_is_what_is_counted(measured):
    _, record = measured
    (row,) = record["memory"]
    assert (row["model"], row["ranks"], row["rows"], row["tokens"]) == ("8B", 8, 2, 512)
    assert row["stays_gib"] == pytest.approx(NUM_PARAMETERS["8B"] * 4 / 8 / GIB, rel=0.01)
    head = config_path("llama3_1_8B_8gpu").read_text().split("\n\n")[0]
    assert f"takes {row['beside_gib']:.1f} GiB beside that for 2 rows of 512 tokens" in head


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
