"""Estimates compared with PyTorch's own CUDA allocator on an emulated device.

    make cuda-stack; .venv-cuda-stack/bin/python benchmarks/cuda_stack.py
    [--only {cases,compiled}] [--quick] [--cases N] [--recount] [--output DIR]

Each run is the recipe's own step of a model of real size, in a process with a new CUDA context
(tests/support/stack_runs.py); no kernel computes, and memory is accounted (docs/without_a_gpu.md).
`cases` are drawn with a fixed seed: the estimate for each number of rows, and its replay of the
allocator with default and with expandable segments, compared with the bytes that PyTorch
requested, allocated and reserved. `compiled` is the same for
`compile: True`, with LoRA and activation budgets among the cases: whether the rows that are
estimated to fit run without a retry, and whether more rows do not.

`--recount` estimates the rows of the newest record again, and compares them with the bytes that
PyTorch counted then. It does not need PyTorch's CUDA build, and takes some seconds for each case.
"""

from __future__ import annotations

import json
import math
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch

from adaptive_batch.estimate import (
    CONTEXT_BYTES,
    AllocatorSettings,
    CachingAllocator,
    EstimatedDevice,
    estimate_length,
    parse_devices,
)
from adaptive_batch.torchtune import Settings, set_up_process
from adaptive_batch.torchtune.estimates import Estimator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.model_families import Combination
from support.stack_runs import Outcome, StackRun, StackRuns

SEED = 15
LENGTHS_OF_COMPILED = (512, 1024, 4096)
STEPS, STEPS_OF_COMPILED = 3, 6
CONFS = {"default": "", "expandable": "expandable_segments:True"}
KINDS_OF_PEAKS = ("requested", "allocated", "reserved")
DEVICES = ("H100", "A100-40GB", "RTX4090", "L4", "B200")
PARAMETERS = {  # in billions
    "llama3_2_1b": 1.24,
    "llama3_2_3b": 3.21,
    "llama3_1_8b": 8.03,
    "qwen2_5_0_5b": 0.49,
    "qwen2_5_7b": 7.62,
    "gemma2_2b": 2.61,
    "phi4_14b": 14.7,
}
COPIES = (
    5  # of the weights, that a step of AdamW holds: with gradients, two moments and a temporary
)


@dataclass(frozen=True)
class Case:
    """One of the sample: a combination, a device, and a number of rows or the bound."""

    combination: Combination
    device: str
    rows: int | str

    def __str__(self) -> str:
        return f"{self.combination}, {self.device}, {self.rows} rows".replace(
            "bound rows", "the bound"
        )

    @property
    def found(self) -> EstimatedDevice:
        (device,) = parse_devices([self.device])
        return device


def sample(number: int) -> list[Case]:
    """Draw that many different cases whose optimizer's step fits."""
    draw, cases = random.Random(SEED), dict[Case, None]()
    while len(cases) < number:
        model, dtype = draw.choice(list(PARAMETERS)), draw.choice(["bf16", "fp32"])
        length = round(math.exp(draw.uniform(math.log(200), math.log(8192))))
        checkpointing = draw.choice([False, True])
        loss = "plain" if model == "gemma2_2b" else "chunked"  # it has no chunks of outputs
        combination = Combination(model, length, False, loss, checkpointing, dtype, device="cuda")
        case = Case(combination, draw.choice(DEVICES), draw.choice((1, 2, "bound")))
        held = COPIES * PARAMETERS[model] * 1e9 * (2 if dtype == "bf16" else 4)
        if held < 0.95 * case.found.total_bytes:
            cases[case] = None
    return list(cases)


def compiled_sample(number: int) -> list[Case]:
    """Draw that many different compiled cases, at the bound, whose optimizer's step fits; those of
    the smallest models, which take least time, come first.
    """
    models = [model for model in PARAMETERS if model != "phi4_14b"]
    # Recomputed in backward: nothing, each layer, or the operations of a budget.
    recomputing = 2 * [(False, 1.0), (True, 1.0)] + [(False, 0.5), (False, 0.2)]
    draw = random.Random(SEED)
    cases = dict[Case, None]()
    while len(cases) < number:
        model = draw.choice(models)
        dtype = draw.choice(["bf16", "bf16", "fp32"])
        checkpointing, budget = draw.choice(recomputing)
        combination = Combination(
            model,
            draw.choice(LENGTHS_OF_COMPILED),
            fused=False,
            # Gemma's has no chunks of outputs.
            loss="plain" if model == "gemma2_2b" else draw.choice(["chunked", "chunked", "plain"]),
            checkpointing=checkpointing,
            dtype=dtype,
            device="cuda",
            compiled=True,
            adapters=draw.random() < 0.3,
            budget=budget,
        )
        case = Case(combination, draw.choice(DEVICES), "bound")
        copies = 1 if combination.adapters else COPIES
        held = copies * PARAMETERS[model] * 1e9 * (2 if dtype == "bf16" else 4)
        if held < 0.8 * case.found.total_bytes:
            cases[case] = None
    return sorted(cases, key=lambda case: PARAMETERS[case.combination.model])


