"""Batch rules, valid and invalid, and schedulers of the learning rate that tests name by dotted
paths.
"""

import itertools

from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

CALLS = itertools.count()


# --- batch_size_schedule: rule(progress)


def another_each_time(progress):
    return 4 + next(CALLS) % 3


def takes_two(progress, batch_size):
    return 4


def returns_none(progress):
    return None


def returns_huge(progress):
    return 10**12


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


NOT_CALLABLE = 3


# --- lr_scheduler


def linear(optimizer, num_training_steps, last_epoch=-1):
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / num_training_steps), last_epoch)


def one_cycle(optimizer, num_training_steps, last_epoch=-1):
    return OneCycleLR(
        optimizer, max_lr=0.1, total_steps=num_training_steps + 1, last_epoch=last_epoch
    )


def step_lr(optimizer, num_training_steps, last_epoch):
    return StepLR(optimizer, step_size=2, last_epoch=last_epoch)


def plateau(optimizer, num_training_steps, last_epoch):
    return ReduceLROnPlateau(optimizer)
