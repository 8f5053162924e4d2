"""Useful tokens per second of the real recipes: ours, which chooses by itself, over torchtune's
best.

    python benchmarks/throughput.py [key=value ...] [--quick] [--sweep] [--only-lengths NAME ...]
        [--budgets SIZE ...] [--multiples N ...] [--repeats N] [--reversed]
        [--only REGEX] [--model 0.5B] [--device cuda] [--output DIR]
    python benchmarks/throughput.py [key=value ...] --pairs [--quick] [--budgets SIZE ...]
        [--only REGEX] [--output DIR]
    python benchmarks/throughput.py [key=value ...] --losses [--model 0.5B] [--device cuda]
        [--output DIR]

For each distribution of lengths, torchtune's stock recipe with fixed batches and with packed rows
and ours with ``micro_batch_tokens=auto`` under each budget train on the same rows of real text, in
the data's order, in one process and in turns of 64 rows: what slows the machine slows all. Useful
are tokens that are not padding. A turn is whole optimizer steps, rows read by the loader included;
packing and searching are part of the setup, which is timed apart. A ratio is the median over turns,
with a 95% interval of turns drawn again. The stock recipe knows no budget, and has the whole
machine.

``--sweep`` adds ours with every layout and size of micro-batch that is written by hand,
``--multiples`` ours grouped with ``pad_to_multiple_of``.
``--pairs`` trains adapters on preference pairs instead, each answer as long as a row: ours beside
torchtune's recipe, whose configs have 4 pairs at once and 8 such in a step, and beside the same
step in other micro-batches. ``--losses`` measures instead the held-out loss after the same tokens,
padded and packed. ``--model 0.5B`` is Qwen2.5's shape in bf16 with random weights, for an
accelerator.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import records
import torch
from rows import Setting, half_billion, make_rows
from torchtune import config
from turns import (
    Enough,
    Relay,
    TurnLogger,
    our_recipe,
    printing_into,
    resampled_interval,
    stock_recipe,
)

from adaptive_batch.report import read_records
from adaptive_batch.torchtune import NextTokens, PreferencePairs, Task

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import demo
from support import preferences

SIGMAS = {
    "lognormal-0.5": 0.5,
    "lognormal-1.0": 1.0,
    "alike": 0.0,
}  # of the logarithm of a row's tokens
FIXED = (1, 2, 4, 8, 16, 32)
PACKED = (8, 32)  # packs with about the tokens of so many rows
ROWS = 32  # of a step of ours
TURN_ROWS = 64
WARM_UP, REPEATS, QUICK_REPEATS = 1, 8, 2  # turns
LAYOUTS = ("padded", "grouped", "packed")
LARGEST = "probe.objective=largest"  # the search by memory alone
LOSS_STEPS = range(4, 33, 4)  # after which the loss is measured
MEASURES = {"wall": 1, "cpu": 2}  # columns of turns
VARIED = "lognormal-1.0"
LEAST = {"fixed": 1.6, "packed": 1.0}  # over stock, where lengths vary most
LEAST_OF_PAIRS = {"default": 2.0, "fixed": 1.3}
DEFAULT_PAIRS = 4  # at once, in torchtune's configs
NOT_BELOW, OF_SWEEP, SAME_LOSS = 0.98, 0.97, 1e-4
MOST_RECOMPILED = 4  # of a run


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        overrides: over the demo's configuration.
        mean, longest: tokens of a row; what would be longer is cut.
        budgets: values of ``probe.device_memory``.
        sizes: padded tokens of a micro-batch in the sweep.
    """

    overrides: tuple[str, ...]
    mean: int
    longest: int
    budgets: tuple[str, ...]
    sizes: tuple[int, ...]


# What the command line takes as a component is a block here.
OF_PAIRS = tuple(override.replace("loss=", "loss._component_=", 1) for override in preferences.LORA)
BF16 = ("dtype=bf16", "optimizer.lr=2e-5")
MODELS = {
    "demo": Model((), 84, 512, ("256MiB", "1GiB", "4GiB"), (512, 1024, 2048, 4096, 8192)),
    "0.5B": Model(BF16, 336, 2048, ("null",), (2048, 4096, 8192, 16384, 32768)),
}


