"""Estimates and bounds beside PyTorch's own CUDA allocator, on PyTorch's CUDA stack without a
device.

    make cuda-stack; .venv-cuda-stack/bin/python benchmarks/cuda_stack.py
    [--only {cases,tasks,compiled,bounds}] [--quick] [--cases N] [--settings {default,expandable}]
    [--lengths {fixed,varying,drawn}] [--recount] [--output DIR]

Each run is the recipe's own step of a model of real size, in a process whose CUDA context is new
(tests/support/stack_runs.py); no kernel computes, and memory is accounted
(docs/without_a_gpu.md). `cases`: a sample that is drawn by a seed: what the estimate
says of each number of rows, and its replay of the allocator with default and with expandable
segments, beside what PyTorch counted: bytes requested, allocated and reserved, and every segment
with its blocks. `tasks`: the same for preference pairs and distillation, with adapters and of every
weight, at the bound. `compiled`: the same for `compile: True`, with LoRA and activation budgets
among the cases, at the rows that are estimated to fit without a retry; whether these run so, and
more do not. `bounds`: the rows that are estimated to fit without a retry of the allocator beside
brute force: the most rows that run six steps so. Those of varying lengths are estimated for the
longest rows, with the headroom of the allocator's settings; `drawn` ones are of other models, with
five distributions of lengths.

`--recount` estimates the rows of the newest records of `cases` and `compiled` again, and compares
them with what PyTorch counted then. It needs no PyTorch for CUDA, and some seconds for each case.

Each part has its own record. A case that is finished is kept in `.measure/`, and a part that was
stopped resumes with the next case. The file is removed once the part's record is written.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, product, starmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import records
import torch
from records import Finished

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
from support.stack_runs import DISTRIBUTIONS, Outcome, StackRun, StackRuns

SEED = 15
LENGTH_OF_TASKS = 1024  # of a pair both answers
LENGTHS_OF_COMPILED = (512, 1024, 4096)
STEPS, STEPS_OF_BOUNDS = 3, 6
CONFS = {"default": "", "expandable": "expandable_segments:True"}
KINDS_OF_PEAKS = ("requested", "allocated", "reserved")
KINDS_OF_LENGTHS = ("fixed", "varying", "drawn")
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
OTHER_PARAMETERS = {  # of models that are drawn with a distribution of lengths
    "qwen2_5_1_5b": 1.54,
    "gemma_2b": 2.51,
    "qwen2_5_3b": 3.09,
    "phi3_mini": 3.82,
    "llama2_7b": 6.74,
    "mistral_7b": 7.24,
}
LONGEST_OF_OTHERS = 4096  # what all of them take
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


def sample(
    number: int,
    *,
    rows: Sequence[int | str] = (1, 2, "bound"),
    parameters: Mapping[str, float] = PARAMETERS,
    longest: int = 8192,
) -> list[Case]:
    """Draw that many different cases whose optimizer's step fits."""
    draw, cases = random.Random(SEED), dict[Case, None]()
    while len(cases) < number:
        model, dtype = draw.choice(list(parameters)), draw.choice(["bf16", "fp32"])
        length = round(math.exp(draw.uniform(math.log(200), math.log(longest))))
        checkpointing = draw.choice(["", "checkpointing"])
        loss = "plain" if model == "gemma2_2b" else "chunked"  # it has no chunks of outputs
        combination = Combination(model, length, "AdamW", loss, checkpointing, dtype, device="cuda")
        case = Case(combination, draw.choice(DEVICES), draw.choice(rows))
        held = COPIES * parameters[model] * 1e9 * (2 if dtype == "bf16" else 4)
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


class BoundCase(NamedTuple):
    """A bound: of which case, with which settings, for which lengths ("fixed", "varying" or a name
    of DISTRIBUTIONS).
    """

    case: Case
    settings: str
    lengths: str


def bound_cases(number: int, settings: Sequence[str], kinds: Sequence[str]) -> Iterator[BoundCase]:
    """Yield bounds of that many cases of each kind of lengths; of drawn ones each of another model,
    with one of the settings and the next distribution.
    """
    of_one_length = [kind for kind in kinds if kind != "drawn"]
    cases = by_device(sample(number, rows=("bound",)))
    yield from starmap(BoundCase, product(cases, settings, of_one_length))
    if "drawn" in kinds:
        others = sample(
            number, rows=("bound",), parameters=OTHER_PARAMETERS, longest=LONGEST_OF_OTHERS
        )
        yield from map(BoundCase, others, cycle(settings), cycle(DISTRIBUTIONS))


