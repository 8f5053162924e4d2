"""Estimated peaks of the recipe's steps, compared with the peaks on a GPU.

    python benchmarks/on_gpu.py [--cases N] [--compiled N] [--only REGEX] [--at-once N]
        [--output DIR]
    python benchmarks/on_gpu.py --estimate H100 ...

Run it on a machine with an NVIDIA GPU that nobody else uses. `--estimate` only estimates, for the
named device and without a GPU; estimates are kept in `.measure/`, which can be copied to the other
machine.

The cases are those that benchmarks/cuda_stack.py draws for the H100, whatever the GPU is. Each runs
in a new process: eager ones with default and with expandable segments, compiled ones of 2 rows with
a cold and then with a warm cache of Inductor. Weights are uninitialized memory, as peaks do not
depend on values.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import harness
import torch
from cuda_stack import (
    CONFS,
    Case,
    Estimated,
    Outcome,
    StackRun,
    compared,
    compiled_sample,
    sample,
)
from harness import Finished
from support.paths import subprocess_environment

from adaptive_batch.estimate import parse_devices
from adaptive_batch.memory import GIB
from adaptive_batch.torchtune import set_up_process

# Cases of cuda_stack.py for all devices.
DRAWN, DRAWN_COMPILED = 120, 40
ROWS_OF_COMPILED = 2
# GiB that a process takes for its CUDA context.
CONTEXT_GIB = 1


def estimate(case: Case) -> dict[str, Any]:
    """Return the rows of a case and their peaks, by settings of the allocator."""
    peaks: dict[str, Any] = {}
    with Estimated(case).opened() as estimated:
        for name, conf in CONFS.items():
            rows = max(1, estimated.bound(conf)) if case.rows == "bound" else int(case.rows)
            peaks[name] = {"rows": rows, "estimate": estimated.peaks(rows, conf)}
            if case.combination.compiled:
                break
    return peaks


def set_up() -> None:
    """Prepare a process that estimates."""
    torch.set_num_threads(1)
    set_up_process()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


class Room:
    """Divides the GiB of the device between the runs."""

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._queue = threading.Lock()
        self._free = threading.Semaphore(whole)

    @contextmanager
    def of(self, reserved_bytes: int) -> Iterator[None]:
        """Wait for that much memory."""
        asked = min(self._whole, math.ceil(reserved_bytes / GIB) + CONTEXT_GIB)
        # One waits at a time, so that two cannot wait for each other.
        with self._queue:
            for _ in range(asked):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(asked)


def count(case: Case, rows: int, conf: str) -> Outcome:
    """Run steps of a case in a new process, and return what PyTorch counted there.

    Raises:
        RuntimeError: the run failed.
    """
    segments = conf or "expandable_segments:False"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.stack_runs", "--one"],
        input=json.dumps(asdict(StackRun(case.combination, rows))),
        env=subprocess_environment(PYTORCH_CUDA_ALLOC_CONF=segments, PYTORCH_ALLOC_CONF=segments),
        capture_output=True,
        text=True,
    )
    answer = {"failed": ran.stderr[-600:]} if ran.returncode else json.loads(ran.stdout)
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return Outcome(**answer)


def measure(case: Case, estimated: dict[str, Any], room: Room) -> dict[str, Any]:
    """Return estimated and counted peaks of a case."""
    row: dict[str, Any] = {**asdict(case), "case": str(case)}
    row["failed"] = None if estimated else "not estimated"
    for name, peaks in estimated.items():
        try:
            with room.of(peaks["estimate"]["reserved"]):
                runs = 2 if case.combination.compiled else 1
                *cold, counted = (count(case, peaks["rows"], CONFS[name]) for _ in range(runs))
        except RuntimeError as error:
            return row | {"failed": str(error), "rows": peaks["rows"]}
        result = compared(peaks["estimate"], counted)
        row[name] = {"outside": counted.outside, "cold": [asdict(one) for one in cold], **result}
        row["rows"] = peaks["rows"]
        row |= {f"{kind}_{name}": error for kind, error in result["errors"].items()}
    return row


def context() -> dict[str, Any]:
    """Return the name and size of the device, and the bytes of a context that has multiplied
    matrices, from another process.
    """
    program = (
        "import json, torch; x = torch.ones(4096, 4096, device='cuda', dtype=torch.bfloat16);"
        "y = x @ x; torch.cuda.synchronize(); free, total = torch.cuda.mem_get_info();"
        "it = torch.cuda.get_device_properties(0);"
        "print(json.dumps({'name': it.name, 'total_bytes': total,"
        "'context_bytes': total - free - torch.cuda.memory_reserved(),"
        "'capability': [it.major, it.minor], 'cuda': torch.version.cuda}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def estimate_all(cases: list[Case], at_once: int) -> list[dict[str, Any]]:
    """Estimate the cases in several processes; earlier estimates are read."""
    finished = Finished("on_gpu")
    spawn = multiprocessing.get_context("spawn")

    def entry(case: Case) -> dict[str, Any]:
        found = finished.entry(
            asdict(case), lambda: {"peaks": pool.submit(estimate, case).result()}
        )
        print(f"{case}: {found.get('failed', found.get('seconds'))}", flush=True)
        return found.get("peaks", {})

    with (
        ProcessPoolExecutor(at_once, spawn, set_up) as pool,
        ThreadPoolExecutor(at_once) as threads,
    ):
        return list(threads.map(entry, cases))


def main() -> None:
    parser = harness.parser(__doc__)
    add = parser.add_argument
    add("--estimate", metavar="DEVICE", help="only estimate, for this device")
    add("--cases", type=int, default=30, metavar="N", help="eager cases (default: %(default)s)")
    add("--compiled", type=int, default=6, metavar="N", help="cases (default: %(default)s)")
    add("--only", default="", metavar="REGEX", help="cases whose description matches")
    add("--at-once", type=int, default=6, metavar="N", help="processes (default: %(default)s)")
    asked = parser.parse_args()
    device = {"name": asked.estimate} if asked.estimate else context()
    (known,) = parse_devices([device["name"]])
    print(
        f"{device}, estimated as {known.describe()}, context {known.context_bytes / 2**20:.0f} MiB"
    )

    def here(cases: Iterable[Case]) -> list[Case]:
        return [
            replace(case, device=known.name)
            for case in cases
            if case.device == "H100" and re.search(asked.only, str(case))
        ]

    drawn = here(compiled_sample(DRAWN_COMPILED))
    compiled = [case for case in drawn if case.combination.dtype == "bf16"][: asked.compiled]
    cases = [replace(case, rows=ROWS_OF_COMPILED) for case in compiled]
    cases += here(sample(DRAWN))[: asked.cases]
    estimated = estimate_all(cases, asked.at_once)
    if asked.estimate:
        return
    room = Room(known.total_bytes // GIB)
    with ThreadPoolExecutor(asked.at_once) as threads:
        tasks = [
            threads.submit(measure, *each, room) for each in zip(cases, estimated, strict=True)
        ]
        harness.run(
            "on_gpu",
            asked.output,
            as_completed(tasks),
            Future.result,
            columns="case:<72 rows:>5 requested_default:>17.4% allocated_default:>17.4%"
            " reserved_default:>16.3% reserved_expandable:>19.3%",
            errors=lambda row: [row["failed"]] if row["failed"] else [],
            figures=lambda rows: {"context_mib": device["context_bytes"] // 2**20},
        )


if __name__ == "__main__":
    main()
