"""Search for the limits of a run: before training, and again for longer rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import count, format_bytes, rows_fit
from adaptive_batch.data import Batches, mean_rows
from adaptive_batch.distributed import Watchdog
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB
from adaptive_batch.probe import ProbeResult, Store, read_result
from adaptive_batch.training import (
    REFERENCE,
    Choices,
    Evaluation,
    LongestRows,
    MicroBatchSizer,
    SearchScope,
    find_limit,
    has_batch_norm,
)

from .data import Data
from .job import Job
from .probe_cache import ProbeCache, settings_name
from .resume import TRIALS, LostRun, ResumedRun
from .trainer import Trainer


class LimitFinder:
    """Searches for the limits of a run; sizers take the results.

    Call :meth:`check` before the weights load, and the other methods after.

    Args:
        job: context of the run.
        data: rows of the run.
        lost: record of an earlier attempt, or None. Of a trial that ended all ranks, up to half of
            the rows are tried.
        watch: watchdog of this rank, which limits the time of trials, or None.
        event: function that logs an event: a kind, a message and facts.

    Attributes:
        path: file ``probe.json``; a result in it is reused after one trial.
        reference_path: file of the reference's results.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        *,
        lost: LostRun | None = None,
        watch: Watchdog | None = None,
        event: Callable[..., object] = lambda kind, message, **facts: None,
    ) -> None:
        self._job = job
        self._data = data
        self._settings = job.settings
        self._lost = lost
        self._watch = watch
        self._event = event
        self.path = Path(job.cfg.output_dir) / "adaptive_batch" / "probe.json"
        self.reference_path = self.path.with_name("probe_reference.json")

    def check(self) -> None:
        """Read the rows of trials and check settings against model and data.

        Raises:
            SettingError: a probed length is beyond the model's, the allowed memory is below what
                its weights need, or a configured batch is above what can be tried.
        """
        settings = self._settings
        grows_from_configured = (
            settings.batch_increase_function is not None and not settings.use_maximum_batch_size
        )
        cannot_split = grows_from_configured and not settings.micro_batch.is_given
        if cannot_split and settings.batch_size > self.most_rows:
            remedy = (
                f"{self.most_rows} rows are tried at most, as probe.maximum and the rows of an"
                f" epoch allow; give {self.most_rows} or less"
            )
            raise SettingError("batch_size", settings.batch_size, remedy)
        self._data.check_trial_rows()
        if settings.validation.fits_itself:
            # Reading the lengths raises for a row that the model does not take.
            _ = self._data.dataset_val.lengths
        self._job.check_weights_fit()

    @property
    def most_rows(self) -> int:
        """Largest number of rows that is of use at once.

        It is bounded by the rows of a step or an epoch, and by ``probe.maximum``.
        """
        settings = self._settings
        epoch_rows = max(1, len(self._data.dataset) // self._job.ranks)
        whole_step_rows = settings.search_plan.whole_step_rows
        if whole_step_rows is not None:
            usable_rows = min(epoch_rows, whole_step_rows)
        elif settings.batch_tokens:
            usable_rows = epoch_rows
        else:
            usable_rows = max(1, epoch_rows // settings.gradient_accumulation_steps)
        return self.rows_to_try(usable_rows)

    def rows_to_try(self, usable_rows: int, key: str = "trial_rows") -> int:
        """Return the most rows that are tried, of those that are of use at once.

        Args:
            usable_rows: these.
            key: kind of the trials, of :data:`.TRIALS`.
        """
        most_rows = min(self._settings.probe.maximum, usable_rows)
        lost_rows = self._lost.trial_rows(key) if self._lost else None
        if lost_rows:
            # A trial that ended all ranks would end them again, so fewer rows are tried.
            most_rows = min(most_rows, lost_rows // 2)
        return max(1, most_rows)

    # --- training ---------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, batches: Batches, resumed: ResumedRun) -> None:
        """Search for the limits that the settings need, and set the batch size of training.

        A resumed run keeps the checkpoint's batch size.

        Raises:
            SettingError: a configured size, or one of the checkpoint's schedule, does not fit.
            DoesNotFitError: no row fits.
        """
        sizer = trainer.engine.sizer
        saved = resumed.state_of("limits")
        self._log_notes(trainer)
        trainer.check_layout()
        results = []
        plan = self._settings.search_plan
        if plan.chooses_fastest and saved:
            sizer.load_throughput(saved, kinds=trainer.layout_kinds)
        if plan.is_needed:
            results = self.search_training(
                trainer,
                length=self._settings.probe.sequence_length,
                kept_step_rows=batches.step_rows if resumed.keeps_batch else None,
                sizer=sizer,
            )
            fastest = sizer.throughput
            if fastest is not None:
                limit = fastest.limit
                rate = fastest.tokens_per_second
                size = f"micro-batches of up to {limit.amount:,} {limit.unit}, {fastest.kind}"
                self._event(
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
            self._take_batch(batches, results[-1], keeps_batch=resumed.keeps_batch)
        if saved is not None:
            sizer.load_state_dict(saved)
        sizer.count_out_of_memory(sum(result.num_out_of_memory for result in results))
        lost_limit = self._lost.limit(sizer.conditions()) if self._lost else None
        if lost_limit is not None:
            sizer.start_below(lost_limit)
            limit = batches.limit
            message = f"a micro-batch holds {limit}: more ran out of memory before all ranks ended"
            self._event("limit", message, after=limit.amount, unit=limit.unit)
        if sizer.max_batch_size:
            self.try_longer(trainer, batches, self._data.longest(1))
        saved_maximum = batches.saved_maximum
        cannot_split = self._settings.optimizer_in_bwd and self._settings.batch_size_schedule
        if cannot_split and saved_maximum > (sizer.max_batch_size or saved_maximum):
            raise SettingError(
                "optimizer_in_bwd",
                True,
                f"the checkpoint's schedule may ask for {saved_maximum} rows, of which"
                f" {sizer.max_batch_size} fit here, and they cannot be split; resume with more"
                " memory, or start again with optimizer_in_bwd=False",
            )
        self._begin_reference(trainer, batches, resumed.state_of("reference_limits"))

    def search_training(
        self,
        trainer: Trainer,
        *,
        length: int | str,
        kept_step_rows: int | None = None,
        sizer: MicroBatchSizer | None = None,
    ) -> list[ProbeResult]:
        """Find the most rows whose forward and backward fit, and the fastest micro-batches if
        asked.

        Trials have the same tensors in memory as training.

        Args:
            trainer: trainer of the run.
            length: ``longest``, ``max_seq_len`` or a number of tokens.
            kept_step_rows: rows of a step on one device that a checkpoint keeps, or None.
            sizer: sizer that takes the results; None only reports them.

        Returns:
            The searches; the last one counts. A step that must be split is searched again with
            gradients in memory.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: with the optimizer in backward a step does not fit at once.
        """
        plan = self._settings.search_plan
        whole_step_rows = kept_step_rows or plan.whole_step_rows
        settings = self._settings
        can_split = not settings.optimizer_in_bwd
        choices = None
        if plan.chooses_fastest and trainer.engine.sizer.throughput is None:
            # A step that changes its size may have as many rows as fit.
            timed_rows = plan.whole_step_rows or 0
            if settings.batch_tokens and not settings.grows:
                timed_rows = mean_rows(settings.batch_tokens, self._data.dataset.lengths)
            unit = trainer.engine.sizer.limit_of_step.unit
            choices = Choices(trainer.layout_kinds, unit, timed_rows)
        scope = SearchScope(
            self._data.trial_rows(length),
            # Fewer ranks than began the run have more rows of a step each.
            accumulates=plan.has_several or self._job.ranks > distributed.data_parallel_size(),
            whole_step_rows=whole_step_rows if can_split else None,
            choices=choices,
        )
        results = self.find(
            trainer,
            scope,
            maximum=self.most_rows,
            sizer=sizer,
            report=self._log_search,
            rounds=plan.rounds,
            path=self.path,
        )
        fitting_rows = results[-1].max_batch_size
        if not (can_split or scope.accumulates) and (whole_step_rows or 0) > fitting_rows:
            is_configured = plan.whole_step_rows is not None
            whose = "batch_size" if is_configured else "the checkpoint's batch_size"
            raise SettingError(
                "optimizer_in_bwd",
                True,
                f"{whose} {whole_step_rows} is above the {fitting_rows} rows that fit"
                " here, and cannot be split into micro-batches; take a smaller one or more memory,"
                " or start again with optimizer_in_bwd=False",
            )
        return results

    def _log_notes(self, trainer: Trainer) -> None:
        """Log a model whose results depend on micro-batches, and trials that ended all ranks."""
        settings = self._settings
        if has_batch_norm(trainer.model) and (
            settings.adaptive or settings.on_out_of_memory == "shrink"
        ):
            message = (
                "the model has BatchNorm, whose statistics are those of a micro-batch: smaller ones"
                " change results"
            )
            self._event("batch_norm", message)
        for key, kind in TRIALS.items():
            rows = self._lost.trial_rows(key) if self._lost else None
            if rows:
                message = (
                    f"a trial {kind}of {count(rows, 'row')} ended all ranks, so whether they fit is"
                    " not known; up to half are tried"
                )
                self._event("indeterminate", message, rows=rows)

    def _log_search(self, result: ProbeResult) -> None:
        self._event(
            "bound",
            "probe of the largest batch:\n" + result.table(),
            budget_gib=round(result.budget_bytes / GIB, 3),
            from_cache=result.from_cache,
            search=result.record(),
            **search_facts(result),
        )

    def _take_batch(self, batches: Batches, result: ProbeResult, *, keeps_batch: bool) -> None:
        """Set the batch size to the result if asked; raise if the configured one does not fit."""
        settings = self._settings
        batch_size = batches.batch_size
        max_batch_size = result.max_batch_size
        is_scheduled = settings.batch_size_schedule is not None
        if keeps_batch:
            if batch_size > max_batch_size:
                message = (
                    f"batch_size {batch_size} is kept; {rows_fit(max_batch_size)} here, so it runs"
                    " as more micro-batches"
                )
                self._event(
                    "limit", message, batch_size=batch_size, micro_batch_size=max_batch_size
                )
            return
        if settings.search_plan.sets_batch:
            largest_batch = result.batch_size
            batches.take_batch(largest_batch)
            message = (
                f"batch_size {batch_size} -> {largest_batch} (use_maximum_batch_size; bound"
                f" {max_batch_size})"
            )
            message = ": ".join(filter(None, [message, left_by_rounding(result)]))
            self._event(
                "batch_size", message, before=batch_size, after=largest_batch, bound=max_batch_size
            )
        elif not (settings.micro_batch.is_given or is_scheduled) and batch_size > max_batch_size:
            remedy = (
                f"{rows_fit(max_batch_size)}; set batch_size={max_batch_size} or less"
                " (gradient_accumulation_steps makes up for it), or micro_batch_size=auto, or allow"
                " more memory"
            )
            raise SettingError("batch_size", batch_size, remedy)

    def try_longer(
        self, trainer: Trainer, batches: Batches, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Before a row that is longer than any that was tried is trained on, find how many of its
        length fit.

        Raises:
            DoesNotFitError: not even this one.
            SettingError: fewer, and with the optimizer in backward a step cannot be split.
        """
        sizer = trainer.engine.sizer
        settings = self._settings
        batch_size = batches.batch_size
        row = max(rows, key=self._job.task.length)
        length = self._job.task.length(row)
        tried_length = sizer.tried_length
        if not tried_length or length <= tried_length:
            return
        limit = batches.limit
        tried_rows = sizer.layout.rows_within(limit, length)
        if (
            settings.grows
            and settings.micro_batch.micro_batch_size is None
            and sizer.max_batch_size
            and limit.unit == "rows"
        ):
            # The batch may grow to this size.
            tried_rows = max(tried_rows, sizer.max_batch_size)
        can_split = not settings.optimizer_in_bwd
        row = self._job.task.filled(dict(row))
        longest = LongestRows(
            lambda size: [row] * size, length, f"one row of {count(length, 'token')}"
        )
        scope = SearchScope(longest, accumulates=can_split)
        (result,) = self.find(trainer, scope, maximum=tried_rows)
        sizer.count_out_of_memory(result.num_out_of_memory)
        fitting_rows = result.max_batch_size
        message = (
            f"a row of {count(length, 'token')} is longer than the {tried_length} that were tried:"
            f" {fitting_rows} of these fit at once"
        )
        if not can_split and fitting_rows < batch_size:
            remedy = f"{message}, not {batch_size}; set probe.sequence_length=longest"
            raise SettingError("probe.sequence_length", settings.probe.sequence_length, remedy)
        sizer.set_bound_for_longer_rows(
            result, batch_size, tried_rows=tried_rows, can_split=can_split
        )
        new_limit = batches.limit
        self._event(
            "limit",
            f"{message}; a micro-batch holds {new_limit}",
            before=limit.amount,
            after=new_limit.amount,
            unit=new_limit.unit,
            length=length,
            trials=len(result.trials),
            out_of_memory=result.num_out_of_memory,
        )

    # --- the reference ----------------------------------------------------------------------------

    def _begin_reference(
        self, trainer: Trainer, batches: Batches, saved: Mapping[str, Any] | None
    ) -> None:
        """Find how many rows fit in a reference that runs before the step."""
        engine = trainer.engine
        reference = engine.reference
        settings = self._settings
        if reference is None:
            return
        sizer = reference.sizer
        if settings.reference_micro_batch_size == "auto" or settings.search_plan.is_needed:
            result = self.search_reference(trainer, step_rows=batches.step_rows, sizer=sizer)
            engine.sizer.count_out_of_memory(result.num_out_of_memory)
            peak = result.peak_bytes()
            of_peak = "" if peak is None else f", at a peak of {format_bytes(peak)}"
            self._event(
                "reference_bound",
                f"reference: {count(result.max_batch_size, 'row')} of"
                f" {count(result.sequence_length, 'token')} fit at once{of_peak}; a micro-batch of"
                f" it holds {sizer.limit_of_step}",
                sequence_length=result.sequence_length,
                peak_bytes=peak,
                from_cache=result.from_cache,
                search=result.record(),
                **search_facts(result),
            )
        if saved is not None:
            sizer.load_state_dict(saved)

    def search_reference(
        self, trainer: Trainer, *, step_rows: int, sizer: MicroBatchSizer | None = None
    ) -> ProbeResult:
        """Find the most rows that fit in a reference that runs before the step.

        Args:
            trainer: trainer of the run.
            step_rows: rows of a step on one device, the most to try unless steps grow.
            sizer: sizer that takes the result; None only reports it.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: a configured number of rows does not fit.
        """
        settings = self._settings
        size = settings.reference_micro_batch_size
        reference = trainer.engine.reference
        assert reference is not None, "the reference runs within training's micro-batches"
        usable_rows = step_rows
        if settings.grows or settings.batch_tokens:
            usable_rows = max(1, len(self._data.dataset) // self._job.ranks)
        if isinstance(size, int):
            usable_rows = size
        tried_rows = self.rows_to_try(usable_rows, "trial_rows_reference")
        worst = self._data.trial_rows(settings.probe.sequence_length)
        evaluation = Evaluation(
            reference.try_rows,
            worst,
            name="the reference on rows",
            kind=REFERENCE,
            in_training_mode=True,
            lost_key="trial_rows_reference",
        )
        scope = SearchScope(worst, evaluation=evaluation)

        def refuse_fewer(result: ProbeResult) -> None:
            fitting_rows = result.max_batch_size
            if not isinstance(size, int) or size <= fitting_rows:
                return
            problem = rows_fit(fitting_rows)
            if fitting_rows == tried_rows:
                problem = (
                    f"no more than {count(tried_rows, 'row')} are tried, by probe.maximum or as a"
                    " trial of more has ended all ranks"
                )
            remedy = f"{problem}; give {fitting_rows} or less, or auto"
            raise SettingError("reference_micro_batch_size", size, remedy)

        *_, result = self.find(
            trainer,
            scope,
            maximum=tried_rows,
            sizer=sizer,
            report=refuse_fewer,
            path=self.reference_path,
        )
        return result

    # --- any search -------------------------------------------------------------------------------

    def find(
        self,
        trainer: Trainer,
        scope: SearchScope,
        *,
        maximum: int,
        sizer: MicroBatchSizer | None = None,
        report: Callable[[ProbeResult], object] = lambda result: None,
        rounds: bool = False,
        path: Path | None = None,
    ) -> list[ProbeResult]:
        """Search with the options, cache and time limit of the run.

        Args:
            trainer: trainer of the run.
            scope: rows and pass to search with.
            maximum: most rows to try, see :meth:`rows_to_try`.
            sizer: sizer that takes the result, or None.
            report: function that is called with the result of each search.
            rounds: whether the power of two at or below the maximum is tried, too.
            path: file that keeps the result, or None.

        Returns:
            The result of each search; the last one counts, see :func:`find_limit`.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        probe = self._settings.probe
        options = replace(probe, maximum=distributed.minimum(maximum), round_to_power_of_two=rounds)

        def time_limit(doing: str) -> AbstractContextManager[object]:
            # It ends all ranks where one does not end its trial in time.
            if self._watch is None:
                return nullcontext()
            return self._watch.time_limit(probe.trial_timeout, doing)

        return find_limit(
            trainer.tried(),
            scope,
            options,
            sizer=sizer,
            report=report,
            cache_of=lambda scope: ProbeCache(self._job, self._data, scope, options, path=path),
            time_limit=time_limit,
        )

    def known(self) -> tuple[ProbeResult | None, str]:
        """Return the result that is known without a trial, or None; and its source."""
        probe = self._settings.probe
        rows = probe.assumed_maximum
        source = "probe.assumed_maximum says so"
        length = self._data.trial_rows(probe.sequence_length).length
        if rows is None:
            name = settings_name(self._job, self._data, length)
            result = read_result(Store(self.path), name, name="settings")
            if result is None:
                remedy = "plan with one by probe.assumed_maximum=N"
                return None, f"{self.path} has no search of these settings; {remedy}"
            rows = result.max_batch_size
            source = f"a search found that before ({self.path})"
        rows = min(rows, self.most_rows)
        batch_size = rows
        if self._settings.search_plan.rounds:
            batch_size = 1 << rows.bit_length() - 1
        return ProbeResult(rows, batch_size, (), (), sequence_length=length), source


def search_facts(result: ProbeResult) -> dict[str, Any]:
    """Return the facts that each event of a search has."""
    return {
        "max_batch_size": result.max_batch_size,
        "trials": len(result.trials),
        "out_of_memory": result.num_out_of_memory,
        "seconds": round(sum(result.seconds), 2),
    }


def left_by_rounding(result: ProbeResult) -> str:
    """Return how many rows the power of two leaves unused, and the remedy; empty for none."""
    max_batch_size = result.max_batch_size
    batch_size = result.batch_size
    if batch_size == max_batch_size:
        return ""
    return (
        f"the power of two leaves {max_batch_size - batch_size} of the {max_batch_size} rows that"
        f" fit unused ({1 - batch_size / max_batch_size:.0%}); probe.round_to_power_of_two=False"
        " trains with all of them"
    )
