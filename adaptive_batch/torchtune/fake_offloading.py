"""torchtune's offloading of activations on fake tensors: what stays on the device, and when."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torchtune.training import OffloadActivations

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced

private = PrivateNames("memory estimates")


class _DefaultStream(torch.cpu.Stream, torch.Stream):  # type: ignore[misc]
    """A CPU's stream, which does nothing, of the type that tensors can be recorded on."""

    def __new__(cls) -> _DefaultStream:
        return torch.Stream.__new__(cls, stream_id=0, device_index=0, device_type=0)


class _HostCopy:
    """What a tensor becomes on the host: its shape, which takes no memory of the device."""

    def __init__(self, tensor: torch.Tensor, **_: Any) -> None:
        # A counter would see it made.
        with private.disable_current_modes():
            self._like = torch.empty_like(tensor)

    def copy_(self, *_: Any, **__: Any) -> None:
        """Copy no values, as there are none."""

    def to(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return a new tensor on the device."""
        return torch.empty_like(self._like)


class _WithoutCUDA:
    """What torchtune's class calls `torch`: streams are a CPU's, and copies are of the host."""

    cuda = SimpleNamespace(
        default_stream=_DefaultStream, Stream=torch.cpu.Stream, stream=torch.cpu.stream
    )
    empty_like = _HostCopy

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# Its hooks are functions within it, so that they have the same globals.
_init = FunctionType(
    OffloadActivations.__init__.__code__,
    {**OffloadActivations.__init__.__globals__, "torch": _WithoutCUDA()},
    argdefs=OffloadActivations.__init__.__defaults__,
    closure=OffloadActivations.__init__.__closure__,
)


class FakeOffloadActivations(OffloadActivations):  # type: ignore[misc]
    """torchtune's own code, which keeps, offloads and brings back, on fake tensors."""

    def __init__(self) -> None:
        # It would warn of this machine's memory.
        _init(self, use_pin_memory=False)


def offloading_fake_tensors() -> AbstractContextManager[None]:
    """Return a context manager: torchtune offloads fake tensors in what is set up inside."""
    # The module that makes the context manager of a step.
    offloading = sys.modules[OffloadActivations.__module__]
    return replaced(offloading, OffloadActivations=FakeOffloadActivations)
