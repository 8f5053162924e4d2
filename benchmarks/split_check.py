"""AdaptiveStep refuses splits that change the gradient, and accepts the others.

    python benchmarks/split_check.py [--quick] [--seeds N] [--only NAME ...] [--output DIR]

Each setup of split_setups.py runs in three states (fresh, with a head of zeros, after 50 steps), in
float32, with autocast to bfloat16 and with weights in bfloat16, with several seeds. An AdaptiveStep
with `micro_batch_size=4` runs three batches of 16 rows at the same weights; its refusals and log
lines are counted. `harm` is measured without the library, in float32: the sum of the gradients of
four parts, each with its share of labels, minus the gradient of the whole, relative to its norm.

A wrong setup is missed if the harm of a batch exceeds a bound and the batch was trained, with at
least half of that harm in the gradients that the step left. A correct setup that trained is off
if these gradients differ from the whole's by more than 0.1% in float32. Losses that draw random
numbers have no such difference: they are correct by construction.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import harness
import torch
from split_setups import CORRECT, ROWS, WRONG, Setup
from torch import nn

from adaptive_batch import AdaptiveStep, SettingError, SplitBatch
from adaptive_batch.training import Part

STATES = ("fresh", "zero head", "trained")
DTYPES = ("float32", "autocast", "bfloat16")
PART_ROWS = 4
NUM_BATCHES = 3
STEPS = 50
BOUND = 0.01
OFF = 1e-3
NOT_COMPARED = re.compile(r"cannot (be )?compare|not (be )?compared|is not known")


# --- gradients without the library


def to_dtype(batch: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a batch with its floating-point tensors in a dtype."""
    return {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()
    }


def add_gradients(
    setup: Setup,
    model: nn.Module,
    batch: Any,
    share: float,
    sums: Mapping[str, Any],
    autocast: bool,
) -> None:
    """Run forward and backward of a part."""
    batch = to_dtype(batch, next(model.parameters()).dtype)
    more = (sums,) if "statistics" in setup.arguments else ()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = setup.loss(model, SimpleNamespace(**batch), *more)
    if not isinstance(losses, tuple):
        losses = (losses,)
    for number, loss in enumerate(losses, start=1):
        scaled = loss * share if setup.has_share else loss
        scaled.backward(retain_graph=number < len(losses))


def gradient(model: nn.Module) -> torch.Tensor:
    """Return all gradients in float32, and clear them."""
    flat = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten().float()
        for p in model.parameters()
        if p.requires_grad
    ]
    model.zero_grad()
    return torch.cat(flat)


def off_by(got: torch.Tensor, due: torch.Tensor) -> float:
    """Return how far a gradient is from the one that is due, as a share of its norm."""
    difference = float((got - due).norm())
    # A difference of mere rounding counts as 0.
    if difference < 1e-8 * len(due) ** 0.5:
        return 0.0
    return difference / max(float(due.norm()), 1e-12)


def parts_of(setup: Setup, batch: Any) -> list[Any]:
    """Return the parts of a batch, all columns kept."""
    by_rows = SplitBatch(ROWS, lambda rows: {key: value[rows] for key, value in batch.items()})
    split = setup.arguments["split"](batch) if "split" in setup.arguments else by_rows
    starts = range(0, split.num_rows, PART_ROWS)
    return [
        split.part(list(range(start, min(start + PART_ROWS, split.num_rows)))) for start in starts
    ]


def counts_of_labels(setup: Setup, parts: list[Any]) -> list[list[float]]:
    """Return the labels of each part, for each way to count them."""
    if "num_labels" in setup.arguments:
        return [[float(setup.arguments["num_labels"](part)) for part in parts]]
    labels = [part.get("labels") for part in parts]
    if any(each is None or each.is_floating_point() for each in labels):
        return [[1.0 / len(parts)] * len(parts)]
    counts = [[float((each != -100).sum()) for each in labels]]
    if labels[0].dim() == 2:
        counts.append([float((each[:, 1:] != -100).sum()) for each in labels])
    return counts


