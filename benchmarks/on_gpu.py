"""What is estimated of a GPU beside the GPU itself: memory of the recipe's steps, bounds, and the
search.

    python benchmarks/on_gpu.py [--cases N] [--bounds N] [--compiled N] [--searches N]
        [--only REGEX] [--seconds S] [--at-once N] [--output DIR]
    python benchmarks/on_gpu.py --estimate H100 ...

Run it on a machine with an NVIDIA GPU that nobody else uses. With --estimate it only estimates, of
the device that is named, on a machine without one too; what is estimated is kept in `.measure/`,
from where the other machine has it.

The cases are those that benchmarks/cuda_stack.py draws for the H100, whatever the GPU is; each run
is a process of its own, on default and on expandable segments. At a bound, of the cases in bf16, it
is the estimate's most rows that run three steps without a retry of the allocator, once beside a
CUDA context of 500 MiB, once beside the one that is taken for the device; these run alone on it,
and so do 1% more. Compiled cases, in bf16 too, run 2 rows, with a cold and then with a warm cache
of Inductor. A search is that of the recipe, with its own headroom, and 10 steps of varying lengths
at what it finds. Weights are what memory held, as memory depends on none of their values. What is
not done after S seconds is left out, and counted.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import records
import torch
from cuda_stack import (
    CONFS,
    Case,
    Estimated,
    Outcome,
    StackRun,
    compared,
    compiled_sample,
    peaks_of,
    sample,
)
from records import Finished

from adaptive_batch.estimate import parse_devices
from adaptive_batch.memory import GIB
from adaptive_batch.torchtune import set_up_process

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.paths import subprocess_environment

DRAWN = 120  # of cuda_stack.py, of which those of one device are taken
ROWS_OF_COMPILED = 2
STEPS_AFTER_SEARCH = 10
OF_A_CONTEXT = 1  # GiB that a process takes beside what is estimated, and some
IGNORED = "Mismatch dtype between input and weight"


# --- the estimates


def estimated_peaks(case: Case) -> dict[str, Any]:
    """Rows to run and their peaks, by settings of the allocator."""
    peaks_by_name: dict[str, Any] = {}
    with Estimated(case).opened() as estimated:
        for name, conf in CONFS.items():
            rows = max(1, estimated.bound(conf)) if case.rows == "bound" else int(case.rows)
            peaks_by_name[name] = {"rows": rows, **peaks_of(estimated.replayed(rows, conf))}
    return peaks_by_name


def estimated_bounds(case: Case) -> dict[str, Any]:
    """The bounds beside the context that is taken for the device."""
    with Estimated(case, context_bytes=case.found.context_bytes).opened() as estimated:
        return {name: {"rows": estimated.bound(conf)} for name, conf in CONFS.items()}


def estimated_compiled(case: Case) -> dict[str, Any]:
    """Peaks of a compiled step."""
    with Estimated(case).opened() as estimated:
        return {
            "default": {
                "rows": ROWS_OF_COMPILED,
                **peaks_of(estimated.replayed(ROWS_OF_COMPILED, "")),
            }
        }


def begin() -> None:
    """Make ready a process that estimates."""
    torch.set_num_threads(1)
    set_up_process()
    warnings.filterwarnings("ignore", message=IGNORED)


# --- the runs


class Room:
    """The GiB of the device, which runs share."""

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._queue = threading.Lock()
        self._free = threading.Semaphore(whole)

    @contextmanager
    def of(self, reserved_bytes: int | None) -> Iterator[None]:
        """Wait for so much of it; None for all of it."""
        asked = self._whole
        if reserved_bytes is not None:
            asked = min(asked, math.ceil(reserved_bytes / GIB) + OF_A_CONTEXT)
        with self._queue:  # or two could wait for what the other has
            for _ in range(asked):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(asked)


def counted(run: StackRun, conf: str) -> Outcome:
    """Run it in a process of its own, and return what PyTorch counted there."""
    segments = conf or "expandable_segments:False"
    environment = subprocess_environment(
        PYTORCH_CUDA_ALLOC_CONF=segments, PYTORCH_ALLOC_CONF=segments
    )
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.stack_runs", "--one"],
        input=json.dumps(asdict(run)),
        env=environment,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise RuntimeError(f"a run ended with {ran.returncode}: {ran.stderr[-600:]}")
    answer = json.loads(ran.stdout)
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return Outcome(**answer)


def peaks(case: Case, estimated: dict[str, Any], room: Room) -> dict[str, Any]:
    """Peaks of steps of given rows, estimated and counted."""
    entry: dict[str, Any] = {}
    for name, conf in CONFS.items():
        rows = estimated[name]["rows"]
        run = StackRun.fixed(case.combination, rows)
        with room.of(estimated[name]["estimate"]["reserved"]):
            real = counted(run, conf)
        entry[name] = {"rows": rows, "outside": real.outside, **compared(estimated[name], real)}
    return entry


def bounds(
    case: Case, estimated: dict[str, Any], room: Room, *, own_context: dict[str, Any]
) -> dict[str, Any]:
    """Whether rows at the bound run without a retry, and whether 1% more do."""
    entry: dict[str, Any] = {}
    for name, conf in CONFS.items():
        rows, with_own_context = estimated[name]["rows"], own_context[name]["rows"]
        more = rows + math.ceil(rows / 100)
        with room.of(None):
            ran = {
                number: counted(StackRun.fixed(case.combination, number), conf)
                for number in sorted({with_own_context, rows, more} - {0})
            }
        entry[name] = {
            "rows": rows,
            "rows_with_own_context": with_own_context,
            "at_bound": ran[rows].is_clean,
            "at_bound_with_own_context": not with_own_context or ran[with_own_context].is_clean,
            "above": ran[more].is_clean,
            "outside": ran[rows].outside,
            **compared(estimated[name], ran[rows]),
        }
    return entry


def compiled(case: Case, estimated: dict[str, Any], room: Room) -> dict[str, Any]:
    """Peaks of a compiled step, estimated and counted, with a cold cache and with a warm one."""
    default = estimated["default"]
    run = StackRun.fixed(case.combination, default["rows"])
    with room.of(default["estimate"]["reserved"]):
        cold, warm = (compared(default, counted(run, "")) for _ in range(2))
    return {"default": {"rows": default["rows"], "cold": cold["counted"], **warm}}


def searched(case: Case, estimated: dict[str, Any], room: Room) -> dict[str, Any]:
    """The bound of the recipe's search beside the estimate's, and steps at what was found."""
    entry: dict[str, Any] = {}
    kept = (
        "bound",
        "trials",
        "ooms_of_search",
        "steps",
        "retries",
        "ooms",
        "allocated",
        "reserved",
    )
    for name, conf in CONFS.items():
        run = StackRun(case.combination, (), probes=STEPS_AFTER_SEARCH, headroom="auto")
        with room.of(None):
            start = time.perf_counter()
            real = counted(run, conf)
            seconds = time.perf_counter() - start
        entry[name] = {key: getattr(real, key) for key in kept}
        entry[name] |= {
            "headroom": run.headroom,
            "estimated": estimated[name]["rows"],
            "seconds": round(seconds, 1),
        }
    return entry


def context() -> dict[str, Any]:
    """What a context takes when nothing but a product of matrices has run, and the device's size.

    It is asked in a process of its own, as others of this program must not have a context.
    """
    program = (
        "import json, torch; x = torch.ones(4096, 4096, device='cuda', dtype=torch.bfloat16);"
        "y = x @ x; torch.cuda.synchronize(); free, total = torch.cuda.mem_get_info();"
        "it = torch.cuda.get_device_properties(0);"
        "print(json.dumps({'name': it.name, 'total_bytes': total,"
        "'context_bytes': total - free - torch.cuda.memory_reserved(),"
        "'multiprocessors': it.multi_processor_count,"
        "'capability': [it.major, it.minor], 'cuda': torch.version.cuda}))"
    )
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


# --- what is printed


def print_peaks(entry: dict[str, Any]) -> None:
    for name in CONFS:
        if name not in entry:
            continue
        row = entry[name]
        errors = "".join(
            f" {row['errors'][kind]:>9.4%}" for kind in ("requested", "allocated", "reserved")
        )
        bound = ""
        if "at_bound" in row:
            bound = (
                f", clean {row['at_bound']}, {row['rows_with_own_context']} rows"
                f" {row['at_bound_with_own_context']}, 1% more {row['above']}"
            )
        outside = f", outside {row['outside'] / 2**20:.0f} MiB" if "outside" in row else ""
        print(
            f"{entry['what']:<72} {name:<10} {row['rows']:>5}{errors}"
            f" {row['counted']['reserved'] / GIB:>7.2f} GiB,"
            f" retries {row['estimate']['retries']}/{row['counted']['retries']}{outside}{bound}",
            flush=True,
        )


def print_search(entry: dict[str, Any]) -> None:
    for name in CONFS:
        row = entry[name]
        print(
            f"{entry['what']:<72} {name:<10} found {row['bound']}, estimated {row['estimated']},"
            f" {row['trials']} trials, {row['ooms_of_search']} OOMs;"
            f" {row['steps']} steps, {row['retries']} retries, {row['ooms']} OOMs,"
            f" {row['reserved'] / GIB:.2f} GiB, {row['seconds']} s",
            flush=True,
        )


def summary(entries: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The median and the worst error of each kind of memory, by settings of the allocator."""
    said = {}
    for name in CONFS:
        done = [entry[name] for entry in entries if name in entry]
        for kind in ("requested", "allocated", "reserved") if done else ():
            errors = [abs(one["errors"][kind]) for one in done]
            said[f"{kind}, {name}"] = (
                f"median {median(errors):.4%}, worst {max(errors):.3%} of {len(done)}"
            )
    return said


