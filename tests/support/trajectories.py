"""Train twice, with and without a disturbance, and compare both runs.

    assert same_trajectory("loop", "growth", "kill", folder) == []

A run that is killed and resumed, or runs out of memory, must have the bits of the undisturbed run.
A run that is split, or continues on another number of ranks, must be equal to rounding.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.cli import OURS, SmallSetup, block, cosine_after, make_setup, same_weights, weights
from support.loops import ROWS, RunsOut, training
from support.processes import run
from support.same_state import seed_all
from support.sharded_model import Decoder, collate
from support.stops import asks_at_step
from torch.optim.lr_scheduler import LambdaLR

from adaptive_batch import AdaptiveBatches, AdaptiveRate, AdaptiveStep
from adaptive_batch.report import audit, read_records
from adaptive_batch.schedules import at_epochs, steps

EPOCHS, BATCH_SIZE, SAVES_EVERY = 2, 4, 3
KILLED_AT = 8
LAST_SAVE = KILLED_AT // SAVES_EVERY * SAVES_EVERY
FEWER_ROWS = 2  # maximum rows of a micro-batch after an OOM or in a split
FIGURES_OF_TIME = ("time", "seconds", "tokens_per_second_per_gpu")
# Figures of a step that a split or another number of ranks must not change.
OF_DATA = ("epoch", "position", "rows", "lr", "batch_size", "samples_seen", "tokens_seen")
# Maximum rounding errors: relative error of a number, and norm of the error of all weights relative
# to their norm.
EXACT, ROUNDING = (0.0, 0.0), (2e-6, 1e-6)


@dataclass
class Trajectory:
    """Figures of each step by its number, and the final weights."""

    steps: dict[Any, dict[str, Any]]  # a validation has a text as key
    weights: dict[str, torch.Tensor]
    problems: list[str] = field(default_factory=list)  # problems of this run alone

    def differences(
        self,
        other: Trajectory,
        *,
        rounding: tuple[float, float] = EXACT,
        only: Sequence[str] | None = None,
    ) -> list[str]:
        """Describe the differences from another trajectory.

        Args:
            other: undisturbed run.
            rounding: maximum relative errors of a number and of all weights. Figures of
                ``OF_DATA`` must be equal.
            only: names of the figures to compare; None for all.
        """
        found = list(self.problems)
        for step in sorted(self.steps.keys() | other.steps.keys(), key=str):
            ours, theirs = self.steps.get(step, {}), other.steps.get(step, {})
            names = ours.keys() | theirs.keys()
            for name in sorted(names if only is None else names.intersection(only)):
                one, two = ours.get(name), theirs.get(name)
                if not _are_close(one, two, 0.0 if name in OF_DATA else rounding[0]):
                    found.append(f"step {step}: {name} {one}, undisturbed {two}")
        if not same_weights(self.weights, other.weights):
            relative = self.weights_apart(other)
            if not relative <= rounding[1] > 0:
                found.append(f"weights: {relative:.1e} of their norm apart")
        return found

    def weights_apart(self, other: Trajectory) -> float:
        """Return the norm of the difference of all weights relative to the norm of the others."""
        ours, theirs = self.weights, other.weights
        if ours.keys() != theirs.keys() or not ours:
            raise AssertionError(f"other weights: {sorted(ours.keys() ^ theirs.keys())}")
        pairs = [(ours[name].double(), theirs[name].double()) for name in theirs]
        apart = torch.cat([(one - two).flatten() for one, two in pairs])
        return float(apart.norm() / torch.cat([two.flatten() for _, two in pairs]).norm())

    def most(self, name: str) -> int:
        """Return the largest value of a figure in any step."""
        return max(step.get(name, 0) for step in self.steps.values())


def _are_close(one: Any, other: Any, rounding: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= rounding * abs(other)
    return bool(one == other)


def read_run(folder: Path) -> Trajectory:
    """Read the trajectory of a recipe's run: log, weights, problems and temporary files."""
    steps = {}
    for record in read_records(folder / "adaptive_batch" / "run.jsonl"):
        if record["kind"] in ("step", "validation"):
            number = record.get("step", f"validation after {record.get('steps')}")
            steps[number] = {k: v for k, v in record.items() if k not in FIGURES_OF_TIME}
    tensors = {
        f"{epoch.name} {name}": tensor
        for epoch in folder.glob("epoch_*")
        for name, tensor in weights(epoch).items()
    }
    problems = [f"left behind: {path.name}" for path in folder.glob(".*")]
    return Trajectory(
        steps, tensors, problems + [f"audit: {problem}" for problem in audit(folder).problems]
    )