def tasks() -> list[Case]:
    """Preference pairs and distillation of whole models, on devices that hold a step of theirs."""
    devices = {  # with adapters, and of every weight
        "llama3_2_1b": ("RTX4090", "A100-40GB"),
        "llama3_2_3b": ("A100-40GB", "H100"),
        "llama3_1_8b": ("H100", "B200"),
    }
    cases = []
    for task, (model, pair) in product(("DPO", "distillation"), devices.items()):
        for adapters, device in zip((True, False), pair, strict=True):
            combination = Combination(
                model,
                LENGTH_OF_TASKS,
                loss="chunked",
                checkpointing="" if model == "llama3_2_1b" else "checkpointing",
                dtype="bf16",
                device="cuda",
                task=task,
                adapters=adapters,
            )
            cases.append(Case(combination, device, "bound"))
    packed = [
        replace(case, combination=replace(case.combination, layout="packed")) for case in cases[:2]
    ]
    return [*cases, *packed]


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

    def bound(self, conf: str, kind: str = "fixed") -> int:
        """Return the estimate's most rows that run without a retry; where lengths vary, with the
        headroom of the settings.
        """
        headroom = 0.0
        if kind != "fixed":
            headroom = 0.01 if conf else 0.05
        _, (fit,) = estimate_length(
            self._step._step,
            self._length,
            [self.device.target(context_bytes=self._context_bytes, headroom=headroom)],
            maximum=4096,
            forward_backward=self._run,
            allocator=AllocatorSettings(expandable_segments=bool(conf)),
        )
        rows: int = fit.max_batch_size
        return rows


