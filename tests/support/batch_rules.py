"""Batch rules, valid and invalid, and schedulers of the learning rate that tests name by dotted
paths.
"""

import itertools

from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

CALLS = itertools.count()


# --- batch_size_schedule: rule(progress)


def another_each_time(progress):
    return 4 + next(CALLS) % 3


def takes_two(progress, batch_size):
    return 4


def raises_in_second_epoch(progress):
    if progress.epoch == 1:
        raise KeyError("no such stage")
    return 4


def doubles_every_fourth_step(progress):
    """Follows the batch of the step before."""
    if not progress.batch:
        return 4
    return min(16, 2 * progress.batch) if progress.steps % 4 == 0 else progress.batch


def doubles_its_tokens(progress):
    """The same of tokens, with every third step."""
    if not progress.batch:
        return 128
    return min(512, 2 * progress.batch) if progress.steps % 3 == 0 else progress.batch


# --- lr_scheduler


def step_lr(optimizer, num_training_steps, last_epoch):
    return StepLR(optimizer, step_size=2, last_epoch=last_epoch)


def plateau(optimizer, num_training_steps, last_epoch):
    return ReduceLROnPlateau(optimizer)