def harm_of(setup: Setup, model: nn.Module, batch: Any, due: torch.Tensor) -> float:
    """Return how far a split takes the gradient of a batch from the whole's."""
    parts = parts_of(setup, batch)
    harms = []
    for counts in counts_of_labels(setup, parts):
        # One draw a forward gives parts that run in turn the numbers of the whole.
        torch.manual_seed(0)
        for part, count in zip(parts, counts, strict=True):
            if count:
                add_gradients(setup, model, part, count / sum(counts), {}, autocast=False)
        harms.append(off_by(gradient(model), due))
    return min(harms)


# --- a setup


class Messages(logging.Handler):
    """Keeps the log lines of the library."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))


def models_of(setup: Setup, batches: list[Any], sums: list[Any]) -> Iterable[nn.Module]:
    """Yield the model in each state."""
    model = setup.make()
    yield deepcopy(model)
    zero = deepcopy(model)
    *_, head = (each for each in zero.modules() if isinstance(each, nn.Linear | nn.Conv2d))
    for parameter in head.parameters():
        if parameter.requires_grad:
            nn.init.zeros_(parameter)
    yield zero
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    for step in range(STEPS):
        number = step % NUM_BATCHES
        add_gradients(setup, model, batches[number], 1.0, sums[number], autocast=False)
        optimizer.step()
        optimizer.zero_grad()
    yield model


def observe(run: Callable[[], None]) -> dict[str, Any]:
    """Run a function that the library may refuse; return the refusal and the log lines."""
    messages, refusal = Messages(), ""
    logger = logging.getLogger("adaptive_batch")
    logger.addHandler(messages)
    try:
        run()
    except SettingError as error:
        refusal = str(error)
    except Exception as error:
        refusal = f"crashed: {type(error).__name__}: {error}"
    finally:
        logger.removeHandler(messages)
    return {
        "refusal": refusal,
        "not_compared": any(NOT_COMPARED.search(line) for _, line in messages.lines),
        "warnings": [line for level, line in messages.lines if level >= logging.WARNING],
    }


def run_batches(
    setup: Setup, model: nn.Module, batches: list[Any], gradients: list[torch.Tensor], dtype: str
) -> None:
    """Run batches with the library, and collect the gradients that it leaves."""

    def forward_backward(part: Part) -> None:
        autocast = dtype == "autocast"
        add_gradients(setup, model, part.batch, part.share, part.statistics, autocast)

    inside = model.get_submodule(setup.inside)
    step = AdaptiveStep(inside, forward_backward, micro_batch_size=PART_ROWS, **setup.arguments)
    for batch in batches:
        step(deepcopy(batch))
        gradients.append(gradient(model))


def measure(case: tuple[str, int]) -> list[dict[str, Any]]:
    """Return a record of each state and dtype of a setup with a seed."""
    name, seed = case
    setup = CORRECT.get(name) or WRONG[name]
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(name.encode()) + seed)
    batches = [setup.batch() for _ in range(NUM_BATCHES)]
    sums: list[Any] = [{}] * NUM_BATCHES
    if "statistics" in setup.arguments:
        sums = [setup.arguments["statistics"](Part(batch, ROWS)) for batch in batches]
    found = []
    for state, model in zip(STATES, models_of(setup, batches, sums), strict=True):
        due = []
        for batch, of_batch in zip(batches, sums, strict=True):
            torch.manual_seed(0)
            add_gradients(setup, model, batch, 1.0, of_batch, autocast=False)
            due.append(gradient(model))
        # Some are correct by construction, though not with these numbers.
        harms = [0.0] * NUM_BATCHES
        if name in WRONG or not (setup.draws or "statistics" in setup.arguments):
            harms = [harm_of(setup, model, *each) for each in zip(batches, due, strict=True)]
        for dtype in DTYPES:
            copied = deepcopy(model)
            if dtype == "bfloat16":
                copied.to(torch.bfloat16)
            torch.manual_seed(seed)
            gradients: list[torch.Tensor] = []
            result = observe(partial(run_batches, setup, copied, batches, gradients, dtype))
            trained = [off_by(*each) for each in zip(gradients, due, strict=False)]
            if setup.draws:
                trained = harms[: len(trained)]
            keys = {"name": name, "seed": seed, "state": state, "dtype": dtype}
            found.append(keys | result | {"harms": harms, "trained": trained})
    return found


# --- counts


def is_warned(record: Mapping[str, Any]) -> bool:
    """Return whether a line reports how much an auxiliary loss changes."""
    return any("auxiliary" in line for line in record["warnings"])


def is_missed(record: Mapping[str, Any], splits: int) -> bool:
    """Return whether the last of the first splits was harmful, and all of them trained."""
    if len(record["trained"]) < splits or is_warned(record):
        return False
    harm: float = record["harms"][splits - 1]
    return harm > BOUND and record["trained"][splits - 1] > harm / 2


def counts(name: str, records: list[dict[str, Any]]) -> dict[str, int]:
    """Count the records of a setup in one dtype."""
    found = {
        "records": len(records),
        "refused": sum(bool(record["refusal"]) for record in records),
        "crashed": sum(record["refusal"].startswith("crashed") for record in records),
        "not_compared": sum(record["not_compared"] for record in records),
    }
    if name in CORRECT:
        off = (max(record["trained"], default=0.0) > OFF for record in records)
        return found | {"off": sum(off)}
    return found | {
        "harmful": sum(record["harms"][0] > BOUND for record in records),
        "harmful_by_third": sum(record["harms"][-1] > BOUND for record in records),
        "missed": sum(is_missed(record, 1) for record in records),
        "missed_by_third": sum(is_missed(record, NUM_BATCHES) for record in records),
    }


def row_of(name: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of a setup; those in float32 stand in the table."""
    by_dtype = {
        dtype: counts(name, [record for record in records if record["dtype"] == dtype])
        for dtype in DTYPES
    }
    refusals = {record["refusal"] for record in records if record["refusal"]}
    return {
        "setup": name,
        "is_correct": name in CORRECT,
        **by_dtype["float32"],
        "by_dtype": by_dtype,
        "largest_harm": max(max(record["harms"]) for record in records),
        "refusals": sorted(refusals)[:3],
    }


