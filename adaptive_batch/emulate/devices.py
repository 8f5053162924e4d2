"""Devices that can be emulated: those of a table, or a size with an architecture."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from .build import EmulationError

MIB = 2**20
# Of the context of CUDA, measured on an H100; public out-of-memory messages of others say less.
HOPPER_CONTEXT_BYTES, CONTEXT_BYTES = 770 * MIB, 500 * MIB
_UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "MIB": MIB, "GIB": 2**30}


@dataclass(frozen=True)
class Device:
    """A CUDA device.

    Attributes:
        capability: major and minor compute capability as one number, such as 90.
        total_bytes: memory as CUDA gives it.
    """

    name: str
    capability: int
    multiprocessors: int
    total_bytes: int
    other_names: tuple[str, ...] = ()

    @property
    def context_bytes(self) -> int:
        """Memory of the device that the CUDA context takes."""
        return HOPPER_CONTEXT_BYTES if self.capability == 90 else CONTEXT_BYTES

    @property
    def setting(self) -> str:
        """The device as the emulated CUDA reads it."""
        return f"NVIDIA {self.name},{self.capability},{self.multiprocessors},{self.total_bytes}"


def read_devices(table: Path) -> list[Device]:
    """Return the CUDA devices of a table with name, architecture, multiprocessors and bytes."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        Device(
            row["name"],
            int(row["architecture"].removeprefix("sm_")),
            int(row["multiprocessors"]),
            int(row["total_bytes"]),
            tuple(filter(None, row["other_names"].split("; "))),
        )
        for row in rows
        if row["architecture"].startswith("sm_")
    ]


def find_device(devices: list[Device], text: str, architecture: str = "sm_80") -> Device:
    """Return the device that a name or a size stands for.

    Args:
        devices: known devices.
        text: a name, in which case, punctuation and the maker do not matter, or a size.
        architecture: of a device that is given as a size, such as ``sm_89``.

    Raises:
        EmulationError: neither.
    """
    for device in devices:
        if _plain(text) in map(_plain, (device.name, *device.other_names)):
            return device
    size = re.fullmatch(r"([\d.]+) *([KMG]i?B|B)?", text, re.IGNORECASE)
    alike = [device for device in devices if f"sm_{device.capability}" == architecture]
    if not alike:
        known = ", ".join(sorted({f"sm_{device.capability}" for device in devices}))
        raise EmulationError(f"architecture {architecture} is not known; give one of {known}")
    if size is None or (unit := (size[2] or "B").upper()) not in _UNITS:
        near = [one.name for one in devices if _plain(one.name).startswith(_plain(text)[:2])]
        names = ", ".join(near or (one.name for one in devices))
        raise EmulationError(f"device {text} is not known; give one of {names} or a size: 24GiB")
    num_bytes = int(float(size[1]) * _UNITS[unit])
    if num_bytes <= CONTEXT_BYTES:
        raise EmulationError(f"device {text} is smaller than the CUDA context; give a size: 24GiB")
    return Device(text.replace(",", "."), alike[0].capability, alike[0].multiprocessors, num_bytes)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|quadro|[^a-z0-9]", "", name.lower())
