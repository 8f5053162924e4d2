"""Settings that spend the memory that is left to save time, by an estimate or timed."""

from __future__ import annotations

import logging
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from omegaconf import DictConfig

from adaptive_batch import distributed
from adaptive_batch._util import count, format_bytes
from adaptive_batch.errors import DoesNotFitError
from adaptive_batch.estimate import Fit, this_device
from adaptive_batch.memory import RandomState, is_out_of_memory
from adaptive_batch.probe import ProbeResult
from adaptive_batch.training import is_compiled

from .config_errors import one_line
from .data import Data
from .estimate_changes import Candidate, spending, with_overrides
from .estimates import Estimator
from .job import Job
from .model import FullModel
from .settings import Settings
from .sizers import Sizers
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")

# Unused share of the budget below which nothing is advised.
_LEAST_ROOM = 0.15
_NO_OFFLOADING = "enable_activation_offloading=False"
# What changes neither how much is computed nor what is offloaded.
_SAME_FLOPS = ("loss.", "kd_loss.", "fsdp_reshard_after_forward=")

# Joint settings; what fits of so many rows, and all of them where memory has no end.
Spending = tuple[tuple[str, ...], Fit, Fit]


def estimate_spending(job: Job, result: ProbeResult, rows: int) -> list[Spending]:
    """Estimate the configuration as it is, then joint settings that spend memory to save time.

    All ranks call it. It is empty where no such setting is on, and where no estimate can be made,
    which is logged.
    """
    ranks = distributed.world_size()
    settings = spending(job.cfg, world_size=ranks)
    if not settings:
        return []
    device = this_device(job.device, result.budget_bytes)
    overrides = [
        f"probe.maximum={rows}",
        f"estimate.world_size={ranks}",
        "estimate.context=0",
        "estimate.headroom=0",
    ]
    devices = [device, replace(device, total_bytes=2**50)]
    tokens = result.sequence_length
    estimate = partial(
        _estimate, with_overrides(job.cfg, overrides), job.builder, settings, devices, tokens
    )

    def apart() -> list[Spending]:
        # A process without a process group.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return pool.submit(estimate).result()

    try:
        with RandomState(job.device):
            if ranks > 1:
                return distributed.from_rank_zero(apart)
            return distributed.from_rank_zero(estimate)
    except Exception as error:
        # It only advises, so training does not fail by it.
        log.info(
            "no advice on settings, as no estimate could be made: %s: %s",
            type(error).__name__,
            error,
        )
        return []


def _estimate(
    cfg: DictConfig, builder: FullModel, settings: Sequence[Candidate], devices: Any, tokens: int
) -> list[Spending]:
    tried = Estimator(cfg, Settings.from_config(cfg), devices, builder).tried(
        [Candidate((), ""), *settings], tokens
    )
    fits_of = {candidate.overrides: fits for candidate, fits in tried}
    unchanged = fits_of[()]
    if isinstance(unchanged, str):
        raise ValueError(unchanged)
    return [
        (overrides, fits[0], fits[1])
        for overrides, fits in fits_of.items()
        if not isinstance(fits, str)
    ]


def advise(job: Job, data: Data, result: ProbeResult, *, batch_size: int) -> str:
    """Return up to three joint settings that would save time with unused memory, the best first.

    Args:
        job: job of the run.
        data: data that it trains on.
        result: result of the search of this run; one from the cache gets no advice.
        batch_size: rows that run at once in training if they fit.
    """
    budget = result.budget_bytes
    source = this_device(job.device, budget).source
    # Modelled by FLOPs, nothing else can save time: an estimate would take it.
    if not source and not _computes_less(job.cfg):
        return ""
    sizer = Sizers.of(job, data).training
    sizer.assume(result)
    # The batch may need fewer rows at once than fit.
    max_batch_size = result.max_batch_size
    allowed_rows = sizer.layout.rows_within(sizer.limit(batch_size), result.sequence_length)
    rows = min(max_batch_size, allowed_rows)
    unused_bytes = round((max_batch_size - rows) * (result.bytes_per_row() or 0))
    used = (result.peak_bytes() or budget) - unused_bytes
    if result.from_cache or used > (1 - _LEAST_ROOM) * budget:
        return ""
    estimated = estimate_spending(job, result, rows)
    if not estimated:
        return ""
    better = []
    _, _, unchanged = estimated[0]
    current_speed = unchanged.modelled_tokens_per_second or 1
    for overrides, fit, whole in estimated[1:]:
        speed = whole.modelled_tokens_per_second or 1
        is_faster = speed > 1.005 * current_speed or _NO_OFFLOADING in overrides
        if fit.max_batch_size == rows and is_faster:
            better.append(
                (
                    -speed,
                    whole.reserved_bytes,
                    f"{' '.join(overrides)}: {1 - current_speed / speed:.0%} less time",
                )
            )
    if not better:
        return ""
    lines = [f"  {name}, peak {format_bytes(peak)}" for _, peak, name in sorted(better)[:3]]
    unused = (
        f"{count(rows, 'row')} at once leave {1 - used / budget:.0%} of {format_bytes(budget)}"
        " unused; settings that would"
    )
    basis = source or "FLOPs alone"
    heading = (
        f"{unused} use it, modelled by {basis} (adaptive_probe with probe.tune=True times them):"
    )
    return "\n".join([heading, *lines])


def _computes_less(cfg: DictConfig) -> bool:
    """Return whether any joint setting computes or offloads less than the configuration."""
    settings = spending(cfg, world_size=distributed.world_size())
    changes = chain.from_iterable(candidate.overrides for candidate in settings)
    return not all(change.startswith(_SAME_FLOPS) for change in changes)


def tokens_per_second(
    trainer: Trainer, result: ProbeResult, rows: Sequence[Any], *, repeats: int = 3
) -> float:
    """Return the real tokens a second of what a search chose, measured if it did not time it.

    The time of the rows is the median of the repeats, after one that is not counted.

    Raises:
        DoesNotFitError: they run out of memory as they are timed, as where a compiled step tunes
            its kernels.
    """
    if result.throughput is not None:
        return result.throughput.tokens_per_second
    runner = trainer.runner
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        try:
            runner.try_rows(rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = ""
            if is_compiled(runner.model):
                cause = " a compiled step tunes its kernels when it runs first:"
            raise DoesNotFitError(
                f"{count(len(rows), 'row')} fit, but ran out of memory as they were timed"
                f" ({one_line(error)});{cause} set probe.headroom=0.05"
            ) from error
        if runner.memory.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
        runner.drop_gradients()
    return sum(map(runner.loss.num_real_tokens, rows)) / statistics.median(seconds[1:])
