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
# The history is read again only if the peak has grown by this factor.
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
        """Start the history of allocations and register the hooks once CUDA is initialized."""
        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=MAX_EVENTS
        )
        internal: Any = torch._C
        internal._cuda_attach_out_of_memory_observer(self.notice_out_of_memory)
        reset = internal._cuda_resetPeakMemoryStats

        def reset_peaks(device: int) -> None:
            self.keep_peaks()
            reset(device)

        internal._cuda_resetPeakMemoryStats = reset_peaks
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
        if self.highest() > GROWTH * self.read_peak:
            self.read_history()
        self.write()

    def highest(self) -> int:
        return max((peaks["allocated"] for peaks in self.peaks.values()), default=0)

    def keep_peaks(self) -> None:
        """Read the allocator's peaks before the program resets them."""
        for device in range(torch.cuda.device_count()):
            counted = torch.cuda.memory_stats(device)
            peaks = self.peaks.setdefault(device, Counter())
            for name in ("allocated", "reserved"):
                peaks[name] = max(peaks[name], counted.get(f"{name}_bytes.all.peak", 0))
            peaks["retries"] = counted.get("num_alloc_retries", 0)

    def notice_out_of_memory(self, device: int, asked: int, capacity: int, free: int) -> None:
        self.num_out_of_memory += 1
        counted = torch.cuda.memory_stats(device)
        self.out_of_memory = {
            "line": values.program_line(),
            "asked": asked,
            "free": free,
            "allocated": counted["allocated_bytes.all.current"],
            "reserved": counted["reserved_bytes.all.current"],
        }
        if self.num_out_of_memory == 1:  # a search runs out of memory many times
            self.keep_peaks()
            self.read_history()
            self.write()

    def read_history(self) -> None:
        """Sum the live bytes at the highest peak of the allocator's history by line of code."""
        # The snapshot has the blocks that are live now, and a ring buffer of events that led to
        # them. Undo the events, newest first, to find the highest total; then undo only so far.
        snapshot = torch.cuda.memory._snapshot()
        for device, events in enumerate(snapshot["device_traces"]):
            living = _live_blocks(snapshot, device)
            now = sum(size for size, _ in living.values())
            peak, events_since_peak = _events_since_peak(events, now)
            if peak > self.living.get("bytes", 0):
                _undo(living, events_since_peak)
                lines = Counter[str]()
                for size, holder in living.values():
                    lines[_line_of(holder.get("frames", ()))] += size
                self.living = {"bytes": peak, "device": device, "lines": lines.most_common()}
        # at_exit reads again only above this peak.
        self.read_peak = self.highest()

    def write(self) -> None:
        devices = []
        for device, peaks in self.peaks.items():
            if peaks["reserved"]:
                name, total = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
                devices.append({"index": device, "name": name, "total": total, **peaks})
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


def _live_blocks(snapshot: Any, device: int) -> dict[int, tuple[int, Any]]:
    """Return the size and the block at each live address of a device."""
    return {
        block["address"]: (block["requested_size"], block)
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"].startswith("active")
    }


def _events_since_peak(events: list[Any], now: int) -> tuple[int, list[Any]]:
    """Return the highest total of live bytes, which are `now` after all events, and the events
    since then.
    """
    total = peak = now
    peak_place = len(events)
    for place, event in reversed(list(enumerate(events))):
        changes = {"alloc": -event["size"], "free_completed": event["size"]}
        total += changes.get(event["action"], 0)
        if total > peak:
            peak = total
            peak_place = place
    return peak, events[peak_place:]


def _undo(living: dict[int, Any], events: list[Any]) -> None:
    """Undo events in the live blocks, newest first."""
    for event in reversed(events):
        if event["action"] == "alloc":
            living.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            living[event["addr"]] = (event["size"], event)


def _line_of(frames: Any) -> str:
    """Return the line of the program that allocated a block, and the library's line it called."""
    lines = []
    is_of_optimizer = False
    for frame in frames:
        line = values.line_of(frame["filename"], frame["line"])
        is_of_optimizer |= "/torch/optim/" in frame["filename"]
        if line is not None:
            lines.append(line)
            if "site-packages" not in frame["filename"]:
                break
    return ("optimizer: " if is_of_optimizer else "") + values.join_lines(lines)


def _functions_not_counted() -> list[str]:
    """Return the called functions of CUDA's libraries whose workspace sizes are unknown."""
    stub = ctypes.CDLL("libcudastub.so")
    functions = set[str]()
    for look_up in (stub.cudastub_default, stub.cudastub_unknown_workspace):
        look_up.restype = ctypes.c_char_p
    calls = ctypes.c_ulong()
    place = 0
    while name := stub.cudastub_default(place, ctypes.byref(calls)):
        if calls.value and _SIZES.search(name.decode()):
            functions.add(name.decode())
        place += 1
    place = 0
    while name := stub.cudastub_unknown_workspace(place):
        functions.add(name.decode())
        place += 1
    return sorted(functions)
