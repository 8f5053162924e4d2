"""The audit of a run log: each row is used exactly once in every epoch, across all restarts.

One walk compares each record that counts with the values that follow from the records before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive_batch._util import count

from .run_log import Entry, Record, last_run, progress_at, records_of, whole

# Limit of printed problems and notes.
_MOST = 20
# Marks of rows in an epoch.
_USED = 1
_DROPPED = 2


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        lines: text, the verdict last.
        problems: reasons why the audit fails, one sentence each, the first twenty.
    """

    lines: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Return whether each row is used exactly once in each epoch or recorded as left out."""
        return not self.problems


def audit(output_dir: str | Path) -> Audit:
    """Audit the run log ``adaptive_batch/run.jsonl`` of an output_dir.

    Raises:
        SettingError: the folder is missing, or its log is missing or unreadable.
    """
    return audit_records(records_of(output_dir))


def audit_records(records: Iterable[Record | None]) -> Audit:
    """Audit the records of a file in order; None is a torn line."""
    all_records = list(records)
    run, num_others = last_run(record for record in all_records if record is not None)
    walk = _Walk()
    if not run.has_beginning:
        walk.problems.append("the beginning of the run is not in the log")
    for entry in run.entries:
        walk.add(entry)
    ends = [
        entry.kind == "end"
        for entry in run.entries
        if entry.counts and entry.kind in ("start", "end")
    ]
    # Without an end after the last start, the run may go on, so unused rows are no problem yet.
    walk.close_epoch(is_done=bool(ends) and ends[-1])
    lines = [f"run log  {len(all_records):,} lines, {all_records.count(None):,} of them torn"]
    if num_others:
        lines.append(f"         the last run is audited; other runs in the file: {num_others}")
    lines.append(f"starts   at step {_first_ten(walk.starts)}")
    lines += [f"epoch {epoch.number}  {epoch.describe()}" for epoch in walk.epochs]
    lines.append(f"repeats  {walk.num_repeated:,} steps; not yet: {len(walk.rolled_back):,}")
    for heading, sentences in (("note   ", walk.notes), ("problem", walk.problems)):
        lines += [f"{heading}  {sentence}" for sentence in sentences[:_MOST]]
        if len(sentences) > _MOST:
            lines.append(f"{heading}  and {len(sentences) - _MOST:,} more")
    verdict = "holds: each row is used once in each epoch, or recorded as left out"
    if walk.problems:
        verdict = f"DOES NOT HOLD: problems: {len(walk.problems):,}"
    lines.append(f"verdict  {verdict}")
    return Audit(tuple(lines), tuple(walk.problems[:_MOST]))


class _Walk:
    """Compares each record that counts with those before it, and each step with its repetitions.

    Attributes:
        epochs: epochs so far; only the last one is open.
        problems: reasons why the audit fails, one sentence each.
        notes: restarted epochs and repeated steps that differ, one sentence each.
        starts: optimizer steps before each start.
        rolled_back: records of rolled-back steps that are not repeated yet, by step.
        num_repeated: rolled-back steps that are repeated.
    """

    def __init__(self) -> None:
        self.epochs = [_Epoch(0, 0)]
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.starts: list[int] = []
        self.rolled_back: dict[int, Record] = {}
        self.num_repeated = 0
        self._totals = {"steps": 0, "samples": 0, "tokens": 0}
        # Rows of the dataset.
        self._num_rows = 0
        # Rows dropped by an epoch that has no step yet, by its number.
        self._dropped: defaultdict[int, list[Any]] = defaultdict(list)
        self._comparisons = {
            "start": self._compare_start,
            "step": self._compare_step,
            "epoch": self._compare_end_of_epoch,
            "dropped": self._add_dropped,
            "resume_point": self._compare_save,
            "checkpoint": self._compare_save,
            "epoch_restarted": self._restart_epoch,
        }

    def add(self, entry: Entry) -> None:
        """Compare the next record; if a restart has rolled it back, keep it for its repetition."""
        if entry.kind == "start":
            self.starts.append(entry.steps)
            self._num_rows = max(0, whole(entry.record, "rows") or self._num_rows)
        if entry.counts:
            compare = self._comparisons.get(entry.kind)
            if compare is not None:
                compare(entry)
        elif entry.kind == "step":
            self.rolled_back[entry.steps] = entry.record

    def close_epoch(self, *, is_done: bool) -> None:
        """Report the rows of the last epoch that are neither used nor left out."""
        epoch = self.epochs[-1]
        missing = [row for row, mark in enumerate(epoch.marks) if not mark]
        # Only the open epoch keeps its marks in memory.
        epoch.marks = bytearray()
        if missing and is_done and not epoch.has_ended:
            self.problems.append(
                f"epoch {epoch.number}: rows never used, and not recorded as left out:"
                f" {_first_ten(missing)}"
            )

    def _compare(self, subject: str, found: Record, expected: Mapping[str, int]) -> None:
        """Report the values of a record that differ from the expected ones."""
        differences = [
            f"{name} {found.get(name)} instead of {value}"
            for name, value in expected.items()
            if whole(found, name) != value
        ]
        if differences:
            self.problems.append(f"{subject}: {', '.join(differences)}")

    def _compare_start(self, entry: Entry) -> None:
        self._forget_epoch_without_step()
        epoch = self.epochs[-1]
        progress = progress_at(entry.record)
        expected = {**self._totals, "epoch": epoch.number, "epoch_rows": epoch.position}
        if progress.get("epoch") != epoch.number and (epoch.steps or epoch.has_ended):
            # Training resumes at the beginning of the next epoch.
            expected |= {"epoch": epoch.number + 1, "epoch_rows": 0}
        elif epoch.position > 0 and not epoch.has_ended:
            # Training resumes within the epoch, whose rows must be the same.
            expected["rows"] = epoch.num_rows
        else:
            # Training resumes at the beginning or end of the epoch, so its end is still to come.
            epoch.has_ended = False
        found = {**progress, "rows": self._num_rows}
        self._compare(f"resumed at step {entry.steps}", found, expected)
        self._totals = {name: whole(progress, name) or 0 for name in self._totals}

    def _compare_step(self, entry: Entry) -> None:
        record = entry.record
        subject = f"step {entry.steps}"
        epoch = self._epoch_of(entry)
        rows = _listed_rows(record)
        self.problems += epoch.mark(_USED, rows, subject)
        expected = {
            "step": self._totals["steps"] + 1,
            "batch_size": len(rows),
            "position": epoch.position + len(rows),
            "samples_seen": self._totals["samples"] + len(rows),
            # Only checked not to fall: earlier records do not tell the tokens of this step.
            "tokens_seen": max(self._totals["tokens"], whole(record, "tokens_seen") or 0),
        }
        self._compare(subject, record, expected)
        self._totals = {
            "steps": entry.steps,
            "samples": whole(record, "samples_seen") or 0,
            "tokens": whole(record, "tokens_seen") or 0,
        }
        epoch.position = whole(record, "position") or 0
        epoch.steps.append(entry.steps)
        self._compare_repeated(entry)

    def _compare_end_of_epoch(self, entry: Entry) -> None:
        epoch = self._epoch_of(entry)
        epoch.has_ended = True
        reasons = entry.record.get("reasons")
        if isinstance(reasons, Mapping):
            epoch.reasons = {
                str(reason): rows for reason, rows in reasons.items() if rows and type(rows) is int
            }
        left_out = epoch.num_rows - epoch.used
        # The names of values are part of the reported problems.
        found = {
            **entry.record,
            "left out for a reason": sum(epoch.reasons.values()),
            "left out after an error": epoch.reasons.get("an error", 0),
        }
        expected = {
            "used": epoch.used,
            "left_out": left_out,
            "left out for a reason": left_out,
            "left out after an error": 0,
        }
        self._compare(f"the end of epoch {epoch.number}", found, expected)

    def _compare_save(self, entry: Entry) -> None:
        saved = whole(entry.record, "step") or whole(entry.record, "steps") or 0
        # What is saved may be older than the last step, but not newer.
        self._compare(entry.kind, {"step": saved}, {"step": min(saved, self._totals["steps"])})

    def _add_dropped(self, entry: Entry) -> None:
        number = whole(entry.record, "epoch")
        if number is None:
            self.problems.append("dropped rows do not name their epoch")
            return
        self._dropped[number] += _listed_rows(entry.record)
        epoch = self.epochs[-1]
        # An epoch without a step may be recorded again, so its rows wait for its first step.
        if number == epoch.number and (epoch.steps or epoch.has_ended):
            self._mark_dropped(epoch)

    def _restart_epoch(self, entry: Entry) -> None:
        self._forget_epoch_without_step()
        self.notes.append(
            f"epoch {entry.record.get('epoch')} restarted after step {entry.steps} because its"
            f" data changed: {len(self.rolled_back)} earlier steps do not count"
        )
        self.rolled_back.clear()

    def _forget_epoch_without_step(self) -> None:
        """Forget what an epoch without a step has recorded: it is recorded again."""
        self._dropped.clear()
        epoch = self.epochs[-1]
        if not epoch.steps and not epoch.has_ended:
            self.epochs[-1] = _Epoch(epoch.number, self._num_rows)

    def _epoch_of(self, entry: Entry) -> _Epoch:
        """Return the epoch of a record. If the record begins an epoch, close the previous one."""
        epoch = self.epochs[-1]
        number = whole(entry.record, "epoch")
        if number != epoch.number or epoch.has_ended:
            # A next epoch is right even if the open one has no record of its end.
            if number != epoch.number + 1:
                expected = epoch.number + 1 if epoch.has_ended else epoch.number
                self.problems.append(
                    f"{entry.kind} {entry.steps} belongs to epoch {number}, expected {expected}"
                )
            if number is not None and number > epoch.number:
                self.close_epoch(is_done=True)
                epoch = _Epoch(number, self._num_rows)
                self.epochs.append(epoch)
        self._mark_dropped(epoch)
        return epoch

    def _mark_dropped(self, epoch: _Epoch) -> None:
        """Mark the rows that records before this epoch's first one list as dropped from it."""
        self.problems += epoch.mark(_DROPPED, self._dropped.pop(epoch.number, []))

    def _compare_repeated(self, step: Entry) -> None:
        """Note the values of a repeated step that differ from its last rolled-back attempt."""
        attempt = self.rolled_back.pop(step.steps, None)
        if attempt is None:
            return
        self.num_repeated += 1
        differing = [
            name for name in ("rows", "loss", "lr") if attempt.get(name) != step.record.get(name)
        ]
        if differing:
            self.notes.append(
                f"step {step.steps} differs from its rolled-back attempt in {', '.join(differing)}"
            )


