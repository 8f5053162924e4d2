"""Does it pay? Serial steps and held-out loss of a batch that grows, beside the best constant
batch, at equal tokens.

    python benchmarks/pays.py [--tokens N] [--seeds 0 1 2 3 4] [--jobs 2] [--quick] [--output DIR]

A small Llama is trained from nothing on Python's own source code, each token once, by the real
recipe: a warm-up, then a half cosine to 0, by samples. First a sweep, one seed: constant batches,
and what grows from each way's own start, each with several peaks of the rate; the best rate of each
is kept. Then several seeds, of weights and order, of

    the constant batch with the lowest loss
    constant batches of 2 and 4 times as many rows, at their own best rates
    seesaw from the best batch, with and without a cap
    seesaw with beta2 and weight decay that follow the batch
    the noise scale from the best batch, at a rate that follows the square root of the batch

At last come constant batches over a range of 8 with one beta2, and with a beta2 of one half-life:
of a large one that belongs to the smallest batch, and of a small one that belongs to the largest;
all at the rates that are best with the large one.

The loss is the mean over the tokens of files that are not trained on; differences are taken seed by
seed. Each run is a process of one thread; as many run at once as there are jobs, so that its
seconds say little, and processor seconds more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import records
import torch
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from torch.nn import functional
from torchtune.models.llama3_2 import llama3_2
from turns import T_OF_95, our_recipe, printing_into, processor_seconds

from adaptive_batch.report import audit, read_records
from adaptive_batch.report.drawing import LIGHT

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

LENGTH = 128  # tokens of a row
HELD_OUT_ROWS = 512
MODEL: dict[str, Any] = {
    "vocab_size": demo.MODEL["vocab_size"],
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 64,
    "intermediate_dim": 192,
    "max_seq_len": LENGTH,
}
BATCHES = (1, 2, 4, 8, 16)
BASE_BATCH, BASE_RATE = (
    8,
    4e-3,
)  # where rates are sought around; others by the square root of the batch
RATES = (0.5, 1.0, 2.0)
WARM_UP = 0.05  # of all samples
BETA2, BETA2_OF_LARGEST = 0.999, 0.95
BETA2_SEEDS = 2
AT_ONCE = 32
TOLERANCE = 0.005  # of a loss that is higher


class Rows:
    """Rows of the same length, without a padding token: int32, `[rows, tokens]`."""

    def __init__(self, tokenizer: object, path: str, count: int | None = None) -> None:
        self._rows = torch.load(path, weights_only=True)[:count]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self._rows[index].tolist()
        return {"tokens": tokens, "labels": tokens}


class NoTokenizer:
    """What the recipe asks of one: rows are tokens already."""

    pad_id = 0
    max_seq_len = LENGTH


@dataclass(frozen=True)
class Way:
    """How a run chooses its batch.

    Attributes:
        name: of the way, the same for all its rates and seeds.
        batch: rows of a step, at first.
        rate: peak of the learning rate, which belongs to `batch`.
        overrides: key=value.
        beta2: of AdamW.
    """

    name: str
    batch: int
    rate: float
    overrides: tuple[str, ...] = ()
    beta2: float = BETA2
    seed: int = 0


def constant(batch: int, rate: float) -> Way:
    return Way(f"constant {batch}", batch, rate)


def seesaw(batch: int, rate: float, *, times: int | None = None, companions: bool = False) -> Way:
    most = "null" if times is None else str(times * batch)
    rule = (
        "batch_size_schedule={_component_: adaptive_batch.schedules.seesaw, factor: null,"
        f" maximum: {most}}}"
    )
    more = ("scale_with_batch={beta2: half_life, weight_decay: per_token}",) if companions else ()
    name = (
        "seesaw"
        + ("" if times is None else f", at most {times} times")
        + (" with companions" if companions else "")
    )
    return Way(name, batch, rate, (rule, "grow_beyond_maximum=True", *more))


def by_noise(batch: int, rate: float) -> Way:
    rule = (
        f"{{_component_: adaptive_batch.schedules.by_noise_scale, start: {batch}, maximum:"
        f" {8 * batch}}}"
    )
    small = f"micro_batch_size={batch // 2}"  # the noise scale takes two micro-batches
    return Way(
        "by noise scale",
        batch,
        rate,
        (f"batch_size_schedule={rule}", "grow_beyond_maximum=True", "lr_scaling=sqrt", small),
    )


# --- data


def prepare(folder: Path, *, rows: int, seeds: Sequence[int]) -> None:
    """Make the rows of training and those held out, and the weights to begin with."""
    demo.prepare(folder)
    tokenizer = Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    train: list[int] = []
    held_out: list[int] = []
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(paths)
    for number, path in enumerate(paths):
        if len(held_out) >= HELD_OUT_ROWS * LENGTH and len(train) >= rows * LENGTH:
            break
        text = path.read_text(encoding="utf-8", errors="ignore")
        (held_out if number % 20 == 0 else train).extend(tokenizer.encode(text).ids)
    for name, tokens, count in (("train", train, rows), ("held_out", held_out, HELD_OUT_ROWS)):
        if len(tokens) < count * LENGTH:
            raise SystemExit(
                f"{library} has {len(tokens):,} tokens of {name}; take --tokens below that"
            )
        cut = torch.tensor(tokens[: count * LENGTH], dtype=torch.int32).view(count, LENGTH)
        torch.save(cut, folder / f"{name}.pt")
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        model = llama3_2(**MODEL)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0, 0.02, generator=generator)
        (folder / f"base_{seed}").mkdir()
        torch.save(model.state_dict(), folder / f"base_{seed}" / "model.pt")


def configuration(folder: Path, way: Way, *, rows: int) -> dict[str, Any]:
    name = f"{way.name}, {way.batch}, {way.rate:g}, {way.beta2:g}, {way.seed}".replace(
        ", ", "_"
    ).replace(" ", "_")
    return {
        "output_dir": str(folder / name),
        "model": {"_component_": "torchtune.models.llama3_2.llama3_2", **MODEL},
        "tokenizer": {"_component_": "pays.NoTokenizer"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(folder / f"base_{way.seed}"),
            "checkpoint_files": ["model.pt"],
            "recipe_checkpoint": None,
            "output_dir": str(folder / name),
            "model_type": "LLAMA3_2",
        },
        "dataset": {"_component_": "pays.Rows", "path": str(folder / "train.pt"), "count": rows},
        "seed": way.seed,
        "shuffle": True,
        "sample_order": "random",
        "epochs": 1,
        "max_steps_per_epoch": None,
        "batch_size": way.batch,
        "micro_batch_size": AT_ONCE,
        "gradient_accumulation_steps": 1,
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "lr": way.rate,
            "betas": [0.9, way.beta2],
            "weight_decay": 0.1,
        },
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": round(WARM_UP * rows / way.batch),
        },
        "clip_grad_norm": 1.0,
        "loss": {
            "_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss",
            "num_output_chunks": 1,
        },
        "device": "cpu",
        "dtype": "fp32",
        "resume_from_checkpoint": False,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "compile": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / name / "logs"),
        },
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }


# --- a run


def train(folder: Path, way: Way, rows: int) -> dict[str, Any]:
    """Train one run, in a process of its own, and say what it came to; its audit must hold."""
    torch.set_num_threads(1)
    os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
    cfg = OmegaConf.merge(
        configuration(folder, way, rows=rows), OmegaConf.from_dotlist(list(way.overrides))
    )
    with printing_into(folder / f"printed_{os.getpid()}.txt"):
        recipe = our_recipe(cfg)
        start, cpu_start = time.perf_counter(), processor_seconds()
        recipe.train()
        seconds, cpu_seconds = time.perf_counter() - start, processor_seconds() - cpu_start
        recipe.cleanup()
    proof = audit(Path(cfg.output_dir))
    assert proof.holds, "\n".join(proof.lines)
    recorded = read_records(Path(cfg.output_dir) / "adaptive_batch" / "run.jsonl")
    steps = [record for record in recorded if record["kind"] == "step"]
    assert steps[-1]["samples_seen"] == rows
    return {
        **asdict(way),
        "steps": len(steps),
        "rows": rows,
        "tokens": steps[-1]["tokens_seen"],
        "held_out": held_out_loss(recipe.trainer.model, folder),
        "seconds": round(seconds, 2),
        "processor_seconds": round(cpu_seconds, 2),
        "largest_batch": max(step["batch_size"] for step in steps),
        "batches": [
            (step["samples_seen"], step["batch_size"], step["lr"])
            for step in steps[:: max(1, len(steps) // 50)]
        ],
        "train": windows(steps, rows),
    }


def windows(steps: Sequence[Mapping[str, Any]], rows: int, *, parts: int = 20) -> list[float]:
    """Training loss averaged over equal parts of the data."""
    sums = [[0.0, 0] for _ in range(parts)]
    for step in steps:
        part = sums[min(parts - 1, (step["samples_seen"] - 1) * parts // rows)]
        part[0] += step["loss"] * step["batch_size"]
        part[1] += step["batch_size"]
    return [round(total / count, 5) for total, count in sums if count]


def held_out_loss(model: torch.nn.Module, folder: Path) -> float:
    """Mean loss of a token on rows that are not trained on."""
    rows = torch.load(folder / "held_out.pt", weights_only=True).long()
    model.set_num_output_chunks(0)  # type: ignore[operator]
    total = 0.0
    with torch.inference_mode():
        for part in rows.split(64):
            logits = model(part)[:, :-1].float().flatten(0, 1)
            total += functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum").item()
    return total / (rows[:, 1:].numel())


# --- what is compared


class Bench:
    """Trains runs, some at a time, and keeps what they came to.

    Args:
        folder: holds everything.
        rows: of each run.
        jobs: runs at a time.
    """

    def __init__(self, folder: Path, *, rows: int, jobs: int) -> None:
        self._folder, self._rows = folder, rows
        self._pool = ProcessPoolExecutor(
            jobs, mp_context=get_context("spawn"), max_tasks_per_child=1
        )
        self.runs: list[dict[str, Any]] = []

    def run(self, ways: Sequence[Way]) -> list[dict[str, Any]]:
        """Train those that have not been trained yet; return what all came to."""
        known = [{key: run[key] for key in asdict(ways[0])} for run in self.runs]
        new = [way for way in dict.fromkeys(ways) if asdict(way) not in known]
        for run in self._pool.map(train, [self._folder] * len(new), new, [self._rows] * len(new)):
            self.runs.append(run)
            print(
                f"{run['name']:<32} batch {run['batch']:>3}  lr {run['rate']:<8.3g} seed"
                f" {run['seed']}  {run['steps']:>6,} steps  loss {run['held_out']:.4f} "
                f" {run['processor_seconds']:.0f} s",
                flush=True,
            )
        wanted = [asdict(way) for way in ways]
        return [run for run in self.runs if {key: run[key] for key in wanted[0]} in wanted]

    def tuned(self, way: Way) -> Way:
        """Return a way with the best of several rates, sought further where that is the least or
        the most of them.
        """
        tried = {way.rate * factor for factor in RATES}
        while True:
            runs = self.run([replace(way, rate=rate) for rate in sorted(tried)])
            best = min(runs, key=lambda run: run["held_out"])["rate"]
            further = best * 2 if best == max(tried) else best / 2 if best == min(tried) else None
            if further is None or len(tried) > 5:
                return replace(way, rate=best)
            tried.add(further)


def measure(bench: Bench, seeds: Sequence[int], batches: Sequence[int]) -> dict[str, Any]:
    """Tune each way with the first seed, then train each way with all seeds; last, beta2."""
    first = seeds[0]

    def around(batch: int) -> float:
        return BASE_RATE * math.sqrt(batch / BASE_BATCH)

    constants = {
        batch: bench.tuned(replace(constant(batch, around(batch)), seed=first)) for batch in batches
    }
    losses = {batch: bench.run([way])[0]["held_out"] for batch, way in constants.items()}
    best = min(losses, key=lambda batch: losses[batch])
    for batch in {2 * best, 4 * best, 8 * best} - constants.keys():
        constants[batch] = bench.tuned(replace(constant(batch, around(batch)), seed=first))
        losses[batch] = bench.run([constants[batch]])[0]["held_out"]
    ways = [constants[times * best] for times in (1, 2, 4)]
    start = constants[best]
    grown = bench.tuned(replace(seesaw(best, start.rate), seed=first))
    ways.append(grown)
    ways += [seesaw(best, grown.rate, times=4), seesaw(best, grown.rate, companions=True)]
    ways.append(bench.tuned(replace(by_noise(max(2, best), around(max(2, best))), seed=first)))
    runs = bench.run([replace(way, seed=seed) for seed in seeds for way in ways])
    table = [compared(way.name, runs, constants[best].name) for way in ways]

    return {
        "best": asdict(start),
        "losses": losses,
        "table": table,
        "beta2": of_beta2(
            bench,
            seeds[:BETA2_SEEDS],
            {times * best: constants[times * best] for times in (1, 2, 4, 8)},
        ),
    }


def of_beta2(bench: Bench, seeds: Sequence[int], ways: Mapping[int, Way]) -> list[dict[str, Any]]:
    """Train constant batches with one beta2, and with that of one half-life; it belongs to the
    smallest of them, or to the largest.
    """
    rows = []
    for belongs_to, beta2 in ((min(ways), BETA2), (max(ways), BETA2_OF_LARGEST)):
        for batch, way in ways.items():
            half_life = min(max(beta2 ** (batch / belongs_to), 0.9), 0.9999)
            fixed, followed = (
                sorted(
                    bench.run([replace(way, beta2=each, seed=seed) for seed in seeds]),
                    key=lambda run: run["seed"],
                )
                for each in (beta2, half_life)
            )
            rows.append(
                {
                    "batch": batch,
                    "rate": way.rate,
                    "belongs_to": belongs_to,
                    "beta2": beta2,
                    "half_life": half_life,
                    "losses": [run["held_out"] for run in fixed],
                    "losses_half_life": [run["held_out"] for run in followed],
                }
            )
    return rows


def compared(name: str, runs: Sequence[Mapping[str, Any]], base: str) -> dict[str, Any]:
    """A way over all seeds, and beside the best constant batch seed by seed."""
    mine = {run["seed"]: run for run in runs if run["name"] == name}
    of_base = {run["seed"]: run for run in runs if run["name"] == base}
    losses = [run["held_out"] for run in mine.values()]
    more = [run["held_out"] / of_base[seed]["held_out"] - 1 for seed, run in mine.items()]
    half = (
        T_OF_95[len(more)] * statistics.stdev(more) / math.sqrt(len(more))
        if len(more) in T_OF_95
        else None
    )
    return {
        "name": name,
        "batch": next(iter(mine.values()))["batch"],
        "rate": next(iter(mine.values()))["rate"],
        "seeds": len(mine),
        "steps": statistics.mean(run["steps"] for run in mine.values()),
        "steps_over_base": statistics.mean(
            run["steps"] / of_base[seed]["steps"] for seed, run in mine.items()
        ),
        "largest_batch": max(run["largest_batch"] for run in mine.values()),
        "tokens": next(iter(mine.values()))["tokens"],
        "processor_seconds": statistics.mean(run["processor_seconds"] for run in mine.values()),
        "held_out": statistics.mean(losses),
        "held_out_range": [min(losses), max(losses)],
        "loss_over_base": statistics.mean(more),
        "half_of_interval_95": half,
        "within_tolerance": statistics.mean(more) <= TOLERANCE,
    }


def print_table(measured: Mapping[str, Any]) -> None:
    print(
        f"\n{'':<30} {'batch':>9} {'lr':>8} {'steps':>8} {'/ best':>7} {'loss':>8} {'range':>17} "
        " over the best"
    )
    for row in measured["table"]:
        half = "" if row["half_of_interval_95"] is None else f" +- {row['half_of_interval_95']:.2%}"
        batch = f"{row['batch']}" + (
            f" to {row['largest_batch']}" if row["largest_batch"] != row["batch"] else ""
        )
        print(
            f"{row['name']:<30} {batch:>9} {row['rate']:>8.3g} {row['steps']:>8,.0f}"
            f" {row['steps_over_base']:>7.3f} {row['held_out']:>8.4f}"
            f" {row['held_out_range'][0]:>8.4f} {row['held_out_range'][1]:>8.4f} "
            f" {row['loss_over_base']:+.2%}{half}"
        )
    print("\nbeta2   belongs to   batch  lr        loss with it     of one half-life  loss with it")
    for row in measured["beta2"]:
        fixed, followed = statistics.mean(row["losses"]), statistics.mean(row["losses_half_life"])
        print(
            f"{row['beta2']:<7g} {row['belongs_to']:>10}   {row['batch']:>5}  {row['rate']:<8.3g}"
            f" {fixed:>13.4f}     {row['half_life']:>16.4f}  {followed:>12.4f} "
            f" {followed / fixed - 1:+.2%}"
        )


def draw(measured: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss over steps at the end, and the batch over samples."""
    figure = Figure(figsize=(13, 5), layout="constrained", dpi=120)
    loss_axes, batch_axes = figure.subplots(1, 2)
    colours = [LIGHT[name] for name in ("blue", "vermilion", "green", "purple")] * 2
    for number, row in enumerate(measured["table"]):
        style = {"color": colours[number], "marker": "os"[number // 4]}
        mine = [
            run
            for run in runs
            if (run["name"], run["rate"], run["beta2"]) == (row["name"], row["rate"], BETA2)
        ]
        loss_axes.plot(
            [run["steps"] for run in mine],
            [run["held_out"] for run in mine],
            **style,
            linestyle="",
            label=row["name"],
        )
        samples, rows, _ = zip(*mine[0]["batches"], strict=True)
        batch_axes.plot(
            samples,
            rows,
            color=style["color"],
            linestyle="-" if number < 4 else "--",
            label=row["name"],
        )
    best = measured["table"][0]["held_out"]
    loss_axes.axhspan(best, best * (1 + TOLERANCE), color=LIGHT["grid"], zorder=0)
    loss_axes.set(
        title="Each seed; grey: up to 0.5% above the best constant batch",
        xlabel="steps",
        ylabel="held-out loss",
    )
    batch_axes.set(
        title="Batch size, first seed", xlabel="samples", ylabel="rows of a step", yscale="log"
    )
    for axes in (loss_axes, batch_axes):
        axes.grid(color=LIGHT["grid"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=4_000_000, help="of each run (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--quick", action="store_true", help="two batches, two seeds, few tokens")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    rows = (50_000 if arguments.quick else arguments.tokens) // LENGTH
    seeds, batches = (
        (arguments.seeds[:2], BATCHES[3:]) if arguments.quick else (arguments.seeds, BATCHES)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, rows=rows, seeds=seeds)
        bench = Bench(folder, rows=rows, jobs=arguments.jobs)
        measured = measure(bench, seeds, batches)
    print_table(measured)
    path = records.write(
        f"pays{'_quick' if arguments.quick else ''}",
        arguments.output,
        rows=rows,
        length=LENGTH,
        model=MODEL,
        seeds=seeds,
        **measured,
        runs=[
            {key: value for key, value in run.items() if key not in ("batches", "train")}
            for run in bench.runs
        ],
    )
    draw(measured, bench.runs, path.with_suffix(".png"))
    print(json.dumps({"drawn": path.with_suffix(".png").name}))


if __name__ == "__main__":
    main()
