"""The learning rate of each step: torchtune's scheduler at the clock, scaled by the batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchtune import config

from adaptive_batch.data import Batches
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Clock,
    ReferenceBatch,
    Seesaw,
    follows_clock,
    prepare_for_scaled_options,
    schedule_factor,
    write_rate,
)
from adaptive_batch.training import AdaptiveRate

from .configuration import as_dict, instantiate, load_function, refusing
from .job import Job

log = logging.getLogger("adaptive_batch")

_CHANGE_THE_BATCH = ("batch_increase_function", "batch_size_schedule", "batch_tokens")


def build_rate(
    job: Job, optimizers: list[Optimizer], *, total_steps: int, saved: Mapping[str, Any] | None
) -> AdaptiveRate:
    """Build the configured scheduler, and what sets the rate of each step by it.

    Args:
        job: job of the run.
        optimizers: optimizers that follow; the first is the one that the scheduler is built around.
        total_steps: end of the scheduler, in steps of the constant batch or, where its clock counts
            steps, in steps.
        saved: state of the rate in the checkpoint; None without one.
    """
    settings = job.settings
    reference = settings.reference_batch_size
    if reference is None and saved is not None and saved.get("reference"):
        # The batch may be another one now; the one that the rate was chosen for is the same.
        reference = ReferenceBatch(**saved["reference"])
    block = job.cfg.get("lr_scheduler", None)
    scheduler = None
    # A resumed run builds it for the first step too: it is evaluated at the clock, or stepped to
    # where training is. Without one, the base rate counts.
    rewind_rates(optimizers)
    if block:
        scheduler = instantiate(
            "lr_scheduler", block, optimizers[0], num_training_steps=total_steps, last_epoch=-1
        )
    rate = AdaptiveRate.for_recipe(
        optimizers,
        scheduler,
        lr_scaling=settings.lr_scaling,
        # Counted on the original number of ranks.
        reference_batch_size=reference or settings.global_batch(job.ranks),
        lr_clock=settings.lr_clock,
        scale_with_batch=settings.scale_with_batch,
        warmup_steps=int(block.get("num_warmup_steps", 0)) if block else 0,
        total_steps=total_steps,
    )
    if saved is not None:
        rate.load_state_dict(saved)
    return rate


def rewind_rates(optimizers: Sequence[Optimizer]) -> None:
    """Set the rates of loaded optimizers back to the base rates of their schedule."""
    leader = optimizers[0].param_groups[0]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # of optimizers in backward, torchtune saves the base rate of the first alone
            base_rate = leader.get("initial_lr", group["lr"])
            write_rate(group, float(group.get("initial_lr", base_rate)))


def couple_seesaw(job: Job, batches: Batches) -> None:
    """Give a `seesaw` schedule of the batch the decay of the configured scheduler.

    Raises:
        SettingError: the schedule cannot follow the scheduler.
    """
    if isinstance(job.settings.batch_size_schedule, Seesaw):
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
        SettingError: the optimizer lacks what `scale_with_batch` names, or the scheduler cannot be
            built as in torchtune's recipes, or cannot follow `lr_clock`.
    """
    optimizer = job.optimizer_of_one_weight()
    prepare_for_scaled_options(optimizer, job.settings.scale_with_batch or {})
    cfg = job.cfg
    block = cfg.get("lr_scheduler", None)
    if not block:
        return
    # Raises with similar names if the component does not exist.
    load_function(block._component_, key="lr_scheduler._component_")
    # Longer than any warm-up.
    steps = 10**6
    remedy = (
        "it is called with an optimizer, num_training_steps, last_epoch and its other keys; give"
        " torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    )
    with refusing("lr_scheduler", block._component_, remedy):
        built = config.instantiate(block, optimizer, num_training_steps=steps, last_epoch=-1)
    if isinstance(built, ReduceLROnPlateau):
        remedy = (
            "it waits for a metric and gets none; a LambdaLR, such as torchtune's cosine schedule,"
            " can follow"
        )
        raise SettingError("lr_scheduler", type(built).__name__, remedy)
    if follows_clock(built):
        # A warm-up may hide errors of the rate at first.
        remedy = "check its arguments"
        with refusing("lr_scheduler", as_dict(block), remedy, problem="it gives no rate"):
            schedule_factor(built)(steps - 1)
        return
    clock = Clock.from_config(as_dict(cfg).get("lr_clock"))
    if cfg.get("lr_clock", None) is not None and clock != Clock("steps", "steps"):
        raise SettingError(
            "lr_clock",
            cfg.lr_clock,
            f"{block._component_} counts steps and can follow nothing else; give steps, or a"
            " LambdaLR such as torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        )
    if any(cfg.get(key, None) is not None for key in _CHANGE_THE_BATCH):
        log.warning(
            "%s counts optimizer steps: it cannot follow a batch that changes, and decays too late"
            " when the batch grows; a LambdaLR, such as torchtune's cosine schedule, can",
            type(built).__name__,
        )
