"""Each published figure has a source and an estimate or a reason, as in benchmarks/published.py."""

import re
from collections import Counter
from pathlib import Path

import pytest


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import published

    return published


def test_each_row_has_a_source_and_is_estimated_or_has_a_reason(published):
    rows = published.rows_of_table()
    assert max(Counter(row.id for row in rows).values()) == 1
    assert all(row.source and row.gib for row in rows)
    for row in rows:
        reasons = [
            reason for pattern, reason in published.NO_ESTIMATE if re.search(pattern, row.id)
        ]
        assert row.is_fms or row.id == "tt-ladder-packed" or reasons, row.id
        assert not row.is_fms or row.model in published.MODELS, row.id


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [pytest.param(4, marks=pytest.mark.nightly), 8]
)  # the peak is the optimizer's step, and the loss
def test_the_estimate_of_a_published_peak_is_exact_for_the_same_code(published, rows):
    row = next(
        one
        for one in published.rows_of_table()
        if one.id.endswith(f"base-gpt_bigcode-santacoder-none-1x{rows}-full")
    )
    found = published.compare(row)
    assert found["group"] == published.SAME_CODE
    assert abs(found["error"]) < 1e-3
    assert found["fits"]
