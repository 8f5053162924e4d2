"""A copy of the buffers and random numbers that a step changes, to restore before a retry."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from adaptive_batch.memory import RandomState, TensorSnapshot


class StepSnapshot:
    """Running statistics and random numbers of a model in training.

    Args:
        model: model whose persistent buffers a forward may change.
        device: device whose random numbers it draws.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        # Those that outlive a forward: a checkpoint holds them.
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    def take(self) -> Callable[[], None]:
        """Return the function that puts everything back as it is now."""
        random_state = RandomState(self._device)
        if not self._places:
            return random_state.restore
        # A forward may also put another tensor in a buffer's place.
        buffers = [(module, name, module._buffers[name]) for module, name in self._places]
        statistics = TensorSnapshot(buffer for *_, buffer in buffers if buffer is not None)

        def restore() -> None:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            statistics.restore()
            random_state.restore()

        return restore