def errors(row: dict[str, Any]) -> list[str]:
    """Return the mistakes of the check that it must not make in float32."""
    wrong = ("refused", "off") if row["is_correct"] else ("crashed",)
    return [f"{row[key]} {key.replace('_', ' ')}" for key in wrong if row[key]]


def figures(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Sum the counts in float32."""
    correct = [row for row in rows if row["is_correct"]]
    wrong = [row for row in rows if not row["is_correct"]]
    keys = ("harmful", "harmful_by_third", "missed", "missed_by_third")
    return {
        **{f"correct_{key}": sum(row[key] for row in correct) for key in ("records", "refused")},
        **{key: sum(row[key] for row in wrong) for key in keys},
    }


def main() -> None:
    parser = harness.parser(__doc__, quick="two seeds")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="setups")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = arguments.only or [*CORRECT, *WRONG]
    seeds = range(2 if arguments.quick else arguments.seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        measured = pool.map(measure, [(name, seed) for name in names for seed in seeds])
        harness.run(
            "split_check",
            arguments.output,
            names,
            lambda name: row_of(name, [one for _ in seeds for one in next(measured)]),
            columns="setup:<34 records:>7 refused:>7 crashed:>7 not_compared:>12 off:>4 harmful:>7"
            " missed:>6 harmful_by_third:>16 missed_by_third:>15 largest_harm:>12.1e",
            errors=errors,
            figures=figures,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
