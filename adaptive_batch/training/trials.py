"""What a search tries: the step of training, on the worst rows that it may meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from adaptive_batch.distributed import Sharding
from adaptive_batch.memory import DeviceMemory, OptimizerInBackward

from .sizing import MicroBatchSizer


@dataclass(frozen=True)
class WorstRows:
    """The rows of trials: the longest that training may meet.

    Attributes:
        first: function that returns that many of them, longest first, in the form that a trial takes.
        length: tokens of the longest.
        name: name of a single one in errors.
        in_order: function that returns rows in the order in which training takes them: any number from any position on;
            None where there is no order.
    """

    first: Callable[[int], Any]
    length: int
    name: str
    in_order: Callable[[int, int], list[Any]] | None = None


@dataclass(frozen=True)
class Evaluation:
    """A search for the most rows that can be evaluated, in place of trained.

    Attributes:
        run: function that evaluates rows without gradients.
        trained: rows of training, one of which is stepped so that the optimizer's state is there.
    """

    run: Callable[[Any], object]
    trained: WorstRows


class TriedStep(Protocol):
    """The step of training that trials run, through the code that training runs."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Optimizer | OptimizerInBackward: ...
    @property
    def memory(self) -> DeviceMemory: ...
    @property
    def sharding(self) -> Sharding: ...
    @property
    def sizer(self) -> MicroBatchSizer: ...
    @property
    def remedies(self) -> str: ...

    @property
    def keeps_gradients(self) -> bool:
        """Whether unsharded gradients are there between the micro-batches of a step."""

    def try_rows(self, rows: Any, *, is_last: bool = True) -> None:
        """Run forward and backward of some rows at once."""

    def step(self) -> None:
        """Clip the gradients as configured, and step the optimizer."""

    def keep_gradients(self, rows: Any) -> object:
        """Leave the unsharded gradients that are there in mid-step."""

    def row_length(self, row: Any) -> int:
        """Return the tokens of a row."""