@dataclass(frozen=True)
class Way:
    """One way to train: torchtune's with fixed batches or packed rows, ours by itself, or ours with
    a written micro-batch.

    Attributes:
        way: its name.
        kind: fixed, default, packed, auto or sweep.
        batch_size: rows at once, of torchtune's, and of a step, of ours.
        overrides: over the configuration.
        budget: of ours.
        size: padded tokens of a written micro-batch.
        accumulation: batches of a step.
        pairs: whether rows are preference pairs.
    """

    way: str
    kind: str
    batch_size: int
    overrides: tuple[str, ...] = ()
    budget: str | None = None
    size: int = 0
    accumulation: int = 1
    pairs: bool = False

    @property
    def task(self) -> type[Task]:
        return PreferencePairs if self.pairs else NextTokens

    @property
    def is_ours(self) -> bool:
        return self.kind in ("auto", "sweep")


def ways(
    model: Model, budgets: Iterable[str], *, sweep: bool, multiples: Iterable[int]
) -> list[Way]:
    packs = sorted({max(1, round(rows * model.mean / (0.95 * model.longest))) for rows in PACKED})
    by_hand = [(layout, size) for layout in LAYOUTS for size in model.sizes] if sweep else []
    return [
        *(Way(f"stock: {rows} rows", "fixed", rows) for rows in FIXED),
        *(
            Way(f"stock: {count} packs", "packed", count, ("dataset.packed=True",))
            for count in packs
        ),
        *(Way(f"ours: auto, {budget}", "auto", ROWS, auto(budget), budget) for budget in budgets),
        *(
            Way(f"ours: {layout}, {size}", "sweep", ROWS, written(layout, size), size=size)
            for layout, size in by_hand
        ),
        *(
            Way(
                f"ours: grouped, {size}, multiples of {multiple}",
                "sweep",
                ROWS,
                (*written("grouped", size), f"pad_to_multiple_of={multiple}"),
                size=size,
            )
            for size, multiple in product(model.sizes, multiples)
        ),
    ]


def ways_of_pairs(budgets: Iterable[str]) -> list[Way]:
    """Torchtune's steps of ROWS pairs in each fixed micro-batch, and ours by itself."""
    stock = [
        Way(
            f"stock: {rows} pairs, {ROWS // rows} times",
            "default" if rows == DEFAULT_PAIRS else "fixed",
            rows,
            (f"gradient_accumulation_steps={ROWS // rows}",),
            accumulation=ROWS // rows,
            pairs=True,
        )
        for rows in FIXED
    ]
    ours = [
        Way(f"ours: auto, {budget}", "auto", ROWS, auto(budget), budget, pairs=True)
        for budget in budgets
    ]
    return [*stock, *ours]


def auto(budget: str) -> tuple[str, ...]:
    return ("micro_batch_tokens=auto", f"probe.device_memory={budget}")


def written(layout: str, size: int) -> tuple[str, ...]:
    return (
        f"micro_batch_layout={layout}",
        f"micro_batch_tokens={size}",
        "probe.device_memory=null",
    )


# --- measuring


