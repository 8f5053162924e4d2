"""Known accelerators: what a size or a name in ``estimate.devices`` stands for.

A figure is what CUDA or ROCm gave as the total capacity of such a device, in public: in the message of an out-of-memory error,
or from a query of its properties. That is less than the name promises. Drivers differ by some hundred MiB, so the lowest figure
that was found stands here; ECC, which takes 3 GiB of a card with 48 GB of GDDR6, is on where the source says so.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from adaptive_batch.errors import SettingError
from adaptive_batch.memory import GIB, parse_size

MIB = 1024**2

_MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|amd|instinct")
_GITHUB = "https://github.com/"


@dataclass(frozen=True)
class EstimatedDevice:
    """A device that a plan is made for.

    Attributes:
        name: as it is shown.
        total_bytes: what CUDA or ROCm gives as its total capacity.
        source: where that figure is from; empty where it was given as a size.
        architecture: ``sm_90`` and the like, ``gfx942`` and the like on ROCm, or empty where only a size is known.
    """

    name: str
    total_bytes: int
    source: str
    architecture: str = ""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA's compute capability, such as (9, 0); None on ROCm and where only a size is known."""
        if not self.architecture.startswith("sm_"):
            return None
        digits = self.architecture.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    def describe(self) -> str:
        """The device and its capacity, such as ``H100 (79.11 GiB)``."""
        if not self.source:
            return self.name
        return f"{self.name} ({self.total_bytes / GIB:.2f} GiB)"


def _gib(size: float) -> int:
    return int(size * GIB)


# Each name, its architecture, its capacity, where that is from, and other names; those that torch.cuda.get_device_name() gives
# are among them.
_TABLE = (
    ("T4", "sm_75", _gib(14.56), f"{_GITHUB}Zheng-Chong/CatVTON/issues/133", ()),
    (
        "V100-16GB",
        "sm_70",
        _gib(15.77),
        f"{_GITHUB}nomic-ai/gpt4all/issues/544",
        ("V100-SXM2-16GB", "V100-PCIE-16GB"),
    ),
    (
        "V100-32GB",
        "sm_70",
        _gib(31.74),
        f"{_GITHUB}haotian-liu/LLaVA/issues/812",
        ("V100-SXM2-32GB", "V100-PCIE-32GB", "V100-SXM3-32GB"),
    ),
    (
        "A100-40GB",
        "sm_80",
        42_298_834_944,
        f"{_GITHUB}bottlerocket-os/bottlerocket/pull/3873",
        ("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    (
        "A100-80GB",
        "sm_80",
        _gib(79.14),
        f"{_GITHUB}lianqi1008/Control-GIC/issues/6",
        ("A100-SXM4-80GB", "A100 80GB PCIe"),
    ),
    ("A30", "sm_80", _gib(23.53), f"{_GITHUB}google/RB-Modulation/issues/5", ("A30-24GB",)),
    ("A10", "sm_86", 23_609_475_072, f"{_GITHUB}aalanwyr/face2cuda, step2cuda/README.md", ("A10-24GB",)),
    (
        "A10G",
        "sm_86",
        22_587 * MIB,
        "https://docs.pytorch.org/torchcodec, example basic_cuda_example",
        ("A10G-24GB",),
    ),
    ("A40", "sm_86", 47_608_692_736, f"{_GITHUB}thamada/nvidia-smi, nvsim/A40x10_deviceQuery.py", ("A40-48GB",)),
    ("RTX-A6000", "sm_86", 48_676 * MIB, f"{_GITHUB}pytorch/ao, torchao/prototype/hqq/README.md", ("A6000",)),
    ("RTX3090", "sm_86", _gib(23.69), f"{_GITHUB}ucwxb/GraphAvatar/issues/4", ("3090", "RTX3090-24GB")),
    ("RTX4090", "sm_89", _gib(23.52), f"{_GITHUB}Soul-AILab/SoulX-FlashTalk/issues/5", ("4090", "RTX4090-24GB")),
    (
        "RTX-6000-Ada",
        "sm_89",
        _gib(44.43),
        f"{_GITHUB}DINGYANB/MTVCrafter/issues/21, with ECC on",
        ("RTX 6000 Ada Generation", "6000 Ada"),
    ),
    ("L4", "sm_89", 23_583_784_960, f"{_GITHUB}bottlerocket-os/bottlerocket-kernel-kit/pull/139", ("L4-24GB",)),
    ("L40", "sm_89", _gib(44.40), f"{_GITHUB}QwenLM/Qwen3-VL/issues/2097", ("L40-48GB",)),
    ("L40S", "sm_89", 47_576_711_168, "https://crates.io/crates/cuda-device-query", ("L40S-48GB",)),
    (
        "H100",
        "sm_90",
        _gib(79.11),
        f"{_GITHUB}vllm-project/vllm/issues/27508, SXM or PCIe is not told",
        ("H100-80GB", "H100-SXM", "H100-SXM5", "H100-SXM5-80GB", "H100 80GB HBM3"),
    ),
    (
        "H100-PCIe",
        "sm_90",
        _gib(79.11),
        f"{_GITHUB}vllm-project/vllm/issues/27508, SXM or PCIe is not told",
        ("H100-PCIe-80GB",),
    ),
    ("H100-NVL", "sm_90", _gib(93.00), f"{_GITHUB}ali-vilab/VACE/issues/56", ("H100-NVL-94GB",)),
    (
        "H200",
        "sm_90",
        143_156 * MIB,
        f"{_GITHUB}ai-bot-pro/achatbot, deploy/modal/src/llm/vllm/vlm/skywork_r1v.py",
        ("H200-141GB", "H200-SXM"),
    ),
    (
        "GH200",
        "sm_90",
        97_280 * MIB,
        f"{_GITHUB}mredenti/PowerCapping, configuration/OpenCL_benchmark.md",
        ("GH200-96GB", "GH200 480GB"),
    ),
    ("B200", "sm_100", _gib(178.35), f"{_GITHUB}pytorch/ao/pull/4002", ("B200-180GB", "B200-192GB")),
    ("RTX5090", "sm_120", 33_677_180_928, f"{_GITHUB}aikitoria/open-gpu-kernel-modules/issues/1", ("5090",)),
    (
        "MI250X",
        "gfx90a",
        int(63.984375 * GIB),
        f"{_GITHUB}jaglinux/pytorch-notes, memory_stats.py, one of the two devices of a card",
        ("MI250", "MI250X-64GB"),
    ),
    ("MI300X", "gfx942", 196_592 * MIB, f"{_GITHUB}ROCm/ROCm/issues/4203", ("MI300X-192GB",)),
)

DEVICES: tuple[EstimatedDevice, ...] = tuple(
    EstimatedDevice(name, total, source, architecture) for name, architecture, total, source, _ in _TABLE
)


def _plain(name: str) -> str:
    """A name without case, punctuation and maker."""
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))


