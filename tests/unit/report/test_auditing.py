"""The audit passes runs that use each row once per epoch, and fails corrupted logs."""

import json
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.examples import examples

from adaptive_batch.__main__ import main
from adaptive_batch.errors import SettingError
from adaptive_batch.report import audit
from adaptive_batch.report.auditing import audit_records
from adaptive_batch.schedules import Progress


@dataclass(frozen=True)
class Run:
    """A simulated run that writes the records of training and can be killed after any record."""

    rows: int = 20
    batches: tuple[int, ...] = (4, 8, 8)  # of each epoch
    save_every: int = 2
    drop_last: bool = False
    long_rows: tuple[int, ...] = ()  # dropped in each epoch
    name: str = "a"
    seed: int = 0

    def order(self, epoch):
        rows = [row for row in range(self.rows) if row not in self.long_rows]
        random.Random(self.seed * 1000 + epoch).shuffle(rows)
        return rows

    def process(self, saves):
        """Yield the records of a process that resumes the newest of `saves`; append its saves."""
        progress = saves[-1] if saves else Progress()
        start = {"resumed": bool(saves), "progress": progress.state_dict()}
        yield {"kind": "start", "rows": self.rows, "run": self.name, **start}
        while progress.epoch < len(self.batches):
            epoch, batch = progress.epoch, self.batches[progress.epoch]
            order = self.order(epoch)
            if self.long_rows and not progress.epoch_rows:
                yield {"kind": "dropped", "epoch": epoch, "rows": list(self.long_rows)}
            while rows := order[progress.epoch_rows : progress.epoch_rows + batch]:
                if self.drop_last and len(rows) < batch:
                    break
                progress = progress.after_step(rows=len(rows), tokens=10 * len(rows))
                place = {"step": progress.steps, "epoch": epoch, "position": progress.epoch_rows}
                loss = 1 / (progress.steps + sum(rows))
                seen = {"samples_seen": progress.samples, "tokens_seen": progress.tokens}
                sizes = {"rows": rows, "asked": batch, "batch_size": len(rows)}
                rates = {"loss": loss, "lr": batch / 1000}
                yield {"kind": "step", **place, **sizes, **rates, **seen}
                if progress.steps % self.save_every == 0:
                    saves.append(progress)
                    yield {"kind": "resume_point", "step": progress.steps}
            used = progress.epoch_rows
            cut = len(order) - used
            reasons = {"drop_last": cut, "max_steps_per_epoch": 0, "long_rows": len(self.long_rows)}
            counts = {"used": used, "left_out": self.rows - used, "reasons": reasons}
            yield {"kind": "epoch", "epoch": epoch, **counts}
            progress = progress.after_epoch()
            saves.append(progress)
            yield {"kind": "checkpoint", "epoch": epoch, "steps": progress.steps}
        yield {"kind": "end"}

    def records(self, kills=()):
        return [json.loads(line) for line in self.lines(kills)]

    def lines(self, kills, *, completes=True):
        """Return the lines of a log.

        A kill is (records before it, share of the last line, lost saves).
        """
        lines, saves = [], []
        for after, share, lost in kills:
            written = []
            for record in self.process(saves):
                written.append(json.dumps(record))
                if len(written) >= after:
                    break
            else:
                return lines + written
            if share < 1:
                written[-1] = written[-1][: int(share * len(written[-1]))]
            lines += written
            del saves[max(1, len(saves) - lost) :]
        if completes:
            lines += [json.dumps(record) for record in self.process(saves)]
        return lines


def written(folder, lines):
    (folder / "adaptive_batch").mkdir(exist_ok=True)
    (folder / "adaptive_batch" / "run.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


RUNS = st.builds(
    Run,
    rows=st.integers(7, 40),  # a step at least in each epoch
    batches=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    save_every=st.integers(1, 6),
    drop_last=st.booleans(),
    long_rows=st.sets(st.integers(0, 4), max_size=2).map(tuple),
    seed=st.integers(0, 5),
)
KILLS = st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 2)), max_size=6)


