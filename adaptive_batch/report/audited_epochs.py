"""The epochs of a run in its audit: which rows each has used, and what does not add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from adaptive_batch._util import count

from .run_history import Record

# Problems that are kept, and notes: all are counted, and a broken log has too many to print.
MOST = 20
# What the byte of a row means: an epoch of many rows must fit into memory.
_MARKS = {1: "used", 2: "listed as dropped"}


class Problems:
    """Why the proof does not hold: all reasons are counted, and the first twenty kept."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.num = 0

    def add(self, *problems: str, of: str = "") -> None:
        """Add problems, each behind the prefix `of`."""
        self.num += len(problems)
        self.kept += [of + problem for problem in problems[: MOST - len(self.kept)]]


class Epoch:
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

    def mark(self, mark: int, rows: Sequence[Any]) -> list[str]:
        """Mark rows as used or as dropped; return what is wrong with them.

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
        return [f"{problem}: {first_ten(numbers)}" for problem, numbers in wrong_rows.items()]

    def forget_dropped(self) -> None:
        """Remove every mark of a dropped row."""
        self._marks = self._marks.replace(b"\2", b"\0")
        self.num_dropped = 0

    def close(self, *, is_done: bool) -> list[str]:
        """Return what does not add up at the end of the epoch; what was counted stays."""
        self.is_done = is_done or self.ending is not None or self.left_out == self.num_dropped
        missing = [row for row, mark in enumerate(self._marks) if not mark]
        # Only one epoch is open at a time, so only one keeps its marks in memory.
        self._marks = bytearray()
        if self.ending is None:
            if missing and self.is_done:
                return [f"rows never used, and not recorded as left out: {first_ten(missing)}"]
            return []
        problems = []
        for name, counted in (("used", self.used), ("left_out", self.left_out)):
            recorded = self.ending.get(name)
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


class Epochs:
    """The epochs of a run, in their order; only the newest is open.

    Args:
        problems: takes what does not add up.
        has_beginning: whether the log begins with the run.

    Attributes:
        all: epochs so far.
    """

    def __init__(self, problems: Problems, *, has_beginning: bool) -> None:
        self.all: list[Epoch] = []
        self._problems = problems
        self._has_beginning = has_beginning
        # Rows of the dataset now.
        self._num_rows = 0
        # Dropped rows by epoch, which may be listed before the first step of the epoch.
        self._dropped: dict[int, list[list[Any]]] = {}

    @property
    def newest(self) -> Epoch | None:
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
            self._problems.add(
                f"resumed at step {steps}, {count(place[1], 'row')} into epoch {place[0]}; "
                f"the steps up to it end {count(end[1], 'row')} into epoch {end[0]}"
            )
        elif epoch and place == end and epoch.position and self._num_rows != epoch.num_rows:
            self._problems.add(
                f"resumed at step {steps} within epoch {epoch.number} with"
                f" {count(self._num_rows, 'row', ',')} in the dataset, {epoch.num_rows:,} before"
            )

    def of(self, number: int, *, subject: str) -> Epoch | None:
        """Return the epoch with this number; where it is a new one, close the one before.

        Return None, with a problem that names the `subject`, where the epoch was done before.
        """
        current = self.newest
        if current and number == current.number and current.ending is None:
            return current
        newest = current.number if current else -1
        if number <= newest:
            self._problems.add(
                f"{subject} belongs to epoch {number}, after epoch {newest} was begun or done"
            )
            return None
        self.close(is_done=True)
        # A log without its beginning may begin in any epoch.
        if number > newest + 1 and (current or self._has_beginning):
            self._problems.add(
                f"{subject} belongs to epoch {number}; epoch {newest + 1} is not in the log"
            )
        epoch = Epoch(number, self._num_rows)
        self.all.append(epoch)
        for rows in self._dropped.pop(number, []):
            self._problems.add(*epoch.mark(2, rows), of=f"epoch {number}: ")
        return epoch

    def drop(self, rows: object, number: int | None, *, at: int) -> None:
        """Mark rows as dropped, or keep them until their epoch begins."""
        epoch = self.newest
        if number is None or not isinstance(rows, list):
            self._problems.add(
                f"after step {at}: dropped rows without their numbers or their epoch"
            )
        elif epoch and epoch.number == number:
            self._problems.add(*epoch.mark(2, rows), of=f"epoch {number}: ")
        else:
            self._dropped.setdefault(number, []).append(rows)

    def plan_again(self, number: int | None) -> None:
        """Remove what an epoch has listed as dropped.

        It is planned again, and lists what it drops now.
        """
        epoch = self.newest
        if epoch and epoch.number == number:
            epoch.forget_dropped()
        self.forget_listed()

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

    def check_asked(self, num_asked: int | None) -> None:
        """Check that training has ended with the last epoch that was asked for, where that is
        recorded.
        """
        num_begun = self.newest.number + 1 if self.newest else 0
        if num_asked is not None and num_begun < num_asked:
            missing = span("epoch", num_begun, num_asked - 1)
            self._problems.add(f"training has ended, and {missing} of {num_asked} not in the log")

    def close(self, *, is_done: bool) -> None:
        """Judge the newest epoch."""
        epoch = self.newest
        if epoch:
            self._problems.add(*epoch.close(is_done=is_done), of=f"epoch {epoch.number}: ")


def span(name: str, first: int, last: int) -> str:
    """Return ``step 4``, or ``steps 4 to 9``."""
    if first == last:
        return f"{name} {first}"
    return f"{name}s {first} to {last}"


def first_ten(rows: Sequence[Any]) -> str:
    """Return the first ten numbers, and how many follow them."""
    shown = ", ".join(map(repr, rows[:10]))
    if len(rows) <= 10:
        return shown
    return f"{shown} and {len(rows) - 10:,} more"
