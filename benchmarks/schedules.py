"""Does it pay to grow the batch? Four ways to choose it, on the same rows in the same order.

    python benchmarks/schedules.py [--quick] [--seeds 1 2 3] [--output DIR] [key=value ...]

The demo's model and rows, two epochs, the real recipe: a constant small batch, a constant large one, a ramp from the one to
the other by doubling (bert24's example at small scale), and one that follows the gradient noise scale. All have the same rows
at once, the same peak of the learning rate, and the same warm-up and cosine decay by samples. Once more the larger batches
have a rate that rises with the square root of the batch; and the small one has the rate that this gives the large one, to
tell what a larger batch does from what a larger rate does.

All ways of one seed are trained in one process, in turns of as many rows as the large batch has: what slows the machine slows
all. The seconds are those of whole steps, the loader and an epoch's save included; setup, validation and the last save are
not. Seeds differ in the order of rows alone: the base weights are fixed. The audit of each run must hold, and stages, steps,
samples and rates of the ramp must be what is computed here by hand.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import records
import torch
from adaptive_full_finetune import AdaptiveFullFinetuneRecipe
from matplotlib.figure import Figure
from torchtune import config
from turns import T_OF_95, Relay, TurnLogger, configuration, our_recipe, printing_into, resampled_interval

from adaptive_batch.report import audit, read_records
from adaptive_batch.report.drawing import LIGHT

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

SMALL, LARGE, AT_ONCE = 16, 64, 8  # rows of a step, and of a micro-batch
EPOCHS = 2
RATE = 2e-3  # the demo's own, which it has for steps of 4 rows; tuned for none of these ways
NUM_ROWS, NUM_QUICK_ROWS = demo.NUM_TRAIN_ROWS, 512
WARM_UP = 1 / 16  # of all samples
POINTS = 8  # held-out losses along the way, the last one at the end
WINDOWS = 16  # parts of training that the training loss is averaged over


@dataclass(frozen=True)
class Way:
    """One way to choose the batch.

    Attributes:
        lr_scaling: the rule by which the rate follows the batch, from the small batch's.
        rate: the peak that belongs to the small batch.
        once: trained with the first seed alone.
    """

    name: str
    overrides: tuple[str, ...]
    lr_scaling: str = "none"
    rate: float = RATE
    once: bool = False

    @property
    def title(self) -> str:
        rate = f", lr {self.rate:g}" if self.rate != RATE else ""
        return self.name + rate + (f", {self.lr_scaling}" if self.lr_scaling != "none" else "")

    @property
    def configured_batch(self) -> int:
        """The rows that the schedule of the rate counts its steps in."""
        return LARGE if self.name == CONSTANT_LARGE else SMALL


RAMP = (
    f"{{_component_: adaptive_batch.schedules.ramp_by_doubling, start: {SMALL}, end: {LARGE}, over: {EPOCHS / 2:g}ep}}"
)
BY_NOISE = f"{{_component_: adaptive_batch.schedules.by_noise_scale, start: {SMALL}, maximum: {LARGE}}}"
CONSTANT_SMALL, CONSTANT_LARGE = (f"constant {rows}" for rows in (SMALL, LARGE))
RAMPED, NOISE_LED = f"ramp {SMALL} to {LARGE}", "by noise scale"
BATCHES = {
    CONSTANT_SMALL: (f"batch_size={SMALL}",),
    CONSTANT_LARGE: (f"batch_size={LARGE}",),
    RAMPED: (f"batch_size={SMALL}", f"batch_size_schedule={RAMP}", "grow_beyond_maximum=True"),
    NOISE_LED: (f"batch_size={SMALL}", f"batch_size_schedule={BY_NOISE}", "grow_beyond_maximum=True"),
}
WAYS = (
    *(Way(name, overrides) for name, overrides in BATCHES.items()),
    Way(CONSTANT_LARGE, BATCHES[CONSTANT_LARGE], "sqrt"),
    Way(RAMPED, BATCHES[RAMPED], "sqrt"),
    Way(NOISE_LED, BATCHES[NOISE_LED], "sqrt", once=True),
    Way(CONSTANT_SMALL, BATCHES[CONSTANT_SMALL], rate=RATE * math.sqrt(LARGE / SMALL), once=True),
)


@dataclass
class Run:
    """A way with a seed, while it is trained."""

    way: Way
    seed: int
    recipe: AdaptiveFullFinetuneRecipe
    samples: int = 0
    turns: list[int] = field(default_factory=list)  # which each step was in
    held_out: list[tuple[int, float]] = field(default_factory=list)  # loss after so many samples

    def step_done(self) -> bool:
        """Note a step; says whether it ends a turn, which has as many rows as the large batch."""
        before, self.samples = self.samples, self.recipe.progress.samples
        self.turns.append(before // LARGE)
        return self.samples // LARGE > before // LARGE


# --- training ------------------------------------------------------------------------------------------------------------


def train(folder: Path, ways: list[Way], *, seed: int, num_rows: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Train all ways with one seed, in turns, and say what each came to."""
    common = [
        f"dataset.split=train[:{num_rows}]",
        f"seed={seed}",
        f"epochs={EPOCHS}",
        f"micro_batch_size={AT_ONCE}",
        f"reference_batch_size={SMALL}",
        "sample_order=random",
        "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        *overrides,
    ]
    total = EPOCHS * num_rows
    any_cfg = configuration(folder, "any", [])
    tokenizer = config.instantiate(any_cfg.tokenizer)
    held_out_file = str(folder / "data" / "held_out.jsonl")
    held_out_rows = list(config.instantiate(any_cfg.dataset, tokenizer, data_files=held_out_file))
    runs: dict[str, Run] = {}

    def after_step(name: str, num_steps: int) -> bool:
        run = runs[name]
        ends_turn = run.step_done()
        if run.samples * POINTS >= total * (len(run.held_out) + 1):
            loss = held_out_loss(run.recipe.trainer.model, held_out_rows, pad_id=tokenizer.pad_id)
            run.held_out.append((run.samples, loss))
        return ends_turn

    names = {way.title: way for way in ways}
    TurnLogger.relay = relay = Relay(list(names), torch.device("cpu"), after_step=after_step)
    for name, way in names.items():
        own = [
            f"lr_scaling={way.lr_scaling}",
            f"optimizer.lr={way.rate}",
            f"lr_scheduler.num_warmup_steps={round(WARM_UP * total / way.configured_batch)}",
        ]
        cfg = configuration(folder, name, [*common, *way.overrides, *own])
        cfg.output_dir = str(folder / f"{way.title}, seed {seed}".replace(", ", "_").replace(" ", "_"))
        runs[name] = Run(way, seed, our_recipe(cfg))
    relay.run({name: run.recipe for name, run in runs.items()})
    for run in runs.values():
        run.recipe.cleanup()
    summaries = [
        summary(run, relay.seconds[name], relay.cpu_seconds[name], num_rows=num_rows) for name, run in runs.items()
    ]
    assert len({tuple(one["tokens_of_turns"]) for one in summaries if one["way"] != NOISE_LED}) == 1, (
        "not the same rows"
    )
    return summaries


