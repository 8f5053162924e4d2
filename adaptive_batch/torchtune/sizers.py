"""The sizers of a run, as configured: they decide what a micro-batch may hold, of training and of a
reference that runs apart.
"""

from __future__ import annotations

from collections.abc import Callable

from adaptive_batch.training import LimitChange, MicroBatchSizer

from .data import Data
from .job import Job


def sizer_of(
    job: Job,
    data: Data,
    on_change: Callable[[LimitChange], object] = lambda change: None,
    *,
    searches: bool = True,
) -> MicroBatchSizer:
    """Return what decides what a micro-batch of training may hold, before anything was found.

    Args:
        job: job of the run.
        data: rows of the run.
        on_change: function that is called with each change of the limit.
        searches: whether a search finds what ``auto`` stands for; without one it is the configured
            `batch_size`.
    """
    settings = job.settings
    size = settings.micro_batch_size
    tokens = settings.micro_batch_tokens
    if settings.fits_itself and not searches:
        size = None
        tokens = None
    return MicroBatchSizer(
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        layout=data.shapes,
        memory=job.memory,
        on_change=on_change,
    )


def reference_sizer_of(
    job: Job,
    data: Data,
    on_change: Callable[[LimitChange], object] = lambda change: None,
    *,
    searches: bool = True,
) -> MicroBatchSizer | None:
    """Return what decides what a micro-batch of the reference may hold; None where it runs within
    those of training. For the arguments see :func:`sizer_of`.
    """
    settings = job.settings
    size = settings.reference_micro_batch_size
    if size is None:
        return None
    rows: int | None = None
    tokens: str | None = None
    if isinstance(size, int):
        rows = size
    elif searches:
        tokens = size
    else:
        rows = settings.batch_size
    layout = data.shapes
    if layout.uniform is None:
        # What is computed of a row does not depend on the rows beside it.
        layout = layout.of_kind("grouped", time=layout.time)
    return MicroBatchSizer(
        micro_batch_size=rows,
        micro_batch_tokens=tokens,
        layout=layout,
        memory=job.memory,
        on_change=on_change,
    )
