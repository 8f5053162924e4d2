"""The loop of a search, the results of searches, and their store."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import (
    atomic_write,
    count,
    fingerprint,
    format_bound,
    format_bytes,
    from_json,
    rows_fit,
)
from adaptive_batch.data import MicroBatchLimit, MicroBatchTime

from .search import Search, Trial

log = logging.getLogger("adaptive_batch")

_FORMAT = 4
# Number of older records that a file keeps.
_KEPT = 31


@dataclass(frozen=True)
class TimedTrial:
    """Timing of a layout and a limit.

    Attributes:
        kind: kind of the layout.
        limit: limit of a micro-batch.
        tokens_per_second: real tokens per second of micro-batches on one device.
        padding: share of padding in the processed tokens.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    padding: float


@dataclass(frozen=True)
class Throughput:
    """A layout and a limit, with all timings.

    Attributes:
        kind: kind of the layout.
        limit: limit of a micro-batch.
        tokens_per_second: rate of its trial.
        time: measured time model of a micro-batch in this layout.
        trials: timings in order.
        seconds: duration of the search.
    """

    kind: str
    limit: MicroBatchLimit
    tokens_per_second: float
    time: MicroBatchTime
    trials: tuple[TimedTrial, ...]
    seconds: float = 0.0

    def table(self) -> str:
        """Return the timings and the fastest choice as aligned text."""
        lines = [f"{'layout':>8} {'at once':>15} {'padding':>8} {'tokens/s':>9}"]
        for trial in self.trials:
            at_once = f"{trial.limit.amount:,} {trial.limit.unit}"
            lines.append(
                f"{trial.kind:>8} {at_once:>15} {trial.padding:>8.1%}"
                f" {trial.tokens_per_second:>9,.0f}"
            )
        lines.append(f"fastest: {self.kind}, up to {self.limit.amount:,} {self.limit.unit} at once")
        return "\n".join(lines)


@dataclass(frozen=True)
class ProbeResult:
    """Result of a search.

    Attributes:
        max_batch_size: largest tried size that fits, or 0.
        batch_size: number of rows on one device with which training starts: `max_batch_size`, or a
            smaller power of two that was tried too.
        trials: trials in order.
        seconds: duration of each trial.
        sequence_length: number of tokens in the longest row of each trial; 0 if unknown.
        resident_bytes: bytes alive before any trial.
        budget_bytes: memory limit of a trial; the lowest limit of all ranks.
        from_cache: whether the size is an earlier result that was tried again.
        maximum: limit of the search; 0 if unknown.
        max_batch_size_with_retries: largest tried size that ran with retries of the allocator; None
            if none above `max_batch_size` did.
        throughput: fastest choice within the bound; None if it was not searched.
    """

    max_batch_size: int
    batch_size: int
    trials: tuple[Trial, ...]
    seconds: tuple[float, ...]
    sequence_length: int = 0
    resident_bytes: int = 0
    budget_bytes: int = 0
    from_cache: bool = False
    maximum: int = 0
    max_batch_size_with_retries: int | None = None
    throughput: Throughput | None = None

    @property
    def bound(self) -> str:
        """`max_batch_size` as text, with a plus if it is the limit of the search."""
        return format_bound(self.max_batch_size, self.maximum)

    def describe(self) -> str:
        """Describe the result for an error: the rows that could be tried, and those that fit."""
        length = ""
        if self.sequence_length:
            length = f" of {count(self.sequence_length, 'token')}"
        return (
            f"a search of up to {count(self.maximum, 'row')}{length} found that"
            f" {rows_fit(self.max_batch_size)}"
        )

    @property
    def num_out_of_memory(self) -> int:
        """Number of trials of this run that ran out of memory."""
        if self.from_cache:
            # The earlier run has counted its own.
            return 0
        return sum(not (trial.fits or trial.retried) for trial in self.trials)

    def record(self) -> dict[str, Any]:
        """Return the result as plain values, without the large traces of trials."""
        trials = tuple(replace(trial, trace=None) for trial in self.trials)
        return {**asdict(replace(self, trials=trials)), "bytes_per_row": self.bytes_per_row()}

    def peak_bytes(self) -> int | None:
        """Return the peak of the trial of `max_batch_size`, the optimizer's step included."""
        peaks = [
            peak
            for trial in self.trials
            if trial.fits and trial.batch_size == self.max_batch_size
            for peak in (trial.peak_bytes, trial.optimizer_peak_bytes)
            if peak is not None
        ]
        return max(peaks, default=None)

    def bytes_per_row(self) -> float | None:
        """Return the slope of the peak between the two largest sizes that fit, or None."""
        # If a size was tried twice, the last peak counts.
        peaks = {
            trial.batch_size: trial.peak_bytes
            for trial in self.trials
            if trial.fits and trial.peak_bytes is not None
        }
        if len(peaks) < 2:
            return None
        smaller, larger = sorted(peaks)[-2:]
        return (peaks[larger] - peaks[smaller]) / (larger - smaller)

    def table(self) -> str:
        """Return the trials, the memory per row and the bound as aligned text."""
        lines = self._table_of_trials()
        fixed = format_bytes(self.resident_bytes)
        lines.append(f"fixed: {fixed} (weights, buffers, optimizer state, kept gradients)")
        slope = self.bytes_per_row()
        if slope is not None:
            row = format_bytes(slope)
            lines.append(f"each row: {row} more, between the two largest sizes that fit")
        bound_peak = self.peak_bytes()
        if bound_peak is not None:
            free = format_bytes(max(0, self.budget_bytes - bound_peak))
            allowed = format_bytes(self.budget_bytes)
            lines.append(f"free at the bound: {free} of the {allowed} allowed")
        if self.max_batch_size_with_retries is not None:
            lines.append(
                f"max_batch_size_with_retries: {self.max_batch_size_with_retries} (slow: the"
                " allocator frees its cache and retries)"
            )
        bound = f"max_batch_size: {self.bound}"
        if self.from_cache:
            bound += ", an earlier result that was tried again"
        if self.batch_size != self.max_batch_size:
            bound += f"; rounded down to a power of two: {self.batch_size}"
        lines.append(bound)
        if self.throughput:
            lines.append(self.throughput.table())
        return "\n".join(lines)

    def _table_of_trials(self) -> list[str]:
        """Return the heading and one line for each trial."""
        lines = [f"{'rows':>6} {'length':>7} {'peak':>10} {'fits':>5} {'seconds':>8}"]
        length = self.sequence_length or "-"
        for trial, seconds in zip(self.trials, self.seconds, strict=True):
            rows = trial.batch_size
            peak = "-" if trial.peak_bytes is None else format_bytes(trial.peak_bytes)
            fits = "yes" if trial.fits else "no"
            lines.append(f"{rows:>6} {length:>7} {peak:>10} {fits:>5} {seconds:>8.2f}")
        return lines


