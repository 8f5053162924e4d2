"""The sizers of a run, as configured: they decide what a micro-batch may hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adaptive_batch.training import ConfiguredSize, LimitChange, MicroBatchSizer

from .data import Data
from .job import Job


@dataclass(frozen=True)
class Sizers:
    """What decides how many rows of a run are in a micro-batch.

    Attributes:
        training: sizer of training.
        reference: sizer of the reference; None where it runs within training's micro-batches.
    """

    training: MicroBatchSizer
    reference: MicroBatchSizer | None = None

    @classmethod
    def of(
        cls,
        job: Job,
        data: Data,
        on_change: Callable[..., object] = lambda change, **kind: None,
    ) -> Sizers:
        """Return the sizers before anything was found.

        Args:
            job: job of the run.
            data: rows of the run.
            on_change: function that is called with each change of a limit; of the reference's with
                ``kind="reference_limit"``.
        """
        settings = job.settings
        training = MicroBatchSizer(
            settings.micro_batch,
            layout=data.configured_layout,
            memory=job.memory,
            on_change=on_change,
        )
        reference_rows = settings.reference_micro_batch_size
        if reference_rows is None:
            return cls(training)
        size = ConfiguredSize(micro_batch_size=reference_rows)
        if size.needs_search:
            size = ConfiguredSize(micro_batch_tokens="auto")
        layout = data.configured_layout
        if layout.uniform is None:
            # What is computed of a row does not depend on the rows beside it.
            layout = layout.of_kind("grouped", time=layout.time)
        reference = MicroBatchSizer(
            size,
            layout=layout,
            memory=job.memory,
            on_change=counted_by(training, on_change, kind="reference_limit"),
        )
        return cls(training, reference)


def counted_by(
    training: MicroBatchSizer, on_change: Callable[..., object], *, kind: str
) -> Callable[[LimitChange], None]:
    """Return what is called with the changes of a limit apart from training's.

    Args:
        training: sizer of training, which counts all out-of-memory errors.
        on_change: function that is called with each change and its kind.
        kind: kind of the changes.
    """

    def count(change: LimitChange) -> None:
        training.count_out_of_memory(not change.grows)
        on_change(change, kind=kind)

    return count
