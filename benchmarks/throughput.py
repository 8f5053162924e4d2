"""Real tokens per second of the recipes: ours with automatic settings, over torchtune's best.

    python benchmarks/throughput.py [key=value ...] [--quick] [--only-lengths NAME ...]
        [--budgets SIZE ...] [--repeats N] [--device cuda] [--output DIR]

For each distribution of lengths, torchtune's recipe with fixed batches and with packed rows, and
ours with ``micro_batch_tokens=auto`` under each budget, train on the same rows of real text in
dataset order. They train in one process and alternate every 64 rows, so that a busy machine slows
all of them equally. Padding is not counted. A turn consists of whole optimizer steps and includes
the time of the data loader. Packing and searching are timed separately as setup. A ratio is the
median over turns, with a 95% interval of resampled turns. torchtune's recipe has no budget and uses
the whole machine.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import asdict, dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import harness
import torch
import torchtune
from adaptive_full_finetune import AdaptiveFullFinetuneRecipe
from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.training.metric_logging import DiskLogger

from adaptive_batch.config_files import config_files
from adaptive_batch.report import read_records
from adaptive_batch.torchtune import NextTokens

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

# Standard deviation of the logarithm of a row's tokens.
SIGMAS = {"lognormal-0.5": 0.5, "lognormal-1.0": 1.0, "alike": 0.0}
FIXED = (1, 2, 4, 8, 16, 32)
# Packs that hold about this many rows.
PACKED = (8, 32)
# Rows of our step.
ROWS = 32
TURN_ROWS = 64
# Turns.
WARM_UP, REPEATS, QUICK_REPEATS = 1, 8, 2
# Tokens of a row; longer rows are cut.
MEAN, LONGEST = 84, 512
BUDGETS = ("256MiB", "1GiB", "4GiB")
NUM_RESAMPLES = 10_000
# For background work at the end of a turn.
WAIT_SECONDS, MOST_WAITS = 0.005, 200
# Columns of turns.
MEASURES = {"wall": 1, "cpu": 2}


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        way: its name.
        kind: ``fixed`` or ``packed`` of torchtune's recipe, or ``auto`` of ours.
        batch_size: rows of torchtune's micro-batch, and of our step.
        overrides: over the configuration.
    """

    way: str
    kind: str
    batch_size: int
    overrides: tuple[str, ...] = ()


def ways(budgets: Iterable[str]) -> Iterator[Way]:
    for rows in FIXED:
        yield Way(f"stock: {rows} rows", "fixed", rows)
    for packs in sorted({max(1, round(rows * MEAN / (0.95 * LONGEST))) for rows in PACKED}):
        yield Way(f"stock: {packs} packs", "packed", packs, ("dataset.packed=True",))
    for budget in budgets:
        auto = ("micro_batch_tokens=auto", f"probe.device_memory={budget}")
        yield Way(f"ours: auto, {budget}", "auto", ROWS, auto)


# --- rows


def drawn_lengths(
    sigma: float, num_rows: int, *, mean: float, shortest: int, longest: int
) -> list[int]:
    """Draw lognormal lengths that have this mean after clamping."""
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
    """Yield an answer for each length in tokens: words of a text in their order, but those
    that no longer fit.

    Args:
        lengths: tokens of each row, everything around the answer included.
        text: repeated as often as needed.
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
    """

    folder: Path
    name: str
    lengths: list[int]
    overrides: tuple[str, ...]

    def configuration(self, name: str, *overrides: str) -> DictConfig:
        """Return the configuration of a way, with its own caches, so that no search reads the
        result of another.
        """
        path = config_files()["demo_cpu"]
        assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
        output_dir = self.folder / name.replace(" ", "_")
        own = {
            "demo_dir": str(self.folder),
            "output_dir": str(output_dir),
            "metric_logger": {"_component_": "throughput.TurnLogger", "name": name},
        }
        os.environ["ADAPTIVE_BATCH_CACHE"] = f"{output_dir}/cache"
        given = OmegaConf.from_dotlist([*self.overrides, *overrides])
        cfg = OmegaConf.merge(OmegaConf.load(path), given, own)
        assert isinstance(cfg, DictConfig)
        return cfg


