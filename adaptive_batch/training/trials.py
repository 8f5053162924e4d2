"""Trials of a search: the step of training on the largest rows of a dataset or a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch._util import count
from adaptive_batch.data import RowOrder, largest_rows, longest_rows
from adaptive_batch.memory import OptimizerInBackward

from .parts import BatchSource
from .splitters import counted_sample, length_in_sample
from .step import Step


class MeasuredRows(Protocol):
    """Rows by number, measured as :class:`.DatasetAdapter` does."""

    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def other_bytes(self) -> torch.Tensor: ...

    def __getitem__(self, number: int) -> Any: ...


@dataclass(frozen=True)
class LongestRows:
    """Rows of trials: the largest ones that training can have.

    Attributes:
        first: ``first(size)`` returns `size` rows, the largest first, in the form that trials take.
        length: tokens of the longest row; 0 if unknown.
        name: name of a single row in errors.
        in_order: ``in_order(begin, size)`` returns rows in the order of training; None without an
            order.
        beside_longest: the same rows, padded to the row with most tokens, which comes first; None
            if the largest row has the most tokens.
    """

    first: Callable[[int], Any]
    length: int
    name: str
    in_order: Callable[[int, int], list[Any]] | None = None
    beside_longest: LongestRows | None = None

    @classmethod
    def of_sample(
        cls, sample: Callable[[int], Any], split: Callable[[Any], BatchSource], device: torch.device
    ) -> LongestRows:
        """Build the rows of a sample function; each trial makes its own batch.

        Args:
            sample: ``sample(size)`` makes a batch of `size` rows.
            split: function that makes a batch ready to be split.
            device: device whose random numbers are restored.
        """
        length = length_in_sample(sample, split, device)
        counted = counted_sample(sample, split)
        return cls(lambda size: partial(counted, size), length, _name(length))

    @classmethod
    def of_dataset(
        cls,
        rows: MeasuredRows,
        *,
        length: int | None = None,
        are_alike: bool = False,
        source: str = "",
        prepare: Callable[[Any], Any] = lambda row: row,
        order: Callable[[], RowOrder | torch.Tensor] | None = None,
    ) -> LongestRows:
        """Build the rows of a dataset; the largest row is that with the most bytes in its tensors.

        Args:
            rows: the dataset.
            length: tokens that `prepare` cuts or fills each row to; None if it keeps the length.
            are_alike: whether all rows have one length, which errors do not name.
            source: end of a row's name in errors.
            prepare: function that prepares a row for trials.
            order: function that returns the numbers of rows in the order of training; None if
                trials need no order.
        """
        lengths = rows.lengths
        numbers = largest_rows(lengths, rows.other_bytes)
        read: list[Any] = []

        def first(size: int) -> list[Any]:
            for place in range(len(read), size):
                read.append(prepare(rows[numbers[place % len(numbers)]]))
            return read[:size]

        def in_order(begin: int, size: int) -> list[Any]:
            assert order is not None
            in_turn = order()
            if not len(in_turn):
                return first(size)
            places = torch.arange(begin, begin + size) % len(in_turn)
            return [rows[number] for number in in_turn[places].tolist()]

        largest_length = int(lengths[numbers[0]]) if length is None else length
        name = "one row" if are_alike else _name(largest_length) + source
        made = cls(first, largest_length, name, None if order is None else in_order)
        (longest,) = longest_rows(lengths, 1)
        longest_length = int(lengths[longest])
        if length is not None or longest_length == largest_length:
            return made

        @cache
        def longest_row() -> Any:
            return prepare(rows[longest])

        beside = replace(
            made,
            first=lambda size: [longest_row(), *first(size - 1)],
            length=longest_length,
            name=_name(longest_length) + source,
        )
        return replace(made, beside_longest=beside)


def _name(length: int) -> str:
    return f"one row of {count(length, 'token')}" if length else "one row"


@dataclass(frozen=True)
class Evaluation:
    """Target of a search for the most rows that run without gradients.

    Attributes:
        run: function that runs rows without gradients.
        trained: rows of training; one is stepped, so that the optimizer has its state.
        name: phrase for logs, such as ``evaluating rows``.
        kind: kind of micro-batch, see :meth:`Sharding.micro_batch`.
        in_training_mode: whether the model stays in training mode.
        lost_key: key under which the facts of a lost rank have the rows of its trial.
    """

    run: Callable[[Any], object]
    trained: LongestRows
    name: str = "evaluating rows"
    kind: bool | str = True
    in_training_mode: bool = False
    lost_key: str = "trial_rows_val"


@dataclass(frozen=True)
class TriedStep:
    """Step of training that trials run, by the same code as training.

    Attributes:
        engine: runs its micro-batches.
        optimizer: optimizer of the model's parameters, or the optimizers in backward.
        try_rows: function that runs forward and backward of rows of :class:`LongestRows` at once;
            ``is_last=False`` does not reduce gradients.
        clip: function that clips the gradients before the optimizer's step.
        row_length: function that returns the tokens of a row.
        keep_gradients: function that leaves the unsharded gradients of mid-step; None without any.
        held: frozen modules that the step runs besides the model.
    """

    engine: Step
    optimizer: Optimizer | OptimizerInBackward
    try_rows: Callable[..., None]
    clip: Callable[[], object] = lambda: None
    row_length: Callable[[Any], int] = lambda row: 1
    keep_gradients: Callable[[Any], object] | None = None
    held: Sequence[nn.Module] = ()

    def step(self) -> None:
        """Clip the gradients, and step the optimizer."""
        self.clip()
        assert isinstance(self.optimizer, Optimizer)
        self.optimizer.step()
