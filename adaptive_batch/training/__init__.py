"""The training loop: micro-batches, retries after running out of memory, evaluation."""

from .adaptive_step import AdaptiveStep
from .bound_search import (
    LongestRows,
    ProbeOptions,
    SearchScope,
    TriedStep,
    find_limit,
    find_max_batch_size,
)
from .evaluation_parts import EvaluationParts
from .loop import AdaptiveLoop
from .model_checks import has_batch_norm
from .options import StepOptions, Terms
from .packing import isolated_rows, pack_rows, why_not_packed
from .parts import Part, RowsOfBatch, SplitBatch
from .rate import AdaptiveRate
from .recipe_step import (
    REFERENCE_VALUES,
    RecipeStep,
    RowLoss,
    RowReference,
    count_shifted_labels,
)
from .sizing import LimitChange, MicroBatchSizer, OOMPolicy
from .step import RankReport, differences, raise_if_answers_differ
from .step_result import (
    ON_NONFINITE_LOSS,
    PLACE_OF_STEP,
    FullBatchLoss,
    NonfiniteSteps,
    StepResult,
    norm_to_clip,
)

__all__ = [
    "ON_NONFINITE_LOSS",
    "PLACE_OF_STEP",
    "REFERENCE_VALUES",
    "AdaptiveLoop",
    "AdaptiveRate",
    "AdaptiveStep",
    "EvaluationParts",
    "FullBatchLoss",
    "LimitChange",
    "LongestRows",
    "MicroBatchSizer",
    "NonfiniteSteps",
    "OOMPolicy",
    "Part",
    "ProbeOptions",
    "RankReport",
    "RecipeStep",
    "RowLoss",
    "RowReference",
    "RowsOfBatch",
    "SearchScope",
    "SplitBatch",
    "StepOptions",
    "StepResult",
    "Terms",
    "TriedStep",
    "count_shifted_labels",
    "differences",
    "find_limit",
    "find_max_batch_size",
    "has_batch_norm",
    "isolated_rows",
    "norm_to_clip",
    "pack_rows",
    "raise_if_answers_differ",
    "why_not_packed",
]