def make_rows(folder: Path, name: str, num_rows: int, overrides: tuple[str, ...]) -> Setting:
    """Write rows of a distribution of lengths, and check the lengths in the recipes' dataset."""
    own = (
        f"model.max_seq_len={LONGEST}",
        f"tokenizer.max_seq_len={LONGEST}",
        "shuffle=False",
        "epochs=1",
        *overrides,
    )
    cfg = Setting(folder, name, [], own).configuration("any")
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
    lengths = drawn_lengths(SIGMAS[name], num_rows, mean=MEAN, shortest=around + 2, longest=LONGEST)
    path = folder / f"{name}.jsonl"
    assert write(path, answers_of(lengths, text, num_tokens, around=around)) == lengths
    return Setting(folder, name, lengths, (*own, f"dataset.data_files={path}"))


# --- recipes that train in turns


class Enough(Exception):
    """Raised where a step is logged, to end a recipe's training there."""


class Relay:
    """Lets threads run in turns, and times each step.

    Args:
        names: names of the recipes, in the order of their turns.
        device: device to synchronize with at the end of each step.
        after_step: function of a recipe's name and its number of steps, called while no clock runs.
            It returns whether the turn ends, or raises :class:`Enough`. None ends a turn after each
            step.

    Attributes:
        seconds: wall seconds of each step of each recipe.
        cpu_seconds: CPU seconds of the same steps, with all threads and workers. Other load on the
            machine changes them less. They include background work after the end of a turn, which
            `seconds` do not.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        *,
        after_step: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.cpu_seconds: dict[str, list[float]] = {name: [] for name in names}
        self._device = device
        self._after_step = after_step
        self._running = list(names)
        self._may_run = {name: threading.Semaphore(0) for name in names}
        self._errors: list[BaseException] = []
        self._start = self._cpu_start = 0.0

    def run(self, recipes: dict[str, Any]) -> None:
        """Train all recipes, to the end or until they have :class:`Enough`."""
        threads = [
            threading.Thread(target=self._train, args=item, daemon=True) for item in recipes.items()
        ]
        for thread in threads:
            thread.start()
        self._may_run[self._running[0]].release()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def step_done(self, name: str) -> None:
        """End a step; at the end of a turn, let the next recipe run and wait for the next turn."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds[name].append(time.perf_counter() - self._start)
        self.cpu_seconds[name].append(processor_seconds() - self._cpu_start)
        if self._after_step is None or self._after_step(name, len(self.seconds[name])):
            self.cpu_seconds[name][-1] += idle_after()
            self._may_run[self._following(name)].release()
            self._begin(name)
        else:
            self._start_clocks()

    def _train(self, name: str, recipe: Any) -> None:
        try:
            self._begin(name)
            recipe.train()
        except Enough:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            following = self._following(name)
            self._running.remove(name)
            self._may_run[following].release()

    def _begin(self, name: str) -> None:
        self._may_run[name].acquire()
        if self._errors:
            raise Enough
        self._start_clocks()

    def _start_clocks(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), processor_seconds()

    def _following(self, name: str) -> str:
        return self._running[(self._running.index(name) + 1) % len(self._running)]


def processor_seconds() -> float:
    """CPU time of this process and its workers so far."""
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    if sys.platform == "linux":  # a process's clock has a number: clock_getcpuclockid(3)
        total += sum(
            time.clock_gettime((~worker.pid << 3) | 2)
            for worker in multiprocessing.active_children()
        )
    return total


def idle_after() -> float:
    """Wait until neither another thread nor a worker computes; return the CPU time that
    this took.
    """
    start = last = processor_seconds()
    for _ in range(MOST_WAITS):
        time.sleep(WAIT_SECONDS)
        before, last = last, processor_seconds()
        if last - before < WAIT_SECONDS / 5:
            break
    return last - start


