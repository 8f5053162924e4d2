"""The training loop: micro-batches, retry after running out of memory, evaluation, `AdaptiveLoop`."""

from .evaluation import Evaluator
from .full_batch_loss import FullBatchLoss
from .limits import MicroBatchLimits
from .loop import AdaptiveLoop, Sampling, StepOptions
from .max_batch_search import MaxBatchSearch
from .micro_batch_runner import MicroBatchRunner, RowLoss, StepResult, count_shifted_labels
from .model_checks import has_batch_norm
from .nonfinite import ON_NONFINITE_LOSS, NonfiniteSteps, norm_to_clip
from .oom_retry import LimitChange, OOMPolicy, OOMRetry, lengthened
from .packing import pack_rows, rows_apart, why_not_packed
from .step import agree_on_step, differences, same_answers
from .step_rate import StepRate
from .throughput_search import Choices, WorstRows

__all__ = [
    "ON_NONFINITE_LOSS",
    "AdaptiveLoop",
    "Choices",
    "Evaluator",
    "FullBatchLoss",
    "LimitChange",
    "MaxBatchSearch",
    "MicroBatchLimits",
    "MicroBatchRunner",
    "NonfiniteSteps",
    "OOMPolicy",
    "OOMRetry",
    "RowLoss",
    "Sampling",
    "StepOptions",
    "StepRate",
    "StepResult",
    "WorstRows",
    "agree_on_step",
    "count_shifted_labels",
    "differences",
    "has_batch_norm",
    "lengthened",
    "norm_to_clip",
    "pack_rows",
    "rows_apart",
    "same_answers",
    "why_not_packed",
]
