"""The critical batch of one's own run, measured by short branches from a checkpoint.

Each branch trains at another batch, and none leaves a trace.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._util import ProgressBar, atomic_write, count, without_nan
from adaptive_batch.data import EpochPlanner, RequestedBatch
from adaptive_batch.errors import NonfiniteLossError, SettingError
from adaptive_batch.memory import TrainingSnapshot
from adaptive_batch.probe import (
    FEWEST_STEPS,
    Branch,
    batches_of_branches,
    best_branch,
    critical_batch,
)
from adaptive_batch.schedules import LearningRate, Reference
from adaptive_batch.training import Question

from .checkpoints import Checkpoints
from .checks import AUTO, check_output_dir
from .data import Data
from .job import Job
from .rate import stand_in
from .resumed_run import ResumedRun
from .settings import Settings
from .sizers import Sizers
from .trainer import Trainer

# Steps of the configured batch that a branch has rows for; they make four of 16 times as many rows.
_STEPS = 64
# Bounds of the rows held out of the dataset; the standard error of fewer says little.
_MOST_HELD_OUT = 256
_FEWEST_HELD_OUT = 16
# Standard errors between a loss and its bound; two leave out one loss in twenty.
_ERRORS = 2.0
# What a branch does not use, so that it may differ from the checkpoint's.
_NOT_USED = ("batch_increase_function", "batch_size_schedule", "lr_scheduler", "lr_clock")


def measure_critical_batch(job: Job) -> str:
    """Branch from a checkpoint at several batches and return the table of the losses. A collective.

    The record is written to ``critical_batch.json``.

    Each branch trains on the same rows, the next of the epoch, at a constant rate: that of the step
    before the checkpoint (of the base, the configured one), scaled by the rule of `lr_scaling`, or
    by the square root where that is none. In between, model, optimizer and random numbers are put
    back.

    Raises:
        SettingError: a setting cannot be used; but for a rate of 0 and for packed rows, no weights
            have been loaded yet.
        CheckpointError: what is there to branch from cannot be read.
        NonfiniteLossError: the loss before, or after the first branch, is no number.
    """
    settings = job.settings
    start = time.perf_counter()
    _check_settings(settings)
    check_output_dir(job.cfg.output_dir)
    seed = training.set_seed(
        seed=job.cfg.seed, debug_mode=job.cfg.get("cudnn_deterministic_mode", None)
    )
    data = Data.read(job)
    data.check_rows()
    checkpoints = _checkpoints(job)
    resumed = ResumedRun(job, data, checkpoints, seed=seed, unused=_NOT_USED)
    trained, held_out = _rows(job, data, resumed)
    # It refuses an optimizer without what scale_with_batch names, before any weights are loaded.
    stand_in(job, 1.0)
    trainer = _load_trainer(job, data, checkpoints)
    rule = "sqrt" if settings.rate.lr_scaling == "none" else settings.rate.lr_scaling
    rate = LearningRate(
        trainer.optimizers,
        rule=rule,
        reference=_reference(job, data, trained),
        scale_with_batch=settings.rate.scale_with_batch,
    )
    start_branch, branches, facts = _branches(job, data, trainer, rate, trained, held_out)
    cost = len(trained) * len(branches)
    steps_per_epoch = resumed.max_steps_per_epoch or len(data.dataset)
    epoch_rows = min(len(data.dataset), steps_per_epoch * settings.step_rows * job.ranks)
    record = {
        "from": checkpoints.found.source,
        "epoch": resumed.progress.epoch,
        "steps": resumed.progress.steps,
        "samples": resumed.progress.samples,
        "tokens": resumed.progress.tokens,
        **_critical_batch_within(branches, settings.probe.critical_batch_tolerance),
        "gradient_noise_scale": resumed.progress.noise_scale,
        "rows": len(trained),
        "held_out_rows": len(start_branch.labels),
        "loss_before": start_branch.loss,
        "rule": rule,
        "branches": facts,
        "rows_trained": cost,
        "share_of_run": cost / (settings.epochs * epoch_rows),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if distributed.is_rank_zero():
        path = Path(job.cfg.output_dir, "adaptive_batch", "critical_batch.json")
        # JSON has no NaN, which the loss of a branch that diverged may be.
        written = {**record, "branches": list(map(without_nan, facts))}
        atomic_write(path, json.dumps(written, indent=2) + "\n")
    messages = [message for kind, message, _ in resumed.changes() if kind not in _NOT_USED]
    return "\n".join([*messages, _table(record, ranks=job.ranks)])


def _check_settings(settings: Settings) -> None:
    """Refuse settings that branches cannot train with."""
    if settings.optimizer_in_bwd:
        raise SettingError(
            "optimizer_in_bwd",
            True,
            "a step of a branch has several micro-batches; set it to False",
        )
    if settings.batch_tokens:
        raise SettingError(
            "batch_tokens",
            settings.batch_tokens,
            "probe.critical_batch counts rows; set batch_size",
        )


def _load_trainer(job: Job, data: Data, checkpoints: Checkpoints) -> Trainer:
    """Load weights and optimizer; refuse rows that cannot be packed, and a rate of 0."""
    sizers = Sizers.of(job, data, settings=job.settings.without_search())
    trainer = Trainer.load(job, data, checkpoints, sizers)
    trainer.check_layout()
    checkpoints.load_optimizer(trainer)
    # Any rule scales a rate of 0 to 0, and no branch would learn.
    if not any(float(group["lr"]) for group in trainer.optimizer.param_groups):
        remedy = (
            f"the rate of {checkpoints.found.source} is 0, as in the first step of a warm-up; give"
            " a later one, or optimizer.lr"
        )
        branched_from = job.settings.probe.critical_batch_from
        raise SettingError("probe.critical_batch_from", branched_from, remedy)
    return trainer


def _reference(job: Job, data: Data, trained: Sequence[Any]) -> Reference:
    """Return the batch that the rate belongs to, in rows, as branches count them."""
    configured = Reference(job.settings.step_rows * job.ranks, "rows")
    reference = job.settings.rate.reference_batch_size or configured
    if reference.unit != "tokens":
        return reference
    tokens = sum(map(data.dataset.num_real_tokens, trained))
    return Reference(reference.amount * len(trained) / tokens, "rows")


def _critical_batch_within(branches: Sequence[Branch], tolerance: float) -> dict[str, Any]:
    """Return the critical batch and its bounds by standard errors, as entries of the record."""
    at_most: int | None = critical_batch(branches, tolerance, errors=-_ERRORS)
    # The largest batch tried bounds nothing: a larger one may pass, too.
    if at_most == branches[-1].batch:
        at_most = None
    return {
        "critical_batch": critical_batch(branches, tolerance),
        "at_least": critical_batch(branches, tolerance, errors=_ERRORS),
        "at_most": at_most,
        "tolerance": tolerance,
    }


def _checkpoints(job: Job) -> Checkpoints:
    """Find what is branched from: as configured, else the newest, else the base."""
    cfg = copy.deepcopy(job.cfg)
    path = job.settings.probe.critical_batch_from
    if path is not None:
        cfg.resume_from_checkpoint = path
    elif isinstance(cfg.resume_from_checkpoint, bool):
        cfg.resume_from_checkpoint = AUTO
    try:
        return Checkpoints(cfg, job.settings, keeps_base=job.builder.keeps_base)
    except SettingError as error:
        if path is None or error.key != "resume_from_checkpoint":
            raise
        raise SettingError("probe.critical_batch_from", path, error.remedy) from error


def _rows(job: Job, data: Data, resumed: ResumedRun) -> tuple[list[Any], list[Any]]:
    """Read the rows that training would take next, and those that are held out.

    Held out are rows of `dataset_val`, or the next of the dataset, which begins again at its end.
    """
    validation = job.settings.validation
    rows = _num_rows_to_train(job, len(data.dataset))
    batching = job.batching(seed=resumed.seed, max_steps_per_epoch=resumed.max_steps_per_epoch)
    batch = RequestedBatch(batching)
    epochs = EpochPlanner(data.dataset, batch, ranks=job.ranks, divisible=False)
    state = resumed.state_of("steps")
    if state is not None:
        epochs.load_state_dict(state)
    order = epochs.order(resumed.progress)
    num_read = rows
    if not validation.is_on:
        num_read += _MOST_HELD_OUT
    num_read = min(len(order), num_read)
    places = (torch.arange(num_read) + resumed.progress.epoch_rows) % len(order)
    read = [data.read_row(row) for row in order[places].tolist()]
    if not validation.is_on:
        return read[:rows], read[rows:]
    ranks = distributed.data_parallel_size()
    validated = validation.rows_of(
        len(data.dataset_val), batch_size=job.settings.batch_size, ranks=ranks
    )
    if validated < ranks:
        raise SettingError(
            "dataset_val", f"{validated} rows of it", "each rank takes some; give more of them"
        )
    return read, [data.dataset_val[row] for row in range(validated)]


def _num_rows_to_train(job: Job, num_rows: int) -> int:
    """Return the rows that a branch trains on, as configured or as the dataset allows."""
    configured = job.settings.probe.critical_batch_rows
    global_rows = job.settings.step_rows * job.ranks
    usable_rows = num_rows
    default_rows = num_rows
    hint = ""
    if not job.settings.validation.is_on:
        # The rows that are held out come from the same dataset.
        usable_rows -= _FEWEST_HELD_OUT
        default_rows = num_rows * 3 // 4
        hint = f", and holds out {_FEWEST_HELD_OUT}"
    rows = configured or min(_STEPS * global_rows, usable_rows, default_rows)
    fewest = 2 * FEWEST_STEPS * batches_of_branches(global_rows, 0)[0]
    if not fewest <= rows <= usable_rows:
        problem = (
            f"two branches of {FEWEST_STEPS} steps take {fewest} rows, and the dataset has"
            f" {num_rows}{hint}"
        )
        remedy = f"give {usable_rows} or less"
        if rows < fewest or usable_rows < fewest:
            remedy = "give as many, or a smaller batch_size"
        raise SettingError("probe.critical_batch_rows", configured, f"{problem}; {remedy}")
    # Each batch divides the largest, so all branches train on the same rows.
    return rows - rows % batches_of_branches(global_rows, rows)[-1]


def _branches(
    job: Job,
    data: Data,
    trainer: Trainer,
    rate: LearningRate,
    trained: Sequence[Any],
    held_out: Sequence[Any],
) -> tuple[Branch, list[Branch], list[dict[str, Any]]]:
    """Train the branches; return the held-out losses before and after each, and facts of each."""
    runner = trainer.runner
    ranks = distributed.data_parallel_size()
    rank = distributed.data_parallel_rank()
    loss = data.loss_val(runner.loss) if job.settings.validation.is_on else runner.loss
    # Each rank takes as many, as evaluation is a collective; rows that are left over are not used.
    rank_rows = held_out[: len(held_out) // ranks * ranks][rank::ranks]

    def evaluated(batch: int) -> Branch:
        trainer.model.eval()
        of_ranks = distributed.all_gather([runner.evaluate([row], loss=loss) for row in rank_rows])
        snapshot.restore()
        losses, labels = zip(*chain.from_iterable(of_ranks), strict=True)
        branch = Branch(batch, losses, labels)
        # Later branches are of larger rates, and may diverge; that is a result.
        if not branches and not math.isfinite(branch.loss):
            moment = f"after steps of {batch}" if batch else "before any branch"
            raise NonfiniteLossError(
                f"the held-out loss {moment} is {branch.loss}; lower optimizer.lr, or check the"
                " weights and the labels of these rows"
            )
        return branch

    trainer.learn_collectives()
    snapshot = TrainingSnapshot(trainer.model, trainer.optimizers, device=job.device)
    branches = list[Branch]()
    facts = list[dict[str, Any]]()
    start_branch = evaluated(0)
    batches = batches_of_branches(job.settings.step_rows * job.ranks, len(trained))
    steps = sum(len(trained) // batch for batch in batches)
    with ProgressBar(steps, "steps", "branches", shown=distributed.is_rank_zero()) as bar:
        for batch in batches:
            start = time.perf_counter()
            lr = 0.0
            for begin in range(0, len(trained), batch):
                lr = rate.set(0.0, batch=batch)
                question = Question(batch_size=job.settings.batch_size, num_rows=batch)
                runner.run(trained[begin : begin + batch][rank::ranks], question)
                trainer.step()
                bar.advance()
            branches.append(evaluated(batch))
            facts.append(
                {
                    "batch": batch,
                    "steps": len(trained) // batch,
                    "lr": lr,
                    "loss": branches[-1].loss,
                    "seconds": round(time.perf_counter() - start, 3),
                }
            )
    # Only after the last branch is it known which is the best.
    best = best_branch(branches)
    for branch, branch_facts in zip(branches, facts, strict=True):
        branch_facts["above"], branch_facts["standard_error"] = branch.excess(best)
    return start_branch, branches, facts


def _table(record: dict[str, Any], *, ranks: int) -> str:
    """Return the record for people."""
    branches = record["branches"]
    tolerance = record["tolerance"]
    critical = record["critical_batch"]
    best = next(branch for branch in branches if branch["above"] == 0)
    lines = [
        (
            f"\nbranches of {count(record['rows'], 'row', ',')} from {record['from']} (step"
            f" {record['steps']}), rates by the rule {record['rule']}; loss of"
            f" {count(record['held_out_rows'], 'row')} held out, {record['loss_before']:.4f} before"
        ),
        f"{'batch':>7} {'steps':>6} {'lr':>10} {'loss':>8} {'above the best':>18}",
    ]
    for branch in branches:
        above = ""
        if branch is not best:
            above = f"{branch['above']:+.2%} +- {_ERRORS * branch['standard_error']:.2%}"
        line = (
            f"{branch['batch']:>7} {branch['steps']:>6} {branch['lr']:>10.3g}"
            f" {branch['loss']:>8.4f} {above:>18}"
        )
        lines.append(line.rstrip())
    # A batch below the smallest was not tried, nor one above the largest.
    or_fewer = " or fewer" if critical == branches[0]["batch"] else ""
    at_most = record["at_most"] or f"more than {branches[-1]['batch']}, the largest tried"
    lines.append(
        f"critical batch: {count(critical, 'row')}{or_fewer} at a tolerance of {tolerance:.2%};"
        f" within {_ERRORS:g} standard errors {record['at_least']} to {at_most}"
    )
    gain = 1 - best["loss"] / record["loss_before"]
    if gain < tolerance:
        lines.append(
            f"the best branch gained {gain:.2%}, less than the tolerance: a branch that learns"
            " nothing may pass; give more probe.critical_batch_rows, or a lower"
            " probe.critical_batch_tolerance"
        )
    most_steps = branches[0]["steps"]
    if most_steps < _STEPS:
        lines.append(
            f"the branches took {branches[-1]['steps']} to {most_steps} steps: with fewer than"
            f" {_STEPS} the loss tells how many there were as much as how large they are; give more"
            " probe.critical_batch_rows"
        )
    return "\n".join([*lines, *_use_and_cost(record, ranks=ranks)])


def _use_and_cost(record: dict[str, Any], *, ranks: int) -> list[str]:
    """Return the lines on the schedule that takes the result, and on what it cost."""
    rows = max(1, record["critical_batch"] // ranks)
    # A schedule has one point at the start, or later ones by the tokens trained on.
    entry = f"start: {rows}"
    if record["tokens"]:
        entry = f"point {{{record['tokens']}tok: {rows}}}"
    noise = record["gradient_noise_scale"]
    noise_scale = f"{noise:.1f} rows" if noise else "not measured"
    cost = (
        f"{count(record['rows_trained'], 'row', ',')} trained, {record['share_of_run']:.0%} of the"
        " run's"
    )
    return [
        f"by_critical_batch takes it, in rows on one device, as {entry}",
        f"gradient noise scale in the checkpoint: {noise_scale}",
        f"cost: {cost}; {record['seconds']:.1f} s",
    ]
