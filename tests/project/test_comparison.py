"""docs/comparison.md is what `make compare` draws from the newest records, and its sentences agree
with them.
"""

import json
import re

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    return compare


@pytest.fixture
def results(compare):
    """What the newest record of a table holds."""
    return lambda table: json.loads(compare.newest_record(table).read_text())["results"]


def test_the_page_is_drawn_from_the_newest_records(compare):
    assert compare.page_with_tables(PAGE) == PAGE


def test_every_cell_leads_to_a_record_that_names_its_command_and_no_folder(compare):
    for table in compare.CELLS:
        (name,) = re.findall(rf"^\[{table}\]: \.\./benchmarks/results/(\S+)$", PAGE, re.MULTILINE)
        record = json.loads((RESULTS / name).read_text())
        assert record["command"] == f"python benchmarks/compare_{table}.py"
        begin = PAGE.index(f"<!-- {table}: ")
        lines = re.findall(r"^\|.*\|$", PAGE[begin : PAGE.index(compare.END, begin)], re.MULTILINE)
        heading, _, *rows = lines
        assert len(rows) >= 7
        for row in rows:
            cells = row.strip("| ").split(" | ")
            assert len(cells) == heading.count("|") - 1
            assert all(re.fullmatch(rf"\[[^\]]+\]\[{table}\]", cell) for cell in cells[1:])


def test_a_table_is_drawn_anew_between_its_marks(compare, tmp_path):
    for table in compare.CELLS:
        record = json.loads(compare.newest_record(table).read_text())
        (tmp_path / f"compare_{table}-2099-01-01.json").write_text(json.dumps(record))
    drawn = compare.page_with_tables(PAGE, tmp_path)
    assert drawn.count("(../benchmarks/results/compare_resume-2099-01-01.json)") == 1
    without_tables = re.sub(r"(<!-- \w+: .*?-->).*?(<!-- end -->)", r"\1\2", PAGE, flags=re.DOTALL)
    assert without_tables == re.sub(
        r"(<!-- \w+: .*?-->).*?(<!-- end -->)", r"\1\2", drawn, flags=re.DOTALL
    )


def test_where_peers_resume_exactly_the_page_says_so(results):
    found = {result["way"]: result for result in results("resume")}
    exact = {name for name, result in found.items() if result["same_bits"]}
    assert {name for name in exact if not name.startswith("ours")} == {
        "Trainer",
        "accelerate: skip_first_batches, seedable sampler, generator",
        "accelerate: stateful loader, seedable sampler, generator",
    }
    assert {name for name in found if name.startswith("ours")} <= exact
    assert "**Trainer is as exact as ours**" in PAGE


def test_what_the_page_says_of_estimators_is_in_the_record(results):
    found = {result["estimator"]: result for result in results("estimators")}
    assert abs(found["PyTorch's MemTracker"]["worst"]) < 0.002
    assert "**PyTorch's MemTracker is within 0.2%**" in PAGE
    ours = max(found.items(), key=lambda item: item[0].startswith("ours"))[1]
    assert (ours["worst"], ours["said_fits"]) == (pytest.approx(0, abs=1e-4), 0)
    assert found["accelerate estimate-memory, float16"]["said_fits"] > 0
    assert found["accelerate estimate-memory, float16"]["median"] == min(
        result["median"]
        for name, result in found.items()
        if not name.startswith(("ours", "PyTorch"))
    )


def test_what_the_page_says_of_searches_is_in_the_record(results):
    for result in results("searches"):
        if result["search"].startswith("ours"):
            assert (result["found"], result["differs"]) == (result["true"], [])
        if result["search"] == "accelerate":
            assert result["differs"] == []
    (trainer,) = (
        result
        for result in results("searches")
        if (result["search"], result["lengths"]) == ("auto_find", "varying")
    )
    assert {"weights", "optimizer"} <= set(trainer["differs"])
    assert "In Trainer the steps before that row stay in the\n  weights" in PAGE


def test_where_deepspeed_pads_as_little_as_ours_the_page_says_so(results):
    found = {result["way"]: result for result in results("batching")}
    (tuned,) = (result for way, result in found.items() if re.match(r"DeepSpeed: seqlen, ", way))
    assert tuned["batches_over_budget"] == 0
    assert abs(tuned["padding"] - found["ours: seqlen"]["padding"]) < 0.005
    assert {result["rows_lost"] for way, result in found.items() if "DeepSpeed" in way} == {1}
    assert "**its padding is as low as ours**" in PAGE


def test_where_grouping_by_length_pads_less_than_ours_the_page_says_so(results):
    found = {result["way"]: result for result in results("batching")}
    theirs = next(result for way, result in found.items() if way.startswith("Hugging Face"))
    assert theirs["batches_over_budget"] == 0
    assert theirs["padding"] < found["ours: seqlen, window 1024"]["padding"]
    assert theirs["batches"] // found["ours: seqlen"]["batches"] in (3, 4)
    assert "**It pads less than ours in the data's order, and slightly less\n" in PAGE
    assert "are three to four times as many" in " ".join(PAGE.split())