def held_out_loss(model: Any, rows: list[dict[str, Any]], *, pad_id: int) -> float:
    """Mean loss of a label token on rows that are not trained on; training goes on as if this had not been."""
    chunks = model.num_output_chunks
    model.set_num_output_chunks(0)
    try:
        with torch.no_grad():
            return demo.held_out_loss(model, rows, pad_id=pad_id)
    finally:
        model.set_num_output_chunks(chunks)


def summary(run: Run, seconds: list[float], cpu_seconds: list[float], *, num_rows: int) -> dict[str, Any]:
    """What a run came to, from its record; its audit must hold."""
    output_dir = Path(run.recipe.cfg.output_dir)
    proof = audit(output_dir)
    assert proof.holds, "\n".join(proof.lines)
    recorded = read_records(output_dir / "adaptive_batch" / "run.jsonl")
    steps = [record for record in recorded if record["kind"] == "step"]
    assert len(steps) == len(seconds)
    assert steps[-1]["samples_seen"] == EPOCHS * num_rows
    if run.way.name == RAMPED:
        check_ramp(run.way, recorded, num_rows=num_rows)
    of_turns: dict[int, list[float]] = {}
    tokens = 0
    for turn, step, *times in zip(run.turns, steps, seconds, cpu_seconds, strict=True):
        row = of_turns.setdefault(turn, [0.0, 0.0, 0])
        new = [*times, step["tokens_seen"] - tokens]
        of_turns[turn] = [one + other for one, other in zip(row, new, strict=True)]
        tokens = step["tokens_seen"]
    wall, processor, tokens_of_turns = (list(column) for column in zip(*of_turns.values(), strict=True))
    return {
        "way": run.way.name,
        "lr_scaling": run.way.lr_scaling,
        "rate": run.way.rate,
        "seed": run.seed,
        "title": run.way.title,
        "audit": proof.lines[-1],
        "steps": len(steps),
        "samples": steps[-1]["samples_seen"],
        "tokens": tokens,
        "micro_batches": sum(step["micro_batches"] for step in steps),
        "seconds": sum(wall),
        "processor_seconds": sum(processor),
        "tokens_per_second": tokens / sum(wall),
        "highest_rate": max(step["lr"] for step in steps),
        "held_out": run.held_out,
        "train": windows(steps, total=EPOCHS * num_rows),
        "batches": batches_of(steps),
        "noise_scale": [
            (step["samples_seen"], round(step["gradient_noise_scale"], 2))
            for step in steps
            if "gradient_noise_scale" in step
        ],
        "seconds_of_turns": [round(seconds, 4) for seconds in wall],
        "tokens_of_turns": tokens_of_turns,
    }


