"""Published figures of memory have their sources, and each is estimated or has a reason; all of
them: benchmarks/published.py.
"""

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
def test_on_ranks_what_is_sharded_is_shared(published):
    estimate = published.trainer_step(
        "bigcode/gpt_bigcode-santacoder", is_lora=False, keeps_logits=False, length=2048
    )
    length = estimate.lengths[0]
    one, four = (
        published.forward_backward_bytes(length, 8, ranks=ranks, width=1) for ranks in (1, 4)
    )
    assert one == pytest.approx(length.curve.peak_bytes(8), rel=1e-9)
    assert one - four > 0.7 * length.resident.total - length.resident.parameters / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [pytest.param(4, marks=pytest.mark.nightly), 8]
)  # the peak is the optimizer's step, and the loss
def test_a_published_peak_is_met_by_the_same_code(published, rows):
    row = next(
        one
        for one in published.rows_of_table()
        if one.id.endswith(f"base-gpt_bigcode-santacoder-none-1x{rows}-full")
    )
    found = published.compare(row)
    assert found.group == published.SAME_CODE
    assert abs(found.error) < 1e-3
    assert found.fits


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("identifier", ["tt-ladder-packed+compile+chunkedCE", "tt-ladder-+AC"])
def test_a_published_peak_of_a_compiled_step_is_met(published, identifier):
    (row,) = (row for row in published.rows_of_table() if row.id == identifier)
    comparison = published.compare(row)
    assert comparison.group == published.COMPILED
    assert abs(comparison.error) < 0.03
