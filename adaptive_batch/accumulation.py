"""Runs a step batch as micro-batches: gradients are sums of token losses over one count of label tokens.

A step that runs out of memory is replayed: from cleared gradients, with random numbers and running statistics put back and
less capacity, so that what it leaves is what a run with that capacity would have left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .batching import Capacity, Shapes, micro_batches
from .memory import DeviceMemory, device_memory
from .noise_scale import NoiseSample, squared_norm
from .replay import CapacityChange, Replay, lengthened
from .snapshot import RandomState, TensorSnapshot

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
        grad_norm: of all gradients before they were clipped, where clipping is configured; a scalar tensor.
        noise: what the step says of the gradient's noise, where that is measured; None of a step that ran as one
            micro-batch, or whose micro-batches were grouped by length.
    """

    loss: float
    label_tokens: torch.Tensor
    rows: int
    tokens: int
    micro_batches: int
    padding_fraction: float
    grad_norm: torch.Tensor | None = None
    noise: NoiseSample | None = None


class Accumulator:
    """Forward and backward of the rows of one step, in as many micro-batches as its capacity asks for.

    Args:
        model: its gradients are summed; they must be clear when :meth:`run` begins.
        collate: makes one padded batch of rows on the host, with ``tokens`` and ``labels`` of shape `[batch, sequence]`.
        to_device: moves a batch to the device, in place.
        mean_loss: the loss of a batch, averaged over its label tokens after the shift; may empty the batch.
        num_real_tokens: how many of a row's tokens are not padding.
        ignore_index: the label of a token that has none.
        capacity: what one micro-batch may hold.
        shapes: what micro-batches are padded to and whether they are alike; None for nothing.
        pad_id: the token that rows are padded with where `shapes` pads them.
        max_grad_norm: clip the norm of all gradients to this; None does not.
        scale_gradients: False with the optimizer in backward, whose only micro-batch is stepped as it comes.
        measures_noise: say in each result what the step's first micro-batch and the whole of it tell of the gradient's
            noise; not with the optimizer in backward, which leaves no gradient.
        replays: replay a step that ran out of memory with half of the capacity; False lets the error through.
        on_change: is told of every lowered capacity, before anything is run with it; None logs it.
        memory: of the model's device; None asks torch.
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
        capacity: Capacity,
        shapes: Shapes | None = None,
        pad_id: int = 0,
        max_grad_norm: float | None = None,
        scale_gradients: bool = True,
        measures_noise: bool = False,
        replays: bool = True,
        on_change: Callable[[CapacityChange], object] | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._model = model
        self._collate_rows = collate
        self._to_device = to_device
        self._mean_loss = mean_loss
        self._num_real_tokens = num_real_tokens
        self._ignore_index = ignore_index
        self._shapes = shapes or Shapes()
        self._pad_id = pad_id
        self._max_grad_norm = max_grad_norm
        self._scale_gradients = scale_gradients
        assert scale_gradients or not measures_noise, "there are no gradients to measure with the optimizer in backward"
        self._measures_noise = measures_noise
        self._replays = replays
        self._device = next(model.parameters()).device
        self._replay = Replay(capacity, memory=memory or device_memory(self._device), on_change=on_change)
        self._running_statistics = _running_statistics(model)

    @property
    def capacity(self) -> Capacity:
        """What one micro-batch may hold now; lowered after an out-of-memory error, and not won back."""
        return self._replay.capacity

    @capacity.setter
    def capacity(self, capacity: Capacity) -> None:
        self._replay.capacity = capacity

    def run(self, rows: Sequence[Row]) -> StepResult:
        """Leave in the gradients the mean over the label tokens of all `rows`, clipped.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
        """
        if not self._replays:
            return self._attempt(rows)
        random_state = RandomState(self._device)
        # A forward may also put another tensor in a buffer's place.
        buffers = [(module, name, module._buffers[name]) for module, name in self._running_statistics]
        statistics = TensorSnapshot(buffer for *_, buffer in buffers if buffer is not None)

        def undo() -> None:
            for parameter in self._model.parameters():
                parameter.grad = None
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            statistics.restore()
            random_state.restore()

        return self._replay.run(lambda: self._attempt(rows), undo=undo)

    def rehearse(self, rows: Sequence[Row]) -> None:
        """Run one micro-batch as :meth:`run` does, whether it has labels or not, and forget what it computed."""
        self.forward_backward(self.collate(rows))

    def evaluate(self, batch: Batch, *, rehearsing: bool = False) -> tuple[float, int]:
        """The sum of the token losses of a collated batch and its label tokens, without gradients.

        One without any label is run only where it is `rehearsing`.
        """
        if not rehearsing and not self._has_labels(batch):
            return 0.0, 0
        with torch.no_grad():
            loss, count = self._loss_and_labels(batch)
            return (loss * count).item(), int(count)

    def collate(self, rows: Sequence[Row], length: int | None = None) -> Batch:
        """One batch on the host, padded to `length` tokens, or to what the shapes ask for where that is None."""
        if length is None:
            length = self._shapes.padded(max(map(_length, rows)))
        return self._collate_rows(lengthened(rows, length, pad_id=self._pad_id, ignore_index=self._ignore_index))

    def forward_backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a collated batch's gradients; return the sum of its token losses and the count of its label tokens."""
        loss, count = self._loss_and_labels(batch)
        token_loss = loss * count
        (token_loss if self._scale_gradients else loss).backward()  # type: ignore[no-untyped-call]
        return token_loss.detach(), count

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients as configured; returns the norm that they had."""
        if self._max_grad_norm is None:
            return None
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=self._max_grad_norm)

    def _attempt(self, rows: Sequence[Row]) -> StepResult:
        lengths = list(map(_length, rows))
        pieces = micro_batches(lengths, self.capacity, self._shapes)
        assert self._scale_gradients or len(pieces) == 1, "with the optimizer in backward a step is one micro-batch"
        self._replay.current = fullest = self.capacity.fullest(pieces)
        loss_sum = label_tokens = torch.zeros(())
        padded_tokens = num_run = 0
        small: tuple[torch.Tensor, torch.Tensor] | None = None  # label tokens, and squared norm
        # Grouped by length, the first micro-batch is no random sample of the step.
        in_order = self.capacity.unit == "rows" or len(set(lengths)) == 1
        measures = self._measures_noise and in_order and len(pieces) > 1
        for piece in pieces:
            self._replay.current = piece
            batch = self.collate([rows[i] for i in piece.rows], piece.length)
            padded_tokens += batch["tokens"].numel()
            if not self._has_labels(batch):  # its mean would be 0/0, and it adds nothing
                continue
            token_loss, count = self.forward_backward(batch)
            loss_sum, label_tokens = (loss_sum + token_loss, label_tokens + count) if num_run else (token_loss, count)
            num_run += 1
            if measures and num_run == 1:
                small = count, squared_norm(self._gradients()) / count**2
        self._replay.current = fullest
        if self._scale_gradients and num_run:
            self._divide_gradients_by(label_tokens)
        tokens = sum(map(self._num_real_tokens, rows))
        if small is None or num_run == 1:
            grad_norm, noise = self.clip(), None
        else:
            grad_norm, squared = self._clip_and_measure()
            noise = NoiseSample(small[0] / label_tokens * len(rows), small[1], len(rows), squared)
        return StepResult(
            loss=float(loss_sum.item() / label_tokens) if num_run else 0.0,
            label_tokens=label_tokens,
            rows=len(rows),
            tokens=tokens,
            micro_batches=num_run,
            padding_fraction=max(0.0, 1 - tokens / padded_tokens),
            grad_norm=grad_norm,
            noise=noise,
        )

    def _clip_and_measure(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Clip; returns the norm as :meth:`clip` does, and the squared norm that there was before."""
        gradients = self._gradients()
        if self._max_grad_norm is not None and all(gradient.dtype.itemsize >= 4 for gradient in gradients):
            grad_norm = self.clip()
            assert grad_norm is not None
            return grad_norm, grad_norm**2
        before = squared_norm(gradients)
        return self.clip(), before

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]

    def _loss_and_labels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self._to_device(batch)
        count = (batch["labels"][..., 1:] != self._ignore_index).sum()
        return self._mean_loss(batch), count

    def _has_labels(self, batch: Batch) -> bool:
        return bool((batch["labels"][..., 1:] != self._ignore_index).any())

    def _divide_gradients_by(self, label_tokens: torch.Tensor) -> None:
        scale = 1 / label_tokens
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad *= scale


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model normalizes over the rows of a micro-batch, so that its results depend on their number."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _running_statistics(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the buffers are that a forward may change and that outlive it: those that a checkpoint holds."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _length(row: Row) -> int:
    return len(row["tokens"])
