"""What changed in a run, listed: the batch size, the learning rate, what a micro-batch may hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class _Stretch:
    """Steps of one batch size."""

    first_step: int
    asked: str
    rate_before: float | None
    rate: float
    fewest: int
    most: int


class BatchSizes:
    """Lengths of steps that were asked for the same batch; the short last step of an epoch is no change.

    A shorter step is taken for a change only when another one of its epoch follows.
    """

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._shorter: tuple[int, int, int, float] | None = None
        self._last_rate: float | None = None
        self._batch_tokens: int | None = None

    def plan(self, record: Mapping[str, Any]) -> None:
        """Takes from a ``plan`` whether steps are filled with rows, or with tokens to a budget."""
        tokens = record.get("batch_tokens")
        self._batch_tokens = tokens if isinstance(tokens, int) else None

    def step(self, step: int, *, epoch: int, rows: int, rate: float, budget: int | None = None) -> None:
        """Adds one step; by tokens, `budget` is what it was asked to hold where that is recorded."""
        by_rows = self._batch_tokens is None
        asked = f"{rows:,} rows" if by_rows else f"{budget or self._batch_tokens:,} tokens"
        if self._shorter and self._shorter[1] == epoch:
            self._begin(self._shorter[0], self._shorter[2], self._shorter[3], f"{self._shorter[2]:,} rows")
        elif self._shorter:
            self._last_rate = self._shorter[3]
        self._shorter = None
        last = self._stretches[-1] if self._stretches else None
        if last is None or last.asked != asked:
            if last and self._batch_tokens is None and not last.asked.endswith("tokens") and rows < last.most:
                self._shorter = step, epoch, rows, rate
                return
            self._begin(step, rows, rate, asked)
        last = self._stretches[-1]
        last.fewest, last.most, self._last_rate = min(last.fewest, rows), max(last.most, rows), rate

    def finish(self, *, epoch_is_done: bool) -> None:
        """No step follows; where the epoch goes on, a shorter last step is a change."""
        if self._shorter and not epoch_is_done:
            step, _, rows, rate = self._shorter
            self._begin(step, rows, rate, f"{rows:,} rows")
        self._shorter = None

    def lines(self) -> list[str]:
        """One line for each change, the first batch included."""
        width = len(f"{self._stretches[-1].first_step:,}") if self._stretches else 0
        lines, before = [], None
        for stretch in self._stretches:
            asked = stretch.asked if before is None else f"{before.removesuffix(' rows')} -> {stretch.asked}"
            if stretch.asked.endswith("tokens"):
                asked += f" ({stretch.fewest:,} to {stretch.most:,} rows)"
            rates = [stretch.rate] if stretch.rate_before is None else [stretch.rate_before, stretch.rate]
            lines.append(
                f"step {stretch.first_step:>{width},}: {asked}, lr {' -> '.join(f'{rate:g}' for rate in rates)}"
            )
            before = stretch.asked
        return lines

    def _begin(self, step: int, rows: int, rate: float, asked: str) -> None:
        self._stretches.append(_Stretch(step, asked, self._last_rate, rate, rows, rows))
        self._last_rate = rate


class Rates:
    """The learning rate: first, last, least and most, and what was decided about it."""

    def __init__(self) -> None:
        self._first = self._last = self._least = self._most = (0, 0.0)
        self._decisions: dict[str, tuple[int, int]] = {}

    def step(self, step: int, *, rate: float) -> None:
        """Adds the rate of one step."""
        self._last = here = step, rate
        if not self._first[0]:
            self._first = self._least = self._most = here
        self._least = here if rate < self._least[1] else self._least
        self._most = here if rate > self._most[1] else self._most

    def decision(self, record: Mapping[str, Any], *, steps: int) -> None:
        """Adds what was decided after so many steps; what is said again at a restart is counted."""
        message = str(record.get("message") or record["kind"])
        first, times = self._decisions.get(message, (steps, 0))
        self._decisions[message] = first, times + 1

    def lines(self) -> list[str]:
        """The four rates, then a line for each decision."""
        named = {"first": self._first, "last": self._last, "least": self._least, "most": self._most}
        lines = [", ".join(f"{name} {rate:g} (step {step:,})" for name, (step, rate) in named.items())]
        for message, (steps, times) in self._decisions.items():
            lines.append(f"after step {steps:,}: {message}" + (f" (said {times} times)" if times > 1 else ""))
        return lines if self._first[0] else lines[1:]


def capacity_line(record: Mapping[str, Any], *, steps: int, counts: bool) -> str:
    """One change of what a micro-batch may hold."""
    change = f"{record.get('before')} -> {record.get('after')} {record.get('unit', 'rows')}"
    why = " (out of memory)" if record.get("out_of_memory") else ""
    return f"after step {steps:,}: {change}{why}" + ("" if counts else "; taken back with the step that follows")
