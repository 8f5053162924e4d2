"""How rows become a batch, and a batch its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from adaptive_batch.data import MicroBatchLayout

from .batch_forms import FORMS, BatchForm

Row = Any
Batch = dict[str, Any]


@dataclass(frozen=True)
class RowLoss:
    """How rows become a batch, and a batch its loss.

    Attributes:
        collate: ``collate(rows, length)`` makes one batch on the host, padded to `length` tokens.
        to_device: moves a batch to the device, in place.
        mean_loss: the loss of a batch on the device, averaged over its labels; may empty the batch,
            and leaves in it each of `metrics`, averaged alike.
        count_labels: labels of a batch that `mean_loss` averages over, on the host and on the
            device: a whole scalar tensor.
        row_length: tokens of a row.
        num_real_tokens: those of them that are not padding.
        dummy_row: a row that has a label, for a rank that has none left; needed where there are
            several.
        join: ``join(rows, form)`` makes one batch on the host in which no sequence is padded, and
            returns it with the tokens of each; None where rows are always padded.
        counts_rows: whether `mean_loss` is a mean over rows and `count_labels` counts these. The
            share of a micro-batch is then known before its backward, and weights its loss.
        metrics: names of further means, over rows where these are counted, else over labels.
        loss_of: the loss of a step by the means of `metrics`, as float32; None where `mean_loss` is
            averaged itself, which differs by rounding.
        after_forward: called before each backward, which an accelerator launches without Python:
            what takes Python's time delays it least there.
    """

    collate: Callable[[Sequence[Row], int], Batch]
    to_device: Callable[[Batch], object]
    mean_loss: Callable[[Batch], torch.Tensor]
    count_labels: Callable[[Batch], torch.Tensor]
    row_length: Callable[[Row], int]
    num_real_tokens: Callable[[Row], int]
    dummy_row: Callable[[], Row] | None = None
    join: Callable[[Sequence[Row], BatchForm], tuple[Batch, list[int]]] | None = None
    counts_rows: bool = False
    metrics: tuple[str, ...] = ()
    loss_of: Callable[..., torch.Tensor | None] = lambda **metrics: None
    after_forward: Callable[[], object] = lambda: None

    @contextmanager
    def collated(
        self, rows: Sequence[Row], layout: MicroBatchLayout, length: int = 0
    ) -> Iterator[Batch]:
        """Give one batch on the host, as the layout asks for, of at least so many tokens a row;
        sequences that are not padded stay apart within.
        """
        if layout.pads or self.join is None:
            longest = max(map(self.row_length, rows))
            yield self.collate(rows, length or layout.padded(longest))
            return
        form = FORMS[layout.kind]
        batch, lengths = self.join(rows, form)
        with form.isolate(lengths):
            yield batch

    def loss_and_labels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of a batch, which is moved to the device, and its labels."""
        self.to_device(batch)
        count = self.count_labels(batch)
        mean = self.mean_loss(batch)
        self.after_forward()
        return mean, count

    def some_row(self) -> Row:
        """Return a row that has a label, for a rank that has none left."""
        assert self.dummy_row is not None, "several ranks need a dummy row"
        return self.dummy_row()


def count_shifted_labels(batch: Batch, ignore_index: int) -> torch.Tensor:
    """Count the label tokens of a batch that are left after the shift by one."""
    count: torch.Tensor = (batch["labels"][..., 1:] != ignore_index).sum()
    return count
