"""A run that ended on all ranks records the reason for its next start only."""

import json
from types import SimpleNamespace

import pytest

from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.torchtune.resume import LostRun

CONDITIONS = {"layout": "padded", "ranks": 2}


def lost_run(folder, *, resumes=True, trials_name="search"):
    cfg = SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resumes)
    job = SimpleNamespace(cfg=cfg, settings=SimpleNamespace(on_out_of_memory="shrink"))
    return LostRun(job, trials_name=trials_name)


def end(folder, **facts):
    (folder / "adaptive_batch").mkdir(exist_ok=True)
    lost_run(folder).write_down("error", "it ended", facts, conditions=lambda: CONDITIONS)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "adaptive_batch").mkdir()
    return tmp_path / "adaptive_batch" / "lost.json"


def test_a_limit_is_restored_only_under_the_same_conditions(tmp_path, path):
    end(tmp_path, error="connection reset")
    assert not path.exists()
    end(tmp_path, limit=12, unit="rows", doing="a step")
    again = lost_run(tmp_path)
    assert again.limit(CONDITIONS) == MicroBatchLimit(12, "rows")
    assert again.limit({**CONDITIONS, "layout": "packed"}) is None
    assert again.trial_rows("trial_rows") is None
    assert "doing" not in json.loads(path.read_text())


def test_recorded_trials_are_restored_only_for_the_same_search(tmp_path):
    end(tmp_path, trial_rows=8)
    end(tmp_path, trial_rows_reference=4, limit=3, unit="tokens")
    again = lost_run(tmp_path)
    assert [again.trial_rows(key) for key in ("trial_rows", "trial_rows_reference")] == [8, 4]
    assert again.limit(CONDITIONS) == MicroBatchLimit(3, "tokens")
    other_question = lost_run(tmp_path, trials_name="another dataset")
    assert other_question.trial_rows("trial_rows") is None
    assert other_question.limit(CONDITIONS) == MicroBatchLimit(3, "tokens")


def test_a_new_run_in_the_folder_deletes_the_record(tmp_path, path):
    end(tmp_path, trial_rows=8)
    new = lost_run(tmp_path, resumes=False)
    assert new.trial_rows("trial_rows") is None
    # The new run may still be refused.
    assert path.exists()
    lost_run(tmp_path).begin()
    assert path.exists()
    new.begin()
    assert not path.exists()
