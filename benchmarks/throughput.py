"""Useful tokens per second of the real recipes, and the loss after the same number of tokens.

    python benchmarks/throughput.py [--epochs E] [--quick] [--model 0.5B] [--device cuda] [--output DIR] [key=value ...]

torchtune's stock recipe with fixed batches and with packed rows, and ours with micro-batches and steps by tokens, train on
the demo's rows in one process, in turns of a few thousand tokens each: what slows the machine slows all. Useful are tokens
that are not padding. The time is that of whole optimizer steps, rows tokenized by the loader included; packing and probing
are part of the setup, which is timed apart. Left out are the first turns, and the first step of an epoch, which saves a
checkpoint.

Every way has the same learning rate. ``--model 0.5B`` is Qwen2.5's shape in bf16 with random weights, for an accelerator.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import records
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DistributedSampler
from torchtune import config
from turns import Enough, Relay, TurnLogger, configuration, our_recipe, printing_into, resampled_interval, stock_recipe

from adaptive_batch.data import row_lengths
from adaptive_batch.schedules import Progress

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

FIXED = (4, 16, 32)
ROWS = FIXED[-1]  # of a step of ours, and of what it may run at once
WARM_UP = 2  # turns
TURN_ROWS = 64  # tokens of so many rows are a turn: two steps of the largest batch
EVALUATIONS = 8
QUICK_EPOCHS = 0.1
TARGETS = {"fixed": 1.5, "packed": 1.0}


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        overrides: over the demo's configuration.
        epochs: how much is trained on unless ``--epochs`` says otherwise; below 1 saves no checkpoint.
        micro_tokens: a capacity that is far below what fits, so that micro-batches have little padding.
        more_memory: budgets beside the configured one; in the demo's 32 of the longest rows do not fit at once, which
            nothing keeps the stock recipe from.
    """

    overrides: tuple[str, ...]
    epochs: float
    micro_tokens: int
    more_memory: tuple[str, ...] = ()


MODELS = {
    "demo": Model((), 2.0, 1024, ("1GiB",)),
    "0.5B": Model(
        ("dtype=bf16", "optimizer.lr=2e-5", "tokenizer.max_seq_len=1024", "probe.device_memory=null"), 0.9, 4096
    ),
}


@dataclass(frozen=True)
class Way:
    """One way to train: torchtune's with fixed batches or packed rows, or ours."""

    name: str
    kind: str  # fixed, packed or ours
    overrides: tuple[str, ...]


@dataclass
class Run:
    """A recipe that is being trained, and what its steps were."""

    way: Way
    recipe: Any
    setup_seconds: float
    steps: Iterator[tuple[int, int, int, int, bool]]
    done: list[dict[str, Any]] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)  # after so many tokens
    tokens: int = 0
    turn: int = 0


def ways(mean_length: float, longest: int, model: Model) -> list[Way]:
    """All that is compared; packed batches have about the tokens of the fixed ones."""
    micro_tokens, more = model.micro_tokens, model.more_memory
    per_pack = 0.8 * longest
    packs = [round(rows * mean_length / per_pack) for rows in FIXED]
    of_32, of_4 = (f"batch_tokens={round(rows * mean_length)}" for rows in (ROWS, FIXED[0]))
    rows_of_32, few_tokens = f"batch_size={ROWS}", f"micro_batch_tokens={micro_tokens}"
    auto, sorted_within = "micro_batch_tokens=auto", "sample_order=seqlen sample_window="
    small = f"{micro_tokens:,} at once"
    ours = {
        f"{ROWS} rows, auto": (rows_of_32, auto),
        **{f"{ROWS} rows, auto, {memory}": (rows_of_32, auto, f"probe.device_memory={memory}") for memory in more},
        f"{ROWS} rows, {small}": (rows_of_32, few_tokens),
        f"tokens of {ROWS} rows, auto": (of_32, auto),
        **{f"tokens of {ROWS} rows, auto, {memory}": (of_32, auto, f"probe.device_memory={memory}") for memory in more},
        f"tokens of {ROWS} rows, {small}": (of_32, few_tokens),
        f"tokens of {ROWS} rows, window 256, auto": (of_32, auto, *f"{sorted_within}256".split()),
        f"tokens of {ROWS} rows, window 256, {small}": (of_32, few_tokens, *f"{sorted_within}256".split()),
        f"tokens of {ROWS} rows, window 1024, auto": (of_32, auto, *f"{sorted_within}1024".split()),
        f"tokens of {FIXED[0]} rows, window 256, auto": (of_4, auto, *f"{sorted_within}256".split()),
    }
    return [
        *(Way(f"stock: {rows} rows", "fixed", (f"batch_size={rows}",)) for rows in FIXED),
        *(Way(f"stock: {n} packs", "packed", (f"batch_size={n}", "dataset.packed=True")) for n in packs),
        *(Way(f"ours: {name}", "ours", overrides) for name, overrides in ours.items()),
    ]


