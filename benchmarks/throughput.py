"""Useful tokens per second of the real recipes: ours, which chooses by itself, over torchtune's
best.

    python benchmarks/throughput.py [key=value ...] [--quick] [--sweep] [--only-lengths NAME ...]
        [--budgets SIZE ...] [--repeats N] [--only REGEX] [--model 0.5B] [--device cuda]
        [--output DIR]

For each distribution of lengths, torchtune's stock recipe with fixed batches and with packed rows
and ours with ``micro_batch_tokens=auto`` under each budget train on the same rows of real text, in
the data's order, in one process and in turns of 64 rows: what slows the machine slows all. Useful
are tokens that are not padding. A turn is whole optimizer steps, rows read by the loader included;
packing and searching are part of the setup, which is timed apart. A ratio is the median over turns,
with a 95% interval of turns drawn again. The stock recipe knows no budget, and has the whole
machine.

``--sweep`` adds ours with every layout and size of micro-batch that is written by hand.
``--model 0.5B`` is Qwen2.5's shape in bf16 with random weights, for an accelerator.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import records
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from turns import (
    Enough,
    Relay,
    TurnLogger,
    configuration,
    our_recipe,
    resampled_interval,
    stock_recipe,
)

from adaptive_batch.report import read_records

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

# Of the logarithm of a row's tokens.
SIGMAS = {"lognormal-0.5": 0.5, "lognormal-1.0": 1.0, "alike": 0.0}
FIXED = (1, 2, 4, 8, 16, 32)
# Packs with about the tokens of so many rows.
PACKED = (8, 32)
# Of a step of ours.
ROWS = 32
TURN_ROWS = 64
# Turns.
WARM_UP, REPEATS, QUICK_REPEATS = 1, 8, 2
LAYOUTS = ("padded", "grouped", "packed")
# Columns of turns.
MEASURES = {"wall": 1, "cpu": 2}


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


BF16 = ("dtype=bf16", "optimizer.lr=2e-5")
MODELS = {
    "demo": Model((), 84, 512, ("256MiB", "1GiB", "4GiB"), (512, 1024, 2048, 4096, 8192)),
    "0.5B": Model(BF16, 336, 2048, ("null",), (2048, 4096, 8192, 16384, 32768)),
}


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        way: its name.
        kind: fixed or packed, of torchtune's; auto or sweep, of ours.
        batch_size: rows at once, of torchtune's, and of a step, of ours.
        overrides: over the configuration.
        budget: of ours.
        size: padded tokens of a written micro-batch.
    """

    way: str
    kind: str
    batch_size: int
    overrides: tuple[str, ...] = ()
    budget: str | None = None
    size: int = 0

    @property
    def is_ours(self) -> bool:
        return self.kind in ("auto", "sweep")


def ways(model: Model, budgets: Iterable[str], *, sweep: bool) -> Iterator[Way]:
    for rows in FIXED:
        yield Way(f"stock: {rows} rows", "fixed", rows)
    for packs in sorted({max(1, round(n * model.mean / (0.95 * model.longest))) for n in PACKED}):
        yield Way(f"stock: {packs} packs", "packed", packs, ("dataset.packed=True",))
    for budget in budgets:
        yield Way(f"ours: auto, {budget}", "auto", ROWS, auto(budget), budget)
    for layout, size in product(LAYOUTS, model.sizes) if sweep else ():
        written = (f"micro_batch_layout={layout}", f"micro_batch_tokens={size}")
        overrides = (*written, "probe.device_memory=null")
        yield Way(f"ours: {layout}, {size}", "sweep", ROWS, overrides, size=size)


def auto(budget: str) -> tuple[str, ...]:
    return ("micro_batch_tokens=auto", f"probe.device_memory={budget}")


# --- rows


