"""A preview of training: the steps that are ahead, divided into stages; pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import groupby
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.errors import GrowthFunctionError, SettingError

from .batch_rules import KEY, Increment, at_most, next_batch_size
from .batch_schedules import Stages
from .progress import Progress

# First stages, and last ones, that are shown where not all fit on a screen.
SHOWN = 10


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step that is ahead.

    Attributes:
        progress: before the step, with the batch that is requested for it.
        rows: rows that it has, over all ranks.
        micro_batches: forwards and backwards on one device; 0 where that is not known yet.
        rates: ``lr``, and what else follows the batch, by name.
        tokens: real tokens that it has, over all ranks; 0 where that is not known.
    """

    progress: Progress
    rows: int
    micro_batches: int
    rates: Mapping[str, float]
    tokens: int = 0


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of one batch; or, in the middle of a long preview, several such stages as
    one.

    Batches, in rows or tokens, and micro-batches are those of one device.

    Attributes:
        first, last: progress before the first step, and after the last one.
        changes: changes of the batch within; 0 but where stages were merged.
    """

    first: Progress
    last: Progress
    steps: int
    changes: int
    batch_least: int
    batch_most: int
    micro_batches_least: int
    micro_batches_most: int
    rates_first: Mapping[str, float]
    rates_last: Mapping[str, float]

    @classmethod
    def of(cls, step: PlannedStep) -> Stage:
        """Make a stage of one step."""
        batch = step.progress.batch
        micro = step.micro_batches
        last = step.progress.after_step(rows=step.rows, tokens=step.tokens)
        return cls(step.progress, last, 1, 0, batch, batch, micro, micro, step.rates, step.rates)

    def merged(self, later: Stage) -> Stage:
        """Merge with what follows."""
        return Stage(
            self.first,
            later.last,
            self.steps + later.steps,
            self.changes + later.changes + (self.last.batch != later.first.batch),
            min(self.batch_least, later.batch_least),
            max(self.batch_most, later.batch_most),
            min(self.micro_batches_least, later.micro_batches_least),
            max(self.micro_batches_most, later.micro_batches_most),
            self.rates_first,
            later.rates_last,
        )


def stages_of(steps: Iterable[PlannedStep]) -> list[Stage]:
    """Divide steps into stages of one batch each; of many, those between the first and the last
    ones are merged into one.

    A short last step of an epoch belongs to its stage, and the end of an epoch ends none.
    """
    alike = groupby(steps, key=lambda step: step.progress.batch)
    stages = [reduce(Stage.merged, map(Stage.of, of_batch)) for _, of_batch in alike]
    if len(stages) <= 2 * SHOWN + 1:
        return stages
    return [*stages[:SHOWN], reduce(Stage.merged, stages[SHOWN:-SHOWN]), *stages[-SHOWN:]]


def table(stages: Sequence[Stage], *, unit: str, ranks: int, notes: Sequence[str] = ()) -> str:
    """Format stages as aligned text: a line for each, totals, notes; `unit`, of the batch, is
    ``rows`` or ``tokens``.
    """
    if not stages:
        return "\n".join(["no step is left", *notes])
    places = ("from", "step", "sample", "to", "step", "sample")
    rates: list[str] = []
    for name in stages[0].rates_first:
        rates += [f"{name} at start", "at end"]
    head = (*places, f"batch ({unit})", "micro-batches", "global batch", *rates, "steps")
    lines = [head, *(_cells(stage, ranks) for stage in stages)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    first = stages[0].first
    last = stages[-1].last
    tokens = last.tokens - first.tokens
    total = (
        f"in all: {last.epochs - first.epochs:.2f} epochs,"
        f" {count(last.steps - first.steps, 'step', ',')},"
        f" {count(last.samples - first.samples, 'sample', ',')},"
        f" {count(tokens, 'token', ',') if tokens else 'a number not known before of tokens'}"
    )
    merged = [
        f"one line merges {stage.changes + 1:,} stages of other batches"
        for stage in stages
        if stage.changes
    ]
    return "\n".join([*text, total, *merged, *notes])


def _cells(stage: Stage, ranks: int) -> tuple[str, ...]:
    places = [
        cell
        for progress in (stage.first, stage.last)
        for cell in (f"{progress.epochs:.2f}ep", f"{progress.steps:,}", f"{progress.samples:,}")
    ]
    low = stage.batch_least
    high = stage.batch_most
    if stage.first.batch > stage.last.batch:
        low, high = high, low
    micro_batches = "?"
    if stage.micro_batches_most:
        micro_batches = _range(stage.micro_batches_least, stage.micro_batches_most)
    return (
        *places,
        _range(low, high),
        micro_batches,
        _range(low * ranks, high * ranks),
        *(
            f"{ends[name]:{'.3g' if name == 'lr' else '.4g'}}"
            for name in stage.rates_first
            for ends in (stage.rates_first, stage.rates_last)
        ),
        f"{stage.steps:,}",
    )


def _range(first: int, last: int) -> str:
    if first == last:
        return f"{first:,}"
    return f"{first:,} to {last:,}"


def as_record(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Return the stages as plain values, for JSON."""
    records = []
    for stage in stages:
        record = asdict(stage)
        record["first"] = stage.first.state_dict()
        record["last"] = stage.last.state_dict()
        record["batch_first"] = stage.first.batch
        record["batch_last"] = stage.last.batch
        records.append(record)
    return records


