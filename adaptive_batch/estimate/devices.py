"""Known accelerators by name or size, for ``estimate.devices``.

Each line of devices.csv has the total memory reported by CUDA or ROCm in a public source: an
out-of-memory message or a query of device properties. It is less than the name suggests. Drivers
differ by some hundred MiB, so the lowest published figure is used. ECC takes 3 GiB of a card with
48 GB of GDDR6; it is on if the source states it. The other names include those of
``torch.cuda.get_device_name()``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive_batch._util import format_bytes, nearest
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import parse_size

from .cuda_operators import CudaKernels
from .result import Target

# Memory of a process outside PyTorch's allocator: the driver's context, kernels, libraries. It
# follows from an out-of-memory message: memory of the process minus allocated minus reserved
# memory. Ten public messages: 0.13 GiB (T4), 0.40, 0.49 and 0.49 (A100), 0.41 and 0.44 (RTX 4090),
# 0.42 (RTX 6000 Ada), 0.49 (L40), 0.58 (RTX 5090), 0.66 (H100 NVL); three campaigns of
# foundation-model-stack on A100 had 519, 525 and 1690 MiB. Steps of the recipe on an H100 80GB HBM3
# had 751 MiB in fp32 and 767 in bf16 (torch 2.11.0+cu130, driver 580.159.04;
# benchmarks/results/on_gpu-2026-11-28.json). It depends on the driver and on the loaded libraries,
# so it is configurable. github.com: Zheng-Chong/CatVTON/issues/133, HiDream-ai/VAREdit/issues/6,
# TianheWu/CoSeR/issues/10, lianqi1008/Control-GIC/issues/6, eosphoros-ai/DB-GPT-Hub/issues/248,
# Soul-AILab/SoulX-FlashTalk/issues/5, DINGYANB/MTVCrafter/issues/21, QwenLM/Qwen3-VL/issues/2097,
# Wan-Video/Wan2.1/issues/465, ali-vilab/VACE/issues/56.
CONTEXT_BYTES = 500 * 2**20
_HOPPER_CONTEXT_BYTES = 770 * 2**20

_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct")
_KEY = "estimate.devices"
_REMEDY = 'give a size with its unit, such as "80GiB", or a device such as H100'
# Smaller integers are probably model names (4090).
_MIN_BYTES = 2**20


@dataclass(frozen=True)
class EstimatedDevice:
    """A device to estimate for; one given as a size has only a name and `total_bytes`.

    Attributes:
        total_bytes: total memory reported by CUDA or ROCm.
    """

    name: str
    total_bytes: int
    source: str = ""
    architecture: str = ""
    other_names: tuple[str, ...] = ()
    multiprocessors: int = 0

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability, such as (9, 0); None on ROCm or for a size."""
        match = re.fullmatch(r"sm_(\d+)(\d)", self.architecture)
        if match is None:
            return None
        return int(match[1]), int(match[2])

    @property
    def kernels(self) -> CudaKernels:
        """Kernels of PyTorch for the device; those of Ampere for a size."""
        return CudaKernels(self.compute_capability, self.multiprocessors)

    def describe(self) -> str:
        """Return the device with its memory, such as ``H100 (79.11 GiB)``."""
        # A device given as a size is named after it.
        if not self.source:
            return self.name
        return f"{self.name} ({format_bytes(self.total_bytes)})"

    @property
    def context_bytes(self) -> int:
        """Default size of the driver's context."""
        return _HOPPER_CONTEXT_BYTES if self.compute_capability == (9, 0) else CONTEXT_BYTES

    def target(self, *, context_bytes: int | None, headroom: int | float | str = 0) -> Target:
        """Return the memory for an allocator: all but the driver's context and the headroom.

        Args:
            context_bytes: memory of the driver's context; None for the default of the device.
            headroom: a size, or a share of the memory without the context.
        """
        if context_bytes is None:
            context_bytes = self.context_bytes
        free = max(0, self.total_bytes - context_bytes)
        taken = []
        if context_bytes:
            taken.append(("the CUDA context", context_bytes))
        # parse_size() refuses 0.
        if headroom:
            headroom_bytes = min(free, parse_size(headroom, total_bytes=free))
            free -= headroom_bytes
            share = f" ({headroom:.0%})" if isinstance(headroom, float) else ""
            if headroom_bytes:
                taken.append((f"headroom{share}", headroom_bytes))
        return Target(self.describe(), self.total_bytes, free, tuple(taken))


def _plain(name: str) -> str:
    """Return a name without case, punctuation and manufacturer."""
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))


def _read_devices() -> tuple[EstimatedDevice, ...]:
    with Path(__file__).with_name("devices.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return tuple(
        EstimatedDevice(
            name,
            int(size),
            source,
            architecture,
            tuple(filter(None, other_names.split("; "))),
            int(multiprocessors),
        )
        for name, architecture, multiprocessors, size, source, other_names in rows
    )


DEVICES = _read_devices()
_BY_NAME = {
    _plain(name): device for device in DEVICES for name in (device.name, *device.other_names)
}


def find_device(name_or_size: Any, key: str = _KEY) -> EstimatedDevice:
    """Return the device for one entry of ``estimate.devices`` or another key.

    Args:
        name_or_size: size (``"80GiB"``, or a whole number of bytes) or name of a device. Case,
            punctuation and manufacturer are ignored: ``"a100 40gb"``, ``"NVIDIA A100-SXM4-40GB"``.
        key: key for errors.

    Raises:
        SettingError: the device is unknown.
    """
    is_text = isinstance(name_or_size, str)
    if is_text and _plain(name_or_size) in _BY_NAME:
        return _BY_NAME[_plain(name_or_size)]
    is_bytes = type(name_or_size) is int and name_or_size >= _MIN_BYTES
    if is_text or is_bytes:
        with suppress(ValueError):
            total_bytes = parse_size(name_or_size, total_bytes=0)
            return EstimatedDevice(format_bytes(total_bytes), total_bytes)
    suggestion = ""
    if is_text:
        names = [device.name for device in DEVICES]
        completions = [name for name in names if _plain(name).startswith(_plain(name_or_size))]
        suggestion = f"; {nearest(name_or_size.upper(), completions or names)}"
    raise SettingError(key, name_or_size, _REMEDY + suggestion)


def group_by_kernels(devices: Sequence[EstimatedDevice]) -> list[list[int]]:
    """Group the indices of devices that run the same kernels."""
    groups: dict[tuple[str, int], list[int]] = {}
    for index, device in enumerate(devices):
        groups.setdefault((device.architecture, device.multiprocessors), []).append(index)
    return list(groups.values())


def parse_devices(value: object) -> tuple[EstimatedDevice, ...]:
    """Return the devices of ``estimate.devices``: one size or name, or a list of them.

    Raises:
        SettingError: the list is empty, or an entry is unknown.
    """
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise SettingError(_KEY, value, f"{_REMEDY}, or a list of them")
    return tuple(map(find_device, entries))