# --- the estimate


class Estimated:
    """The estimate of a combination on a device, and its log of allocations."""

    def __init__(self, case: Case, *, context_bytes: int = CONTEXT_BYTES) -> None:
        self.device = case.found
        self._context_bytes = context_bytes
        self._budget_bytes = self.device.total_bytes - context_bytes
        self._cfg = case.combination.to_estimate(
            devices=[case.device], context=context_bytes, changes=False
        )
        self._combination, self._length = case.combination, case.combination.length
        self._logs: dict[int, Sequence[int]] = {}

    @contextmanager
    def opened(self) -> Iterator[Estimated]:
        """Build the step whose allocations are logged."""
        settings = Settings.from_config(self._cfg)
        estimator = Estimator(self._cfg, settings, [self.device])
        with estimator._run(self._cfg, [self._length], 1, self.device) as run:
            settings = run.job.settings
            is_auto = settings.micro_batch_limit == "auto"
            rows, _ = run.rows_of(self._length)
            self._step = run.step(rows, accumulates=settings.splits_steps or is_auto)
            self._run = run.forward_backward(rows)
            yield self

    @property
    def margin(self) -> float:
        """Share that is added to the peak of a compiled step."""
        return self._step.margin

    def log(self, rows: int) -> Sequence[int]:
        if rows not in self._logs:
            # As an estimate traces the rows that fit.
            self._step.trace(rows, self._run)
            self._logs[rows] = self._step.log(rows, self._run, num_steps=STEPS)
        return self._logs[rows]

    def peaks(self, rows: int, conf: str) -> dict[str, int]:
        """Return the peaks of the steps, with the margin of a compiled step."""
        settings = AllocatorSettings(expandable_segments=bool(conf))
        allocator = CachingAllocator(settings)
        allocator.replay(self.log(rows))
        # Rows that run with retries fill the device; an upper bound may pass it.
        most = 2**50 if self.margin else self._budget_bytes
        return {
            "requested": int((1 + self.margin) * allocator.peak_requested_bytes),
            "allocated": int((1 + self.margin) * allocator.peak_allocated_bytes),
            "reserved": min(most, int((1 + self.margin) * allocator.reserved_bytes)),
        }

    def bound(self, conf: str) -> int:
        """Return the estimate's most rows that run without a retry."""
        _, (fit,) = estimate_length(
            self._step,
            self._length,
            [self.device.target(context_bytes=self._context_bytes, headroom=0.0)],
            maximum=4096,
            forward_backward=self._run,
            allocator=AllocatorSettings(expandable_segments=bool(conf)),
        )
        rows: int = fit.max_batch_size
        return rows


# --- cases


def measure_case(case: Case, runs: StackRuns) -> dict[str, Any]:
    """Return peaks of a case, estimated and counted."""
    entry = {}
    with Estimated(case).opened() as estimated:
        for name, conf in CONFS.items():
            rows = estimated.bound(conf) if case.rows == "bound" else int(case.rows)
            rows = max(1, rows)
            run = StackRun(case.combination, rows, steps=STEPS)
            real = runs(run, case.device, conf=conf, capacity=case.found.total_bytes)
            entry[name] = {"rows": rows, **compared(estimated.peaks(rows, conf), real)}
    return row_of(case, entry)


def measure_compiled(case: Case, runs: StackRuns) -> dict[str, Any]:
    """Return peaks of compiled steps at the bound, with a warm cache of Inductor; and whether the
    bound runs without a retry, also with a cold cache, and 3% and two rows more do not.
    """
    with Estimated(case).opened() as estimated:
        rows = max(1, estimated.bound(""))
        peaks = estimated.peaks(rows, "")
        # The estimate compiles other code than the run.
        torch.compiler.reset()
    # The first run fills Inductor's cache, and may tune kernels.
    cold, real, more = (
        runs(
            StackRun(case.combination, number, steps=STEPS_OF_COMPILED),
            case.device,
            conf="",
            capacity=case.found.total_bytes,
        )
        for number in (rows, rows, math.ceil(1.03 * rows) + 2)
    )
    states = {"cold": cold.is_clean, "at_bound": real.is_clean, "above": not more.is_clean}
    return row_of(case, {"default": {"rows": rows, **compared(peaks, real)}}) | states