_BY_NAME = {
    _plain(name): device for device, row in zip(DEVICES, _TABLE, strict=True) for name in (device.name, *row[4])
}


def device_capacity(name_or_size: object, *, key: str = "estimate.devices") -> EstimatedDevice:
    """What one entry of ``estimate.devices`` stands for.

    Args:
        name_or_size: a size (``"80GiB"``, or a whole number of bytes), or the name of a device, in which case, punctuation and
            the maker's name do not matter: ``"a100 40gb"``, ``"NVIDIA A100-SXM4-40GB"``.
        key: the configuration key.

    Raises:
        SettingError: neither; or a share, since there is no device to take it of; or a name that several devices have.
    """
    if isinstance(name_or_size, str):
        plain = _plain(name_or_size)
        if plain in _BY_NAME:
            return _BY_NAME[plain]
        several = [device.name for device in DEVICES if plain and _plain(device.name).startswith(plain)]
        if len(several) > 1:
            raise SettingError(key, name_or_size, f"there are {_listed(several)}; say which")
    if isinstance(name_or_size, bool) or not isinstance(name_or_size, int | float | str):
        raise SettingError(key, name_or_size, 'give a size such as "80GiB", or a device such as H100')
    if isinstance(name_or_size, float):
        raise SettingError(
            key, name_or_size, 'there is no device to take a share of; give a size with its unit, such as "80GiB"'
        )
    if isinstance(name_or_size, int) and name_or_size < MIB:
        raise SettingError(
            key,
            name_or_size,
            'a whole number is a number of bytes; give a size with its unit, such as "80GiB", or a device such as RTX4090',
        )
    try:
        total_bytes = parse_size(name_or_size, total_bytes=0)
    except ValueError:
        if not str(name_or_size)[:1].isalpha():
            remedy = 'give a size with its unit, such as "80GiB", or a device such as H100'
        else:
            remedy = f'no such device is known; {_near(str(name_or_size))}; or give a size such as "80GiB"'
        raise SettingError(key, name_or_size, remedy) from None
    unit, name = (GIB, "GiB") if total_bytes >= GIB else (MIB, "MiB")
    return EstimatedDevice(f"{total_bytes / unit:.6g} {name}", total_bytes, source="")


def parse_devices(value: object, *, key: str = "estimate.devices") -> tuple[EstimatedDevice, ...]:
    """What ``estimate.devices`` names: one size or device, or a list of them.

    Raises:
        SettingError: an entry that cannot be used, one that is there twice, or none at all.
    """
    entries = list(value) if isinstance(value, list | tuple) else [value]
    if not entries:
        raise SettingError(key, value, 'give a size such as "80GiB", a device such as H100, or a list of them')
    found: dict[str, object] = {}
    devices = []
    for entry in entries:
        device = device_capacity(entry, key=key)
        if device.name in found:
            raise SettingError(key, value, f"{found[device.name]!r} and {entry!r} are the same; leave one out")
        found[device.name] = entry
        devices.append(device)
    return tuple(devices)


def _near(name: str) -> str:
    close = difflib.get_close_matches(_plain(name), _BY_NAME, n=6, cutoff=0.5)
    names = list(dict.fromkeys(_BY_NAME[plain].name for plain in close))[:3]
    return f"near it: {', '.join(names)}" if names else f"there are: {', '.join(device.name for device in DEVICES)}"


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