# --- the model -------------------------------------------------------------------------------------------------------


def half_billion(folder: Path) -> dict[str, Any]:
    """Qwen2.5 0.5B's shape with random weights in a folder; returns the blocks of the configuration that name it."""
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
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(heads))
    return {
        "model": {"_component_": "torchtune.models.qwen2_5.qwen2_5_0_5b"},
        "checkpointer": {"checkpoint_dir": str(folder)},
    }


def with_blocks(cfg: DictConfig, blocks: dict[str, Any]) -> DictConfig:
    """The configuration of another model; its arguments replace the demo's."""
    if blocks:
        cfg.model = blocks["model"]
        cfg.checkpointer = OmegaConf.merge(cfg.checkpointer, blocks["checkpointer"])
    return cfg


def model_of(recipe: Any) -> torch.nn.Module:
    return recipe.trainer.model if hasattr(recipe, "trainer") else recipe._model


def held_out_loss(model: Any, rows: list[dict[str, Any]], *, pad_id: int, device: torch.device) -> float:
    """Mean loss of a label token on rows that are not trained on; training goes on as if this had not been."""
    chunks = model.num_output_chunks
    model.set_num_output_chunks(0)
    try:
        with torch.no_grad(), device:
            return demo.held_out_loss(model, rows, pad_id=pad_id)
    finally:
        model.set_num_output_chunks(chunks)


# --- which rows a step has -------------------------------------------------------------------------------------------


def steps_of(recipe: Any, rows: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int, bool]]:
    """Of each step: rows, tokens, label tokens, padded tokens were it run at once, and whether it is an epoch's first.

    Args:
        recipe: stock or ours, set up.
        rows: tokens and label tokens of each row of the dataset.
    """
    padded_length = None
    if hasattr(recipe, "parts"):
        epochs = (our_rows(recipe, epoch) for epoch in count())
    else:
        dataset, batch_size = recipe._dataloader.dataset, recipe._dataloader.batch_size
        if hasattr(dataset, "packs"):
            rows = [counts_of_pack(pack, dataset.padding_idx) for pack in dataset.packs]
            padded_length = dataset.max_seq_len
        epochs = (stock_rows(dataset, batch_size, epoch) for epoch in count())
    for steps in epochs:
        for number, step in enumerate(steps):
            tokens = [rows[row][0] for row in step]
            padded = len(step) * (padded_length or max(tokens))
            yield len(step), sum(tokens), sum(rows[row][1] for row in step), padded, number == 0


def counts_of_pack(pack: dict[str, torch.Tensor], padding_id: int) -> tuple[int, int]:
    """Tokens and label tokens; no sample ends with the token that packs are filled up with."""
    last = int((pack["tokens"] != padding_id).nonzero()[-1])
    return last + 1, int((pack["labels"][1:] >= 0).sum())


def stock_rows(dataset: Any, batch_size: int, epoch: int) -> list[list[int]]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    order = list(sampler)
    return [order[end - batch_size : end] for end in range(batch_size, len(order) + 1, batch_size)]


def our_rows(recipe: Any, epoch: int) -> list[list[int]]:
    planner = recipe.planner
    if recipe.settings.batch_tokens:
        return list(planner.epochs.token_batches(Progress(epoch=epoch)))
    return [piece.tolist() for piece in planner.epochs.order(Progress(epoch=epoch)).split(planner.batch_size)]


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    folder: Path,
    name: str,
    *,
    device: str,
    epochs: float | None,
    only: str,
    overrides: list[str],
) -> tuple[list[Run], Relay, int]:
    """Train a model in every way whose name matches, on the same number of tokens."""
    model = MODELS[name]
    demo.prepare(folder)
    blocks = half_billion(folder / name) if name != "demo" else {}
    common = [f"device={device}", *model.overrides, *overrides]
    cfg = configuration(folder, "any", common)
    tokenizer = config.instantiate(cfg.tokenizer)
    dataset = config.instantiate(cfg.dataset, tokenizer)
    rows = [(len(row["tokens"]), sum(label >= 0 for label in row["labels"][1:])) for row in dataset]
    lengths = row_lengths(dataset, num_workers=0, show_progress=False)
    mean_length, longest = float(lengths.double().mean()), int(lengths.max())
    total = int((epochs or model.epochs) * int(lengths.sum()))
    held_out_file = folder / "data" / "held_out.jsonl"
    held_out_rows = list(config.instantiate(cfg.dataset, tokenizer, data_files=str(held_out_file)))

    runs: dict[str, Run] = {}

    def after_step(way_name: str, num_steps: int) -> bool:
        run = runs[way_name]
        num_rows, tokens, label_tokens, padded, is_first = next(run.steps)
        run.tokens += tokens
        figures = {"rows": num_rows, "tokens": tokens, "label_tokens": label_tokens, "padded_tokens": padded}
        run.done.append({**figures, "turn": run.turn, "first_of_epoch": is_first})
        if run.tokens >= total * len(run.losses) / EVALUATIONS:
            loss = held_out_loss(
                model_of(run.recipe), held_out_rows, pad_id=tokenizer.pad_id, device=torch.device(device)
            )
            run.losses.append((run.tokens, loss))
        if run.tokens >= total:
            raise Enough
        ends = run.tokens >= (run.turn + 1) * TURN_ROWS * mean_length
        run.turn += ends
        return ends

    chosen = [way for way in ways(mean_length, longest, model) if re.search(only, way.name)]
    TurnLogger.relay = relay = Relay([way.name for way in chosen], torch.device(device), after_step=after_step)
    for way in chosen:
        start = time.perf_counter()
        cfg = with_blocks(configuration(folder, way.name, [*common, "epochs=100", *way.overrides]), blocks)
        recipe = our_recipe(cfg) if way.kind == "ours" else stock_recipe(cfg)
        runs[way.name] = Run(way, recipe, time.perf_counter() - start, steps_of(recipe, rows))
    relay.run({name: run.recipe for name, run in runs.items()})
    return list(runs.values()), relay, total