class TurnLogger(DiskLogger):
    """torchtune's logger to disk, after whose line another recipe may have its turn."""

    relay: Relay

    def __init__(self, log_dir: str, name: str) -> None:
        super().__init__(log_dir)
        self._name = name

    def log_dict(self, payload: Any, step: int) -> None:
        super().log_dict(payload, step)
        self.relay.step_done(self._name)


def stock_recipe(cfg: DictConfig) -> Any:
    """Build torchtune's recipe, from a file outside of its package."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("stock_full_finetune", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recipe = module.FullFinetuneRecipeSingleDevice(cfg=cfg)
    recipe.setup(cfg=cfg)
    return recipe


def our_recipe(cfg: DictConfig) -> AdaptiveFullFinetuneRecipe:
    recipe = AdaptiveFullFinetuneRecipe(cfg, task=NextTokens)
    recipe.setup()
    return recipe


def resampled_interval(values: torch.Tensor) -> tuple[float, float, float]:
    """Return the median of float64 values `[turns]`, and its 95% bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.randint(len(values), (NUM_RESAMPLES, len(values)), generator=generator)
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = median(values[turns]).quantile(bounds).tolist()
    return float(median(values)), low, high


# --- measuring


@dataclass
class Run:
    """A recipe that is trained in a way, and what its steps are.

    Attributes:
        tokens, padded: tokens of each step without padding, and with padding if it runs at once.
        steps_per_turn: whole steps with about the tokens of the rows of a turn.
        context: context of the thread with the recipe's settings of torch's compiler.
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
        build = our_recipe if way.kind == "auto" else stock_recipe
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
        per_turn = round(TURN_ROWS * statistics.mean(setting.lengths) * len(tokens) / sum(tokens))
        return cls(name, way, recipe, seconds, tokens, padded, max(1, per_turn), context)

    def train(self) -> None:
        """Train; a batch of torchtune's that does not fit into the machine is left out."""
        try:
            self.context.run(self.recipe.train)
        except torch.OutOfMemoryError:
            if self.way.kind == "auto":
                raise
            self.out_of_memory = True

    def search(self) -> dict[str, float]:
        """Return the trials and seconds of our search, and the seconds of the setup."""
        events = [record for record in read_log(self) if "trials" in record]
        sums = {key: sum(event.get(key, 0) for event in events) for key in ("trials", "seconds")}
        return {**sums, "setup_seconds": self.setup_seconds}


