"""Estimates beside PyTorch's own CUDA allocator, which runs on an emulated device.

    make cuda-stack; .venv-cuda-stack/bin/python benchmarks/cuda_stack.py
    [--only {cases,compiled}] [--quick] [--cases N] [--recount] [--output DIR]

Each run is the recipe's own step of a model of real size, in a process with a new CUDA context
(tests/support/stack_runs.py); no kernel computes, and memory is accounted (docs/without_a_gpu.md).
`cases` are drawn with a fixed seed: the estimate for each number of rows, and its replay of the
allocator with default and with expandable segments, beside the bytes that PyTorch requested,
allocated and reserved, and every segment with its blocks. `compiled` is the same for
`compile: True`, with LoRA and activation budgets among the cases: whether the rows that are
estimated to fit run without a retry, and whether more rows do not.

`--recount` estimates the rows of the newest records again, and compares them with the bytes that
PyTorch counted then. It does not need PyTorch's CUDA build, and takes some seconds for each case.

Each part has its own record. A finished case is kept in `.measure/`, and an interrupted part
resumes with the next case.
"""

from __future__ import annotations

import json
import math
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import harness
import torch
from harness import Finished

from adaptive_batch.estimate import (
    CONTEXT_BYTES,
    AllocatorSettings,
    CachingAllocator,
    EstimatedDevice,
    estimate_length,
    parse_devices,
)
from adaptive_batch.torchtune import Settings, builder_of, set_up_process
from adaptive_batch.torchtune.estimates import Estimator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.allocator_on_stack import described, segments_of
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
        checkpointing = draw.choice(["", "checkpointing"])
        loss = "plain" if model == "gemma2_2b" else "chunked"  # it has no chunks of outputs
        combination = Combination(model, length, "AdamW", loss, checkpointing, dtype, device="cuda")
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
    # What is computed again in backward: nothing, each layer, or what a budget says.
    recomputing = 2 * [("", 1.0), ("checkpointing", 1.0)] + [("", 0.5), ("", 0.2)]
    draw = random.Random(SEED)
    cases = dict[Case, None]()
    while len(cases) < number:
        model = draw.choice(models)
        dtype = draw.choice(["bf16", "bf16", "fp32"])
        checkpointing, budget = draw.choice(recomputing)
        combination = Combination(
            model,
            draw.choice(LENGTHS_OF_COMPILED),
            "AdamW",
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
    """The estimate of a combination on a device, and what it says that the allocator is
    asked for.
    """

    def __init__(self, case: Case, *, context_bytes: int = CONTEXT_BYTES) -> None:
        self.device = case.found
        self._context_bytes = context_bytes
        self.budget_bytes = self.device.total_bytes - context_bytes
        self._cfg = case.combination.to_estimate(
            devices=[case.device], context=context_bytes, changes=False
        )
        self._combination, self._length = case.combination, case.combination.length
        self._logs: dict[int, Sequence[int]] = {}

    @contextmanager
    def opened(self) -> Iterator[Estimated]:
        """Inside, logs can be had."""
        settings = Settings.from_config(self._cfg)
        estimator = Estimator(self._cfg, settings, [self.device], builder_of(self._cfg))
        with estimator._step(self._cfg, [self._length], 1, self.device) as step:
            self._step = step
            self._run = step.run.forward_backward(step._rows[self._length][0])
            yield self

    @property
    def margin(self) -> float:
        """Share that is added to the peak of a compiled step."""
        margin: float = self._step._step.margin
        return margin

    def log(self, rows: int) -> Sequence[int]:
        if rows not in self._logs:
            step = self._step._step
            # As an estimate traces the rows that it says fit.
            step.trace(rows, forward_backward=self._run)
            self._logs[rows] = step.log(rows, forward_backward=self._run, num_steps=STEPS)
        return self._logs[rows]

    def replayed(
        self, rows: int, conf: str, *, budget_bytes: int | None = None
    ) -> CachingAllocator:
        """Return the allocator after the steps, or as it was when it ran out of memory."""
        settings = AllocatorSettings(expandable_segments=bool(conf))
        capacity = self.budget_bytes if budget_bytes is None else budget_bytes
        allocator = CachingAllocator(capacity, settings, total_bytes=self.device.total_bytes)
        with suppress(torch.OutOfMemoryError):
            allocator.replay(self.log(rows))
        return allocator

    def bound(self, conf: str) -> int:
        """Return the estimate's most rows that run without a retry."""
        _, (fit,) = estimate_length(
            self._step._step,
            self._length,
            [self.device.target(context_bytes=self._context_bytes, headroom=0.0)],
            maximum=4096,
            forward_backward=self._run,
            allocator=AllocatorSettings(expandable_segments=bool(conf)),
        )
        rows: int = fit.max_batch_size
        return rows


# --- cases


def measure_cases(
    cases: Sequence[Case], runs: StackRuns, finished: Finished
) -> list[dict[str, Any]]:
    """Peaks and segments of each case, estimated and counted."""

    def peaks(case: Case) -> dict[str, Any]:
        entry = {}
        with Estimated(case).opened() as estimated:
            for name, conf in CONFS.items():
                rows = estimated.bound(conf) if case.rows == "bound" else int(case.rows)
                rows = max(1, rows)
                run = StackRun.fixed(case.combination, rows, steps=STEPS)
                real = runs(run, case.device, conf=conf, capacity=case.found.total_bytes)
                entry[name] = compared(peaks_of(estimated.replayed(rows, conf)), real) | {
                    "rows": rows
                }
        return entry

    rows_of_table = []
    table = harness.Table(
        "case:<78 rows:>5 requested:>10.4% allocated:>10.4% reserved:>9.3% expandable:>10.3%"
        " segments:>9 seconds:>8"
    )
    for case in cases:
        entry = finished.entry(asdict(case), partial(peaks, case))
        rows_of_table.append(entry)
        if "failed" in entry:
            print(f"{case!s:<78} {entry['failed']}", flush=True)
            continue
        default, expandable = entry["default"], entry["expandable"]
        equal = "/".join("yes" if one["segments_equal"] else "no" for one in (default, expandable))
        table.print(
            {**default["errors"], "rows": default["rows"], "seconds": entry["seconds"]},
            case=str(case),
            expandable=expandable["errors"]["reserved"],
            segments=equal,
        )
    summary = summarised(rows_of_table)
    print("\n" + "\n".join(f"{name}: {value}" for name, value in summary.items()))
    return rows_of_table


def peaks_of(allocator: CachingAllocator, *, margin: float = 0.0) -> dict[str, Any]:
    """What is estimated by the end of a replay, a margin included."""
    return {
        "estimate": {
            "requested": int((1 + margin) * allocator.peak_requested_bytes),
            "allocated": int((1 + margin) * allocator.peak_allocated_bytes),
            "reserved": int((1 + margin) * allocator.peak_reserved_bytes),
            "retries": allocator.num_retries,
            "ooms": allocator.num_ooms,
        },
        "segments": described(segments_of(allocator)),
    }


def compared(estimated: Mapping[str, Any], real: Outcome) -> dict[str, Any]:
    """What was estimated, by :func:`peaks_of`, and what was counted, with errors above 0 where the
    estimate is too high.
    """
    estimate, own_segments = estimated["estimate"], estimated["segments"]
    counted = {name: getattr(real, name) for name in estimate}
    real_end = (real.retries, bool(real.ooms))
    estimated_end = (estimate["retries"], bool(estimate["ooms"]))
    return {
        "estimate": estimate,
        "counted": counted,
        "errors": {
            name: estimate[name] / counted[name] - 1
            for name in ("requested", "allocated", "reserved")
        },
        "segments_equal": (of_segments(own_segments) == of_segments(real.segments)),
        "blocks_equal": of_blocks(own_segments) == of_blocks(real.segments),
        "large_segments_equal": (
            of_blocks(own_segments, "large") == of_blocks(real.segments, "large")
        ),
        "same_end": real_end == estimated_end,
    }


def of_segments(segments: Sequence[Any]) -> list[Any]:
    """Sizes and pools of segments, the newest last."""
    return [[one[1], one[6]] for one in segments]


def of_blocks(segments: Sequence[Any], pool: str = "") -> list[Any]:
    """Segments with their blocks, the newest last, without where they are; of one pool,
    or of both.
    """
    return [
        [one[1], one[6], [block[:2] for block in one[-1]]]
        for one in segments
        if pool in ("", one[6])
    ]


def summarised(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The worst errors, and shares that are equal."""
    done = [case for case in cases if "failed" not in case]
    summary: dict[str, Any] = {"cases": len(cases), "failed": len(cases) - len(done)}
    for name in CONFS if done else ():
        for kind in ("requested", "allocated", "reserved"):
            errors = [abs(case[name]["errors"][kind]) for case in done]
            within = {"requested": 1e-4, "allocated": 1e-3, "reserved": 5e-3}[kind]
            share = sum(error <= within for error in errors) / len(errors)
            worst, middle = max(errors), median(errors)
            summary[f"{kind}, {name}"] = (
                f"within {within:.2%} in {share:.1%}, median {middle:.4%}, worst {worst:.3%}"
            )
        equal = sum(case[name]["segments_equal"] for case in done) / len(done)
        blocks = sum(case[name]["blocks_equal"] for case in done) / len(done)
        large = sum(case[name]["large_segments_equal"] for case in done) / len(done)
        same = sum(case[name]["same_end"] for case in done) / len(done)
        summary[f"segments, {name}"] = (
            f"equal in {equal:.1%}, with every block in {blocks:.1%}, with every block above 1 MiB"
            f" in {large:.1%}; the same retries, and fit or not, in {same:.1%}"
        )
    return summary


# --- compiled


def measure_compiled(
    cases: Sequence[Case], runs: StackRuns, finished: Finished
) -> list[dict[str, Any]]:
    """Peaks of compiled steps at the bound, estimated and counted with a warm cache of Inductor;
    whether the bound runs without a retry, with a cold cache too, and 3% and two rows more do not.
    """

    def ran(case: Case, rows: int) -> Outcome:
        run = StackRun.fixed(case.combination, rows, steps=STEPS_OF_COMPILED)
        return runs(run, case.device, conf="", capacity=case.found.total_bytes)

    def at_the_bound(case: Case) -> dict[str, Any]:
        with Estimated(case).opened() as estimated:
            rows = max(1, estimated.bound(""))
            peaks = peaks_of(estimated.replayed(rows, ""), margin=estimated.margin)
            # What the estimate compiled is not what the run does.
            torch.compiler.reset()
        # The first run fills Inductor's cache, and may tune kernels beside the step.
        cold, real = (ran(case, rows) for _ in range(2))
        more = ran(case, math.ceil(1.03 * rows) + 2)
        states = {"cold": cold.is_clean, "at_bound": real.is_clean, "above": more.is_clean}
        return compared(peaks, real) | {"rows": rows} | states

    table = []
    print(f"{'case':<88} {'rows':>5} {'requested':>10} {'reserved':>9}  at the bound, above it, s")
    clean = {True: "clean", False: "not clean"}
    for case in cases:
        entry = finished.entry(asdict(case), partial(at_the_bound, case))
        table.append(entry)
        if "failed" in entry:
            print(f"{case!s:<88} {entry['failed']}", flush=True)
            continue
        print(
            f"{case!s:<88} {entry['rows']:>5} {entry['errors']['requested']:>10.3%}"
            f" {entry['errors']['reserved']:>9.2%}  {clean[entry['at_bound']]},"
            f" {clean[entry['above']]}, {entry['seconds']}",
            flush=True,
        )
    done = [entry for entry in table if "failed" not in entry]
    for kind in ("requested", "reserved") if done else ():
        errors = [abs(entry["errors"][kind]) for entry in done]
        print(f"{kind}: median {median(errors):.3%}, worst {max(errors):.2%}")
    at_bound = sum(entry["at_bound"] for entry in done)
    cold = sum(entry["cold"] for entry in done)
    above = sum(not entry["above"] for entry in done)
    print(
        f"the bound runs without a retry in {at_bound} of {len(done)}, with a cold cache in {cold};"
        f" more does not in {above}"
    )
    return table


# --- earlier counts


def recount(part: str, every: int) -> dict[str, Any]:
    """Estimate the rows of the newest record of a part again, and compare the estimates with what
    PyTorch counted then.
    """
    path = max(harness.RESULTS.glob(f"cuda_stack-{part}-*.json"))
    earlier = json.loads(path.read_text())[part]["cases"][::every]
    print(f"counted: {path.name}")
    table = []
    for old in earlier:
        case = Case(Combination(**old["combination"]), old["device"], "bound")
        entry = {key: old[key] for key in ("combination", "device")}
        with Estimated(case).opened() as estimated:
            for name, conf in CONFS.items():
                if name not in old and (name != "default" or "counted" not in old):
                    continue
                one = old.get(name, old)
                counted, rows = one["counted"], one["rows"]
                estimated.log(rows)
                # An upper bound can pass what the device has, where the run did not.
                is_bound = estimated.margin and not counted["ooms"]
                capacity = 2**50 if is_bound else estimated.budget_bytes
                replayed = estimated.replayed(rows, conf, budget_bytes=capacity)
                estimate = peaks_of(replayed, margin=estimated.margin)["estimate"]
                errors = {kind: estimate[kind] / counted[kind] - 1 for kind in KINDS_OF_PEAKS}
                entry[name] = {
                    "rows": rows,
                    "estimate": estimate,
                    "counted": counted,
                    "errors": errors,
                    "budget": estimated.budget_bytes,
                }
                shown = " ".join(f"{error:>+9.3%}" for error in errors.values())
                print(f"{case!s:<88} {name:<10} {rows:>4} {shown}", flush=True)
        torch.compiler.reset()
        table.append(entry)
    summary = {}
    for name, kind in product(CONFS, KINDS_OF_PEAKS):
        errors = sorted(entry[name]["errors"][kind] for entry in table if name in entry)
        if errors:
            within = sorted(map(abs, errors))
            summary[f"{kind}, {name}"] = (
                f"lowest {errors[0]:+.4%}, median {median(errors):+.4%}, highest {errors[-1]:+.4%},"
                f" 95% within {within[math.ceil(0.95 * len(within)) - 1]:.4%}"
            )
    print("\n" + "\n".join(f"{name}: {value}" for name, value in summary.items()))
    return {"counted": path.name, "summary": summary, "cases": table}


PARTS = ("cases", "compiled")


def main() -> None:
    parser = harness.parser(__doc__, quick="a tenth of the cases")
    add = parser.add_argument
    add("--only", nargs=1, choices=PARTS, default=PARTS, help="one of the parts")
    add("--cases", type=int, metavar="N", help="of each part")
    add("--recount", action="store_true", help="compare with the newest records")
    arguments = parser.parse_args()
    if not (arguments.recount or torch.cuda.is_available()):
        parser.error("run it by the Python of `make cuda-stack`")
    set_up_process()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    share = 10 if arguments.quick else 1
    if arguments.recount:
        for part in arguments.only:
            harness.write(f"cuda_stack-{part}", arguments.output, **{part: recount(part, share)})
        return
    runs = StackRuns()
    try:
        for part in arguments.only:
            finished = Finished(f"cuda_stack-{part}")
            measured: dict[str, Any]
            if part == "cases":
                drawn = by_device(sample(arguments.cases or 120 // share))
                cases = measure_cases(drawn, runs, finished)
                measured = {"summary": summarised(cases), "cases": cases}
            else:
                compiled = compiled_sample(arguments.cases or 40 // share)
                measured = {"cases": measure_compiled(compiled, runs, finished)}
            measured["seed"] = SEED
            harness.write(f"cuda_stack-{part}", arguments.output, **{part: measured})
            finished.forget()
    finally:
        runs.close()


def by_device(cases: Sequence[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: list(DEVICES).index(case.device))


if __name__ == "__main__":
    main()
