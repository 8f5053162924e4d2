"""The audit of a run log: each row is used exactly once in every epoch, across all restarts.

Each record that counts is compared with the values that follow from the records before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.errors import SettingError

from .run_log import RECORD, Entry, Record, iterate_records, last_run, whole

# Limit of printed problems and notes.
_MOST = 20
# Marks of rows in an epoch.
_USED = 1
_DROPPED = 2


@dataclass(frozen=True)
class Audit:
    """Result of an audit.

    Attributes:
        lines: aligned text, the verdict last.
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
    path = Path(output_dir) / RECORD
    try:
        path.open("rb").close()
    except OSError as error:
        problem = "the folder does not exist"
        if Path(output_dir).is_dir():
            problem = f"{path} cannot be read ({error.strerror})"
        remedy = f"{problem}; give the output_dir of a run"
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy) from None
    return audit_records(iterate_records(path))


def audit_records(records: Iterable[Record | None]) -> Audit:
    """Audit the records of a file in order; None is a torn line."""
    all_records = list(records)
    run, num_others = last_run(record for record in all_records if record is not None)
    proof = _Proof(has_beginning=run.has_beginning)
    for entry in run.entries:
        proof.add(entry)
    notes, different, repeated = _compare_repeated(run.entries)
    problems = [*proof.finish(), *different]
    torn = all_records.count(None)
    lines = [("run log", f"{len(all_records):,} lines, {torn:,} of them torn")]
    if num_others:
        lines.append(("", f"the last run is audited; other runs in the file: {num_others}"))
    starts = [entry.steps for entry in run.entries if entry.kind == "start"]
    resumed = f", resumed at step {_first_ten(starts[1:])}" if starts[1:] else ""
    lines.append(("starts", f"{len(starts)}{resumed}"))
    lines += [(f"epoch {epoch.number}", epoch.describe()) for epoch in proof.epochs]
    lines.append(("repeats", repeated))
    for heading, sentences in (("note", notes), ("problem", problems)):
        lines += [(heading, sentence) for sentence in sentences[:_MOST]]
        if len(sentences) > _MOST:
            lines.append((heading, f"and {len(sentences) - _MOST:,} more"))
    verdict = f"holds: {proof.conclusion()}"
    if problems:
        verdict = f"DOES NOT HOLD: problems: {len(problems):,}"
    lines.append(("verdict", verdict))
    width = max(len(heading) for heading, _ in lines)
    text = [f"{heading:<{width}}  {sentence}" for heading, sentence in lines]
    return Audit(tuple(text), tuple(problems[:_MOST]))


