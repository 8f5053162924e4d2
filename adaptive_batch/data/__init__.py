"""Lengths of rows, samplers by rows and by token budget, micro-batches, balance across ranks."""

from .balance import balance_by_rows, balance_by_tokens
from .bin_packing import LONG_ROWS
from .dataset import IGNORE_INDEX, DatasetAdapter, RowLength, checked_loss, label_tokens, moved
from .lengths import longest_rows, row_lengths
from .micro_batches import (
    UNIFORM,
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    largest_divisor,
    micro_batches,
    split_by_rows,
    split_by_tokens,
)
from .order import ORDERS
from .steps import Batching, StepPlanner, plan_token_batches
from .stream import RowSampler
from .token_sampler import TokenBatchPlan, batches_by_tokens, plan_batches
from .varying_budget import plan_batches_by_rule

__all__ = [
    "IGNORE_INDEX",
    "LONG_ROWS",
    "ORDERS",
    "UNIFORM",
    "Batching",
    "DatasetAdapter",
    "MicroBatch",
    "MicroBatchLayout",
    "MicroBatchLimit",
    "RowLength",
    "RowSampler",
    "StepPlanner",
    "TokenBatchPlan",
    "balance_by_rows",
    "balance_by_tokens",
    "batches_by_tokens",
    "checked_loss",
    "label_tokens",
    "largest_divisor",
    "longest_rows",
    "micro_batches",
    "moved",
    "plan_batches",
    "plan_batches_by_rule",
    "plan_token_batches",
    "row_lengths",
    "split_by_rows",
    "split_by_tokens",
]
