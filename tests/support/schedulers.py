"""Schedulers that are no function of the step: one keeps its own count, one waits for a metric."""

from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR


def step_lr(optimizer, num_training_steps, last_epoch):
    return StepLR(optimizer, step_size=2, last_epoch=last_epoch)


def plateau(optimizer, num_training_steps, last_epoch):
    return ReduceLROnPlateau(optimizer)
