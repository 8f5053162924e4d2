"""How the steps of another library's trainer are run, and what fits of its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from adaptive_batch._util import check_options, count, instance_of, one_of, option
from adaptive_batch.data import DatasetAdapter
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import check_device_memory, is_out_of_memory
from adaptive_batch.schedules import RULES
from adaptive_batch.training import (
    AdaptiveStep,
    LongestRows,
    Part,
    SplitBatch,
    StepOptions,
    Terms,
    configured_size,
)

from .options import PlainArguments

log = logging.getLogger("adaptive_batch")

# Names of these arguments in errors; each trainer adds its function.
TERMS = Terms(
    num_labels="AdaptiveArguments(num_labels=...)",
    split=("give AdaptiveArguments(split=...), a function that returns SplitBatch(num_rows, part)"),
    share='give AdaptiveArguments(loss_reduction="mean") if a mean was taken for a sum',
    sum='give AdaptiveArguments(loss_reduction="sum")',
    totals="",
)
# That a search tries, as elsewhere by default.
_MOST_ROWS = 4096


def _one(batch: Any) -> int:
    return 1


def _function(key: str, value: object) -> None:
    if not callable(value):
        raise SettingError(key, value, "give a function")


@contextmanager
def naming_fix(fix: str) -> Iterator[None]:
    """Add a fix to the out-of-memory error of an evaluation that is not split."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(f"{error}; {fix}") from error


@dataclass(frozen=True)
class AdaptiveArguments(PlainArguments):
    """Arguments of a trainer whose steps run in parts that fit.

    Attributes:
        micro_batch_size: the most rows of a part: a number; ``auto`` for what a search finds as
            training begins; None for the whole batch, until memory runs out.
        micro_batch_tokens: the most tokens of a part, padding included: a number or ``auto``; not
            together with `micro_batch_size`.
        device_memory: memory that the search may use: a size such as ``"12GiB"``, a share such as
            0.9, or None for what is available.
        headroom: share of that which is left free, in [0, 1); ``auto`` for 5%.
        row_length: function that returns the tokens of a row of the training dataset, or a number
            where all are alike; None for those of its ``input_ids``.
        split: see :class:`adaptive_batch.AdaptiveStep`.
        num_labels: see :class:`adaptive_batch.AdaptiveStep`.
        options: how a step runs.
        batch_increase_function: ``f(epoch, batch_size) -> rows to add``, asked as an epoch begins,
            0 included; None for batches of a constant size. Of AdaptiveTrainer alone, as is
            `lr_scaling`.
        lr_scaling: how the rate of the trainer's scheduler follows the batch that grows: ``none``,
            ``linear`` or ``sqrt`` of its rows / `per_device_train_batch_size`.
        loss_reduction: ``mean`` weights the loss of a part by its share of the labels; ``sum`` adds
            losses up as they are; ``auto`` is what the trainer shows: ``sum`` of a loss that it
            divides by the labels of the whole step, and of Transformers' CTC models with
            ``ctc_loss_reduction="sum"``.

    Raises:
        SettingError: a value cannot be used.
    """

    row_length: Callable[[Any], int] | int | None = None
    split: Callable[[Any], SplitBatch] | None = None
    num_labels: Callable[[Any], Any] | None = None
    options: StepOptions = field(default_factory=StepOptions)
    batch_increase_function: Callable[[int, int], int] | None = option(None, _function)
    lr_scaling: str = option("none", one_of(*RULES))

    def __post_init__(self) -> None:
        check_options(self)
        configured_size(self.micro_batch_size, self.micro_batch_tokens)
        check_device_memory("device_memory", self.device_memory)
        instance_of(StepOptions, "options", self.options)
        if self.options.max_grad_norm is not None:
            remedy = "the trainer clips; set its own max_grad_norm or gradient_clip_val"
            raise SettingError("max_grad_norm", self.options.max_grad_norm, remedy)
        if self.lr_scaling != "none" and self.batch_increase_function is None:
            remedy = "batches do not grow; give batch_increase_function too"
            raise SettingError("lr_scaling", self.lr_scaling, remedy)

    def new_step(
        self, kind: type[AdaptiveStep], model: nn.Module, forward_backward: Callable[[Part], Any]
    ) -> AdaptiveStep:
        """Return what runs a step of a model.

        Args:
            kind: class of the step, with the terms of the trainer.
            model: model that is trained.
            forward_backward: function that runs a part.

        Raises:
            SettingError: a value cannot be used.
        """
        return kind(
            model,
            forward_backward,
            micro_batch_size=self.micro_batch_size,
            micro_batch_tokens=self.micro_batch_tokens,
            split=self.split,
            # Rows without labels may have a loss too, which a sum counts.
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
        """Find the most rows that fit, where a size is ``auto``: of what trains now, with its
        recomputation, precision and optimizer.

        Args:
            step: step whose parts are to fit.
            optimizer: optimizer of the model, without a scaler of gradients.
            loader: loader of the rows, with `dataset` and `collate_fn`.
            to_device: function that returns a batch on the device.
            batch_size: rows of a batch of this rank.
            accumulates: whether gradients of several batches are added up.

        Raises:
            DoesNotFitError: one row does not fit.
            SettingError: the loader has no rows by number, or their lengths are unknown.
        """
        # Of rows without lengths the sizer waits on, after a search too.
        if step.max_batch_size is not None or not step.sizer.waits_for_search:
            return
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset):
            raise self.not_searched("a stream, or several loaders, show no longest rows")
        rows = DatasetAdapter(dataset, self.row_length)
        maximum = min(_MOST_ROWS, len(rows))
        longest: LongestRows | None = LongestRows.of_dataset(rows)

        def sample(rows: LongestRows, num_rows: int) -> Any:
            return to_device(loader.collate_fn(rows.first(num_rows)))

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
            longest = longest.beside_longest
        log.info(
            "%s of the longest fit at once, found in %s",
            count(found.max_batch_size, "row"),
            count(len(found.trials), "trial"),
        )

    def not_searched(self, reason: str) -> SettingError:
        """Return the error of ``auto`` where nothing can be tried before training."""
        key = "micro_batch_size"
        if self.micro_batch_tokens is not None:
            key = "micro_batch_tokens"
        remedy = "give a number, or None, which splits once memory runs out"
        return SettingError(key, "auto", f"{reason}; {remedy}")
