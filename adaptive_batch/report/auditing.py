"""The proof, from the run log alone, that in every epoch each row was used exactly once across all
restarts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.errors import SettingError

from .run_history import LossesNotFinite, Record, RunHistory, as_number, steps_at, whole
from .run_log import iterate_records

RECORD = Path("adaptive_batch") / "run.jsonl"
_MOST = 20  # problems that are kept, and notes; all are counted
_MARKS = {1: "used", 2: "listed as dropped"}  # of a row, in an epoch's bytes
_COMPARED = ("rows", "loss", "lr")  # what a repeated step must have again


@dataclass(frozen=True)
class Audit:
    """What a run log proves: aligned text, the verdict last, and why it does not hold, one sentence
    each, the first twenty.
    """

    lines: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether each row was used exactly once in each epoch, or is recorded as left out, and
        nothing contradicts it.
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
        is_there = Path(output_dir).is_dir()
        what = (
            f"{path} cannot be read ({error.strerror})" if is_there else "there is no such folder"
        )
        raise SettingError(
            "OUTPUT_DIR", str(output_dir), f"{what}; give the output_dir of a run"
        ) from None
    return audit_records(iterate_records(path), iterate_records(path))


def audit_records(records: Iterable[Record | None], again: Iterable[Record | None]) -> Audit:
    """Audit the records of one file, in order, which are read twice; None stands for a torn line."""
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
        pairs.insert(
            1, ("", f"the last run is audited; other runs in the file: {history.num_other_runs}")
        )
    width = max(len(heading) for heading, _ in pairs)
    shown = [
        heading if place == 0 or heading != pairs[place - 1][0] else ""
        for place, (heading, _) in enumerate(pairs)
    ]
    lines = tuple(
        f"{heading:<{width}}  {line}" for heading, (_, line) in zip(shown, pairs, strict=True)
    )
    return Audit(lines, tuple(auditor.problems))


class _Auditor:
    """Goes through the records of a run; each step that counts is checked against all that counted
    before it.
    """

    def __init__(self, *, has_beginning: bool) -> None:
        self.problems: list[str] = []
        self.num_problems = self.num_torn = 0
        self._has_beginning = has_beginning
        self._steps = self._samples = self._tokens = self._num_rows = 0
        self._position = 0  # rows of the epoch so far
        self._is_over = False
        self._trusts = (
            not has_beginning
        )  # after a gap that was named, the next counts are taken as they come
        self._epochs: list[_Epoch] = []
        self._dropped: dict[int, list[list[Any]]] = {}  # by epoch, before its first step
        self._repeats = _Repeats()
        self._changes = _Changes()
        self._losses = LossesNotFinite()
        self._skipped: list[int] = []  # steps that changed no weight
        if not has_beginning:
            self._wrong("the beginning of the run is not in the log")

    def add(self, record: Record | None, steps: int, counts: bool) -> None:
        """Check the next record."""
        if record is None:
            self.num_torn += 1
            return
        kind = str(record.get("kind"))
        epoch = whole(record, "epoch")
        if kind != "step":
            self._repeats.event(record, steps)
        elif not counts:
            self._repeats.roll_back(steps, record)
        self._changes.event(record, steps, counts=counts)
        if kind == "start":
            self._num_rows = (
                max(0, rows) if (rows := whole(record, "rows")) is not None else self._num_rows
            )
        if not counts:
            return
        if kind == "start":
            self._start(record)
        elif kind == "step":
            self._step(record, epoch)
        elif kind == "epoch":
            self._end_epoch(record, epoch)
        elif kind == "dropped":
            self._drop(record.get("rows"), epoch)
        elif kind == "nonfinite_loss" and record.get("skipped") is True:
            self._skipped.append(whole(record, "step") or steps + 1)
        elif kind == "replanned":
            self._forget_dropped(epoch)
        elif kind == "epoch_restarted":
            self._repeats.forget(
                f"epoch {epoch} began again after step {self._steps}, as its data was changed"
            )
            self._dropped.clear()
        elif kind == "plan":
            self._changes.unit = "row" if whole(record, "batch_tokens") is None else "token"
        elif kind in ("resume_point", "checkpoint"):
            saved = whole(record, "step" if kind == "resume_point" else "steps") or 0
            self._expect_steps(f"{kind} at step {saved}", saved)
        elif kind == "end":
            self._is_over = True

    def _start(self, record: Record) -> None:
        """Check that training resumes where the steps before end."""
        progress = record.get("progress")
        steps = steps_at(record)
        self._is_over = False
        # rows of an epoch that has no step yet are listed again when it begins
        self._dropped.clear()
        if not isinstance(progress, Mapping):
            self._wrong("a start does not record where training resumes")
            return
        self._expect_steps(f"resumed at step {steps}", steps)
        if self._trusts:
            return
        for name, counted in (("samples", self._samples), ("tokens", self._tokens)):
            if (there := whole(progress, name)) not in (None, counted):
                self._wrong(
                    f"resumed at step {steps} with {there:,} {name}, the steps up to it have"
                    f" {counted:,}"
                )
        place: tuple[Any, Any] = progress.get("epoch"), progress.get("epoch_rows")
        epoch = self._epochs[-1] if self._epochs else None
        here = (epoch.number, self._position) if epoch else (0, 0)
        if epoch and place[0] == epoch.number:
            epoch.ending = None  # it continues, or ends again
        if place != here and not (epoch and place == (epoch.number + 1, 0)):
            self._wrong(
                f"resumed at step {steps}, {count(place[1], 'row')} into epoch {place[0]}; "
                f"the steps up to it end {count(here[1], 'row')} into epoch {here[0]}"
            )
        elif epoch and place == here and self._position and self._num_rows != epoch.num_rows:
            self._wrong(
                f"resumed at step {steps} within epoch {epoch.number} with"
                f" {count(self._num_rows, 'row', ',')} in the dataset, {epoch.num_rows:,} before"
            )

    def _step(self, record: Record, number: int | None) -> None:
        step = whole(record, "step")
        if step is None or number is None:
            self._wrong(f"after step {self._steps}: a step without its number or its epoch")
            return
        self._expect_steps(f"step {step}", step - 1)
        if step <= self._steps:
            self._wrong(f"step {step} follows step {self._steps}, without a start between them")
            self._trusts = True
        self._repeats.count(step, record)
        self._losses.add(step, record)
        self._steps = step
        epoch = self._epoch_of(number, what=f"step {step}")
        if epoch is None:
            return
        rows = record.get("rows")
        size = whole(record, "batch_size") or 0
        if not isinstance(rows, list):
            self._wrong(f"step {step}: which rows it used is not recorded")
        else:
            self._wrong(*epoch.mark(1, rows), of=f"epoch {number}, step {step}: ")
            if size != len(rows):
                self._wrong(
                    f"step {step}: batch_size {size}, and {count(len(rows), 'row')}"
                    f" {'is' if len(rows) == 1 else 'are'} listed"
                )
        position = whole(record, "position")
        samples = whole(record, "samples_seen")
        tokens = whole(record, "tokens_seen") or 0
        if not self._trusts:
            for name, value, before in (
                ("position", position, self._position),
                ("samples_seen", samples, self._samples),
            ):
                if value != before + size:
                    self._wrong(
                        f"step {step}: {name} {value}, not {before + size} = {before} + {size}"
                    )
            if tokens < self._tokens:
                self._wrong(f"step {step}: tokens_seen {tokens}, after {self._tokens}")
        self._position = position or 0
        self._samples = samples or 0
        self._tokens = tokens
        self._trusts = False
        epoch.first_step = epoch.first_step or step
        epoch.last_step = step
        self._changes.step(step, record, size)

    def _epoch_of(self, number: int, *, what: str) -> _Epoch | None:
        """Return the epoch that something belongs to; where it is a new one, the one before is
        done.
        """
        current = self._epochs[-1] if self._epochs else None
        if current and number == current.number and current.ending is None:
            return current
        before = current.number if current else -1
        if number <= before:
            self._wrong(f"{what} belongs to epoch {number}, after epoch {before} was begun or done")
            self._trusts = True
            return None
        self._close(is_done=True)
        if number > before + 1 and (current or self._has_beginning):
            self._wrong(f"{what} belongs to epoch {number}; epoch {before + 1} is not in the log")
        self._epochs.append(epoch := _Epoch(number, self._num_rows))
        self._position = 0
        for rows in self._dropped.pop(number, []):
            self._drop(rows, number)
        return epoch

    def _drop(self, rows: object, number: int | None) -> None:
        if number is None or not isinstance(rows, list):
            self._wrong(
                f"after step {self._steps}: dropped rows without their numbers or their epoch"
            )
        elif self._epochs and self._epochs[-1].number == number:
            self._wrong(*self._epochs[-1].mark(2, rows), of=f"epoch {number}: ")
        else:
            self._dropped.setdefault(number, []).append(rows)

    def _forget_dropped(self, number: int | None) -> None:
        """Take back what an epoch has listed as dropped: it is planned again, and lists what it
        drops now.
        """
        if self._epochs and self._epochs[-1].number == number:
            self._epochs[-1].forget_dropped()
        self._dropped.clear()

    def _end_epoch(self, record: Record, number: int | None) -> None:
        if number is None:
            self._wrong(f"after step {self._steps}: the end of an epoch without its number")
        elif self._epochs and number == self._epochs[-1].number:
            self._epochs[-1].ending = record  # recorded again where it was resumed at its end
        elif epoch := self._epoch_of(number, what=f"an end after step {self._steps}"):
            epoch.ending = record  # an epoch without a step

    def _close(self, *, is_done: bool) -> None:
        """Judge the current epoch."""
        if self._epochs:
            self._wrong(
                *self._epochs[-1].close(is_done=is_done), of=f"epoch {self._epochs[-1].number}: "
            )

    def finish(self) -> None:
        """Judge what only the end of the log shows."""
        self._close(is_done=self._is_over)
        self._wrong(*self._repeats.different)

    def _expect_steps(self, seen: str, up_to: int) -> None:
        """Name the steps that something recorded needs and that are not in the log."""
        if up_to > self._steps:
            torn = f" (torn lines before it: {self.num_torn})" if self.num_torn else ""
            self._wrong(f"{seen}: not in the log: {_span('step', self._steps + 1, up_to)}{torn}")
            self._steps = up_to
            self._trusts = True

    def _wrong(self, *problems: str, of: str = "") -> None:
        self.num_problems += len(problems)
        self.problems += [of + problem for problem in problems[: _MOST - len(self.problems)]]

    def report(self) -> Iterator[tuple[str, str]]:
        """Yield everything as pairs of a heading and one line, the verdict last."""
        starts = [start.steps for start in self._repeats.starts]
        yield (
            "starts",
            f"{len(starts)}"
            + (f", resumed at step {_first_ten(starts[1:])}" if starts[1:] else ""),
        )
        for epoch in self._epochs:
            yield f"epoch {epoch.number}", epoch.describe()
        yield from self._changes.lines()
        yield from (("loss", line) for line in self._losses.lines())
        if self._skipped:
            which = (
                f"{len(self._skipped):,} (their loss or gradients were not finite):"
                f" {_first_ten(self._skipped)}"
            )
            yield "loss", f"skipped steps, which changed no weight: {which}"
        yield from (("repeats", line) for line in self._repeats.lines())
        notes = self._repeats.explained
        for heading, lines, num in (
            ("note", notes, len(notes)),
            ("problem", self.problems, self.num_problems),
        ):
            yield from ((heading, line) for line in lines[:_MOST])
            if num > _MOST:
                yield heading, f"and {num - _MOST:,} more"
        yield "verdict", self._verdict()

    def _verdict(self) -> str:
        if self.num_problems:
            return f"DOES NOT HOLD: problems: {self.num_problems:,}"
        parts = []
        for (rows, left_out), alike in groupby(self._epochs, key=_Epoch.proved):
            numbers = [epoch.number for epoch in alike]
            parts.append(
                f"{rows} exactly once in {_span('epoch', numbers[0], numbers[-1])}{left_out}"
            )
        return "holds: " + ("; ".join(parts) or "no step counts yet")


class _Epoch:
    """The rows of one epoch, a byte each until it is closed."""

    def __init__(self, number: int, num_rows: int) -> None:
        self.number = number
        self.num_rows = num_rows
        self.first_step = self.last_step = 0
        self.used = self.num_dropped = 0  # rows
        self.is_done = False
        self.ending: Record | None = None
        self._marks = bytearray(num_rows)

    @property
    def left_out(self) -> int:
        """Rows that were not used."""
        return self.num_rows - self.used

    def mark(self, mark: int, rows: Sequence[Any]) -> list[str]:
        """Mark rows as used or as dropped; return what is wrong with them. Dropped rows may be
        listed again.
        """
        found: dict[str, list[Any]] = {}
        for row in rows:
            if type(row) is not int or not 0 <= row < self.num_rows:
                found.setdefault(
                    f"rows that the dataset of {count(self.num_rows, 'row', ',')} does not have", []
                ).append(row)
            elif (there := self._marks[row]) == 0:
                self._marks[row] = mark
                self.used += mark == 1
                self.num_dropped += mark == 2
            elif there == mark == 1:
                found.setdefault("rows used twice", []).append(row)
            elif there != mark:
                found.setdefault(f"rows {_MARKS[mark]}, and {_MARKS[there]}", []).append(row)
        return [f"{what}: {_first_ten(those)}" for what, those in found.items()]

    def forget_dropped(self) -> None:
        """Take back every mark of a dropped row."""
        self._marks = self._marks.replace(b"\2", b"\0")
        self.num_dropped = 0

    def close(self, *, is_done: bool) -> list[str]:
        """Return what does not add up at the end of the epoch; what was counted stays."""
        self.is_done = is_done or self.ending is not None or self.left_out == self.num_dropped
        missing = [row for row, mark in enumerate(self._marks) if not mark]
        self._marks = bytearray()
        if self.ending is None:
            what = f"rows never used, and not recorded as left out: {_first_ten(missing)}"
            return [what] if missing and self.is_done else []
        problems = [
            f"its end records {self.ending.get(name)} rows as {name}, its steps give {counted}"
            for name, counted in (("used", self.used), ("left_out", self.left_out))
            if self.ending.get(name) != counted
        ]
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
        reasons = self.ending.get("reasons") if self.ending else {"dropped": self.num_dropped}
        items = reasons.items() if isinstance(reasons, Mapping) else ()
        return {str(reason): rows for reason, rows in items if isinstance(rows, int) and rows}

    def describe(self) -> str:
        """Return one line on its steps and rows."""
        steps = f"steps {self.first_step:,} to {self.last_step:,}" if self.first_step else "no step"
        rows = f"{self.used:,} of {count(self.num_rows, 'row', ',')} used"
        if not self.is_done:
            return f"{steps}: {rows} so far"
        reasons = ", ".join(f"{reason} {rows:,}" for reason, rows in self.reasons.items())
        return f"{steps}: {rows}" + (f", {self.left_out:,} left out ({reasons})" if reasons else "")

    def proved(self) -> tuple[str, str]:
        """Return what is proved of its rows: how many, and what of the rest."""
        if self.is_done and not self.left_out:
            return f"each of {count(self.num_rows, 'row', ',')}", ""
        rest = f", {self.left_out:,} left out as recorded" if self.is_done else " so far"
        return f"{self.used:,} of {count(self.num_rows, 'row', ',')}", rest


@dataclass
class _Start:
    steps: int
    changed: list[str] = field(default_factory=list)
    has_step: bool = False


class _Repeats:
    """Compares each step that was rolled back with the one of the same number that counts.

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
        self._num_compared = self._num_alike = 0
        self._rolled_back: dict[
            int, list[tuple[dict[str, str], int]]
        ] = {}  # by step: values, starts before it
        self._limit_changed_at: list[int] = []  # steps after which

    def event(self, record: Record, steps: int) -> None:
        """Take in a record that is no step."""
        kind = record.get("kind")
        before = record.get("before")
        after = record.get("after")
        if kind == "start":
            self.starts.append(_Start(steps))
        elif "before" not in record or before == after:
            return
        elif kind == "limit":
            self._limit_changed_at.append(steps)
        elif self.starts and not self.starts[-1].has_step and "requested" not in record:
            self.starts[-1].changed.append(f"{kind} {before} -> {after}")

    def roll_back(self, step: int, record: Record) -> None:
        """Keep a step that does not count."""
        self._rolled_back.setdefault(step, []).append((_compared(record), len(self.starts)))
        self._has_stepped()

    def forget(self, why: str) -> None:
        """Drop what was rolled back, as the data is another now."""
        self.explained.append(f"{why}: {len(self._rolled_back)} earlier steps do not count")
        self._rolled_back.clear()

    def count(self, step: int, record: Record) -> None:
        """Compare a step that counts with those that were rolled back."""
        self._has_stepped()
        if step not in self._rolled_back:
            return
        now = _compared(record)
        unlike = [one for one in self._rolled_back.pop(step) if one[0] != now]
        self._num_compared += 1
        self._num_alike += not unlike
        for before, num_starts in unlike[:1]:
            names = [name for name in _COMPARED if before[name] != now[name]]
            what = ", ".join(
                "rows" if name == "rows" else f"{name} ({before[name]}, then {now[name]})"
                for name in names
            )
            sentence = f"step {step} was repeated with another {what}"
            reason = self._reason(names, num_starts)
            (self.explained if reason else self.different).append(
                f"{sentence}: {reason}" if reason else sentence
            )

    def _has_stepped(self) -> None:
        if self.starts:
            self.starts[-1].has_step = True

    def _reason(self, names: list[str], num_starts: int) -> str:
        starts = self.starts[num_starts:]
        if changed := [change for start in starts for change in start.changed]:
            return f"changed on resume: {', '.join(dict.fromkeys(changed))}"
        back_to = min((start.steps for start in starts), default=0)
        if names == ["loss"] and any(steps >= back_to for steps in self._limit_changed_at):
            return "the limit of a micro-batch changed in one of the two"
        return ""

    def lines(self) -> Iterator[str]:
        """Yield how many steps were repeated, and how many came out alike."""
        num = self._num_compared
        yield f"repeated steps: {num:,}" + (f", alike: {self._num_alike:,}" if num else "")
        if self._rolled_back:
            yield f"steps rolled back and not repeated so far: {len(self._rolled_back):,}"