def recounted(old: Mapping[str, Any]) -> dict[str, Any]:
    """Estimate the rows of a recorded case again, and compare with the recorded bytes."""
    case = Case(Combination(**old["combination"]), old["device"], "bound")
    entry = {}
    with Estimated(case).opened() as estimated:
        for name in CONFS.keys() & old.keys():
            counted, rows = old[name]["counted"], old[name]["rows"]
            estimate = estimated.peaks(rows, CONFS[name])
            errors = {kind: estimate[kind] / counted[kind] - 1 for kind in KINDS_OF_PEAKS}
            entry[name] = {
                "rows": rows,
                "estimate": estimate,
                "counted": counted,
                "errors": errors,
            }
    torch.compiler.reset()
    return row_of(case, entry)


def row_of(case: Case, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case with its entries, and the errors in columns."""
    columns = {
        f"{kind}_{name}": error
        for name, found in entry.items()
        for kind, error in found["errors"].items()
    }
    return {"case": str(case), **asdict(case), **entry, **columns}


def compared(estimate: Mapping[str, int], real: Outcome) -> dict[str, Any]:
    """Compare estimated peaks with a run; errors are above 0 if the estimate is too
    high.
    """
    counted = {name: getattr(real, name) for name in (*estimate, "retries", "ooms")}
    return {
        "estimate": estimate,
        "counted": counted,
        "errors": {kind: estimate[kind] / counted[kind] - 1 for kind in KINDS_OF_PEAKS},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of each kind of peak by settings, and shares that are equal."""
    found: dict[str, Any] = {}
    for name in CONFS:
        entries = [row[name] for row in rows if name in row]
        # A run that ran out of memory has no peak.
        done = [entry for entry in entries if not entry["counted"]["ooms"]]
        for kind in KINDS_OF_PEAKS if done else ():
            errors = sorted(one["errors"][kind] for one in done)
            within = sorted(map(abs, errors))[math.ceil(0.95 * len(errors)) - 1]
            found[f"{kind}, {name}"] = (
                f"lowest {errors[0]:+.4%}, median {median(errors):+.4%}, highest {errors[-1]:+.4%},"
                f" 95% within {within:.4%}"
            )
        clean = [not one["counted"]["retries"] for one in done]
        if clean:
            found[f"no retry, {name}"] = f"{sum(clean)} of {len(clean)}"
    for key in ("cold", "at_bound", "above"):
        states = [row[key] for row in rows if key in row]
        if states:
            found[key] = f"{sum(states)} of {len(states)}"
    return found


def main() -> None:
    parser = harness.parser(__doc__, quick="a tenth of the cases")
    add = parser.add_argument
    add("--only", choices=("cases", "compiled"), default="cases")
    add("--cases", type=int, metavar="N")
    add("--recount", action="store_true", help="compare with the newest record")
    arguments = parser.parse_args()
    if not (arguments.recount or torch.cuda.is_available()):
        parser.error("run it by the Python of `make cuda-stack`")
    set_up_process()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    share = 10 if arguments.quick else 1
    name = f"cuda_stack-{arguments.only}"
    runs = StackRuns()
    cases: Sequence[Any]
    if arguments.recount:
        path = max(harness.RESULTS.glob(f"{name}-20*.json"))
        print(f"counted: {path.name}")
        cases, measure = json.loads(path.read_text())["cases"][::share], recounted
    elif arguments.only == "cases":
        drawn = sample(arguments.cases or 120 // share)
        cases = sorted(drawn, key=lambda case: DEVICES.index(case.device))
        measure = partial(measure_case, runs=runs)
    else:
        cases = compiled_sample(arguments.cases or 40 // share)
        measure = partial(measure_compiled, runs=runs)
    try:
        harness.run(
            name,
            arguments.output,
            cases,
            measure,
            columns="case:<88 requested_default:>17.4% allocated_default:>17.4%"
            " reserved_default:>16.3% reserved_expandable:>19.3% cold:>4 at_bound:>8 above:>5"
            " seconds:>7",
            figures=summary,
            resumes=not arguments.recount,
        )
    finally:
        runs.close()


if __name__ == "__main__":
    main()
