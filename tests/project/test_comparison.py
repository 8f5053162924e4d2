"""docs/comparison.md is what `make compare` draws from the newest records."""

import json
import re

import pytest
from support.paths import ROOT

PAGE = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    return compare


def test_the_page_is_drawn_from_the_newest_records(compare):
    assert compare.page_with_tables(PAGE) == PAGE


def test_each_table_links_a_record_that_names_its_command(compare):
    for table in compare.CELLS:
        (name,) = set(re.findall(rf"results/(compare_{table}-\S+?\.json)", PAGE))
        record = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        assert record["command"] == f"python benchmarks/compare_{table}.py"