def half_billion(folder: Path) -> dict[str, Any]:
    """Qwen2.5 0.5B's shape with random weights in a folder; returns the blocks of the configuration
    that name it.
    """
    from safetensors.torch import save_file
    from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
    from torchtune.models.qwen2_5 import qwen2_5_0_5b

    with torch.device("meta"):
        skeleton = qwen2_5_0_5b()
    generator = torch.Generator().manual_seed(demo.SEED)
    weights: dict[str, torch.Tensor] = {}
    for name, like in skeleton.state_dict().items():
        weights[name] = weight = torch.empty(like.shape, dtype=torch.bfloat16)
        if name.endswith(".scale"):
            weight.fill_(1)
        elif name.endswith(".bias"):
            weight.zero_()
        else:
            weight.normal_(0, demo.INITIALIZER_RANGE, generator=generator)
    folder.mkdir(parents=True)
    save_file(qwen2_tune_to_hf(weights), folder / "model.safetensors", metadata={"format": "pt"})
    heads = {
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_size": 896,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(heads))
    return {
        "model": {"_component_": "torchtune.models.qwen2_5.qwen2_5_0_5b"},
        "checkpointer": {"checkpoint_dir": str(folder)},
    }


def drawn_lengths(
    sigma: float, num_rows: int, *, mean: float, shortest: int, longest: int
) -> list[int]:
    """Draw lognormal lengths that have the mean after they are cut to what is allowed."""
    normal = torch.randn(
        num_rows, generator=torch.Generator().manual_seed(demo.SEED), dtype=torch.float64
    )

    def lengths(location: float) -> torch.Tensor:
        return (location + sigma * normal).exp().clamp(shortest, longest).round().long()

    low, high = 0.0, math.log(longest)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).double().mean() < mean else (low, middle)
    return lengths(high).tolist()


def answers_of(
    lengths: list[int], text: str, num_tokens: Callable[[str], int], *, around: int
) -> Iterator[str]:
    """Yield an answer of so many tokens for each length: words of a text in their order, but those
    that no longer fit.

    Args:
        lengths: tokens of each row, everything around the answer included.
        text: is repeated where it ends.
        num_tokens: of a word with the space before it; tokens do not reach across words.
        around: tokens of a row whose answer is ":".
    """
    words = cycle([(word, num_tokens(" " + word)) for word in text.split()])
    for length in lengths:
        left, taken = length - around, [":"]
        while left:
            word, tokens = next(words)
            if tokens <= left:
                taken.append(word)
                left -= tokens
        yield " ".join(taken)


@dataclass(frozen=True)
class Setting:
    """Rows to train on, and the values that all ways to train on them share.

    Attributes:
        folder: with the demo's files.
        name: of the rows.
        lengths: tokens of each row, in order.
        overrides: over the demo's configuration.
        blocks: of another model's configuration; they replace the demo's.
    """

    folder: Path
    name: str
    lengths: list[int]
    overrides: tuple[str, ...]
    blocks: dict[str, Any]

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def configuration(self, name: str, *overrides: str) -> DictConfig:
        """Return the configuration of a way, with its own caches, so that no search reads the
        result of another.
        """
        cfg = configuration(self.folder, name, [*self.overrides, *overrides])
        os.environ["ADAPTIVE_BATCH_CACHE"] = f"{cfg.output_dir}/cache"
        if self.blocks:
            cfg.model = self.blocks["model"]
            cfg.checkpointer = OmegaConf.merge(cfg.checkpointer, self.blocks["checkpointer"])
        return cfg


