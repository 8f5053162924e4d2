"""The training loop: micro-batches, retry after running out of memory, evaluation, `AdaptiveLoop`."""

from .evaluation import Evaluator
from .full_batch_loss import FullBatchLoss
from .limits import MicroBatchLimits
from .loop import AdaptiveLoop, Sampling, StepOptions
from .max_batch_search import MaxBatchSearch, WorstRows
from .micro_batch_runner import MicroBatchRunner, StepResult, has_batch_norm
from .oom_retry import LimitChange, OOMPolicy, lengthened
from .step import agree_on_step, differences, same_answers

__all__ = [
    "AdaptiveLoop",
    "Evaluator",
    "FullBatchLoss",
    "LimitChange",
    "MaxBatchSearch",
    "MicroBatchLimits",
    "MicroBatchRunner",
    "OOMPolicy",
    "Sampling",
    "StepOptions",
    "StepResult",
    "WorstRows",
    "agree_on_step",
    "differences",
    "has_batch_norm",
    "lengthened",
    "same_answers",
]
