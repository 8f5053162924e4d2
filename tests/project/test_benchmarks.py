"""Only the newest result of each benchmark is kept, and each command of a result exists."""

import json
import logging
import re

import pytest
from support.paths import ROOT

from adaptive_batch.probe import BinarySearch, Trial, run_search

FOLDER = ROOT / "benchmarks"
NEWEST = json.loads((FOLDER / "results" / "newest.json").read_text())


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import harness

    return harness


def test_a_record_is_kept_only_if_something_reads_it_and_is_the_newest(harness):
    records = {path.name for path in harness.RESULTS.glob("*-20*.json")}
    kept = {f"{name}-{NEWEST[name]['date']}.json" for name in harness.READ}
    assert records == kept


def test_the_newest_figures_have_the_scripts_that_measured_them():
    for name, entry in NEWEST.items():
        script = re.search(r"benchmarks/(\w+)\.py", entry["command"])[1]
        assert (FOLDER / f"{script}.py").exists(), name
        assert entry["figures"], name


def test_a_run_writes_its_rows_and_counts_and_fails_where_a_case_is_wrong(
    harness, tmp_path, capsys
):
    def run(cases):
        with pytest.raises(SystemExit) as ended:
            harness.run(
                "sum",
                tmp_path,
                cases,
                lambda case: {"case": case, "sum": sum(case)},
                columns="case:>4 sum:>4",
                errors=lambda row: ["too large"] if row["sum"] > 3 else [],
                figures=lambda rows: {"total": sum(row["sum"] for row in rows)},
            )
        (path,) = tmp_path.glob("sum-20*.json")
        return ended.value.code, json.loads(path.read_text())

    code, record = run([(1, 2), (3,)])
    assert code == 0
    assert (record["total"], record["errors"]) == (6, 0)
    assert [row["sum"] for row in record["cases"]] == [3, 3]
    assert harness.figures_of(record)["cases"] == 2
    code, record = run([(1, 2), (3, 4)])
    assert code == 1
    assert record["errors"] == 1
    assert "WRONG too large" in capsys.readouterr().out
    assert run([])[0] == 1


def test_a_short_form_does_not_replace_the_newest_figures(harness, tmp_path, monkeypatch):
    newest = tmp_path / "newest.json"
    newest.write_text("{}")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "NEWEST", newest)
    for arguments, places in (([], 9), (["--quick"], 1), ([], 8)):
        monkeypatch.setattr("sys.argv", ["benchmarks/faults.py", *arguments])
        harness.write("kills", tmp_path, places=places)
        entry = json.loads(newest.read_text())["kills"]
        assert entry["command"].endswith("benchmarks/faults.py")
        assert entry["figures"] == {"places": 9 if places == 1 else places}
    (record,) = tmp_path.glob("kills-20*.json")
    assert json.loads(record.read_text())["places"] == 8


def test_the_trials_of_a_search_are_counted_by_its_log(monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(FOLDER))
    import search_in_trainers

    search = search_in_trainers.Search()
    handler = search_in_trainers.TrialsInLog(search)
    log = logging.getLogger("adaptive_batch")
    log.addHandler(handler)
    with caplog.at_level(logging.INFO, log.name):
        result = run_search(lambda rows: Trial(rows, rows < 4), search=BinarySearch(maximum=8))
    log.removeHandler(handler)
    assert search.trials == [(trial.batch_size, trial.fits) for trial in result.trials] != []
