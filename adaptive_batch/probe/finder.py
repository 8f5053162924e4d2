"""Runs trials until a search ends: the result, its file, its table."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import atomic_write, count, format_bound, format_bytes, rows_fit

from .search import Search, Trial
from .throughput import Throughput

log = logging.getLogger("adaptive_batch")

_FORMAT = 4
_KEPT = 31  # results of other lengths, devices or settings that a file keeps


@dataclass(frozen=True)
class ProbeResult:
    """What a search found.

    Attributes:
        max_batch_size: the largest size that was tried and fits; 0 when none did.
        batch_size: the size to train with: `max_batch_size`, or the power of two below it, which
            was tried too.
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

    @property
    def bound(self) -> str:
        """`max_batch_size` as text, with a plus where no more were tried."""
        return format_bound(self.max_batch_size, self.maximum)

    @property
    def num_out_of_memory(self) -> int:
        """Trials that ran out of memory."""
        return sum(not (trial.fits or trial.retried) for trial in self.trials)

    def peak_bytes(self) -> int | None:
        """Peak of the bound's own trial, the optimizer's phase included."""
        own = [
            trial for trial in self.trials if trial.fits and trial.batch_size == self.max_batch_size
        ]
        peaks = [peak for trial in own for peak in (trial.peak_bytes, trial.optimizer_peak_bytes)]
        return max((peak for peak in peaks if peak is not None), default=None)

    def bytes_per_row(self) -> float | None:
        """Slope of the peak between the two largest sizes that fit; None where fewer than two were
        measured.
        """
        peaks = {
            t.batch_size: t.peak_bytes for t in self.trials if t.fits and t.peak_bytes is not None
        }
        measured = sorted(peaks.items())
        if len(measured) < 2:
            return None
        (smaller, below), (larger, above) = measured[-2:]
        return (above - below) / (larger - smaller)

    def table(self) -> str:
        """Aligned text: a line for each trial, then what is fixed, what a row costs, what is left
        free, and the bound.
        """
        lines = [f"{'rows':>6} {'length':>7} {'peak':>10} {'fits':>5} {'seconds':>8} {'rows/s':>8}"]
        for trial, seconds in zip(self.trials, self.seconds, strict=True):
            peak = "-" if trial.peak_bytes is None else format_bytes(trial.peak_bytes)
            rate = f"{trial.batch_size / seconds:.1f}" if seconds and trial.fits else "-"
            lines.append(
                f"{trial.batch_size:>6} {self.sequence_length or '-':>7} {peak:>10}"
                f" {'yes' if trial.fits else 'no':>5} {seconds:>8.2f} {rate:>8}"
            )
        fixed = format_bytes(self.resident_bytes)
        lines.append(f"fixed: {fixed} (weights, buffers, optimizer state, gradients that stay)")
        optimizer_peaks = [
            t.optimizer_peak_bytes for t in self.trials if t.optimizer_peak_bytes is not None
        ]
        if optimizer_peaks:
            lines.append(
                f"optimizer's step: {format_bytes(max(optimizer_peaks))} at its peak, whatever the"
                " batch"
            )
        if (slope := self.bytes_per_row()) is not None:
            lines.append(
                f"each row: {format_bytes(slope)} more, between the two largest sizes that fit"
            )
        if (bound_peak := self.peak_bytes()) is not None:
            free = format_bytes(max(0, self.budget_bytes - bound_peak))
            lines.append(
                f"free at the bound: {free} of the {format_bytes(self.budget_bytes)} allowed"
            )
        if budgets := self.budgets_of_ranks:
            least = min(budgets)
            most = max(budgets)
            of_ranks = f"{len(budgets)} ranks, which all must have room"
            if most > 1.01 * least:
                which = ", ".join(
                    str(rank) for rank, budget in enumerate(budgets) if budget <= 1.01 * least
                )
                of_ranks += (
                    f": rank {which} may use least, {format_bytes(least)}, others up to"
                    f" {format_bytes(most)}"
                )
            lines.append(of_ranks)
        cached = ", known from before and tried again" if self.from_cache else ""
        is_rounded = self.batch_size != self.max_batch_size
        rounded = f"; rounded down to a power of two: {self.batch_size}" if is_rounded else ""
        if (with_retries := self.max_batch_size_with_retries) is not None:
            lines.append(
                f"max_batch_size_with_retries: {with_retries or 'not tried'} (the allocator gives"
                " back its cache and asks again, which is slow)"
            )
        lines.append(f"max_batch_size: {self.bound}{cached}{rounded}")
        return "\n".join([*lines, self.throughput.table()] if self.throughput else lines)