def windows(steps: list[dict[str, Any]], *, total: int) -> list[tuple[int, float]]:
    """`loss_per_full_batch` averaged over parts of training, each by the rows that it is of: (samples at the end, loss)."""
    sums = [[0.0, 0.0] for _ in range(WINDOWS)]
    rows = 0
    for step in steps:
        rows += step["batch_size"]
        if "loss_per_full_batch" in step:
            window = sums[(step["samples_seen"] - 1) * WINDOWS // total]
            window[0] += rows * step["loss_per_full_batch"]
            window[1] += rows
            rows = 0
    return [(total * (index + 1) // WINDOWS, loss / count) for index, (loss, count) in enumerate(sums)]


def batches_of(steps: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(samples before the step, its rows) for the first step and each with other rows than the step before it.

    The last step of an epoch that holds what is left is no change of the batch.
    """
    last_of_epoch = {step["epoch"]: step["step"] for step in steps}
    changes: list[tuple[int, int]] = []
    for step in steps:
        rows = step["batch_size"]
        is_rest = bool(changes) and rows < changes[-1][1] and last_of_epoch[step["epoch"]] == step["step"]
        if not changes or (rows != changes[-1][1] and not is_rest):
            changes.append((step["samples_seen"] - rows, rows))
    return changes


# --- the ramp by hand ----------------------------------------------------------------------------------------------------


def check_ramp(way: Way, recorded: list[dict[str, Any]], *, num_rows: int) -> None:
    """Compare the plan, and every step that was done, with what the ramp is by hand."""
    by_hand, rates = ramp_by_hand(way, num_rows=num_rows)
    planned = next(record for record in recorded if record["kind"] == "stages")["stages"]
    assert [
        (
            stage["batch_least"],
            stage["micro_batches_least"],
            stage["steps"],
            (stage["first"]["steps"], stage["last"]["steps"]),
            (stage["first"]["samples"], stage["last"]["samples"]),
        )
        for stage in planned
    ] == by_hand, planned
    assert all(stage["batch_least"] == stage["batch_most"] for stage in planned)
    assert all(stage["micro_batches_least"] == stage["micro_batches_most"] for stage in planned)
    for stage in planned:
        first, last = stage["first"]["steps"], stage["last"]["steps"] - 1
        for found, step in ((stage["learning_rate_first"], first), (stage["learning_rate_last"], last)):
            assert math.isclose(found, rates[step], rel_tol=1e-12), (step, found, rates[step])

    done = [record for record in recorded if record["kind"] == "step"]
    expected = [
        (first + step + 1, samples + (step + 1) * batch, batch, micro_batches)
        for batch, micro_batches, steps, (first, _), (samples, _) in by_hand
        for step in range(steps)
    ]
    assert [(s["step"], s["samples_seen"], s["batch_size"], s["micro_batches"]) for s in done] == expected
    for step, rate in zip(done, rates, strict=True):
        assert math.isclose(step["lr"], rate, rel_tol=1e-12), (step["step"], step["lr"], rate)


def ramp_by_hand(way: Way, *, num_rows: int) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Stages as (batch, micro-batches, steps, steps from and to, samples from and to), and the rate of every step.

    The ramp spans half of training, one epoch. Each of the two batches below the last one has half of that; with 2048 rows

        batch 16 as 2 x 8: 1024 samples,  64 steps,   0 to  64
        batch 32 as 4 x 8: 1024 samples,  32 steps,  64 to  96
        batch 64 as 8 x 8: 2048 samples,  32 steps,  96 to 128

    The rate is the peak times what a cosine with warm-up over 256 samples says at the step that a constant batch of 16
    would be at, 1, 2 and 4 of them further each step, and where it is scaled times 1, the square root of 2, and 2.
    """
    half = num_rows // 2
    stages: list[tuple[Any, ...]] = [
        (16, 2, half // 16, (0, half // 16), (0, half)),
        (32, 4, half // 32, (half // 16, 3 * half // 32), (half, 2 * half)),
        (64, 8, half // 32, (3 * half // 32, half // 8), (2 * half, 4 * half)),
    ]
    warm_up, end = num_rows / 8 / 16, 2 * num_rows / 16
    rates = []
    for batch, _, steps, _, (samples, _) in stages:
        for step in range(steps):
            at = samples / 16 + step * batch / 16
            part = at / warm_up if at < warm_up else (1 + math.cos(math.pi * (at - warm_up) / (end - warm_up))) / 2
            rates.append(way.rate * part * (math.sqrt(batch / 16) if way.lr_scaling == "sqrt" else 1))
    return stages, rates


# --- what it came to -----------------------------------------------------------------------------------------------------


def table_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way: means over its seeds, and what it is against the small batch with the same seeds."""
    rows = []
    for title in dict.fromkeys(run["title"] for run in runs):
        mine = [run for run in runs if run["title"] == title]
        base = [one for run in mine for one in runs if one["title"] == CONSTANT_SMALL and one["seed"] == run["seed"]]
        losses = [run["held_out"][-1][1] for run in mine]
        pairs = [
            list(zip(run["seconds_of_turns"], other["seconds_of_turns"], strict=True))
            for run, other in zip(mine, base, strict=True)
        ]
        seconds = torch.tensor(pairs, dtype=torch.float64)
        ratio, low, high = resampled_interval(lambda values: torch.div(*values.sum(-2).unbind(-1)), seconds)
        rows.append(
            {
                "title": title,
                "seeds": len(mine),
                "highest_rate": max(run["highest_rate"] for run in mine),
                "steps": [run["steps"] for run in mine],
                "micro_batches": statistics.mean(run["micro_batches"] for run in mine),
                "seconds": statistics.mean(run["seconds"] for run in mine),
                "processor_seconds": statistics.mean(run["processor_seconds"] for run in mine),
                "tokens_per_second": statistics.mean(run["tokens_per_second"] for run in mine),
                "seconds_over_small": ratio,
                "seconds_over_small_interval_95": [low, high],
                "held_out": statistics.mean(losses),
                "held_out_range": [min(losses), max(losses)],
                "last_train": statistics.mean(run["train"][-1][1] for run in mine),
            }
        )
    return rows


def differences_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Held-out loss at the end of each way less that of each constant batch at the one rate, seed by seed.

    Two measures of noise: the range of the constant batch's loss over its seeds, and the 95% interval of the mean of the
    differences, which is narrower, as runs of one seed have the same rows in the same order.
    """
    losses = {(run["title"], run["seed"]): run["held_out"][-1][1] for run in runs}
    found = []
    for constant in (CONSTANT_SMALL, CONSTANT_LARGE):
        own = [loss for (title, _), loss in losses.items() if title == constant]
        spread = max(own) - min(own)
        for title in dict.fromkeys(run["title"] for run in runs if run["title"] != constant):
            of_seeds = [loss - losses[constant, seed] for (one, seed), loss in losses.items() if one == title]
            mean, half = statistics.mean(of_seeds), None
            if len(of_seeds) in T_OF_95:
                half = T_OF_95[len(of_seeds)] * statistics.stdev(of_seeds) / math.sqrt(len(of_seeds))
            found.append(
                {
                    "way": title,
                    "less": constant,
                    "of_seeds": of_seeds,
                    "mean": mean,
                    "half_of_interval_95": half,
                    "range_of_constant": spread,
                    "within_range": abs(mean) <= spread if len(own) > 1 else None,
                    "interval_holds_0": abs(mean) <= half if half is not None else None,
                }
            )
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    head = ("", "seeds", "peak lr", "steps", "micro-batches", "s", "cpu s", "tokens/s", "s / small", "95% interval")
    head += ("held-out loss", "range", "train, last 1/16")
    lines = [
        (
            row["title"],
            str(row["seeds"]),
            f"{row['highest_rate']:.2g}",
            " ".join(map(str, dict.fromkeys(row["steps"]))),
            f"{row['micro_batches']:.0f}",
            f"{row['seconds']:.1f}",
            f"{row['processor_seconds']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['seconds_over_small']:.3f}",
            "{:.3f} to {:.3f}".format(*row["seconds_over_small_interval_95"]),
            f"{row['held_out']:.4f}",
            "{:.4f} to {:.4f}".format(*row["held_out_range"]),
            f"{row['last_train']:.4f}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        first, *others = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def print_differences(differences: list[dict[str, Any]]) -> None:
    width = max(len(one["way"]) for one in differences)
    for constant in dict.fromkeys(one["less"] for one in differences):
        mine = [one for one in differences if one["less"] == constant]
        spread = mine[0]["range_of_constant"]
        of_seeds = f", whose range over seeds is {spread:.4f}" if mine[0]["within_range"] is not None else ""
        print(f"\nheld-out loss at the end less that of {constant}{of_seeds}")
        for one in mine:
            line, half = f"{one['way']:<{width}} {one['mean']:+.4f}", one["half_of_interval_95"]
            if one["within_range"] is not None:
                line += f", {'within' if one['within_range'] else 'beyond'} the range"
            if half is not None:
                line += f"; seed by seed 95% interval {one['mean'] - half:+.4f} to {one['mean'] + half:+.4f}"
                line += ", holds 0" if one["interval_holds_0"] else ""
            print(line)


# --- the figure ----------------------------------------------------------------------------------------------------------

# Colour, line, marker, width: where two lines are one, the wide one is seen below the thin one.
STYLES: dict[str, dict[str, Any]] = {
    CONSTANT_SMALL: {"color": LIGHT["blue"], "linestyle": "-", "marker": "o", "linewidth": 5, "alpha": 0.45},
    CONSTANT_LARGE: {"color": LIGHT["vermilion"], "linestyle": "-", "marker": "s", "linewidth": 2},
    RAMPED: {"color": LIGHT["green"], "linestyle": "-", "marker": "^", "linewidth": 2},
    NOISE_LED: {"color": LIGHT["purple"], "linestyle": "--", "marker": "D", "linewidth": 2, "fillstyle": "none"},
}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Losses over samples, the batch, and the loss at the end over steps."""
    figure = Figure(figsize=(13, 9), layout="constrained", dpi=120)
    (train_axes, held_axes), (batch_axes, step_axes) = figure.subplots(2, 2)
    total, seeds = runs[0]["samples"], len({run["seed"] for run in runs})
    same_rate = [run for run in runs if run["title"] in BATCHES]
    for name, style in STYLES.items():
        mine = [run for run in same_rate if run["way"] == name]
        for axes, key in ((train_axes, "train"), (held_axes, "held_out")):
            curve(axes, [run[key] for run in mine], {**style, "label": name, "markersize": 5})
        for number, run in enumerate(mine):
            at, rows = zip(*run["batches"], (total, run["batches"][-1][1]), strict=True)
            batch_axes.step(at, rows, where="post", **{**style, "marker": ""}, label=name if number == 0 else None)
    for title in dict.fromkeys(run["title"] for run in runs):
        mine = [run for run in runs if run["title"] == title]
        style = STYLES[mine[0]["way"]]
        marks = {"color": style["color"], "marker": style["marker"], "markersize": 8, "linestyle": ""}
        marks["fillstyle"] = "full" if title in BATCHES else "none"
        losses = [run["held_out"][-1][1] for run in mine]
        step_axes.plot([run["steps"] for run in mine], losses, **marks, label=title, alpha=0.8)

    over = f"mean of {seeds} seeds, and their range" if seeds > 1 else "one seed"
    each = ", each seed" if seeds > 1 else ""
    titles = {
        train_axes: (f"Training loss; {over}", "samples", "mean loss of a label token"),
        held_axes: (f"Held-out loss; {over}", "samples", "mean loss of a label token"),
        batch_axes: (f"Batch size{each}", "samples", "rows of a step"),
        step_axes: (
            f"Held-out loss at the end{each}; hollow: another learning rate",
            "optimizer steps",
            "mean loss of a label token",
        ),
    }
    for axes, (title, x_label, y_label) in titles.items():
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.grid(color=LIGHT["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (train_axes, held_axes, batch_axes):
        axes.set_xlim(0, total * 1.01)
    for axes, key in ((train_axes, "train"), (held_axes, "held_out")):  # the first fall from 7.6 would flatten the rest
        shown = [loss for run in same_rate for samples, loss in run[key] if samples > total / 8]
        axes.set_ylim(min(shown) - 0.1, max(shown) + 0.1)
        axes.legend(frameon=False)
    batch_axes.set_ylim(0, LARGE * 1.1)
    batch_axes.set_yticks([SMALL, 2 * SMALL, LARGE])
    batch_axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, 0.9))
    step_axes.legend(frameon=False, fontsize=9)
    figure.suptitle(f"The demo's model: {total:,} samples, peak learning rate {RATE:g}", fontsize=14)
    figure.savefig(path)


def curve(axes: Any, curves: list[list[tuple[int, float]]], style: dict[str, Any]) -> None:
    """The mean of curves, with their range behind it."""
    samples = [statistics.mean(point[0] for point in points) for points in zip(*curves, strict=True)]
    losses = [[point[1] for point in points] for points in zip(*curves, strict=True)]
    axes.plot(samples, list(map(statistics.mean, losses)), **style)
    axes.fill_between(
        samples, list(map(min, losses)), list(map(max, losses)), color=style["color"], alpha=0.2, linewidth=0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, one seed, one rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="an empty folder, where runs and their prints stay")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the configuration, for all")
    arguments = parser.parse_args()
    num_rows = NUM_QUICK_ROWS if arguments.quick else NUM_ROWS
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds

    runs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
        demo.prepare(folder)
        for seed in seeds:
            ways = [way for way in WAYS if seed == seeds[0] or not way.once]
            ways = ways[: len(BATCHES)] if arguments.quick else ways
            with printing_into(folder / f"printed_{seed}.txt"):
                runs += train(folder, ways, seed=seed, num_rows=num_rows, overrides=arguments.overrides)
            print(
                f"seed {seed}: {len(ways)} ways are trained; each audit holds, and the ramp is as by hand", flush=True
            )
    rows, differences = table_of(runs), differences_of(runs)
    print(f"\n{EPOCHS * num_rows:,} samples, {runs[0]['tokens']:,} tokens each; {torch.get_num_threads()} thread")
    print_table(rows)
    print_differences(differences)

    written = records.write(
        f"schedules{'_quick' if arguments.quick else ''}",
        arguments.output,
        overrides=arguments.overrides,
        rows=num_rows,
        epochs=EPOCHS,
        rows_at_once=AT_ONCE,
        rate=RATE,
        seeds=seeds,
        ways=[asdict(way) for way in WAYS],
        table=rows,
        differences=differences,
        runs=runs,
    )
    figure = written.with_suffix(".png")
    draw(runs, figure)
    print(f"drawn in {figure}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