class _Proof:
    """Compares each record that counts with those before it.

    Attributes:
        epochs: epochs so far; only the last one is open.
    """

    def __init__(self, *, has_beginning: bool) -> None:
        self.epochs: list[_Epoch] = []
        self._problems: list[str] = []
        # None after a reported gap: the next record is then not compared.
        self._totals: dict[str, int] | None = {"steps": 0, "samples": 0, "tokens": 0}
        # Rows of the dataset.
        self._num_rows = 0
        # Rows dropped by an epoch that has no step yet, by its number.
        self._dropped: defaultdict[int, list[Any]] = defaultdict(list)
        self._has_ended = False
        if not has_beginning:
            self._problems.append("the beginning of the run is not in the log")
            self._totals = None

    def finish(self) -> list[str]:
        """Close the last epoch and return all problems."""
        self._close(is_done=self._has_ended)
        return self._problems

    def add(self, entry: Entry) -> None:
        """Compare the next record if it counts."""
        record = entry.record
        if entry.kind == "start":
            self._num_rows = max(0, whole(record, "rows") or self._num_rows)
        if not entry.counts:
            return
        if entry.kind == "start":
            self._start(record)
        elif entry.kind == "epoch_restarted":
            self._dropped.clear()
        elif entry.kind in ("resume_point", "checkpoint"):
            saved = whole(record, "step" if entry.kind == "resume_point" else "steps") or 0
            if self._totals and saved > self._totals["steps"]:
                steps = self._totals["steps"]
                self._problems.append(f"{entry.kind} at step {saved}, expected up to step {steps}")
                self._totals = None
        elif entry.kind == "end":
            self._has_ended = True
        elif entry.kind in ("step", "epoch", "dropped"):
            self._of_epoch(entry.kind, record, whole(record, "epoch"))

    def _of_epoch(self, kind: object, record: Record, number: int | None) -> None:
        """Compare a step, the end of an epoch, or dropped rows."""
        newest = self.epochs[-1] if self.epochs else None
        is_newest = newest is not None and newest.number == number
        if number is None:
            self._problems.append(f"a record of kind {kind} does not name its epoch")
        elif kind == "dropped":
            rows = record.get("rows")
            self._dropped[number] += rows if isinstance(rows, list) else [rows]
            if newest is not None and is_newest:
                self._problems += newest.mark(_DROPPED, self._dropped.pop(number))
        elif kind == "step":
            self._step(record, self._open(number, record))
        else:
            # An epoch that resumes at its end is recorded as ended again.
            epoch = newest if newest is not None and is_newest else self._open(number, record)
            epoch.ending = record

    def _start(self, record: Record) -> None:
        """Compare the progress at a start with that after the previous step."""
        self._has_ended = False
        # An epoch without a step records its dropped rows again when it begins.
        self._dropped.clear()
        progress = record.get("progress")
        if not isinstance(progress, Mapping):
            self._problems.append("a start does not record its progress")
            return
        if self._totals is None:
            return
        epoch = self.epochs[-1] if self.epochs else _Epoch(0, self._num_rows)
        end = {**self._totals, "epoch": epoch.number, "epoch_rows": epoch.position}
        found = {name: progress.get(name) for name in end}
        is_within = epoch.position > 0 and epoch.ending is None
        if found["epoch"] == epoch.number:
            # The epoch continues, or is recorded as ended again.
            epoch.ending = None
        # Training may also resume at the beginning of the next epoch.
        elif self.epochs:
            end |= {"epoch": epoch.number + 1, "epoch_rows": 0}
        if found != end:
            self._problems.append(
                f"resumed at step {found['steps']}: {_describe_differences(found, end)}"
            )
            self._totals = None
        elif epoch.number == end["epoch"] and is_within and epoch.num_rows != self._num_rows:
            self._problems.append(
                f"resumed at step {found['steps']} within epoch {epoch.number}: the dataset has"
                f" {self._num_rows:,} rows, expected {epoch.num_rows:,}"
            )

    def _step(self, record: Record, epoch: _Epoch) -> None:
        names = ("step", "batch_size", "position", "samples_seen", "tokens_seen")
        found = {name: whole(record, name) or 0 for name in names}
        subject = f"step {found['step']}"
        rows = record.get("rows")
        num_rows = found["batch_size"]
        if isinstance(rows, list):
            self._problems += epoch.mark(_USED, rows, subject)
            num_rows = len(rows)
        else:
            self._problems.append(f"{subject}: its rows are not recorded")
        if self._totals is not None:
            expected = {
                "step": self._totals["steps"] + 1,
                "batch_size": num_rows,
                "position": epoch.position + num_rows,
                "samples_seen": self._totals["samples"] + num_rows,
                "tokens_seen": max(self._totals["tokens"], found["tokens_seen"]),
            }
            if found != expected:
                self._problems.append(f"{subject}: {_describe_differences(found, expected)}")
        self._totals = {
            "steps": found["step"],
            "samples": found["samples_seen"],
            "tokens": found["tokens_seen"],
        }
        epoch.position = found["position"]
        epoch.steps.append(found["step"])

    def _open(self, number: int, record: Record) -> _Epoch:
        """Return the epoch of a record; close the previous one first if it is new."""
        newest = self.epochs[-1] if self.epochs else None
        if newest and newest.number == number and newest.ending is None:
            return newest
        expected = newest.number + 1 if newest else 0
        # A log whose beginning is missing may begin in any epoch.
        if number != expected and (newest or self._totals):
            self._problems.append(
                f"{record['kind']} {record.get('step', '')} belongs to epoch {number}, expected"
                f" {expected}"
            )
        self._close(is_done=True)
        epoch = _Epoch(number, self._num_rows)
        self.epochs.append(epoch)
        self._problems += epoch.mark(_DROPPED, self._dropped.pop(number, []))
        return epoch

    def _close(self, *, is_done: bool) -> None:
        if self.epochs:
            self._problems += self.epochs[-1].close(is_done=is_done)

    def conclusion(self) -> str:
        """Describe the result for all epochs."""
        # A run may have hundreds of epochs: group those with the same result.
        parts = []
        for proved, alike in groupby(self.epochs, key=_Epoch.proved):
            numbers = [epoch.number for epoch in alike]
            name = f"epochs {numbers[0]} to {numbers[-1]}" if numbers[1:] else f"epoch {numbers[0]}"
            parts.append(proved.format(name))
        return "; ".join(parts) or "no step counts yet"


