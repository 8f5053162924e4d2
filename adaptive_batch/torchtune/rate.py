"""The learning rate of each step: torchtune's scheduler at the clock, scaled by the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torchtune import config

from adaptive_batch.data import Batches
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    ReferenceBatch,
    Seesaw,
    check_scaled_options,
    follows_clock,
    schedule_factor,
    write_rate,
)
from adaptive_batch.training import AdaptiveRate

from .configuration import as_dict, instantiate, load_function, refusing
from .job import Job


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
    block = job.cfg.get("lr_scheduler", None)
    optimizer = job.optimizer_of_one_weight()
    steps = job.settings.epochs * batches.constant_epoch.steps
    scheduler = block and instantiate(
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