def largest(fits: Callable[[int], bool], *, start: int = 1) -> int:
    """Return the most rows that fit: from `start` on in growing steps, then between; 0 for none."""
    known: dict[int, bool] = {0: True}

    def asked(rows: int) -> bool:
        if rows not in known:
            known[rows] = fits(rows)
        return known[rows]

    low, high, step = 0, None, 1
    rows = max(1, start)
    while high is None or high - low > 1:
        if asked(rows):
            low = max(low, rows)
        else:
            high = rows if high is None else min(high, rows)
        if high is None:
            rows, step = low + step, 2 * step
        elif low == 0 and high > 1:
            rows, step = max(1, high - step), 2 * step
        else:
            rows = (low + high) // 2
    return low


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
    table = records.Table(
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

    def at_the_bound(case: Case) -> dict[str, Any]:
        with Estimated(case).opened() as estimated:
            rows = max(1, estimated.bound(""))
            peaks = peaks_of(estimated.replayed(rows, ""), margin=estimated.margin)
            # What the estimate compiled is not what the run does.
            torch.compiler.reset()
        # The first run fills Inductor's cache, and may tune kernels beside the step.
        cold, real = (run_of_bounds(runs, case, "", rows) for _ in range(2))
        more = run_of_bounds(runs, case, "", math.ceil(1.03 * rows) + 2)
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
    path = max(records.RESULTS.glob(f"cuda_stack-{part}-*.json"))
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


# --- bounds


def steps_of_bounds(combination: Combination, rows: int, kind: str) -> StackRun:
    """Return steps of that many rows, of one length or of lengths of a kind."""
    if kind == "fixed":
        return StackRun.fixed(combination, rows, steps=STEPS_OF_BOUNDS)
    distribution = "" if kind == "varying" else kind
    return StackRun.varying(combination, rows, steps=STEPS_OF_BOUNDS, distribution=distribution)


def run_of_bounds(
    runs: StackRuns, case: Case, conf: str, rows: int, kind: str = "fixed"
) -> Outcome:
    run = steps_of_bounds(case.combination, rows, kind)
    return runs(run, case.device, conf=conf, capacity=case.found.total_bytes)


def measure_bounds(
    cases: Iterable[BoundCase], runs: StackRuns, finished: Finished
) -> list[dict[str, Any]]:
    """Bounds that are estimated, beside the most rows that run without a retry, and what the
    estimate's rows do.
    """

    def bounds(case: Case, conf: str, kind: str) -> dict[str, Any]:
        with Estimated(case).opened() as estimated:
            planned = estimated.bound(conf, kind)
        outcome = partial(run_of_bounds, runs, case, conf, kind=kind)
        true = largest(lambda rows: outcome(rows).is_clean, start=planned)
        entry = {"planned": planned, "true": true, "at_planned": "no row"}
        if planned:
            real = outcome(planned)
            entry["at_planned"] = "OOM" if real.ooms else "retries" if real.retries else "clean"
        return entry

    table = []
    print(
        f"{'case':<78} {'settings':<10} {'lengths':<14} {'planned':>7} {'true':>5}  at the planned"
        " rows"
    )
    for case, name, kind in cases:
        key = {**asdict(case), "settings": name, "lengths": kind}
        entry = finished.entry(key, partial(bounds, case, CONFS[name], kind))
        table.append(entry)
        outcome = entry.get("failed")
        if outcome is None:
            outcome = (
                f"{entry['planned']:>7} {entry['true']:>5}  {entry['at_planned']}"
                f" {entry['seconds']} s"
            )
        print(f"{case!s:<78} {name:<10} {kind:<14} {outcome}", flush=True)
    done = [entry for entry in table if "failed" not in entry]
    for name, kind in sorted({(entry["settings"], entry["lengths"]) for entry in done}):
        these = [entry for entry in done if (entry["settings"], entry["lengths"]) == (name, kind)]
        equal = sum(entry["planned"] == entry["true"] for entry in these)
        bad = sum(entry["at_planned"] in ("OOM", "retries") for entry in these)
        print(
            f"{name}, {kind}: equal in {equal} of {len(these)}; OOM or retries at the planned rows"
            f" in {bad}"
        )
    return table


PARTS = ("cases", "tasks", "compiled", "bounds")


def main() -> None:
    parser = records.parser(__doc__, quick="a tenth of the cases")
    add = parser.add_argument
    add("--only", nargs=1, choices=PARTS, default=PARTS, help="one of the parts")
    add("--cases", type=int, metavar="N", help="of cases, compiled steps and bounds")
    add("--settings", nargs=1, choices=CONFS, default=[*CONFS], help="of bounds: one of two")
    add("--lengths", nargs=1, choices=KINDS_OF_LENGTHS, default=KINDS_OF_LENGTHS, help="of bounds")
    add("--recount", action="store_true", help="compare with the newest records")
    arguments = parser.parse_args()
    if not (arguments.recount or torch.cuda.is_available()):
        parser.error("run it by the Python of `make cuda-stack`")
    set_up_process()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    share = 10 if arguments.quick else 1
    if arguments.recount:
        for part in ("cases", "compiled") if arguments.only == PARTS else arguments.only:
            records.write(f"cuda_stack-{part}", arguments.output, **{part: recount(part, share)})
        return
    runs = StackRuns()
    try:
        for part in arguments.only:
            finished = Finished(f"cuda_stack-{part}")
            measured = measure(part, arguments, share, runs, finished)
            records.write(f"cuda_stack-{part}", arguments.output, **{part: measured})
            finished.forget()
    finally:
        runs.close()


def measure(
    part: str, arguments: argparse.Namespace, share: int, runs: StackRuns, finished: Finished
) -> Any:
    """Measure a part; with a share of 10 a tenth of its cases."""
    if part == "compiled":
        drawn = compiled_sample(arguments.cases or 40 // share)
        return {"seed": SEED, "cases": measure_compiled(drawn, runs, finished)}
    if part == "bounds":
        number = arguments.cases or 40 // share
        bounds = bound_cases(number, arguments.settings, arguments.lengths)
        return measure_bounds(bounds, runs, finished)
    drawn = tasks()[::share] if part == "tasks" else sample(arguments.cases or 120 // share)
    cases = measure_cases(by_device(drawn), runs, finished)
    return {"seed": SEED, "summary": summarised(cases), "cases": cases}


def by_device(cases: Sequence[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: list(DEVICES).index(case.device))


if __name__ == "__main__":
    main()
