"""Lengths of rows, samplers by rows and by token budget, micro-batches, balance across ranks."""

from .adaptive_batches import AdaptiveBatches
from .batches import Batches
from .dataset import (
    IGNORE_INDEX,
    DatasetAdapter,
    ReadAhead,
    RowLength,
    check_loss,
    lengthened,
    move_to_device,
)
from .layouts import (
    LAYOUT_KINDS,
    NO_LIMIT,
    UNIFORM,
    MicroBatch,
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    balance_by_rows,
    balance_by_tokens,
    micro_batches,
    split_by_rows,
)
from .lengths import (
    count_other_bytes,
    count_rows,
    largest_rows,
    longest_rows,
    mean_rows,
    measure_rows,
)
from .planned_epoch import PlannedEpoch, RowLengths, StepAhead
from .sampling import ORDERS, Batching, Sampling, row_order

__all__ = [
    "IGNORE_INDEX",
    "LAYOUT_KINDS",
    "NO_LIMIT",
    "ORDERS",
    "UNIFORM",
    "AdaptiveBatches",
    "Batches",
    "Batching",
    "DatasetAdapter",
    "MicroBatch",
    "MicroBatchLayout",
    "MicroBatchLimit",
    "MicroBatchTime",
    "PlannedEpoch",
    "ReadAhead",
    "RowLength",
    "RowLengths",
    "Sampling",
    "StepAhead",
    "balance_by_rows",
    "balance_by_tokens",
    "check_loss",
    "count_other_bytes",
    "count_rows",
    "largest_rows",
    "lengthened",
    "longest_rows",
    "mean_rows",
    "measure_rows",
    "micro_batches",
    "move_to_device",
    "row_order",
    "split_by_rows",
]
