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
        # One parameter at a time is copied, stepped and restored, so a dry run costs the host one
        # parameter, not the model.
        weights = TensorSnapshot([parameter])
        state = OptimizerSnapshot(optimizer)
        is_kept = False
        try:
            optimizer.step()
            optimizer.zero_grad()
            # The state of a fresh optimizer stays until the dry run ends.
            is_kept = parameter in self._fresh
        finally:
            weights.restore()
            if not is_kept:
                state.restore()

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