@dataclass
class Run:
    """A recipe that is trained in a way, and what its steps are.

    Attributes:
        tokens, padded: of each step, without padding, and with it where a step is run at once.
        steps_per_turn: whole steps of about as many tokens as the rows of a turn have.
        context: holds what the recipe sets of torch's compiler, which is of a thread's context.
    """

    name: str
    way: Way
    recipe: Any
    setup_seconds: float
    tokens: list[int]
    padded: list[int]
    steps_per_turn: int
    context: Context
    out_of_memory: bool = False
    losses: list[float] = field(default_factory=list)

    @classmethod
    def set_up(cls, way: Way, setting: Setting) -> Run:
        name = f"{setting.name}: {way.way}"
        cfg = setting.configuration(name, f"batch_size={way.batch_size}", *way.overrides)
        start = time.perf_counter()
        build = our_recipe if way.is_ours else stock_recipe
        context = copy_context()
        recipe = context.run(build, cfg, way.task)
        seconds = time.perf_counter() - start
        units, lengths, longest = setting.lengths, setting.padded, 0
        if way.kind == "packed":
            dataset = recipe._dataloader.dataset
            units = [tokens_of_pack(pack, dataset.padding_idx) for pack in dataset.packs]
            lengths, longest = units, dataset.max_seq_len
        size = way.batch_size
        rows = size * way.accumulation
        starts = range(0, len(units) - rows + 1, rows)
        tokens = [sum(units[start : start + rows]) for start in starts]
        padded = [
            sum(
                size * (longest or max(lengths[batch : batch + size]))
                for batch in range(start, start + rows, size)
            )
            for start in starts
        ]
        per_turn = round(TURN_ROWS * setting.mean * len(tokens) / sum(tokens))
        return cls(name, way, recipe, seconds, tokens, padded, max(1, per_turn), context)

    def train(self) -> None:
        """Train; a batch of torchtune's that does not fit into the machine is left out."""
        try:
            self.context.run(self.recipe.train)
        except torch.OutOfMemoryError:
            if self.way.is_ours:
                raise
            self.out_of_memory = True

    def search(self) -> dict[str, Any]:
        """What ours logged of its search: the events that count trials, and their sums."""
        events = [record for record in read_log(self) if "trials" in record]
        trials, seconds = (
            sum(event.get(key, 0) for event in events) for key in ("trials", "seconds")
        )
        return {
            "trials": trials,
            "seconds": seconds,
            "setup_seconds": self.setup_seconds,
            "events": events,
        }


def tokens_of_pack(pack: dict[str, torch.Tensor], padding_id: int) -> int:
    """Count the tokens of a pack; no row ends with the token that packs are filled up with."""
    return int((pack["tokens"] != padding_id).nonzero()[-1]) + 1


def read_log(run: Run) -> list[dict[str, Any]]:
    return read_records(Path(run.recipe.cfg.output_dir) / "adaptive_batch" / "run.jsonl")


def train_in_turns(
    chosen: list[Way],
    setting: Setting,
    device: torch.device,
    after_step: Callable[[Run, int], bool],
) -> tuple[list[Run], Relay]:
    """Set up and train in all ways; `after_step` is the relay's, with the run in place of
    its name.
    """
    runs = {run.name: run for run in (Run.set_up(way, setting) for way in chosen)}
    TurnLogger.relay = relay = Relay(
        list(runs), device, after_step=lambda name, steps: after_step(runs[name], steps)
    )
    relay.run(runs)
    del TurnLogger.relay  # it holds the recipes
    return list(runs.values()), relay


def measure(
    setting: Setting, chosen: list[Way], *, turns: int, device: torch.device
) -> list[dict[str, Any]]:
    """Train in all ways on rows of one distribution, and return what each came to."""

    def after_step(run: Run, num_steps: int) -> bool:
        if num_steps == turns * run.steps_per_turn:
            raise Enough
        return num_steps % run.steps_per_turn == 0

    runs, relay = train_in_turns(chosen, setting, device, after_step)
    return [summary(run, relay) for run in runs]


def summary(run: Run, relay: Relay) -> dict[str, Any]:
    """Return what a way came to; its turns are tokens, seconds and CPU seconds."""
    found = {**asdict(run.way), "setup_seconds": run.setup_seconds, "turns": []}
    if run.out_of_memory:
        return found
    seconds, cpu_seconds = relay.seconds[run.name], relay.cpu_seconds[run.name]
    num_steps = len(seconds)
    of_steps, padded, micro_batches = (
        run.tokens[:num_steps],
        float(sum(run.padded[:num_steps])),
        num_steps * run.way.accumulation,
    )
    tokens = sum(of_steps)
    if run.way.is_ours:
        steps = [record for record in read_log(run) if record["kind"] == "step"]
        assert steps[-1]["tokens_seen"] == tokens
        micro_batches = sum(step["micro_batches"] for step in steps)
        padded = sum(
            n / (1 - step["padding_fraction"]) for n, step in zip(of_steps, steps, strict=True)
        )
        recompiled = [record for record in read_log(run) if record["kind"] == "recompiled"]
        found |= {
            "limit": str(run.recipe.planner.limit),
            "search": run.search(),
            # In its turns; of code that other ways run too, whoever ran it first.
            "recompiled": [f"{record['function']}: {record['reason']}" for record in recompiled],
        }
    columns = torch.tensor([of_steps, seconds, cpu_seconds], dtype=torch.float64)
    found["turns"] = columns.view(3, -1, run.steps_per_turn).sum(-1).T[WARM_UP:].tolist()
    return found | {
        "tokens_per_step": tokens / num_steps,
        "micro_batches_per_step": micro_batches / num_steps,
        "padding": 1 - tokens / padded,
        **{
            f"tokens_per_{measure}_second": float(median(rates(found, measure)))
            for measure in MEASURES
        },
    }


