"""The training loop: micro-batches, retry after running out of memory, evaluation, `AdaptiveLoop`."""

from .accumulation import Accumulator, StepResult, has_batch_norm
from .evaluation import Evaluator
from .full_batch_loss import FullBatchLoss
from .loop import AdaptiveLoop
from .replay import CapacityChange, lengthened

__all__ = [
    "Accumulator",
    "AdaptiveLoop",
    "CapacityChange",
    "Evaluator",
    "FullBatchLoss",
    "StepResult",
    "has_batch_norm",
    "lengthened",
]
