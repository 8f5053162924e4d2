"""The training loop: micro-batches, retry after running out of memory, evaluation, `AdaptiveLoop`."""

from .accumulation import MicroBatchRunner, StepResult, has_batch_norm
from .evaluation import Evaluator
from .finder import MaxBatchSearch, WorstRows
from .full_batch_loss import FullBatchLoss
from .loop import AdaptiveLoop
from .replay import LimitChange, lengthened

__all__ = [
    "AdaptiveLoop",
    "Evaluator",
    "FullBatchLoss",
    "LimitChange",
    "MaxBatchSearch",
    "MicroBatchRunner",
    "StepResult",
    "WorstRows",
    "has_batch_norm",
    "lengthened",
]
