"""The optimizer inside the backward pass: each parameter is stepped as soon as its gradient is
ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .snapshot import OptimizerSnapshot, TensorSnapshot


class OptimizerInBackward:
    """One optimizer for each parameter, stepped by a hook when the gradient is complete; the
    gradient is freed at once.

    Args:
        optimizers: the optimizer of each parameter that is trained.
    """

    def __init__(self, optimizers: Mapping[nn.Parameter, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self._is_dry_run = False
        self._fresh: set[nn.Parameter] = set()
        for parameter in self.optimizers:
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                register(self._step)

    def _step(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizer = self.optimizers[parameter]
        if not self._is_dry_run:
            optimizer.step()
            optimizer.zero_grad()
            return
        # One parameter at a time is copied, stepped and put back, so a dry run costs the host one
        # parameter, not the model.
        weights = TensorSnapshot([parameter])
        fresh = parameter in self._fresh
        snapshot = None
        if not fresh or not optimizer.state:
            snapshot = OptimizerSnapshot(optimizer)
        try:
            optimizer.step()
            optimizer.zero_grad()
            # The state that was made stays until the dry run ends.
            if fresh:
                snapshot = None
        finally:
            weights.restore()
            # Also what a step that ran out of memory has half made.
            if snapshot:
                snapshot.restore()

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Inside, a step is taken and undone; state that a fresh optimizer makes stays resident
        until the end, then goes.
        """
        self._fresh = {
            parameter for parameter, optimizer in self.optimizers.items() if not optimizer.state
        }
        snapshots = [OptimizerSnapshot(self.optimizers[parameter]) for parameter in self._fresh]
        self._is_dry_run = True
        try:
            yield
        finally:
            self._is_dry_run = False
            for snapshot in snapshots:
                snapshot.restore()


def optimizers_of(optimizer: Optimizer | OptimizerInBackward) -> list[Optimizer]:
    """Return an optimizer, or those in backward, as a list."""
    if isinstance(optimizer, OptimizerInBackward):
        return list(optimizer.optimizers.values())
    return [optimizer]