def make_rows(
    folder: Path,
    name: str,
    num_rows: int,
    model: Model,
    overrides: tuple[str, ...],
    blocks: dict[str, Any],
) -> Setting:
    """Write rows of a distribution of lengths, and check the lengths in the recipes' dataset.

    Args:
        folder, name, overrides, blocks: of the setting.
        num_rows: how many.
        model: has the mean and the longest row; longer rows are cut.
    """
    own = (
        f"model.max_seq_len={model.longest}",
        f"tokenizer.max_seq_len={model.longest}",
        "shuffle=False",
        "epochs=1",
        *overrides,
    )
    cfg = Setting(folder, name, [], own, blocks).configuration("any")
    tokenizer = config.instantiate(cfg.tokenizer)
    text = " ".join(row["docstring"] for row in demo.read_rows(folder / "data" / "train.jsonl"))

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_bos=False, add_eos=False))

    def write(path: Path, answers: Iterable[str]) -> list[int]:
        """Write a row for each answer; return the tokens of each row in the dataset."""
        with path.open("w", encoding="utf-8") as file:
            for answer in answers:
                file.write(json.dumps({"signature": "text", "docstring": answer}) + "\n")
        dataset = OmegaConf.merge(cfg.dataset, {"data_files": str(path)})
        return [len(row["tokens"]) for row in config.instantiate(dataset, tokenizer)]

    # The tokenizer is made of the docstrings of this Python's library, and so are its tokens.
    (around,) = write(folder / f"{name}-empty.jsonl", [":"])
    lengths = drawn_lengths(
        SIGMAS[name], num_rows, mean=model.mean, shortest=around + 2, longest=model.longest
    )
    path = folder / f"{name}.jsonl"
    assert write(path, answers_of(lengths, text, num_tokens, around=around)) == lengths
    return Setting(folder, name, lengths, (*own, f"dataset.data_files={path}"), blocks)


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

    @classmethod
    def set_up(cls, way: Way, setting: Setting) -> Run:
        name = f"{setting.name}: {way.way}"
        cfg = setting.configuration(name, f"batch_size={way.batch_size}", *way.overrides)
        start = time.perf_counter()
        build = our_recipe if way.is_ours else stock_recipe
        context = copy_context()
        recipe = context.run(build, cfg)
        seconds = time.perf_counter() - start
        units, longest = setting.lengths, 0
        if way.kind == "packed":
            dataset = recipe._dataloader.dataset
            units = [tokens_of_pack(pack, dataset.padding_idx) for pack in dataset.packs]
            longest = dataset.max_seq_len
        size = way.batch_size
        steps = [units[start : start + size] for start in range(0, len(units) - size + 1, size)]
        tokens = [sum(step) for step in steps]
        padded = [size * (longest or max(step)) for step in steps]
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


def measure(
    setting: Setting, chosen: Iterable[Way], *, turns: int, device: torch.device
) -> list[dict[str, Any]]:
    """Train in all ways on rows of one distribution, and return the figures of each."""
    runs = {run.name: run for run in (Run.set_up(way, setting) for way in chosen)}

    def ends_turn(name: str, num_steps: int) -> bool:
        if num_steps == turns * runs[name].steps_per_turn:
            raise Enough
        return num_steps % runs[name].steps_per_turn == 0

    TurnLogger.relay = relay = Relay(list(runs), device, after_step=ends_turn)
    relay.run(runs)
    del TurnLogger.relay  # it holds the recipes
    return [summary(run, relay) for run in runs.values()]


def summary(run: Run, relay: Relay) -> dict[str, Any]:
    """Return what a way came to; its turns are tokens, seconds and CPU seconds."""
    found = {**asdict(run.way), "setup_seconds": run.setup_seconds, "turns": []}
    if run.out_of_memory:
        return found
    seconds, cpu_seconds = relay.seconds[run.name], relay.cpu_seconds[run.name]
    num_steps = len(seconds)
    of_steps, padded = run.tokens[:num_steps], float(sum(run.padded[:num_steps]))
    micro_batches = num_steps
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
            "limit": str(run.recipe.batches.limit),
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


def search_by_memory(setting: Setting, budget: str) -> dict[str, Any]:
    """Set ours up with the search by memory alone, and train nothing."""
    overrides = (*auto(budget), "probe.objective=largest")
    run = Run.set_up(Way(f"ours: largest, {budget}", "auto", ROWS, overrides), setting)
    found = run.search()
    run.recipe.cleanup()
    bound = next(event["max_batch_size"] for event in found["events"] if event["kind"] == "bound")
    # None: all rows of a step.
    return found | {"fits_tokens": bound * max(setting.lengths) if bound < ROWS else None}


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
    for kind, measure in product(("fixed", "packed", "sweep"), MEASURES):
        others = [other for other in ways if other["kind"] == kind and other["turns"]]
        others = [other for other in others if fits_tokens is None or other["size"] <= fits_tokens]
        if others:
            best = max(others, key=lambda other: other[f"tokens_per_{measure}_second"])
            values = (rates(way, measure) / rates(best, measure)).view(1, -1, 1)
            ratio, low, high = resampled_interval(lambda drawn: median(drawn[..., 0]), values)
            found = {"ratio": ratio, "interval_95": [low, high]}
            ratios.append({"kind": kind, "measure": measure, "over": best["way"], **found})
    return ratios