class _Epoch:
    """The rows of one epoch, one byte each until it is closed.

    Attributes:
        steps: numbers of its steps.
        position: rows so far, as recorded by its steps.
        ending: the record of its end.
        used: rows used by steps, once it is closed.
        reasons: number of unused rows for each recorded reason, once it is closed.
    """

    def __init__(self, number: int, num_rows: int) -> None:
        self.number = number
        self.num_rows = num_rows
        self.steps: list[int] = []
        self.position = 0
        self.ending: Record | None = None
        self.is_done = False
        self.used = 0
        self.reasons: dict[str, int] = {}
        self._marks = bytearray(num_rows)

    def mark(self, mark: int, rows: Sequence[Any], subject: str = "dropped rows") -> list[str]:
        """Mark rows as used or dropped and return problems; a row may be dropped repeatedly."""
        wrong: defaultdict[str, list[Any]] = defaultdict(list)
        for row in rows:
            # True of JSON is an int in Python.
            if type(row) is not int or not 0 <= row < self.num_rows:
                wrong["rows that the dataset does not have"].append(row)
            elif self._marks[row] == mark == _USED:
                wrong["rows used twice"].append(row)
            elif self._marks[row] not in (0, mark):
                wrong["rows used, and listed as dropped"].append(row)
            else:
                self._marks[row] = mark
        place = f"epoch {self.number}, {subject}"
        return [f"{place}: {problem}: {_first_ten(which)}" for problem, which in wrong.items()]

    def close(self, *, is_done: bool) -> list[str]:
        """Count the rows and return problems."""
        self.used = self._marks.count(_USED)
        left_out = self.num_rows - self.used
        missing = [row for row, mark in enumerate(self._marks) if not mark]
        self.is_done = is_done or self.ending is not None or not missing
        reasons: Any = {"dropped": self._marks.count(_DROPPED)}
        # Only the open epoch keeps its marks in memory.
        self._marks = bytearray()
        problems = []
        if self.ending is not None:
            reasons = self.ending.get("reasons")
        if isinstance(reasons, Mapping):
            self.reasons = {
                str(reason): rows for reason, rows in reasons.items() if rows and type(rows) is int
            }
        if self.ending is not None:
            found = [
                self.ending.get("used"),
                self.ending.get("left_out"),
                sum(self.reasons.values()),
            ]
            if found != [self.used, left_out, left_out] or "an error" in self.reasons:
                problems.append(
                    f"its end records {found[0]} rows used, and {found[1]} left out for"
                    f" {self.reasons}; its steps have {self.used}, and {left_out} are left"
                )
        elif missing and self.is_done:
            problems.append(f"rows never used, and not recorded as left out: {_first_ten(missing)}")
        return [f"epoch {self.number}: {problem}" for problem in problems]

    def describe(self) -> str:
        """Describe the steps and rows in one line."""
        steps = f"steps {self.steps[0]:,} to {self.steps[-1]:,}" if self.steps else "no step"
        line = f"{steps}: {self.used:,} of {count(self.num_rows, 'row', ',')} used"
        if not self.is_done:
            return f"{line} so far"
        reasons = ", ".join(f"{reason} {rows:,}" for reason, rows in self.reasons.items())
        return f"{line}, {self.num_rows - self.used:,} left out ({reasons})" if reasons else line

    def proved(self) -> str:
        """Describe the result with a placeholder for the name of the epoch."""
        all_rows = count(self.num_rows, "row", ",")
        if self.used == self.num_rows:
            return f"each of {all_rows} exactly once in {{}}"
        rest = " so far"
        if self.is_done:
            rest = f", {self.num_rows - self.used:,} left out as recorded"
        return f"{self.used:,} of {all_rows} exactly once in {{}}{rest}"


