"""The record of one process: peaks, live bytes by line of code, OOM errors.

It is written after steps that raise the peak and at exit, so that a killed process leaves one too.
The program is not changed.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import values

# Length of the allocator's history; a step of a large model has about 20,000 events.
MAX_EVENTS = 200_000
# The history is read again after a step only if the peak has grown by this factor.
GROWTH = 1.001
# Functions of CUDA's libraries that return workspace sizes.
_SIZES = re.compile(r"buffer_?size|(?<!Set)workspace|reservespace", re.IGNORECASE)


def install(folder: Path) -> None:
    """Record this process in a file in `folder`."""
    recorder = _Recorder(folder / f"{os.getpid()}.json")
    torch.cuda._lazy_call(recorder.start)  # type: ignore[no-untyped-call]


class _Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.max_steps = int(os.environ.get("EMULATE_STEPS", 0))
        self.steps: Counter[int] = Counter()
        self.peaks: dict[int, Counter[str]] = {}
        self.read_peak = 0
        self.living: dict[str, Any] = {}
        self.out_of_memory: dict[str, Any] | None = None
        self.num_out_of_memory = 0

    def start(self) -> None:
        """Start the history of allocations and register the hooks. CUDA must be initialized."""
        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=MAX_EVENTS
        )
        internal: Any = torch._C
        internal._cuda_attach_out_of_memory_observer(self.notice_out_of_memory)
        reset_peaks = internal._cuda_resetPeakMemoryStats

        def keep_and_reset_peaks(device: int) -> None:
            # The allocator forgets its peaks at a reset, which a program may make in each step.
            self.keep_peaks()
            reset_peaks(device)

        internal._cuda_resetPeakMemoryStats = keep_and_reset_peaks
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        atexit.register(self.at_exit)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End the program before a step beyond the limit."""
        if self.max_steps and self.steps[id(optimizer)] >= self.max_steps:
            raise SystemExit(0)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps[id(optimizer)] += 1
        self.keep_peaks()
        if self.highest() > GROWTH * self.read_peak:
            self.read_history()
            self.write()

    def at_exit(self) -> None:
        self.keep_peaks()
        if self.highest() > self.read_peak:
            self.read_history()
        self.write()

    def highest(self) -> int:
        return max((peaks["allocated"] for peaks in self.peaks.values()), default=0)

    def keep_peaks(self) -> None:
        """Raise the recorded peaks of each device to the allocator's."""
        for device in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(device)
            peaks = self.peaks.setdefault(device, Counter())
            for name in ("allocated", "reserved"):
                peaks[name] = max(peaks[name], stats.get(f"{name}_bytes.all.peak", 0))
            peaks["retries"] = stats.get("num_alloc_retries", 0)

    def notice_out_of_memory(self, device: int, asked: int, capacity: int, free: int) -> None:
        """Record an OOM error. PyTorch calls this before it raises the error."""
        self.num_out_of_memory += 1
        stats = torch.cuda.memory_stats(device)
        self.out_of_memory = {
            "line": values.program_line(),
            "asked": asked,
            "free": free,
            "allocated": stats["allocated_bytes.all.current"],
            "reserved": stats["reserved_bytes.all.current"],
        }
        # A search runs out of memory many times, and reading the history takes seconds.
        if self.num_out_of_memory == 1:
            self.keep_peaks()
            self.read_history()
            self.write()

    def read_history(self) -> None:
        """Sum the live bytes at the highest peak of the allocator's history by line of code."""
        snapshot = torch.cuda.memory._snapshot()
        for device in range(len(snapshot["device_traces"])):
            peak, blocks = _blocks_at_peak(snapshot, device)
            if peak > self.living.get("bytes", 0):
                bytes_by_line = Counter[str]()
                for size, block in blocks:
                    bytes_by_line[_line_of(block)] += size
                self.living = {
                    "bytes": peak,
                    "device": device,
                    "lines": bytes_by_line.most_common(),
                }
        # The hooks read the history again only above this peak.
        self.read_peak = self.highest()

    def write(self) -> None:
        """Replace the file of this process by its current record."""
        devices = [
            {"index": device, **peaks} for device, peaks in self.peaks.items() if peaks["reserved"]
        ]
        record = {
            "pid": os.getpid(),
            "rank": os.environ.get("RANK"),
            "program": sys.argv[:1],
            "steps": max(self.steps.values(), default=0),
            "devices": devices,
            "living": self.living,
            "out_of_memory": self.out_of_memory,
            "times_out_of_memory": self.num_out_of_memory,
            "made_up": [[*key, count] for key, count in values.made_up.most_common()],
            "not_counted": _functions_not_counted(),
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(self.file)


def _blocks_at_peak(snapshot: Any, device: int) -> tuple[int, Iterable[tuple[int, Any]]]:
    """Return the highest total of live bytes of a device in the allocator's history, and the sizes
    and blocks that were alive then.

    The snapshot has the blocks that are live now and a ring buffer of the latest events, but not
    the blocks at the peak. So events are undone from the newest one back to the peak.
    """
    live_blocks = {
        block["address"]: (block["requested_size"], block)
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"].startswith("active")
    }
    newest_first = [
        event
        for event in reversed(snapshot["device_traces"][device])
        if event["action"] in ("alloc", "free_completed")
    ]
    total = peak = sum(size for size, _ in live_blocks.values())
    num_since_peak = 0
    for number, event in enumerate(newest_first, start=1):
        # The total before the event.
        total += event["size"] if event["action"] == "free_completed" else -event["size"]
        if total > peak:
            peak = total
            num_since_peak = number
    for event in newest_first[:num_since_peak]:
        if event["action"] == "alloc":
            live_blocks.pop(event["addr"], None)
        else:
            live_blocks[event["addr"]] = (event["size"], event)
    return peak, live_blocks.values()


def _line_of(block: Any) -> str:
    """Return the line of the program that allocated a block, and the library's line it called."""
    frames = [(frame["filename"], frame["line"]) for frame in block.get("frames", ())]
    is_of_optimizer = any("/torch/optim/" in file for file, _ in values.until_program(frames))
    return ("optimizer: " if is_of_optimizer else "") + values.describe(frames)


def _functions_not_counted() -> list[str]:
    """Return the called functions of CUDA's libraries whose workspace sizes are unknown."""
    stub = ctypes.CDLL("libcudastub.so")
    stub.cudastub_default.restype = ctypes.c_char_p
    stub.cudastub_unknown_workspace.restype = ctypes.c_char_p
    functions = set[str]()
    # Functions that csrc/ does not define: they return 0 and count their calls, but write no size.
    num_calls = ctypes.c_ulong()
    index = 0
    while name := stub.cudastub_default(index, ctypes.byref(num_calls)):
        if num_calls.value and _SIZES.search(name.decode()):
            functions.add(name.decode())
        index += 1
    # Functions that csrc/ defines without knowing the size, once they have been called.
    index = 0
    while name := stub.cudastub_unknown_workspace(index):
        functions.add(name.decode())
        index += 1
    return sorted(functions)
