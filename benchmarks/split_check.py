"""Whether the check of AdaptiveStep refuses splits that change the gradient, and keeps the others.

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

import json
import logging
import multiprocessing
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import records
import torch
from split_setups import CORRECT, ROWS, WRONG, Setup
from torch import nn

from adaptive_batch import AdaptiveStep, SettingError
from adaptive_batch.training import Part

STATES = ("fresh", "zero head", "trained")
DTYPES = ("float32", "autocast", "bfloat16")
PART_ROWS = 4
NUM_BATCHES = 3
STEPS = 50
BOUNDS = (0.01, 0.05)
OFF = 1e-3
NOT_COMPARED = re.compile(r"cannot (be )?compare|not (be )?compared|is not known")


# --- gradients without the library


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating-point tensors in a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_dtype(item, dtype) for key, item in value.items()}
    return [to_dtype(item, dtype) for item in value]


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
        losses = setup.loss(
            model, SimpleNamespace(**batch) if isinstance(batch, dict) else batch, *more
        )
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


def rows_of(batch: Any, rows: list[int]) -> Any:
    if isinstance(batch, dict):
        return {key: value[rows] for key, value in batch.items()}
    return [batch[row] for row in rows]


def parts_of(setup: Setup, batch: Any) -> list[Any]:
    """Return the parts of a batch, all columns kept."""
    num_rows, part = ROWS, partial(rows_of, batch)
    if "split" in setup.arguments:
        num_rows, part, *_ = vars(setup.arguments["split"](batch)).values()
    starts = range(0, num_rows, PART_ROWS)
    return [part(list(range(start, min(start + PART_ROWS, num_rows)))) for start in starts]


def counts_of_labels(setup: Setup, parts: list[Any]) -> list[list[float]]:
    """Return the labels of each part, in each way in which they may be counted."""
    if "num_labels" in setup.arguments:
        return [[float(setup.arguments["num_labels"](part)) for part in parts]]
    labels = [part.get("labels") if isinstance(part, dict) else None for part in parts]
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
    """Keeps what the library logs."""

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
    """Run what the library may refuse; return what it said."""
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


# --- what they come to


def is_harmful(record: Mapping[str, Any], bound: float, splits: int) -> bool:
    harm: float = record["harms"][splits - 1]
    return harm > bound


def is_missed(record: Mapping[str, Any], bound: float, splits: int) -> bool:
    """Return whether the last of the first splits was harmful, and it and all before it trained."""
    if len(record["trained"]) < splits or is_warned(record):
        return False
    is_trained = record["trained"][splits - 1] > record["harms"][splits - 1] / 2
    return is_trained and is_harmful(record, bound, splits)


def is_warned(record: Mapping[str, Any]) -> bool:
    """Return whether a line tells how much an auxiliary loss changes."""
    return any("auxiliary" in line for line in record["warnings"])


def is_off(record: Mapping[str, Any]) -> bool:
    return record["dtype"] == "float32" and max(record["trained"], default=0.0) > OFF


def is_crash(record: Mapping[str, Any]) -> bool:
    return record["refusal"].startswith("crashed")


def every(record: Mapping[str, Any]) -> bool:
    return True


# A title, the names that it is of, what it counts, and of which records.
Column = tuple[str, Iterable[str], Callable[[Any], bool], Callable[[Any], bool]]


def columns_of_correct() -> list[Column]:
    return [
        ("correct: refused", CORRECT, lambda r: bool(r["refusal"]), every),
        ("correct: of these crashed", CORRECT, is_crash, every),
        ("correct: cannot compare", CORRECT, lambda r: r["not_compared"], every),
        ("correct: trained off", CORRECT, is_off, every),
    ]


def columns_of_wrong() -> list[Column]:
    columns: list[Column] = [
        ("wrong: crashed", WRONG, is_crash, every),
        ("wrong: warned with the figure", WRONG, is_warned, every),
        ("wrong: cannot compare", WRONG, lambda r: r["not_compared"], every),
    ]
    for bound in BOUNDS:
        for splits in (1, NUM_BATCHES):
            title = f"wrong: harm > {bound:.0%}, missed at split {splits}"
            missed = partial(is_missed, bound=bound, splits=splits)
            columns.append((title, WRONG, missed, partial(is_harmful, bound=bound, splits=splits)))
    return columns


def summary(found: list[dict[str, Any]], columns: Iterable[Column]) -> dict[str, Any]:
    """Return for each column and dtype how many records it counts, of how many, by setup."""
    table: dict[str, Any] = {}
    for column, names, counts, is_of in columns:
        for dtype in DTYPES:
            of = [r for r in found if r["dtype"] == dtype and r["name"] in names and is_of(r)]
            counted = Counter(record["name"] for record in of if counts(record))
            entry = {"count": counted.total(), "of": len(of), "setups": dict(counted)}
            table.setdefault(column, {})[dtype] = entry
    return table


def show(table: dict[str, Any]) -> None:
    print(f"\n{'':<46}" + "".join(f"{dtype:>12}" for dtype in DTYPES))
    for column, entries in table.items():
        cells = (f"{entry['count']}/{entry['of']}".rjust(12) for entry in entries.values())
        print(f"{column:<46}" + "".join(cells))
    for column, entries in table.items():
        names = dict.fromkeys(name for entry in entries.values() for name in entry["setups"])
        if names:
            print(f"\n{column}, in each dtype:")
        for name in names:
            print(f"  {name:<34}", *(entry["setups"].get(name, 0) for entry in entries.values()))


def offences(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each record that is not as it should be, at most 300."""
    lines = []
    for record in found:
        is_bad = bool(record["refusal"]) or is_off(record)
        if record["name"] in WRONG:
            missed = (is_missed(record, BOUNDS[0], splits) for splits in (1, NUM_BATCHES))
            is_bad = is_crash(record) or any(missed)
        if is_bad:
            case = ", ".join(str(record[key]) for key in ("name", "state", "dtype", "seed"))
            harms = " ".join(f"{harm:.2g}" for harm in record["harms"])
            trained = " ".join(f"{off:.2g}" for off in record["trained"])
            lines.append(
                f"{case}: harm {harms}, trained {trained or 'nothing'} {record['refusal']}"
            )
    return lines[:300]


def main() -> None:
    parser = records.parser(__doc__, quick="two seeds")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="setups; no record is written")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    start = time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    names = arguments.only or [*CORRECT, *WRONG]
    seeds = 2 if arguments.quick else arguments.seeds
    cases = [(name, seed) for seed in range(seeds) for name in names]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        found = [record for of_case in pool.map(measure, cases) for record in of_case]
    table = summary(found, columns_of_correct() + columns_of_wrong())
    show(table)
    seconds = round(time.perf_counter() - start, 1)
    worst = max((max(r["harms"]) for r in found if r["name"] not in WRONG), default=0.0)
    print(f"\n{len(found)} records in {seconds} s; largest harm of a correct setup {worst:.1e}")
    if arguments.only:
        print("\n".join(map(json.dumps, found)))
        return
    records.write(
        "split_check",
        arguments.output,
        seeds=seeds,
        setups=len(names),
        largest_harm_of_correct=worst,
        table=table,
        offences=offences(found),
        seconds=seconds,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
