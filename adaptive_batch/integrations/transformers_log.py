"""When Hugging Face's Trainer takes a step, ends an epoch and ends training, for a run log."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adaptive_batch.training import AdaptiveStep

from .step_log import StepLog


class LogsSteps(TrainerCallback):
    """Tells a log of what Trainer does.

    Args:
        log: tells of steps.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._step: AdaptiveStep | None = None
        self._lr = 0.0

    def add(self, loss: float, step: AdaptiveStep) -> None:
        """Count a batch; see :meth:`StepLog.add`."""
        self._step = step
        self._log.add(loss, step)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Any,
        **_: Any,
    ) -> None:
        self._lr = optimizer.param_groups[0]["lr"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        assert self._step is not None, "a batch was run"
        # The last step of an epoch has its end as epoch.
        self._log.step(epoch=math.ceil(state.epoch or 1) - 1, lr=self._lr, step=self._step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.epoch is not None and state.epoch == round(state.epoch):
            self._log.end_epoch(reason="drop_last")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        was_stopped = control.should_training_stop and state.global_step < state.max_steps
        is_by_epochs = args.max_steps <= 0 and not was_stopped
        self._log.end(epochs=math.ceil(args.num_train_epochs) if is_by_epochs else None)
