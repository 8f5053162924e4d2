"""The steps of a run, gone through step by step: what counts is checked against all that was counted before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .changes import BatchSizes, Rates, capacity_line
from .coverage import Coverage
from .lineage import Entry, Lineage, Record, number, steps_at, whole
from .repeats import Repeats

_MOST_PROBLEMS = 50


@dataclass(frozen=True)
class Epoch:
    """How the rows of an epoch stand.

    Attributes:
        number: from 0.
        steps: its first and last optimizer step.
        used: different rows that were used.
        num_rows: of the dataset.
        reasons: why rows were left out, and how many for each reason.
        is_done: no step of it is to follow.
        is_provable: every step of it said which rows it used.
    """

    number: int
    steps: tuple[int, int]
    used: int
    num_rows: int
    reasons: Mapping[str, int]
    is_done: bool
    is_provable: bool


class Ledger:
    """What the records that count say so far, and what is wrong with it.

    Args:
        lineage: of the records that will be added.

    Attributes:
        problems: what is wrong, one sentence each; the first fifty.
        num_problems: all of them.
        notes: what a reader should know, one sentence each.
        starts: steps that were done at each start of the run.
        steps: optimizer steps that count.
        num_rows: of the dataset, as the newest start says.
        num_torn: torn lines.
        epochs: the epochs so far; the last one when :meth:`finish` was called.
        batch_sizes, rates, capacities: what changed, listed.
        repeats: the steps that were done again.
    """

    def __init__(self, lineage: Lineage) -> None:
        self.problems: list[str] = []
        self.num_problems = 0
        self.notes: list[str] = []
        self.starts: list[int] = []
        self.steps = self.num_rows = self.num_torn = 0
        self.epochs: list[Epoch] = []
        self.batch_sizes, self.rates, self.repeats = BatchSizes(), Rates(), Repeats()
        self.capacities: list[str] = []
        self._samples = self._tokens = 0
        self._epoch: Coverage | None = None
        self._dropped: dict[int, list[list[Any]]] = {}  # by epoch, before its first step
        self._is_over = False
        self._is_whole = lineage.is_whole
        self._trusts = not lineage.is_whole  # after a gap that was named, the next counts are taken as they come
        if not lineage.is_whole:
            self._wrong("the beginning of the run is not in the record")

    def add(self, entry: Entry) -> None:
        """Takes in the next record."""
        record = entry.record
        if record is None:
            self.num_torn += 1
            return
        if not entry.in_run:
            return
        kind = str(record.get("kind"))
        if kind == "start":
            self.repeats.start(steps=steps_at(record))
            self.starts.append(steps_at(record))
            self.num_rows = max(0, self.num_rows if (rows := whole(record, "rows")) is None else rows)
        if kind == "capacity" and record.get("before") != record.get("after"):
            counts = entry.counts and not entry.is_left  # it is lowered in the midst of the next step
            self.capacities.append(capacity_line(record, steps=entry.steps, counts=counts))
        if kind == "step" and not entry.counts:
            self.repeats.take_back(entry.steps, record)
        elif kind != "step":
            self.repeats.decision(record, steps=entry.steps)
        if entry.counts:
            self._count(kind, record, entry.steps)

    def _count(self, kind: str, record: Record, steps: int) -> None:
        if kind == "start":
            self._start(record)
        elif kind == "step":
            self._step(record)
        elif kind == "epoch":
            self._epoch_ends(record)
        elif kind == "dropped":
            self._drop(record)
        elif kind == "epoch_restarted":
            self._restart(record)
        elif kind == "plan":
            self.batch_sizes.plan(record)
        elif kind in ("resume_point", "checkpoint"):
            saved = whole(record, "step" if kind == "resume_point" else "steps") or 0
            if saved > self.steps:
                self._gap(f"{kind} at step {saved}", saved)
        elif kind == "end":
            self._is_over = True
        elif kind.startswith("lr") or kind == "reference_batch_size":
            self.rates.decision(record, steps=steps)

    def _start(self, record: Record) -> None:
        """Training goes on: where its record says that it does?"""
        progress, epoch = record.get("progress"), self._epoch
        self._is_over = False
        self._dropped.clear()  # rows of an epoch that has no step yet are listed again when it begins
        if not isinstance(progress, Mapping):
            self._wrong("a start does not say where training goes on")
            return
        if (steps := steps_at(record)) > self.steps:
            self._gap(f"resumed at step {steps}", steps)
        if self._trusts:
            return
        for name, counted in (("samples", self._samples), ("tokens", self._tokens)):
            there = whole(progress, name)
            if there is not None and there != counted:
                self._wrong(f"resumed at step {steps} with {there:,} {name}, the steps up to it have {counted:,}")
        place = progress.get("epoch"), progress.get("epoch_rows")
        if epoch and place[0] == epoch.epoch:
            epoch.ending = None  # it goes on, or ends again
        here, ended = (epoch.epoch, epoch.position) if epoch else (0, 0), (epoch.epoch + 1, 0) if epoch else (0, 0)
        if place not in (here, ended):
            said = f"{place[1]} rows into epoch {place[0]}"
            self._wrong(f"resumed at step {steps}, {said}; the steps up to it end {here[1]} rows into epoch {here[0]}")
        elif epoch and place == here and epoch.position and self.num_rows != epoch.num_rows:
            self._wrong(
                f"resumed at step {steps} within epoch {epoch.epoch} with {self.num_rows:,} rows in the dataset, "
                f"{epoch.num_rows:,} before"
            )

    def _restart(self, record: Record) -> None:
        """An epoch begins anew with other data; its steps up to here have been taken back already."""
        epoch, forgotten = whole(record, "epoch"), self.repeats.forget()
        self.notes.append(
            f"epoch {epoch} began anew after step {self.steps}, as its data was changed: {forgotten} steps of before do not count"
        )
        self._dropped.clear()

    def _step(self, record: Record) -> None:
        step, epoch = whole(record, "step"), whole(record, "epoch")
        if step is None or epoch is None:
            self._wrong(f"after step {self.steps}: a step without its number or its epoch")
            return
        if step > self.steps + 1:
            self._gap(f"step {step}", step - 1)
        elif step <= self.steps:
            self._wrong(f"step {step} follows step {self.steps}, without a start between them")
            self._trusts = True
        self.repeats.count(step, record)
        self.steps = step
        coverage = self._coverage_of(epoch, what=f"step {step}")
        if coverage is None:
            return
        self._check_numbers(record, coverage, step)
        coverage.first_step = coverage.first_step or step
        coverage.last_step = step
        rate, batch_size = number(record, "lr"), whole(record, "batch_size")
        if rate is not None and batch_size is not None:
            self.batch_sizes.step(step, epoch=epoch, rows=batch_size, rate=rate, budget=whole(record, "asked"))
            self.rates.step(step, rate=rate)

    def _check_numbers(self, record: Record, coverage: Coverage, step: int) -> None:
        """The rows of a step, and all that is counted in rows and tokens."""
        rows, size = record.get("rows"), whole(record, "batch_size") or 0
        if isinstance(rows, list):
            for problem in coverage.use(rows, step=step):
                self._wrong(problem)
            if size != len(rows):
                self._wrong(f"step {step}: batch_size {size}, and {len(rows)} rows are listed")
        else:
            coverage.is_provable = False
        position, samples = whole(record, "position"), whole(record, "samples_seen")
        tokens = whole(record, "tokens_seen") or 0
        if not self._trusts and position != coverage.position + size:
            self._wrong(
                f"step {step}: position {position}, not {coverage.position + size} = {coverage.position} + {size}"
            )
        if not self._trusts and samples != self._samples + size:
            self._wrong(f"step {step}: samples_seen {samples}, not {self._samples + size} = {self._samples} + {size}")
        if not self._trusts and tokens < self._tokens:
            self._wrong(f"step {step}: tokens_seen {tokens}, after {self._tokens}")
        coverage.position, self._samples, self._tokens = position or 0, samples or 0, tokens
        self._trusts = False

    def _coverage_of(self, epoch: int, *, what: str) -> Coverage | None:
        """The epoch that something belongs to; where it is a new one, the one before is done."""
        current = self._epoch
        if current and epoch == current.epoch and current.ending is None:
            return current
        before = current.epoch if current else -1
        if epoch <= before:
            self._wrong(f"{what} belongs to epoch {epoch}, after epoch {before} was begun or done")
            self._trusts = True
            return None
        self._close(is_done=True)
        if epoch > before + 1 and (current or self._is_whole):
            self._wrong(f"{what} belongs to epoch {epoch}; epoch {before + 1} is not in the record")
        self._epoch = coverage = Coverage(epoch, self.num_rows)
        for rows in self._dropped.pop(epoch, []):
            for problem in coverage.drop(rows):
                self._wrong(problem)
        return coverage

    def _drop(self, record: Record) -> None:
        epoch, rows = whole(record, "epoch"), record.get("rows")
        if epoch is None or not isinstance(rows, list):
            self._wrong(f"after step {self.steps}: dropped rows without their numbers or their epoch")
        elif self._epoch and self._epoch.epoch == epoch:
            for problem in self._epoch.drop(rows):
                self._wrong(problem)
        else:
            self._dropped.setdefault(epoch, []).append(rows)

    def _epoch_ends(self, record: Record) -> None:
        epoch = whole(record, "epoch")
        if self._epoch and epoch == self._epoch.epoch:
            self._epoch.ending = record  # said again where it was resumed at its end
        elif epoch is None:
            self._wrong(f"after step {self.steps}: the end of an epoch without its number")
        elif coverage := self._coverage_of(epoch, what=f"an end after step {self.steps}"):
            coverage.ending = record  # an epoch without a step

    def _close(self, *, is_done: bool) -> bool:
        """Judge the current epoch; returns whether it is done."""
        coverage = self._epoch
        if coverage is None:
            return is_done
        is_done = is_done or coverage.ending is not None or coverage.left_out == coverage.dropped
        for problem in coverage.problems_of_end() if is_done else ():
            self._wrong(problem)
        if not coverage.is_provable:
            self._wrong(
                f"epoch {coverage.epoch}: which rows its steps used is not recorded, as an older version wrote them"
            )
        self.epochs.append(
            Epoch(
                coverage.epoch,
                (coverage.first_step, coverage.last_step),
                coverage.used if coverage.is_provable else coverage.position,
                coverage.num_rows,
                coverage.reasons if is_done else {},
                is_done,
                coverage.is_provable,
            )
        )
        return is_done

    def finish(self) -> None:
        """No record follows."""
        is_done = self._close(is_done=self._is_over)
        self.batch_sizes.finish(epoch_is_done=is_done)
        for difference in self.repeats.different:
            self._wrong(difference)

    def _gap(self, seen: str, up_to: int) -> None:
        first = self.steps + 1
        missing = f"step {first} is" if up_to == first else f"steps {first} to {up_to} are"
        torn = f" (torn lines before it: {self.num_torn})" if self.num_torn else ""
        self._wrong(f"{seen}: {missing} not in the record{torn}")
        self.steps, self._trusts = up_to, True

    def _wrong(self, problem: str) -> None:
        self.num_problems += 1
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)
