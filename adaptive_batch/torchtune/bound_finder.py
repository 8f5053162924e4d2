"""The search for the largest batch that a run allows, in training and in validation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import count, rows_fit
from adaptive_batch.data import mean_rows
from adaptive_batch.distributed import Watchdog
from adaptive_batch.errors import SettingError
from adaptive_batch.probe import ProbeResult, Store, read_result
from adaptive_batch.training import (
    REFERENCE,
    Choices,
    Evaluation,
    LongestRows,
    ProbeOptions,
    SearchScope,
    find_limit,
)

from .data import Data
from .job import Job
from .lost_run import LostRun
from .probe_cache import ProbeCache, settings_name
from .trainer import Trainer
from .trial_rows import TrialRows


class BoundFinder:
    """Runs trials of what training will run, on the data and the model of a run.

    Use :meth:`check` before the weights are loaded and the others after.

    Args:
        job: job of the run.
        data: rows of the run.
        lost: record of an earlier attempt of the run; of a trial that ended all ranks without
            showing whether its rows fit, up to half are tried. None for none.
        watch: watchdog of this rank, of several; it keeps the time of trials.

    Attributes:
        rows: rows of trials.
        path: file ``probe.json``, whose results are taken after one trial where they depend on the
            same things.
        reference_path: file of those of the reference.
    """

    def __init__(
        self, job: Job, data: Data, *, lost: LostRun | None = None, watch: Watchdog | None = None
    ) -> None:
        self._job = job
        self._data = data
        self._settings = job.settings
        self._lost = lost
        self._watch = watch
        self.rows = TrialRows(job, data)
        self.path = Path(job.cfg.output_dir) / "adaptive_batch" / "probe.json"
        self.reference_path = self.path.with_name("probe_reference.json")

    def check(self) -> None:
        """Read the rows of trials; refuse settings that the model or the data do not allow.

        Raises:
            SettingError: a probed length is beyond the model's, the memory allowed is below what
                its weights need, or a configured batch is above what can be tried.
        """
        self._check_configured_batch()
        self.rows.check()
        if self._settings.validation.fits_itself:
            # Lengths are read now, so that a row that the model does not take is refused now.
            _ = self._data.dataset_val.lengths
        self._job.check_weights_fit()

    def _check_configured_batch(self) -> None:
        """Refuse a batch to grow from that is above what can be tried."""
        settings = self._settings
        grows_from_configured = (
            settings.batch_increase_function is not None and not settings.use_maximum_batch_size
        )
        cannot_split = grows_from_configured and not settings.micro_batch.is_given
        largest_batch = self.most_rows
        if cannot_split and settings.batch_size > largest_batch:
            remedy = (
                f"{largest_batch} rows are tried at most, as probe.maximum and the rows of an epoch"
                f" allow; give {largest_batch} or less"
            )
            raise SettingError("batch_size", settings.batch_size, remedy)

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

    def of_training(
        self, trainer: Trainer, *, length: int | str, kept_step_rows: int | None = None
    ) -> list[ProbeResult]:
        """Find the largest number of rows whose forward and backward fit in training, and within it
        the fastest micro-batches, unless the sizer knows these, as of a checkpoint.

        All that is resident in training is there in the trials, too.

        Args:
            trainer: trainer of the run.
            length: ``longest``, ``max_seq_len`` or a number of tokens.
            kept_step_rows: rows of a step on one device that a checkpoint keeps; None where it
                keeps none.

        Returns:
            The searches, of which the last counts. A step that fits itself is tried as one
            micro-batch first. If it has to be several, it is tried again beside gradients.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: with the optimizer in backward a step does not fit at once.
        """
        plan = self._settings.search_plan
        whole_step_rows = kept_step_rows or plan.whole_step_rows
        can_split = not self._settings.optimizer_in_bwd
        scope = SearchScope(
            self.rows.of_length(length),
            # Fewer ranks than began the run have more rows of a step each.
            accumulates=plan.has_several or self._job.ranks > distributed.data_parallel_size(),
            whole_step_rows=whole_step_rows if can_split else None,
            choices=self._choices(trainer),
        )
        results = self.find(
            trainer, scope, maximum=self.most_rows, rounds=plan.rounds, path=self.path
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

    def _choices(self, trainer: Trainer) -> Choices | None:
        """Return what the fastest micro-batches are chosen from; None where as much as fits is
        wanted, or the sizer knows what is fastest.
        """
        settings = self._settings
        plan = settings.search_plan
        sizer = trainer.engine.sizer
        if not plan.chooses_fastest or sizer.throughput is not None:
            return None
        # A step that changes its size may have as many rows as fit.
        timed_rows = plan.whole_step_rows or 0
        if settings.batch_tokens and not settings.grows:
            timed_rows = mean_rows(settings.batch_tokens, self._data.dataset.lengths)
        unit = sizer.limit_of_step.unit
        return Choices(trainer.layout_kinds, unit, timed_rows)

    def earlier(self, path: Path) -> ProbeResult | None:
        """Return what a file keeps of an earlier search of these settings; None for nothing."""
        length = self.rows.probed().length
        settings = settings_name(self._job, self._data, length)
        return read_result(Store(path), settings, name="settings")

    def of_row(
        self, trainer: Trainer, row: dict[str, Any], *, maximum: int, accumulates: bool
    ) -> ProbeResult:
        """Find how many rows like one fit that is longer than any tried, up to a maximum.

        Raises:
            DoesNotFitError: not one does.
        """
        row = self._job.task.filled(row)
        length = self._job.task.length(row)
        rows = LongestRows(
            lambda size: [row] * size, length, f"one row of {count(length, 'token')}"
        )
        scope = SearchScope(rows, accumulates=accumulates)
        (result,) = self.find(trainer, scope, maximum=maximum)
        return result

    def of_reference(self, trainer: Trainer, *, step_rows: int) -> ProbeResult:
        """Find the largest number of rows that fit at once in a reference that runs apart from
        training.

        Args:
            trainer: trainer of the run.
            step_rows: rows of a step on one device; more are of no use unless steps grow.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: a number of rows is configured, and fewer fit.
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
        worst = self.rows.probed()
        evaluation = Evaluation(
            reference.try_rows,
            worst,
            name="the reference on rows",
            kind=REFERENCE,
            in_training_mode=True,
            lost_key="trial_rows_reference",
        )
        scope = SearchScope(worst, evaluation=evaluation)
        *_, result = self.find(trainer, scope, maximum=tried_rows, path=self.reference_path)
        if isinstance(size, int) and size > result.max_batch_size:
            fitting_rows = result.max_batch_size
            problem = rows_fit(fitting_rows)
            if fitting_rows == tried_rows:
                problem = (
                    f"no more than {count(tried_rows, 'row')} are tried, by probe.maximum or as a"
                    " trial of more has ended all ranks"
                )
            remedy = f"{problem}; give {fitting_rows} or less, or auto"
            raise SettingError("reference_micro_batch_size", size, remedy)
        return result

    def find(
        self,
        trainer: Trainer,
        scope: SearchScope,
        *,
        maximum: int,
        rounds: bool = False,
        path: Path | None = None,
    ) -> list[ProbeResult]:
        """Find how many rows fit at once, with the run's options, cache and time.

        Args:
            trainer: trainer of the run.
            scope: what is looked for.
            maximum: most rows that are tried, see :meth:`rows_to_try`.
            rounds: whether the power of two at or below the bound is tried, too.
            path: file that keeps the result; None for none.

        Returns:
            The result of each search; the last one counts, see :func:`find_limit`.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        probe = self._settings.probe
        options = ProbeOptions(
            probe.device_memory,
            probe.headroom,
            distributed.minimum(maximum),
            probe.search,
            round_to_power_of_two=rounds,
            trial_seconds=probe.trial_seconds,
            memory_key="probe.device_memory",
        )
        return find_limit(
            trainer.tried(),
            scope,
            options,
            cache_of=lambda scope: ProbeCache(self._job, self._data, scope, options, path=path),
            time_limit=self._time_limit,
        )

    def _time_limit(self, doing: str) -> AbstractContextManager[object]:
        """Return a context that ends all ranks where one does not end its trial in time."""
        if self._watch is None:
            return nullcontext()
        return self._watch.time_limit(self._settings.probe.trial_timeout, doing)


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
