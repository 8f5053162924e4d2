"""Runs a step batch as micro-batches: gradients are sums of token losses over one count of label tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .batching import split_by_rows

Row = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """What the micro-batches of one optimizer step added up to.

    Attributes:
        loss: mean loss of a label token; 0 where the step had none.
        label_tokens: tokens that have a label, counted after the shift; a scalar tensor on the device.
        rows: rows of the step.
        tokens: real tokens of the step, padding not counted.
        micro_batches: forward and backward passes that were run.
        padding_fraction: share of the padded tokens that were padding.
    """

    loss: float
    label_tokens: torch.Tensor
    rows: int
    tokens: int
    micro_batches: int
    padding_fraction: float


class Accumulator:
    """Forward and backward of the rows of one step, in as many micro-batches as needed.

    Args:
        model: its gradients are summed; they must be clear when :meth:`run` begins.
        collate: makes one padded batch of rows on the host, with ``tokens`` and ``labels`` of shape `[batch, sequence]`.
        to_device: moves a batch to the device, in place.
        mean_loss: the loss of a batch, averaged over its label tokens after the shift; may empty the batch.
        num_real_tokens: how many of a row's tokens are not padding.
        ignore_index: the label of a token that has none.
        scale_gradients: False with the optimizer in backward, whose only micro-batch is stepped as it comes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        collate: Callable[[Sequence[Row]], Batch],
        to_device: Callable[[Batch], object],
        mean_loss: Callable[[Batch], torch.Tensor],
        num_real_tokens: Callable[[Row], int],
        ignore_index: int,
        scale_gradients: bool = True,
    ) -> None:
        self._model = model
        self._collate = collate
        self._to_device = to_device
        self._mean_loss = mean_loss
        self._num_real_tokens = num_real_tokens
        self._ignore_index = ignore_index
        self._scale_gradients = scale_gradients

    def run(self, rows: Sequence[Row], *, micro_batch_size: int) -> StepResult:
        """Leave in the gradients the mean over the label tokens of all `rows`, run `micro_batch_size` rows at once."""
        loss_sum = label_tokens = torch.zeros(())
        padded_tokens = micro_batches = 0
        for piece in split_by_rows(rows, micro_batch_size):
            batch = self._collate(piece)
            padded_tokens += batch["tokens"].numel()
            if not self._has_labels(batch):  # its mean would be 0/0, and it adds nothing
                continue
            token_loss, count = self.forward_backward(batch)
            loss_sum, label_tokens = (
                (loss_sum + token_loss, label_tokens + count) if micro_batches else (token_loss, count)
            )
            micro_batches += 1
        if self._scale_gradients and micro_batches:
            self._divide_gradients_by(label_tokens)
        tokens = sum(map(self._num_real_tokens, rows))
        return StepResult(
            loss=float(loss_sum.item() / label_tokens) if micro_batches else 0.0,
            label_tokens=label_tokens,
            rows=len(rows),
            tokens=tokens,
            micro_batches=micro_batches,
            padding_fraction=max(0.0, 1 - tokens / padded_tokens),
        )

    def rehearse(self, rows: Sequence[Row]) -> None:
        """Run one micro-batch as :meth:`run` does, whether it has labels or not, and forget what it computed."""
        self.forward_backward(self._collate(rows))

    def forward_backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a collated batch's gradients; return the sum of its token losses and the count of its label tokens."""
        self._to_device(batch)
        count = (batch["labels"][..., 1:] != self._ignore_index).sum()
        loss = self._mean_loss(batch)
        token_loss = loss * count
        (token_loss if self._scale_gradients else loss).backward()
        return token_loss.detach(), count

    def _has_labels(self, batch: Batch) -> bool:
        return bool((batch["labels"][..., 1:] != self._ignore_index).any())

    def _divide_gradients_by(self, label_tokens: torch.Tensor) -> None:
        scale = 1 / label_tokens
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad *= scale
