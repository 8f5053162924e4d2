"""The only file that asks a device about memory.

Two kinds of device stand behind one protocol, :class:`DeviceMemory`. An accelerator has an allocator that says what it
used and refuses what it has not. A CPU never says no: there the bytes of live tensors are counted during a trial, and
passing the budget raises the same ``torch.OutOfMemoryError`` that a GPU raises.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from adaptive_batch.errors import SettingError

from .curve import Trace
from .tracker import MemoryTracker, storage_bytes

GIB = 1024**3

_UNITS = {"b": 1, "kib": 1024, "mib": 1024**2, "gib": GIB, "tib": 1024**4, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)

# The words of an allocator, a driver or a library that has run out. "out of resource: shared memory" (Triton),
# "illegal memory access" and "out of shared memory" (a data loader's worker) are other faults.
_OUT_OF_MEMORY = re.compile(
    r"\b(?:cuda|hip|xpu|mps|npu|hpu)\b[^\n]*\bout of memory\b"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED|C?UFFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine|Unable to find a valid cuDNN algorithm to run convolution"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|OUT_OF_(?:DEVICE|HOST)_MEMORY"
    r"|std::bad_alloc",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Say whether an error means that memory ran out, and nothing else.

    PyTorch's own type and Python's ``MemoryError`` count; so does a ``RuntimeError`` whose text is an allocator's, a
    driver's or a library's word for it; and any error raised *from* one of these. A ``ValueError`` that merely talks of
    memory does not.
    """
    seen: set[int] = set()  # an error can be its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def parse_size(value: int | float | str, *, total_bytes: int) -> int:
    """Read an amount of memory.

    Args:
        value: ``"12GiB"`` (units B, KiB, MiB, GiB, TiB, KB, MB, GB), a whole number of bytes, or a float in (0, 1], a share of
            the device.
        total_bytes: what the device has, for shares.

    Raises:
        ValueError: the value is no size; the message says what would do.
    """
    if isinstance(value, float) and 0 < value <= 1:
        return int(value * total_bytes)
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = _UNITS.get(match[2].lower())
        if unit and float(match[1]) > 0:
            return int(float(match[1]) * unit)
    raise ValueError('give a size such as "12GiB" or "900MiB", a number of bytes, or a share of the device such as 0.9')


def check_device_memory(key: str, value: int | float | str | None) -> None:
    """Refuse what is neither None nor a size.

    Raises:
        SettingError: naming `key`.
    """
    if value is None:
        return
    try:
        parse_size(value, total_bytes=GIB)
    except ValueError as error:
        raise SettingError(key, value, str(error)) from None


def budget_bytes(
    device_memory: int | float | str | None,
    *,
    headroom: float,
    total_bytes: int,
    available_bytes: int,
    key: str = "probe.device_memory",
) -> int:
    """Return what a trial may use, in bytes: what is asked for, or what is available, less the headroom.

    Args:
        device_memory: a size as :func:`parse_size` reads it; None for what is available.
        headroom: share of it that is left free, in [0, 1).
        total_bytes: what the device has.
        available_bytes: what can be had of it now.
        key: the name that an error gives to `device_memory`.

    Raises:
        SettingError: more is asked for than the device has.
    """
    limit = available_bytes
    if device_memory is not None:
        limit = parse_size(device_memory, total_bytes=total_bytes)
        if limit > total_bytes:
            nothing = "null" if "." in key else "None"
            has = f"the device has {total_bytes / GIB:.2f} GiB"
            raise SettingError(key, device_memory, f"{has}; give that or less, or {nothing} for what is available")
    return int(min(limit, available_bytes) * (1 - headroom))


@dataclass
class Usage:
    """What was seen while :meth:`DeviceMemory.measure` was open; filled in when it closes.

    Attributes:
        resident_bytes: alive before anything was measured; part of every peak.
        peak_bytes: the highest sum alive, resident bytes included; None where the device cannot say.
        retried: the allocator had to give back its cache and ask again: a size that does this is too large (thrashing).
        trace: bytes alive after each operation; None where the device cannot say.
    """

    resident_bytes: int
    peak_bytes: int | None = None
    retried: bool = False
    trace: Trace | None = None