def tokens_of_pack(pack: dict[str, torch.Tensor], padding_id: int) -> int:
    """Count the tokens of a pack without its padding; no row ends with the padding token."""
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
    """Return the figures of a way; its turns are tokens, seconds and CPU seconds."""
    found = {**asdict(run.way), "setup_seconds": run.setup_seconds, "turns": []}
    if run.out_of_memory:
        return found
    seconds, cpu_seconds = relay.seconds[run.name], relay.cpu_seconds[run.name]
    num_steps = len(seconds)
    of_steps, padded = run.tokens[:num_steps], float(sum(run.padded[:num_steps]))
    micro_batches = num_steps
    tokens = sum(of_steps)
    if run.way.kind == "auto":
        steps = [record for record in read_log(run) if record["kind"] == "step"]
        assert steps[-1]["tokens_seen"] == tokens
        micro_batches = sum(step["micro_batches"] for step in steps)
        padded = sum(
            n / (1 - step["padding_fraction"]) for n, step in zip(of_steps, steps, strict=True)
        )
        found |= {
            "limit": str(run.recipe.batches.limit),
            "search": run.search(),
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


# --- results


def rates(way: dict[str, Any], measure: str) -> torch.Tensor:
    """Tokens per second of each turn."""
    turns = torch.tensor(way["turns"], dtype=torch.float64)
    return turns[:, 0] / turns[:, MEASURES[measure]]


def median(values: torch.Tensor) -> torch.Tensor:
    return values.quantile(0.5, -1)


def compare(way: dict[str, Any], ways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare one way with the best of each of torchtune's kinds, turn by turn."""
    ratios = []
    for kind, measure in product(("fixed", "packed"), MEASURES):
        others = [other for other in ways if other["kind"] == kind and other["turns"]]
        if others:
            best = max(others, key=lambda other: other[f"tokens_per_{measure}_second"])
            ratio, low, high = resampled_interval(rates(way, measure) / rates(best, measure))
            interval = {"ratio": ratio, "interval_95": [low, high]}
            ratios.append({"kind": kind, "measure": measure, "over": best["way"], **interval})
    return ratios


def print_distribution(result: dict[str, Any]) -> None:
    """Print the ways of a distribution, and the ratios and searches of each budget."""
    print(
        f"\n{result['lengths']}: {result['rows']} rows of {result['shortest']} to"
        f" {result['longest']} tokens, mean {result['mean']:.1f}"
    )
    table = harness.Table(
        "way:<24 tokens_per_step:>15,.0f micro_batches_per_step:>22.2f padding:>8.1%"
        " tokens_per_wall_second:>22,.0f tokens_per_cpu_second:>21,.0f setup_seconds:>13.1f"
        " limit:<20"
    )
    for way in result["ways"]:
        if way["turns"]:
            table.print({"limit": "", **way})
        else:
            print(f"{way['way']}: out of memory")
    for way in result["ways"]:
        for ratio in way.get("ratios", ()):
            low, high = ratio["interval_95"]
            print(
                f"{way['way']} over {ratio['over']}, {ratio['measure']}: {ratio['ratio']:.3f}"
                f" ({low:.3f} to {high:.3f})"
            )
        if search := way.get("search"):
            print(
                f"{way['way']}: search of {search['trials']} trials, {search['seconds']:.1f} of"
                f" {search['setup_seconds']:.1f} s"
            )


def main() -> None:
    parser = harness.parser(__doc__, quick=f"{QUICK_REPEATS} repeats")
    add = parser.add_argument
    add("--repeats", type=int, default=REPEATS, metavar="N", help="without --quick: %(default)s")
    add("--only-lengths", nargs="+", choices=SIGMAS, default=[*SIGMAS], metavar="NAME")
    add("--budgets", nargs="+", default=BUDGETS, metavar="SIZE", help="of ours")
    add("--device", default="cpu")
    add("overrides", nargs="*", metavar="key=value", help="over the configuration, for all")
    asked = parser.parse_args()
    turns = WARM_UP + (QUICK_REPEATS if asked.quick else asked.repeats)
    overrides = (f"device={asked.device}", *asked.overrides)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, printed = Path(temporary), Path(temporary) / "printed.txt"
        with harness.printing_into(printed):
            demo.prepare(folder)
        for name in asked.only_lengths:
            start = time.perf_counter()
            with harness.printing_into(printed):
                setting = make_rows(folder, name, (turns + 2) * TURN_ROWS, overrides)
                gc.collect()  # the recipes of other rows
                measured = measure(
                    setting, ways(asked.budgets), turns=turns, device=torch.device(asked.device)
                )
            for way in measured:
                if way["kind"] == "auto":
                    way["ratios"] = compare(way, measured)
            result = {
                "lengths": name,
                "rows": len(setting.lengths),
                "mean": statistics.mean(setting.lengths),
                "shortest": min(setting.lengths),
                "longest": max(setting.lengths),
                "seconds": time.perf_counter() - start,
                "ways": measured,
            }
            print_distribution(result)
            results.append(result)
    harness.write(
        "throughput",
        asked.output,
        overrides=asked.overrides,
        columns_of_turns=["tokens", *MEASURES],
        warm_up_turns=WARM_UP,
        ratios={
            f"{result['lengths']}, {way['way']} over {ratio['kind']}": round(ratio["ratio"], 3)
            for result in results
            for way in result["ways"]
            for ratio in way.get("ratios", ())
            if ratio["measure"] == "wall"
        },
        distributions=results,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The recipes build TurnLogger by its path, which must be this class.
    sys.modules["throughput"] = sys.modules["__main__"]
    main()
