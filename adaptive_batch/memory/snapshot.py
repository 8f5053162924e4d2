"""Snapshots of the training state, restored bit for bit, so that a trial leaves no trace.

:class:`OptimizerInBackward` takes its own: it steps each parameter when the gradient is ready.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._random import RandomState
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import format_bytes
from adaptive_batch.distributed import reshard
from adaptive_batch.errors import DoesNotFitError

from .device import host_available_bytes, plain_tensors, storage_bytes, tensors_in

private = PrivateNames("undoing a step or a trial")

_PLAIN = (bool, int, float, str, type(None))


class TensorSnapshot:
    """Copies of tensors on the host; :meth:`restore` writes the same bits into the same tensors.

    Wrapper subclasses, such as torchao's low-bit optimizer states, have no ``clone``; their inner
    tensors are copied.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        plain = chain.from_iterable(map(plain_tensors, tensors))
        self._tensors = [tensor.detach() for tensor in plain]
        # Host memory must not count as memory of the measured device.
        with private.disable_current_modes():
            self._copies = [tensor.to("cpu", copy=True) for tensor in self._tensors]

    def restore(self) -> None:
        with private.disable_current_modes(), torch.no_grad():
            for tensor, saved in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(saved)


class OptimizerSnapshot:
    """State, groups and counters of an optimizer; :meth:`restore` also removes newer state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self._groups = [dict(group) for group in optimizer.param_groups]
        # Groups may have other tensors than the parameters, such as a learning rate.
        without_parameters = [{**group, "params": None} for group in self._groups]
        self._tensors = TensorSnapshot(tensors_in([self._state, without_parameters]))
        # Values of the state that are no tensors, such as counters.
        self._plain_state = {
            parameter: {
                name: copy.deepcopy(value)
                for name, value in state.items()
                if not list(tensors_in(value))
            }
            for parameter, state in self._state.items()
        }
        self._attributes = self._plain_attributes()

    def _plain_attributes(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self._optimizer).items() if isinstance(v, _PLAIN)}

    def restore(self) -> None:
        optimizer = self._optimizer
        for parameter, state in list(optimizer.state.items()):
            if parameter in self._state:
                continue
            if _is_paged(state):
                # bitsandbytes never frees paged buffers, so a new state would allocate them twice.
                _reset_paged(state)
            else:
                del optimizer.state[parameter]
        for parameter, state in self._state.items():
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(state | copy.deepcopy(self._plain_state[parameter]))
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(saved)
        self._tensors.restore()
        for name in self._plain_attributes().keys() - self._attributes.keys():
            delattr(optimizer, name)
        vars(optimizer).update(self._attributes)


class TrainingSnapshot:
    """Snapshot of a model in training, its optimizers and all random number generators.

    Gradients are removed, not copied; :meth:`restore` puts the same tensors back.

    Args:
        model: model whose buffers and trained parameters are copied to the host.
        optimizers: all optimizers of the parameters.
        device: device of the model.
        parameters_change: False if the caller restores the parameters, as the optimizer in backward
            does; they are then not copied.

    Raises:
        DoesNotFitError: the copies do not fit on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        *,
        device: torch.device,
        parameters_change: bool = True,
    ) -> None:
        reshard(model)
        optimizers = list(optimizers)
        saved = list(model.buffers())
        if parameters_change:
            saved += [parameter for parameter in model.parameters() if parameter.requires_grad]
        needed = storage_bytes([*saved, *optimizer_state_tensors(optimizers)])
        available = host_available_bytes() // distributed.local_world_size()
        if needed > available:
            raise DoesNotFitError(
                f"the probe copies {format_bytes(needed)} of weights and optimizer state to the"
                f" host; only {format_bytes(available)} are available; free host memory, or set"
                " batch_size without a probe"
            )
        self._tensors = TensorSnapshot(saved)
        self._optimizers = [OptimizerSnapshot(optimizer) for optimizer in optimizers]
        self._random = RandomState(device)
        # A forward may replace buffers by other tensors.
        self._modules = [
            (module, module.training, dict(module._buffers)) for module in model.modules()
        ]
        self._gradients = [(p, p.grad) for p in model.parameters()]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, training, buffers in self._modules:
            module.training = training
            module._buffers.update(buffers)
        self._tensors.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        self._random.restore()


def _is_paged(state: Mapping[str, Any]) -> bool:
    """Return whether a state is one of bitsandbytes whose buffers can move to the host."""
    return any(getattr(value, "is_paged", False) for value in state.values())


def _reset_paged(state: dict[str, Any]) -> None:
    """Reset a paged state of bitsandbytes to its initial values."""
    with private.disable_current_modes(), torch.no_grad():
        for key, value in state.items():
            # Quantization maps are constants.
            if isinstance(value, torch.Tensor) and not key.startswith("qmap"):
                value.zero_()
    state["step"] = 0


def optimizer_state_tensors(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield the tensors in the state of optimizers."""
    return chain.from_iterable(tensors_in(optimizer.state) for optimizer in optimizers)


class OptimizerInBackward:
    """One optimizer per parameter, stepped by a hook in backward that then frees the gradient.

    Args:
        optimizers: optimizer of each trained parameter.
    """

    def __init__(self, optimizers: Mapping[nn.Parameter, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self._is_dry_run = False
        # Parameters whose optimizer had no state before the dry run.
        self._fresh: set[nn.Parameter] = set()
        for parameter in self.optimizers:
            if parameter.requires_grad:
                # torch does not declare the type of the method.
                register: Any = parameter.register_post_accumulate_grad_hook
                register(self._step)

    def _step(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizer = self.optimizers[parameter]
        if not self._is_dry_run:
            optimizer.step()
            optimizer.zero_grad()
            return
        # Undo the step right away, so that only the copies of one parameter are on the host.
        weights = TensorSnapshot([parameter])
        state = OptimizerSnapshot(optimizer)
        keeps_state = False
        try:
            optimizer.step()
            optimizer.zero_grad()
            # The state of a fresh optimizer stays resident until the dry run ends.
            keeps_state = parameter in self._fresh
        finally:
            weights.restore()
            if not keeps_state:
                state.restore()

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Undo each step in this block. State that fresh optimizers create stays until its end."""
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


def optimizer_list(optimizer: Optimizer | OptimizerInBackward) -> list[Optimizer]:
    """Return the optimizers as a list."""
    if isinstance(optimizer, OptimizerInBackward):
        return list(optimizer.optimizers.values())
    return [optimizer]
