"""Which rows of the dataset an epoch used, which it left out, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

_USED, _DROPPED = 1, 2
_SHOWN = 10


class Coverage:
    """The rows of one epoch; a byte each.

    Args:
        epoch: from 0.
        num_rows: of the dataset.

    Attributes:
        first_step: the first optimizer step of the epoch.
        last_step: the last one so far.
        position: rows handed out so far.
        is_provable: every step said which rows it used.
        ending: the record of the epoch's end; None before it.
    """

    def __init__(self, epoch: int, num_rows: int) -> None:
        self.epoch = epoch
        self.num_rows = num_rows
        self.first_step = self.last_step = self.position = 0
        self.is_provable = True
        self.ending: Mapping[str, Any] | None = None
        self._marks = bytearray(num_rows)

    @property
    def used(self) -> int:
        """Different rows that were used."""
        return self._marks.count(_USED)

    @property
    def dropped(self) -> int:
        """Rows that are listed as dropped."""
        return self._marks.count(_DROPPED)

    @property
    def left_out(self) -> int:
        """Rows that were not used."""
        return self.num_rows - self.used

    def use(self, rows: Sequence[Any], *, step: int) -> list[str]:
        """Marks the rows of a step as used; returns what is wrong with them, one sentence each."""
        wrong: dict[str, list[Any]] = {}
        for row in rows:
            if type(row) is not int or not 0 <= row < self.num_rows:
                wrong.setdefault(f"not among the {self.num_rows:,} rows of the dataset", []).append(row)
            elif self._marks[row] == _USED:
                wrong.setdefault("used twice", []).append(row)
            elif self._marks[row] == _DROPPED:
                wrong.setdefault("used, and listed as dropped", []).append(row)
            else:
                self._marks[row] = _USED
        return [f"epoch {self.epoch}, step {step}: {rows_in_words(those)} {what}" for what, those in wrong.items()]

    def drop(self, rows: Sequence[Any]) -> list[str]:
        """Marks rows as dropped, once or more often; returns what is wrong with them."""
        wrong: dict[str, list[Any]] = {}
        for row in rows:
            if type(row) is not int or not 0 <= row < self.num_rows:
                what = f"listed as dropped, and not among the {self.num_rows:,} rows of the dataset"
                wrong.setdefault(what, []).append(row)
            elif self._marks[row] == _USED:
                wrong.setdefault("listed as dropped, and used", []).append(row)
            else:
                self._marks[row] = _DROPPED
        return [f"epoch {self.epoch}: {rows_in_words(those)} {what}" for what, those in wrong.items()]

    def problems_of_end(self) -> list[str]:
        """What does not add up at the end of the epoch, one sentence each."""
        name = f"epoch {self.epoch}"
        if not self.is_provable:
            return []
        if self.ending is None:
            missing = [row for row, mark in enumerate(self._marks) if not mark] if self.left_out > self.dropped else []
            return [f"{name}: {rows_in_words(missing)} never used, and not said to be left out"] if missing else []
        problems = []
        if self.ending.get("used") != self.used:
            problems.append(f"{name}: its end says {self.ending.get('used')} rows used, its steps used {self.used}")
        if self.ending.get("left_out") != self.left_out:
            problems.append(
                f"{name}: its end says {self.ending.get('left_out')} rows left out, its steps left out {self.left_out}"
            )
        reasons = self.reasons
        if "an error" in reasons:
            problems.append(f"{name}: {reasons['an error']} rows were lost, which no setting asks for")
        if sum(reasons.values()) != self.left_out:
            problems.append(f"{name}: the reasons {dict(reasons)} do not add up to {self.left_out} rows left out")
        return problems

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why rows were left out, and how many for each reason, as the record of the end says; 0 is left away."""
        reasons = self.ending.get("reasons") if self.ending else {"dropped": self.dropped}
        items = reasons.items() if isinstance(reasons, Mapping) else ()
        return {str(reason): rows for reason, rows in items if isinstance(rows, int) and rows}


def rows_in_words(rows: Collection[Any]) -> str:
    """Row numbers as the beginning of a sentence, the first ten of them: ``rows 3 and 7 were``, ``row 3 was``."""
    shown = [repr(row) for row in list(rows)[:_SHOWN]]
    if len(rows) > _SHOWN:
        return f"rows {', '.join(shown)} and {len(rows) - _SHOWN:,} more were"
    if len(rows) == 1:
        return f"row {shown[0]} was"
    return f"rows {', '.join(shown[:-1])} and {shown[-1]} were"
