"""What fits at once in a run: configured, found before training, found again for longer rows; each
finding is logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from adaptive_batch._util import count, format_bytes, rows_fit
from adaptive_batch.data import Batches, largest_divisor
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB
from adaptive_batch.probe import ProbeResult, Throughput
from adaptive_batch.training import has_batch_norm

from .bound_finder import BoundFinder, left_by_rounding
from .data import Data
from .job import Job
from .log import TrainingLog
from .lost_run import TRIALS, LostRun
from .resumed_run import ResumedRun
from .trainer import Trainer


class LimitFinder:
    """Has the sizer of a run learn what fits, and logs it.

    Args:
        job: job of the run.
        data: rows of the run.
        trainer: model, loss and optimizer, with the sizer.
        batches: steps of the run, which take the batch size that is found.
        bound_finder: searches.
        log: log of the run.
        lost: why an earlier attempt of the run ended.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        trainer: Trainer,
        batches: Batches,
        bound_finder: BoundFinder,
        log: TrainingLog,
        lost: LostRun,
    ) -> None:
        self._job = job
        self._data = data
        self._trainer = trainer
        self._batches = batches
        self._settings = job.settings
        self._bound_finder = bound_finder
        self._log = log
        self._lost = lost

    def find(self, resumed: ResumedRun) -> None:
        """Find how many rows fit at once, where any setting needs it; the batches take the batch
        size to train with: the checkpoint's, where that is kept.

        Raises:
            SettingError: what is configured, or what the checkpoint's schedule may ask for, does
                not fit; with the suggested fix.
            DoesNotFitError: not one row fits.
        """
        sizer = self._trainer.engine.sizer
        batches = self._batches
        saved = resumed.state_of("limits")
        self._log_notes()
        self._trainer.check_layout()
        results = []
        plan = self._settings.search_plan
        if plan.chooses_fastest and saved:
            sizer.load_throughput(saved, kinds=self._trainer.layout_kinds)
        if plan.is_needed:
            results = self._bound_finder.of_training(
                self._trainer,
                length=self._settings.probe.sequence_length,
                kept_step_rows=batches.step_rows if resumed.keeps_batch else None,
            )
            self._log_searches(results)
            sizer.set_bound(results[-1])
            if sizer.throughput is not None:
                self._log_throughput(sizer.throughput)
            self._take_batch(results[-1], keeps_batch=resumed.keeps_batch)
        if saved is not None:
            sizer.load_state_dict(saved)
        sizer.count_out_of_memory(sum(result.num_out_of_memory for result in results))
        lost_limit = self._lost.limit(sizer.conditions())
        if lost_limit is not None:
            sizer.start_below(lost_limit)
            limit = batches.limit
            message = f"a micro-batch holds {limit}: more ran out of memory before all ranks ended"
            self._log.event("limit", message, after=limit.amount, unit=limit.unit)
        if sizer.max_batch_size:
            self.try_longer(self._data.longest(1))
        self._check_saved_maximum_fits()
        self._find_for_reference(resumed.state_of("reference_limits"))

    def _log_notes(self) -> None:
        """Log a model whose results depend on micro-batches, and trials that ended all ranks."""
        settings = self._settings
        if has_batch_norm(self._trainer.model) and (
            settings.adaptive or settings.on_out_of_memory == "shrink"
        ):
            message = (
                "the model has BatchNorm, whose statistics are those of a micro-batch: smaller ones"
                " change results"
            )
            self._log.event("batch_norm", message)
        for key, kind in TRIALS.items():
            rows = self._lost.trial_rows(key)
            if rows:
                message = (
                    f"a trial {kind}of {count(rows, 'row')} ended all ranks, so whether they fit is"
                    " not known; up to half are tried"
                )
                self._log.event("indeterminate", message, rows=rows)

    def _check_saved_maximum_fits(self) -> None:
        """Refuse a checkpoint's schedule whose largest step does not fit and cannot be split."""
        settings = self._settings
        saved_maximum = self._batches.saved_maximum
        max_batch_size = self._trainer.engine.sizer.max_batch_size
        cannot_split = settings.optimizer_in_bwd and settings.batch_size_schedule
        if cannot_split and max_batch_size and saved_maximum > max_batch_size:
            raise SettingError(
                "optimizer_in_bwd",
                True,
                f"the checkpoint's schedule may ask for {saved_maximum} rows, of which"
                f" {max_batch_size} fit here, and they cannot be split; resume with more memory, or"
                " start again with optimizer_in_bwd=False",
            )

    def _find_for_reference(self, saved: Mapping[str, Any] | None) -> None:
        """Find how many rows fit at once in a reference that runs apart from training, where that
        is asked for or training's were searched for, too.
        """
        engine = self._trainer.engine
        reference = engine.reference
        settings = self._settings
        if reference is None:
            return
        sizer = reference.sizer
        if settings.reference_micro_batch_size == "auto" or settings.search_plan.is_needed:
            result = self._bound_finder.of_reference(
                self._trainer, step_rows=self._batches.step_rows
            )
            sizer.set_bound(result)
            engine.sizer.count_out_of_memory(result.num_out_of_memory)
            peak = result.peak_bytes()
            of_peak = "" if peak is None else f", at a peak of {format_bytes(peak)}"
            self._log.event(
                "reference_bound",
                f"reference: {count(result.max_batch_size, 'row')} of"
                f" {count(result.sequence_length, 'token')} fit at once{of_peak}; a micro-batch of"
                f" it holds {sizer.limit_of_step}",
                max_batch_size=result.max_batch_size,
                sequence_length=result.sequence_length,
                peak_bytes=peak,
                trials=len(result.trials),
                out_of_memory=result.num_out_of_memory,
                from_cache=result.from_cache,
                seconds=round(sum(result.seconds), 2),
                search=result.record(),
            )
        if saved is not None:
            sizer.load_state_dict(saved)

    def _log_searches(self, results: Sequence[ProbeResult]) -> None:
        """Log each search for the bound."""
        for result in results:
            self._log.event(
                "bound",
                "probe of the largest batch:\n" + result.table(),
                max_batch_size=result.max_batch_size,
                budget_gib=round(result.budget_bytes / GIB, 3),
                trials=len(result.trials),
                out_of_memory=result.num_out_of_memory,
                from_cache=result.from_cache,
                seconds=round(sum(result.seconds), 2),
                search=result.record(),
            )

    def _log_throughput(self, fastest: Throughput) -> None:
        limit = fastest.limit
        rate = fastest.tokens_per_second
        size = f"micro-batches of up to {limit.amount:,} {limit.unit}, {fastest.kind}"
        self._log.event(
            "throughput",
            f"{size}: {rate:,.0f} tokens/s in their trial",
            layout=fastest.kind,
            **asdict(limit),
            tokens_per_second=rate,
            seconds=fastest.seconds,
            compile_seconds=fastest.compile_seconds,
            trials=len(fastest.trials),
            timed=[asdict(trial) for trial in fastest.trials],
        )

    def _take_batch(self, result: ProbeResult, *, keeps_batch: bool) -> None:
        """Have the batches take the size that was found, where that is asked for; refuse a
        configured one that is above it.
        """
        settings = self._settings
        batch_size = self._batches.batch_size
        max_batch_size = result.max_batch_size
        is_scheduled = settings.batch_size_schedule is not None
        if keeps_batch:
            if batch_size > max_batch_size:
                message = (
                    f"batch_size {batch_size} is kept; {rows_fit(max_batch_size)} here, so it runs"
                    " as more micro-batches"
                )
                self._log.event(
                    "limit", message, batch_size=batch_size, micro_batch_size=max_batch_size
                )
            return
        if settings.search_plan.sets_batch:
            largest_batch = result.batch_size
            self._batches.take_batch(largest_batch)
            message = (
                f"batch_size {batch_size} -> {largest_batch} (use_maximum_batch_size; bound"
                f" {max_batch_size})"
            )
            message = ": ".join(filter(None, [message, left_by_rounding(result)]))
            self._log.event(
                "batch_size", message, before=batch_size, after=largest_batch, bound=max_batch_size
            )
        elif not (settings.micro_batch.is_given or is_scheduled) and batch_size > max_batch_size:
            remedy = (
                f"{rows_fit(max_batch_size)}; set batch_size={max_batch_size} or less"
                " (gradient_accumulation_steps makes up for it), or micro_batch_size=auto, or allow"
                " more memory"
            )
            raise SettingError("batch_size", batch_size, remedy)

    def try_longer(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Before a row that is longer than any that was tried is trained on, find how many of its
        length fit.

        Raises:
            DoesNotFitError: not even this one.
            SettingError: fewer, and with the optimizer in backward a step cannot be split.
        """
        sizer = self._trainer.engine.sizer
        settings = self._settings
        batch_size = self._batches.batch_size
        row = max(rows, key=self._job.task.length)
        length = self._job.task.length(row)
        tried_length = sizer.tried_length
        if not tried_length or length <= tried_length:
            return
        limit = self._batches.limit
        tried_rows = sizer.layout.rows_within(limit, length)
        if (
            settings.grows
            and settings.micro_batch.micro_batch_size is None
            and sizer.max_batch_size
            and limit.unit == "rows"
        ):
            # The batch may grow to so many.
            tried_rows = max(tried_rows, sizer.max_batch_size)
        can_split = not settings.optimizer_in_bwd
        result = self._bound_finder.of_row(
            self._trainer, dict(row), maximum=tried_rows, accumulates=can_split
        )
        sizer.count_out_of_memory(result.num_out_of_memory)
        fitting_rows = result.max_batch_size
        message = (
            f"a row of {count(length, 'token')} is longer than the {tried_length} that were tried:"
            f" {fitting_rows} of these fit at once"
        )
        if not can_split and fitting_rows < batch_size:
            remedy = f"{message}, not {batch_size}; set probe.sequence_length=longest"
            raise SettingError("probe.sequence_length", settings.probe.sequence_length, remedy)
        sizer.set_bound_of_longer(result, batch_size, tried_rows=tried_rows, can_split=can_split)
        new_limit = self._batches.limit
        self._log.event(
            "limit",
            f"{message}; a micro-batch holds {new_limit}",
            before=limit.amount,
            after=new_limit.amount,
            unit=new_limit.unit,
            length=length,
            trials=len(result.trials),
            out_of_memory=result.num_out_of_memory,
        )

    def log_if_one_by_one(self) -> None:
        """Log where equal numbers of rows leave no choice but micro-batches of one row."""
        if (
            self._settings.uniform_micro_batches not in ("rows", "both")
            or self._settings.batch_tokens
        ):
            return
        limit = self._batches.limit
        rows = self._batches.step_rows
        layout = self._trainer.engine.sizer.layout
        fitting_rows = layout.rows_within(limit, int(self._data.dataset.lengths.max()))
        if 1 < fitting_rows < rows and largest_divisor(rows, at_most=fitting_rows) == 1:
            self._log.event(
                "uniform_micro_batches",
                f"the {rows} rows of a step divide into equal micro-batches of up to {fitting_rows}"
                " only one by one, which is slow; give a batch_size with divisors, such as a power"
                " of two",
            )
