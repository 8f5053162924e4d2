"""The proof that each row was used exactly once in every epoch, across all restarts.

It needs the run log alone.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.errors import SettingError

from .run_history import LossesNotFinite, Record, RunHistory, as_number, steps_at, whole
from .run_log import RECORD, iterate_records

# Problems that are shown, and notes: a broken log has too many to print.
_MOST = 20
# What the byte of a row means: an epoch of many rows must fit into memory.
_MARKS = {1: "used", 2: "listed as dropped"}
# What a repeated step must have again.
_COMPARED = ("rows", "loss", "lr")


@dataclass(frozen=True)
class Audit:
    """What a run log proves.

    Attributes:
        lines: aligned text, the verdict last.
        problems: reasons why the proof does not hold, one sentence each, the first twenty.
    """

    lines: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether each row was used exactly once in each epoch, or is recorded as left out.

        Nothing in the log contradicts it.
        """
        return not self.problems


def audit(output_dir: str | Path) -> Audit:
    """Audit the run log ``adaptive_batch/run.jsonl`` of an output_dir, reading it line by line.

    Raises:
        SettingError: there is no such folder, or no log that can be read in it.
    """
    path = Path(output_dir) / RECORD
    try:
        path.open("rb").close()
    except OSError as error:
        problem = "there is no such folder"
        if Path(output_dir).is_dir():
            problem = f"{path} cannot be read ({error.strerror})"
        remedy = f"{problem}; give the output_dir of a run"
        raise SettingError("OUTPUT_DIR", str(output_dir), remedy) from None
    return audit_records(iterate_records(path), iterate_records(path))


def audit_records(records: Iterable[Record | None], again: Iterable[Record | None]) -> Audit:
    """Audit the records of one file, read twice, in order; None stands for a torn line."""
    # Only a first reading shows which steps count: a later start may roll them back.
    history = RunHistory(records)
    auditor = _Auditor(has_beginning=history.has_beginning)
    for entry in history.entries(again):
        auditor.add(*entry)
    auditor.finish()
    pairs = [
        ("run log", f"{history.num_records:,} lines, {auditor.num_torn:,} of them torn"),
        *auditor.report(),
    ]
    if history.num_other_runs:
        scope = f"the last run is audited; other runs in the file: {history.num_other_runs}"
        pairs.insert(1, ("", scope))
    return Audit(_aligned(pairs), tuple(auditor.problems[:_MOST]))


