"""What a search tries: the step of training, on the worst rows that it may meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch._util import count
from adaptive_batch.data import DatasetAdapter, RowOrder
from adaptive_batch.memory import OptimizerInBackward

from .parts import BatchSource
from .splitters import counted_sample, length_in_sample
from .step import Step


@dataclass(frozen=True)
class WorstRows:
    """The rows of trials: the longest that training may meet.

    Attributes:
        first: function that returns that many of them, longest first, in the form that a trial
            takes.
        length: tokens of the longest; 0 where they are not known.
        name: name of a single one in errors.
        in_order: function that returns rows in the order in which training takes them: any number
            from any position on; None where there is no order.
    """

    first: Callable[[int], Any]
    length: int
    name: str
    in_order: Callable[[int, int], list[Any]] | None = None

    @classmethod
    def of_sample(
        cls, sample: Callable[[int], Any], split: Callable[[Any], BatchSource], device: torch.device
    ) -> WorstRows:
        """Return the rows of a function that makes a batch of that many, as each trial makes its
        own.

        Args:
            sample: the function.
            split: function that makes a batch ready to be split.
            device: device whose random numbers stay as they were.
        """
        length = length_in_sample(sample, split, device)
        name = f"one row of {count(length, 'token')}" if length else "one row"
        counted = counted_sample(sample, split)
        return cls(lambda size: partial(counted, size), length, name)

    @classmethod
    def of_dataset(cls, dataset: DatasetAdapter, order: RowOrder) -> WorstRows:
        """Return the longest rows of a dataset.

        Args:
            dataset: rows, and their lengths.
            order: numbers of the rows in the order of training.
        """
        (longest,) = dataset.longest(1)

        def in_order(begin: int, num_rows: int) -> list[Any]:
            places = torch.arange(begin, begin + num_rows) % len(order)
            return [dataset[row] for row in order[places].tolist()]

        return cls(dataset.longest, dataset.length(longest), dataset.describe(longest), in_order)


@dataclass(frozen=True)
class Evaluation:
    """A search for the most rows that can be run without gradients, in place of trained.

    Attributes:
        run: function that runs rows without gradients.
        trained: rows of training, one of which is stepped so that the optimizer's state is there.
        name: what it does with rows, in texts.
        kind: kind of micro-batch by which ranks know its collectives, see
            :meth:`Sharding.micro_batch`.
        in_training_mode: whether the model is in training mode, and not in evaluation mode.
        lost_key: key of the facts of a rank that is lost, under which they have the rows of the
            trial.
    """

    run: Callable[[Any], object]
    trained: WorstRows
    name: str = "evaluating rows"
    kind: bool | str = True
    in_training_mode: bool = False
    lost_key: str = "trial_rows_val"


@dataclass(frozen=True)
class TriedStep:
    """The step of training that trials run, through the code that training runs.

    Attributes:
        engine: runs its micro-batches.
        optimizer: optimizer of the model's parameters, or the optimizers in backward.
        try_rows: function that runs forward and backward of some rows at once, in the form of
            :class:`WorstRows`; ``is_last=False`` where gradients are not reduced.
        clip: function that clips the gradients before the optimizer's step.
        row_length: function that returns the tokens of a row.
        keep_gradients: function that leaves the unsharded gradients which are there between the
            micro-batches of a step; None where there are none.
        held: frozen modules that the step runs beside the model.
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
