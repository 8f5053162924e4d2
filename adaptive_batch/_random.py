"""The state of random number generators, saved and restored."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class RandomState:
    """The state of all random number generators at construction.

    These are torch's on the host and the device, Python's, and NumPy's if ``numpy.random`` is
    loaded. As a context manager, it restores them at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._type = device.type
        # torch.mps has one device and takes no argument.
        self._device_args = () if self._type == "mps" else (device,)
        self._state: dict[str, Any] = {
            "torch": torch.default_generator.get_state(),
            "python": random.getstate(),
        }
        if self._type != "cpu":
            self._state[self._type] = getattr(torch, self._type).get_rng_state(*self._device_args)
        # Nothing has drawn from NumPy's generator if numpy.random is not imported.
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            self._state["numpy"] = numpy_random.get_state(legacy=False)

    def __enter__(self) -> None:
        """Do nothing; the state was saved at construction."""

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the state of all generators."""
        self.load_state_dict(self._state)

    def changed(self) -> set[str]:
        """Return the names of the generators that have drawn numbers since construction: torch,
        python, numpy or the type of the device.
        """
        now = RandomState(self._device)._state
        return {name for name in now if _as_lists(now[name]) != _as_lists(self._state.get(name))}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors for a checkpoint."""
        state = dict(self._state)
        if "numpy" in state:
            state["numpy"] = _as_lists(state["numpy"])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generators in a state of :meth:`state_dict`, possibly of another process."""
        torch.set_rng_state(state["torch"])
        if self._type in state:
            getattr(torch, self._type).set_rng_state(state[self._type], *self._device_args)
        random.setstate(state["python"])
        numpy = sys.modules.get("numpy")
        if "numpy" in state and numpy is not None:
            numpy.random.set_state(state["numpy"])


def _as_lists(state: Any) -> Any:
    """Return the state of a generator with its tensor or arrays as lists."""
    if isinstance(state, dict):
        return {name: _as_lists(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state
