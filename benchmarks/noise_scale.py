"""The gradient noise scale: against closed forms, on rows of unequal length, and what it costs.

    python benchmarks/noise_scale.py [--only closed|tokens|rows|cost] [--quick] [--output DIR]

``closed``: estimating a mean from normal rows, whose noise scale is tr(covariance) / |theta -
mean|^2, through the real runner of micro-batches, for several sizes of the small batch.

``tokens``: the mean of tokens in rows of unequal length, long rows having another mean, known in
closed form, in micro-batches by tokens of each layout and by rows; on one device and on two ranks
that FSDP2 divides the parameter over, with the same rows.

``rows``: the demo's model and rows, whose gradients are means over label tokens. The gradients of
320 rows, all their inner products known, are the population that steps are drawn from, so the truth
is known. How far off is the estimate with so many rows in the small batch, and would it be by the
paper's formula alone, with a batch counted by its rows or by its label tokens?

``cost``: the same steps of the demo's model with and without a sample, in turns, the one that goes
first drawn by lot; and what that is for each step, as one in five is sampled after the first 50.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import records
import torch
from adaptive_full_finetune import AdaptiveFullFinetuneRecipe
from torch import nn
from tqdm import tqdm
from turns import configuration, our_recipe, printing_into, resampled_interval

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.schedules import NoiseSample, NoiseScale, small_batch
from adaptive_batch.training import MicroBatchRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import demo
from support.mean_estimation import TokenMeans
from support.ranks import run_on_ranks
from support.runners import build_runner, question_of

TARGET, CLOSE = 1.01, 0.1
EVERY = 5  # steps from one sample to the next, by default
IGNORED = -100
SEED = 7


# --- closed form


class MeanEstimation:
    """Rows x of a normal distribution with covariance C, and the loss ``0.5 * |theta - x|^2`` of
    each at a fixed theta.

    One row's gradient is ``theta - x``: S is tr(C), |G|^2 is |theta - mean|^2, exactly.

    Args:
        noise_scale: the true one, in rows.
        dimensions: of theta; the k-th has a variance of 1 / k.
    """

    def __init__(self, *, noise_scale: float, dimensions: int = 64, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        variances = 1 / torch.arange(1, dimensions + 1)
        self._deviations = variances.sqrt()
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(dimensions))])
        direction = torch.randn(dimensions, generator=self._generator)
        self._mean = direction / direction.norm() * (float(variances.sum()) / noise_scale) ** 0.5

    def rows(self, count: int) -> list[dict[str, Any]]:
        drawn = (
            torch.randn(count, len(self._mean), generator=self._generator) * self._deviations
            + self._mean
        )
        return [{"tokens": [0, 0], "labels": [IGNORED, 0], "x": x} for x in drawn]

    def runner(self, limit: MicroBatchLimit) -> MicroBatchRunner:
        return build_runner(
            self.model,
            limit,
            collate=lambda rows: {
                key: torch.stack([torch.as_tensor(row[key]) for row in rows])
                for key in ("tokens", "labels", "x")
            },
            mean_loss=lambda batch: 0.5 * (self.model[0] - batch["x"]).square().sum(1).mean(),
            measures_noise=True,
        )


def closed_form(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Estimated over true, after `steps` steps that all count alike."""
    cases = [
        (scale, small, big)
        for scale in (4.0, 16.0, 64.0)
        for small, big in ((1, 16), (4, 16), (8, 16), (8, 64))
    ]
    found = []
    for scale, small, big in tqdm(cases, desc="closed form"):
        values = []
        for seed in range(seeds):
            problem = MeanEstimation(noise_scale=scale, seed=seed)
            runner = problem.runner(MicroBatchLimit(small))
            estimate = NoiseScale(
                decay=1 - 1e-9, min_samples=1
            )  # so many samples count that all count alike
            for _ in range(steps):
                problem.model.zero_grad()
                sample = runner.run(problem.rows(big)).noise
                assert sample is not None
                estimate.update(sample)
            assert estimate.value is not None
            values.append(estimate.value)
        errors = [value / scale - 1 for value in values]
        found.append(
            {
                "true": scale,
                "small_rows": small,
                "big_rows": big,
                "steps": steps,
                "estimates": values,
                "mean_error": statistics.mean(errors),
                "largest_error": max(map(abs, errors)),
            }
        )
    return found


