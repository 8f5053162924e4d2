"""What one micro-batch of training may hold: configured or found, lowered by what happens and grown back; each change is logged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write, count, rows_fit
from adaptive_batch.data import MicroBatchLimit, largest_divisor
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB
from adaptive_batch.probe import ProbeResult
from adaptive_batch.report import RunLog
from adaptive_batch.training import LimitChange, has_batch_norm

from .advice import advise
from .bound_finder import BoundFinder, left_by_rounding
from .data import Data
from .job import Job
from .trainer import Trainer

_TRIALS = {"trial_rows": "", "trial_rows_val": "of validation "}  # that ended all ranks: which, in words


class LimitFinder:
    """Keeps the bound and the limit of a run, and logs every change.

    Args:
        job, data, trainer: of the run.
        bounds: finds what fits.
        record: of the run.
        run: its name; why it ended on all ranks is kept for it.

    Attributes:
        limits: what it has found.
    """

    def __init__(
        self, job: Job, data: Data, trainer: Trainer, bounds: BoundFinder, record: RunLog, *, run: str = ""
    ) -> None:
        self._job, self._data, self._trainer, self._settings = job, data, trainer, job.settings
        self._found: ProbeResult | None = None
        self._bounds, self._record, self._run = bounds, record, run
        self._lost_file = Path(job.cfg.output_dir) / "adaptive_batch" / "lost.json"
        self._lost: dict[str, Any] = {}  # what is to be known when training is started again
        self.limits = trainer.runner.retry.limits = data.new_limits()

    def find(self, batch_size: int, *, keeps_batch: bool, saved: Mapping[str, Any]) -> int:
        """Find how many rows fit at once, where any setting needs it.

        Args:
            batch_size: configured, or of the checkpoint.
            keeps_batch: it is the checkpoint's, and is kept whatever fits.
            saved: the state of each part when the checkpoint was saved; empty without one.

        Returns:
            The batch size to train with.

        Raises:
            SettingError: what is configured does not fit; with the suggested fix.
            DoesNotFitError: not one row fits.
        """
        data, settings, limits = self._data, self._settings, self.limits
        if saved:
            limits.num_out_of_memory = saved["limits"]["num_out_of_memory"]
        if has_batch_norm(self._trainer.model) and (settings.adaptive or settings.on_out_of_memory == "shrink"):
            message = (
                "the model has BatchNorm, whose statistics are those of a micro-batch: smaller ones change results"
            )
            self._record.event("batch_norm", message)
        self._lost = distributed.from_rank_zero(lambda: self._read_lost(resumes=bool(saved)))
        self._bounds.indeterminate, self._bounds.indeterminate_val = map(self._lost.get, _TRIALS)
        for key, which in _TRIALS.items():
            if rows := self._lost.get(key):
                message = f"a trial {which}of {count(rows, 'row')} ended all ranks, so whether they fit is not known; up to half are tried"
                self._record.event("indeterminate", message, rows=rows)
        before = saved["limits"]["throughput"] if saved and settings.chooses_fastest else None
        if before and settings.micro_batch_layout in (None, before["kind"]):
            limits.choose(before)  # a run that is resumed cuts its steps as it did
        if settings.micro_batch_layout == "packed" and (why := self._trainer.runner.why_not_packed(data.longest(2))):
            raise SettingError("micro_batch_layout", "packed", f"{why}; or give grouped")
        if settings.needs_bound:
            batch_size = self._search(batch_size, keeps_batch=keeps_batch)
        if saved:
            limits.load_state_dict(saved["limits"] | {"num_out_of_memory": limits.num_out_of_memory})
        lost = self._lost
        if lost.get("limit") and all(lost[key] == value for key, value in limits.lowered_from().items()):
            less = MicroBatchLimit(lost["limit"], lost["unit"])
            limits.ceiling = limits.ceiling or limits.of(batch_size)
            limits.lowered = min(filter(None, (limits.lowered, less)), key=lambda limit: limit.amount)
            message = f"a micro-batch holds {limits.lowered}: more ran out of memory before all ranks ended"
            self._record.event("limit", message, after=limits.lowered.amount, unit=limits.lowered.unit)
        if limits.bound:
            self.try_longer(data.longest(1), batch_size=batch_size)
        if self._found and (advice := advise(self._job, data, self._found, batch_size=batch_size)):
            self._record.event("advice", advice)
        return batch_size

    def _search(self, batch_size: int, *, keeps_batch: bool) -> int:
        """Search for the bound, log the table, and refuse a configured batch that is above it; return the batch to train with."""
        settings, limits = self._settings, self.limits
        results = self._bounds.of_training(
            self._trainer,
            length=settings.probe.sequence_length,
            batch_size=batch_size,
            keeps_batch=keeps_batch,
            chooses=limits.throughput is None,
        )
        for result in results:
            out_of_memory = 0 if result.from_cache else result.num_out_of_memory
            limits.num_out_of_memory += out_of_memory
            self._record.event(
                "bound",
                "probe of the largest batch:\n" + result.table(),
                max_batch_size=result.max_batch_size,
                budget_gib=round(result.budget_bytes / GIB, 3),
                trials=len(result.trials),
                out_of_memory=out_of_memory,
                from_cache=result.from_cache,
                seconds=round(sum(result.seconds), 2),
            )
        self._found = result
        bound, scheduled = result.max_batch_size, settings.batch_size_schedule is not None
        limits.set_bound(bound, tried_length=result.sequence_length)
        limits.choose(result.throughput)
        self._trainer.runner.layout = limits.layout
        limits.learn_cost(result)
        if fastest := limits.throughput:
            kind, limit, rate = fastest.kind, fastest.limit, fastest.tokens_per_second
            message = (
                f"micro-batches of up to {limit.amount:,} {limit.unit}, {kind}: {rate:,.0f} tokens/s in their trial"
            )
            facts = {"layout": kind, **asdict(limit), "tokens_per_second": rate, "seconds": fastest.seconds}
            timed = [asdict(one) for one in fastest.trials]
            self._record.event("throughput", message, **facts, trials=len(timed), timed=timed)
        if keeps_batch:
            if batch_size > bound:
                message = f"batch_size {batch_size} is kept; {rows_fit(bound)} here, so it runs as more micro-batches"
                self._record.event("limit", message, batch_size=batch_size, micro_batch_size=bound)
            return batch_size
        if settings.use_maximum_batch_size and not scheduled:
            before, batch_size = batch_size, result.batch_size
            message = f"batch_size {before} -> {batch_size} (use_maximum_batch_size; bound {bound})"
            message = ": ".join(filter(None, [message, left_by_rounding(bound, batch_size)]))
            self._record.event("batch_size", message, before=before, after=batch_size, bound=bound)
        if not (limits.splits or scheduled) and batch_size > bound:
            remedy = (
                f"{rows_fit(bound)}; set batch_size={bound} or less (gradient_accumulation_steps makes up for it), or "
            )
            remedy += "micro_batch_size=auto, or allow more memory"
            raise SettingError("batch_size", batch_size, remedy)
        return batch_size

    def try_longer(self, rows: list[dict[str, Any]], *, batch_size: int) -> None:
        """Before a row that is longer than any that was tried is trained on, find how many of its length fit.

        Raises:
            DoesNotFitError: not even this one.
            SettingError: fewer, and with the optimizer in backward a step cannot be split.
        """
        limits, settings = self.limits, self._settings
        row = max(rows, key=lambda row: len(row["tokens"]))
        length, before = len(row["tokens"]), limits.tried_length
        if not before or length <= before:
            return
        limit, shapes = limits.of(batch_size), self._data.shapes
        most = shapes.rows_within(limit, length)
        if settings.grows and settings.micro_batch_size is None and limits.bound and limit.unit == "rows":
            most = max(most, limits.bound)  # what the batch may grow to
        result = self._bounds.of_row(self._trainer, row, maximum=most, accumulates=not settings.optimizer_in_bwd)
        limits.num_out_of_memory += result.num_out_of_memory
        fit = result.max_batch_size
        message = (
            f"a row of {count(length, 'token')} is longer than the {before} that were tried: {fit} of these fit at once"
        )
        if settings.optimizer_in_bwd:
            if fit < batch_size:
                remedy = f"{message}, not {batch_size}; set probe.sequence_length=longest"
                raise SettingError("probe.sequence_length", settings.probe.sequence_length, remedy)
            limits.bound = min(limits.bound or fit, fit)  # a step cannot be split, so it may not grow beyond this
        elif fit < most:
            amount = fit if limit.unit == "rows" else shapes.padded_tokens([length] * fit)
            limits.hold(MicroBatchLimit(amount, limit.unit))
        elif settings.micro_batch_tokens == "auto":  # of() would multiply the bound by the new length
            limits.hold(limits.ceiling or limit)
        limits.learn_cost(result)
        limits.tried_length = length
        after = limits.of(batch_size)
        self._record.event(
            "limit",
            f"{message}; a micro-batch holds {after}",
            before=limit.amount,
            after=after.amount,
            unit=after.unit,
            length=length,
            trials=len(result.trials),
            out_of_memory=result.num_out_of_memory,
        )

    def log_limit(self, change: LimitChange) -> None:
        """Log at once what a micro-batch of training holds from now on."""
        self.log_change(change, kind="limit")

    def lower_in_validation(self, change: LimitChange) -> None:
        """Count and log that validation ran out of memory; its limit is not training's."""
        self.limits.num_out_of_memory += change.out_of_memory
        self.log_change(change, kind="validation_limit")

    def log_change(self, change: LimitChange, *, kind: str) -> None:
        """Log a limit that was lowered, or grew back."""
        self._record.event(
            kind,
            change.describe(),
            before=change.before.amount,
            after=change.after.amount,
            unit=change.after.unit,
            rows=change.rows,
            length=change.length,
            out_of_memory=change.out_of_memory,
            error=change.error,
        )

    def log_if_one_by_one(self, batch_size: int) -> None:
        """Log where equal numbers of rows leave no choice but micro-batches of one row."""
        if self._settings.uniform_micro_batches not in ("rows", "both") or self._settings.batch_tokens:
            return
        limit, rows = self.limits.of(batch_size), batch_size * self._settings.gradient_accumulation_steps
        most = self._data.shapes.rows_within(limit, int(self._data.dataset.lengths.max()))
        if 1 < most < rows and largest_divisor(rows, at_most=most) == 1:
            self._record.event(
                "uniform_micro_batches",
                f"the {rows} rows of a step divide into equal micro-batches of up to {most} only one by one, which is slow; "
                "a batch_size with divisors, such as a power of two, would do",
            )

    def keep_lost(self, facts: Mapping[str, Any]) -> None:
        """Keep, as the ranks end, what is to be known when training is started again: what a micro-batch may hold, or a trial."""
        kept = {key: facts[key] for key in _TRIALS if key in facts}
        if kept:
            kept["trial_settings"] = self._bounds.trials_name
        if "limit" in facts and self._settings.on_out_of_memory == "shrink":
            kept |= {"limit": facts["limit"], "unit": facts["unit"], **self.limits.lowered_from()}
        if kept:  # with what an earlier attempt has kept
            self._lost |= {"run": self._run, "launch": distributed.launch_name(), **kept}
            atomic_write(self._lost_file, json.dumps(self._lost))

    def _read_lost(self, *, resumes: bool) -> dict[str, Any]:
        """Return what :meth:`keep_lost` has kept for this run, or for the one that torchrun has started again."""
        try:
            lost: dict[str, Any] = json.loads(self._lost_file.read_text())
            is_restart = lost["launch"] is not None and lost["launch"] == distributed.launch_name()
            if not (is_restart or (resumes and lost["run"] == self._run)):
                self._lost_file.unlink()
                return {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        if lost.get("trial_settings") != self._bounds.trials_name:  # whether it fits is another question now
            lost = {key: value for key, value in lost.items() if not key.startswith("trial_")}
        return lost
