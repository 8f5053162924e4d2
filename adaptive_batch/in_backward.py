"""The optimizer inside the backward pass: each parameter is stepped as soon as its gradient is ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from .snapshot import OptimizerSnapshot, TensorSnapshot


class OptimizerInBackward:
    """One optimizer for each parameter, stepped by a hook when the gradient is complete; the gradient is freed at once.

    Args:
        optimizers: the optimizer of each parameter that is trained.
    """

    def __init__(self, optimizers: Mapping[nn.Parameter, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self._rehearsing = False
        self._keep_state: set[nn.Parameter] = set()
        for parameter in self.optimizers:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizer = self.optimizers[parameter]
        if not self._rehearsing:
            optimizer.step()
            optimizer.zero_grad()
            return
        # One parameter at a time is copied, stepped and put back, so a rehearsal costs the host one parameter, not the model.
        weights = TensorSnapshot([parameter])
        state = OptimizerSnapshot(optimizer) if parameter in self._keep_state else None
        optimizer.step()
        optimizer.zero_grad()
        weights.restore()
        if state:
            state.restore()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, a step is taken and undone; state that a fresh optimizer makes stays resident until the end, then goes."""
        fresh = [OptimizerSnapshot(optimizer) for optimizer in self.optimizers.values() if not optimizer.state]
        self._keep_state = {parameter for parameter, optimizer in self.optimizers.items() if optimizer.state}
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False
            for snapshot in fresh:
                snapshot.restore()