def search_by_memory(setting: Setting, budget: str, *, pairs: bool) -> dict[str, Any]:
    """Set ours up with the search by memory alone, and train nothing."""
    overrides = (*auto(budget), LARGEST)
    run = Run.set_up(Way(f"ours: largest, {budget}", "auto", ROWS, overrides, pairs=pairs), setting)
    found = run.search()
    run.recipe.cleanup()
    bound = next(event["max_batch_size"] for event in found["events"] if event["kind"] == "bound")
    return found | {
        "fits_tokens": bound * max(setting.padded) if bound < ROWS else None
    }  # None: all rows of a step


# --- what it came to


def rates(way: dict[str, Any], measure: str) -> torch.Tensor:
    """Tokens per second of each turn."""
    turns = torch.tensor(way["turns"], dtype=torch.float64)
    return turns[:, 0] / turns[:, MEASURES[measure]]


def median(values: torch.Tensor) -> torch.Tensor:
    return values.quantile(0.5, -1)


def compare(
    way: dict[str, Any], ways: list[dict[str, Any]], *, fits_tokens: int | None
) -> list[dict[str, Any]]:
    """One way over the best of each kind, turn by turn; of the sweep, what fits into as many tokens
    at once.
    """
    ratios = []
    kinds = {"default": ("default",), "fixed": ("fixed", "default")}
    for kind, measure in product(("default", "fixed", "packed", "sweep"), MEASURES):
        alike = kinds.get(kind, (kind,))
        others = [other for other in ways if other["kind"] in alike and other["turns"]]
        others = [other for other in others if fits_tokens is None or other["size"] <= fits_tokens]
        if others:
            best = max(others, key=lambda other: other[f"tokens_per_{measure}_second"])
            values = (rates(way, measure) / rates(best, measure)).view(1, -1, 1)
            ratio, low, high = resampled_interval(lambda drawn: median(drawn[..., 0]), values)
            found = {"ratio": ratio, "interval_95": [low, high]}
            ratios.append({"kind": kind, "measure": measure, "over": best["way"], **found})
    return ratios


def verdicts(
    lengths: str, ratios: list[dict[str, Any]], least: dict[str, float]
) -> list[tuple[str, bool]]:
    """What is asked of a cell by the clock on the wall, and whether it is met."""
    asked = []
    for found in ratios:
        kind, over, ratio = found["kind"], found["over"], found["ratio"]
        if found["measure"] == "wall":
            if kind in least and lengths == VARIED:
                asked.append((f"at least {least[kind]} of {over}", ratio >= least[kind]))
            if kind == "fixed":
                asked.append(
                    (
                        f"interval not below {NOT_BELOW} of {over}",
                        found["interval_95"][1] >= NOT_BELOW,
                    )
                )
            if kind == "sweep":
                asked.append((f"at least {OF_SWEEP} of {over}", ratio >= OF_SWEEP))
    return asked


def cell_of(
    way: dict[str, Any], ways: list[dict[str, Any]], lengths: str, largest: dict[str, Any]
) -> dict[str, Any]:
    """What `auto` came to under a budget, whose search by memory alone is given."""
    ratios = compare(way, ways, fits_tokens=largest["fits_tokens"])
    search = {"fastest": way["search"], "largest": largest}
    of_cell = verdicts(lengths, ratios, LEAST_OF_PAIRS if way["pairs"] else LEAST)
    num_recompiled = len(way["recompiled"])
    if num_recompiled:
        words = f"{num_recompiled} recompilations, at most {MOST_RECOMPILED}"
        of_cell.append((words, num_recompiled <= MOST_RECOMPILED))
    return {
        "budget": way["budget"],
        "ratios": ratios,
        "verdicts": of_cell,
        "search": search,
    }


