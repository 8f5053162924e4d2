"""A preview of training: the steps that are ahead, divided into stages; pure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from adaptive_batch.errors import GrowthFunctionError, SettingError

from .batch_rules import KEY, next_batch_size
from .progress import Progress

MOST_LINES = 24  # stages that fit on a screen, with the lines around them


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step that is ahead.

    Attributes:
        progress: before the step.
        batch: what is requested for it on one device, in rows or, by `batch_tokens`, in tokens.
        rows: rows that it has, over all ranks.
        micro_batches: forwards and backwards on one device.
        learning_rate: of the step.
        tokens: real tokens that it has, over all ranks; 0 where that is not known.
    """

    progress: Progress
    batch: int
    rows: int
    micro_batches: int
    learning_rate: float
    tokens: int = 0


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of one batch; or, in the middle of a long preview, several such stages as one.

    Attributes:
        first: progress before the first step.
        last: progress after the last step.
        steps: optimizer steps.
        changes: changes of the batch within; 0 but where stages were merged.
        batch_first, batch_last, batch_least, batch_most: on one device, in rows or tokens.
        micro_batches_least, micro_batches_most: of a step on one device.
        learning_rate_first, learning_rate_last: at the first and at the last step.
    """

    first: Progress
    last: Progress
    steps: int
    changes: int
    batch_first: int
    batch_last: int
    batch_least: int
    batch_most: int
    micro_batches_least: int
    micro_batches_most: int
    learning_rate_first: float
    learning_rate_last: float

    @classmethod
    def of(cls, steps: Iterable[PlannedStep]) -> Stage:
        """Make a stage of consecutive steps of one batch; one step at least."""
        first = step = next(iterator := iter(steps))
        num_steps, least, most = 1, first.micro_batches, first.micro_batches
        for step in iterator:
            num_steps += 1
            least, most = min(least, step.micro_batches), max(most, step.micro_batches)
        last = step.progress.after_step(rows=step.rows, tokens=step.tokens)
        batches = (first.batch, step.batch, first.batch, first.batch)
        return cls(first.progress, last, num_steps, 0, *batches, least, most, first.learning_rate, step.learning_rate)

    @classmethod
    def merged(cls, stages: Sequence[Stage]) -> Stage:
        """Merge consecutive stages of different batches; one stage at least."""
        last = stages[-1]
        return replace(
            stages[0],
            last=last.last,
            steps=sum(stage.steps for stage in stages),
            changes=len(stages) - 1,
            batch_last=last.batch_last,
            batch_least=min(stage.batch_least for stage in stages),
            batch_most=max(stage.batch_most for stage in stages),
            micro_batches_least=min(stage.micro_batches_least for stage in stages),
            micro_batches_most=max(stage.micro_batches_most for stage in stages),
            learning_rate_last=last.learning_rate_last,
        )


def stages_of(steps: Iterable[PlannedStep], *, most_lines: int = MOST_LINES) -> list[Stage]:
    """Divide steps into stages of one batch each.

    A short last step of an epoch belongs to its stage, and the end of an epoch ends none. Of more than `most_lines` stages
    the first and the last ones are kept, and those between are merged into one.
    """
    stages = [Stage.of(alike) for _, alike in groupby(steps, key=lambda step: step.batch)]
    if len(stages) <= most_lines:
        return stages
    before = (most_lines - 1) // 2
    after = len(stages) - (most_lines - 1 - before)
    return [*stages[:before], Stage.merged(stages[before:after]), *stages[after:]]


def table(stages: Sequence[Stage], *, unit: str, ranks: int, notes: Sequence[str] = ()) -> str:
    """Format stages as aligned text: a line for each stage, totals, notes.

    Args:
        stages: in order; may be none.
        unit: of the batch: ``rows`` or ``tokens``.
        ranks: devices that each step is divided over.
        notes: lines to add at the end.
    """
    if not stages:
        return "\n".join(["no step is left", *notes])
    places = ("from", "step", "sample", "to", "step", "sample")
    head = (*places, f"batch ({unit})", "micro-batches", "global batch", "lr at start", "at end", "steps")
    lines = [head, *(_cells(stage, ranks) for stage in stages)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    first, last = stages[0].first, stages[-1].last
    tokens = last.tokens - first.tokens
    total = (
        f"in all: {last.epochs - first.epochs:.2f} epochs, {last.steps - first.steps:,} steps, "
        f"{last.samples - first.samples:,} samples, {f'{tokens:,}' if tokens else 'a number not known before of'} tokens"
    )
    merged = [f"one line merges {stage.changes + 1:,} stages of other batches" for stage in stages if stage.changes]
    return "\n".join([*text, total, *merged, *notes])


def _cells(stage: Stage, ranks: int) -> tuple[str, ...]:
    places = [
        cell
        for progress in (stage.first, stage.last)
        for cell in (f"{progress.epochs:.2f}ep", f"{progress.steps:,}", f"{progress.samples:,}")
    ]
    low, high = stage.batch_least, stage.batch_most
    if stage.batch_first > stage.batch_last:
        low, high = high, low
    return (
        *places,
        _range(low, high),
        _range(stage.micro_batches_least, stage.micro_batches_most),
        _range(low * ranks, high * ranks),
        f"{stage.learning_rate_first:.3g}",
        f"{stage.learning_rate_last:.3g}",
        f"{stage.steps:,}",
    )


def _range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def as_record(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Return the stages as plain values, for JSON."""
    return [{**asdict(stage), "first": stage.first.state_dict(), "last": stage.last.state_dict()} for stage in stages]


