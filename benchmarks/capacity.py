"""How far results move with capacity alone: the same steps of 64 rows, run as 1, 8 and 64
micro-batches.

    python benchmarks/capacity.py [--steps N] [--quick] [--output DIR] [key=value ...]

The real recipe trains on the demo's rows, in fp32, in bf16 throughout (weights, gradients and
optimizer state), and with dropout, whose masks a row draws in the order in which micro-batches
come. Two figures give the scale: the same rows in another order within each step, in one
micro-batch, which moves results by rounding too; and another seed of dropout.

The gradient is that of the first step, over the one of a single micro-batch and over the one that
fp32 gives with the same weights in a single micro-batch. Weights differ by so much of the way that
they went in training.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
import torch
from adaptive_full_finetune import AdaptiveFullFinetuneRecipe
from omegaconf import OmegaConf
from tqdm import tqdm
from turns import our_recipe, printing_into

from adaptive_batch.config_files import config_path
from adaptive_batch.training import Question

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import demo

STEP_ROWS = 64
MICRO_BATCHES = (1, 8, 64)
DROPOUT = "model.attn_dropout=0.1"
SEED = 7


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        kind: runs of one kind are compared with its run in a single micro-batch.
        what: differs from that run.
    """

    kind: str
    what: str
    overrides: tuple[str, ...] = ()
    micro_batches: int = 1
    reversed_rows: bool = False
    seed: int = SEED


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        gradient: of the first step, float64.
        start, end: all weights, float64.
        losses: of each step.
    """

    gradient: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    losses: list[float]


def cases() -> Iterator[Case]:
    kinds: dict[str, tuple[str, ...]] = {
        "fp32": (),
        "bf16": ("dtype=bf16",),
        "fp32, dropout 0.1": (DROPOUT,),
    }
    for kind, overrides in kinds.items():
        for micro_batches in MICRO_BATCHES:
            what = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
            yield Case(kind, what, overrides, micro_batches)
        if DROPOUT in overrides:
            yield Case(kind, "1, another seed", overrides, seed=SEED + 1)
        else:
            yield Case(kind, "1, rows in another order", overrides, reversed_rows=True)


def built(
    folder: Path, case: Case, *, steps: int, overrides: list[str]
) -> AdaptiveFullFinetuneRecipe:
    """The recipe of a case, set up."""
    path = config_path("demo_cpu")
    assert path is not None, "demo_cpu.yaml is shipped with adaptive_batch"
    own = [
        f"demo_dir={folder}",
        f"batch_size={STEP_ROWS}",
        f"micro_batch_size={STEP_ROWS // case.micro_batches}",
        "drop_last=True",
        "epochs=1",
        f"max_steps_per_epoch={steps}",
        f"seed={case.seed}",
    ]
    name = f"{case.kind} {case.what}".replace(" ", "_").replace(",", "")
    cfg = OmegaConf.merge(
        OmegaConf.load(path),
        OmegaConf.from_dotlist([*own, *overrides, *case.overrides]),
        {"output_dir": str(folder / name)},
    )
    return our_recipe(cfg)  # type: ignore[arg-type]


def first_gradient(recipe: AdaptiveFullFinetuneRecipe, case: Case) -> torch.Tensor:
    """Of the first step, which is then forgotten."""
    order = recipe.planner.epochs.order(recipe.queue.progress)
    rows = [recipe.data.dataset[row] for row in order[:STEP_ROWS].tolist()]
    torch.manual_seed(case.seed)
    question = Question(batch_size=recipe.planner.batch.batch_size, num_rows=STEP_ROWS)
    recipe.trainer.runner.run(rows[::-1] if case.reversed_rows else rows, question)
    gradient = joined(parameter.grad for parameter in recipe.trainer.model.parameters())
    recipe.trainer.optimizer.zero_grad(set_to_none=True)
    return gradient


def train(folder: Path, case: Case, *, steps: int, overrides: list[str]) -> Result:
    """Train in a case."""
    recipe = built(folder, case, steps=steps, overrides=overrides)
    gradient = first_gradient(recipe, case)
    if case.reversed_rows:
        read = recipe.reader.read
        recipe.reader.read = lambda numbers, **more: read(numbers, **more)[::-1]  # type: ignore[method-assign]
    start = joined(recipe.trainer.model.parameters())
    torch.manual_seed(case.seed)
    recipe.train()
    recipe.cleanup()
    lines = map(
        json.loads,
        (Path(recipe.cfg.output_dir) / "adaptive_batch" / "run.jsonl").read_text().splitlines(),
    )
    logged = [line for line in lines if "micro_batches" in line]
    assert {line["micro_batches"] for line in logged} == {case.micro_batches}
    return Result(
        gradient,
        start,
        joined(recipe.trainer.model.parameters()),
        [line["loss"] for line in logged],
    )


def gradient_in_fp32(folder: Path, case: Case, *, overrides: list[str]) -> torch.Tensor:
    """Of the first step in fp32 and one micro-batch, with the weights that the case begins with."""
    in_own_dtype = built(folder, case, steps=1, overrides=overrides)
    without_dtype = tuple(
        override for override in case.overrides if not override.startswith("dtype=")
    )
    single = Case(case.kind, "reference", without_dtype)
    recipe = built(folder, single, steps=1, overrides=overrides)
    recipe.trainer.model.load_state_dict(in_own_dtype.trainer.model.state_dict())
    return first_gradient(recipe, single)


def joined(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def relative(one: torch.Tensor, other: torch.Tensor, of: torch.Tensor | None = None) -> float:
    """The norm of the difference over the norm of `other`, or of `of`."""
    return float((one - other).norm() / (other if of is None else of).norm())


def compared(result: Result, single: Result, in_fp32: torch.Tensor) -> dict[str, float]:
    differences = [
        abs(one - other) for one, other in zip(result.losses, single.losses, strict=True)
    ]
    return {
        "gradient_over_single": relative(result.gradient, single.gradient),
        "gradient_over_fp32": relative(result.gradient, in_fp32),
        "first_loss_difference": differences[0],
        "largest_loss_difference": max(differences),
        "last_loss": result.losses[-1],
        "weights_difference": relative(result.end, single.end),
        "weights_difference_of_way": relative(result.end, single.end, single.end - single.start),
    }


def print_table(rows: list[dict[str, Any]], steps: int) -> None:
    print(
        f"{'':<18} {'':<25} {'first gradient over':>21} {'loss difference':>18} {'loss':>7}"
        f" {'weights differ by':>18}\n{'':<18} {'':<25} {'one batch':>10} {'fp32':>10} {'first':>9}"
        f" {'largest':>8} {f'at {steps}':>7} {'of norm':>9} {'of way':>8}"
    )
    for row in rows:
        print(
            f"{row['kind']:<18} {row['what']:<25} {row['gradient_over_single']:>10.1e}"
            f" {row['gradient_over_fp32']:>10.1e} {row['first_loss_difference']:>9.1e}"
            f" {row['largest_loss_difference']:>8.1e} {row['last_loss']:>7.4f}"
            f" {row['weights_difference']:>9.1e} {row['weights_difference_of_way']:>8.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="3 steps")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="over the demo's configuration"
    )
    arguments = parser.parse_args()
    steps = 3 if arguments.quick else arguments.steps

    rows: list[dict[str, Any]] = []
    singles: dict[str, tuple[Result, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as temporary, os.fdopen(os.dup(2), "w") as terminal:
        folder = Path(temporary)
        os.environ["ADAPTIVE_BATCH_CACHE"] = str(folder / "lengths")
        with printing_into(folder / "printed.txt"):
            demo.prepare(folder)
            for case in tqdm(list(cases()), file=terminal, desc="runs"):
                result = train(folder, case, steps=steps, overrides=arguments.overrides)
                if case.kind not in singles:
                    in_fp32 = gradient_in_fp32(folder, case, overrides=arguments.overrides)
                    singles[case.kind] = result, in_fp32
                measured = compared(result, *singles[case.kind])
                rows.append(
                    {"kind": case.kind, "what": case.what, **measured, "losses": result.losses}
                )
    print(f"{steps} steps of {STEP_ROWS} rows")
    print_table(rows, steps)

    records.write(
        "capacity",
        arguments.output,
        steps=steps,
        step_rows=STEP_ROWS,
        overrides=arguments.overrides,
        runs=rows,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