@given(RUNS, KILLS, st.booleans())
@example(  # the second start has no step and ends the epoch
    Run(rows=7, batches=(4,), save_every=1, drop_last=True, long_rows=(0,)),
    [(4, 1.0, 0), (3, 1.0, 0)],
    True,
)
def test_a_run_with_random_kills_and_resumes_passes(tmp_path_factory, run, kills, completes):
    folder = tmp_path_factory.mktemp("run")
    found = audit(written(folder, run.lines(kills, completes=completes)))
    lines = run.lines(kills, completes=completes)
    begun = any('"kind": "start"' in line and line.endswith("}") for line in lines)
    assert found.problems == (() if begun else ("the beginning of the run is not in the log",))


CORRUPTIONS = {
    "a row twice": lambda step, _: {"rows": [step["rows"][0], *step["rows"][:-1]]},
    "a row of an earlier step": lambda step, run: {
        "rows": [run.order(step["epoch"])[0], *step["rows"][1:]]
    },
    "a missing row": lambda step, _: {"rows": step["rows"][1:]},
    "a missing row and a smaller batch": lambda step, _: {
        "rows": step["rows"][1:],
        "batch_size": step["batch_size"] - 1,
    },
    "a foreign row": lambda step, run: {"rows": [run.rows, *step["rows"][1:]]},
    "a row as text": lambda step, _: {"rows": ["1", *step["rows"][1:]]},
    "rows unknown": lambda _, __: {"rows": None},
    "another step number": lambda step, _: {"step": step["step"] + 1},
    "an earlier step number": lambda step, _: {"step": step["step"] - 1},
    "another epoch": lambda step, _: {"epoch": step["epoch"] + 1},
    "another position": lambda step, _: {"position": step["position"] + 1},
    "other samples": lambda step, _: {"samples_seen": step["samples_seen"] - 1},
    "another batch size": lambda step, _: {"batch_size": step["batch_size"] + 1},
    "fewer tokens": lambda step, _: {"tokens_seen": -1},
}


@pytest.mark.parametrize("name", CORRUPTIONS)
@given(data=st.data(), run=RUNS, kills=KILLS)
@examples(40)
def test_a_corrupted_step_fails(name, data, run, kills):
    run = replace(run, batches=tuple(max(2, batch) for batch in run.batches))
    records = run.records([(after, 1.0, lost) for after, _, lost in kills])
    assert audit_records(records).holds
    latest = {
        record["step"]: place for place, record in enumerate(records) if record["kind"] == "step"
    }
    step = data.draw(st.sampled_from(sorted(latest)))
    changed = records[latest[step]]
    values = CORRUPTIONS[name](changed, run)
    if values.get("rows") == changed["rows"]:
        return  # nothing was changed: the step has one row, or the first of the epoch
    records[latest[step]] = {**changed, **values}
    assert not audit_records(records).holds


@given(data=st.data(), run=RUNS, kills=KILLS, torn=st.booleans(), saves_lost=st.booleans())
def test_a_lost_or_torn_step_fails(data, run, kills, torn, saves_lost):
    """A kill may also lose the following records of saves and of the end of the epoch."""
    records = run.records([(after, 1.0, lost) for after, _, lost in kills])
    latest = {
        record["step"]: place for place, record in enumerate(records) if record["kind"] == "step"
    }
    place = latest[data.draw(st.sampled_from(sorted(latest)))]
    rest = records[place + 1 :]
    following = [i for i, record in enumerate(rest) if record["kind"] in ("step", "start")]
    # A log that ends before the lost step is a valid log.
    if saves_lost and following:
        del rest[: following[0]]
    found = audit_records([*records[:place], *([None] if torn else []), *rest])
    assert not found.holds
    assert ("1 of them torn" in found.lines[0]) == torn


