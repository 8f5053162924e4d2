"""Gradients that are there before a batch, kept apart while it runs, so that a failed attempt
leaves them as they were; and those that its micro-batches have summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from adaptive_batch.distributed import local_part
from adaptive_batch.schedules import squared_norm


class GradientsApart:
    """Sets the gradients of earlier batches aside, which a script accumulates, and adds them again.

    Nothing is copied: while a batch runs, its own gradients are new tensors. Those are made in
    backward, as activations are freed, so that the peak of a batch in one part hardly rises; from
    its second part on they are there beside the earlier ones.

    Args:
        earlier: gradients that are there, by parameter.
        drop: function that leaves the model without gradients.
    """

    def __init__(
        self, earlier: Mapping[nn.Parameter, torch.Tensor], drop: Callable[[], object]
    ) -> None:
        self._earlier = earlier
        self._drop = drop
        for parameter in earlier:
            parameter.grad = None

    def fill_new(self) -> None:
        """Give the batch gradients of zeros."""
        for parameter, earlier in self._earlier.items():
            parameter.grad = torch.zeros_like(earlier)

    def drop_new(self) -> None:
        """Drop the gradients of a failed attempt."""
        self._drop()

    def put_back(self) -> None:
        """Leave the earlier gradients alone, as before the batch."""
        self._drop()
        for parameter, earlier in self._earlier.items():
            parameter.grad = earlier

    def add_up(self) -> None:
        """Add the batch's gradients to the earlier ones, in place, as autograd does."""
        for parameter, earlier in self._earlier.items():
            new = parameter.grad
            if new is None:
                parameter.grad = earlier
            elif new.is_sparse or earlier.is_sparse:
                parameter.grad = earlier + new
            else:
                parameter.grad = earlier.add_(new)


class SummedGradients:
    """The gradients that the micro-batches of a step have summed.

    Args:
        model: model whose parameters have them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of what this rank holds of them."""
        shards = [
            local_part(parameter.grad)
            for parameter in self._model.parameters()
            if parameter.grad is not None
        ]
        if not shards:
            return torch.zeros(())
        return squared_norm(shards)

    def multiply_by(self, scale: torch.Tensor) -> None:
        """Multiply them, in place."""
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                # It is on the host where parameters are offloaded.
                parameter.grad *= scale.to(parameter.grad.device)
