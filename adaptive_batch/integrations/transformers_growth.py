"""Growing batches under Hugging Face's Trainer: steps, learning rate and resuming."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from adaptive_batch import distributed
from adaptive_batch.data import AdaptiveBatches, Sampling
from adaptive_batch.errors import SettingError
from adaptive_batch.training import AdaptiveRate

from .arguments import AdaptiveArguments

# Key of the data position in Trainer's state, which Trainer saves with each checkpoint.
_STATE = "AdaptiveBatches"
# Trainer arguments that affect the batch, with their required values.
_NEEDED = {
    "gradient_accumulation_steps": (
        1,
        "a batch holds the rows of a whole step and runs in micro-batches; give 1",
    ),
    "train_sampling_strategy": ("random", "AdaptiveBatches draws the order of rows; give random"),
    "dataloader_drop_last": (False, "each row is used once per epoch; give False"),
}


class Growth(TrainerCallback):
    """Creates the growing batches of a run and tracks the position in the data.

    Args:
        adaptive: arguments of the trainer.
        arguments: arguments of Trainer.
        loader: Trainer's own loader, whose dataset, collator and workers are reused.

    Attributes:
        batches: batch sampler that yields the rows of each step.
        loader: loader of `batches`.
        learning_rate: rate of the last step; None before the first.

    Raises:
        SettingError: an argument is incompatible with growing batches.
    """

    def __init__(
        self, adaptive: AdaptiveArguments, arguments: TrainingArguments, loader: DataLoader[Any]
    ) -> None:
        for key, (needed, remedy) in _NEEDED.items():
            value = getattr(arguments, key, needed)
            if value != needed:
                raise SettingError(key, value, f"with batch_increase_function {remedy}")
        if distributed.world_size() > 1:
            remedy = "it grows on one process; on several ranks use AdaptiveLoop or AdaptiveBatches"
            raise SettingError("batch_increase_function", "on several ranks", remedy)
        if isinstance(loader.dataset, IterableDataset):
            remedy = "a stream has no rows by number to draw batches from; give a map-style dataset"
            raise SettingError("train_dataset", type(loader.dataset).__name__, remedy)
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        self.batches = AdaptiveBatches(
            loader.dataset,
            arguments.train_batch_size,
            batch_increase_function=adaptive.batch_increase_function,
            sampling=Sampling(seed=seed),
        )
        self.loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self.batches,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            # Without it, a run that resumes within an epoch draws one more random number.
            generator=torch.Generator(),
        )
        self._lr_scaling = adaptive.lr_scaling
        self._reference_rows = arguments.train_batch_size
        self._rate: AdaptiveRate | None = None
        self.learning_rate: float | None = None

    def num_steps(self, epochs: float) -> int:
        """Return the number of steps left of `epochs` epochs; the last epoch may be partial."""
        whole = self.batches.num_steps(math.floor(epochs))
        all_of_last = self.batches.num_steps(math.ceil(epochs))
        return whole + math.ceil((epochs % 1) * (all_of_last - whole))

    def resume(self, state: TrainerState) -> None:
        """Restore the position in the data from a checkpoint.

        Raises:
            SettingError: the checkpoint has no position, or belongs to other batches.
        """
        saved = state.stateful_callbacks.get(_STATE)
        if saved is None:
            remedy = "it was saved without batch_increase_function; resume without it"
            raise SettingError("resume_from_checkpoint", f"step {state.global_step}", remedy)
        self.batches.load_state_dict(saved)

    def set_rate(self, optimizer: Optimizer) -> None:
        """Scale the learning rate that Trainer's scheduler set by the rows of the current step."""
        if self._rate is None:
            self._rate = AdaptiveRate(
                optimizer,
                lr_scaling=self._lr_scaling,
                reference_batch_size=self._reference_rows,
            )
        self.learning_rate = self._rate.set(rows=len(self.batches.oldest.own))["lr"]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any
    ) -> None:
        self.batches.step()
        state.epoch = self.batches.progress.epochs
        state.stateful_callbacks[_STATE] = self.batches.state_dict()


def refuse_saved_growth(state: TrainerState) -> None:
    """Raise if a run with a constant batch size resumes a checkpoint of growing batches.

    Raises:
        SettingError: the checkpoint has growing batches.
    """
    if _STATE in state.stateful_callbacks:
        remedy = "its batch grew; give AdaptiveArguments the same batch_increase_function"
        raise SettingError("resume_from_checkpoint", f"step {state.global_step}", remedy)