def print_distribution(result: dict[str, Any]) -> None:
    """Print the ways of a distribution, and what each budget came to."""
    lengths, ways = result["lengths"], result["ways"]
    width = max(len(way["way"]) for way in ways)
    print(
        f"\n{lengths}: {result['rows']} rows of {result['shortest']} to {result['longest']} tokens,"
        f" mean {result['mean']:.1f}"
    )
    print(
        f"{'':<{width}}  tokens/step  micro-batches  padding  tokens/s  tokens/cpu s  setup s "
        " limit"
    )
    for way in ways:
        if way["turns"]:
            print(
                f"{way['way']:<{width}} {way['tokens_per_step']:>12,.0f}"
                f" {way['micro_batches_per_step']:>14.2f} {way['padding']:>8.1%}"
                f" {way['tokens_per_wall_second']:>9,.0f} {way['tokens_per_cpu_second']:>13,.0f}"
                f" {way['setup_seconds']:>8.1f}  {way.get('limit', '')}"
            )
        else:
            print(f"{way['way']:<{width}}  out of memory")
    for cell in result["cells"]:
        print(f"\n{lengths}, {cell['budget']}: auto over the best of")
        for found in cell["ratios"]:
            low, high = found["interval_95"]
            print(
                f"  {found['kind']:<7} {found['measure']:<5} {found['ratio']:.3f} ({low:.3f} to"
                f" {high:.3f})  {found['over']}"
            )
        for name, found in cell["search"].items():
            print(
                f"  search, {name}: {found['trials']} trials, {found['seconds']:.1f} of"
                f" {found['setup_seconds']:.1f} s"
            )
        for asked, met in cell["verdicts"]:
            print(f"  {asked}: {'met' if met else 'NOT met'}")


# --- losses


def held_out_loss(
    model: Any, rows: list[dict[str, Any]], *, pad_id: int, device: torch.device
) -> float:
    """Mean loss of a label token on rows that are not trained on; training goes on as if this had
    not been.
    """
    chunks = model.num_output_chunks
    model.set_num_output_chunks(0)
    try:
        with torch.no_grad(), device:
            return demo.held_out_loss(model, rows, pad_id=pad_id)
    finally:
        model.set_num_output_chunks(chunks)


def measure_losses(setting: Setting, size: int, device: torch.device) -> dict[str, Any]:
    """Held-out loss in steps of the same rows: torchtune's, ours padded and ours packed."""
    cfg = setting.configuration("any")
    tokenizer = config.instantiate(cfg.tokenizer)
    held_out = setting.folder / "data" / "held_out.jsonl"
    rows = list(config.instantiate(cfg.dataset, tokenizer, data_files=str(held_out)))
    ours = [Way(layout, "sweep", ROWS, written(layout, size)) for layout in ("padded", "packed")]

    def after_step(run: Run, num_steps: int) -> bool:
        if num_steps in LOSS_STEPS:
            model = run.recipe.trainer.model if run.way.is_ours else run.recipe._model
            run.losses.append(held_out_loss(model, rows, pad_id=tokenizer.pad_id, device=device))
        if num_steps == LOSS_STEPS[-1]:
            raise Enough
        return False

    runs, _ = train_in_turns([Way("stock", "fixed", ROWS), *ours], setting, device, after_step)
    losses = torch.tensor([run.losses for run in runs], dtype=torch.float64)
    farthest = (losses - losses[-1]).abs().amax(-1).tolist()
    names = [run.way.way for run in runs]
    return {
        "tokens": [sum(setting.lengths[: ROWS * step]) for step in LOSS_STEPS],
        "losses": dict(zip(names, losses.tolist(), strict=True)),
        "farthest_from_packed": dict(zip(names, farthest, strict=True)),
    }