SCHEDULE, STEPS = "batch_size_schedule", "adaptive_batch.schedules.steps"
VALIDATION = ("dataset_val=${dataset}", "run_val_every_n_steps=4", "max_validation_batches=2")
TOKENS = (
    "probe.device_memory=64MiB",
    "batch_tokens=160",
    "probe.objective=largest",  # with timed trials, a run killed before a save may choose another
    *block(SCHEDULE, STEPS, batch_sizes="[90,160,240]", thresholds="[600tok,1800tok]"),
    "sample_order=seqlen",
    "sample_window=16",
    "lr_clock=tokens",
)
# Batch sizes: arguments of AdaptiveBatches, AdaptiveLoop or AdaptiveArguments, and the equivalent
# keys of a recipe.
CASES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "constant": (dict, ()),
    "growth": (
        lambda: {"batch_increase_function": at_epochs({1: 4})},
        ("batch_increase_function=support.components.four_more", "probe.device_memory=64MiB"),
    ),
    "schedule": (
        lambda: {"batch_size_schedule": steps([2, 4, 8], ["4ba", "12ba"])},
        (
            *block(SCHEDULE, STEPS, batch_sizes="[2,4,8]", thresholds="[4ba,12ba]"),
            "probe.device_memory=64MiB",
        ),
    ),
}


def run_differences(folder: Path, whole: Path) -> list[str]:
    """Describe the differences between a disturbed run of a recipe and an undisturbed one."""
    return read_run(folder).differences(read_run(whole))


def same_trajectory(driver: str, case: str, disturbance: str, folder: Path) -> list[str]:
    """Train with a disturbance and without; return the differences.

    Args:
        driver: ``script``, ``loop``, ``Trainer``, ``tune run`` or ``two ranks``.
        case: key of ``CASES``.
        disturbance: ``kill``, ``OOM``, ``split``, or with the last two drivers ``other ranks``.
        folder: empty folder.
    """
    if driver in PROGRAMS:
        return _compare_programs(driver, case, disturbance, folder)
    ranks, (_, overrides) = 2 if driver == "two ranks" else 1, CASES[case]
    return _compare_recipes(make_setup(folder), ranks, overrides, disturbance)


# --- programs that save their own state


@dataclass(frozen=True)
class Program:
    """A small training program."""

    driver: str  # key of PROGRAMS
    case: str  # key of CASES
    folder: Path  # output folder
    draws: bool = True  # whether the model has dropout
    rows_fit: int = 10**9  # maximum rows of a micro-batch without an OOM
    micro_batch_size: int | None = None
    kill_at: int = 0  # step after which the process kills itself; 0 for never

    def train(self) -> None:
        """Train to the end, from the state in the folder if there is one."""
        self.folder.mkdir(exist_ok=True)
        batches, _ = CASES[self.case]
        torch.save(PROGRAMS[self.driver](self, batches()), self.folder / "weights.pt")

    def note(self, step: int, **figures: Any) -> None:
        """Record a step, and kill the process after step `kill_at`."""
        with (self.folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, step: int, parts: dict[str, Any]) -> None:
        """Save the state of each object every few steps."""
        if step % SAVES_EVERY == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            state["random"] = torch.get_rng_state(), random.getstate(), np.random.get_state()
            torch.save(state, self.folder / "state.tmp")
            (self.folder / "state.tmp").rename(self.folder / "state.pt")

    def load(self, parts: dict[str, Any]) -> None:
        """Load the last saved state."""
        seed_all()
        if (self.folder / "state.pt").exists():
            state = torch.load(self.folder / "state.pt", weights_only=False)
            for name, part in parts.items():
                part.load_state_dict(state[name])
            of_torch, of_python, of_numpy = state["random"]
            torch.set_rng_state(of_torch)
            random.setstate(of_python)
            np.random.set_state(of_numpy)

    def trajectory(self) -> Trajectory:
        """Read the record; a repeated step must have the same figures."""
        with (self.folder / "steps.jsonl").open() as file:
            lines = [json.loads(line) for line in file]
        found: dict[Any, dict[str, Any]] = {}
        problems = [
            f"step {line['step']} was {found[line['step']]} first, and {line} later"
            for line in lines
            if found.setdefault(line["step"], line) != line
        ]
        return Trajectory(found, torch.load(self.folder / "weights.pt"), problems)