def _aligned(pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return a line for each pair of a heading and a text, with the texts below each other."""
    width = max(len(heading) for heading, _ in pairs)
    lines = []
    previous_heading = None
    for heading, text in pairs:
        # A heading stands once, before the first of its lines.
        shown_heading = "" if heading == previous_heading else heading
        lines.append(f"{shown_heading:<{width}}  {text}")
        previous_heading = heading
    return tuple(lines)


class _Auditor:
    """Checks each step of a run that counts against all that counted before it."""

    def __init__(self, *, has_beginning: bool) -> None:
        # All reasons why the proof does not hold.
        self.problems: list[str] = []
        self.num_torn = 0
        self._steps = 0
        self._samples = 0
        self._tokens = 0
        self._is_over = False
        # After a gap that was named, the next counts are believed: one gap is one problem.
        self._trusts = not has_beginning
        self._epochs = _Epochs(self.problems, has_beginning=has_beginning)
        self._repeats = _Repeats()
        self._changes = _Changes()
        self._losses = LossesNotFinite()
        # Steps that changed no weight.
        self._skipped: list[int] = []
        if not has_beginning:
            self.problems.append("the beginning of the run is not in the log")

    def add(self, record: Record | None, steps: int, counts: bool) -> None:
        """Check the next record."""
        if record is None:
            self.num_torn += 1
            return
        kind = str(record.get("kind"))
        # Steps that were rolled back are kept, to compare them with their repetition.
        if kind != "step":
            self._repeats.event(record, steps)
        elif not counts:
            self._repeats.roll_back(steps, record)
        self._changes.event(record, steps, counts=counts)
        if kind == "start":
            self._epochs.take_rows(whole(record, "rows"))
        if counts:
            self._add_counting(kind, record, steps)

    def _add_counting(self, kind: str, record: Record, steps: int) -> None:
        """Check a record that no restart rolled back."""
        epoch = whole(record, "epoch")
        if kind == "start":
            self._start(record)
        elif kind == "step":
            self._step(record, epoch)
        elif kind == "epoch":
            self._end_epoch(record, epoch)
        elif kind == "dropped":
            self._epochs.drop(record.get("rows"), epoch, at=self._steps)
        elif kind == "nonfinite_loss" and record.get("skipped") is True:
            self._skipped.append(whole(record, "step") or steps + 1)
        elif kind == "epoch_restarted":
            self._repeats.forget(
                f"epoch {epoch} began again after step {self._steps}, as its data was changed"
            )
            self._epochs.forget_listed()
        elif kind == "plan":
            self._changes.unit = "row" if whole(record, "batch_tokens") is None else "token"
        elif kind == "resume_point":
            saved_step = whole(record, "step") or 0
            self._expect_steps(f"resume_point at step {saved_step}", saved_step)
        elif kind == "checkpoint":
            saved_step = whole(record, "steps") or 0
            self._expect_steps(f"checkpoint at step {saved_step}", saved_step)
        elif kind == "end":
            self._is_over = True

    def _start(self, record: Record) -> None:
        """Check that training resumes where the steps before end."""
        progress = record.get("progress")
        steps = steps_at(record)
        self._is_over = False
        # Rows of an epoch that has no step yet are listed again when it begins.
        self._epochs.forget_listed()
        if not isinstance(progress, Mapping):
            self.problems.append("a start does not record where training resumes")
            return
        self._expect_steps(f"resumed at step {steps}", steps)
        if self._trusts:
            return
        for name, counted in (("samples", self._samples), ("tokens", self._tokens)):
            recorded = whole(progress, name)
            if recorded is not None and recorded != counted:
                self.problems.append(
                    f"resumed at step {steps} with {recorded:,} {name}, the steps up to it have"
                    f" {counted:,}"
                )
        self._epochs.check_place(steps, (progress.get("epoch"), progress.get("epoch_rows")))

    def _step(self, record: Record, number: int | None) -> None:
        """Check an optimizer step, of the epoch with this number."""
        step = whole(record, "step")
        if step is None or number is None:
            self.problems.append(
                f"after step {self._steps}: a step without its number or its epoch"
            )
            return
        self._expect_steps(f"step {step}", step - 1)
        if step <= self._steps:
            self.problems.append(
                f"step {step} follows step {self._steps}, without a start between them"
            )
            self._trusts = True
        self._repeats.count(step, record)
        self._losses.add(step, record)
        self._steps = step
        epoch = self._epochs.of(number, subject=f"step {step}")
        if epoch is None:
            self._trusts = True
            return
        size = whole(record, "batch_size") or 0
        self._mark_used(epoch, step, record.get("rows"), size)
        self._add_totals(epoch, step, record, size)
        epoch.first_step = epoch.first_step or step
        epoch.last_step = step
        self._changes.step(step, record, size)

    def _mark_used(self, epoch: _Epoch, step: int, rows: object, size: int) -> None:
        """Mark the rows of a step as used, and check that they are as many as its batch size."""
        if not isinstance(rows, list):
            self.problems.append(f"step {step}: which rows it used is not recorded")
            return
        self.problems += epoch.mark(1, rows, step=step)
        if size != len(rows):
            verb = "is" if len(rows) == 1 else "are"
            self.problems.append(
                f"step {step}: batch_size {size}, and {count(len(rows), 'row')} {verb} listed"
            )

    def _add_totals(self, epoch: _Epoch, step: int, record: Record, size: int) -> None:
        """Check that the totals of a step continue those of the step before it, and keep them."""
        position = whole(record, "position")
        samples = whole(record, "samples_seen")
        tokens = whole(record, "tokens_seen") or 0
        if not self._trusts:
            for name, total, previous in (
                ("position", position, epoch.position),
                ("samples_seen", samples, self._samples),
            ):
                expected = previous + size
                if total != expected:
                    self.problems.append(
                        f"step {step}: {name} {total}, not {expected} = {previous} + {size}"
                    )
            if tokens < self._tokens:
                self.problems.append(f"step {step}: tokens_seen {tokens}, after {self._tokens}")
        epoch.position = position or 0
        self._samples = samples or 0
        self._tokens = tokens
        self._trusts = False

    def _end_epoch(self, record: Record, number: int | None) -> None:
        """Keep the recorded end of an epoch."""
        if number is None:
            self.problems.append(
                f"after step {self._steps}: the end of an epoch without its number"
            )
        elif not self._epochs.end(number, record, subject=f"an end after step {self._steps}"):
            self._trusts = True

    def finish(self) -> None:
        """Judge what only the end of the log shows."""
        self._epochs.close(is_done=self._is_over)
        self.problems += self._repeats.different

    def _expect_steps(self, seen: str, up_to: int) -> None:
        """Name the steps that something recorded needs and that are not in the log."""
        if up_to <= self._steps:
            return
        missing = _span("step", self._steps + 1, up_to)
        # A torn line is a likely reason for a gap.
        torn = f" (torn lines before it: {self.num_torn})" if self.num_torn else ""
        self.problems.append(f"{seen}: not in the log: {missing}{torn}")
        self._steps = up_to
        self._trusts = True

    def report(self) -> Iterator[tuple[str, str]]:
        """Yield everything as pairs of a heading and one line, the verdict last."""
        starts = [start.steps for start in self._repeats.starts]
        summary = f"{len(starts)}"
        if starts[1:]:
            summary += f", resumed at step {_first_ten(starts[1:])}"
        yield "starts", summary
        for epoch in self._epochs.all:
            yield f"epoch {epoch.number}", epoch.describe()
        yield from self._changes.lines()
        yield from (("loss", line) for line in self._losses.lines())
        if self._skipped:
            skipped_steps = (
                f"{len(self._skipped):,} (their loss or gradients were not finite):"
                f" {_first_ten(self._skipped)}"
            )
            yield "loss", f"skipped steps, which changed no weight: {skipped_steps}"
        yield from (("repeats", line) for line in self._repeats.lines())
        for heading, lines in (("note", self._repeats.explained), ("problem", self.problems)):
            yield from ((heading, line) for line in lines[:_MOST])
            if len(lines) > _MOST:
                yield heading, f"and {len(lines) - _MOST:,} more"
        yield "verdict", self._verdict()

    def _verdict(self) -> str:
        """Return what is proved, or that the proof does not hold."""
        if self.problems:
            return f"DOES NOT HOLD: problems: {len(self.problems):,}"
        # Epochs of which the same is proved are named together: a run may have hundreds.
        parts = []
        for (rows, left_out), alike in groupby(self._epochs.all, key=_Epoch.proved):
            numbers = [epoch.number for epoch in alike]
            parts.append(
                f"{rows} exactly once in {_span('epoch', numbers[0], numbers[-1])}{left_out}"
            )
        if not parts:
            return "holds: no step counts yet"
        return "holds: " + "; ".join(parts)


class _Epoch:
    """The rows of one epoch, a byte each until it is closed."""

    def __init__(self, number: int, num_rows: int) -> None:
        self.number = number
        self.num_rows = num_rows
        self.first_step = 0
        self.last_step = 0
        # Rows so far, as steps record them.
        self.position = 0
        # Rows that were used, and rows that were listed as dropped.
        self.used = 0
        self.num_dropped = 0
        self.is_done = False
        self.ending: Record | None = None
        self._marks = bytearray(num_rows)

    @property
    def left_out(self) -> int:
        """Rows that were not used."""
        return self.num_rows - self.used

    def mark(self, mark: int, rows: Sequence[Any], *, step: int | None = None) -> list[str]:
        """Mark rows as used, in a step, or as dropped; return what is wrong with them.

        Dropped rows may be listed again.
        """
        wrong_rows: defaultdict[str, list[Any]] = defaultdict(list)
        dataset = f"the dataset of {count(self.num_rows, 'row', ',')}"
        for row in rows:
            # JSON may hold true, which Python counts as the int 1.
            if type(row) is not int or not 0 <= row < self.num_rows:
                wrong_rows[f"rows that {dataset} does not have"].append(row)
                continue
            earlier_mark = self._marks[row]
            if earlier_mark == 0:
                self._marks[row] = mark
                self.used += mark == 1
                self.num_dropped += mark == 2
            elif earlier_mark == mark == 1:
                wrong_rows["rows used twice"].append(row)
            elif earlier_mark != mark:
                wrong_rows[f"rows {_MARKS[mark]}, and {_MARKS[earlier_mark]}"].append(row)
        place = f"epoch {self.number}"
        if step is not None:
            place += f", step {step}"
        return [
            f"{place}: {problem}: {_first_ten(numbers)}" for problem, numbers in wrong_rows.items()
        ]

    def close(self, *, is_done: bool) -> list[str]:
        """Return what does not add up at the end of the epoch; what was counted stays."""
        self.is_done = is_done or self.ending is not None or self.left_out == self.num_dropped
        missing = [row for row, mark in enumerate(self._marks) if not mark]
        # Only one epoch is open at a time, so only one keeps its marks in memory.
        self._marks = bytearray()
        problems = []
        if self.ending is None:
            if missing and self.is_done:
                problems.append(
                    f"rows never used, and not recorded as left out: {_first_ten(missing)}"
                )
        else:
            problems += self._against(self.ending)
        return [f"epoch {self.number}: {problem}" for problem in problems]

    def _against(self, ending: Record) -> list[str]:
        """Return what the recorded end says otherwise than the steps."""
        problems = []
        for name, counted in (("used", self.used), ("left_out", self.left_out)):
            recorded = ending.get(name)
            if recorded != counted:
                problems.append(
                    f"its end records {recorded} rows as {name}, its steps give {counted}"
                )
        if "an error" in self.reasons:
            problems.append(f"{count(self.reasons['an error'], 'row')} lost by an error")
        if sum(self.reasons.values()) != self.left_out:
            problems.append(
                f"the reasons {self.reasons} do not add up to {count(self.left_out, 'row')}"
                " left out"
            )
        return problems

    @property
    def reasons(self) -> dict[str, int]:
        """Why rows were left out, and how many for each reason."""
        reasons: object = {"dropped": self.num_dropped}
        if self.ending:
            reasons = self.ending.get("reasons")
        if not isinstance(reasons, Mapping):
            return {}
        return {
            str(reason): rows for reason, rows in reasons.items() if isinstance(rows, int) and rows
        }

    def describe(self) -> str:
        """Return one line on its steps and rows."""
        steps = "no step"
        if self.first_step:
            steps = f"steps {self.first_step:,} to {self.last_step:,}"
        used_rows = f"{self.used:,} of {count(self.num_rows, 'row', ',')} used"
        if not self.is_done:
            return f"{steps}: {used_rows} so far"
        reasons = ", ".join(f"{reason} {num_rows:,}" for reason, num_rows in self.reasons.items())
        if not reasons:
            return f"{steps}: {used_rows}"
        return f"{steps}: {used_rows}, {self.left_out:,} left out ({reasons})"

    def proved(self) -> tuple[str, str]:
        """Return what is proved of its rows: how many, and what of the rest."""
        all_rows = count(self.num_rows, "row", ",")
        if not self.is_done:
            return f"{self.used:,} of {all_rows}", " so far"
        if not self.left_out:
            return f"each of {all_rows}", ""
        return f"{self.used:,} of {all_rows}", f", {self.left_out:,} left out as recorded"


class _Epochs:
    """The epochs of a run, in their order; only the newest is open.

    Args:
        problems: takes what does not add up.
        has_beginning: whether the log begins with the run.

    Attributes:
        all: epochs so far.
    """

    def __init__(self, problems: list[str], *, has_beginning: bool) -> None:
        self.all: list[_Epoch] = []
        self._problems = problems
        self._has_beginning = has_beginning
        # Rows of the dataset now.
        self._num_rows = 0
        # Dropped rows by epoch, which may be listed before the first step of the epoch.
        self._dropped: dict[int, list[list[Any]]] = {}

    @property
    def newest(self) -> _Epoch | None:
        """The newest epoch; None before the first."""
        return self.all[-1] if self.all else None

    def take_rows(self, num_rows: int | None) -> None:
        """Take the rows of the dataset from now on, where they are recorded."""
        if num_rows is not None:
            self._num_rows = max(0, num_rows)

    def forget_listed(self) -> None:
        """Forget rows that were listed as dropped by an epoch that has no step yet."""
        self._dropped.clear()

    def check_place(self, steps: int, place: tuple[Any, Any]) -> None:
        """Check that training resumes at the row where the steps end.

        Args:
            steps: steps at which it resumes.
            place: number of the epoch at which it resumes, and rows of it that were used.
        """
        epoch = self.newest
        end = (0, 0)
        allowed_places = [end]
        if epoch:
            end = (epoch.number, epoch.position)
            # At the end of an epoch, training may also resume at the beginning of the next.
            allowed_places = [end, (epoch.number + 1, 0)]
            if place[0] == epoch.number:
                # The epoch continues, or ends again.
                epoch.ending = None
        if place not in allowed_places:
            self._problems.append(
                f"resumed at step {steps}, {count(place[1], 'row')} into epoch {place[0]}; "
                f"the steps up to it end {count(end[1], 'row')} into epoch {end[0]}"
            )
        elif epoch and place == end and epoch.position and self._num_rows != epoch.num_rows:
            self._problems.append(
                f"resumed at step {steps} within epoch {epoch.number} with"
                f" {count(self._num_rows, 'row', ',')} in the dataset, {epoch.num_rows:,} before"
            )

    def of(self, number: int, *, subject: str) -> _Epoch | None:
        """Return the epoch with this number; where it is a new one, close the one before.

        Return None, with a problem that names the `subject`, where the epoch was done before.
        """
        current = self.newest
        if current and number == current.number and current.ending is None:
            return current
        newest = current.number if current else -1
        if number <= newest:
            self._problems.append(
                f"{subject} belongs to epoch {number}, after epoch {newest} was begun or done"
            )
            return None
        self.close(is_done=True)
        # A log without its beginning may begin in any epoch.
        if number > newest + 1 and (current or self._has_beginning):
            self._problems.append(
                f"{subject} belongs to epoch {number}; epoch {newest + 1} is not in the log"
            )
        epoch = _Epoch(number, self._num_rows)
        self.all.append(epoch)
        for rows in self._dropped.pop(number, []):
            self._problems += epoch.mark(2, rows)
        return epoch

    def drop(self, rows: object, number: int | None, *, at: int) -> None:
        """Mark rows as dropped, or keep them until their epoch begins."""
        epoch = self.newest
        if number is None or not isinstance(rows, list):
            self._problems.append(
                f"after step {at}: dropped rows without their numbers or their epoch"
            )
        elif epoch and epoch.number == number:
            self._problems += epoch.mark(2, rows)
        else:
            self._dropped.setdefault(number, []).append(rows)

    def end(self, number: int, ending: Record, *, subject: str) -> bool:
        """Keep the recorded end of an epoch, to judge it when the epoch is closed; return whether
        it may end here.
        """
        epoch = self.newest
        # The newest epoch ends again where it was resumed at its end; a new one has no step.
        if epoch is None or number != epoch.number:
            epoch = self.of(number, subject=subject)
        if epoch is None:
            return False
        epoch.ending = ending
        return True

    def close(self, *, is_done: bool) -> None:
        """Judge the newest epoch."""
        epoch = self.newest
        if epoch:
            self._problems += epoch.close(is_done=is_done)


@dataclass
class _Start:
    steps: int
    changed: list[str] = field(default_factory=list)
    has_step: bool = False


class _Repeats:
    """Compares each step that was rolled back with the step of the same number that counts.

    A difference is explained, and no problem, in two cases. A setting was changed on resume:
    between the ``start`` and its first step there is a record whose ``before`` and ``after`` differ
    (not that of a growth rule, which records what was ``requested``). Or rows and rate are the
    same, and after the step that the restart went back to the limit of a micro-batch changed in one
    of the two: sums are then rounded differently.
    """

    def __init__(self) -> None:
        self.starts: list[_Start] = []
        self.different: list[str] = []
        self.explained: list[str] = []
        self._num_compared = 0
        self._num_alike = 0
        # By step: the values of each attempt at it, and the number of starts before that attempt.
        self._rolled_back: dict[int, list[tuple[dict[str, str], int]]] = {}
        # Steps after which the limit of a micro-batch changed.
        self._limit_changed_at: list[int] = []

    def event(self, record: Record, steps: int) -> None:
        """Keep what a record that is no step may explain: a start, or a change."""
        kind = record.get("kind")
        old_value = record.get("before")
        new_value = record.get("after")
        if kind == "start":
            self.starts.append(_Start(steps))
        elif "before" not in record or old_value == new_value:
            return
        elif kind == "limit":
            self._limit_changed_at.append(steps)
        # A growth rule, which records what was requested, changes no setting.
        elif self.starts and not self.starts[-1].has_step and "requested" not in record:
            self.starts[-1].changed.append(f"{kind} {old_value} -> {new_value}")

    def roll_back(self, step: int, record: Record) -> None:
        """Keep a step that does not count."""
        self._rolled_back.setdefault(step, []).append((_compared(record), len(self.starts)))
        self._has_stepped()

    def forget(self, reason: str) -> None:
        """Drop what was rolled back, as the data is another now."""
        self.explained.append(f"{reason}: {len(self._rolled_back)} earlier steps do not count")
        self._rolled_back.clear()

    def count(self, step: int, record: Record) -> None:
        """Compare a step that counts with the attempts at it that were rolled back."""
        self._has_stepped()
        if step not in self._rolled_back:
            return
        counted = _compared(record)
        unlike = [attempt for attempt in self._rolled_back.pop(step) if attempt[0] != counted]
        self._num_compared += 1
        if not unlike:
            self._num_alike += 1
            return
        # The first difference is enough: a step is named once.
        earlier, num_starts = unlike[0]
        names = [name for name in _COMPARED if earlier[name] != counted[name]]
        # Rows are compared by a hash, which tells a reader nothing.
        differences = ", ".join(
            "rows" if name == "rows" else f"{name} ({earlier[name]}, then {counted[name]})"
            for name in names
        )
        sentence = f"step {step} was repeated with another {differences}"
        reason = self._reason(names, num_starts)
        if reason:
            self.explained.append(f"{sentence}: {reason}")
        else:
            self.different.append(sentence)

    def _has_stepped(self) -> None:
        """Record that the newest start has a step: what changes now was not changed on resume."""
        if self.starts:
            self.starts[-1].has_step = True

    def _reason(self, names: list[str], num_starts: int) -> str:
        """Return what explains a difference; empty where nothing does.

        Args:
            names: values that differ.
            num_starts: number of starts before the attempt that was rolled back.
        """
        starts = self.starts[num_starts:]
        changes: list[str] = []
        for start in starts:
            changes += start.changed
        if changes:
            return f"changed on resume: {', '.join(dict.fromkeys(changes))}"
        # With another limit the same rows are summed in other parts, and rounded differently.
        back_to = min((start.steps for start in starts), default=0)
        if names == ["loss"] and any(steps >= back_to for steps in self._limit_changed_at):
            return "the limit of a micro-batch changed in one of the two"
        return ""

    def lines(self) -> Iterator[str]:
        """Yield how many steps were repeated, and how many came out alike."""
        summary = f"repeated steps: {self._num_compared:,}"
        if self._num_compared:
            summary += f", alike: {self._num_alike:,}"
        yield summary
        if self._rolled_back:
            yield f"steps rolled back and not repeated so far: {len(self._rolled_back):,}"


def _compared(record: Record) -> dict[str, str]:
    """Return what a repeated step must have again, as text; rows as a hash, for they are many."""
    rows = hashlib.blake2b(json.dumps(record.get("rows")).encode(), digest_size=16).hexdigest()
    return {name: str(record.get(name)) for name in _COMPARED} | {"rows": rows}


class _Changes:
    """Lists every change of the batch, of the learning rate and of the limit of a micro-batch."""

    def __init__(self) -> None:
        # Unit of what a step is asked for.
        self.unit = "row"
        self._asked = 0
        # The lowest and the highest rate, each with its step; empty before the first step.
        self._rates: list[tuple[float, int]] = []
        self._lines: dict[str, list[str]] = {"batch size": [], "lr": [], "limit": []}

    def step(self, step: int, record: Record, rows: int) -> None:
        """Add a step.

        The short last step of an epoch was asked for as many rows as the others, so it is no
        change.
        """
        rate = as_number(record.get("lr"))
        amount = whole(record, "asked") or rows
        if amount != self._asked:
            in_rows = f" ({count(rows, 'row', ',')})" if self.unit == "token" else ""
            self._lines["batch size"].append(
                f"step {step:,}: {count(amount, self.unit, ',')}{in_rows}, lr {rate:g}"
            )
            self._asked = amount
        if not self._rates:
            self._rates = [(rate, step), (rate, step)]
        low, high = self._rates
        self._rates = [
            min(low, (rate, step), key=itemgetter(0)),
            max(high, (rate, step), key=itemgetter(0)),
        ]

    def event(self, record: Record, steps: int, *, counts: bool) -> None:
        """Add what was logged about the rate, once, or a change of what a micro-batch may hold."""
        kind = str(record.get("kind"))
        old_limit = record.get("before")
        new_limit = record.get("after")
        if kind == "limit" and old_limit != new_limit:
            change = f"{old_limit} -> {new_limit} {record.get('unit', 'rows')}"
            if record.get("out_of_memory"):
                change += " (out of memory)"
            if not counts:
                change += "; rolled back with the next step"
            self._lines["limit"].append(f"after step {steps:,}: {change}")
        elif counts and (kind.startswith("lr") or kind == "reference_batch_size"):
            # A restart logs the same message again.
            message = str(record.get("message") or kind)
            if not any(line.endswith(f": {message}") for line in self._lines["lr"]):
                self._lines["lr"].append(f"after step {steps:,}: {message}")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield headings with one line each."""
        if self._rates:
            (low, low_step), (high, high_step) = self._rates
            self._lines["lr"].insert(
                0, f"least {low:g} (step {low_step:,}), most {high:g} (step {high_step:,})"
            )
        for heading, lines in self._lines.items():
            yield from ((heading, line) for line in lines or ["unchanged"])


def _span(name: str, first: int, last: int) -> str:
    """Return ``step 4``, or ``steps 4 to 9``."""
    if first == last:
        return f"{name} {first}"
    return f"{name}s {first} to {last}"


def _first_ten(rows: Sequence[Any]) -> str:
    """Return the first ten numbers, and how many follow them."""
    shown = ", ".join(map(repr, rows[:10]))
    if len(rows) <= 10:
        return shown
    return f"{shown} and {len(rows) - 10:,} more"
