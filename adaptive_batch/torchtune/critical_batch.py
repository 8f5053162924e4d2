"""The critical batch of one's own run: short branches from a checkpoint at several batches, none of
which leaves a trace.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._util import ProgressBar, atomic_write, count, without_nan
from adaptive_batch.checkpoint import checkpoints_in
from adaptive_batch.data import EpochPlanner
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

from .checkpoints import Checkpoints
from .checks import check_output_dir
from .data import Data
from .epoch_checkpoints import inspect_epoch
from .job import Job
from .rate import stand_in
from .resumed_run import ResumedRun
from .trainer import Trainer

_STEPS = (
    64  # of the configured batch that a branch has rows for, which make four of 16 times as much
)
_MOST_HELD_OUT, _FEWEST_HELD_OUT = 256, 16  # rows of the dataset; the error of fewer says little
_ERRORS = 2.0  # standard errors
# A branch uses none of these, so they may differ from the checkpoint's.
_NOT_USED = ("batch_increase_function", "batch_size_schedule", "lr_scheduler", "lr_clock")


def measure_critical_batch(job: Job) -> str:
    """Branch from a checkpoint at several batches, write ``critical_batch.json``, and return the
    table of it. A collective.

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
    probe = job.settings.probe
    start = time.perf_counter()
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
    check_output_dir(job.cfg.output_dir)
    seed = training.set_seed(
        seed=job.cfg.seed, debug_mode=job.cfg.get("cudnn_deterministic_mode", None)
    )
    data = Data.read(job)
    data.check_rows()
    checkpoints = _checkpoints(job)
    job.settings = replace(
        settings, resume_allow_changes=(*settings.resume_allow_changes, *_NOT_USED)
    )
    resumed = ResumedRun(job, data, checkpoints, seed=seed)
    trained, held_out = _rows(job, data, resumed)
    stand_in(job, 1.0)  # which refuses an optimizer without what scale_with_batch names
    trainer = Trainer.load(job, data, checkpoints, data.new_sizer(searches=False))
    if settings.micro_batch_layout == "packed" and (
        why := trainer.runner.why_not_packed(data.longest(2))
    ):
        raise SettingError("micro_batch_layout", "packed", f"{why}; or give grouped")
    checkpoints.load_optimizer(trainer)
    if not any(float(group["lr"]) for group in trainer.optimizer.param_groups):
        remedy = (
            f"the rate of {checkpoints.found.source} is 0, as in the first step of a warm-up; give"
            " a later one, or optimizer.lr"
        )
        raise SettingError("probe.critical_batch_from", probe.critical_batch_from, remedy)
    reference = settings.reference_batch_size or Reference(settings.step_rows * job.ranks, "rows")
    if reference.unit == "tokens":
        reference = Reference(
            reference.amount * len(trained) / sum(map(data.dataset.num_real_tokens, trained)),
            "rows",
        )
    rule = "sqrt" if settings.lr_scaling == "none" else settings.lr_scaling
    rate = LearningRate(
        trainer.optimizers,
        rule=rule,
        reference=reference,
        scale_with_batch=settings.scale_with_batch,
    )
    before, branches, facts = _branches(job, data, trainer, rate, trained, held_out)
    tolerance = probe.critical_batch_tolerance
    cost = len(trained) * len(branches)
    most_rows = (resumed.max_steps_per_epoch or len(data.dataset)) * settings.step_rows * job.ranks
    critical, at_least, most = (
        critical_batch(branches, tolerance, errors=n) for n in (0, _ERRORS, -_ERRORS)
    )
    record = {
        "from": checkpoints.found.source,
        **{
            name: getattr(resumed.progress, name)
            for name in ("epoch", "steps", "samples", "tokens")
        },
        "critical_batch": critical,
        "at_least": at_least,
        "at_most": most if most < branches[-1].batch else None,
        "tolerance": tolerance,
        "gradient_noise_scale": resumed.progress.noise_scale,
        "rows": len(trained),
        "held_out_rows": len(before.labels),
        "loss_before": before.loss,
        "rule": rule,
        "branches": facts,
        "rows_trained": cost,
        "share_of_run": cost / (settings.epochs * min(len(data.dataset), most_rows)),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if distributed.is_rank_zero():
        path = Path(job.cfg.output_dir, "adaptive_batch", "critical_batch.json")
        written = {**record, "branches": list(map(without_nan, facts))}
        atomic_write(path, json.dumps(written, indent=2) + "\n")
    said = [message for kind, message, _ in resumed.changes() if kind not in _NOT_USED]
    return "\n".join([*said, _table(record, ranks=job.ranks)])


def _checkpoints(job: Job) -> Checkpoints:
    """Find what is branched from: as configured, else the newest, else the base."""
    cfg = copy.deepcopy(job.cfg)
    given = job.settings.probe.critical_batch_from
    only = None
    if given is not None:
        only = Path(given).absolute()
        cfg.output_dir = cfg.checkpointer.output_dir = str(only.parent)
    saved, skipped = checkpoints_in(Path(cfg.output_dir))
    found = [
        one.path for one in (*saved, *skipped, inspect_epoch(cfg.checkpointer)) if one is not None
    ]
    if only is not None and only not in found:
        remedy = (
            "it is no resume point, nor an epoch with its recipe_state; give a folder such as"
            " OUTPUT_DIR/step_100"
        )
        raise SettingError("probe.critical_batch_from", given, remedy)
    cfg.resume_from_checkpoint = bool(found)
    return Checkpoints(cfg, job.settings, keeps_base=job.builder.keeps_base, only=only)


def _rows(job: Job, data: Data, resumed: ResumedRun) -> tuple[list[Any], list[Any]]:
    """Read the rows that training would take next, and those held out: of `dataset_val`, or the
    next after them; around its end.
    """
    given = job.settings.probe.critical_batch_rows
    validation = job.settings.validation
    num_rows = len(data.dataset)
    step_rows = job.settings.step_rows * job.ranks
    most = num_rows - (0 if validation else _FEWEST_HELD_OUT)
    rows = given or min(_STEPS * step_rows, most, num_rows if validation else num_rows * 3 // 4)
    fewest = 2 * FEWEST_STEPS * batches_of_branches(step_rows, 0)[0]
    if not fewest <= rows <= most:
        held = "" if validation else f", and holds out {_FEWEST_HELD_OUT}"
        remedy = (
            f"two branches of {FEWEST_STEPS} steps take {fewest} rows, and the dataset has"
            f" {num_rows}{held}"
        )
        raise SettingError(
            "probe.critical_batch_rows", given, f"{remedy}; give as many, or a smaller batch_size"
        )
    rows -= rows % batches_of_branches(step_rows, rows)[-1]  # which each batch divides
    batching = data.batching(seed=resumed.seed, max_steps_per_epoch=resumed.max_steps_per_epoch)
    epochs = EpochPlanner(data.dataset, batching, ranks=job.ranks, divisible=False)
    if (state := resumed.state_of("steps")) is not None:
        epochs.load_state_dict(state)
    order = epochs.order(resumed.progress)
    read_rows = min(len(order), rows + (0 if validation else _MOST_HELD_OUT))
    places = (torch.arange(read_rows) + resumed.progress.epoch_rows) % len(order)
    read = [data.read_row(row) for row in order[places].tolist()]
    if validation is None:
        return read[:rows], read[rows:]
    validated = validation.rows_of(len(data.dataset_val), ranks=distributed.data_parallel_size())
    if validated < distributed.data_parallel_size():
        raise SettingError(
            "dataset_val", f"{validated} rows of it", "each rank takes some; give more of them"
        )
    return read, [data.dataset_val[row] for row in range(validated)]


def _branches(
    job: Job,
    data: Data,
    trainer: Trainer,
    rate: LearningRate,
    trained: Sequence[Any],
    held_out: Sequence[Any],
) -> tuple[Branch, list[Branch], list[dict[str, Any]]]:
    """Return what is held out before, and after each branch, and facts of each for the record."""
    runner = trainer.runner
    ranks = distributed.data_parallel_size()
    rank = distributed.data_parallel_rank()
    loss = data.loss_val(runner.loss) if job.settings.validation else runner.loss
    mine = held_out[: len(held_out) // ranks * ranks][rank::ranks]  # as many on each rank

    def evaluated(batch: int) -> Branch:
        trainer.model.eval()
        of_ranks = distributed.all_gather([runner.evaluate([row], loss=loss) for row in mine])
        snapshot.restore()
        branch = Branch(
            batch, *zip(*(of_row for of_rank in of_ranks for of_row in of_rank), strict=True)
        )
        if not branches and not math.isfinite(branch.loss):
            what = (
                f"the held-out loss {f'after steps of {batch}' if batch else 'before any branch'}"
                f" is {branch.loss}"
            )
            raise NonfiniteLossError(
                f"{what}; lower optimizer.lr, or check the weights and the labels of these rows"
            )
        return branch

    trainer.learn_collectives()
    snapshot = TrainingSnapshot(trainer.model, trainer.optimizers, device=job.device)
    branches = list[Branch]()
    facts = list[dict[str, Any]]()
    before = evaluated(0)
    batches = batches_of_branches(job.settings.step_rows * job.ranks, len(trained))
    steps = sum(len(trained) // batch for batch in batches)
    with ProgressBar(steps, "steps", "branches", shown=distributed.is_rank_zero()) as bar:
        for batch in batches:
            start = time.perf_counter()
            lr = 0.0
            for begin in range(0, len(trained), batch):
                lr = rate.set(0.0, batch=batch)
                runner.run(trained[begin : begin + batch][rank::ranks], job.settings.batch_size)
                trainer.step()
                bar.advance()
            branches.append(evaluated(batch))
            of_batch = {
                "batch": batch,
                "steps": len(trained) // batch,
                "lr": lr,
                "loss": branches[-1].loss,
            }
            facts.append({**of_batch, "seconds": round(time.perf_counter() - start, 3)})
    best = best_branch(branches)
    for branch, one in zip(branches, facts, strict=True):
        one["above"], one["standard_error"] = branch.excess(best)
    return before, branches, facts


def _table(record: dict[str, Any], *, ranks: int) -> str:
    """Return the record for people."""
    branches = record["branches"]
    tolerance = record["tolerance"]
    noise = record["gradient_noise_scale"]
    smallest = branches[0]["batch"]
    largest = branches[-1]["batch"]
    found = record["critical_batch"]
    best = next(one for one in branches if one["above"] == 0)
    lines = [
        (
            f"\nbranches of {count(record['rows'], 'row', ',')} from {record['from']} (step"
            f" {record['steps']}), rates by the rule {record['rule']}; loss of"
            f" {count(record['held_out_rows'], 'row')} held out, {record['loss_before']:.4f} before"
        ),
        f"{'batch':>7} {'steps':>6} {'lr':>10} {'loss':>8} {'above the best':>18}",
    ]
    for one in branches:
        above = (
            f"{one['above']:+.2%} +- {_ERRORS * one['standard_error']:.2%}"
            if one is not best
            else ""
        )
        lines.append(
            f"{one['batch']:>7} {one['steps']:>6} {one['lr']:>10.3g} {one['loss']:>8.4f}"
            f" {above:>18}".rstrip()
        )
    lines.append(
        f"critical batch: {count(found, 'row')}{' or fewer' if found == smallest else ''} at a"
        f" tolerance of {tolerance:.2%}; within two standard errors {record['at_least']} to"
        f" {record['at_most'] or f'more than {largest}, the largest tried'}"
    )
    if (gained := 1 - best["loss"] / record["loss_before"]) < tolerance:
        why = (
            f"the best branch gained {gained:.2%}, less than the tolerance: one that learns nothing"
            " may pass"
        )
        lines.append(
            f"{why}; give more probe.critical_batch_rows, or a lower probe.critical_batch_tolerance"
        )
    rows = max(1, found // ranks)
    at = f"point {{{record['tokens']}tok: {rows}}}" if record["tokens"] else f"start: {rows}"
    lines.append(f"by_critical_batch takes it, in rows on one device, as {at}")
    lines.append(
        "gradient noise scale in the checkpoint:"
        f" {f'{noise:.1f} rows' if noise else 'not measured'}"
    )
    cost = (
        f"{count(record['rows_trained'], 'row', ',')} trained, {record['share_of_run']:.0%} of the"
        " run's"
    )
    lines.append(f"cost: {cost}; {record['seconds']:.1f} s")
    return "\n".join(lines)
