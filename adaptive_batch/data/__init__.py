"""Lengths of rows, samplers by rows and by token budget, micro-batches, balance across ranks."""

from .adaptive_batches import AdaptiveBatches
from .balance import balance_by_rows, balance_by_tokens
from .batching import Batching, Sampling
from .dataset import (
    IGNORE_INDEX,
    DatasetAdapter,
    RowLength,
    check_loss,
    label_tokens,
    lengthened,
    move_to_device,
)
from .epoch_planner import EpochPlanner, plan_token_batches
from .layouts import (
    LAYOUT_KINDS,
    NO_LIMIT,
    UNIFORM,
    LayoutKind,
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    largest_divisor,
    micro_batches,
    split_by_rows,
)
from .lengths import count_rows, longest_rows, mean_rows, measure_rows
from .order import ORDERS, RowOrder, row_order
from .read_ahead import ReadAhead
from .requested_batch import Event, RequestedBatch
from .step_planner import PlannedRows, StepPlanner
from .step_queue import RowReader, StepQueue
from .step_rows import StepRows
from .token_sampler import LONG_ROWS, plan_batches

__all__ = [
    "IGNORE_INDEX",
    "LAYOUT_KINDS",
    "LONG_ROWS",
    "NO_LIMIT",
    "ORDERS",
    "UNIFORM",
    "AdaptiveBatches",
    "Batching",
    "DatasetAdapter",
    "EpochPlanner",
    "Event",
    "LayoutKind",
    "MicroBatch",
    "MicroBatchLayout",
    "MicroBatchLimit",
    "MicroBatchTime",
    "PlannedRows",
    "ReadAhead",
    "RequestedBatch",
    "RowLength",
    "RowOrder",
    "RowReader",
    "Sampling",
    "StepPlanner",
    "StepQueue",
    "StepRows",
    "balance_by_rows",
    "balance_by_tokens",
    "check_loss",
    "count_rows",
    "label_tokens",
    "largest_divisor",
    "lengthened",
    "longest_rows",
    "mean_rows",
    "measure_rows",
    "micro_batches",
    "move_to_device",
    "plan_batches",
    "plan_token_batches",
    "row_order",
    "split_by_rows",
]
