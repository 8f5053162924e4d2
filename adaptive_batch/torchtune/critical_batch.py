"""The critical batch of one's own run: short branches from a checkpoint at several batches, none of which leaves a trace."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtune import training

from adaptive_batch import distributed
from adaptive_batch._util import ProgressBar, atomic_write, count
from adaptive_batch.checkpoint import checkpoints_in
from adaptive_batch.data import MicroBatchLimit, StepPlanner
from adaptive_batch.errors import NonfiniteLossError, SettingError
from adaptive_batch.memory import TrainingSnapshot
from adaptive_batch.probe import FEWEST_STEPS, Branch, CriticalBatch, batches_of_branches
from adaptive_batch.schedules import LearningRate, Reference, write_rate

from .checkpoints import Checkpoints
from .checks import check_output_dir
from .data import Data
from .epoch_checkpoints import inspect_epoch
from .job import Job
from .preview import TrainingPreview
from .rate import build_rate, check_scheduler, couple_batch, stand_in
from .resumed_run import ResumedRun
from .trainer import Trainer

_STEPS = 64  # of the configured batch that a branch has rows for: the largest of 16 times that still takes four
_MOST_HELD_OUT, _FEWEST_HELD_OUT = 256, 16  # rows of the dataset; the error of fewer says little


@dataclass(frozen=True)
class _Rows:
    """The rows of each branch, and those that none trains on; each read once, so that all branches see them alike."""

    trained: Sequence[dict[str, Any]]
    held_out: Sequence[dict[str, Any]]
    batches: Sequence[int]
    validates: bool  # the held-out rows are of dataset_val


def measure_critical_batch(job: Job) -> str:
    """Branch from a checkpoint at several batches, write ``critical_batch.json``, and return the table of it. A collective.

    Each branch trains on the same rows, the next of the epoch, at a constant rate: that of the schedule there, scaled by the rule of
    `lr_scaling`, or by the square root where that is none. In between, model, optimizer and random numbers are put back.

    Raises:
        SettingError: a setting cannot be used; no weights have been loaded yet.
        CheckpointError: what is there to branch from cannot be read.
        NonfiniteLossError: the loss after the branch of the smallest batch is no number.
    """
    settings, start = job.settings, time.perf_counter()
    _check(job)
    check_output_dir(job.cfg.output_dir)
    seed = training.set_seed(seed=job.cfg.seed, debug_mode=job.cfg.get("cudnn_deterministic_mode", None))
    data = Data.read(job)
    data.check_rows()
    check_scheduler(job.cfg)
    checkpoints = _checkpoints(job)
    resumed = ResumedRun(job, data, checkpoints, seed=seed)
    batching = data.batching(seed=resumed.seed, max_steps_per_epoch=resumed.max_steps_per_epoch)
    by_tokens = settings.lr_clock.counts_tokens
    planner = StepPlanner(data.dataset, batching, layout=data.shapes, ranks=job.ranks, counts_tokens=by_tokens)
    if (state := resumed.state_of("steps")) is not None:
        planner.load_state_dict(state)
    couple_batch(job, planner)
    rows = _rows(job, data, planner, resumed)
    share = _share_of_rate(job, data, planner, resumed)
    limits = [MicroBatchLimit(settings.batch_size)]
    if isinstance(settings.micro_batch_tokens, int):
        limits = [MicroBatchLimit(settings.micro_batch_tokens, "tokens")]
    elif isinstance(settings.micro_batch_size, int):
        limits = [MicroBatchLimit(settings.micro_batch_size)]
    trainer = Trainer.load(
        job, data, checkpoints, limit=lambda: limits[-1], lower=lambda change: limits.append(change.after)
    )
    checkpoints.load_optimizer(trainer)
    for group in trainer.optimizer.param_groups:
        write_rate(group, float(group.get("initial_lr", group["lr"])) * share)
    per_row = sum(map(data.dataset.num_real_tokens, rows.trained)) / len(rows.trained)
    given = settings.reference_batch_size or Reference(settings.step_rows * job.ranks, "rows")
    rule = settings.lr_scaling if settings.lr_scaling != "none" else "sqrt"
    rate = LearningRate(
        trainer.optimizers,
        rule=rule,
        reference=given if given.unit == "rows" else Reference(given.amount / per_row, "rows"),
        scale_with_batch=settings.scale_with_batch,
    )
    before, taken = _branches(job, data, trainer, rate, rows)
    found = CriticalBatch(tuple(branch for branch, *_ in taken), settings.probe.critical_batch_tolerance)
    smallest = found.branches[0]
    if not smallest.loss < float("inf"):
        remedy = "lower optimizer.lr, or check the weights that it began with and the labels of held-out rows"
        raise NonfiniteLossError(
            f"the held-out loss after {count(smallest.batch, 'row')} a step is {smallest.loss}; {remedy}"
        )
    of_run = settings.epochs * len(data.dataset)
    trained = len(rows.trained) * len(found.branches)
    record = {
        "from": checkpoints.found.source,
        **{name: getattr(resumed.progress, name) for name in ("epoch", "steps", "samples", "tokens")},
        "critical_batch": found.rows,
        "at_least": found.at_least,
        "at_most": found.at_most,
        "tolerance": found.tolerance,
        "gradient_noise_scale": resumed.progress.noise_scale,
        "rows": len(rows.trained),
        "held_out": {"rows": len(smallest.labels), "of": "dataset_val" if rows.validates else "dataset"},
        "loss_before": before.loss,
        "rule": rule,
        "branches": [
            {
                "batch": branch.batch,
                "steps": len(rows.trained) // branch.batch,
                "lr": lr,
                "loss": branch.loss,
                **dict(zip(("above", "standard_error"), branch.excess(smallest), strict=True)),
                "seconds": round(seconds, 3),
            }
            for branch, lr, seconds in taken
        ],
        "cost": {
            "rows": trained,
            "share_of_run": trained / of_run,
            "seconds": round(time.perf_counter() - start, 3),
        },
    }
    path = Path(job.cfg.output_dir) / "adaptive_batch" / "critical_batch.json"
    if distributed.is_rank_zero():
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, json.dumps(record, indent=2) + "\n")
    return _table(record, of_run=of_run, ranks=job.ranks)


def _check(job: Job) -> None:
    """Refuse what branches cannot be made with."""
    settings, probe = job.settings, job.settings.probe
    for key, value, why in (
        ("probe.tune", probe.tune, "probe.critical_batch times no settings"),
        ("probe.sequence_lengths", list(probe.sequence_lengths), "probe.critical_batch trains on rows as they are"),
        ("optimizer_in_bwd", settings.optimizer_in_bwd, "with probe.critical_batch a step takes several micro-batches"),
        ("batch_tokens", settings.batch_tokens, "probe.critical_batch counts rows: set batch_size"),
    ):
        if value:
            raise SettingError(key, value, f"{why}; remove it, or probe.critical_batch")


def _checkpoints(job: Job) -> Checkpoints:
    """Find what is branched from: as configured, else the newest, else the base."""
    cfg, given, only = copy.deepcopy(job.cfg), job.settings.probe.critical_batch_from, None
    if given is not None:
        only = Path(given).absolute()
        cfg.output_dir = cfg.checkpointer.output_dir = str(only.parent)
        saved = [one.path for one in checkpoints_in(only.parent)[0]] + [
            getattr(inspect_epoch(cfg.checkpointer), "path", None)
        ]
        if only not in saved:
            remedy = (
                "it is no resume point, nor an epoch with the recipe_state beside it; give a folder step_N of a run"
            )
            raise SettingError("probe.critical_batch_from", given, remedy)
    is_saved = any(map(bool, checkpoints_in(Path(cfg.output_dir)))) or inspect_epoch(cfg.checkpointer) is not None
    cfg.resume_from_checkpoint = is_saved
    return Checkpoints(cfg, job.settings, keeps_base=job.builder.keeps_base, only=only)


def _rows(job: Job, data: Data, planner: StepPlanner, resumed: ResumedRun) -> _Rows:
    """Take the rows that training would take next, then those that are held out; from the end of the epoch on, of its beginning."""
    settings, step_rows = job.settings, job.settings.step_rows * job.ranks
    key, given, num_rows = "probe.critical_batch_rows", job.settings.probe.critical_batch_rows, len(data.dataset)
    validation = settings.validation
    most = num_rows if validation else num_rows - _FEWEST_HELD_OUT
    asked = given or min(_STEPS * step_rows, most, num_rows if validation else num_rows * 3 // 4)
    fewest = 2 * FEWEST_STEPS * batches_of_branches(step_rows, 0)[0]
    if asked < fewest:
        remedy = f"two branches of {FEWEST_STEPS} steps take {fewest} rows; give that or more, or lower batch_size"
        raise SettingError(key, given, f"{remedy} (the dataset has {num_rows})")
    if asked > most:
        held = "" if validation else f", of which {_FEWEST_HELD_OUT} are held out"
        raise SettingError(key, given, f"the dataset has {count(num_rows, 'row')}{held}; give {most} or less")
    batches = batches_of_branches(step_rows, asked)
    rows = asked - asked % batches[-1]  # so that each batch divides them
    order = torch.roll(planner.epochs.order(resumed.progress), -resumed.progress.epoch_rows)[:num_rows].tolist()
    trained = [data.read_row(row) for row in order[:rows]]
    if validation:
        numbers = range(validation.rows_of(len(data.dataset_val), ranks=job.ranks))
        return _Rows(trained, [data.dataset_val[row] for row in numbers], batches, validates=True)
    held_out = [data.read_row(row) for row in order[rows : rows + _MOST_HELD_OUT]]
    return _Rows(trained, held_out, batches, validates=False)


def _share_of_rate(job: Job, data: Data, planner: StepPlanner, resumed: ResumedRun) -> float:
    """Return the part of the configured rate that the schedule has where the branches begin.

    Raises:
        SettingError: it is 0.
    """
    saved = resumed.saved
    progress = planner.begin(resumed.progress)
    preview = TrainingPreview(job, data, planner)
    preview.look_ahead(progress, saved=saved)
    base = float(saved.get("base_rate", job.cfg.optimizer.get("lr") or 1.0))
    steps = preview.schedule_steps
    rate = build_rate(
        job,
        planner,
        [stand_in(job, base)],
        progress=progress,
        total_steps=steps,
        saved=saved.get("learning_rate", {}),
    )
    share = rate.set(progress, plan=planner.plan, batch=max(1, round(rate.reference.amount))) / base
    if share <= 0:
        remedy = (
            "the schedule has a rate of 0 there, as at the first step of a warm-up; give a resume point within the run"
        )
        raise SettingError(
            "probe.critical_batch_from", job.settings.probe.critical_batch_from, f"{remedy}, or lr_scheduler=null"
        )
    return share


def _branches(
    job: Job, data: Data, trainer: Trainer, rate: LearningRate, rows: _Rows
) -> tuple[Branch, list[tuple[Branch, float, float]]]:
    """Return the loss before, and of each branch what it ended with, its rate and the seconds that it took."""
    runner, ranks, rank = trainer.runner, distributed.data_parallel_size(), distributed.data_parallel_rank()
    runner.small_rows = None  # the noise is not sampled
    loss_of_rows = data.loss_val(runner.loss) if rows.validates else runner.loss
    held_out = rows.held_out[: len(rows.held_out) // ranks * ranks]  # as many on each rank

    def evaluated(batch: int) -> Branch:
        trainer.model.eval()
        mine = [runner.evaluate([row], loss=loss_of_rows) for row in held_out[rank::ranks]]
        everywhere = [of_row for of_rank in distributed.all_gather(mine) for of_row in of_rank]
        return Branch(batch, [loss for loss, _ in everywhere], [labels for _, labels in everywhere])

    before, found = None, []
    snapshot = TrainingSnapshot(trainer.model, trainer.optimizers, device=job.device)
    steps = sum(len(rows.trained) // batch for batch in rows.batches)
    with ProgressBar(steps, "steps", "branches", shown=distributed.is_rank_zero()) as bar:
        for batch in rows.batches:
            start, lr = time.perf_counter(), 0.0
            if before is None:
                before = evaluated(0)
                snapshot.restore()
            for begin in range(0, len(rows.trained), batch):
                lr = rate.set(0.0, batch=batch)
                runner.run(rows.trained[begin : begin + batch][rank::ranks])
                trainer.step()
                bar.advance()
            found.append((evaluated(batch), lr, time.perf_counter() - start))
            snapshot.restore()
    assert before is not None
    return before, found


def _table(record: dict[str, Any], *, of_run: int, ranks: int) -> str:
    """Return the record for people."""
    branches, tolerance, noise = record["branches"], record["tolerance"], record["gradient_noise_scale"]
    held, cost, most = record["held_out"], record["cost"], record["at_most"]
    lines = [
        f"\nbranches of {count(record['rows'], 'row', ',')} each from {record['from']} (step {record['steps']}); the rate by the rule "
        f"{record['rule']}; loss of {count(held['rows'], 'row')} of {held['of']} held out, {record['loss_before']:.4f} before",
        f"{'batch':>7} {'steps':>6} {'lr':>10} {'loss':>8} {'above the smallest':>20}",
    ]
    for one in branches:
        above = f"{one['above']:+.2%} +- {2 * one['standard_error']:.2%}" if one is not branches[0] else ""
        lines.append(f"{one['batch']:>7} {one['steps']:>6} {one['lr']:>10.3g} {one['loss']:>8.4f} {above:>20}".rstrip())
    found, largest = record["critical_batch"], branches[-1]["batch"]
    lines.append(
        f"critical batch: {count(found, 'row')}{' or fewer' if found == branches[0]['batch'] else ''} at a tolerance of {tolerance:.2%}; "
        f"within two standard errors {record['at_least']} to {most or f'more than {largest}, the largest tried'}"
    )
    at = f"point {{{record['tokens']}tok: {found // ranks}}}" if record["tokens"] else f"start: {found // ranks}"
    lines.append(f"as by_critical_batch takes it, in rows on one device: {at}")
    gained = 1 - branches[0]["loss"] / record["loss_before"]
    if gained < tolerance:
        lines.append(
            f"the smallest batch gained {gained:.2%}, less than the tolerance, so that a branch which learns nothing may pass; "
            "give more probe.critical_batch_rows or a lower probe.critical_batch_tolerance"
        )
    lines.append(f"gradient noise scale in the checkpoint: {f'{noise:.1f} rows' if noise else 'not measured'}")
    share = f"{cost['share_of_run']:.0%} of the run's {of_run:,}"
    lines.append(f"cost: {count(cost['rows'], 'row', ',')} trained, {share}; {cost['seconds']:.1f} s")
    return "\n".join(lines)
