"""Measurement and limits of device memory, and settings of PyTorch's allocator.

An accelerator's allocator reports its use and raises if memory runs out. A CPU allocation rarely
fails, so trials on a CPU count the bytes of live tensors and raise the same
``torch.OutOfMemoryError`` above the budget.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import torch

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import format_bytes
from adaptive_batch.errors import SettingError

from .curve import Trace

private = PrivateNames("expandable segments")

log = logging.getLogger("adaptive_batch")

GIB = 1024**3

_UNITS = {
    "b": 1,
    "bytes": 1,
    "kib": 1024,
    "mib": 1024**2,
    "gib": GIB,
    "tib": 1024**4,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)

# OOM messages of allocators, drivers and libraries. "out of resource: shared memory" (Triton),
# "illegal memory access" and "out of shared memory" (a data loader's worker) are other errors.
_OUT_OF_MEMORY = re.compile(
    r"\b(?:cuda|hip|xpu|mps|npu|hpu)\b[^\n]*\bout of memory\b"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|C(?:UBLAS|UDNN)_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED|C?UFFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine|Unable to find a valid cuDNN algorithm"
    r" to run convolution"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|OUT_OF_(?:DEVICE|HOST)_MEMORY"
    r"|std::bad_alloc",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that memory ran out.

    Such errors are ``torch.OutOfMemoryError``, ``MemoryError``, a ``RuntimeError`` with the OOM
    message of an allocator, driver or library, and any error raised *from* one of these.
    """
    # Causes can form a cycle.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


# PyTorch's message also names the memory of CUDA graphs, but after these figures.
_REQUESTED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? \w+)")
_ALLOCATED = re.compile(r"Of the allocated memory (\d+(?:\.\d+)? \w+) is allocated by PyTorch")


def wanted_bytes(message: str) -> int | None:
    """Return allocated + requested bytes from an allocator's OOM message; None without them."""
    requested = _REQUESTED.search(message)
    allocated = _ALLOCATED.search(message)
    if requested is None or allocated is None:
        return None
    return parse_size(requested[1], total_bytes=GIB) + parse_size(allocated[1], total_bytes=GIB)


def parse_size(value: int | float | str, *, total_bytes: int) -> int:
    """Return a memory size in bytes.

    Args:
        value: a size such as ``"12GiB"``, a whole number of bytes, or a share of `total_bytes` in
            (0, 1].
        total_bytes: memory of the device.

    Raises:
        ValueError: the value has another form.
    """
    if isinstance(value, float) and 0 < value <= 1:
        return int(value * total_bytes)
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match:
        unit = _UNITS.get(match[2].lower())
        if unit and float(match[1]) > 0:
            return int(float(match[1]) * unit)
    raise ValueError(
        'give a size such as "12GiB" or "900MiB", a number of bytes, or a share of the device such'
        " as 0.9"
    )


