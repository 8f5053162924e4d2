"""What training is going to do: its stages, before the first step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.data import Batches
from adaptive_batch.memory import RandomState
from adaptive_batch.probe import ProbeResult
from adaptive_batch.schedules import (
    PlannedStep,
    Progress,
    Seesaw,
    as_record,
    batch_sizes_ahead,
    check_increments,
    check_stages,
    next_batch_size,
    stages_of,
    table,
)
from adaptive_batch.training import AdaptiveRate, MicroBatchSizer, same_answers

from .data import Data
from .job import Job
from .limit_finder import LimitFinder, left_by_rounding
from .rate import build_rate, stand_in
from .resumed_run import ResumedRun
from .settings import Settings


@dataclass(frozen=True)
class TrainingAhead:
    """What is left of training, as the rules answer now.

    Attributes:
        progress: where it begins.
        sizes: batch size of each epoch, as far as it is known.
        unknown: why it is not known of later ones; empty where it is.
        full_batch_rows: the largest global batch that is planned, over which `loss_per_full_batch`
            averages.
        schedule_steps: where the learning rate's schedule ends.
    """

    progress: Progress
    sizes: Mapping[int, int]
    unknown: str
    full_batch_rows: int
    schedule_steps: int


class TrainingPreview:
    """Goes through the rest of training with the rules that training will ask, without training.

    Args:
        job: job of the run.
        data: rows of the run.
        batches: steps of the run.
        resumed: state that the run begins with.
    """

    def __init__(self, job: Job, data: Data, batches: Batches, resumed: ResumedRun) -> None:
        self._job = job
        self._data = data
        self._settings = job.settings
        self._batches = batches
        self._resumed = resumed
        self._stage_notes: list[str] = []
        # The largest batch that a schedule returns, on one device.
        self._largest_scheduled = 0

    def check(self) -> None:
        """Ask the rules ahead, so that mistakes show before weights load.

        Raises:
            GrowthFunctionError: a rule raises or gives no number of rows.
            SettingError: a stage of a schedule cannot hold its batch.
        """
        settings = self._settings
        batches = self._batches
        progress = self._resumed.progress
        if not settings.grows or progress.epoch >= settings.epochs:
            return
        function = settings.batch_increase_function
        with RandomState(self._job.device):
            if settings.batch_size_schedule is not None:
                self._stage_notes = self._check_stages(progress)
            elif function is not None:
                has_begun = progress.epoch_steps > 0
                # An epoch that has begun was asked about when it began.
                if not has_begun:
                    grown = next_batch_size(
                        function,
                        epoch=progress.epoch,
                        batch_size=batches.batch_size,
                        maximum=None,
                    )
                    same_answers({"batch_increase_function": grown.after})
                check_increments(
                    function,
                    first_epoch=progress.epoch + has_begun,
                    epochs=settings.epochs,
                    batch_size=batches.batch_size,
                )

    def look_ahead(self, progress: Progress, *, from_this_epoch: bool = False) -> TrainingAhead:
        """Ask the growth function ahead for the epochs that come; find where schedules end.

        Args:
            progress: progress of training.
            from_this_epoch: ask for the epoch at whose beginning progress is, too.

        Raises:
            GrowthFunctionError: an answer for a later epoch cannot be used.
        """
        settings = self._settings
        batches = self._batches
        epoch = progress.epoch
        sizes = [batches.batch_size] * max(0, settings.epochs - epoch)
        unknown = ""
        if settings.batch_increase_function is not None and sizes:
            with RandomState(self._job.device):
                grown_sizes, reason = batch_sizes_ahead(
                    settings.batch_increase_function,
                    # An epoch that was asked about keeps its batch.
                    first_epoch=epoch + (not from_this_epoch),
                    epochs=settings.epochs,
                    batch_size=batches.batch_size,
                    maximum=batches.maximum(),
                )
            sizes = grown_sizes
            if not from_this_epoch:
                sizes = [batches.batch_size, *grown_sizes]
            if reason:
                unknown = f"unknown after epoch {epoch + len(sizes) - 1}: {reason}"
        size_of_epoch = dict(enumerate(sizes, start=epoch))
        same_answers(
            {f"batch_increase_function in epoch {at}": size for at, size in size_of_epoch.items()}
        )
        schedule_steps = settings.epochs * batches.reference.steps
        if settings.rate.lr_clock.decay == "steps" and epoch < settings.epochs:
            # The estimate of a run that has not changed stays.
            if self._resumed.keeps_steps:
                schedule_steps = self._resumed.saved["learning_rate"]["total_steps"]
            else:
                schedule_steps = progress.steps + self._count_steps(progress, size_of_epoch)
        full_batch_rows = self._full_batch_rows(max(sizes, default=1))
        return TrainingAhead(progress, size_of_epoch, unknown, full_batch_rows, schedule_steps)

    def _full_batch_rows(self, largest_size: int) -> int:
        """Return the largest global batch that is planned.

        Args:
            largest_size: the largest batch size of an epoch.
        """
        settings = self._settings
        batches = self._batches
        if not settings.grows or settings.batch_tokens:
            return batches.reference.global_rows
        largest = largest_size * batches.batching.gradient_accumulation_steps
        if settings.batch_size_schedule is not None:
            # A schedule that measures has a maximum.
            maximum = getattr(settings.batch_size_schedule, "maximum", None)
            largest = maximum or self._largest_scheduled
            largest = min(largest, batches.maximum() or largest)
        return min(largest * batches.ranks, batches.num_rows)

    def table(self, ahead: TrainingAhead, *, base_rate: float) -> tuple[str, list[dict[str, Any]]]:
        """Return the stages of what is left of training, as text and as a record."""
        settings = self._settings
        batches = self._batches
        rate = build_rate(
            self._job,
            [stand_in(self._job, base_rate)],
            total_steps=ahead.schedule_steps,
            saved=self._resumed.state_of("learning_rate"),
        )
        stages = stages_of(self._planned(ahead, rate))
        notes = [*filter(None, [ahead.unknown]), *self._stage_notes]
        if settings.rate.lr_clock.decay == "steps" and self._job.cfg.get("lr_scheduler", None):
            notes.append(f"the schedule of the learning rate ends at step {ahead.schedule_steps:,}")
        if isinstance(settings.batch_size_schedule, Seesaw):
            notes.append(
                "all epochs with the configured batch would be"
                f" {count(ahead.schedule_steps, 'step', ',')}"
            )
        if batches.plan.is_estimate:
            notes.append(
                "the schedule follows what training measures: this is what comes if nothing new is"
                " measured"
            )
        unit = "tokens" if settings.batch_tokens else "rows"
        return table(stages, unit=unit, ranks=batches.ranks, notes=notes), as_record(stages)

    def alone(self, limit_finder: LimitFinder, sizer: MicroBatchSizer) -> str:
        """Return the preview of a run that tries and trains nothing, with the bound that is known,
        below what is not the checkpoint's.

        Args:
            limit_finder: source of the bound, where one is needed.
            sizer: takes the bound.
        """
        settings = self._settings
        resumed = self._resumed
        progress = resumed.progress
        batches = self._batches
        batch_size = batches.batch_size
        lines = [message for _, message, _ in resumed.changes()]
        plan = settings.search_plan
        if plan.is_needed:
            result, source = known_bound(settings, limit_finder)
            bound = "not known, so nothing is cut, and micro-batches are not known"
            if result is not None:
                bound = str(result.max_batch_size)
                sizer.set_bound(result, checks=False)
            lines.append(f"bound: {bound} ({source})")
            if result is not None and plan.sets_batch and not resumed.keeps_batch:
                batch_size = result.batch_size
                lines += filter(None, [left_by_rounding(result)])
        lines += filter(None, [known_of_reference(settings, limit_finder)])
        known = batches.first_batch_size
        batches.begin_epoch(batch_size=batch_size)
        ahead = self.look_ahead(progress, from_this_epoch=batches.grows_at(progress))
        if ahead.sizes:
            batch_size = next(iter(ahead.sizes.values()))
            batches.begin_with(known or batch_size)
            batches.begin_epoch(batch_size=batch_size)
            ahead = self.look_ahead(progress)
        configured = self._job.cfg.optimizer.get("lr")
        if "optimizer.lr" not in settings.saving.resume_allow_changes:
            configured = resumed.saved.get("base_rate", configured)
        if configured is None:
            lines.append("optimizer.lr is not configured: rates are shown as parts of it")
        text, _ = self.table(ahead, base_rate=float(configured or 1.0))
        return "\n".join([*lines, text])

    def _count_steps(self, progress: Progress, sizes: Mapping[int, int]) -> int:
        unknown = range(progress.epoch + len(sizes), self._settings.epochs)
        last = [self._batches.batch_size, *sizes.values()][-1]
        # The best guess for an epoch whose batch is not known is that nothing changes.
        stays = dict.fromkeys(unknown, last)
        return self._batches.count_steps(progress, {**sizes, **stays})

    def _planned(self, ahead: TrainingAhead, rate: AdaptiveRate) -> Iterator[PlannedStep]:
        batches = self._batches
        lengths = self._data.dataset.real_lengths
        # Micro-batches are cut once for each stage: steps of one batch size are cut alike.
        key = None
        num_micro_batches = 0
        scheduled = (
            self._settings.batch_size_schedule is not None and not self._settings.batch_tokens
        )
        for at, rows, plan in batches.ahead(ahead.progress, ahead.sizes):
            tokens = int(lengths[rows].sum())
            previous_key = key
            key = (at.epoch, at.batch)
            if key != previous_key:
                # A schedule changes the batch within an epoch, a growth function between two.
                batch_size = at.batch
                if not scheduled:
                    batch_size = ahead.sizes[at.epoch]
                if not batches.sizer.waits_for_search:
                    num_micro_batches = batches.num_micro_batches(rows, batch_size=batch_size)
            batch = len(rows)
            if rate.counts_tokens:
                batch = tokens
            yield PlannedStep(
                at,
                rows=len(rows),
                micro_batches=num_micro_batches,
                rates=rate.apply(replace(at, pace=batches.pace_of(plan)), batch=batch),
                tokens=tokens,
            )

    def _check_stages(self, progress: Progress) -> list[str]:
        """Return notes on the stages of a schedule."""
        settings = self._settings
        batches = self._batches
        sizes = dict.fromkeys(range(progress.epoch, settings.epochs), batches.batch_size)
        changes: dict[str, int] = {}

        def steps() -> Iterator[Progress]:
            previous = 0
            for at, _, _ in batches.ahead(progress, sizes):
                if at.batch != previous:
                    previous = at.batch
                    changes[f"batch_size_schedule at step {at.steps}"] = at.batch
                self._largest_scheduled = max(self._largest_scheduled, at.batch)
                yield at

        assert settings.batch_size_schedule is not None
        ahead = steps()
        notes = check_stages(
            settings.batch_size_schedule,
            ahead,
            ranks=batches.ranks,
            rows_per_epoch=batches.num_rows,
            drop_last=settings.drop_last,
            maximum=batches.maximum(),
            unit="tokens" if settings.batch_tokens else "rows",
        )
        # A rule of the user's has no stages to look for, and is called for every step too.
        deque(ahead, maxlen=0)
        same_answers(changes)
        return notes


def known_bound(settings: Settings, finder: LimitFinder) -> tuple[ProbeResult | None, str]:
    """Return what fits in training without a trial, None where that is unknown; and the source."""
    rows = settings.probe.assumed_maximum
    source = "probe.assumed_maximum says so"
    if rows is None:
        result = finder.earlier(finder.path)
        if result is None:
            remedy = "plan with one by probe.assumed_maximum=N"
            return None, f"{finder.path} has no search of these settings; {remedy}"
        rows = result.max_batch_size
        source = f"a search found that before ({finder.path})"
    rows = min(rows, finder.most_rows)
    batch_size = rows
    if settings.search_plan.rounds:
        batch_size = 1 << rows.bit_length() - 1
    length = finder.rows.probed().length
    return ProbeResult(rows, batch_size, (), (), sequence_length=length), source


def known_of_reference(settings: Settings, finder: LimitFinder) -> str:
    """Return what a micro-batch of the reference holds, as far as that is known without a trial;
    empty where it runs within those of training.
    """
    size = settings.reference_micro_batch_size
    if size is None:
        return ""
    if isinstance(size, int):
        return f"reference: {count(size, 'row')} at once"
    path = finder.reference_path
    result = finder.earlier(path)
    if result is None:
        return (
            "reference: as much at once as fits, which a search finds"
            f" ({path} has none of these settings)"
        )
    return (
        f"reference: {count(result.max_batch_size, 'row')} of"
        f" {count(result.sequence_length, 'token')} at once (a search found that before: {path})"
    )
