"""What a step costs on several ranks: its collectives and its time, ours with everything adaptive
off over torchtune's own.

    python benchmarks/step_time_on_ranks.py [--ranks 2] [--pairs N] [--quick]
        [--only collectives|time] [--output DIR] [key=value ...]

Collectives are counted as torch dispatches them, in each step after the first, also of steps that
are split or grow. For the time both recipes train in the same processes, on one process group, each
in a thread of its own, one step each in turns; a step ends when all ranks have ended it. Rounds are
as in benchmarks/step_time.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import torch
import torch.distributed as dist
import torchtune
from adaptive_full_finetune import AdaptiveFullFinetuneRecipe
from omegaconf import DictConfig, OmegaConf
from step_time import ROUNDS, WARM_UP, Comparison, Seconds, Side, median_with_interval, ratios
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from turns import Enough, Relay, configuration, printing_into

from adaptive_batch.distributed import Watchdog
from adaptive_batch.torchtune import all_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import demo
from support.ranks import SPAWNED, end_of_ranks
from support.stock import on_a_cpu

TARGET = 1.02
TIMEOUT_SECONDS = 7200.0
SMALL_BYTES = 256  # what is no part of the model: counts, flags, a norm
COUNTED_STEPS = 5  # of which the first is left out, in which FSDP2 sets itself up
COMMON = ("device=cpu",)
TIMED = ("batch_size=16",)  # a step of 100 ms or more, which a rank's own work fills

Calls = Counter[str]


# --- both recipes on the ranks that are there


def rank_configuration(folder: Path, name: str, overrides: Iterable[str]) -> DictConfig:
    """The demo's configuration, logging to disk."""
    cfg = configuration(folder, name, [*COMMON, *overrides])
    component = "torchtune.training.metric_logging.DiskLogger"
    cfg.metric_logger = OmegaConf.create(
        {"_component_": component, "log_dir": str(folder / name / "logs")}
    )
    return cfg