def run_search(
    run_trial: Callable[[int], Trial],
    *,
    search: Search,
    min_rows: int = 1,
    trial_seconds: float | None = None,
    min_rows_seconds: float = 0.0,
    round_to_power_of_two: bool = False,
    sequence_length: int = 0,
) -> ProbeResult:
    """Find the largest batch whose whole training step fits.

    Every rank runs the same trials. A size fits if it fits on all ranks, and its peak is the
    largest of theirs.

    Args:
        run_trial: function that runs a trial of the given rows; see :class:`.DryRun`.
        search: search strategy.
        min_rows: smallest size to try.
        trial_seconds: time limit of a trial; None for no limit. Sizes grow until the next one would
            take longer, by linear extrapolation.
        min_rows_seconds: duration of `min_rows` rows before the first trial.
        round_to_power_of_two: whether to round the size for training down, and to try it too.
        sequence_length: number of tokens in the longest row of each trial; 0 if unknown.

    Returns:
        The result; its `max_batch_size` is 0 if no size fits.
    """
    trials: list[Trial] = []
    seconds: list[float] = []

    def run(size: int) -> Trial:
        start = time.perf_counter()
        trial = combine_over_ranks(run_trial(size))
        seconds.append(time.perf_counter() - start)
        trials.append(trial)
        outcome = "fits" if trial.fits else "does not fit"
        log.info("trial %d, %s: %s", len(trials), count(size, "row"), outcome)
        return trial

    def rows_in_time(rows: int, duration: float) -> int:
        """Return the rows whose trial ends in time, by linear extrapolation of a duration."""
        assert trial_seconds is not None
        return distributed.minimum(int(rows * trial_seconds / max(duration, 1e-9)))

    initial_maximum = search.maximum
    if trial_seconds is not None:
        search.try_at_most(max(min_rows, rows_in_time(min_rows, min_rows_seconds)))
    while True:
        size = search.candidate
        if size is None or size < min_rows:
            break
        trial = run(size)
        search.record(trial)
        if trial_seconds is not None and trial.fits:
            rows = rows_in_time(size, seconds[-1])
            # Less than twice the rows is not worth a long trial, so end the search.
            search.try_at_most(rows if rows >= 2 * size else search.best)
    max_batch_size = search.best
    if trial_seconds is not None and max_batch_size == search.maximum < initial_maximum:
        log.info(
            "search ends at %s: a larger trial would take longer than %g s (trial_seconds)",
            count(max_batch_size, "row"),
            trial_seconds,
        )
    batch_size = max_batch_size
    if round_to_power_of_two and max_batch_size:
        fitting = {trial.batch_size for trial in trials if trial.fits}
        # The largest power of two that is not above the maximum.
        power_of_two = 1 << (max_batch_size.bit_length() - 1)
        # It may be untried, and other operations may need more memory for fewer rows.
        while power_of_two and power_of_two not in fitting and not run(power_of_two).fits:
            power_of_two //= 2
        batch_size = power_of_two or max_batch_size
    largest_retried = max((trial.batch_size for trial in trials if trial.retried), default=0)
    return ProbeResult(
        max_batch_size,
        batch_size,
        tuple(trials),
        tuple(seconds),
        sequence_length,
        maximum=search.maximum,
        max_batch_size_with_retries=largest_retried if largest_retried > max_batch_size else None,
    )