def _train_script(program: Program, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with AdaptiveStep, AdaptiveBatches and AdaptiveRate."""
    model = Decoder(draws=program.draws)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mean_loss = RunsOut(model, most=program.rows_fit)

    def forward_backward(part: Any) -> float:
        loss = mean_loss(dict(part.batch)) * part.share
        loss.backward()
        return float(loss.detach())

    step = AdaptiveStep(model, forward_backward, micro_batch_size=program.micro_batch_size)
    batches = AdaptiveBatches(ROWS, BATCH_SIZE, **options)
    schedule = LambdaLR(optimizer, lambda number: 0.97**number)
    rate = AdaptiveRate(optimizer, schedule, lr_scaling="sqrt", reference_batch_size=BATCH_SIZE)
    parts = {"model": model, "optimizer": optimizer, "batches": batches, "rate": rate, "step": step}
    program.load(parts)
    while batches.progress.epoch < EPOCHS:
        for numbers in batches:
            applied = rate.set(rows=len(numbers))
            loss = sum(step(collate([ROWS[number] for number in numbers])))
            optimizer.step()
            optimizer.zero_grad()
            batches.step()
            done = batches.progress.steps
            program.save(done, parts)
            figures = {"rows": numbers, "loss": loss, "lr": applied["lr"]}
            program.note(done, parts=step.num_micro_batches, **figures)
    return dict(model.state_dict())


def _train_loop(program: Program, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with AdaptiveLoop."""
    model = Decoder(draws=program.draws)
    one = training(
        model=model,
        mean_loss=RunsOut(model, most=program.rows_fit),
        micro_batch_size=program.micro_batch_size,
        lr_scaling="sqrt",
        max_grad_norm=0.5,
        schedule=lambda number: 0.97**number,
        **options,
    )
    parts = {"model": model, "optimizer": one.optimizer, "loop": one.loop}
    program.load(parts)
    while one.loop.progress.epoch < EPOCHS:
        for rows in one.loop:
            result = one.loop.run(rows)
            one.optimizer.step()
            one.optimizer.zero_grad()
            done = one.loop.progress.steps
            program.save(done, parts)
            numbers = [row["row"] for row in rows]
            figures = {"rows": numbers, "loss": result.loss, "lr": one.loop.learning_rate}
            program.note(done, parts=result.micro_batches, **figures)
    return dict(model.state_dict())


def _train_with_trainer(program: Program, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train with AdaptiveTrainer and its checkpoints."""
    from support.trainers import limited, llama, trainer_of
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer

    class Noting(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            if "loss" in logs:
                figures = {"loss": logs["loss"], "lr": logs["learning_rate"]}
                parts = trainer.adaptive_step.num_micro_batches
                program.note(state.global_step, parts=parts, **figures)

    seed_all()
    model = limited(llama(0.1 * program.draws).double(), program.rows_fit, modes=[True])
    if options:
        options["lr_scaling"] = "sqrt"
    trainer = trainer_of(
        AdaptiveTrainer,
        program.folder,
        model,
        data=[{"input_ids": row["tokens"]} for row in ROWS],
        adaptive=AdaptiveArguments(micro_batch_size=program.micro_batch_size, **options),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=EPOCHS,
        save_strategy="steps",
        save_steps=SAVES_EVERY,
    )
    trainer.add_callback(Noting())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(program.folder)))
    return dict(model.state_dict())


PROGRAMS = {"script": _train_script, "loop": _train_loop, "Trainer": _train_with_trainer}


def _compare_programs(driver: str, case: str, disturbance: str, folder: Path) -> list[str]:
    whole = Program(driver, case, folder / "whole", draws=disturbance != "split")
    disturbed = replace(whole, folder=folder / "disturbed")
    if disturbance == "OOM":
        whole = replace(whole, micro_batch_size=FEWER_ROWS)
        disturbed = replace(disturbed, rows_fit=FEWER_ROWS)
    elif disturbance == "split":
        disturbed = replace(disturbed, micro_batch_size=FEWER_ROWS)
    elif disturbance == "kill":
        killed = replace(disturbed, kill_at=KILLED_AT)
        (ended,) = run(killed.train)
        assert ended.exit_status == -signal.SIGKILL, ended.error
    disturbed.train()
    whole.train()
    found, expected = disturbed.trajectory(), whole.trajectory()
    if disturbance == "kill":
        lines = (disturbed.folder / "steps.jsonl").read_text().splitlines()
        assert len(lines) == len(found.steps) + KILLED_AT - LAST_SAVE
    if disturbance != "split":
        return found.differences(expected)
    assert found.most("parts") > expected.most("parts")
    return found.differences(expected, rounding=ROUNDING, only=(*OF_DATA, "loss"))


# --- recipes

# Number of ranks, overrides that end this part of a run, and the exit status of each rank.
Part = tuple[int, tuple[str, ...], int | Sequence[int]]


def train_in_parts(setup: SmallSetup, keys: tuple[str, ...], parts: Sequence[Part]) -> Path:
    """Train the parts of a run, each resumed from the previous one; return their folder."""
    keys = (*keys, f"output_dir={setup.fresh_folder()}")
    for ranks, ends, expect in parts:
        finished = setup.run(OURS, *keys, *ends, ranks=ranks, expect=expect)
        keys = (*keys, "resume_from_checkpoint=True")
    return finished.output_dir


SGD = (
    "optimizer=torch.optim.SGD",
    "optimizer.momentum=0.9",
    "optimizer.lr=0.1",
    "optimizer.fused=False",
)
KILLS = asks_at_step(KILLED_AT, by=signal.SIGKILL)
WATCHED = ("model._component_=support.components.watched",)


def _compare_recipes(
    setup: SmallSetup, ranks: int, overrides: tuple[str, ...], disturbance: str
) -> list[str]:
    """Run a recipe with a disturbance and without; see :func:`same_trajectory`."""
    is_exact = disturbance in ("kill", "OOM")
    keys = (f"batch_size={BATCH_SIZE // ranks}", f"save_every_n_steps={SAVES_EVERY}", *overrides)
    keys += (*cosine_after(2), "clip_grad_norm=0.5")
    keys += ("model.attn_dropout=0.2",) if is_exact else ("dtype=fp64", *SGD)
    whole = disturbed = keys
    parts: list[Part] = [(ranks, (), 0)]
    if disturbance in ("kill", "other ranks"):
        # The logger of rank 0 kills it; the other rank exits with status 1.
        resuming = 3 - ranks if disturbance == "other ranks" else ranks
        parts = [(ranks, KILLS, [-signal.SIGKILL, 1][:ranks]), (resuming, (), 0)]
    elif disturbance == "OOM":
        whole = (*keys, *WATCHED, f"micro_batch_size={FEWER_ROWS // ranks}")
        disturbed = (*keys, *WATCHED, f"model.rows_fit={FEWER_ROWS // ranks}")
    elif disturbance == "split":
        disturbed = (*keys, f"micro_batch_size={FEWER_ROWS // ranks}")
    folder = train_in_parts(setup, disturbed, parts)
    found, expected = read_run(folder), read_run(setup.run(OURS, *whole, ranks=ranks).output_dir)
    log = read_records(folder / "adaptive_batch" / "run.jsonl")
    if disturbance in ("kill", "other ranks"):
        (*_, start) = [record for record in log if record["kind"] == "start"]
        assert start["progress"]["steps"] == LAST_SAVE, start
    elif disturbance == "OOM":
        assert found.most("oom_count") > 0
    elif disturbance == "split":
        assert found.most("micro_batches") > expected.most("micro_batches")
    if is_exact:
        for step in (*found.steps.values(), *expected.steps.values()):
            step.pop("oom_count", None)
        return found.differences(expected)
    return found.differences(expected, rounding=ROUNDING, only=(*OF_DATA, "loss"))
