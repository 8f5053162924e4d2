"""Programs of others that run under emulate can be found again: benchmarks/emulated_programs.py."""

import re
from collections import Counter
from pathlib import Path

import pytest


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import emulated_programs

    return emulated_programs.programs()


def test_each_program_has_a_commit_and_a_device_for_each_rank(programs):
    assert max(Counter(row["name"] for row in programs).values()) == 1
    for row in programs:
        assert re.fullmatch(r"[0-9a-f]{40}", row["commit"]), row
        assert re.fullmatch(r"\d*", row["max_steps"]), row
        ranks = re.search(r"--(?:nproc_per_node|num_processes)[= ](\d+)", row["command"])
        assert int(row["devices"]) >= int(ranks[1] if ranks else 1), row