def _compared(record: Record) -> dict[str, str]:
    """Return what a repeated step must have again, as text; rows as a hash, for they are many."""
    rows = hashlib.blake2b(json.dumps(record.get("rows")).encode(), digest_size=16).hexdigest()
    return {name: str(record.get(name)) for name in _COMPARED} | {"rows": rows}


class _Changes:
    """Lists every change of the batch, of the learning rate and of the limit of a micro-batch."""

    def __init__(self) -> None:
        self.unit = "row"  # of what a step is asked for
        self._asked = 0
        self._rates: list[tuple[float, int]] = []  # the lowest and the highest, each with its step
        self._lines: dict[str, list[str]] = {"batch size": [], "lr": [], "limit": []}

    def step(self, step: int, record: Record, rows: int) -> None:
        """Add a step. The short last step of an epoch was asked for as many rows as the others, so
        it is no change.
        """
        rate = as_number(record.get("lr"))
        asked = whole(record, "asked") or rows
        if asked != self._asked:
            in_rows = f" ({count(rows, 'row', ',')})" if self.unit == "token" else ""
            self._lines["batch size"].append(
                f"step {step:,}: {count(asked, self.unit, ',')}{in_rows}, lr {rate:g}"
            )
            self._asked = asked
        low, high = self._rates or [(rate, step)] * 2
        self._rates = [
            min(low, (rate, step), key=itemgetter(0)),
            max(high, (rate, step), key=itemgetter(0)),
        ]

    def event(self, record: Record, steps: int, *, counts: bool) -> None:
        """Add what was logged about the rate, once, or a change of what a micro-batch may hold."""
        kind = str(record.get("kind"))
        before = record.get("before")
        after = record.get("after")
        if kind == "limit" and before != after:
            why = " (out of memory)" if record.get("out_of_memory") else ""
            back = "" if counts else "; rolled back with the next step"
            change = f"{before} -> {after} {record.get('unit', 'rows')}{why}{back}"
            self._lines["limit"].append(f"after step {steps:,}: {change}")
        elif counts and (kind.startswith("lr") or kind == "reference_batch_size"):
            message = str(record.get("message") or kind)
            if not any(line.endswith(f": {message}") for line in self._lines["lr"]):
                self._lines["lr"].append(f"after step {steps:,}: {message}")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield headings with one line each."""
        if self._rates:
            (least, at_least), (most, at_most) = self._rates
            self._lines["lr"].insert(
                0, f"least {least:g} (step {at_least:,}), most {most:g} (step {at_most:,})"
            )
        for heading, lines in self._lines.items():
            yield from ((heading, line) for line in lines or ["unchanged"])


def _span(name: str, first: int, last: int) -> str:
    """Return ``step 4``, or ``steps 4 to 9``."""
    return f"{name} {first}" if first == last else f"{name}s {first} to {last}"


def _first_ten(rows: Sequence[Any]) -> str:
    return ", ".join(map(repr, rows[:10])) + (
        f" and {len(rows) - 10:,} more" if len(rows) > 10 else ""
    )