class DeviceMemory(Protocol):
    """One device, asked about its memory. Sizes are in bytes.

    Attributes:
        device: the device.
        granularity_bytes: peaks are known to this many bytes.
    """

    device: torch.device
    granularity_bytes: int

    def describe(self) -> str:
        """Name of the device, which the cache of a bound depends on."""

    def total_bytes(self) -> int:
        """What the device has."""

    def available_bytes(self, resident: Iterable[torch.Tensor]) -> int:
        """What is free now plus what this process already holds; `resident` are the tensors that it holds."""

    def measure(self, resident: Iterable[torch.Tensor], *, budget_bytes: int) -> AbstractContextManager[Usage]:
        """Measure what runs inside; passing the budget raises ``torch.OutOfMemoryError`` there."""

    def release(self) -> None:
        """Give back what nothing refers to any more."""

    def num_retries(self) -> int:
        """How often an allocator has given back its cache and asked again, so far; 0 where there is none that says."""

    def check_it_can_be_measured(self) -> None:
        """Refuse a device that does not tell what its memory peaks at.

        Raises:
            SettingError: naming the device, and what would do.
        """


def recover(memory: DeviceMemory) -> None:
    """Bring a device back after an out-of-memory error; to be called when the ``except`` block has been left.

    A failed backward may leave tasks in autograd's engine that keep its graph alive: a trivial backward drains them.
    """
    scalar = torch.zeros((), device=memory.device, requires_grad=True)
    torch.autograd.grad(scalar * 1, scalar)
    memory.release()


def device_memory(device: torch.device, *, shared_by: int = 1) -> DeviceMemory:
    """The memory of a device: counted on a CPU, which `shared_by` processes share, the allocator's word elsewhere."""
    return CountedMemory(device, shared_by=shared_by) if device.type == "cpu" else AcceleratorMemory(device)