def arguments() -> argparse.Namespace:
    parser = records.parser(__doc__)
    add = parser.add_argument
    add("--estimate", metavar="DEVICE", help="only estimate, of this device")
    add("--cases", type=int, default=30, metavar="N", help="of eager steps (default: %(default)s)")
    add("--bounds", type=int, default=3, metavar="N", help="of them (default: %(default)s)")
    add("--compiled", type=int, default=6, metavar="N", help="cases (default: %(default)s)")
    add("--searches", type=int, default=1, metavar="N", help="cases (default: %(default)s)")
    add("--only", default="", metavar="REGEX", help="cases whose description matches")
    add("--seconds", type=float, default=3600.0, metavar="S", help="default: %(default)s")
    add("--at-once", type=int, default=6, metavar="N", help="processes (default: %(default)s)")
    return parser.parse_args()


Estimate = Callable[[Case], dict[str, Any]]


def estimates(cases: Sequence[tuple[Estimate, Case]], at_once: int) -> list[dict[str, Any]]:
    """Estimate each of the cases, at most so many at once; those that were before are read."""
    finished = Finished("on_gpu")
    processes = multiprocessing.get_context("spawn")

    def entry(how: Estimate, case: Case) -> dict[str, Any]:
        key = {"estimate": how.__name__, **asdict(case)}
        found = finished.entry(key, lambda: pool.submit(how, case).result())
        print(f"{how.__name__} {case}: {found.get('failed', found.get('seconds'))}", flush=True)
        return found

    with (
        ProcessPoolExecutor(at_once, processes, begin) as pool,
        ThreadPoolExecutor(at_once) as threads,
    ):
        return list(threads.map(lambda one: entry(*one), cases))