def _compare_repeated(entries: Sequence[Entry]) -> tuple[list[str], list[str], str]:
    """Compare each step that was rolled back with its repetition.

    Returns:
        Explained differences, unexplained differences, and a summary of the comparison.
    """
    notes = []
    different = []
    num_compared = num_alike = 0
    # Indices of rolled-back records by step.
    earlier: defaultdict[int, list[int]] = defaultdict(list)
    for place, entry in enumerate(entries):
        if entry.kind == "epoch_restarted" and entry.counts:
            notes.append(
                f"epoch {entry.record.get('epoch')} restarted after step {entry.steps} because its"
                f" data changed: {len(earlier)} earlier steps do not count"
            )
            earlier.clear()
        if entry.kind != "step":
            continue
        if not entry.counts:
            earlier[entry.steps].append(place)
            continue
        attempts = earlier.pop(entry.steps, [])
        differences = [(at, _differences(entries[at].record, entry.record)) for at in attempts]
        unlike = [(at, names) for at, names in differences if names]
        num_compared += bool(attempts)
        num_alike += bool(attempts) and not unlike
        # Report each step once.
        for at, names in unlike[:1]:
            sentence = f"step {entry.steps} differs from its first run: {', '.join(names)}"
            if reason := _reason_of_difference(entries[:place], at, names):
                notes.append(f"{sentence}: {reason}")
            else:
                different.append(sentence)
    repeated = f"repeated steps: {num_compared:,}, identical: {num_alike:,}"
    if earlier:
        repeated += f"; rolled back and not repeated yet: {len(earlier):,}"
    return notes, different, repeated


def _differences(earlier: Record, later: Record) -> list[str]:
    """Return the names of values that differ in a repeated step, with both of loss and lr."""
    differences = [] if earlier.get("rows") == later.get("rows") else ["rows"]
    for name in ("loss", "lr"):
        before, after = earlier.get(name), later.get(name)
        if before != after:
            differences.append(f"{name} ({before}, then {after})")
    return differences


def _reason_of_difference(entries: Sequence[Entry], at: int, differences: Sequence[str]) -> str:
    """Return the reason for the differences of a repeated step, or "".

    One reason is a setting that was changed on resume: a record between a start and the next step
    whose ``before`` and ``after`` differ, except those of growth rules, which have ``requested``. A
    loss may also differ alone if the micro-batch limit changed after the resumed step, since sums
    are then rounded differently.

    Args:
        entries: entries before the repetition.
        at: index of the step that was rolled back.
        differences: names of the values that differ.
    """
    changed = [
        entry
        for entry in entries
        if "before" in entry.record and entry.record["before"] != entry.record.get("after")
    ]
    changes = []
    back_to = math.inf
    is_starting = False
    for entry in entries[at:]:
        if entry.kind in ("start", "step"):
            is_starting = entry.kind == "start"
        if entry.kind == "start":
            back_to = min(back_to, entry.steps)
        elif is_starting and entry in changed and "requested" not in entry.record:
            changes.append(f"{entry.kind} {entry.record['before']} -> {entry.record.get('after')}")
    if changes:
        return f"changed on resume: {', '.join(dict.fromkeys(changes))}"
    has_new_limit = any(entry.kind == "limit" and entry.steps >= back_to for entry in changed)
    if has_new_limit and differences[0].startswith("loss") and len(differences) == 1:
        return "the limit of a micro-batch changed in one of the two"
    return ""


def _describe_differences(found: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """List the values that differ from the expected ones."""
    return ", ".join(
        f"{name} {found[name]} instead of {value}"
        for name, value in expected.items()
        if found[name] != value
    )


def _first_ten(rows: Sequence[Any]) -> str:
    """List the first ten rows and count the rest."""
    more = f" and {len(rows) - 10:,} more" if len(rows) > 10 else ""
    return ", ".join(map(repr, rows[:10])) + more