def check_device_memory(key: str, value: int | float | str | None) -> None:
    """Check that the value of `key` is None or a size.

    Raises:
        SettingError: the value is neither.
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
    """Return the bytes that a trial may use: the configured or available memory, less the headroom.

    Args:
        device_memory: a size for :func:`parse_size`; None for all available memory.
        headroom: share to leave free, in [0, 1).
        total_bytes: memory of the device.
        available_bytes: memory that is available now.
        key: name of `device_memory` in errors.

    Raises:
        SettingError: `device_memory` is more than the device has.
    """
    limit = available_bytes
    if device_memory is not None:
        limit = parse_size(device_memory, total_bytes=total_bytes)
        if limit > total_bytes:
            remedy = (
                f"the device has {format_bytes(total_bytes)}; give that or less, or null (None) for"
                " all available memory"
            )
            raise SettingError(key, device_memory, remedy)
    return int(min(limit, available_bytes) * (1 - headroom))


@dataclass
class Usage:
    """Memory use inside a ``measure`` block of a device, complete when the block ends.

    Attributes:
        resident_bytes: bytes alive before the block; part of every peak.
        peak_bytes: peak inside the block, resident bytes included; None if the device does not
            report it.
        retried: True if the allocator freed its cache and retried: the size is too large.
        trace: bytes alive after each operation; None if the device does not report them.
    """

    resident_bytes: int
    peak_bytes: int | None = None
    retried: bool = False
    trace: Trace | None = None


@dataclass(frozen=True)
class Room:
    """Memory of an allocator.

    Attributes:
        held_bytes: bytes of live tensors.
        total_bytes: bytes that the allocator can hand out, live tensors included.
    """

    held_bytes: int
    total_bytes: int


def recover(memory: DeviceMemory) -> None:
    """Free memory after an out-of-memory error; call it after the ``except`` block.

    A failed backward may leave tasks in autograd's engine that keep its graph alive; a trivial
    backward drains them.
    """
    with torch.inference_mode(False), torch.enable_grad():
        scalar = torch.zeros((), device=memory.device, requires_grad=True)
        torch.autograd.grad(scalar * 1, scalar)
    memory.release()


def device_memory(device: torch.device, *, shared_by: int = 1) -> DeviceMemory:
    """Return the memory of a device; `shared_by` processes share that of a CPU."""
    if device.type == "cpu":
        return CountedMemory(device, shared_by=shared_by)
    return AcceleratorMemory(device)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple | deque):
        children = tree.values() if isinstance(tree, Mapping) else tree
        yield from chain.from_iterable(map(tensors_in, children))


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the inner tensors of a wrapper subclass (torchao's low-bit states), else the tensor
    itself.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            # A DTensor also has its mesh as an inner attribute.
            if isinstance(inner, torch.Tensor):
                yield from plain_tensors(inner)
    else:
        yield tensor


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages; a shared storage counts once."""
    plain = chain.from_iterable(map(plain_tensors, tensors))
    storages = {tensor.untyped_storage() for tensor in plain}
    return sum(storage.nbytes() for storage in storages)


class CountedMemory:
    """A CPU's memory: the bytes of live tensors, counted after each operation.

    The count agrees with the profiler's allocator total within 0.03% and costs about 40
    microseconds per operation. Compiled functions run eagerly, so fusion is not measured.

    Args:
        device: the CPU.
        shared_by: processes that share it equally.
    """

    # Peaks are known to the byte.
    granularity_bytes = 1

    def __init__(self, device: torch.device, *, shared_by: int = 1) -> None:
        self.device = device
        self._shared_by = shared_by

    def describe(self) -> str:
        """Return the name of the device, which is part of the cache key of a probe result."""
        share = f", one part in {self._shared_by}" if self._shared_by > 1 else ""
        return f"cpu ({os.cpu_count()} cores, {self.total_bytes() / GIB:.1f} GiB{share})"

    def total_bytes(self) -> int:
        """Return the memory of the device."""
        total = min(_physical_bytes(), _cgroup_bytes("memory.max") or sys.maxsize)
        return total // self._shared_by

    def available_bytes(self, resident: Iterable[torch.Tensor]) -> int:
        """Return the free memory plus that of `resident`, the tensors of this process."""
        available = host_available_bytes() // self._shared_by
        return min(self.total_bytes(), available + storage_bytes(resident))

    @contextmanager
    def measure(self, resident: Iterable[torch.Tensor], *, budget_bytes: int) -> Iterator[Usage]:
        """Measure a block; it raises ``torch.OutOfMemoryError`` above the budget."""
        # The module of MemoryTracker imports this one.
        from .tracker import MemoryTracker

        counter = MemoryTracker(budget_bytes)
        counter.add(resident)
        usage = Usage(resident_bytes=counter.live_bytes)
        try:
            counter.check()
            # Compiled regions fail under a dispatch mode and hide their tensors from it.
            with torch.compiler.set_stance("force_eager"), counter:
                yield usage
        finally:
            usage.peak_bytes = counter.peak_bytes
            usage.trace = counter.trace()

    def release(self) -> None:
        """Collect garbage."""
        gc.collect()

    def make_room_for_larger(self) -> None:
        """Do nothing: a CPU has no cache."""

    def room(self) -> Room | None:
        """Return None: the room on a CPU is unknown."""
        return None