def summary(run: Run, relay: Relay, total: int) -> dict[str, Any]:
    """What a way came to."""
    name = run.way.name
    turns: dict[int, list[float]] = defaultdict(lambda: [0.0] * 4)
    for step, seconds, cpu_seconds in zip(run.done, relay.seconds[name], relay.cpu_seconds[name], strict=True):
        if step["turn"] >= WARM_UP and not step["first_of_epoch"]:
            figures = (step["tokens"], step["label_tokens"], seconds, cpu_seconds)
            turns[step["turn"]] = [one + other for one, other in zip(turns[step["turn"]], figures, strict=True)]
    micro_batches, padded = len(run.done), sum(step["padded_tokens"] for step in run.done)
    if run.way.kind == "ours":
        lines = map(
            json.loads, (Path(run.recipe.cfg.output_dir) / "adaptive_batch" / "run.jsonl").read_text().splitlines()
        )
        logged = [line for line in lines if "padding_fraction" in line]
        assert logged[-1]["tokens_seen"] == run.tokens
        micro_batches = sum(line["micro_batches"] for line in logged)
        of_steps = zip(logged, run.done, strict=True)
        padded = sum(step["tokens"] / (1 - line["padding_fraction"]) for line, step in of_steps)
    tokens, label_tokens, seconds, cpu_seconds = map(sum, zip(*turns.values(), strict=True))
    return {
        "way": name,
        "kind": run.way.kind,
        "overrides": list(run.way.overrides),
        "limit": str(run.recipe.trainer.runner.retry.limit()) if run.way.kind == "ours" else None,
        "setup_seconds": run.setup_seconds,
        "steps": len(run.done),
        "rows_per_step": sum(step["rows"] for step in run.done) / len(run.done),
        "tokens_per_step": run.tokens / len(run.done),
        "micro_batches_per_step": micro_batches / len(run.done),
        "padding": 1 - run.tokens / padded,
        "tokens_per_second": tokens / seconds,
        "label_tokens_per_second": label_tokens / seconds,
        "tokens_per_processor_second": tokens / cpu_seconds,
        "held_out_losses": run.losses,
        "held_out_loss_at": {
            f"{share:.0%}": interpolated(run.losses, share * total) for share in (0.25, 0.5, 0.75, 1.0)
        },
        "turns": {str(turn): figures for turn, figures in turns.items()},
    }


def interpolated(points: list[tuple[int, float]], tokens: float) -> float:
    """The loss after so many tokens, between the two evaluations around it."""
    after = next(index for index, (at, _) in enumerate(points) if at >= tokens)
    (at_0, loss_0), (at_1, loss_1) = points[max(0, after - 1)], points[after]
    share = (tokens - at_0) / (at_1 - at_0) if at_1 > at_0 else 1.0
    return loss_0 + share * (loss_1 - loss_0)


def ratio_with_interval(way: dict[str, Any], over: dict[str, Any]) -> tuple[float, float, float]:
    """Tokens per second over another way's, with its 95% interval; turns are drawn, the same ones of both."""
    shared = [turn for turn in way["turns"] if turn in over["turns"]]
    values = torch.tensor(
        [[one["turns"][turn][column] for one in (way, over) for column in (0, 2)] for turn in shared],
        dtype=torch.float64,
    )

    def ratio(values: torch.Tensor) -> torch.Tensor:
        tokens, seconds, tokens_over, seconds_over = values.sum(-2).unbind(-1)
        return tokens / seconds / (tokens_over / seconds_over)

    return resampled_interval(ratio, values.unsqueeze(0))