Measure = Callable[..., dict[str, Any]]


def measured(
    how: Measure, case: Case, estimated: dict[str, Any], room: Room
) -> tuple[str, dict[str, Any]]:
    """Return the name of what was measured, and a case with it or with the error."""
    start = time.monotonic()
    entry: dict[str, Any] = {**asdict(case), "what": str(case)}
    try:
        entry |= how(case, estimated, room)
    except Exception as error:
        entry["failed"] = f"{type(error).__name__}: {error}"
    entry["seconds"] = round(time.monotonic() - start, 1)
    return getattr(how, "func", how).__name__, entry


def print_entry(name: str, entry: dict[str, Any]) -> None:
    if "failed" in entry:
        print(f"{entry['what']:<72} {entry['failed']}", flush=True)
    elif name == "searched":
        print_search(entry)
    else:
        print_peaks(entry)


def main() -> None:
    asked = arguments()
    device = {"name": asked.estimate} if asked.estimate else context()
    (known,) = parse_devices([device["name"]])
    print(f"{device}, estimated as {known.describe()}, {known.context_bytes / 2**20:.0f} MiB taken")

    def here(cases: Iterable[Case]) -> list[Case]:
        return [
            replace(case, device=known.name)
            for case in cases
            if case.device == "H100" and re.search(asked.only, str(case))
        ]

    drawn = here(sample(DRAWN))[: asked.cases]
    fixed = [case for case in drawn if case.rows != "bound"]
    at_bound = [
        case for case in drawn if case.rows == "bound" and case.combination.dtype == "bf16"
    ][: asked.bounds]
    with_compiler = [
        replace(case, rows=ROWS_OF_COMPILED)
        for case in here(compiled_sample(40))
        if case.combination.dtype == "bf16"
    ][: asked.compiled]
    work: list[tuple[Estimate, Case]] = [
        *((estimated_peaks, case) for case in (*fixed, *at_bound)),
        *((estimated_bounds, case) for case in at_bound),
        *((estimated_compiled, case) for case in with_compiler),
    ]
    estimate_of = dict(zip(work, estimates(work, asked.at_once), strict=True))
    if asked.estimate:
        return
    # What fits beside others comes first, then what has the device alone.
    fixed.sort(
        key=lambda case: estimate_of[estimated_peaks, case]["default"]["estimate"]["reserved"]
    )
    runs: list[tuple[Measure, Case, dict[str, Any]]] = [
        *((compiled, case, estimate_of[estimated_compiled, case]) for case in with_compiler),
        *((peaks, case, estimate_of[estimated_peaks, case]) for case in fixed),
        *(
            (searched, case, estimate_of[estimated_peaks, case])
            for case in at_bound[: asked.searches]
        ),
    ]
    for case in at_bound:
        how = partial(bounds, own_context=estimate_of[estimated_bounds, case])
        runs.append((how, case, estimate_of[estimated_peaks, case]))
    room = Room(known.total_bytes // GIB)
    parts: dict[str, list[dict[str, Any]]] = {}
    threads = ThreadPoolExecutor(asked.at_once)
    tasks = [threads.submit(measured, *one, room) for one in runs]
    with suppress(TimeoutError):
        for task in as_completed(tasks, timeout=asked.seconds):
            name, entry = task.result()
            parts.setdefault(name, []).append(entry)
            print_entry(name, entry)
    left_out = sum(not task.done() for task in tasks)
    for part in ("peaks", "bounds", "compiled"):
        for name, said in summary(parts.get(part, [])).items():
            print(f"{part}: {name}: {said}")
    print(f"{left_out} of {len(tasks)} cases were not done in time")
    records.write("on_gpu", asked.output, device=device, left_out=left_out, **parts)
    sys.stdout.flush()
    os._exit(0)  # what still runs is not waited for


if __name__ == "__main__":
    main()