def run_search(
    run_trial: Callable[[int], Trial],
    *,
    search: Search,
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
        peak = "" if trial.peak_bytes is None else f", peak {format_bytes(trial.peak_bytes)}"
        went = rows_fit(size) if trial.fits else f"{count(size, 'row')} did not fit"
        again = " without the allocator asking again" if trial.retried else ""
        log.info("trial %d: %s%s%s", len(trials), went, again, peak)
        return trial

    while (size := search.candidate) is not None:
        search.record(run(size))
    bound = batch_size = search.best
    if round_to_power_of_two and bound:
        fitting = {trial.batch_size for trial in trials if trial.fits}
        power = 1 << (bound.bit_length() - 1)
        while power and power not in fitting and not run(power).fits:
            power //= 2
        batch_size = power or bound
    retried = max((trial.batch_size for trial in trials if trial.retried), default=0)
    return ProbeResult(
        bound,
        batch_size,
        tuple(trials),
        tuple(seconds),
        sequence_length,
        resident_bytes,
        budget_bytes,
        maximum=search.maximum,
        max_batch_size_with_retries=retried if retried > bound else None,
    )


def try_again(known: ProbeResult, run_trial: Callable[[int], Trial]) -> ProbeResult | None:
    """Try a bound that was found before once more; None where it no longer fits."""
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


def save_result(result: ProbeResult, path: Path, *, fingerprint: str, settings: str = "") -> None:
    """Write a result as JSON, with the fingerprint of all it depends on, and of settings alone;
    earlier ones of others are kept.
    """
    earlier = [record for record in _read_records(path) if record["fingerprint"] != fingerprint]
    result = replace(result, trials=tuple(replace(trial, trace=None) for trial in result.trials))
    record = {"format": _FORMAT, "fingerprint": fingerprint, "settings": settings, **asdict(result)}
    record |= {"bytes_per_row": result.bytes_per_row(), "earlier": earlier[-_KEPT:]}
    atomic_write(path, json.dumps(record, indent=2), sync=True)


def load_result(path: Path, *, fingerprint: str) -> ProbeResult | None:
    """Read a result that :func:`save_result` wrote; None where there is none, it is torn, or it
    depends on something else.
    """
    records = _read_records(path)
    record = next((record for record in records if record["fingerprint"] == fingerprint), None)
    if record is None and records:
        log.info("%s is of other settings, other rows or another device; probing again", path)
    return _result(record, path) if record else None


def load_latest(path: Path, *, settings: str) -> ProbeResult | None:
    """Read the last result of some settings, whatever the device had free then; None where there is
    none.
    """
    records = [record for record in _read_records(path) if record.get("settings") == settings]
    return _result(records[-1], path) if records else None


def _result(record: dict[str, Any], path: Path) -> ProbeResult | None:
    try:
        values = {name: record[name] for name in ProbeResult.__dataclass_fields__}
        trials = tuple(Trial(**trial) for trial in values.pop("trials"))
        values |= {name: tuple(values[name]) for name in ("seconds", "budgets_of_ranks")}
        values["throughput"] = values["throughput"] and Throughput.from_dict(values["throughput"])
        result = ProbeResult(trials=trials, **values)
        if not {trial.batch_size for trial in trials if trial.fits} >= {
            result.max_batch_size,
            result.batch_size,
        }:
            raise ValueError(f"its bound of {result.max_batch_size} rows was never tried")
        return result
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be used (%r); probing again", path, error)
        return None


def _read_records(path: Path) -> list[dict[str, Any]]:
    """The results in a file, oldest first; none where it is not there, torn, or of another format."""
    try:
        latest = json.loads(path.read_text())
        records = [*latest.pop("earlier"), latest]
        if any(record["format"] != _FORMAT or "fingerprint" not in record for record in records):
            raise ValueError("it was written by another version")
        return records
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read (%r); probing again", path, error)
        return []


def _agree(trial: Trial) -> Trial:
    """One trial for all ranks: fits where it fits everywhere, the largest peaks, and the trace of
    rank zero, whose shards are largest.
    """
    if distributed.world_size() == 1:
        return trial
    mine = (-1 if peak is None else peak for peak in (trial.peak_bytes, trial.optimizer_peak_bytes))
    fails, fails_again, *most = distributed.all_reduce_max(
        [not trial.fits, not (trial.fits or trial.retried), *mine]
    )
    peak, optimizer_peak = (None if one < 0 else one for one in most)
    trace = distributed.from_rank_zero(lambda: trial.trace) if not fails else None
    return Trial(
        trial.batch_size,
        not fails,
        peak,
        optimizer_peak,
        trace,
        retried=bool(fails and not fails_again),
    )