def best_of(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return max((row for row in rows if row["kind"] == kind), key=lambda row: row["tokens_per_second"])


def print_table(rows: list[dict[str, Any]], best: dict[str, dict[str, Any]], total: int) -> None:
    width = max(len(row["way"]) for row in rows) + 1
    shares = list(rows[0]["held_out_loss_at"])
    print(
        f"\n{'':<{width}} {'rows':>5} {'tokens':>7} {'micro-':>7} {'':>8} {'tokens':>8} {'labels':>8} {'over best stock':>16} "
        f"{'held-out loss after so much of the tokens':>{8 * len(shares)}} {'setup':>6}"
    )
    print(
        f"{'':<{width}} {'/step':>5} {'/step':>7} {'batches':>7} {'padding':>8} {'/ s':>8} {'/ s':>8} {'fixed':>8} {'packed':>7} "
        + "".join(f"{share:>8}" for share in shares)
        + f" {'s':>6}"
    )
    for row in rows:
        rate = row["tokens_per_second"]
        over = [f"{rate / best[kind]['tokens_per_second']:.2f}" if kind in best else "" for kind in TARGETS]
        print(
            f"{row['way']:<{width}} {row['rows_per_step']:>5.1f} {row['tokens_per_step']:>7,.0f} "
            f"{row['micro_batches_per_step']:>7.2f} {row['padding']:>8.1%} {rate:>8,.0f} "
            f"{row['label_tokens_per_second']:>8,.0f} {over[0]:>8} {over[1]:>7} "
            + "".join(f"{loss:>8.3f}" for loss in row["held_out_loss_at"].values())
            + f" {row['setup_seconds']:>6.1f}"
        )
    print(f"\n{total:,} tokens each; the best of stock: {', '.join(row['way'] for row in best.values())}")


def compare(rows: list[dict[str, Any]], best: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours over the best of stock, with intervals."""
    return [
        {"way": row["way"], "over": best[kind]["way"], "kind": kind, "ratio": ratio, "interval_95": [low, high]}
        for row in rows
        if row["kind"] == "ours"
        for kind in best
        for ratio, low, high in [ratio_with_interval(row, best[kind])]
    ]


def print_ratios(ratios: list[dict[str, Any]]) -> None:
    width = max((len(ratio["way"]) for ratio in ratios), default=0) + 1
    for kind in dict.fromkeys(ratio["kind"] for ratio in ratios):
        target, of_kind = TARGETS[kind], [ratio for ratio in ratios if ratio["kind"] == kind]
        print(f"\ntokens per second over {of_kind[0]['over']}; target {target}")
        for ratio in of_kind:
            low, high = ratio["interval_95"]
            verdict = "met" if ratio["ratio"] >= target else "NOT met"
            print(f"{ratio['way']:<{width}} {ratio['ratio']:.3f}, 95% interval {low:.3f} to {high:.3f}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, help="epochs' worth of tokens for each way (default: 2; 0.9 for 0.5B)")
    parser.add_argument("--quick", action="store_true", help="a tenth of an epoch")
    parser.add_argument("--model", choices=tuple(MODELS), default="demo", help="default: %(default)s")
    parser.add_argument("--only", default="", metavar="REGEX", help="ways whose name matches; each holds a model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the configuration, for all")
    arguments = parser.parse_args()
    if arguments.epochs is not None and arguments.epochs < QUICK_EPOCHS:
        parser.error(f"--epochs must be {QUICK_EPOCHS} or more: the first turns are left out")

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
        with printing_into(folder / "printed.txt"):
            runs, relay, total = measure(
                folder,
                arguments.model,
                device=arguments.device,
                epochs=QUICK_EPOCHS if arguments.quick else arguments.epochs,
                only=arguments.only,
                overrides=arguments.overrides,
            )
        rows = [summary(run, relay, total) for run in runs]
    best = {kind: best_of(kind, rows) for kind in TARGETS if any(row["kind"] == kind for row in rows)}
    ratios = compare(rows, best)
    print(f"{arguments.model} model on {arguments.device}, {torch.get_num_threads()} thread")
    print_table(rows, best, total)
    print_ratios(ratios)

    suffix = "" if arguments.model == "demo" else f"_{arguments.model}"
    records.write(
        f"throughput{suffix}",
        arguments.output,
        model=arguments.model,
        overrides=arguments.overrides,
        tokens=total,
        columns_of_turns=["tokens", "label_tokens", "seconds", "processor_seconds"],
        targets=TARGETS,
        ratios=ratios,
        ways=rows,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