class AcceleratorMemory:
    """An accelerator's memory, as reported by its caching allocator.

    The peak is that of *reserved* memory, which includes fragmentation.

    Args:
        device: the accelerator.
        backend: module that reports its memory, ``torch.cuda`` for example; by default that of the
            device's type.
    """

    # Peaks grow by segments: 20 MiB for requests of 1 to 10 MiB, and with expandable segments for
    # all requests above 1 MiB.
    granularity_bytes = 20 * 1024**2

    def __init__(self, device: torch.device, *, backend: Any = None) -> None:
        self.device = device
        if backend is None:
            backend = getattr(torch, device.type, None)
            # Only some types of devices have a module with these functions.
            if not hasattr(backend, "memory_stats"):
                backend = torch.accelerator
        self._backend: Any = backend

    def describe(self) -> str:
        name = getattr(self._backend, "get_device_name", lambda _: self.device.type)(self.device)
        return f"{name} ({self.total_bytes() / GIB:.1f} GiB)"

    def total_bytes(self) -> int:
        return self._free_and_total()[1]

    def available_bytes(self, resident: Iterable[torch.Tensor]) -> int:
        self.release()
        return self._free_and_total()[0] + int(self._backend.memory_reserved(self.device))

    @contextmanager
    def measure(self, resident: Iterable[torch.Tensor], *, budget_bytes: int) -> Iterator[Usage]:
        self.release()
        usage = Usage(resident_bytes=self._backend.memory_allocated(self.device))
        retries = self._num_retries()
        with self._limited(budget_bytes):
            try:
                yield usage
            finally:
                self._backend.synchronize(self.device)
                # Backends that do not report it return 0.
                usage.peak_bytes = self._backend.max_memory_reserved(self.device) or None
                usage.retried = self._num_retries() > retries
        if usage.peak_bytes is not None and usage.peak_bytes > budget_bytes:
            raise torch.OutOfMemoryError(
                f"{self.device} reserved {usage.peak_bytes} bytes, over the budget of"
                f" {budget_bytes} bytes"
            )

    def release(self) -> None:
        """Collect garbage, empty the cache and reset the peak statistics."""
        gc.collect()
        self._backend.synchronize(self.device)
        self._backend.empty_cache()
        # After empty_cache(), since the peak includes the cache.
        self._backend.reset_peak_memory_stats(self.device)

    def make_room_for_larger(self) -> None:
        """Empty the cache before a micro-batch that is larger than all before, unless segments
        expand.
        """
        if not segments_expand():
            self._backend.empty_cache()

    def room(self) -> Room | None:
        """Return the memory of the allocator without freeing its cache; None if the backend does
        not report it.
        """
        allocated = self._backend.memory_allocated(self.device)
        reserved = self._backend.memory_reserved(self.device)
        # A backend that reports its memory has reserved some for the model.
        if not reserved:
            return None
        free, total = self._free_and_total()
        still_allowed = int(self._fraction() * total) - reserved
        return Room(allocated, max(0, min(free, still_allowed)) + reserved)

    def _num_retries(self) -> int:
        """Return how often the allocator has freed its cache to retry a request."""
        return int(self._backend.memory_stats(self.device).get("num_alloc_retries", 0))

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        """Set the allocator's own limit to the budget, if it supports one."""
        set_fraction = getattr(self._backend, "set_per_process_memory_fraction", None)
        if set_fraction is None:
            yield
            return
        fraction = self._fraction()
        set_fraction(min(fraction, budget_bytes / self.total_bytes()), self.device)
        try:
            yield
        finally:
            set_fraction(fraction, self.device)

    def _fraction(self) -> float:
        get_fraction = getattr(self._backend, "get_per_process_memory_fraction", lambda _: 1.0)
        return float(get_fraction(self.device))

    def _free_and_total(self) -> tuple[int, int]:
        get_info = getattr(self._backend, "mem_get_info", None) or torch.accelerator.get_memory_info
        free, total = get_info(self.device)
        return int(free), int(total)


# Both classes have the same methods.
DeviceMemory: TypeAlias = CountedMemory | AcceleratorMemory


