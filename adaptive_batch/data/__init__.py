"""Lengths of rows, samplers by rows and by token budget, micro-batches, balance across ranks."""

from .balance import deal_by_rows, deal_by_tokens
from .bin_packing import LONG_ROWS
from .dataset import IGNORE_INDEX, AnyRows, RowLength, checked_loss, label_tokens, moved
from .lengths import longest_rows, row_lengths
from .micro_batches import (
    UNIFORM,
    Capacity,
    MicroBatch,
    Shapes,
    largest_divisor,
    micro_batches,
    split_by_rows,
    split_by_tokens,
)
from .order import ORDERS
from .steps import HandedOut, StepRows
from .stream import RowStream
from .token_sampler import TokenBatches, batches_by_tokens, plan_batches
from .varying_budget import plan_batches_by_rule

__all__ = [
    "IGNORE_INDEX",
    "LONG_ROWS",
    "ORDERS",
    "UNIFORM",
    "AnyRows",
    "Capacity",
    "HandedOut",
    "MicroBatch",
    "RowLength",
    "RowStream",
    "Shapes",
    "StepRows",
    "TokenBatches",
    "batches_by_tokens",
    "checked_loss",
    "deal_by_rows",
    "deal_by_tokens",
    "label_tokens",
    "largest_divisor",
    "longest_rows",
    "micro_batches",
    "moved",
    "plan_batches",
    "plan_batches_by_rule",
    "row_lengths",
    "split_by_rows",
    "split_by_tokens",
]
