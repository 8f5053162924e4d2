"""docs/comparison.md is what `make compare` draws from the newest records."""

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