def try_again(known: ProbeResult, run_trial: Callable[[int], Trial]) -> ProbeResult | None:
    """Try the maximum of an earlier result again; return None if it no longer fits."""
    start = time.perf_counter()
    trial = combine_over_ranks(run_trial(known.max_batch_size))
    if not trial.fits:
        log.info(
            "the earlier result of %d rows no longer fits; probing again",
            known.max_batch_size,
        )
        return None
    seconds = (*known.seconds, time.perf_counter() - start)
    return replace(known, trials=(*known.trials, trial), seconds=seconds, from_cache=True)


def combine_over_ranks(trial: Trial) -> Trial:
    """Combine the trials of all ranks into one. A collective.

    It fits if it fits on all ranks. Peaks are the largest, the peak before an OOM is the lowest,
    and the trace is that of rank zero, which has the largest shards.
    """
    trials = distributed.all_gather(replace(trial, trace=None))
    failed = [each for each in trials if not each.fits]
    peaks = [each.peak_bytes for each in trials if each.peak_bytes is not None]
    optimizer_peaks = [
        each.optimizer_peak_bytes for each in trials if each.optimizer_peak_bytes is not None
    ]
    held = [each.held_bytes for each in trials if each.held_bytes is not None]
    return Trial(
        trial.batch_size,
        not failed,
        max(peaks, default=None),
        max(optimizer_peaks, default=None),
        None if failed else distributed.from_rank_zero(lambda: trial.trace),
        # A rank with retries does not fit, but has not run out of memory.
        retried=bool(failed) and all(each.retried for each in failed),
        held_bytes=min(held, default=None),
    )


class Store:
    """Results of searches in a JSON file: the newest at the top level, older ones under
    ``earlier``.

    Args:
        path: the file.
        settings: fingerprint of the settings of the run.
        conditions: other facts that the results depend on.
        reads: whether a search may use an earlier result.
    """

    def __init__(
        self, path: Path, settings: str, conditions: Sequence[Any] = (), *, reads: bool = True
    ) -> None:
        self._path = path
        self._settings = settings
        self._conditions = conditions
        self._reads = reads

    def name(self, *conditions: Any) -> str:
        """Return the fingerprint of a search under further conditions."""
        return fingerprint(self._settings, *self._conditions, *conditions)

    def known(self, name: str) -> ProbeResult | None:
        """Return the newest result with this fingerprint, or None."""
        return self._newest("fingerprint", name) if self._reads else None

    def newest(self) -> ProbeResult | None:
        """Return the newest result under the settings of the run, or None."""
        return self._newest("settings", self._settings)

    def _newest(self, key: str, value: str) -> ProbeResult | None:
        """Return the newest usable result whose field `key` has this value, or None."""
        matches = [record for record in self._records() if record.get(key) == value]
        if not matches:
            return None
        try:
            result: ProbeResult = from_json(ProbeResult, matches[-1])
            # Only tried sizes may be trained with, even if the file was edited.
            fitting = {trial.batch_size for trial in result.trials if trial.fits}
            if not fitting >= {result.max_batch_size, result.batch_size}:
                raise ValueError(f"its bound of {result.max_batch_size} rows was never tried")
            return result
        except (ValueError, TypeError) as error:
            log.warning("%s cannot be used (%r); probing again", self._path, error)
            return None

    def put(self, name: str, result: ProbeResult) -> None:
        """Write a result under its fingerprint; log a warning if the disk fails."""
        earlier = [other for other in self._records() if other["fingerprint"] != name]
        head = {"format": _FORMAT, "fingerprint": name, "settings": self._settings}
        text = json.dumps({**head, **result.record(), "earlier": earlier[-_KEPT:]}, indent=2)
        try:
            atomic_write(self._path, text, sync=True)
        except OSError as error:
            log.warning("%s cannot be written (%s); the next run searches again", self._path, error)

    def _records(self) -> list[dict[str, Any]]:
        """Return the records, oldest first; [] if the file cannot be read."""
        try:
            latest = json.loads(self._path.read_text())
            records = [*latest.pop("earlier"), latest]
            if any(
                record["format"] != _FORMAT or "fingerprint" not in record for record in records
            ):
                raise ValueError("it was written by another version")
            return records
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read (%r); probing again", self._path, error)
            return []
