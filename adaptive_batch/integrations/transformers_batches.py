"""Batches of Hugging Face's Trainer: growing ones, and pairs of preference collators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from adaptive_batch import distributed
from adaptive_batch._util import check_built_alike
from adaptive_batch.data import AdaptiveBatches, Sampling
from adaptive_batch.errors import SettingError
from adaptive_batch.training import AdaptiveRate, RowsOfBatch, SplitBatch

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
# Class names in TRL and in LLaMA-Factory, compared by name to avoid the imports.
_COLLATORS = ("DataCollatorForPreference", "PairwiseDataCollatorWithPadding")


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
            batch_increase_function=cast(Any, adaptive.batch_increase_function),
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
        of_whole_epochs = self.batches.num_steps(math.floor(epochs))
        with_last_epoch = self.batches.num_steps(math.ceil(epochs))
        return of_whole_epochs + math.ceil((epochs % 1) * (with_last_epoch - of_whole_epochs))

    def resume(self, state: TrainerState) -> None:
        """Restore the position in the data from a checkpoint.

        Raises:
            SettingError: the checkpoint has no position, or belongs to other batches or another
                `lr_scaling`.
        """
        saved = state.stateful_callbacks.get(_STATE)
        if saved is None:
            remedy = "it was saved without batch_increase_function; resume without it"
            raise SettingError("resume_from_checkpoint", f"step {state.global_step}", remedy)
        saved = {"lr_scaling": self._lr_scaling, **saved}
        own = {"lr_scaling": self._lr_scaling}
        check_built_alike(own, saved, what="trainer")
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
        saved = {**self.batches.state_dict(), "lr_scaling": self._lr_scaling}
        state.stateful_callbacks[_STATE] = saved


def refuse_saved_growth(state: TrainerState) -> None:
    """Raise if a run with a constant batch size resumes a checkpoint of growing batches.

    Raises:
        SettingError: the checkpoint has growing batches.
    """
    if _STATE in state.stateful_callbacks:
        remedy = "its batch grew; give AdaptiveArguments the same batch_increase_function"
        raise SettingError("resume_from_checkpoint", f"step {state.global_step}", remedy)


def stacks_pairs(collator: Any) -> bool:
    """Return whether a collator of TRL, LLaMA-Factory or ms-swift makes batches of pairs: all
    chosen rows, then all rejected rows in that order.
    """
    # ms-swift's collator is a partial of a method of its template. With padding_free, it packs all
    # rows into one.
    template: Any = getattr(getattr(collator, "func", None), "__self__", None)
    is_of_swift = getattr(template, "mode", "") == "rlhf" and not template.padding_free
    return is_of_swift or type(collator).__name__ in _COLLATORS


def by_pairs(adaptive: AdaptiveArguments) -> AdaptiveArguments:
    """Return arguments that split batches by pairs, unless `adaptive` has its own `split`."""
    if adaptive.split is not None:
        return adaptive
    return replace(
        adaptive,
        split=_split_pairs,
        row_length=adaptive.row_length or _longer_of_pair,
        num_labels=adaptive.num_labels or _num_pairs,
    )


def _num_pairs(batch: Mapping[str, Any]) -> int:
    return RowsOfBatch(batch).num_rows // 2


def _longer_of_pair(row: Mapping[str, Sequence[int]]) -> int:
    ids = "ids" if "chosen_ids" in row else "input_ids"
    longer = max(len(row[f"chosen_{ids}"]), len(row[f"rejected_{ids}"]))
    return len(row.get("prompt_ids", ())) + longer


def _split_pairs(batch: Mapping[str, Any]) -> SplitBatch:
    """Split a batch by pairs: its first half has the chosen rows, its second the rejected ones."""
    rows = RowsOfBatch(batch)
    num_pairs = rows.num_rows // 2

    def part(pairs: Sequence[int]) -> dict[str, Any]:
        chosen_and_rejected = rows.part([*pairs, *(num_pairs + pair for pair in pairs)])
        # Tensors with one entry per pair, such as the log-probabilities of the reference model.
        of_pairs = {
            key: value[list(pairs)]
            for key, value in batch.items()
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == num_pairs
        }
        return {**chosen_and_rejected, **of_pairs}

    lengths = rows.lengths
    if lengths is not None:
        # Both rows are padded to the longer one.
        pairs_of_lengths = zip(lengths[:num_pairs], lengths[num_pairs:], strict=True)
        lengths = [2 * max(pair) for pair in pairs_of_lengths]
    return SplitBatch(num_pairs, part, lengths)