def check_stages(
    rule: object,
    steps: Iterable[PlannedStep],
    *,
    ranks: int,
    rows_per_epoch: int,
    drop_last: bool,
    maximum: int | None = None,
    unit: str = "rows",
) -> list[str]:
    """Look for stages of a ready-made schedule that no step is in, or that no epoch has the rows for.

    Args:
        rule: other rules have no stages to check.
        steps: all that are ahead; stages that lie before the first of them are not checked.
        ranks: devices that each step is divided over.
        rows_per_epoch: rows that an epoch has.
        drop_last: whether a short last step of an epoch is dropped.
        maximum: what the batch is cut to; None for no limit.
        unit: of the batch: ``rows`` or ``tokens``.

    Returns:
        A line for each stage that training ends before.

    Raises:
        SettingError: with `drop_last`, a step of a stage would have more rows than an epoch; or a stage is over before the
            step that is running at its beginning.
    """
    batches: Sequence[int] = getattr(rule, "batches", ())
    stage_of: Callable[[Progress], int] | None = getattr(rule, "stage", None)
    begins: Callable[[int], str] | None = getattr(rule, "begins", None)
    if not batches or stage_of is None or begins is None:
        return []
    for batch in batches:
        rows = batch if maximum is None else min(batch, maximum)
        if unit == "rows" and drop_last and rows * ranks > rows_per_epoch:
            raise SettingError(
                KEY,
                batch,
                f"{rows} rows{f' on each of {ranks} devices' if ranks > 1 else ''} are more than an epoch's {rows_per_epoch}, and "
                f"drop_last drops such a step; {f'ask for {fewer} or fewer, or ' if (fewer := rows_per_epoch // ranks) else ''}set drop_last=False",
            )
    used = {stage_of(step.progress) for step in steps}
    lines = []
    for stage in range(min(used, default=len(batches)), len(batches)):
        if stage in used:
            continue
        if stage < max(used):
            raise SettingError(
                KEY,
                rule,
                f"no step has batch {batches[stage]}, which it asks for from {begins(stage)} on: that is over before the next step "
                "begins; make this stage longer, or leave it out",
            )
        lines.append(f"no step has batch {batches[stage]}, asked for from {begins(stage)} on: training ends before it")
    return lines


def batch_sizes_ahead(
    increment: Callable[[int, int], object], *, first_epoch: int, epochs: int, batch_size: int, maximum: int | None
) -> tuple[list[int], int | None, str]:
    """Call a growth function for all epochs that are ahead, each twice, which shows a function that is not pure.

    A copy is called where there can be one, so that a function that counts its calls does not count these.

    Args:
        increment: ``f(epoch, batch_size) -> rows to add``.
        first_epoch: that starts next, from 0.
        epochs: of the whole training.
        batch_size: rows before `first_epoch`.
        maximum: the bound in rows; None for none.

    Returns:
        The batch size of each epoch from `first_epoch` on, as far as known; the last epoch that is known, None where all
        are; and why no more are known.

    Raises:
        GrowthFunctionError: the function failed for `first_epoch`.
    """
    with suppress(Exception):  # what holds a file or a lock, for instance, has no copy
        increment = copy.deepcopy(increment)
    sizes: list[int] = []
    for epoch in range(first_epoch, epochs):
        answers: list[int] = []
        try:
            for _ in range(2):
                growth = next_batch_size(increment, epoch=epoch, batch_size=batch_size, maximum=maximum)
                answers.append(growth.requested - batch_size)
        except GrowthFunctionError as error:
            if epoch == first_epoch:
                raise
            return sizes, epoch - 1, str(error)
        if answers[0] != answers[1]:
            return sizes, epoch - 1, f"the growth function answered {answers[0]}, then {answers[1]}"
        batch_size = growth.after
        sizes.append(batch_size)
    return sizes, None, ""
