"""The README is short, and its figures are those of the records of its commands."""

import json
import re

from support.paths import ROOT

README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def record_of(command):
    """Return the newest record of a command of the README."""
    assert f"`{command}`" in README
    name = re.search(r"benchmarks/(\w+)\.py", command)[1]
    newest = max(RESULTS.glob(f"{name}-20*.json"))
    record = json.loads(newest.read_text())
    assert record["command"] == command
    return record


def test_the_readme_has_few_words():
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 700


def test_the_first_figure_is_that_of_the_searches():
    results = record_of("python benchmarks/search_in_trainers.py")["results"]
    ours = [found for found in results if found["search"] == "ours"]
    assert sum(found["found"] == found["true"] for found in ours) == len(ours) == 18
    assert "**18 of 18** searches" in README
    assert max(len(found["trials"]) for found in ours) == 4
    assert {found["out_of_memory"] for found in ours} == {0}


def test_the_second_figure_is_that_of_the_estimates():
    groups = record_of("python benchmarks/published.py")["groups"]
    (group,) = [group for group in groups if group["group"] == "the same code"]
    assert group["rows"] == 17
    # Two runs of Mistral-7B fitted, although their estimate reserves more than the device has.
    assert group["fit_or_oom_right"] == 15
    assert group["worst"] < 0.0008
    assert "**17 of 17** published peaks" in README
    assert "within 0.08%" in README


def test_the_third_figure_is_that_of_the_kills():
    record = record_of("python benchmarks/kills.py --kills 60")
    runs = sum(case["runs"] for case in record["cases"])
    assert (runs, record["kills"], record["differing"]) == (127, 660, 0)
    assert "**127** runs, killed and resumed **660** times" in README