# --- tokens, layouts and ranks

TOKENS = MicroBatchLimit(96, "tokens")
LAYOUTS = {
    "by rows": (MicroBatchLimit(4), "padded"),
    "padded by tokens": (TOKENS, "padded"),
    "grouped by tokens": (TOKENS, "grouped"),
    "packed by tokens": (TOKENS, "packed"),
}


def estimates_of_tokens(
    cases: Sequence[tuple[float, str]], steps: int, seeds: int
) -> list[list[float]]:
    """Return for each true noise scale and layout the estimate of each seed, after `steps` steps of
    32 rows that all count alike.
    """
    torch.set_num_threads(1)
    found = []
    for true, layout in tqdm(cases, desc="tokens", disable=distributed.rank() > 0):
        found.append([])
        for seed in range(seeds):
            problem = TokenMeans(noise_scale=true, seed=seed)
            sampler = problem.sampler(*LAYOUTS[layout])
            estimate = NoiseScale(decay=1 - 1e-9, min_samples=1)
            for _ in range(steps):
                estimate.update(sampler(problem.rows(32)))
            assert estimate.value is not None
            found[-1].append(estimate.value)
    return found


def tokens_and_ranks(steps: int, seeds: int) -> list[dict[str, Any]]:
    """Estimated over true, for each layout, on one device and on two ranks."""
    cases = [(true, layout) for true in (4.0, 16.0, 64.0) for layout in LAYOUTS]
    alone = estimates_of_tokens(cases, steps, seeds)
    of_ranks = [case for case in cases if case[0] == 16.0]
    together, other = run_on_ranks(
        estimates_of_tokens, 2, of_ranks, steps, max(1, seeds // 2), timeout=1800.0
    )
    assert together == other, "the ranks do not agree"
    found = []
    for ranks, those, estimates in ((1, cases, alone), (2, of_ranks, together)):
        for (true, layout), values in zip(those, estimates, strict=True):
            errors = [value / true - 1 for value in values]
            facts = {
                "ranks": ranks,
                "true": true,
                "micro_batches": layout,
                "steps": steps,
                "estimates": values,
            }
            found.append(
                facts
                | {
                    "mean_error": statistics.mean(errors),
                    "largest_error": max(map(abs, errors)),
                }
            )
    return found


# --- rows of unequal length


class Population:
    """Rows whose gradients' inner products are known: a step of any of them needs no backward.

    Attributes:
        lengths: tokens of each row.
        true: the noise scale of steps of rows drawn from these, in rows, to first order in 1 /
            rows.
        dimensions: S^2 / tr(covariance^2), over how many directions the noise spreads.
    """

    def __init__(self, recipe: AdaptiveFullFinetuneRecipe, count: int) -> None:
        trainer = recipe.trainer
        rows = [recipe.data.dataset[row] for row in range(count)]
        gradients, labels = [], []
        for row in tqdm(rows, desc="gradients", leave=False):
            trainer.model.zero_grad()
            num_labels = float(trainer.runner.run([row], question_of([row])).label_tokens)
            mean = torch.cat(
                [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
            )
            gradients.append(mean * num_labels)
            labels.append(num_labels)
        trainer.model.zero_grad()
        summed = torch.stack(gradients)
        self.lengths = [len(row["tokens"]) for row in rows]
        self._labels = torch.tensor(labels, dtype=torch.float64)
        self._products = (summed @ summed.T).double()
        mean = summed.sum(0) / self._labels.sum()
        # A step's gradient is a ratio of sums: to first order its noise is that of (sum - labels x
        # mean) / mean labels.
        parted = (summed - self._labels[:, None].float() * mean) / self._labels.mean()
        covariances = (parted @ parted.T).double() / count
        self._squared_gradient = float(mean.double().square().sum())
        self._noise = float(covariances.trace())
        self.true = self._noise / self._squared_gradient
        self.dimensions = self._noise**2 / float(covariances.square().sum())

    def labels_of(self, drawn: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(
            [float(self._labels[list(rows)].sum()) for rows in drawn], dtype=torch.float64
        )

    def squared_norms(self, drawn: Sequence[Sequence[int]]) -> torch.Tensor:
        """Of the gradient of each set of rows, float64 `[sets]`."""
        counts = torch.zeros(len(drawn), len(self._labels), dtype=torch.float64)
        for weights, rows in zip(counts, drawn, strict=True):
            weights.index_add_(
                0, torch.tensor(list(rows)), torch.ones(len(rows), dtype=torch.float64)
            )
        return ((counts @ self._products) * counts).sum(1) / (counts @ self._labels).square()


def unequal_rows(population: Population, steps: int) -> list[dict[str, Any]]:
    """Estimated over true for the first rows of a step of 16 and 64; and by the paper's formula,
    with either count of a batch.
    """
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for big, small_rows in ((16, 1), (16, 4), (16, 8), (64, 1), (64, 8), (64, 16), (64, 32)):
        drawn = torch.randint(len(population.lengths), (steps, big), generator=generator).tolist()
        small = [rows[:small_rows] for rows in drawn]
        small_norms, big_norms = population.squared_norms(small), population.squared_norms(drawn)
        ratio = population.labels_of(small) / population.labels_of(drawn) * big / small_rows
        sides = zip(small_norms.tolist(), big_norms.tolist(), ratio.tolist(), strict=True)
        estimates = [
            NoiseSample(small_rows, of_small, big, of_big, each).estimates()
            for of_small, of_big, each in sides
        ]
        noises, squares = torch.tensor(estimates, dtype=torch.float64).unbind(1)
        ratios = {"measured": float(noises.mean() / squares.mean()) / population.true}
        for name, share in {
            "rows": torch.full_like(ratio, small_rows / big),
            "label tokens": ratio * small_rows / big,
        }.items():
            noises = (small_norms - big_norms) / (1 / (share * big) - 1 / big)
            squared = (big_norms - share * small_norms) / (1 - share)
            ratios[f"by the paper, {name}"] = (
                float(noises.mean() / squared.mean()) / population.true
            )
        found.append({"big_rows": big, "small_rows": small_rows, "estimated_over_true": ratios})
    return found


def spreads(population: Population, *, runs: int, samples: int) -> list[dict[str, Any]]:
    """How far the smoothed value lies from the truth after so many samples."""
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for small, big in ((4, 16), (8, 16), (8, 64)):
        drawn = torch.randint(
            len(population.lengths), (runs * samples, big), generator=generator
        ).tolist()
        first = [rows[:small] for rows in drawn]
        ratios = population.labels_of(first) / population.labels_of(drawn) * big / small
        norms = (ratios, population.squared_norms(first), population.squared_norms(drawn))
        label_ratios, small_norms, big_norms = (norm.view(runs, samples).tolist() for norm in norms)
        for decay in (0.9, 0.95, 0.98, 0.99):
            for after in (5, 10, 20, 50, samples):
                values = []
                for run in range(runs):
                    scale = NoiseScale(decay=decay, min_samples=1)
                    for k in range(after):
                        squares = small_norms[run][k], big_norms[run][k]
                        scale.update(
                            NoiseSample(small, squares[0], big, squares[1], label_ratios[run][k])
                        )
                    values.append(scale.value)
                known = [value / population.true for value in values if value is not None]
                tenths = statistics.quantiles(known, n=10) if len(known) > 1 else [0.0] * 9
                found.append(
                    {
                        "small_rows": small,
                        "big_rows": big,
                        "decay": decay,
                        "samples": after,
                        "lost_in_noise": 1 - len(known) / runs,
                        "over_true_10%": tenths[0],
                        "over_true_median": tenths[4],
                        "over_true_90%": tenths[-1],
                    }
                )
    return found


def train(recipe: AdaptiveFullFinetuneRecipe, steps: int, big: int = 16) -> None:
    """With the demo's optimizer and learning rate."""
    trainer, dataset = recipe.trainer, recipe.data.dataset
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(SEED)).tolist()
    for step in tqdm(range(steps), desc="training", leave=False):
        rows = [dataset[row] for row in order[step * big : (step + 1) * big]]
        trainer.runner.run(rows, question_of(rows))
        trainer.step()


# --- cost


def cost(folder: Path, *, rounds: int, pairs: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Of a step with measuring over the same step without."""
    seconds: list[list[list[float]]] = []
    draw = random.Random(SEED)
    scale = NoiseScale()
    for number in range(rounds):
        with printing_into(folder / "printed.txt"):
            recipe = our_recipe(recipe_configuration(folder, f"cost_{number}", overrides))
        trainer, dataset = recipe.trainer, recipe.data.dataset
        step_rows = recipe.cfg.batch_size
        measuring = measuring_runner(recipe)
        small_rows = tuple(range(small_batch(step_rows)))
        of_round = []
        for pair in range(pairs + 5):  # allocators and lazy initialisation
            start = pair * step_rows % (len(dataset) - step_rows)
            rows = [dataset[row] for row in range(start, start + step_rows)]

            def plain(rows: list[Any] = rows, trainer: Any = trainer) -> None:
                trainer.runner.run(rows, question_of(rows))
                trainer.step()

            def measured(
                rows: list[Any] = rows,
                trainer: Any = trainer,
                measuring: MicroBatchRunner = measuring,
                small_rows: tuple[int, ...] = small_rows,
            ) -> None:
                sample = measuring.run(rows, question_of(rows), small_rows=small_rows).noise
                assert sample is not None
                trainer.step()
                scale.update(sample)

            timed: dict[Callable[[], None], float] = {}
            sides = [plain, measured]
            draw.shuffle(sides)
            for side in sides:
                begin = time.perf_counter()
                side()
                timed[side] = time.perf_counter() - begin
            of_round.append([timed[measured], timed[plain]])
        seconds.append(of_round[5:])
    values = torch.tensor(seconds, dtype=torch.float64)
    ratio, low, high = resampled_interval(
        lambda pairs: (pairs[..., 0] / pairs[..., 1]).quantile(0.5, dim=-1), values
    )
    spread = (
        (values[..., 0] / values[..., 1])
        .flatten()
        .quantile(torch.tensor([0.1, 0.9]).double())
        .tolist()
    )
    return {
        "overrides": list(overrides),
        "pairs": rounds * pairs,
        "plain_ms": 1e3 * float(values[..., 1].median()),
        "ratio_median": ratio,
        "ratio_interval_95": [low, high],
        "every": EVERY,
        "ratio_of_a_run": 1 + (ratio - 1) / EVERY,
        "ratio_of_a_run_interval_95": [1 + (low - 1) / EVERY, 1 + (high - 1) / EVERY],
        "ratio_10%_90%": spread,
    }


def measuring_runner(recipe: AdaptiveFullFinetuneRecipe) -> MicroBatchRunner:
    """As the recipe's own, on the same model."""
    runner = recipe.trainer.runner
    return MicroBatchRunner(
        runner.model,
        runner.loss,
        runner.sizer,
        memory=runner.retry.memory,
        max_grad_norm=recipe.settings.clip_grad_norm,
        measures_noise=True,
    )


def recipe_configuration(folder: Path, name: str, overrides: Sequence[str]) -> Any:
    disk = "metric_logger._component_=torchtune.training.metric_logging.DiskLogger"
    cfg = configuration(folder, name, list(overrides))
    cfg.metric_logger = {
        "_component_": disk.partition("=")[2],
        "log_dir": str(folder / name / "logs"),
    }
    return cfg


def costs(folder: Path, *, rounds: int, pairs: int) -> Iterator[dict[str, Any]]:
    for size in (["batch_size=16", "micro_batch_size=4"], ["batch_size=4", "micro_batch_size=2"]):
        for more in ([], ["clip_grad_norm=1.0"], ["dtype=bf16", "clip_grad_norm=1.0"]):
            yield cost(folder, rounds=rounds, pairs=pairs, overrides=[*size, *more])
    by_tokens = ["batch_size=16", "micro_batch_tokens=1536", "clip_grad_norm=1.0"]
    yield cost(folder, rounds=rounds, pairs=pairs, overrides=by_tokens)


# --- all of it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=("closed", "tokens", "rows", "cost"), help="default: all four"
    )
    parser.add_argument("--quick", action="store_true", help="few steps, seeds and pairs")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    few = arguments.quick

    if arguments.only in (None, "closed"):
        found = closed_form(steps=200 if few else 600, seeds=2 if few else 4)
        print(
            f"\nmean of normal rows, 64 dimensions, after {found[0]['steps']} steps,"
            f" {len(found[0]['estimates'])} seeds"
        )
        print(f"{'true':>6} {'small':>6} {'big':>4} {'estimated':>10} {'error':>7} {'largest':>8}")
        for one in found:
            print(
                f"{one['true']:>6.0f} {one['small_rows']:>6} {one['big_rows']:>4}"
                f" {statistics.mean(one['estimates']):>10.2f} {one['mean_error']:>7.1%}"
                f" {one['largest_error']:>8.1%}"
            )
        records.write("noise_scale_closed", arguments.output, closed_form=found)

    if arguments.only in (None, "tokens"):
        found = tokens_and_ranks(steps=100 if few else 600, seeds=2 if few else 4)
        print(f"\nmean of tokens in rows of 2 to 14, after {found[0]['steps']} steps of 32 rows")
        print(
            f"{'ranks':>5} {'true':>6} {'micro-batches':>18} {'estimated':>10} {'error':>7}"
            f" {'largest':>8}"
        )
        for one in found:
            print(
                f"{one['ranks']:>5} {one['true']:>6.0f} {one['micro_batches']:>18}"
                f" {statistics.mean(one['estimates']):>10.2f} {one['mean_error']:>7.1%}"
                f" {one['largest_error']:>8.1%}"
            )
        records.write("noise_scale_tokens", arguments.output, target=CLOSE, tokens=found)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
        if arguments.only in (None, "rows", "cost"):
            demo.prepare(folder)
        if arguments.only in (None, "rows"):
            found = []
            with printing_into(folder / "printed.txt"):
                recipe = our_recipe(recipe_configuration(folder, "rows", ["batch_size=16"]))
            done = 0
            for steps in (0, 20) if few else (0, 100, 400):
                train(recipe, (steps - done) if steps * 16 <= len(recipe.data.dataset) else 100)
                done = steps
                population = Population(recipe, 64 if few else 320)
                found.append(
                    {
                        "after_steps": steps,
                        "true": population.true,
                        "dimensions": population.dimensions,
                        "estimates": unequal_rows(population, 400 if few else 8000),
                        "spreads": spreads(population, runs=20 if few else 200, samples=200),
                    }
                )
            print_rows(found)
            records.write("noise_scale_rows", arguments.output, rows=found)
        if arguments.only in (None, "cost"):
            found = list(costs(folder, rounds=2 if few else 4, pairs=5 if few else 30))
            print_cost(found)
            records.write("noise_scale_cost", arguments.output, target=TARGET, cost=found)


def print_rows(found: list[dict[str, Any]]) -> None:
    for one in found:
        print(
            f"\nthe demo's rows after {one['after_steps']} steps of 16: noise scale"
            f" {one['true']:.1f} rows, spread over {one['dimensions']:.0f} directions"
        )
        print(
            f"{'step':>5} {'small':>6} {'estimated / true':>17}   by the paper: {'rows':>6}"
            f" {'label tokens':>13}"
        )
        for line in one["estimates"]:
            ours, rows, tokens = line["estimated_over_true"].values()
            print(
                f"{line['big_rows']:>5} {line['small_rows']:>6} {ours:>17.3f}   {'':>13}"
                f" {rows:>6.3f} {tokens:>13.3f}"
            )
        print(
            f"{'small':>6} {'big':>4} {'decay':>6} {'samples':>8} {'lost':>6} {'10%':>6} {'50%':>6}"
            f" {'90%':>6}   value / true"
        )
        for line in one["spreads"]:
            print(
                f"{line['small_rows']:>6} {line['big_rows']:>4} {line['decay']:>6}"
                f" {line['samples']:>8} {line['lost_in_noise']:>6.0%} {line['over_true_10%']:>6.2f}"
                f" {line['over_true_median']:>6.2f} {line['over_true_90%']:>6.2f}"
            )


def print_cost(found: list[dict[str, Any]]) -> None:
    print(
        f"\na step with a sample over the same without, and with one in {EVERY},"
        f" {torch.get_num_threads()} thread; target {TARGET}"
    )
    print(
        f"{'':<62} {'plain ms':>9} {'sampled':>7} {'95% interval':>17} {'of a run':>9}"
        f" {'95% interval':>17}"
    )
    for one in found:
        (low, high), (least, most) = one["ratio_interval_95"], one["ratio_of_a_run_interval_95"]
        print(
            f"{' '.join(one['overrides']):<62} {one['plain_ms']:>9.2f} {one['ratio_median']:>7.4f} "
            f"{low:>8.4f} to {high:.4f} {one['ratio_of_a_run']:>9.4f} {least:>8.4f} to {most:.4f}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