def print_losses(found: dict[str, Any]) -> None:
    print(f"\n{'tokens':>8}" + "".join(f"{name:>12}" for name in found["losses"]))
    for tokens, *values in zip(found["tokens"], *found["losses"].values(), strict=True):
        print(f"{tokens:>8,}" + "".join(f"{value:>12.6f}" for value in values))
    for name, distance in found["farthest_from_packed"].items():
        verdict = "met" if distance <= SAME_LOSS else "NOT met"
        if name != "packed":
            print(
                f"{name} and packed: at most {distance:.1e} apart; within {SAME_LOSS:.0e}:"
                f" {verdict}"
            )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{QUICK_REPEATS} repeats")
    add("--repeats", type=int, default=REPEATS, metavar="N", help="without --quick: %(default)s")
    add("--sweep", action="store_true", help="ours with each layout and size of micro-batch, too")
    add("--reversed", action="store_true", help="ways in the opposite order of turns")
    add(
        "--multiples",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="ours grouped with lengths rounded up to a multiple, too",
    )
    add("--pairs", action="store_true", help="preference pairs, whose lengths vary most")
    add("--losses", action="store_true", help="the loss after the same tokens instead")
    add(
        "--only-lengths",
        nargs="+",
        choices=tuple(SIGMAS),
        metavar="NAME",
        help=", ".join(SIGMAS),
    )
    add("--budgets", nargs="+", metavar="SIZE", help="of ours (default: the model's)")
    add("--only", default="", metavar="REGEX", help="ways whose name matches; each holds a model")
    add("--model", choices=tuple(MODELS), default="demo", help="default: %(default)s")
    add("--device", default="cpu")
    add("--output", type=Path, default=records.RESULTS, metavar="DIR")
    add("overrides", nargs="*", metavar="key=value", help="over the configuration, for all")
    asked = parser.parse_args()
    if asked.pairs and (asked.sweep or asked.losses or asked.only_lengths):
        parser.error("--pairs has lengths and ways of its own; leave out what chooses others")
    return asked


def main() -> None:
    asked = arguments()
    model, device = MODELS[asked.model], torch.device(asked.device)
    budgets = asked.budgets or model.budgets
    turns = WARM_UP + (QUICK_REPEATS if asked.quick else asked.repeats)
    every_way = (
        ways_of_pairs(budgets)
        if asked.pairs
        else ways(model, budgets, sweep=asked.sweep, multiples=asked.multiples)
    )
    chosen = [way for way in every_way if re.search(asked.only, way.way)]
    if asked.reversed:
        chosen.reverse()
    distributions = asked.only_lengths or tuple(SIGMAS)
    overrides = (*model.overrides, f"device={asked.device}", *asked.overrides)
    if asked.pairs:
        distributions = (VARIED,)
        overrides = (*OF_PAIRS, *overrides)
    print(f"{asked.model} model on {asked.device}, {torch.get_num_threads()} thread")
    results: list[dict[str, Any]] = []
    losses: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, printed = Path(temporary), Path(temporary) / "printed.txt"

        def rows(name: str, num_rows: int) -> Setting:
            return make_rows(
                folder,
                name,
                SIGMAS[name],
                num_rows,
                model.mean,
                model.longest,
                overrides,
                blocks,
                pairs=asked.pairs,
            )

        with printing_into(printed):
            demo.prepare(folder)
            blocks = half_billion(folder / asked.model) if asked.model != "demo" else {}
            if asked.losses:
                losses = measure_losses(
                    rows(VARIED, (LOSS_STEPS[-1] + 1) * ROWS), model.sizes[2], device
                )
        for name in distributions if not asked.losses else ():
            start = time.perf_counter()
            with printing_into(printed):
                setting = rows(name, (turns + 2) * TURN_ROWS)
                gc.collect()  # the recipes of other rows
                largest = {
                    budget: search_by_memory(setting, budget, pairs=asked.pairs)
                    for budget in budgets
                }
                measured = measure(setting, chosen, turns=turns, device=device)
            autos = [way for way in measured if way["kind"] == "auto"]
            result = {
                "lengths": name,
                "rows": len(setting.lengths),
                "mean": setting.mean,
                "shortest": min(setting.lengths),
                "longest": max(setting.lengths),
                "seconds": time.perf_counter() - start,
                "cells": [cell_of(way, measured, name, largest[way["budget"]]) for way in autos],
                "ways": measured,
            }
            print_distribution(result)
            results.append(result)
    if losses:
        print_losses(losses)
    found = losses or {
        "columns_of_turns": ["tokens", *MEASURES],
        "warm_up_turns": WARM_UP,
        "distributions": results,
    }
    name = "_".join(
        [
            "throughput",
            *(["losses"] if losses else []),
            *(["pairs"] if asked.pairs else []),
            *([asked.model] if asked.model != "demo" else []),
        ]
    )
    records.write(name, asked.output, model=asked.model, overrides=asked.overrides, **found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
