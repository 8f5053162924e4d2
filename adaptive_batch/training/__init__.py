"""The training loop: micro-batches, retry after running out of memory, evaluation, `AdaptiveLoop`."""

from .agreement import Question, differences, same_answers
from .evaluation import Evaluator
from .full_batch_loss import FullBatchLoss
from .loop import AdaptiveLoop, Sampling, StepOptions
from .max_batch_search import MaxBatchSearch
from .micro_batch_runner import MicroBatchRunner, RowLoss, StepResult, count_shifted_labels
from .model_checks import has_batch_norm
from .nonfinite import ON_NONFINITE_LOSS, NonfiniteSteps, norm_to_clip
from .oom_retry import OOMRetry
from .packing import pack_rows, rows_apart, why_not_packed
from .sizing import LimitChange, MicroBatchSizer, OOMPolicy
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
    "MicroBatchRunner",
    "MicroBatchSizer",
    "NonfiniteSteps",
    "OOMPolicy",
    "OOMRetry",
    "Question",
    "RowLoss",
    "Sampling",
    "StepOptions",
    "StepRate",
    "StepResult",
    "WorstRows",
    "count_shifted_labels",
    "differences",
    "has_batch_norm",
    "norm_to_clip",
    "pack_rows",
    "rows_apart",
    "same_answers",
    "why_not_packed",
]
