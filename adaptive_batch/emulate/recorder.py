"""The record of one process: peaks, living bytes by line, where memory ran out.

It is written to a file after steps that raised the peak and at exit, so a process that is killed
leaves one too. The program is not changed.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import values
from .build import STUB
from .lines import name_line, running_line

# Events of the allocator that are kept: a step of a large model has about 20,000.
MAX_EVENTS = 200_000
# The peak of a loop comes early; later steps are written only if it grew by this factor.
GROWTH = 1.001
MOST_UNKNOWN = 64  # as in csrc/sizes.c


def install(folder: Path) -> None:
    """Record this process in a file in `folder`, from when CUDA is initialized."""
    recorder = _Recorder(folder / f"{os.getpid()}.json")
    torch.cuda._lazy_call(recorder.start)  # type: ignore[no-untyped-call]
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator):
        reset = recorder.keeping_peaks(module.reset_peak_memory_stats)
        module.reset_peak_memory_stats = reset  # type: ignore[attr-defined]


class _Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.max_steps = int(os.environ.get("EMULATE_STEPS", 0))
        self.steps: Counter[int] = Counter()
        self.peaks: dict[int, Counter[str]] = {}
        self.written_peak = 0
        self.living: dict[str, Any] = {"bytes": 0, "lines": []}
        self.out_of_memory: dict[str, Any] | None = None
        self.num_out_of_memory = 0

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=MAX_EVENTS
        )
        internal: Any = torch._C
        internal._cuda_attach_out_of_memory_observer(self.notice_out_of_memory)
        register_optimizer_step_pre_hook(self.before_step)
        register_optimizer_step_post_hook(self.after_step)
        atexit.register(self.write)

    def keeping_peaks(self, reset: Callable[..., None]) -> Callable[..., None]:
        """Return a function that reads the allocator's peaks before the program sets them back."""

        def read_and_reset(*args: Any, **kwargs: Any) -> None:
            self.read_peaks()
            reset(*args, **kwargs)

        return read_and_reset

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """End the program where a step begins that is too many."""
        if self.max_steps and self.steps[id(optimizer)] >= self.max_steps:
            raise SystemExit(0)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.steps[id(optimizer)] += 1
        if self.read_peaks() > GROWTH * self.written_peak:
            self.write()

    def read_peaks(self) -> int:
        """Read the allocator's peaks, and return the highest of allocated bytes."""
        for device in range(torch.cuda.device_count()):
            counted = torch.cuda.memory_stats(device)
            peaks = self.peaks.setdefault(device, Counter())
            for name in ("allocated", "reserved"):
                peaks[name] = max(peaks[name], counted.get(f"{name}_bytes.all.peak", 0))
            peaks["retries"] = counted.get("num_alloc_retries", 0)
        return max((peaks["allocated"] for peaks in self.peaks.values()), default=0)

    def notice_out_of_memory(self, device: int, asked: int, capacity: int, free: int) -> None:
        self.num_out_of_memory += 1
        counted = torch.cuda.memory_stats(device)
        self.out_of_memory = {
            "line": running_line(),
            "asked": asked,
            "free": free,
            "allocated": counted["allocated_bytes.all.current"],
            "reserved": counted["reserved_bytes.all.current"],
        }
        if self.num_out_of_memory == 1:  # a search runs out of memory many times
            self.write()

    def read_history(self) -> None:
        """Sum what lived at the highest peak in the allocator's history, by the line that asked."""
        snapshot = torch.cuda.memory._snapshot()
        for device, history in enumerate(snapshot["device_traces"]):
            living = {
                block["address"]: {**block, "size": block["requested_size"]}
                for segment in snapshot["segments"]
                if segment["device"] == device
                for block in segment["blocks"]
                if block["state"].startswith("active")
            }
            events = history[::-1]
            signs = {"alloc": -1, "free_completed": 1}
            changes = (signs.get(event["action"], 0) * event["size"] for event in events)
            totals = list(accumulate(changes, initial=sum(one["size"] for one in living.values())))
            best = max(totals)
            if best <= self.living["bytes"]:
                continue
            for event in events[: totals.index(best)]:
                if event["action"] == "alloc":
                    living.pop(event["addr"], None)
                elif event["action"] == "free_completed":
                    living[event["addr"]] = event
            lines = Counter[str]()
            for one in living.values():
                frames = ((frame["filename"], frame["line"]) for frame in one.get("frames", ()))
                lines[name_line(frames)] += one["size"]
            self.living = {"bytes": best, "device": device, "lines": lines.most_common()}

    def write(self) -> None:
        """Write the record, with what lived at the peak where that has grown."""
        highest = self.read_peaks()
        if highest > GROWTH * self.written_peak:
            self.read_history()
            self.written_peak = highest
        names: Any = ctypes.c_char_p * MOST_UNKNOWN
        asked = names.in_dll(ctypes.CDLL(STUB), "cudastub_unknown_workspaces")
        record = {
            "pid": os.getpid(),
            "rank": os.environ.get("RANK"),
            "program": sys.argv[:1],
            "steps": max(self.steps.values(), default=0),
            "devices": [
                {"index": device, **peaks}
                for device, peaks in self.peaks.items()
                if peaks["reserved"]
            ],
            "living": self.living,
            "out_of_memory": self.out_of_memory,
            "times_out_of_memory": self.num_out_of_memory,
            "made_up": [[*key, count] for key, count in values.made_up.most_common()],
            "not_counted": sorted(name.decode() for name in asked if name),
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(self.file)
