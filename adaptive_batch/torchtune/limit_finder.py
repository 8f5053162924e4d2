"""What one micro-batch of training may hold: configured or found, lowered by what happens; it does not grow back within a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit, largest_divisor, longest_rows
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB
from adaptive_batch.probe import ProbeResult
from adaptive_batch.report import RunLog
from adaptive_batch.training import LimitChange, has_batch_norm

from .batch_size_finder import BatchSizeFinder
from .data import Data
from .job import Job
from .trainer import Trainer


class LimitFinder:
    """Keeps the bound and the capacity of a run, and writes down every change.

    Args:
        job, data, trainer: of the run.
        bounds: finds what fits.
        record: of the run.
        run: its name; what it lost when it ended on all ranks is kept for it.

    Attributes:
        limits: what it has found.
    """

    def __init__(
        self, job: Job, data: Data, trainer: Trainer, bounds: BatchSizeFinder, record: RunLog, *, run: str = ""
    ) -> None:
        self._job, self._data, self._trainer = job, data, trainer
        self._settings = job.settings
        self._bounds = bounds
        self._record = record
        self._run = run
        self._lost = Path(job.cfg.output_dir) / "adaptive_batch" / "lost.json"
        self._kept: dict[str, Any] = {}  # what is to be known when training is started again
        self.limits = data.new_limits()

    def find(self, batch_size: int, *, goes_on: bool, saved: Mapping[str, Any]) -> int:
        """Find how many rows fit at once, where any setting needs it.

        Args:
            batch_size: configured, or of the checkpoint.
            goes_on: it is the checkpoint's, and is kept whatever fits.
            saved: the state of each part when the checkpoint was saved; empty without one.

        Returns:
            The batch size to train with.

        Raises:
            SettingError: what is configured does not fit; with the suggested fix.
            DoesNotFitError: not one row fits.
        """
        if saved:
            self.limits.num_out_of_memory = saved["limits"]["num_out_of_memory"]
        self._warn_of_batch_norm()
        lost = distributed.from_rank_zero(lambda: self._read_loss(goes_on=bool(saved)))
        if lost.get("trial_settings") != self._bounds.trials_name:  # whether it fits is another question now
            lost = {key: value for key, value in lost.items() if not key.startswith("trial_")}
        self._kept = dict(lost)
        self._try_fewer(lost)
        if self._settings.needs_bound:
            result = self._search(batch_size, goes_on=goes_on)
            self.limits.bound, self.limits.tried_length = result.max_batch_size, result.sequence_length
            if goes_on:
                self._say_what_is_kept(batch_size)
            elif self._settings.use_maximum_batch_size and self._settings.batch_size_schedule is None:
                message = f"batch_size {batch_size} -> {result.batch_size} (use_maximum_batch_size; bound {self.limits.bound})"
                self._record.decision(
                    "batch_size", message, before=batch_size, after=result.batch_size, bound=self.limits.bound
                )
                batch_size = result.batch_size
            self._check_what_is_configured(batch_size, goes_on=goes_on)
        if saved:
            self.limits.load_state_dict(saved["limits"] | {"num_out_of_memory": self.limits.num_out_of_memory})
        if lost.get("capacity") and all(lost[key] == value for key, value in self.limits.lowered_from().items()):
            less = MicroBatchLimit(lost["capacity"], lost["unit"])
            holds = min(filter(None, (self.limits.lowered, less)), key=lambda limit: limit.amount)
            self.limits.lower_to(holds)
            message = f"a micro-batch holds {holds}: more ran out of memory before all ranks ended"
            self._record.decision("capacity", message, after=holds.amount, unit=holds.unit)
        if self.limits.bound:
            (longest,) = longest_rows(self._data.lengths, 1)
            if int(self._data.lengths[longest]) > self.limits.tried_length:
                self.try_longer([self._data.read_row(longest)], batch_size=batch_size)
        return batch_size

    def _try_fewer(self, lost: Mapping[str, Any]) -> None:
        """Have no size tried again of which a trial ended all ranks."""
        self._bounds.indeterminate, self._bounds.indeterminate_val = lost.get("trial_rows"), lost.get("trial_rows_val")
        for of, rows in (("", lost.get("trial_rows")), ("of validation ", lost.get("trial_rows_val"))):
            if rows:
                message = f"a trial {of}of {rows} rows ended all ranks, so whether they fit is not known; up to half are tried"
                self._record.decision("indeterminate", message, rows=rows)

    def try_longer(self, rows: list[dict[str, Any]], *, batch_size: int) -> None:
        """Before a row that is longer than any that was tried is trained on, find how many of its length fit.

        Raises:
            DoesNotFitError: not even this one.
            SettingError: fewer, and with the optimizer in backward a step cannot be split.
        """
        limits = self.limits
        if not limits.tried_length:
            return
        row = max(rows, key=lambda row: len(row["tokens"]))
        length, before = len(row["tokens"]), limits.tried_length
        if length <= before:
            return
        capacity, padded = limits.of(batch_size), self._data.shapes.padded(length)
        most = max(1, capacity.amount if capacity.unit == "rows" else capacity.amount // padded)
        if self._settings.grows and self._settings.micro_batch_size is None and limits.bound:
            most = max(most, limits.bound) if capacity.unit == "rows" else most  # what the batch may grow to
        result = self._bounds.of_row(self._trainer, row, maximum=most, accumulates=not self._settings.optimizer_in_bwd)
        limits.num_out_of_memory += result.num_out_of_memory
        fit = result.max_batch_size
        message = f"a row of {length} tokens is longer than the {before} that were tried: {fit} of these fit at once"
        if self._settings.optimizer_in_bwd:
            if fit < batch_size:
                remedy = f"{message}, not {batch_size}; set probe.sequence_length=longest"
                raise SettingError("probe.sequence_length", self._settings.probe.sequence_length, remedy)
            limits.bound = min(limits.bound or fit, fit)  # a step cannot be split, so it may not grow beyond this
        elif fit < most:
            limits.lower_to(MicroBatchLimit(fit if capacity.unit == "rows" else fit * padded, capacity.unit))
        elif self._settings.micro_batch_tokens == "auto":  # of() would multiply the bound by the new length
            limits.lower_to(capacity)
        limits.tried_length = length
        after = limits.of(batch_size)
        self._record.decision(
            "capacity",
            f"{message}; a micro-batch holds {after}",
            before=capacity.amount,
            after=after.amount,
            unit=after.unit,
            length=length,
            trials=len(result.trials),
            out_of_memory=result.num_out_of_memory,
        )
        self._trainer.runner.capacity = after

    def lower(self, change: LimitChange) -> None:
        """Write down, at once, what an out-of-memory error in training took away."""
        self.limits.lower_to(change.after)
        self.write_down(change, kind="capacity")

    def say_if_one_by_one(self, batch_size: int) -> None:
        """A line where equal numbers of rows leave no choice but micro-batches of one row."""
        if self._settings.uniform_micro_batches not in ("rows", "both") or self._settings.batch_tokens:
            return
        capacity, rows = self.limits.of(batch_size), batch_size * self._settings.gradient_accumulation_steps
        longest = self._data.shapes.padded(int(self._data.lengths.max()))
        most = capacity.amount if capacity.unit == "rows" else capacity.amount // longest
        if 1 < most < rows and largest_divisor(rows, at_most=most) == 1:
            self._record.decision(
                "uniform_micro_batches",
                f"the {rows} rows of a step divide into equal micro-batches of up to {most} only one by one, which is slow; "
                "a batch_size with divisors, such as a power of two, would do",
            )

    def write_down(self, change: LimitChange, *, kind: str) -> None:
        """Count and record a capacity that was lowered."""
        self.limits.num_out_of_memory += change.out_of_memory
        self._record.decision(
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

    def write_down_loss(self, facts: Mapping[str, Any]) -> None:
        """Keep, as the ranks end, what is to be known when training is started again: what a micro-batch may hold, or a trial."""
        kept = {key: facts[key] for key in ("trial_rows", "trial_rows_val") if key in facts}
        if kept:
            kept["trial_settings"] = self._bounds.trials_name
        if "capacity" in facts and self._settings.on_out_of_memory == "shrink":
            kept |= {"capacity": facts["capacity"], "unit": facts["unit"], **self.limits.lowered_from()}
        if kept:  # beside what an earlier attempt has kept
            self._kept |= {"run": self._run, "launch": distributed.launch_name(), **kept}
            aside = self._lost.with_suffix(".tmp")
            aside.write_text(json.dumps(self._kept))
            os.replace(aside, self._lost)

    def _read_loss(self, *, goes_on: bool) -> dict[str, Any]:
        """What :meth:`write_down_loss` has kept for this run, or for the one that torchrun has started again; empty for nothing."""
        try:
            lost: dict[str, Any] = json.loads(self._lost.read_text())
            is_restart = lost["launch"] is not None and lost["launch"] == distributed.launch_name()
            if is_restart or (goes_on and lost["run"] == self._run):
                return lost
            self._lost.unlink()
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return {}

    def _search(self, batch_size: int, *, goes_on: bool) -> ProbeResult:
        """Search for the bound, show the table, and write it to ``probe.json``."""
        results = self._bounds.of_training(
            self._trainer,
            length=self._settings.probe.sequence_length,
            batch_size=batch_size,
            goes_on=goes_on,
            path=Path(self._job.cfg.output_dir) / "adaptive_batch" / "probe.json",
        )
        for result in results:
            out_of_memory = 0 if result.from_cache else result.num_out_of_memory
            self.limits.num_out_of_memory += out_of_memory
            self._record.decision(
                "bound",
                "probe of the largest batch:\n" + result.table(),
                max_batch_size=result.max_batch_size,
                budget_gib=round(result.budget_bytes / GIB, 3),
                trials=len(result.trials),
                out_of_memory=out_of_memory,
                from_cache=result.from_cache,
                seconds=round(sum(result.seconds), 2),
            )
        return results[-1]

    def _say_what_is_kept(self, batch_size: int) -> None:
        assert self.limits.bound is not None
        if batch_size > self.limits.bound:
            self._record.decision(
                "capacity",
                f"batch_size {batch_size} is kept; {self.limits.bound} rows fit here, so it runs as more micro-batches",
                batch_size=batch_size,
                micro_batch_size=self.limits.bound,
            )

    def _check_what_is_configured(self, batch_size: int, *, goes_on: bool) -> None:
        """Refuse a configured size of a micro-batch that is above what fits, never cut it in silence."""
        assert self.limits.bound is not None
        settings, fit = self._settings, self.limits.bound
        rows, tokens = settings.micro_batch_size, settings.micro_batch_tokens
        if isinstance(rows, int) and rows > fit:
            raise SettingError("micro_batch_size", rows, f"{fit} rows fit; give {fit} or less, or auto")
        most = self.limits.tried_tokens
        if isinstance(tokens, int) and tokens > most:
            remedy = f"{fit} rows of {self.limits.tried_length} tokens fit; give {most} or less, or auto"
            raise SettingError("micro_batch_tokens", tokens, remedy)
        scheduled = settings.batch_size_schedule is not None  # which says what a step holds
        if rows is None and tokens is None and not goes_on and not scheduled and batch_size > fit:
            raise SettingError(
                "batch_size",
                batch_size,
                f"{fit} rows fit; set batch_size={fit} or less (gradient_accumulation_steps makes up for it), or "
                "micro_batch_size=auto, or allow more memory",
            )

    def _warn_of_batch_norm(self) -> None:
        if has_batch_norm(self._trainer.model) and (
            self._settings.adaptive or self._settings.on_out_of_memory == "shrink"
        ):
            self._record.decision(
                "batch_norm",
                "the model has BatchNorm, whose statistics are those of a micro-batch: smaller micro-batches change results, "
                "not by rounding alone",
            )
