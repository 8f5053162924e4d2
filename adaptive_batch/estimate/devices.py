"""Known accelerators: what a size or a name in ``estimate.devices`` stands for.

Each line of devices.csv has the total capacity that CUDA or ROCm gave for such a device in public:
in an out-of-memory message, or in a query of its properties. That capacity is less than the name
promises. Drivers differ by some hundred MiB, so it is the lowest figure that was found; ECC, which
takes 3 GiB of a card with 48 GB of GDDR6, is on if the source says so. Names that
``torch.cuda.get_device_name()`` gives are among the other names.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive_batch._util import format_bytes, nearest
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import parse_size

from .cuda_operators import CudaKernels
from .result import Target

# What a process takes on the device outside PyTorch's allocator: the driver's context, kernels,
# libraries. An out-of-memory message gives it: the memory in use by the process less what is
# allocated and what is reserved. Ten public ones: 0.13 GiB (T4), 0.40, 0.49 and 0.49 (A100), 0.41
# and 0.44 (RTX 4090), 0.42 (RTX 6000 Ada), 0.49 (L40), 0.58 (RTX 5090), 0.66 (H100 NVL); three
# campaigns of foundation-model-stack on A100 had 519, 525 and 1690 MiB. Steps of the recipe on an
# H100 80GB HBM3 had 751 MiB in fp32 and 767 in bf16 (torch 2.11.0+cu130, driver 580.159.04;
# benchmarks/results/on_gpu-2026-11-28.json). It depends on the driver and on the libraries that are
# loaded, so it is an input. github.com:
# Zheng-Chong/CatVTON/issues/133, HiDream-ai/VAREdit/issues/6, TianheWu/CoSeR/issues/10,
# lianqi1008/Control-GIC/issues/6, eosphoros-ai/DB-GPT-Hub/issues/248,
# Soul-AILab/SoulX-FlashTalk/issues/5, DINGYANB/MTVCrafter/issues/21, QwenLM/Qwen3-VL/issues/2097,
# Wan-Video/Wan2.1/issues/465, ali-vilab/VACE/issues/56.
CONTEXT_BYTES = 500 * 2**20
_HOPPER_CONTEXT_BYTES = 770 * 2**20

_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct")
_KEY = "estimate.devices"
_REMEDY = 'give a size with its unit, such as "80GiB", or a device such as H100'
# A whole number below it is more likely a model's name (4090) than a size.
_MIN_BYTES = 2**20


@dataclass(frozen=True)
class EstimatedDevice:
    """A device for which an estimate is made; where it was given as a size, the rest is empty.

    Attributes:
        total_bytes: capacity by CUDA or ROCm.
    """

    name: str
    total_bytes: int
    source: str = ""
    architecture: str = ""
    other_names: tuple[str, ...] = ()
    multiprocessors: int = 0

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability, such as (9, 0); None on ROCm and of a size."""
        match = re.fullmatch(r"sm_(\d+)(\d)", self.architecture)
        if match is None:
            return None
        return int(match[1]), int(match[2])

    @property
    def kernels(self) -> CudaKernels:
        """Those that PyTorch has for it; of an Ampere where only a size is known."""
        return CudaKernels(self.compute_capability)

    def describe(self) -> str:
        """The device and its capacity, such as ``H100 (79.11 GiB)``."""
        # The name of a size is the size.
        if not self.source:
            return self.name
        return f"{self.name} ({format_bytes(self.total_bytes)})"

    @property
    def context_bytes(self) -> int:
        """What the driver's context is taken to need, where nobody says it."""
        return _HOPPER_CONTEXT_BYTES if self.compute_capability == (9, 0) else CONTEXT_BYTES

    def target(self, *, context_bytes: int | None, headroom: int | float | str = 0) -> Target:
        """Return what an allocator may take of it: all but the driver's context and the headroom.

        Args:
            context_bytes: memory of the driver's context; None for what is known of the device.
            headroom: a size, or a share of what the context leaves.
        """
        if context_bytes is None:
            context_bytes = self.context_bytes
        free = max(0, self.total_bytes - context_bytes)
        headroom_bytes = 0
        if headroom:
            headroom_bytes = min(free, parse_size(headroom, total_bytes=free))
        share = f" ({headroom:.0%})" if isinstance(headroom, float) else ""
        taken = []
        if context_bytes:
            taken.append(("the CUDA context", context_bytes))
        if headroom_bytes:
            taken.append((f"headroom{share}", headroom_bytes))
        return Target(
            self.describe(),
            self.total_bytes,
            free - headroom_bytes,
            tuple(taken),
        )


def _plain(name: str) -> str:
    """A name without case, punctuation and maker."""
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
    """Return the device that one entry of ``estimate.devices``, or of another key, stands for.

    It is a size (``"80GiB"``, or a whole number of bytes), or the name of a device, in which case,
    punctuation and the maker's name do not matter: ``"a100 40gb"``, ``"NVIDIA A100-SXM4-40GB"``.
    """
    is_name = isinstance(name_or_size, str)
    device = None
    if is_name:
        device = _BY_NAME.get(_plain(name_or_size))
    if device is not None:
        return device
    try:
        if not is_name and (type(name_or_size) is not int or name_or_size < _MIN_BYTES):
            raise ValueError
        total_bytes = parse_size(name_or_size, total_bytes=0)
    except ValueError:
        near = ""
        if is_name:
            names = [device.name for device in DEVICES]
            begin_so = [name for name in names if _plain(name).startswith(_plain(name_or_size))]
            near = f"; {nearest(name_or_size.upper(), begin_so or names)}"
        raise SettingError(key, name_or_size, _REMEDY + near) from None
    return EstimatedDevice(format_bytes(total_bytes), total_bytes)


def alike(devices: Sequence[EstimatedDevice]) -> list[list[int]]:
    """Return the numbers of devices that run the same kernels, together."""
    kinds = [device.architecture for device in devices]
    return [
        [number for number, other in enumerate(kinds) if other == kind]
        for kind in dict.fromkeys(kinds)
    ]


def parse_devices(value: object) -> tuple[EstimatedDevice, ...]:
    """Return the devices that ``estimate.devices`` names: one size or name, or a list of them.

    Raises:
        SettingError: an entry that cannot be used, one that is there twice, or none at all.
    """
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise SettingError(_KEY, value, f"{_REMEDY}, or a list of them")
    devices = tuple(map(find_device, entries))
    if len(set(devices)) < len(devices):
        raise SettingError(_KEY, value, "the same device is there twice; leave one out")
    return devices