def print_distribution(result: dict[str, Any]) -> None:
    """Print the ways of a distribution, and the ratios and searches of each budget."""
    print(
        f"\n{result['lengths']}: {result['rows']} rows of {result['shortest']} to"
        f" {result['longest']} tokens, mean {result['mean']:.1f}"
    )
    table = records.Table(
        "way:<24 tokens_per_step:>15,.0f micro_batches_per_step:>22.2f padding:>8.1%"
        " tokens_per_wall_second:>22,.0f tokens_per_cpu_second:>21,.0f setup_seconds:>13.1f"
        " limit:<20"
    )
    for way in result["ways"]:
        if way["turns"]:
            table.print({"limit": "", **way})
        else:
            print(f"{way['way']}: out of memory")
    for cell in result["cells"]:
        print(f"\n{result['lengths']}, {cell['budget']}: auto over the best of")
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


def main() -> None:
    parser = records.parser(__doc__, quick=f"{QUICK_REPEATS} repeats")
    add = parser.add_argument
    add("--repeats", type=int, default=REPEATS, metavar="N", help="without --quick: %(default)s")
    add("--sweep", action="store_true", help="ours with each layout and size of micro-batch, too")
    add("--only-lengths", nargs="+", choices=SIGMAS, default=[*SIGMAS], metavar="NAME")
    add("--budgets", nargs="+", metavar="SIZE", help="of ours (default: the model's)")
    add("--only", default="", metavar="REGEX", help="ways whose name matches; each holds a model")
    add("--model", choices=tuple(MODELS), default="demo", help="default: %(default)s")
    add("--device", default="cpu")
    add("overrides", nargs="*", metavar="key=value", help="over the configuration, for all")
    asked = parser.parse_args()
    model, device = MODELS[asked.model], torch.device(asked.device)
    budgets = asked.budgets or model.budgets
    turns = WARM_UP + (QUICK_REPEATS if asked.quick else asked.repeats)
    every_way = ways(model, budgets, sweep=asked.sweep)
    chosen = [way for way in every_way if re.search(asked.only, way.way)]
    overrides = (*model.overrides, f"device={asked.device}", *asked.overrides)
    print(f"{asked.model} model on {asked.device}, {torch.get_num_threads()} thread")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, printed = Path(temporary), Path(temporary) / "printed.txt"
        with records.printing_into(printed):
            demo.prepare(folder)
            blocks = half_billion(folder / asked.model) if asked.model != "demo" else {}
        for name in asked.only_lengths:
            start = time.perf_counter()
            with records.printing_into(printed):
                rows = (turns + 2) * TURN_ROWS
                setting = make_rows(folder, name, rows, model, overrides, blocks)
                gc.collect()  # the recipes of other rows
                largest = {budget: search_by_memory(setting, budget) for budget in budgets}
                measured = measure(setting, chosen, turns=turns, device=device)
            cells = [
                {
                    "budget": way["budget"],
                    "ratios": compare(
                        way, measured, fits_tokens=largest[way["budget"]]["fits_tokens"]
                    ),
                    "search": {"fastest": way["search"], "largest": largest[way["budget"]]},
                }
                for way in measured
                if way["kind"] == "auto"
            ]
            result = {
                "lengths": name,
                "rows": len(setting.lengths),
                "mean": setting.mean,
                "shortest": min(setting.lengths),
                "longest": max(setting.lengths),
                "seconds": time.perf_counter() - start,
                "cells": cells,
                "ways": measured,
            }
            print_distribution(result)
            results.append(result)
    records.write(
        "throughput" if asked.model == "demo" else f"throughput_{asked.model}",
        asked.output,
        model=asked.model,
        overrides=asked.overrides,
        columns_of_turns=["tokens", *MEASURES],
        warm_up_turns=WARM_UP,
        distributions=results,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
