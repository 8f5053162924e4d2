"""Steps that were done again after a restart: alike, or not, and whether a recorded change explains it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What a step must be again: which rows it took, what came of them, and the rate that it was applied with.
COMPARED = ("rows", "loss", "lr")


@dataclass(frozen=True)
class _Done:
    values: tuple[str, ...]
    num_starts: int


@dataclass
class _Start:
    steps: int
    changed: list[str] = field(default_factory=list)


class Repeats:
    """Compares each step that was taken back with what it was when it was done again.

    A difference is explained, and no failure, in two cases. A setting was changed by the restart: between the ``start``
    and its first step there is a record whose ``before`` and ``after`` differ (not that of a growth rule, which says what
    was ``requested``). Or the rows and the rate are the same, and after the step that the restart went back to the
    capacity of a micro-batch was lowered in one of the two: sums are then rounded elsewhere.

    Attributes:
        num_alike: steps that were done again and came out the same.
        different: what differed without a recorded reason, one sentence each.
        explained: what differed with a recorded reason, one sentence each.
    """

    def __init__(self) -> None:
        self.num_alike = 0
        self.different: list[str] = []
        self.explained: list[str] = []
        self._taken_back: dict[int, list[_Done]] = {}
        self._starts: list[_Start] = []
        self._capacity_changed_at: list[int] = []
        self._at_start = False

    @property
    def num_open(self) -> int:
        """Steps that were taken back and are not done again so far."""
        return len(self._taken_back)

    def start(self, *, steps: int) -> None:
        """Training goes on after so many steps."""
        self._starts.append(_Start(steps))
        self._at_start = True

    def decision(self, record: Mapping[str, Any], *, steps: int) -> None:
        """Something was decided after so many steps."""
        if "before" not in record or record["before"] == record.get("after"):
            return
        kind = str(record.get("kind"))
        if kind == "capacity":
            self._capacity_changed_at.append(steps)
        elif self._at_start and self._starts and "requested" not in record:
            self._starts[-1].changed.append(f"{kind} {record['before']} -> {record.get('after')}")

    def take_back(self, step: int, record: Mapping[str, Any]) -> None:
        """A step that does not count."""
        self._at_start = False
        self._taken_back.setdefault(step, []).append(_Done(_values(record), len(self._starts)))

    def forget(self) -> int:
        """What was taken back is not to be done again, as the data is another; returns how many steps that is."""
        forgotten = len(self._taken_back)
        self._taken_back.clear()
        return forgotten

    def count(self, step: int, record: Mapping[str, Any]) -> None:
        """A step that counts: compared with what was taken back of the same number."""
        self._at_start = False
        taken_back = self._taken_back.pop(step, None)
        if not taken_back:
            return
        now, compared = _values(record), [(done, _differing(done.values, _values(record))) for done in taken_back]
        unlike = [(done, names) for done, names in compared if names]
        self.num_alike += not unlike
        for done, names in unlike[:1]:
            what = "; ".join(
                f"other {name}" + (f" ({done.values[i]}, then {now[i]})" if name != "rows" else "")
                for i, name in enumerate(COMPARED)
                if name in names
            )
            reason = self._reason(done, names)
            sentence = f"step {step} was done again with {what}"
            (self.explained if reason else self.different).append(f"{sentence}: {reason}" if reason else sentence)

    def _reason(self, done: _Done, names: list[str]) -> str:
        starts = self._starts[done.num_starts :]
        if changed := [change for start in starts for change in start.changed]:
            return f"changed on resume: {', '.join(dict.fromkeys(changed))}"
        back_to = min((start.steps for start in starts), default=0)
        if names == ["loss"] and any(steps >= back_to for steps in self._capacity_changed_at):
            return "the capacity of a micro-batch was lowered in one of the two"
        return ""


def _values(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What is compared, as text; the rows as a digest, as there may be many."""
    rows = hashlib.blake2b(json.dumps(record.get("rows")).encode(), digest_size=16).hexdigest()
    return rows, *(str(record.get(name)) for name in COMPARED[1:])


def _differing(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    return [name for name, one, other in zip(COMPARED, before, after, strict=True) if one != other]