class _Epoch:
    """The rows of one epoch.

    Attributes:
        steps: numbers of its steps.
        position: rows so far, as recorded by its steps.
        has_ended: whether its end is recorded.
        used: rows used by steps.
        reasons: number of unused rows for each recorded reason.
        marks: one byte for each row until the epoch is closed.
    """

    def __init__(self, number: int, num_rows: int) -> None:
        self.number = number
        self.num_rows = num_rows
        self.steps: list[int] = []
        self.position = 0
        self.has_ended = False
        self.used = 0
        self.reasons: dict[str, int] = {}
        self.marks = bytearray(num_rows)

    def mark(self, mark: int, rows: Sequence[Any], subject: str = "dropped rows") -> list[str]:
        """Mark rows as used or dropped and return problems; a row may be dropped repeatedly."""
        wrong: defaultdict[str, list[Any]] = defaultdict(list)
        for row in rows:
            # isinstance() would accept a bool as an int.
            if type(row) is not int or not 0 <= row < self.num_rows:
                wrong["rows that the dataset does not have"].append(row)
                continue
            earlier_mark = self.marks[row]
            if mark == earlier_mark == _USED:
                wrong["rows used twice"].append(row)
            elif earlier_mark in (0, mark):
                self.marks[row] = mark
                self.used += mark == _USED
            else:
                wrong["rows used, and listed as dropped"].append(row)
        place = f"epoch {self.number}, {subject}"
        return [f"{place}: {problem}: {_first_ten(which)}" for problem, which in wrong.items()]

    def describe(self) -> str:
        """Describe the steps and rows in one line."""
        steps = f"steps {self.steps[0]:,} to {self.steps[-1]:,}" if self.steps else "no step"
        line = f"{steps}: {self.used:,} of {count(self.num_rows, 'row', ',')} used"
        reasons = ", ".join(f"{reason} {rows:,}" for reason, rows in self.reasons.items())
        return f"{line}, {self.num_rows - self.used:,} left out ({reasons})" if reasons else line


def _listed_rows(record: Record) -> list[Any]:
    """Return the rows of a record; a value that is not a list becomes one invalid row."""
    rows = record.get("rows")
    return rows if isinstance(rows, list) else [None]


def _first_ten(values: Sequence[Any]) -> str:
    """List the first ten values and count the rest."""
    more = f" and {len(values) - 10:,} more" if len(values) > 10 else ""
    return ", ".join(map(repr, values[:10])) + more
