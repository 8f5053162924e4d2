"""What training is going to do: its stages, before the first step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.data import MicroBatchLimit, StepPlanner, micro_batches
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

from .bound_finder import BoundFinder, left_by_rounding
from .data import Data
from .job import Job
from .rate import build_rate, stand_in


class TrainingPreview:
    """Goes through the rest of training with the rules that training will ask, without training.

    Attributes:
        full_batch_rows: the largest global batch that is planned, over which `loss_per_full_batch`
            averages.
        schedule_steps: where the learning rate's schedule ends.
    """

    def __init__(self, job: Job, data: Data, batches: StepPlanner, sizer: MicroBatchSizer) -> None:
        self._sizer = sizer
        self._job = job
        self._data = data
        self._settings = job.settings
        self._batches = batches
        self._batch_sizes: dict[int, int] = {}
        self._unknown = ""
        self._stage_notes: list[str] = []
        self._most_asked = 0  # of a schedule, on one device

    def check(self, progress: Progress) -> None:
        """Ask the rules ahead, so that mistakes show before weights load.

        Raises:
            GrowthFunctionError: a rule raises or gives no number of rows.
            SettingError: a stage of a schedule cannot hold its batch.
        """
        settings = self._settings
        batches = self._batches
        if not settings.grows or progress.epoch >= settings.epochs:
            return
        random_state = RandomState(self._job.device)
        function = settings.batch_increase_function
        if settings.batch_size_schedule is not None:
            self._stage_notes = self._check_stages(progress)
        elif function is not None:
            if not (begun := progress.epoch_steps > 0):
                grown = next_batch_size(
                    function, epoch=progress.epoch, batch_size=batches.batch_size, maximum=None
                )
                same_answers({"batch_increase_function": grown.after})
            ahead = {"first_epoch": progress.epoch + begun, "epochs": settings.epochs}
            check_increments(function, **ahead, batch_size=batches.batch_size)
        random_state.restore()

    def look_ahead(
        self,
        progress: Progress,
        *,
        saved: Mapping[str, Any],
        first: bool = False,
        changed: bool = False,
    ) -> None:
        """Ask the growth function ahead for the epochs that come; find where schedules end.

        Args:
            saved: the recipe's state in the checkpoint; empty without one.
            first: the epoch at whose beginning progress is has not been asked about either.
            changed: steps will be others than were planned when the checkpoint was saved.

        Raises:
            GrowthFunctionError: an answer for a later epoch cannot be used.
        """
        settings = self._settings
        batches = self._batches
        epoch = progress.epoch
        self._batch_sizes = {}
        self._unknown = ""
        sizes = [batches.batch_size] * max(0, settings.epochs - epoch)
        if settings.batch_increase_function is not None and sizes:
            random_state = RandomState(self._job.device)
            asked, why = batch_sizes_ahead(
                settings.batch_increase_function,
                first_epoch=epoch if first else epoch + 1,
                epochs=settings.epochs,
                batch_size=batches.batch_size,
                maximum=batches.maximum,
            )
            random_state.restore()
            sizes = asked if first else [batches.batch_size, *asked]
            if why:
                self._unknown = f"unknown after epoch {epoch + len(sizes) - 1}: {why}"
        self._batch_sizes = dict(enumerate(sizes, start=epoch))
        same_answers(
            {
                f"batch_increase_function in epoch {at}": size
                for at, size in self._batch_sizes.items()
            }
        )
        reference = batches.reference
        self.full_batch_rows = reference.step_rows
        if settings.grows and not settings.batch_tokens:
            most = max(sizes, default=1) * settings.gradient_accumulation_steps
            if settings.batch_size_schedule is not None:  # one that measures has a maximum
                most = getattr(settings.batch_size_schedule, "maximum", None) or self._most_asked
                most = min(most, batches.maximum or most)
            self.full_batch_rows = min(most * self._job.ranks, batches.epochs.num_rows)
        self.schedule_steps = settings.epochs * reference.steps
        if settings.lr_clock.decay == "steps" and epoch < settings.epochs:
            is_same = (
                saved.get("epochs") == settings.epochs and not changed
            )  # then what was estimated stays
            known = saved["learning_rate"]["total_steps"] if is_same else None
            self.schedule_steps = known or progress.steps + self._count_steps(progress)

    def table(
        self, progress: Progress, *, base_rate: float, saved: Mapping[str, Any]
    ) -> tuple[str, list[dict[str, Any]]]:
        """The stages of what is left of training, for people and as a record; :meth:`look_ahead`
        comes first.
        """
        settings = self._settings
        batches = self._batches
        rate = build_rate(
            self._job,
            [stand_in(self._job, base_rate)],
            total_steps=self.schedule_steps,
            saved=saved.get("learning_rate"),
        )
        stages = stages_of(self._planned(progress, rate))
        notes = [*filter(None, [self._unknown]), *self._stage_notes]
        if settings.lr_clock.decay == "steps" and self._job.cfg.get("lr_scheduler", None):
            notes.append(f"the schedule of the learning rate ends at step {self.schedule_steps:,}")
        if isinstance(settings.batch_size_schedule, Seesaw):
            notes.append(
                "all epochs with the configured batch would be"
                f" {count(self.schedule_steps, 'step', ',')}"
            )
        if batches.plan.is_estimate:
            notes.append(
                "the schedule follows what training measures: this is what comes if nothing new is"
                " measured"
            )
        unit = "tokens" if settings.batch_tokens else "rows"
        return table(stages, unit=unit, ranks=self._job.ranks, notes=notes), as_record(stages)

    def alone(
        self, progress: Progress, *, bounds: BoundFinder, saved: Mapping[str, Any], resumes: bool
    ) -> str:
        """Return the preview where nothing is tried or trained: with the bound that is known, if
        any is needed.

        `saved` is the recipe's state in the checkpoint, if any; if it `resumes`, the batch size is
        the checkpoint's.
        """
        settings = self._settings
        batches = self._batches
        batch_size = batches.batch_size
        lines = []
        if settings.needs_bound:
            rows, tokens, why = bounds.known()
            unknown = "not known, so nothing is cut, and micro-batches are not known"
            lines.append(f"bound: {rows or unknown} ({why})")
            if rows:
                self._sizer.assume(ProbeResult(rows, rows, (), (), sequence_length=tokens))
                if (
                    settings.use_maximum_batch_size
                    and not resumes
                    and settings.batch_size_schedule is None
                ):
                    batch_size = (
                        1 << rows.bit_length() - 1 if settings.probe.round_to_power_of_two else rows
                    )
                    lines += filter(None, [left_by_rounding(rows, batch_size)])
        known_first = batches.first_batch_size
        batches.begin(progress, batch_size=batch_size)
        self.look_ahead(progress, saved=saved, first=batches.grows_now(progress))
        if first := list(self._batch_sizes.values())[:1]:
            batches.begin(progress, batch_size=first[0], first_batch_size=known_first or first[0])
            self.look_ahead(progress, saved=saved)
        configured = saved.get("base_rate", self._job.cfg.optimizer.get("lr"))
        if configured is None:
            lines.append("optimizer.lr is not configured: rates are shown as parts of it")
        text, _ = self.table(progress, base_rate=float(configured or 1.0), saved=saved)
        return "\n".join([*lines, text])

    def _count_steps(self, progress: Progress) -> int:
        unknown = range(progress.epoch + len(self._batch_sizes), self._settings.epochs)
        last = [self._batches.batch_size, *self._batch_sizes.values()][-1]
        stays = dict.fromkeys(
            unknown, last
        )  # where it is not known, that nothing changes is the best guess
        return self._batches.epochs.num_steps(progress, {**self._batch_sizes, **stays})

    def _planned(self, progress: Progress, rate: AdaptiveRate) -> Iterator[PlannedStep]:
        lengths = self._data.dataset.real_lengths
        key = None
        num_micro_batches = 0
        scheduled = (
            self._settings.batch_size_schedule is not None and not self._settings.batch_tokens
        )
        for at, rows, plan in self._batches.epochs.ahead(progress, self._batch_sizes):
            tokens = int(lengths[rows].sum())
            if key != (key := (at.epoch, at.batch)):
                limit = self._sizer.limit(at.batch if scheduled else self._batch_sizes[at.epoch])
                num_micro_batches = self._num_micro_batches(rows, limit)
            yield PlannedStep(
                at,
                rows=len(rows),
                micro_batches=num_micro_batches,
                rates=rate.apply(
                    replace(at, pace=self._batches.pace(plan)),
                    batch=tokens if rate.counts_tokens else len(rows),
                ),
                tokens=tokens,
            )

    def _num_micro_batches(self, rows: list[int], limit: MicroBatchLimit) -> int:
        if self._sizer.waits_for_search:
            return 1
        mine = self._batches.rows_of_rank(rows, limit)
        lengths = self._data.dataset.lengths[[rows[position] for position in mine]].tolist()
        return max(1, len(micro_batches(lengths, limit, self._data.shapes)))

    def _check_stages(self, progress: Progress) -> list[str]:
        """Return notes on the stages of a schedule."""
        settings = self._settings
        batches = self._batches
        sizes = dict.fromkeys(range(progress.epoch, settings.epochs), batches.batch_size)
        changes: dict[str, int] = {}

        def steps() -> Iterator[Progress]:
            asked = 0
            for at, _, _ in batches.epochs.ahead(progress, sizes):
                if at.batch != asked:
                    asked = changes[f"batch_size_schedule at step {at.steps}"] = at.batch
                self._most_asked = max(self._most_asked, at.batch)
                yield at

        assert settings.batch_size_schedule is not None
        ahead = steps()
        notes = check_stages(
            settings.batch_size_schedule,
            ahead,
            ranks=self._job.ranks,
            rows_per_epoch=batches.epochs.num_rows,
            drop_last=settings.drop_last,
            maximum=batches.maximum,
            unit="tokens" if settings.batch_tokens else "rows",
        )
        deque(
            ahead, maxlen=0
        )  # a rule of the user's has no stages to look for, and is asked about every step too
        same_answers(changes)
        return notes
