"""Estimates, bounds and the search beside PyTorch's own CUDA allocator, on PyTorch's CUDA stack
without a device.

    make cuda-stack; .venv-cuda-stack/bin/python benchmarks/cuda_stack.py [--only
    {cases,tasks,compiled,bounds,probe,recipe,runs,ranks}] [--quick]
    [--cases N] [--settings {default,expandable}] [--lengths {fixed,varying,drawn}]
    [--recount] [--output DIR]

Each run is the recipe's own step of a model of real size, in a process whose CUDA context is new
(tests/support/stack_runs.py); no kernel computes, and memory is accounted
(docs/emulate.md). `cases`: a sample that is drawn by a seed: what the estimate
says of each number of rows, and its replay of the allocator with default and with expandable
segments, beside what PyTorch counted: bytes requested, allocated and reserved, and every segment
with its blocks. `tasks`: the same for preference pairs and distillation, with adapters and of every
weight, at the bound. `compiled`: the same for `compile: True`, with LoRA and activation budgets
among the cases, at the rows that are estimated to fit without a retry; whether these run so, and
more do not. `bounds`: the rows that are estimated to fit without a retry of the allocator beside
brute force: the most rows that run six steps so. Those of varying lengths are estimated for the
longest rows, with the headroom of the allocator's settings; `drawn` ones are of other models, with
five distributions of lengths.
`probe`: the search's bound beside brute force, and 200 steps of varying lengths at it. `recipe`: a
small model on a small device: the search, 200 steps at its bound on rows of skewed lengths, and
shares of the memory taken away and given back. `runs`: the same model, 100 times on either
settings with lengths of five kinds, four sizes of the device and five seeds: the search with its
own headroom, and 200 steps at its bound. `ranks`: estimated bounds beside brute force for a
small model that FSDP divides between two processes.

`--recount` estimates the rows of the newest records of `cases` and `compiled` again, and compares
them with what PyTorch counted then. It needs no PyTorch for CUDA, and some seconds for each case.

A case that is finished is kept in `.measure/`, and a part that was stopped resumes with the next
case (but `recipe` and `ranks`). The file is removed once the part's record is written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import cycle, product, starmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import records
import torch
from records import Finished

from adaptive_batch.__main__ import emulated_device
from adaptive_batch.estimate import (
    CONTEXT_BYTES,
    AllocatorSettings,
    CachingAllocator,
    EstimatedDevice,
    estimate_length,
    parse_devices,
)
from adaptive_batch.report import audit, read_records
from adaptive_batch.torchtune import Settings, builder_of, set_up_process
from adaptive_batch.torchtune.estimates import Estimator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.allocator_on_stack import described, segments_of
from support.cli import OURS, SmallSetup, losses, make_setup
from support.cuda_stack.squeezing import KINDS
from support.model_families import Combination
from support.stack_runs import DISTRIBUTIONS, Outcome, StackRun, StackRuns

SEED = 15
LENGTH_OF_TASKS = 1024  # of a pair both answers
LENGTHS_OF_COMPILED = (512, 1024, 4096)
STEPS, STEPS_OF_BOUNDS, STEPS_AFTER_PROBE = 3, 6, 200
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
# Of a search; the second is what `auto` leaves where segments expand.
HEADROOMS = (0.0, 0.01)
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
    print(
        f"{'case':<78} {'rows':>5} {'requested':>10} {'allocated':>10} {'reserved':>9}"
        f" {'expandable':>10} {'segments':>9} s"
    )
    for case in cases:
        entry = finished.entry(asdict(case), partial(peaks, case))
        rows_of_table.append(entry)
        if "failed" in entry:
            print(f"{case!s:<78} {entry['failed']}", flush=True)
            continue
        default, expandable = entry["default"], entry["expandable"]
        equal = "/".join("yes" if one["segments_equal"] else "no" for one in (default, expandable))
        print(
            f"{case!s:<78} {default['rows']:>5} {default['errors']['requested']:>10.4%}"
            f" {default['errors']['allocated']:>10.4%} {default['errors']['reserved']:>9.3%}"
            f" {expandable['errors']['reserved']:>10.3%} {equal:>9} {entry['seconds']}",
            flush=True,
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


WIDE = {
    "num_layers": 8,
    "embed_dim": 512,
    "intermediate_dim": 2048,
    "num_heads": 8,
    "num_kv_heads": 4,
    "max_seq_len": 512,
}
ROOMS = (3 * 2**28, 2**30, 2**31)
OF_ONE_LENGTH = (
    "dataset._component_=support.components.OfLengths",
    *(
        f"~dataset.{key}"
        for key in ("data_files", "cache_dir", "split", "column_map", "train_on_input")
    ),
    "metric_logger._component_=support.cuda_stack.squeezing.TakingAway",
    "on_out_of_memory=raise",
    "save_last_epoch_only=True",
    "epochs=1",
    "device=cuda",
)


def measure_bounds_on_ranks(folder: Path, rooms: Sequence[int]) -> list[dict[str, Any]]:
    """Bounds that are estimated for each of two ranks that have so many bytes, beside the most rows
    that run without a retry.
    """
    setup, table = make_setup(folder, **WIDE), []
    print(
        f"{'GiB':>5} {'settings':<10} {'planned':>7} {'true':>5} {'fits':>5}  at the planned rows"
    )
    length = WIDE["max_seq_len"]
    for room, (name, conf) in product(rooms, CONFS.items()):
        capacity = CONTEXT_BYTES + room
        on_stack = {
            "EMULATE_DEVICE_COUNT": 2,
            "EMULATE_COPIED_BYTES": 65536,
            "EMULATE_DEVICE": emulated_device("A100-80GB", "").setting,
            "EMULATE_CAPACITY": capacity,
            "PYTORCH_CUDA_ALLOC_CONF": conf,
        }
        os.environ |= {key: str(value) for key, value in on_stack.items()}

        @cache
        def ended(rows: int) -> str:
            lengths = f"dataset.lengths={[length] * (2 * STEPS_OF_BOUNDS * rows)}"
            try:
                output = setup.run(
                    OURS,
                    *OF_ONE_LENGTH,
                    lengths,
                    f"batch_size={rows}",
                    f"micro_batch_size={rows}",
                    ranks=2,
                ).output_dir
            except AssertionError as error:
                if "out of memory" not in str(error):
                    raise
                return "OOM"
            return "retries" if int(float(losses(output, name="retries")[-1])) else "clean"

        asked = (
            "device=cuda",
            "estimate.world_size=2",
            f"estimate.devices=[{capacity}]",
            f"estimate.sequence_lengths=[{length}]",
        )
        output = setup.run("adaptive_estimate", *asked, "estimate.changes=False").output_dir
        fit = json.loads((output / "adaptive_batch" / "estimate.json").read_text())["devices"][0][
            "lengths"
        ][0]
        planned = fit["max_batch_size"]
        entry = {
            "room": room,
            "settings": name,
            "planned": planned,
            "reserved": fit["reserved_bytes"],
        }
        entry["true"] = largest(lambda rows: ended(rows) == "clean", start=planned)
        entry["fits"] = largest(lambda rows: ended(rows) != "OOM", start=planned)
        entry["at_planned"] = ended(planned) if planned else "no row"
        table.append(entry)
        print(
            f"{room / 2**30:>5.2f} {name:<10} {planned:>7} {entry['true']:>5} {entry['fits']:>5} "
            f" {entry['at_planned']}",
            flush=True,
        )
    return table


def measure_probe(
    cases: Sequence[Case], runs: StackRuns, finished: Finished, *, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """The bound that a search finds, beside brute force of rows of one length, and steps of varying
    lengths at it.
    """

    def searched(case: Case, conf: str, headroom: float) -> dict[str, Any]:
        run = StackRun(case.combination, (), probes=STEPS_AFTER_PROBE, headroom=headroom)
        real = runs(run, case.device, conf=conf, capacity=case.found.total_bytes)
        kept = ("bound", "trials", "ooms_of_search", "steps", "retries", "ooms", "reserved")
        entry = {key: getattr(real, key) for key in kept}
        if not headroom:
            outcome = partial(run_of_bounds, runs, case, conf)
            entry["true"] = largest(lambda rows: outcome(rows).is_clean, start=real.bound)
        return entry

    table = []
    print(
        f"{'case':<78} {'settings':<10} {'headroom':>8} {'probe':>6} {'true':>5} {'trials':>7}"
        f" {'OOMs':>5} {'steps':>6} {'retries':>8} {'OOMs':>5}"
    )
    for case in cases:
        for name, headroom in product(settings, HEADROOMS):
            key = {**asdict(case), "settings": name, "headroom": headroom}
            entry = finished.entry(key, partial(searched, case, CONFS[name], headroom))
            table.append(entry)
            outcome = entry.get("failed")
            if outcome is None:
                outcome = (
                    f"{entry['bound']:>6} {entry.get('true', ''):>5} {entry['trials']:>7}"
                    f" {entry['ooms_of_search']:>5} {entry['steps']:>6} {entry['retries']:>8}"
                    f" {entry['ooms']:>5}"
                )
            print(f"{case!s:<78} {name:<10} {headroom:>8} {outcome}", flush=True)
    return table


# --- the recipe

NARROW = {"num_layers": 4, "embed_dim": 256, "intermediate_dim": 1024, "max_seq_len": 512}
ROOM, LITTLE = 3 * 2**30, 3 * 2**28
SKEWED = (
    "dataset._component_=support.cuda_stack.squeezing.skewed_rows",
    "dataset.number=40000",
    "dataset.longest=512",
    *(
        f"~dataset.{key}"
        for key in ("data_files", "cache_dir", "split", "column_map", "train_on_input")
    ),
    "metric_logger._component_=support.cuda_stack.squeezing.TakingAway",
    "max_steps_per_epoch=200",
    "epochs=1",
    "device=cuda",
    "probe.round_to_power_of_two=False",
    "use_maximum_batch_size=True",
    "save_last_epoch_only=True",
)
TAKEN = {"first": 50, "last": 100}  # steps after which memory is taken, and given back


def trained(setup: SmallSetup, room: int, *overrides: str) -> tuple[Path, list[int]]:
    """Run the recipe where it has so many bytes; return its folder, and the limit of a micro-batch
    in each step.
    """
    os.environ["EMULATE_CAPACITY"] = str(500 * 2**20 + room)
    folder = setup.run(OURS, *SKEWED, *overrides).output_dir
    limit, limits = 0, []
    for record in read_records(folder / "adaptive_batch" / "run.jsonl"):
        if record["kind"] in ("plan", "limit"):
            limit = record["limit" if record["kind"] == "plan" else "after"]
        elif record["kind"] == "step":
            limits.append(limit)
    return folder, limits


def measure_recipe(folder: Path, runs: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """The probe and what it leads to: steps at its bound; and with shares of the memory taken away
    and given back.
    """
    setup, table = make_setup(folder, **NARROW), []
    print(
        f"{'GiB':>5} {'taken':>6} {'bound':>6} {'trials':>7} {'OOMs':>5} {'steps':>6}"
        f" {'retries':>8} {'OOMs':>5} {'problems':>9}  rows at once: before it was given back, at"
        " the end, steps until nine tenths and all of the bound"
    )
    for room, share in runs:
        taking = [f"metric_logger.{key}={value}" for key, value in TAKEN.items()] if share else []
        output, limits = trained(
            setup, room, *taking, *([f"metric_logger.share={share}"] if share else [])
        )
        probe = json.loads((output / "adaptive_batch" / "probe.json").read_text())
        retries, ooms = (
            [int(float(number)) for number in losses(output, name=name)]
            for name in ("retries", "ooms")
        )
        bound, after = probe["max_batch_size"], limits[TAKEN["last"] :]
        entry = {
            "room": room,
            "taken": share,
            "bound": bound,
            "trials": len(probe["trials"]),
            "ooms_of_probe": sum(
                not (trial["fits"] or trial["retried"]) for trial in probe["trials"]
            ),
            "steps": len(limits),
            "retries": retries[-1] - retries[0],
            "ooms": ooms[-1] - ooms[0],
            "problems": list(audit(output).problems),
            "limits": limits,
            "steps_until_nine_tenths": next(
                (n for n, rows in enumerate(after) if rows >= 0.9 * bound), None
            ),
            "steps_until_all": next((n for n, rows in enumerate(after) if rows == bound), None),
        }
        table.append(entry)
        print(
            f"{room / 2**30:>5.2f} {share:>6.0%} {entry['bound']:>6} {entry['trials']:>7}"
            f" {entry['ooms_of_probe']:>5} {entry['steps']:>6} {entry['retries']:>8}"
            f" {entry['ooms']:>5} {len(entry['problems']):>9}  {limits[TAKEN['last'] - 1]},"
            f" {limits[-1]}, {entry['steps_until_nine_tenths']}, {entry['steps_until_all']}",
            flush=True,
        )
    return table


SEEDS, ROOMS_OF_RUNS = 5, (0.75, 1.0, 1.5, 3.0)  # GiB


def measure_runs(
    folder: Path, finished: Finished, *, number: int, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """What the recipe's own headroom leaves and costs: 200 steps at the bound, of that many runs
    with each of the settings.
    """
    setup, table = make_setup(folder, **NARROW), []
    cases = list(product(KINDS, ROOMS_OF_RUNS, range(SEEDS)))
    # Any number of the first is a sample of all.
    random.Random(SEED).shuffle(cases)

    def steps_at_the_bound(name: str, kind: str, room: float, seed: int) -> dict[str, Any]:
        # Recipes ask for segments that expand where the variable is not there.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = CONFS[name]
        output, _ = trained(
            setup,
            int(room * 2**30),
            f"dataset.kind={kind}",
            f"dataset.seed={seed}",
            "log_peak_memory_stats=True",
        )
        probe = json.loads((output / "adaptive_batch" / "probe.json").read_text())
        counts = {
            name: [int(float(number)) for number in losses(output, name=name)]
            for name in ("retries", "ooms")
        }
        peaks = [float(peak) for peak in losses(output, name="peak_memory_alloc")]
        return {
            "bound": probe["max_batch_size"],
            "trials": len(probe["trials"]),
            "retries": counts["retries"][-1] - counts["retries"][0],
            "ooms": counts["ooms"][-1] - counts["ooms"][0],
            "peak": max(peaks) / room,
        }

    print(
        f"{'settings':<10} {'lengths':<20} {'GiB':>5} {'seed':>5} {'bound':>6} {'retries':>8}"
        f" {'OOMs':>5} peak/room"
    )
    for name, (kind, room, seed) in product(settings, cases[:number]):
        key = {"settings": name, "kind": kind, "room": room, "seed": seed}
        entry = finished.entry(key, partial(steps_at_the_bound, name, kind, room, seed))
        table.append(entry)
        outcome = entry.get("failed")
        if outcome is None:
            outcome = (
                f"{entry['bound']:>6} {entry['retries']:>8} {entry['ooms']:>5} {entry['peak']:.3f}"
            )
        print(f"{name:<10} {kind:<20} {room:>5.2f} {seed:>5} {outcome}", flush=True)
    return table


PARTS = ("cases", "tasks", "compiled", "bounds", "probe", "recipe", "runs", "ranks")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one of the parts")
    parser.add_argument("--quick", action="store_true", help="a tenth of the cases")
    parser.add_argument(
        "--cases", type=int, metavar="N", help="of cases, compiled steps, bounds and runs"
    )
    parser.add_argument("--settings", choices=CONFS, help="of bounds, probe and runs: one of two")
    parser.add_argument("--lengths", choices=KINDS_OF_LENGTHS, help="of bounds: one kind")
    parser.add_argument("--recount", action="store_true", help="compare with the newest records")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    if not (arguments.recount or torch.cuda.is_available()):
        parser.error("run it by the Python of `make cuda-stack`")
    set_up_process()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    if arguments.recount:
        for part in [arguments.only] if arguments.only else ["cases", "compiled"]:
            recounted = recount(part, 10 if arguments.quick else 1)
            records.write(f"cuda_stack-{part}", arguments.output, **{part: recounted})
        return
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Measure the parts that are asked for, and write their record."""
    share = 10 if arguments.quick else 1
    settings = [arguments.settings] if arguments.settings else list(CONFS)
    runs, parts = StackRuns(), {}
    kept: dict[str, Finished] = {}

    def finished(part: str) -> Finished:
        kept[part] = Finished(f"cuda_stack-{part}")
        return kept[part]

    try:
        if arguments.only in (None, "cases"):
            cases = measure_cases(
                by_device(sample(arguments.cases or 120 // share)), runs, finished("cases")
            )
            parts["cases"] = {"seed": SEED, "summary": summarised(cases), "cases": cases}
            print()
        if arguments.only in (None, "tasks"):
            cases = measure_cases(by_device(tasks()[::share]), runs, finished("tasks"))
            parts["tasks"] = {"summary": summarised(cases), "cases": cases}
            print()
        if arguments.only in (None, "compiled"):
            number = arguments.cases or 40 // share
            cases = measure_compiled(compiled_sample(number), runs, finished("compiled"))
            parts["compiled"] = {"seed": SEED, "cases": cases}
            print()
        if arguments.only in (None, "bounds"):
            number = arguments.cases or 40 // share
            kinds = [arguments.lengths] if arguments.lengths else KINDS_OF_LENGTHS
            cases = bound_cases(number, settings, kinds)
            parts["bounds"] = measure_bounds(cases, runs, finished("bounds"))
            print()
        if arguments.only in (None, "probe"):
            cases = by_device(sample(20 // share, rows=("bound",)))
            parts["probe"] = measure_probe(cases, runs, finished("probe"), settings=settings)
            print()
        if arguments.only in (None, "recipe"):
            with tempfile.TemporaryDirectory() as folder:
                shares = (0.35,) if arguments.quick else (0.0, 0.1, 0.35, 0.6)
                pairs = [(room, share) for room in (ROOM, LITTLE) for share in shares]
                parts["recipe"] = measure_recipe(Path(folder), pairs)
        if arguments.only in (None, "runs"):
            with tempfile.TemporaryDirectory() as folder:
                number = arguments.cases or 100 // share
                parts["runs"] = measure_runs(
                    Path(folder), finished("runs"), number=number, settings=settings
                )
        if arguments.only in (None, "ranks"):
            with tempfile.TemporaryDirectory() as folder:
                parts["ranks"] = measure_bounds_on_ranks(
                    Path(folder), ROOMS[:1] if arguments.quick else ROOMS
                )
    finally:
        runs.close()
    name = f"cuda_stack-{arguments.only}" if arguments.only else "cuda_stack"
    name += "".join(f"_{option}" for option in (arguments.lengths, arguments.settings) if option)
    records.write(name, arguments.output, **parts)
    for part in kept.values():
        part.forget()


def by_device(cases: Sequence[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: DEVICES.index(case.device))


if __name__ == "__main__":
    main()