def host_available_bytes() -> int:
    """Return the host memory available without swapping, limited by a cgroup v2 limit."""
    system = _read_numbers("/proc/meminfo")
    available = 1024 * system.get("MemAvailable:", _physical_bytes() // 1024)
    limit = _cgroup_bytes("memory.max")
    used = _cgroup_bytes("memory.current")
    if limit is None or used is None:
        return available
    # The kernel reclaims the page cache on demand.
    group = _read_numbers("/sys/fs/cgroup/memory.stat")
    cached = group.get("active_file", 0) + group.get("inactive_file", 0)
    return min(available, max(0, limit - used + cached))


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_numbers(path: str) -> dict[str, int]:
    """Read a file of names and numbers; return {} if the file is missing."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {field[0]: int(field[1]) for field in fields if len(field) > 1 and field[1].isdigit()}


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        # No cgroup v2, or no limit ("max").
        return None


# --- settings of the allocator

# PyTorch reads the first of these variables that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Shares of memory for `headroom: auto`. With expandable segments, varying lengths reserve up to 1%
# more than trials measure. With other segments, 1% led to an OOM in 3 of 18 runs.
_HEADROOM_EXPANDABLE = 0.01
_HEADROOM = 0.05

_EXPANDABLE = "expandable_segments:True"


def allocator_settings() -> tuple[str, dict[str, str]]:
    """Return the variable that configures PyTorch's allocator, or "", and its settings by name."""
    variable = next((name for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    text = re.sub(r"\s", "", os.environ.get(variable, ""))
    # name:value or name:[values], separated by commas.
    settings = re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", text)
    return variable, dict(settings)


def segments_expand() -> bool:
    """Return whether the environment enables expandable segments."""
    _, settings = allocator_settings()
    return settings.get("expandable_segments") == "True"


def auto_headroom(*, expands: bool) -> float:
    """Return the share of memory that ``headroom: auto`` leaves free.

    Args:
        expands: whether the step runs on one GPU with expandable segments.
    """
    return _HEADROOM_EXPANDABLE if expands else _HEADROOM


def segments_can_expand() -> bool:
    """Return whether PyTorch supports expandable segments here (Linux; untested on AMD GPUs)."""
    return sys.platform == "linux" and torch.version.hip is None


def expand_segments() -> None:
    """Enable expandable segments before CUDA is initialized, unless the environment configures the
    allocator.
    """
    variable, _ = allocator_settings()
    if not variable and segments_can_expand():
        os.environ[ALLOCATOR_VARIABLES[0]] = _EXPANDABLE


def expand_segments_in_script(device: torch.device | None = None) -> None:
    """Enable expandable segments in a program that may have initialized CUDA already, and log it.

    Settings in the environment, or made by the program with
    `torch.cuda.memory._set_allocator_settings`, are kept. Segments that are already allocated do
    not change.

    Args:
        device: device of the model, whose driver is checked if it is a CUDA device; None if it is
            not known yet.
    """
    variable, _ = allocator_settings()
    if variable or not segments_can_expand():
        return
    may_be_cuda = device is None or device.type == "cuda"
    if not (may_be_cuda and torch.cuda.is_available()):
        return
    # New settings would replace settings that the program has made.
    if private.allocator_snapshot()["allocator_settings"][ALLOCATOR_VARIABLES[0]]:
        return
    _set_expandable(True)
    if distributed.is_rank_zero():
        log.info(
            "enabled expandable segments of the CUDA allocator (%s=%s): steps of different lengths"
            " fragment other segments",
            ALLOCATOR_VARIABLES[0],
            _EXPANDABLE,
        )
    if device is not None:
        check_segments(device)


def check_segments(device: torch.device) -> None:
    """Disable expandable segments and log it if the driver does not support them, as on some
    virtual machines.
    """
    if device.type != "cuda" or os.environ.get(ALLOCATOR_VARIABLES[0]) != _EXPANDABLE:
        return
    # The environment may have been set after PyTorch had read it.
    _set_expandable(True)
    # A new stream has no cached blocks, so the request reaches the driver.
    new_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(new_stream):
            torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        # The driver supports expandable segments, but has no memory left.
        return
    except RuntimeError as error:
        _set_expandable(False)
        reason, _, _ = str(error).partition("\n")
        log.info("%s: expandable segments disabled: the driver lacks them (%s)", device, reason)
    torch.cuda.empty_cache()


def _set_expandable(expands: bool) -> None:
    settings = f"expandable_segments:{expands}"
    os.environ[ALLOCATOR_VARIABLES[0]] = settings
    # PyTorch may have read the environment already.
    private.set_allocator_settings(settings)
