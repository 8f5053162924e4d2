"""A short form of benchmarks/pays.py: the ways that it compares train, on the same tokens, in the
steps that their formulas give.
"""

import pytest
from support.paths import ROOT

ROWS, BATCH, RATE = 512, 8, 4e-3


@pytest.fixture
def pays(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pays

    return pays


@pytest.mark.nightly
def test_ways_take_the_same_tokens_in_the_steps_of_their_formulas(pays, tmp_path):
    pays.prepare(tmp_path, rows=ROWS, seeds=[0])
    bench = pays.Bench(tmp_path, rows=ROWS, jobs=2)
    ways = (
        pays.constant(BATCH, RATE),
        pays.seesaw(BATCH, RATE),
        pays.seesaw(BATCH, RATE, times=4, companions=True),
    )
    runs = {run["name"]: run for run in bench.run(ways)}
    constant, seesaw, capped = (runs[way.name] for way in ways)
    assert {run["tokens"] for run in runs.values()} == {ROWS * pays.LENGTH}
    assert constant["steps"] == ROWS // BATCH
    expected = pays.WARM_UP + (1 - pays.WARM_UP) / 2  # of a half cosine
    assert seesaw["steps"] / constant["steps"] == pytest.approx(expected, abs=0.05)
    assert seesaw["steps"] < capped["steps"] < constant["steps"]
    assert capped["largest_batch"] == 4 * BATCH
    for run in runs.values():
        assert (
            run["train"][0] > run["held_out"] > 3
        )  # from log(2048) = 7.6; what is predicted is not told
    row = pays.compared(seesaw["name"], bench.runs, constant["name"])
    assert row["loss_over_base"] == seesaw["held_out"] / constant["held_out"] - 1
