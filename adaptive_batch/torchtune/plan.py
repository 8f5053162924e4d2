"""Plan of training before the first step: the learning rate of each step, and the stages of the
remaining training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torchtune import config

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import Batches, StepAhead
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.schedules import (
    KEY,
    ReferenceBatch,
    Seesaw,
    Stages,
    at_most,
    check_increments,
    check_scaled_options,
    follows_clock,
    schedule_factor,
    write_rate,
)
from adaptive_batch.training import AdaptiveRate, MicroBatchSizer, raise_if_answers_differ

from .configuration import as_dict, instantiate, load_function, refusing
from .job import Job
from .limit_finder import LimitFinder
from .resume import ResumedRun

# Stages that are shown from the beginning and from the end, if there are more.
SHOWN = 10


# --- the learning rate


def build_rate(
    job: Job, optimizers: list[Optimizer], *, total_steps: int, saved: Mapping[str, Any] | None
) -> AdaptiveRate:
    """Build the configured scheduler, and the rate of each step that follows it.

    Args:
        job: job of the run.
        optimizers: optimizers whose rates are set. The scheduler is built with the first.
        total_steps: end of the schedule: in steps, if its clock counts steps; else in steps of the
            constant batch.
        saved: state of the rate in the checkpoint; None without one.
    """
    settings = job.settings
    reference = settings.reference_batch_size
    if reference is None and saved is not None and saved.get("reference"):
        # `batch_size` may have changed since, but the learning rate was chosen for the batch at the
        # start of the run.
        reference = ReferenceBatch(**saved["reference"])
    block = job.cfg.get("lr_scheduler", None)
    scheduler = None
    # A resumed run, too, builds the scheduler as before the first step, with the base rates.
    reset_to_base_rates(optimizers)
    if block:
        scheduler = instantiate(
            "lr_scheduler", block, optimizers[0], num_training_steps=total_steps, last_epoch=-1
        )
    rate = AdaptiveRate(
        optimizers,
        scheduler,
        lr_scaling=settings.lr_scaling,
        # job.ranks is the number of ranks at the start of the run.
        reference_batch_size=reference or settings.global_batch(job.ranks),
        lr_clock=settings.lr_clock,
        scale_with_batch=settings.scale_with_batch,
        total_steps=total_steps,
    )
    if saved is not None:
        # A resumed run may scale in another way; ResumedRun logs the change.
        own = rate.state_dict()
        rate.load_state_dict({**saved, "rule": own["rule"], "reference": own["reference"]})
    return rate


def reset_to_base_rates(optimizers: Sequence[Optimizer]) -> None:
    """Set the rates of loaded optimizers back to the base rates of their schedule."""
    first_group = optimizers[0].param_groups[0]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # With an optimizer for each parameter (optimizer_in_bwd), torchtune saves the base rate
            # of the first only. All have the same one.
            default = first_group.get("initial_lr", group["lr"])
            write_rate(group, float(group.get("initial_lr", default)))


def couple_seesaw(job: Job, batches: Batches) -> None:
    """If `batch_size_schedule` is `seesaw`, make it follow the decay of the configured scheduler.

    Raises:
        SettingError: the schedule cannot follow the scheduler.
    """
    if not isinstance(job.settings.batch_size_schedule, Seesaw):
        return
    scheduler = None
    block = job.cfg.get("lr_scheduler", None)
    if block:
        # The decay is that of a constant batch. Only the scheduler's factors are read.
        steps = job.settings.epochs * batches.constant_epoch.steps
        optimizer = job.optimizer_of_one_weight()
        scheduler = instantiate(
            "lr_scheduler", block, optimizer, num_training_steps=steps, last_epoch=-1
        )
    batches.couple(scheduler, lr_clock=job.settings.lr_clock)


def check_rate(job: Job) -> None:
    """Check the scheduler, and the values of the optimizer that follow the batch.

    Raises:
        SettingError: the optimizer lacks an option that `scale_with_batch` names, or the scheduler
            cannot be built as in torchtune's recipes or cannot follow `lr_clock`.
    """
    optimizer = job.optimizer_of_one_weight()
    # Raises for a missing option.
    check_scaled_options(optimizer, job.settings.scale_with_batch or {})
    cfg = job.cfg
    block = cfg.get("lr_scheduler", None)
    if not block:
        return
    # Raises an error that names the component if it does not exist.
    load_function(block._component_, key="lr_scheduler._component_")
    # The number of steps is not known yet. Take one that no warm-up exceeds.
    steps = 10**6
    remedy = (
        "it is called with an optimizer, num_training_steps, last_epoch and its other keys; give"
        " torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    )
    with refusing("lr_scheduler", block._component_, remedy):
        scheduler = config.instantiate(block, optimizer, num_training_steps=steps, last_epoch=-1)
    if not follows_clock(scheduler):
        remedy = (
            "it counts steps itself, and cannot follow lr_clock; give a LambdaLR, such as"
            " torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        )
        raise SettingError("lr_scheduler", type(scheduler).__name__, remedy)
    # Compute the rate of the last step: a wrong argument may raise only after the warm-up.
    with refusing(
        "lr_scheduler", as_dict(block), "check its arguments", problem="it gives no rate"
    ):
        schedule_factor(scheduler)(steps - 1)


# --- stages


@dataclass
class Stage:
    """Consecutive steps of one batch.

    Attributes:
        first: first step.
        last: last step.
        micro_batches: micro-batches of the first step on one device; 0 if unknown.
        steps: number of steps.
    """

    first: StepAhead
    last: StepAhead
    micro_batches: int
    steps: int = 1


@dataclass(frozen=True)
class TrainingPlan:
    """Plan of the rest of training.

    Attributes:
        stages: stages in order; empty if the batch does not grow and there is no preview.
        full_batch_rows: the largest planned global batch, over which `loss_per_full_batch`
            averages.
        schedule_steps: step at which the learning rate's schedule ends.
    """

    stages: Sequence[Stage]
    full_batch_rows: int
    schedule_steps: int


class TrainingPreview:
    """Applies the batch rules of the remaining training, without training.

    Args:
        job: job of the run.
        batches: steps of the run.
        sizer: limits the micro-batches of the steps.
        resumed: state that the run begins with.
    """

    def __init__(
        self, job: Job, batches: Batches, sizer: MicroBatchSizer, resumed: ResumedRun
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._batches = batches
        self._sizer = sizer
        self._resumed = resumed
        # Stages of the schedule that training does not reach, one sentence each.
        self._notes: list[str] = []

    def check(self) -> None:
        """Call the batch rules for the remaining training, so that mistakes show before weights
        load.

        Raises:
            GrowthFunctionError: a rule raises, or does not return a number of rows.
            SettingError: a stage of a schedule cannot hold its batch.
        """
        settings = self._settings
        batches = self._batches
        progress = self._resumed.progress
        if progress.epoch >= settings.epochs:
            return
        schedule = settings.batch_size_schedule
        function = settings.batch_increase_function
        if schedule is not None:
            stages = self._stages(with_details=False)
            if isinstance(schedule, Stages):
                # A step with more rows than the dataset would be dropped.
                most_rows = None
                if settings.drop_last and not settings.batch_tokens:
                    most_rows = batches.num_rows // batches.ranks
                self._notes = schedule.unused(
                    [stage.first.progress for stage in stages],
                    most_rows=most_rows,
                    maximum=batches.maximum(),
                )
        elif function is not None:
            # The function is called at the start of each epoch. Do not call it again for an epoch
            # that has begun.
            is_in_epoch = progress.epoch_steps > 0
            with RandomState(self._job.device):
                sizes = check_increments(
                    function,
                    first_epoch=progress.epoch + 1 if is_in_epoch else progress.epoch,
                    epochs=settings.epochs,
                    batch_size=batches.batch_size,
                )
            next_size = sizes[0] if sizes else batches.batch_size
            raise_if_answers_differ({"batch_increase_function": next_size})

    def plan_remaining(self) -> TrainingPlan:
        """Plan the rest of training, after the search.

        Raises:
            GrowthFunctionError: a rule's answer for a later epoch is invalid.
        """
        settings = self._settings
        batches = self._batches
        progress = batches.progress
        stages = []
        if settings.grows or settings.preview:
            stages = self._stages(with_details=True)
        schedule_steps = settings.epochs * batches.constant_epoch.steps
        # With lr_clock=steps, the rate counts real steps. A growing batch has fewer of them.
        if settings.lr_clock == "steps" and progress.epoch < settings.epochs:
            # A resumed run without changes keeps its number of steps, so that the learning rate
            # does not jump.
            if self._resumed.keeps_steps:
                schedule_steps = self._resumed.saved["learning_rate"]["total_steps"]
            elif stages:
                schedule_steps = stages[-1].last.after.steps
            else:
                schedule_steps = progress.steps + batches.count_steps(settings.epochs)
        full_batch_rows = batches.constant_epoch.global_rows
        if settings.grows and not settings.batch_tokens:
            # The batches of a schedule that follows the noise scale are unknown, but it has a
            # maximum.
            largest = getattr(settings.batch_size_schedule, "maximum", None) or max(
                (stage.first.batch for stage in stages), default=1
            )
            largest = at_most(largest, batches.maximum())
            full_batch_rows = min(largest * batches.ranks, batches.num_rows)
        return TrainingPlan(stages, full_batch_rows, schedule_steps)

    def _stages(self, *, with_details: bool) -> list[Stage]:
        """Return the remaining steps, grouped by their batch and by the stage of a schedule.

        Args:
            with_details: whether to count micro-batches, and to plan epochs for the clock of the
                learning rate.

        Raises:
            GrowthFunctionError: a rule raises, or returns different batches on several ranks.
        """
        settings = self._settings
        batches = self._batches
        schedule = settings.batch_size_schedule
        knows_micro_batches = with_details and not self._sizer.waits_for_search
        stages: list[Stage] = []
        last_group: object = None
        # Batch at the start of each stage, by the call that an error names.
        answers = {}
        dry_run = batches.dry_run(counts_tokens=settings.grows or settings.preview)
        # A rule may draw random numbers, which training has to draw, too.
        with RandomState(self._job.device):
            for step in dry_run.remaining(settings.epochs, paces=with_details):
                progress = step.progress
                stage_number = schedule.stage(progress) if isinstance(schedule, Stages) else 0
                group = progress.batch, stage_number
                if group == last_group:
                    stages[-1].last = step
                    stages[-1].steps += 1
                    continue
                last_group = group
                num_micro_batches = dry_run.num_micro_batches(step) if knows_micro_batches else 0
                stages.append(Stage(step, step, num_micro_batches))
                call = f"{KEY} at step {progress.steps}"
                if schedule is None:
                    call = f"batch_increase_function in epoch {progress.epoch}"
                answers[call] = progress.batch
        raise_if_answers_differ(answers)
        return stages

    def table(self, plan: TrainingPlan) -> tuple[str, list[dict[str, Any]]]:
        """Return the stages of the remaining training as text, without middle ones if there are
        many, and all of them as records.
        """
        settings = self._settings
        batches = self._batches
        rate = build_rate(
            self._job,
            [self._job.optimizer_of_one_weight()],
            total_steps=plan.schedule_steps,
            saved=self._resumed.state_of("learning_rate"),
        )

        def rates(step: StepAhead) -> dict[str, float]:
            batch = step.tokens if rate.counts_tokens else step.rows
            return rate.apply(step.progress, batch=batch)

        stages = plan.stages
        # Learning rate and other scaled values in the first and the last step of each stage.
        ends = [(rates(stage.first), rates(stage.last)) for stage in stages]
        records = [
            {
                "first": stage.first.progress.state_dict(),
                "last": stage.last.after.state_dict(),
                "steps": stage.steps,
                "batch": stage.first.batch,
                "micro_batches": stage.micro_batches,
                "rates_first": first,
                "rates_last": last,
            }
            for stage, (first, last) in zip(stages, ends, strict=True)
        ]
        notes = [*self._notes]
        if len(stages) > 2 * SHOWN:
            notes.append(f"{len(stages) - 2 * SHOWN:,} stages between these are not shown")
            stages = [*stages[:SHOWN], *stages[-SHOWN:]]
            ends = [*ends[:SHOWN], *ends[-SHOWN:]]
        if batches.plan.is_estimate:
            notes.append(
                "the schedule follows what training measures: this is what comes if nothing new is"
                " measured"
            )
        text = table(
            stages,
            ends,
            unit="tokens" if settings.batch_tokens else "rows",
            ranks=batches.ranks,
            notes=notes,
        )
        return text, records

    def show(self, limit_finder: LimitFinder) -> None:
        """Print the differences from the checkpoint and the plan of training on rank 0, without a
        search.

        Args:
            limit_finder: knows the maximum batch size if an earlier search found it.
        """
        settings = self._settings
        resumed = self._resumed
        lines = [message for _, message, _ in resumed.changes]
        if settings.searches_training:
            lines += limit_finder.lost.describe_trials()
            result = limit_finder.known()
            # Plan with an earlier result as training would after its search.
            if result is None:
                lines.append(
                    "bound: not known; try it (adaptive_probe), or give probe.assumed_maximum"
                )
            else:
                lines.append(f"bound: {result.max_batch_size}")
                self._sizer.set_bound(result)
                if resumed.takes_found_batch:
                    self._batches.set_batch_size(result.batch_size)
        self._batches.begin_epoch()
        text, _ = self.table(self.plan_remaining())
        if distributed.is_rank_zero():
            print(*lines, text, sep="\n")


def table(
    stages: Sequence[Stage],
    rates: Sequence[Sequence[Mapping[str, float]]],
    *,
    unit: str,
    ranks: int,
    notes: Sequence[str] = (),
) -> str:
    """Format stages as aligned text: a header, a line for each stage, totals and notes.

    Args:
        stages: stages of training.
        rates: ``lr`` and other scaled values by name, in the first and last step of each stage.
        unit: unit of the batch: ``rows`` or ``tokens``.
        ranks: devices that share a step.
        notes: last lines.
    """
    if not stages:
        return "\n".join(["no step is left", *notes])
    places = ("from", "step", "sample", "to", "step", "sample")
    # Two columns for each scaled value.
    names = [cell for name in rates[0][0] for cell in (f"{name} at start", "at end")]
    rows = [(*places, f"batch ({unit})", "micro-batches", "global batch", *names, "steps")]
    for stage, ends in zip(stages, rates, strict=True):
        cells = [
            cell
            for progress in (stage.first.progress, stage.last.after)
            for cell in (f"{progress.epochs:.2f}ep", f"{progress.steps:,}", f"{progress.samples:,}")
        ]
        batch = stage.first.batch
        micro_batches = f"{stage.micro_batches:,}" if stage.micro_batches else "?"
        cells += [f"{batch:,}", micro_batches, f"{batch * ranks:,}"]
        for name in ends[0]:
            # Four digits for others, such as 0.9999 for beta2.
            digits = ".3g" if name == "lr" else ".4g"
            cells += [format(values[name], digits) for values in ends]
        rows.append((*cells, f"{stage.steps:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    begin = stages[0].first.progress
    end = stages[-1].last.after
    tokens = end.tokens - begin.tokens
    total = (
        f"total: {end.epochs - begin.epochs:.2f} epochs,"
        f" {count(end.steps - begin.steps, 'step', ',')},"
        f" {count(end.samples - begin.samples, 'sample', ',')},"
        f" {count(tokens, 'token', ',') if tokens else 'tokens not known in advance'}"
    )
    return "\n".join([*lines, total, *notes])