class CountedMemory:
    """A CPU's memory: the bytes of live tensors, counted operation by operation as PyTorch dispatches them.

    Counting agrees with the profiler's allocator total within 0.03%, costs about 40 microseconds an operation, and sees the
    eager program, also where ``torch.compile`` would fuse it.

    Args:
        device: the CPU.
        shared_by: processes that train on this machine together, each of which may have its part.
    """

    granularity_bytes = 1

    def __init__(self, device: torch.device, *, shared_by: int = 1) -> None:
        self.device = device
        self._shared_by = shared_by

    def describe(self) -> str:
        share = f", one part in {self._shared_by}" if self._shared_by > 1 else ""
        return f"cpu ({os.cpu_count()} cores, {self.total_bytes() / GIB:.1f} GiB{share})"

    def total_bytes(self) -> int:
        return _host_limit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // self._shared_by

    def available_bytes(self, resident: Iterable[torch.Tensor]) -> int:
        return min(self.total_bytes(), host_available_bytes() // self._shared_by + storage_bytes(resident))

    @contextmanager
    def measure(self, resident: Iterable[torch.Tensor], *, budget_bytes: int) -> Iterator[Usage]:
        counter = MemoryTracker(budget_bytes)
        counter.add(resident)
        usage = Usage(resident_bytes=counter.live_bytes)
        try:
            counter.check()
            # A compiled region fails under a dispatch mode, and would hide its tensors from it.
            with torch.compiler.set_stance("force_eager"), counter:
                yield usage
        finally:
            usage.peak_bytes, usage.trace = counter.peak_bytes, counter.trace()

    def release(self) -> None:
        gc.collect()

    def num_retries(self) -> int:
        return 0

    def check_it_can_be_measured(self) -> None:
        """Counting always works."""


class AcceleratorMemory:
    """An accelerator's memory, as its caching allocator reports it through ``torch.accelerator`` or ``torch.cuda``.

    The peak is that of *reserved* memory, which is what the device has to give: fragmentation is part of the truth.

    Args:
        device: one that is not a CPU.
        backend: what answers for it: by default ``torch.cuda`` or its like, or else ``torch.accelerator``.
    """

    granularity_bytes = 20 * 1024**2  # the block that PyTorch's caching allocator takes for 1 to 10 MiB

    def __init__(self, device: torch.device, *, backend: Any = None) -> None:
        self.device = device
        own = getattr(torch, device.type, None)
        self._backend: Any = backend or (own if hasattr(own, "memory_stats") else torch.accelerator)

    def check_it_can_be_measured(self) -> None:
        if not hasattr(self._backend, "memory_stats"):
            remedy = (
                f"torch {torch.__version__} does not tell what its memory peaks at, so no batch can be probed there"
            )
            raise SettingError("device", str(self.device), f"{remedy}; train with a batch_size of your own")

    def describe(self) -> str:
        name = getattr(self._backend, "get_device_name", lambda _: self.device.type)(self.device)
        return f"{name} ({self.total_bytes() / GIB:.1f} GiB)"

    def total_bytes(self) -> int:
        return self._free_and_total()[1]

    def available_bytes(self, resident: Iterable[torch.Tensor]) -> int:
        self.release()
        return self._free_and_total()[0] + self._statistic("memory_reserved")

    @contextmanager
    def measure(self, resident: Iterable[torch.Tensor], *, budget_bytes: int) -> Iterator[Usage]:
        self.release()
        usage = Usage(resident_bytes=self._statistic("memory_allocated"))
        retries = self.num_retries()
        self._backend.reset_peak_memory_stats(self.device)
        with self._limited(budget_bytes):
            try:
                yield usage
            finally:
                self._backend.synchronize(self.device)
                usage.peak_bytes = self._statistic("max_memory_reserved") or None
                usage.retried = self.num_retries() > retries
                self._backend.reset_peak_memory_stats(self.device)
        if usage.peak_bytes is not None and usage.peak_bytes > budget_bytes:
            raise torch.OutOfMemoryError(
                f"{self.device} reserved {usage.peak_bytes} bytes, over the budget of {budget_bytes} bytes"
            )

    def release(self) -> None:
        gc.collect()
        self._backend.synchronize(self.device)
        if hasattr(self._backend, "empty_cache"):  # torch.accelerator has it since 2.9
            self._backend.empty_cache()

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        """Let the allocator itself refuse what passes the budget, where it can be told to."""
        limit: Callable[[float, torch.device], None] | None
        limit = getattr(self._backend, "set_per_process_memory_fraction", None)
        if limit is None:
            yield
            return
        before = getattr(self._backend, "get_per_process_memory_fraction", lambda _: 1.0)(self.device)
        limit(min(before, budget_bytes / self.total_bytes()), self.device)
        try:
            yield
        finally:
            limit(before, self.device)

    def _free_and_total(self) -> tuple[int, int]:
        ask = getattr(self._backend, "mem_get_info", None) or torch.accelerator.get_memory_info
        free, total = ask(self.device)
        return int(free), int(total)

    def _statistic(self, name: str) -> int:
        ask = getattr(self._backend, name, None)
        return int(ask(self.device)) if ask else 0

    def num_retries(self) -> int:
        statistics = getattr(self._backend, "memory_stats", None)
        return int(statistics(self.device).get("num_alloc_retries", 0)) if statistics else 0


def host_available_bytes() -> int:
    """Host memory that can be taken now without swapping: MemAvailable, and the limit of a control group of version 2."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    limit, used = _read_int(group / "memory.max"), _read_int(group / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used + _page_cache_bytes(group / "memory.stat")))


def _page_cache_bytes(path: Path) -> int:
    """Bytes that a control group holds of files and gives back when they are needed."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def _host_limit(physical_bytes: int) -> int:
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    return min(physical_bytes, limit) if limit else physical_bytes


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max", or no control group of version 2
        return None
