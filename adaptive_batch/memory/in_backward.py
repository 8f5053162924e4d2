"""The optimizer inside the backward pass: each parameter is stepped as soon as its gradient is
ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
                parameter.register_post_accumulate_grad_hook(self._step)  # type: ignore[no-untyped-call]

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
        before = OptimizerSnapshot(optimizer) if not fresh or not optimizer.state else None
        try:
            optimizer.step()
            optimizer.zero_grad()
            if fresh:
                before = None  # the state that was made stays until the dry run ends
        finally:
            weights.restore()
            if before:  # also what a step that ran out of memory left half made
                before.restore()

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