def check_stages(
    rule: object,
    steps: Iterable[Progress],
    *,
    ranks: int,
    rows_per_epoch: int,
    drop_last: bool,
    maximum: int | None = None,
    unit: str = "rows",
) -> list[str]:
    """Return a line for each stage of a ready-made schedule that training ends before.

    Args:
        rule: other rules have no stages to check.
        steps: progress before each step that is ahead; stages that lie before the first of them are
            not checked.
        ranks: devices that each step is divided over.
        rows_per_epoch, drop_last: of an epoch.
        maximum: what the batch is cut to; None for no limit.
        unit: of the batch: ``rows`` or ``tokens``.

    Raises:
        SettingError: with `drop_last`, a step of a stage would have more rows than an epoch; or a
            stage is over before the step that is running at its beginning.
    """
    if not isinstance(rule, Stages):
        return []
    for batch in rule.batches:
        rows = at_most(batch, maximum)
        if unit == "rows" and drop_last and rows * ranks > rows_per_epoch:
            remedy = (
                f"{rows} rows on each of {ranks} devices are more than an epoch's {rows_per_epoch},"
                f" and drop_last drops such a step; ask for {rows_per_epoch // ranks} or fewer, or"
                " set drop_last=False"
            )
            raise SettingError(KEY, batch, remedy)
    used = {rule.stage(progress) for progress in steps}
    lines = []
    for stage in sorted(set(range(min(used, default=len(rule.batches)), len(rule.batches))) - used):
        missing = f"no step has batch {rule.batches[stage]}, asked for from {rule.begins(stage)} on"
        if stage < max(used):
            remedy = (
                f"{missing}: that is over before the next step begins; make this stage longer, or"
                " leave it out"
            )
            raise SettingError(KEY, rule, remedy)
        lines.append(f"{missing}: training ends before it")
    return lines


def check_increments(
    increment: Increment, *, first_epoch: int, epochs: int, batch_size: int
) -> None:
    """Call a growth function for all epochs that are ahead, before it is known what fits.

    How far the batch will be cut is not known then, so an answer is a mistake where it is one both
    for the batch that nothing has cut and for the one that training begins with.

    Raises:
        GrowthFunctionError: an answer cannot be used; the message names its epoch and batch size.
    """
    increment = _copy_of(increment)
    uncut = batch_size
    for epoch in range(first_epoch, epochs):
        try:
            uncut = next_batch_size(increment, epoch=epoch, batch_size=uncut, maximum=None).after
        except GrowthFunctionError:
            next_batch_size(increment, epoch=epoch, batch_size=batch_size, maximum=None)
            return


def batch_sizes_ahead(
    increment: Increment, *, first_epoch: int, epochs: int, batch_size: int, maximum: int | None
) -> tuple[list[int], str]:
    """Call a growth function for all epochs that are ahead, each twice, which shows a function that
    is not pure.

    Returns:
        The batch size of each epoch from `first_epoch` on, as far as known; and why no more are
        known, "" where all are.

    Raises:
        GrowthFunctionError: an answer cannot be used; the message names its epoch and batch size.
    """
    increment = _copy_of(increment)
    sizes: list[int] = []
    for epoch in range(first_epoch, epochs):
        growth, again = (
            next_batch_size(increment, epoch=epoch, batch_size=batch_size, maximum=maximum)
            for _ in range(2)
        )
        if growth != again:
            answers = (growth.requested - batch_size, again.requested - batch_size)
            return sizes, "the growth function answered {}, then {}".format(*answers)
        batch_size = growth.after
        sizes.append(batch_size)
    return sizes, ""


def _copy_of(increment: Increment) -> Increment:
    """Return a copy where there can be one: a function that counts calls counts none made ahead."""
    # What holds a file or a lock, for instance, has no copy.
    with suppress(Exception):
        return copy.deepcopy(increment)
    return increment
