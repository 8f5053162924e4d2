"""Copy training's state to the host and restore it bit for bit, so that a trial leaves no trace."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import format_bytes
from adaptive_batch.distributed import reshard
from adaptive_batch.errors import DoesNotFitError

from .device import host_available_bytes, plain_tensors, storage_bytes, tensors_in

private = PrivateNames("undoing a step or a trial")

_PLAIN = (bool, int, float, str, type(None))


class TensorSnapshot:
    """Tensors, copied to the host; :meth:`restore` writes the same bits into the same tensors.

    Wrapper subclasses, such as torchao's low-bit optimizer states, have no ``clone``: their inner
    tensors are copied.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        plain = chain.from_iterable(map(plain_tensors, tensors))
        self._tensors = [tensor.detach() for tensor in plain]
        self._copies: list[torch.Tensor] = []
        if not self._tensors:
            return
        # The copies are the host's, not the device's that is being measured.
        with private.disable_current_modes():
            self._copies = [tensor.to("cpu", copy=True) for tensor in self._tensors]

    def restore(self) -> None:
        with private.disable_current_modes(), torch.no_grad():
            for tensor, saved in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(saved)


class OptimizerSnapshot:
    """Everything that ``optimizer.step()`` may change about the optimizer itself: state, groups,
    counters.

    State that was not there is removed by :meth:`restore`, so a fresh optimizer is fresh again.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self._groups = [dict(group) for group in optimizer.param_groups]
        of_groups = [{**group, "params": None} for group in self._groups]
        self._tensors = TensorSnapshot(tensors_in([self._state, of_groups]))
        self._others = {
            p: {k: copy.deepcopy(v) for k, v in s.items() if not list(tensors_in(v))}
            for p, s in self._state.items()
        }
        self._counters = {k: v for k, v in vars(optimizer).items() if isinstance(v, _PLAIN)}

    def restore(self) -> None:
        optimizer = self._optimizer
        for parameter in list(optimizer.state):
            if parameter not in self._state and not _emptied(optimizer.state[parameter]):
                del optimizer.state[parameter]
        for parameter, state in self._state.items():
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(state | copy.deepcopy(self._others[parameter]))
        for group, saved in zip(optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(saved)
        self._tensors.restore()
        for name in [
            k
            for k, v in vars(optimizer).items()
            if isinstance(v, _PLAIN) and k not in self._counters
        ]:
            delattr(optimizer, name)
        vars(optimizer).update(self._counters)


class RandomState:
    """The state of every random number generator that training may draw from, as it was when this
    was made.

    These are torch's on the host and on the device, Python's, and NumPy's where ``numpy.random`` is
    loaded. As a context manager it restores them at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._type = device.type
        # There is one MPS, and it takes no device.
        self._which = () if self._type == "mps" else (device,)
        self._state: dict[str, Any] = {
            "torch": torch.default_generator.get_state(),
            "python": random.getstate(),
        }
        if self._type != "cpu":
            self._state[self._type] = getattr(torch, self._type).get_rng_state(*self._which)
        # Until `numpy.random` is imported, nothing has drawn from its generator.
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            self._state["numpy"] = numpy_random.get_state(legacy=False)

    def __enter__(self) -> None:
        """Let what is inside draw."""

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        self.load_state_dict(self._state)

    def changed(self) -> set[str]:
        """Return which generators have another state now: torch, python, numpy or the device's."""
        earlier = self.state_dict()
        return {
            name
            for name, value in RandomState(self._device).state_dict().items()
            if not (
                torch.equal(value, earlier[name])
                if isinstance(value, torch.Tensor)
                else value == earlier.get(name)
            )
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors, which ``torch.load(weights_only=True)`` reads."""
        state = dict(self._state)
        if "numpy" in state:
            state["numpy"] = _without_arrays(state["numpy"])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, in another process too; generators that it does
        not name stay as they are.
        """
        torch.set_rng_state(state["torch"])
        if self._type in state:
            getattr(torch, self._type).set_rng_state(state[self._type], *self._which)
        random.setstate(state["python"])
        numpy = sys.modules.get("numpy")
        if "numpy" in state and numpy is not None:
            numpy.random.set_state(state["numpy"])


def _without_arrays(state: Any) -> Any:
    """Return the state of a generator of NumPy with lists for its arrays."""
    if isinstance(state, dict):
        return {name: _without_arrays(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


class TrainingSnapshot:
    """A model in training with its optimizers and every random number generator.

    Gradients are set aside, not copied: :meth:`restore` puts the same tensors back.

    Args:
        model: its parameters and buffers are copied to the host, but those that are frozen, which
            nothing steps.
        optimizers: all that step its parameters; several with the optimizer in backward.
        device: where the model lives.
        parameters_change: False where something else puts each parameter back (the optimizer in
            backward); they are then not copied.

    Raises:
        DoesNotFitError: the host has no room for the copies.
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
                f" host, which has {format_bytes(available)} available; free host memory, or set"
                " batch_size without a probe"
            )
        self._tensors = TensorSnapshot(saved)
        self._optimizers = [OptimizerSnapshot(optimizer) for optimizer in optimizers]
        self._random = RandomState(device)
        # A forward may also put another tensor in a buffer's place.
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
        self.restore_optimizers()
        self._random.restore()

    def restore_optimizers(self) -> None:
        """Put back the optimizers alone: a step that ran out of memory leaves states half made."""
        for optimizer in self._optimizers:
            optimizer.restore()


def _emptied(state: dict[str, Any]) -> bool:
    """Set a fresh optimizer's paged state back to what bitsandbytes starts with; False where the
    state is not paged.

    Its paged buffers are never given back, so deleting them would make training allocate all of
    them once more.
    """
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if not any(getattr(tensor, "is_paged", False) for tensor in tensors.values()):
        return False
    with private.disable_current_modes(), torch.no_grad():
        for key, tensor in tensors.items():
            # The quantization maps are constants.
            if not key.startswith("qmap"):
                tensor.zero_()
    state["step"] = 0
    return True


def optimizer_state_tensors(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Return the tensors in the state of some optimizers."""
    return chain.from_iterable(tensors_in(optimizer.state) for optimizer in optimizers)
