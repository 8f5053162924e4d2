"""What memory that is left could buy: settings that save it in return for time, given back, by an
estimate or timed.
"""

from __future__ import annotations

import logging
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from adaptive_batch import distributed
from adaptive_batch._util import count, format_bytes
from adaptive_batch.estimate import Fit, this_device
from adaptive_batch.memory import RandomState
from adaptive_batch.probe import ProbeResult

from .data import Data
from .estimate_changes import Candidate, spending, with_overrides
from .estimates import Estimator
from .job import Job
from .model import ModelBuilder
from .settings import Settings
from .trainer import Trainer

log = logging.getLogger("adaptive_batch")

_LEAST_ROOM = 0.15  # of what may be used, below which nothing is advised
_NO_OFFLOADING = "enable_activation_offloading=False"

Spending = tuple[
    tuple[str, ...], Fit, Fit
]  # joint settings; what fits of so many rows, and all of them where memory has no end


def estimate_spending(job: Job, result: ProbeResult, rows: int) -> list[Spending]:
    """Estimate the configuration as it is, which comes first, and joint settings that spend memory
    to save time.

    All ranks call it. It is empty where no such setting is on, and where no estimate can be made,
    which is logged.
    """
    ranks = distributed.world_size()
    random_state = RandomState(job.device)
    settings = spending(job.cfg, world_size=ranks)
    here = this_device(job.device, result.budget_bytes)
    asked = [
        f"probe.maximum={rows}",
        f"estimate.world_size={ranks}",
        "estimate.context=0",
        "estimate.headroom=0",
    ]
    devices = [here, replace(here, total_bytes=2**50)]
    tokens = result.sequence_length
    estimate = partial(
        _estimate, with_overrides(job.cfg, asked), job.builder, settings, devices, tokens
    )

    def apart() -> list[Spending]:
        with ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn")
        ) as pool:  # without a process group
            return pool.submit(estimate).result()

    try:
        return distributed.from_rank_zero(apart if ranks > 1 else estimate) if settings else []
    except Exception as error:  # it only advises
        log.info(
            "no advice on settings, as no estimate could be made: %s: %s",
            type(error).__name__,
            error,
        )
        return []
    finally:
        random_state.restore()


def _estimate(
    cfg: DictConfig, builder: ModelBuilder, settings: Sequence[Candidate], devices: Any, tokens: int
) -> list[Spending]:
    tried = Estimator(cfg, Settings.from_config(cfg), devices, builder).tried(
        [Candidate((), ""), *settings], tokens
    )
    found = {one.overrides: fits for one, fits in tried}
    if isinstance(found[()], str):
        raise ValueError(found[()])
    return [
        (overrides, fits[0], fits[1])
        for overrides, fits in found.items()
        if not isinstance(fits, str)
    ]


def advise(job: Job, data: Data, result: ProbeResult, *, batch_size: int) -> str:
    """Return up to three joint settings that would save time with the memory that a micro-batch
    leaves unused, the best first.

    Args:
        result: of the search of this run; nothing is said on one that was known before.
        batch_size: to train with.
    """
    sizer = data.new_sizer()
    sizer.assume(result)
    budget = result.budget_bytes
    bound = result.max_batch_size
    rows = min(bound, data.shapes.rows_within(sizer.limit(batch_size), result.sequence_length))
    used = (result.peak_bytes() or budget) - round((bound - rows) * (result.bytes_per_row() or 0))
    if result.from_cache or used > (1 - _LEAST_ROOM) * budget:
        return ""
    estimated = estimate_spending(job, result, rows)
    better = []
    for overrides, fit, whole in estimated[1:]:
        before, after = (fit.modelled_tokens_per_second or 1 for fit in (estimated[0][2], whole))
        if fit.max_batch_size == rows and (after > 1.005 * before or _NO_OFFLOADING in overrides):
            better.append(
                (
                    -after,
                    whole.reserved_bytes,
                    f"{' '.join(overrides)}: {1 - before / after:.0%} less time",
                )
            )
    lines = [f"  {name}, peak {format_bytes(peak)}" for _, peak, name in sorted(better)[:3]]
    unused = (
        f"{count(rows, 'row')} at once leave {1 - used / budget:.0%} of {format_bytes(budget)}"
        " unused; settings that would"
    )
    how = this_device(job.device, budget).source or "FLOPs alone"
    told = f"{unused} use it, modelled by {how} (adaptive_probe with probe.tune=True times them):"
    return "\n".join([told, *lines]) if lines else ""


def tokens_per_second(
    trainer: Trainer, result: ProbeResult, rows: Sequence[Any], *, repeats: int = 3
) -> float:
    """Return the real tokens a second of what a search chose; else of its rows at once, the median
    of repeats after one that is not counted.
    """
    if result.throughput is not None:
        return result.throughput.tokens_per_second
    runner = trainer.runner
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        runner.try_rows(rows)
        if runner.retry.memory.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        runner.drop_gradients()
    return sum(map(runner.loss.num_real_tokens, rows)) / statistics.median(seconds[1:])
