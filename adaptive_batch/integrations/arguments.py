"""Arguments of the trainer integrations, and the search for the largest micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from adaptive_batch._util import check_options, count, instance_of, one_of, option
from adaptive_batch.data import DatasetAdapter
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import RULES
from adaptive_batch.training import (
    AdaptiveStep,
    LongestRows,
    MicroBatchSizer,
    Part,
    ProbeOptions,
    SplitBatch,
    StepOptions,
    Terms,
)

log = logging.getLogger("adaptive_batch")

# Names of these arguments in errors; each trainer adds its function.
TERMS = Terms(
    num_labels="AdaptiveArguments(num_labels=...)",
    split=("give AdaptiveArguments(split=...), a function that returns SplitBatch(num_rows, part)"),
    share='give AdaptiveArguments(loss_reduction="mean") if a mean was taken for a sum',
    sum='give AdaptiveArguments(loss_reduction="sum")',
    totals="",
)
# Most rows that a search tries, as in the other searches.
_MOST_ROWS = 4096


def _one(batch: Any) -> int:
    return 1


@dataclass(frozen=True)
class AdaptiveArguments:
    """Arguments of a trainer that runs each step in micro-batches.

    Attributes:
        micro_batch_size: maximum number of rows in a micro-batch. ``auto`` searches for the largest
            number when training begins. None splits a batch only after it runs out of memory.
        micro_batch_tokens: maximum number of tokens in a micro-batch, including padding; or
            ``auto``. Cannot be combined with `micro_batch_size`.
        device_memory: memory that the search may use: a size such as ``"12GiB"``, or a fraction
            such as 0.9. None: all available memory.
        headroom: fraction of `device_memory` that stays free, in [0, 1); ``auto`` for 5%.
        loss_reduction: ``mean`` weights the loss of a micro-batch by its share of the labels;
            ``sum`` adds the losses unweighted; ``auto`` chooses ``sum`` for losses of TRL's
            GRPOTrainer that are divided by the tokens of the step, and for a Transformers CTC
            model with ``ctc_loss_reduction="sum"``.
        row_length: function that returns the number of tokens in a row of the training dataset, or
            a number if all rows have the same length. None: the length of ``input_ids``.
        split: see :class:`adaptive_batch.AdaptiveStep`.
        num_labels: see :class:`adaptive_batch.AdaptiveStep`.
        options: options of :class:`adaptive_batch.AdaptiveStep`.
        batch_increase_function: ``f(epoch, batch_size) -> rows to add``, called at the start of
            each epoch, including epoch 0. None: a constant batch size. AdaptiveTrainer only.
        lr_scaling: factor that scales the learning rate of the trainer's scheduler as the batch
            grows: ``none``, ``linear`` or ``sqrt`` in rows / `per_device_train_batch_size`.
            AdaptiveTrainer only.

    Raises:
        SettingError: a value is invalid.
    """

    micro_batch_size: int | str | None = None
    micro_batch_tokens: int | str | None = None
    device_memory: int | float | str | None = None
    headroom: float | str = "auto"
    loss_reduction: str = option("auto", one_of("auto", "mean", "sum"))
    row_length: Callable[[Any], int] | int | None = None
    split: Callable[[Any], SplitBatch] | None = None
    num_labels: Callable[[Any], Any] | None = None
    options: StepOptions = field(default_factory=StepOptions)
    batch_increase_function: Callable[[int, int], int] | None = None
    lr_scaling: str = option("none", one_of(*RULES))

    def __post_init__(self) -> None:
        check_options(self)
        MicroBatchSizer(
            micro_batch_size=self.micro_batch_size, micro_batch_tokens=self.micro_batch_tokens
        )
        ProbeOptions(self.device_memory, self.headroom)
        instance_of(StepOptions, "options", self.options).check_of_step()
        if self.lr_scaling != "none" and self.batch_increase_function is None:
            remedy = "batches do not grow; give batch_increase_function too"
            raise SettingError("lr_scaling", self.lr_scaling, remedy)

    @property
    def may_split(self) -> bool:
        """True if a batch may run as several micro-batches."""
        sizes = (self.micro_batch_size, self.micro_batch_tokens)
        return sizes != (None, None) or self.options.on_out_of_memory != "raise"

    def new_step(
        self, kind: type[AdaptiveStep], model: nn.Module, forward_backward: Callable[[Part], Any]
    ) -> AdaptiveStep:
        """Create the step of a model.

        Args:
            kind: class of the step; its `terms` name the trainer's arguments.
            model: model to train.
            forward_backward: function that runs a micro-batch.

        Raises:
            SettingError: a value is invalid.
        """
        return kind(
            model,
            forward_backward,
            micro_batch_size=self.micro_batch_size,
            micro_batch_tokens=self.micro_batch_tokens,
            split=self.split,
            # A sum includes the loss of rows without labels.
            num_labels=self.num_labels or (_one if self.loss_reduction == "sum" else None),
            options=self.options,
        )

    def find_bound(
        self,
        step: AdaptiveStep,
        optimizer: Optimizer,
        loader: Any,
        *,
        to_device: Callable[[Any], Any],
        batch_size: int,
        accumulates: bool,
    ) -> None:
        """Find the largest micro-batch that fits.

        The trials run the model's own precision, recomputation and optimizer.

        Args:
            step: step to limit.
            optimizer: optimizer of the model, without a gradient scaler.
            loader: loader with `dataset` and `collate_fn`.
            to_device: function that moves a batch to the device.
            batch_size: rows of a batch of this rank.
            accumulates: whether the trainer accumulates gradients of several batches.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: the dataset is a stream, or the row lengths are unknown.
        """
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset):
            raise self.not_searched("the search needs one map-style training dataset")
        rows = DatasetAdapter(dataset, self.row_length)
        maximum = min(_MOST_ROWS, len(rows))
        longest: LongestRows | None = LongestRows.of_dataset(rows)

        def sample(rows: LongestRows, num_rows: int) -> Any:
            return to_device(loader.collate_fn(rows.first(num_rows)))

        # If the rows with most bytes, such as images, are not those with most tokens, search a
        # second time with these rows padded to the longest.
        while longest is not None:
            found = step.find_bound(
                optimizer,
                partial(sample, longest),
                device_memory=self.device_memory,
                headroom=self.headroom,
                maximum=maximum,
                batch_size=min(len(rows), batch_size),
                accumulates=accumulates,
            )
            maximum = found.max_batch_size
            longest = longest.padded_to_longest
        log.info(
            "micro-batch limit: %s of the longest rows fit, found in %s",
            count(found.max_batch_size, "row"),
            count(len(found.trials), "trial"),
        )

    def not_searched(self, reason: str) -> SettingError:
        """Return the error for ``auto`` if no trial can run before training."""
        key = "micro_batch_size" if self.micro_batch_tokens is None else "micro_batch_tokens"
        remedy = "give a number, or None to split only after an out-of-memory error"
        return SettingError(key, "auto", f"{reason}; {remedy}")