def stock_recipe(cfg: DictConfig) -> Any:
    """torchtune's recipe, which lies in a file beside its package, on the process group that there
    is.
    """
    path = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_distributed.py"
    spec = importlib.util.spec_from_file_location("stock_full_finetune_distributed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.init_process_group = lambda backend: None
    recipe = module.FullFinetuneRecipeDistributed(cfg=cfg)
    recipe.setup(cfg=cfg)
    return recipe


def our_recipe(cfg: DictConfig, watch: Watchdog | None) -> AdaptiveFullFinetuneRecipe:
    recipe = AdaptiveFullFinetuneRecipe(cfg=cfg, watch=watch)
    recipe.setup()
    return recipe


def build(name: str, cfg: DictConfig, watch: Watchdog | None, steps: Any) -> Any:
    """A recipe that tells `steps`, in the place of its profiler, of every step: on all ranks, where
    only one of them logs.
    """
    if name == "stock":
        recipe = stock_recipe(cfg)
        recipe._profiler = steps
    else:
        recipe = our_recipe(cfg, watch)
        recipe.profiler._profiler = steps
    return recipe


def on_ranks(function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """What a function gives on each rank; where one fails, what it printed."""
    ended = end_of_ranks(
        function,
        ranks,
        folder,
        *arguments,
        begins_group=False,
        timeout=TIMEOUT_SECONDS,
        context=SPAWNED,
    )
    for rank, one in enumerate(ended):
        if one.exit_status != 0:
            printed = "".join(
                path.read_text(errors="replace")[-3000:] for path in folder.glob(f"*_{rank}.txt")
            )
            sys.exit(f"rank {rank} ended with {one.exit_status}:\n{printed}\n{one.error or ''}")
    return [one.result for one in ended]


# --- collectives


@dataclass(frozen=True)
class Way:
    """What both recipes run, each in its own words.

    Attributes:
        name: in the table.
        stock: key=value for the stock recipe.
        ours: key=value for ours.
        more: how many more collectives than the stock recipe's a step of ours may have.
    """

    name: str
    stock: tuple[str, ...]
    ours: tuple[str, ...]
    more: int = 1


IN_HALVES = ("batch_size=2", "gradient_accumulation_steps=2")
GROWS = (
    "batch_size_schedule._component_=adaptive_batch.schedules.steps",
    "batch_size_schedule.batch_sizes=[4,8]",
    "batch_size_schedule.thresholds=[3ba]",
    "grow_beyond_maximum=True",
)
WAYS = (
    Way("adaptive off", ("batch_size=4",), ("batch_size=4",)),
    Way("clipping", ("batch_size=4", "clip_grad_norm=1.0"), ("batch_size=4", "clip_grad_norm=1.0")),
    Way(
        "optimizer in backward",
        ("batch_size=4", "optimizer_in_bwd=True"),
        ("batch_size=4", "optimizer_in_bwd=True"),
    ),
    Way("accumulation of 2", IN_HALVES, IN_HALVES),
    Way("micro_batch_size=2 of 4", IN_HALVES, ("batch_size=4", "micro_batch_size=2")),
    Way(
        "micro_batch_tokens, 2 micro-batches", IN_HALVES, ("batch_size=4", "micro_batch_tokens=400")
    ),
    Way(
        "gradients reduced once a step",
        IN_HALVES,
        ("batch_size=4", "micro_batch_size=2", "sync_gradients_every_micro_batch=False"),
    ),
    Way(
        "a schedule, one micro-batch",
        ("batch_size=4",),
        (*GROWS, "batch_size=4", "micro_batch_size=8"),
    ),
)


class Collectives(TorchDispatchMode):
    """Counts the collectives of each step, the small ones apart.

    Attributes:
        steps: of each step that is over, how often each collective was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Calls] = []
        self._calls: Calls = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it is made of comes by again
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and "wait" not in func.__name__
            and "barrier" not in func.__name__
        ):
            largest = max(map(num_bytes, tensors_of(args)), default=0)
            name = func._overloadpacket.__name__.strip("_")
            self._calls[f"{'small ' if largest <= SMALL_BYTES else ''}{name}"] += 1
        return func(*args, **(kwargs or {}))

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def step(self) -> None:
        self.steps.append(self._calls)
        self._calls = Counter()


def tensors_of(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def count_on_this_rank(folder: Path, overrides: list[str]) -> list[dict[str, list[Calls]]]:
    """The collectives of each step but the first, of each way and recipe."""
    counted: list[dict[str, list[Calls]]] = []
    with printing_into(folder / f"counted_{os.environ['RANK']}.txt"), on_a_cpu():
        cfg = rank_configuration(folder, "any", overrides)
        with all_ranks(cfg) as watch:
            for number, way in enumerate(WAYS):
                counted.append({})
                for name, own in (("stock", way.stock), ("ours", way.ours)):
                    steps = Collectives()
                    limits = ("epochs=1", f"max_steps_per_epoch={COUNTED_STEPS}")
                    cfg = rank_configuration(
                        folder, f"{name}_{number}", [*overrides, *own, *limits]
                    )
                    recipe = build(name, cfg, watch, steps)
                    with steps:
                        recipe.train()
                    counted[-1][name] = steps.steps[1:]
    return counted


def print_collectives(counted: list[dict[str, list[Calls]]]) -> list[dict[str, Any]]:
    """A table of the steps that a way has, and whether ours have few enough."""
    print(
        f"{'collectives of a step':<36} {'stock':>6} {'ours':>5} {'may be':>7}   what ours has more"
        " and less"
    )
    rows = []
    for way, both in zip(WAYS, counted, strict=True):
        stock = both["stock"][-1]
        for ours in {tuple(sorted(step.items())): step for step in both["ours"]}.values():
            more, less = ours - stock, stock - ours
            said = [f"+{count} {name}" for name, count in more.items()] + [
                f"-{count} {name}" for name, count in less.items()
            ]
            meets = ours.total() <= stock.total() + way.more
            rows.append({"way": way.name, "stock": dict(stock), "ours": dict(ours), "meets": meets})
            print(
                f"{way.name:<36} {stock.total():>6} {ours.total():>5}"
                f" {f'<= {stock.total() + way.more}':>7}  "
                f" {', '.join(said) or 'nothing'}{'' if meets else '   NOT MET'}"
            )
    return rows


# --- time


class RankRelay(Relay):
    """A relay whose steps end when all ranks have ended them."""

    def step_done(self, name: str) -> None:
        dist.barrier()
        super().step_done(name)


@dataclass(frozen=True)
class Turns:
    """Hands over at each step, in the place of a recipe's profiler."""

    relay: Relay
    name: str

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def step(self) -> None:
        self.relay.step_done(self.name)


COMPARISON = Comparison("step_time_on_ranks", Side("ours", our_recipe), Side("stock", stock_recipe))
NAMES = (COMPARISON.over.name, COMPARISON.measured.name)


def time_on_this_rank(
    folder: Path, overrides: list[str], pairs: int, step_rows: int
) -> tuple[Seconds, Seconds]:
    """Seconds of each recipe's steps on the clock and of the processor, by rounds and in pairs."""
    rows = len(demo.read_rows(folder / "data" / "train.jsonl"))
    steps = rows // step_rows
    pairs = -(-pairs // ROUNDS)
    epochs = -(-(pairs + WARM_UP) // (steps - 1))
    kept = [step for step in range(epochs * steps) if step % steps][WARM_UP:][:pairs]

    def ends_turn(name: str, num_steps: int) -> bool:
        if num_steps > kept[-1]:
            raise Enough
        return True

    on_clock: Seconds = {name: [] for name in NAMES}
    of_processor: Seconds = {name: [] for name in NAMES}
    cfg = rank_configuration(folder, "any", overrides)
    printed = folder / f"timed_{os.environ['RANK']}.txt"
    with printing_into(printed), on_a_cpu(), all_ranks(cfg) as watch:
        for number in range(ROUNDS):
            names = NAMES if number % 2 == 0 else NAMES[::-1]
            relay = RankRelay(names, torch.device("cpu"), after_step=ends_turn)
            recipes = {}
            for name in names:
                cfg = rank_configuration(
                    folder, f"{name}_{number}", [*overrides, f"epochs={epochs}"]
                )
                recipes[name] = build(name, cfg, watch, Turns(relay, name))
            relay.run(recipes)
            for name in names:
                on_clock[name].append([relay.seconds[name][step] for step in kept])
                of_processor[name].append([relay.cpu_seconds[name][step] for step in kept])
    return on_clock, of_processor


def added_up(of_ranks: list[Seconds]) -> Seconds:
    """The seconds of all ranks together."""
    return {name: torch.tensor([one[name] for one in of_ranks]).sum(0).tolist() for name in NAMES}


def print_times(
    on_clock: Seconds, of_processors: Seconds, *, step_rows: int, ranks: int
) -> dict[str, Any]:
    """A table of both recipes and their ratio; what of it is kept."""
    flat = {name: [value for of_round in on_clock[name] for value in of_round] for name in NAMES}
    print(
        f"\n{len(flat['ours'])} pairs of steps of {step_rows} rows on {ranks} ranks of a CPU,"
        f" {os.cpu_count()} cores"
    )
    print(f"{'':<8} {'median ms':>10} {'10% ms':>8} {'90% ms':>8} {'processors ms':>14}")
    for name in NAMES:
        tenths = statistics.quantiles(flat[name], n=10)
        processors = statistics.median(
            value for of_round in of_processors[name] for value in of_round
        )
        print(
            f"{name:<8} {1e3 * statistics.median(flat[name]):>10.2f} {1e3 * tenths[0]:>8.2f}"
            f" {1e3 * tenths[-1]:>8.2f} {1e3 * processors:>14.2f}"
        )
    ratio, low, high = median_with_interval(ratios(on_clock, COMPARISON))
    ratio_cpu, low_cpu, high_cpu = median_with_interval(ratios(of_processors, COMPARISON))
    of_rounds = ratios(on_clock, COMPARISON).quantile(0.5, dim=1).tolist()
    verdict = "met" if ratio <= TARGET else "NOT met"
    print(
        f"ours / stock: median {ratio:.4f}, 95% interval {low:.4f} to {high:.4f}; target {TARGET}:"
        f" {verdict}"
    )
    print(
        f"of the processors' time: median {ratio_cpu:.4f}, 95% interval {low_cpu:.4f} to"
        f" {high_cpu:.4f}"
    )
    print(f"by rounds: {', '.join(f'{median:.3f}' for median in of_rounds)}")
    return {
        "pairs": len(flat["ours"]),
        "step_rows": step_rows,
        "ratio_median": ratio,
        "ratio_interval_95": [low, high],
        "ratio_of_rounds": of_rounds,
        "target": TARGET,
        "processor_ratio_median": ratio_cpu,
        "processor_ratio_interval_95": [low_cpu, high_cpu],
        "seconds": on_clock,
        "processor_seconds": of_processors,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--pairs", type=int, default=320, help="steps of each recipe (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="32 pairs")
    parser.add_argument("--only", choices=("collectives", "time"))
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the demo's configuration, for both"
    )
    arguments = parser.parse_args()
    pairs, ranks = 32 if arguments.quick else arguments.pairs, arguments.ranks

    begin = time.perf_counter()
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
        demo.prepare(folder)
        if arguments.only != "time":
            counted = on_ranks(count_on_this_rank, ranks, folder, arguments.overrides)
            assert all(of_rank == counted[0] for of_rank in counted), (
                "ranks have called other collectives"
            )
            measured["collectives"] = print_collectives(counted[0])
        if arguments.only != "collectives":
            overrides = [*TIMED, *arguments.overrides]
            cfg = rank_configuration(folder, "any", overrides)
            step_rows = cfg.batch_size * cfg.gradient_accumulation_steps * ranks
            timed = on_ranks(time_on_this_rank, ranks, folder, overrides, pairs, step_rows)
            on_clock, of_processors = timed[0][0], added_up([of_rank for _, of_rank in timed])
            measured |= print_times(on_clock, of_processors, step_rows=step_rows, ranks=ranks)
            measured["overrides"] = overrides
    records.write(
        COMPARISON.record,
        arguments.output,
        ranks=ranks,
        total_seconds=round(time.perf_counter() - begin, 1),
        **measured,
    )
    sys.exit(0 if all(row["meets"] for row in measured.get("collectives", ())) else 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
