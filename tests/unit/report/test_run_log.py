"""The run log is one JSON object per line and survives a kill."""

import math

import pytest

from adaptive_batch.errors import SettingError
from adaptive_batch.report import RunLog, read_records
from adaptive_batch.report.run_log import iterate_records


def test_steps_and_events_are_read_in_order(tmp_path, caplog):
    path = tmp_path / "deep" / "adaptive_batch" / "run.jsonl"
    with caplog.at_level("INFO", logger="adaptive_batch"), RunLog(path.parents[1]) as record:
        record.event("batch_size", "batch_size 4 -> 16", before=4, after=16)
        record.step(step=1, loss=2.5)
    first, second = read_records(path)
    assert (first["kind"], first["before"], first["after"]) == ("batch_size", 4, 16)
    assert (second["kind"], second["step"], second["loss"]) == ("step", 1, 2.5)
    assert "batch_size 4 -> 16" in caplog.text


def test_nan_and_infinities_are_written_as_text(tmp_path):
    with RunLog(tmp_path) as record:
        record.step(loss=math.nan, lr=-math.inf)
    (found,) = read_records(tmp_path / "adaptive_batch" / "run.jsonl")
    assert (found["loss"], found["lr"]) == ("nan", "-inf")


def test_a_step_after_close_is_refused(tmp_path):
    record = RunLog(tmp_path)
    record.close()
    with pytest.raises(SettingError, match=r"event='RunLog'"):
        record("step", "", step=1)


def test_a_kill_at_any_byte_loses_one_line(tmp_path):
    path = tmp_path / "adaptive_batch" / "run.jsonl"
    with RunLog(path.parents[1]) as record:
        record.step(step=1)
        record.step(step=2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first + 1, len(whole)):
        path.write_bytes(whole[:size])
        with RunLog(path.parents[1]) as record:
            record.step(step=3)
        steps = [found["step"] for found in read_records(path)]
        assert steps == ([1, 2, 3] if size == len(whole) - 1 else [1, 3])


def test_other_ranks_write_nothing(tmp_path, caplog):
    with (
        caplog.at_level("INFO", logger="adaptive_batch"),
        RunLog(tmp_path, enabled=False) as record,
    ):
        record.event("batch_size", "message")
        record.step(step=1)
    assert not list(tmp_path.iterdir())
    assert not caplog.text


def test_records_are_read_lazily_and_a_torn_line_is_none(tmp_path):
    path = tmp_path / "adaptive_batch" / "run.jsonl"
    path.parent.mkdir()
    torn = [b'{"kind": "st', b"\xff", b"17", b"[1]", b"null", b"\0" * 40, b"[" * 100_000]
    path.write_bytes(b"\n".join([b'{"kind": "step", "step": 1}', *torn, b'{"kind": "end"}\n']))
    records = iterate_records(path)
    assert next(records) == {"kind": "step", "step": 1}
    assert list(records) == [*[None] * len(torn), {"kind": "end"}]
    assert read_records(path) == [{"kind": "step", "step": 1}, {"kind": "end"}]


def test_the_log_of_another_open_run_is_refused(tmp_path):
    path = tmp_path / "adaptive_batch" / "run.jsonl"
    with RunLog(path.parents[1]) as first:
        with pytest.raises(SettingError, match="output_dir="):
            RunLog(path.parents[1])
        first.event("still", "written")
    with RunLog(path.parents[1]) as second:
        second.event("next", "written")
    assert [record["kind"] for record in read_records(path)] == ["still", "next"]
