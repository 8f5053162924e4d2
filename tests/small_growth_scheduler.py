"""A scheduler that keeps its own count of steps."""

from torch.optim.lr_scheduler import StepLR


def step_lr(optimizer, num_training_steps, last_epoch):
    return StepLR(optimizer, step_size=2, last_epoch=last_epoch)
