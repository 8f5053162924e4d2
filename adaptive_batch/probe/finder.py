"""Runs trials until a search ends: the result and its table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import (
    count,
    format_bound,
    format_bytes,
    from_json,
    rows_fit,
)

from .search import Search, Trial
from .store import Store
from .throughput import NEWER_FIELDS, Throughput

log = logging.getLogger("adaptive_batch")

# More bytes than any device has.
_ENDLESS = 2**62


@dataclass(frozen=True)
class ProbeResult:
    """What a search found.

    Attributes:
        max_batch_size: the largest size that was tried and fits; 0 when none did.
        batch_size: rows on one device that training begins with, where it takes what was found:
            `max_batch_size`, or the power of two below it, which was tried too.
        seconds: how long each trial took.
        sequence_length: tokens in the longest row of each trial; 0 where it is not known.
        resident_bytes: alive before any trial.
        budget_bytes: what a trial was allowed; with several ranks, on the one that was allowed
            least.
        from_cache: the bound was known, and was tried once more.
        budgets_of_ranks: what each of several ranks was allowed, in bytes.
        maximum: the most rows that would have been tried; 0 where it is not known.
        max_batch_size_with_retries: the largest size that was tried and ran, be it that the
            allocator gave back its cache and asked again; None where no trial of a larger size than
            `max_batch_size` did, 0 where one could have.
        throughput: what is fastest within the bound; None where that was not asked.
        counts_eager: whether the peaks are those of the eager program, where a compiled one runs.
    """

    max_batch_size: int
    batch_size: int
    trials: tuple[Trial, ...]
    seconds: tuple[float, ...]
    sequence_length: int = 0
    resident_bytes: int = 0
    budget_bytes: int = 0
    from_cache: bool = False
    budgets_of_ranks: tuple[int, ...] = ()
    maximum: int = 0
    max_batch_size_with_retries: int | None = None
    throughput: Throughput | None = None
    counts_eager: bool = False

    @property
    def bound(self) -> str:
        """`max_batch_size` as text, with a plus where no more were tried."""
        return format_bound(self.max_batch_size, self.maximum)

    @property
    def num_out_of_memory(self) -> int:
        """Trials of this run that ran out of memory."""
        if self.from_cache:
            # The run whose search it was has counted them; the trial of this one fit.
            return 0
        return sum(not (trial.fits or trial.retried) for trial in self.trials)

    def record(self) -> dict[str, Any]:
        """Return the result as plain values, without the traces of trials, which are large."""
        trials = tuple(replace(trial, trace=None) for trial in self.trials)
        return {**asdict(replace(self, trials=trials)), "bytes_per_row": self.bytes_per_row()}

    def peak_bytes(self) -> int | None:
        """Return the peak of the bound's own trial, the optimizer's phase included."""
        peaks = [
            peak
            for trial in self.trials
            if trial.fits and trial.batch_size == self.max_batch_size
            for peak in (trial.peak_bytes, trial.optimizer_peak_bytes)
            if peak is not None
        ]
        return max(peaks, default=None)

    def bytes_per_row(self) -> float | None:
        """Return the slope of the peak between the two largest sizes that fit.

        None where fewer than two were measured.
        """
        # A size may have been tried twice; its last peak counts.
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
        """Return the trials, the memory and the bound as aligned text.

        A line for each trial, then what is fixed, what a row costs, what is left free, and the
        bound.
        """
        lines = [f"{'rows':>6} {'length':>7} {'peak':>10} {'fits':>5} {'seconds':>8} {'rows/s':>8}"]
        length = self.sequence_length or "-"
        for trial, seconds in zip(self.trials, self.seconds, strict=True):
            rows = trial.batch_size
            peak = "-" if trial.peak_bytes is None else format_bytes(trial.peak_bytes)
            fits = "yes" if trial.fits else "no"
            # A trial that stopped half-way has no rate.
            rate = f"{rows / seconds:.1f}" if seconds and trial.fits else "-"
            lines.append(f"{rows:>6} {length:>7} {peak:>10} {fits:>5} {seconds:>8.2f} {rate:>8}")
        fixed = format_bytes(self.resident_bytes)
        lines.append(f"fixed: {fixed} (weights, buffers, optimizer state, gradients that stay)")
        optimizer_peaks = [trial.optimizer_peak_bytes for trial in self.trials]
        if known_peaks := [peak for peak in optimizer_peaks if peak is not None]:
            peak = format_bytes(max(known_peaks))
            lines.append(f"optimizer's step: {peak} at its peak, whatever the batch")
        slope = self.bytes_per_row()
        if slope is not None:
            row = format_bytes(slope)
            lines.append(f"each row: {row} more, between the two largest sizes that fit")
        bound_peak = self.peak_bytes()
        if bound_peak is not None:
            free = format_bytes(max(0, self.budget_bytes - bound_peak))
            allowed = format_bytes(self.budget_bytes)
            lines.append(f"free at the bound: {free} of the {allowed} allowed")
        if self.budgets_of_ranks:
            lines.append(self._line_of_ranks())
        with_retries = self.max_batch_size_with_retries
        if with_retries is not None:
            lines.append(
                f"max_batch_size_with_retries: {with_retries or 'not tried'} (the allocator gives"
                " back its cache and asks again, which is slow)"
            )
        bound = f"max_batch_size: {self.bound}"
        if self.from_cache:
            bound += ", known from before and tried again"
        if self.batch_size != self.max_batch_size:
            bound += f"; rounded down to a power of two: {self.batch_size}"
        lines.append(bound)
        if self.counts_eager:
            lines.append(
                "peaks are those of the eager program, which is what can be counted here: compiled"
                " it needs less as a rule, and more rows may fit"
            )
        if self.throughput:
            lines.append(self.throughput.table())
        return "\n".join(lines)

    def _line_of_ranks(self) -> str:
        budgets = self.budgets_of_ranks
        line = f"{len(budgets)} ranks, which all must have room"
        smallest = min(budgets)
        # Budgets this close are the same for the reader: no rank holds the others back.
        about_smallest = 1.01 * smallest
        if max(budgets) <= about_smallest:
            return line
        ranks = [str(rank) for rank, budget in enumerate(budgets) if budget <= about_smallest]
        return (
            f"{line}: rank {', '.join(ranks)} may use least, {format_bytes(smallest)}, others up to"
            f" {format_bytes(max(budgets))}"
        )


def run_search(
    run_trial: Callable[[int], Trial],
    *,
    search: Search,
    fewest: int = 1,
    trial_seconds: float | None = None,
    seconds_of_fewest: float = 0.0,
    round_to_power_of_two: bool = False,
    sequence_length: int = 0,
    resident_bytes: int = 0,
    budget_bytes: int = 0,
) -> ProbeResult:
    """Find the largest batch whose whole training step fits; `max_batch_size` is 0 when none does.

    Every rank runs the same trials; a size fits where it fits on all of them, and its peak is the
    largest.

    Args:
        run_trial: runs one trial of that many rows; see :class:`.DryRun`.
        search: decides which size is tried next.
        fewest: rows that the model needs; fewer are not tried.
        trial_seconds: what a trial may take; None for any time. Few rows take longer each than
            many, so that sizes grow until one shows that the next would take too long.
        seconds_of_fewest: what the fewest rows took before the first trial.
        round_to_power_of_two: also find the size to train with by rounding the bound down; it is
            tried if it was not.
        sequence_length, resident_bytes, budget_bytes: for the result.
    """
    trials: list[Trial] = []
    seconds: list[float] = []

    def run(size: int) -> Trial:
        start = time.perf_counter()
        trial = _agree(run_trial(size))
        seconds.append(time.perf_counter() - start)
        trials.append(trial)
        log.info("trial %d: %s", len(trials), _outcome(trial))
        return trial

    def rows_in_time(rows: int, took: float) -> int:
        """Return the rows whose trial ends in time, where time grows as the rows do."""
        return distributed.minimum(int(rows * (trial_seconds or 0) / max(took, 1e-9)))

    maximum = search.maximum
    if trial_seconds is not None:
        search.try_at_most(max(fewest, rows_in_time(fewest, seconds_of_fewest)))
    while (size := search.candidate) is not None and size >= fewest:
        trial = run(size)
        search.record(trial)
        if trial_seconds is not None and trial.fits:
            most_rows = rows_in_time(size, seconds[-1])
            # A few rows more are not worth another trial of that length.
            search.try_at_most(most_rows if most_rows >= 2 * size else search.best)
    max_batch_size = search.best
    if trial_seconds is not None and max_batch_size == search.maximum < maximum:
        log.info(
            "more than %s are not tried: a trial would take longer than %g s (trial_seconds)",
            count(max_batch_size, "row"),
            trial_seconds,
        )
    batch_size = max_batch_size
    if round_to_power_of_two and max_batch_size:
        fitting = {trial.batch_size for trial in trials if trial.fits}
        power = 1 << (max_batch_size.bit_length() - 1)
        # The power of two may not have been tried yet, and need not fit although more rows did.
        while power and power not in fitting and not run(power).fits:
            power //= 2
        batch_size = power or max_batch_size
    largest_retried = max((trial.batch_size for trial in trials if trial.retried), default=0)
    return ProbeResult(
        max_batch_size,
        batch_size,
        tuple(trials),
        tuple(seconds),
        sequence_length,
        resident_bytes,
        budget_bytes,
        maximum=search.maximum,
        max_batch_size_with_retries=largest_retried if largest_retried > max_batch_size else None,
    )


def _outcome(trial: Trial) -> str:
    if trial.fits:
        text = rows_fit(trial.batch_size)
    else:
        text = f"{count(trial.batch_size, 'row')} did not fit"
    if trial.retried:
        text += " without the allocator asking again"
    if trial.peak_bytes is not None:
        text += f", peak {format_bytes(trial.peak_bytes)}"
    return text


def try_again(known: ProbeResult, run_trial: Callable[[int], Trial]) -> ProbeResult | None:
    """Try an earlier bound again; return None where it no longer fits."""
    start = time.perf_counter()
    trial = _agree(run_trial(known.max_batch_size))
    if not trial.fits:
        log.info(
            "the bound of %d rows that was found before no longer fits; probing again",
            known.max_batch_size,
        )
        return None
    seconds = (*known.seconds, time.perf_counter() - start)
    return replace(known, trials=(*known.trials, trial), seconds=seconds, from_cache=True)


def read_result(store: Store, value: str, *, name: str = "fingerprint") -> ProbeResult | None:
    """Return the newest result that a store keeps under a value of a name; None where there is
    none, or it cannot be used.
    """
    record = store.get(value, name=name)
    if record is None:
        return None
    try:
        result: ProbeResult = from_json(ProbeResult, record, optional=NEWER_FIELDS)
        # Only a size that was tried may be trained with, whatever the file claims.
        fitting = {trial.batch_size for trial in result.trials if trial.fits}
        if not fitting >= {result.max_batch_size, result.batch_size}:
            raise ValueError(f"its bound of {result.max_batch_size} rows was never tried")
        return result
    except (ValueError, TypeError) as error:
        log.warning("%s cannot be used (%r); probing again", store.path, error)
        return None


def _agree(trial: Trial) -> Trial:
    """Return one trial for all ranks.

    It fits where it fits everywhere; its peaks are the largest, its trace is that of rank zero,
    whose shards are largest.
    """
    if distributed.world_size() == 1:
        return trial
    fails = not trial.fits
    numbers = trial.peak_bytes, trial.optimizer_peak_bytes
    # Of what was held the least counts, and not that of a rank that did not run out.
    held_bytes = _ENDLESS if trial.held_bytes is None else trial.held_bytes
    fails_anywhere, is_out_of_memory_anywhere, least_held, *peaks = distributed.all_reduce_max(
        [
            fails,
            # A rank that ran with retries does not fit, but has not run out of memory.
            fails and not trial.retried,
            -held_bytes,
            *(-1 if number is None else number for number in numbers),
        ]
    )
    peak_bytes, optimizer_peak_bytes = (None if peak < 0 else peak for peak in peaks)
    trace = None if fails_anywhere else distributed.from_rank_zero(lambda: trial.trace)
    return Trial(
        trial.batch_size,
        not fails_anywhere,
        peak_bytes,
        optimizer_peak_bytes,
        trace,
        retried=bool(fails_anywhere and not is_out_of_memory_anywhere),
        held_bytes=None if least_held == -_ENDLESS else -least_held,
    )