@given(data=st.data(), run=RUNS)
def test_a_corrupted_end_of_an_epoch_fails(data, run):
    records = run.records()
    place = data.draw(
        st.sampled_from([i for i, record in enumerate(records) if record["kind"] == "epoch"])
    )
    ending = records[place]
    values = data.draw(
        st.sampled_from(
            [
                {"used": ending["used"] + 1},
                {"left_out": ending["left_out"] + 1},
                {"used": ending["used"] - 1, "left_out": ending["left_out"] + 1},
                {"reasons": {**ending["reasons"], "drop_last": ending["reasons"]["drop_last"] + 1}},
                {"epoch": ending["epoch"] + 1},
            ]
        )
    )
    records[place] = {**ending, **values}
    assert not audit_records(records).holds


def test_a_dropped_row_must_be_recorded_and_not_used():
    run = Run(rows=10, batches=(4,), long_rows=(3,))
    records = run.records()
    assert audit_records(records).holds
    records[1] = {**records[1], "rows": [4]}
    assert "rows used, and listed as dropped: 4" in " ".join(audit_records(records).problems)
    without = [record for record in run.records() if record["kind"] not in ("dropped", "epoch")]
    assert audit_records(without).problems == (
        "epoch 0: rows never used, and not recorded as left out: 3",
    )


def test_a_note_names_a_repeated_step_that_differs():
    records = Run(batches=(4,), save_every=3).records([(7, 1.0, 0)])
    steps = [record.get("step") for record in records if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 4, 5]
    assert "repeats  2 steps; not yet: 0" in audit_records(records).lines
    again = next(i for i, record in enumerate(records) if i > 7 and record["kind"] == "step")
    rows = records[again]["rows"]
    records[again] = {**records[again], "rows": rows[::-1], "loss": 9.5, "lr": 9.5}
    found = audit_records(records)
    assert found.holds
    assert "note     step 4 differs from its rolled-back attempt in rows, loss, lr" in found.lines


def test_a_log_without_a_start_fails():
    records = Run().records()
    assert audit_records(records[1:]).problems[0] == "the beginning of the run is not in the log"
    twice = Run(save_every=3).records([(7, 1.0, 0)])
    joined = [record for record in twice if not record.get("resumed")]
    problems = audit_records(joined).problems
    assert problems[0].startswith("epoch 0, step 4: rows used twice")
    assert problems[1].startswith("step 4: step 4 instead of 6")
    assert not audit_records([]).holds


def test_a_resumed_run_must_continue_at_its_last_step():
    records = Run(save_every=3).records([(7, 1.0, 0)])
    place = next(i for i, record in enumerate(records) if record.get("resumed"))
    for name in ("samples", "tokens", "epoch_rows", "epoch"):
        start = records[place]
        changed = {**start, "progress": {**start["progress"], name: start["progress"][name] + 1}}
        found = audit_records([*records[:place], changed, *records[place + 1 :]])
        assert found.problems[0].startswith("resumed at step 3")


def test_the_exit_status_of_the_command_is_1_if_the_audit_fails(tmp_path, capsys):
    lines = Run().lines([(7, 0.5, 0), (5, 1.0, 1)])
    assert main(["audit", str(written(tmp_path, lines))]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("run log  ")
    assert "1 of them torn" in out[0]
    assert out[-1].startswith("verdict  holds: ")
    assert len([line for line in out if line.endswith(": 20 of 20 rows used")]) == 3
    assert main(["audit", str(written(tmp_path, lines[:-3]))]) == 0
    written(tmp_path, [line for line in lines if '"step": 5,' not in line])
    assert main(["audit", str(tmp_path)]) == 1
    assert "DOES NOT HOLD" in capsys.readouterr().out.splitlines()[-1]


def test_a_folder_without_a_log_exits_with_2(tmp_path, capsys):
    for folder in (tmp_path / "no", tmp_path):
        with pytest.raises(SystemExit) as stopped:
            main(["audit", str(folder)])
        assert stopped.value.code == 2
        assert "OUTPUT_DIR" in capsys.readouterr().err
        with pytest.raises(SettingError, match="OUTPUT_DIR"):
            audit(folder)
