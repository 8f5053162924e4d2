"""Known accelerators: what a size or a name in ``estimate.devices`` stands for.

Each line of devices.csv has the total capacity that CUDA or ROCm gave for such a device in public: in an out-of-memory message,
or in a query of its properties. That is less than the name promises. Drivers differ by some hundred MiB, so it is the lowest
figure that was found; ECC, which takes 3 GiB of a card with 48 GB of GDDR6, is on if the source says so. Names that
``torch.cuda.get_device_name()`` gives are among the other names.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from adaptive_batch._util import format_bytes
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import parse_size

_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct")
_SIZE_OR_NAME = 'give a size such as "80GiB", or a device such as H100'
_LEAST_BYTES = 2**20  # a whole number below it is more likely a model's name (4090) than a size


@dataclass(frozen=True)
class EstimatedDevice:
    """A device that an estimate is made for.

    Attributes:
        name: as it is shown.
        total_bytes: total capacity by CUDA or ROCm.
        source: where that figure is from; empty where it was given as a size.
        architecture: ``sm_90`` and the like, ``gfx942`` and the like on ROCm, or empty where only a size is known.
        other_names: the device is found by these too.
    """

    name: str
    total_bytes: int
    source: str = ""
    architecture: str = ""
    other_names: tuple[str, ...] = ()

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability, such as (9, 0); None on ROCm and where only a size is known."""
        if not self.architecture.startswith("sm_"):
            return None
        digits = self.architecture.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    def describe(self) -> str:
        """The device and its capacity, such as ``H100 (79.11 GiB)``."""
        return f"{self.name} ({format_bytes(self.total_bytes)})" if self.source else self.name


def _read_devices() -> tuple[EstimatedDevice, ...]:
    with Path(__file__).with_name("devices.csv").open(newline="", encoding="utf-8") as file:
        return tuple(
            EstimatedDevice(
                line["name"],
                int(line["total_bytes"]),
                line["source"],
                line["architecture"],
                tuple(filter(None, line["other_names"].split("; "))),
            )
            for line in csv.DictReader(file)
        )


def _plain(name: str) -> str:
    """A name without case, punctuation and maker."""
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))


DEVICES = _read_devices()
_BY_NAME = {_plain(name): device for device in DEVICES for name in (device.name, *device.other_names)}


def device_capacity(name_or_size: object, *, key: str = "estimate.devices") -> EstimatedDevice:
    """Return the device that one entry of ``estimate.devices`` stands for.

    Args:
        name_or_size: a size (``"80GiB"``, or a whole number of bytes), or the name of a device, in which case, punctuation and
            the maker's name do not matter: ``"a100 40gb"``, ``"NVIDIA A100-SXM4-40GB"``.
        key: the configuration key.

    Raises:
        SettingError: neither; or a share, since there is no device to take it of; or a name that several devices have.
    """
    refused = None
    if isinstance(name_or_size, str):
        plain = _plain(name_or_size)
        if plain in _BY_NAME:
            return _BY_NAME[plain]
        several = [device.name for device in DEVICES if plain and _plain(device.name).startswith(plain)]
        if len(several) > 1:
            refused = f"there are {', '.join(several[:-1])} and {several[-1]}; give one of them"
    elif isinstance(name_or_size, bool) or not isinstance(name_or_size, int | float):
        refused = _SIZE_OR_NAME
    elif isinstance(name_or_size, float):
        refused = 'there is no device to take a share of; give a size with its unit, such as "80GiB"'
    elif name_or_size < _LEAST_BYTES:
        refused = 'a whole number is a number of bytes; give a size with its unit, such as "80GiB", or a device such as RTX4090'
    if refused is None:
        assert isinstance(name_or_size, int | str)
        try:
            total_bytes = parse_size(name_or_size, total_bytes=0)
            return EstimatedDevice(format_bytes(total_bytes), total_bytes)
        except ValueError:
            refused = 'give a size with its unit, such as "80GiB", or a device such as H100'
            if str(name_or_size)[:1].isalpha():
                refused = f'no such device is known; {_near(str(name_or_size))}; or give a size such as "80GiB"'
    raise SettingError(key, name_or_size, refused)


def parse_devices(value: object, *, key: str = "estimate.devices") -> tuple[EstimatedDevice, ...]:
    """Return the devices that ``estimate.devices`` names: one size or name, or a list of them.

    Raises:
        SettingError: an entry that cannot be used, one that is there twice, or none at all.
    """
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise SettingError(key, value, 'give a size such as "80GiB", a device such as H100, or a list of them')
    found: dict[EstimatedDevice, object] = {}
    for entry in entries:
        device = device_capacity(entry, key=key)
        if device in found:
            raise SettingError(key, value, f"{found[device]!r} and {entry!r} are the same; leave one out")
        found[device] = entry
    return tuple(found)


def _near(name: str) -> str:
    close = difflib.get_close_matches(_plain(name), _BY_NAME, n=6, cutoff=0.5)
    names = list(dict.fromkeys(_BY_NAME[plain].name for plain in close))[:3]
    return f"near it: {', '.join(names)}" if names else f"there are: {', '.join(device.name for device in DEVICES)}"
