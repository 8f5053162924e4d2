"""The search for the maximum batch size: strategies, trials, the finder, its cache."""

from .curve_cache import CachedCurve
from .finder import (
    ProbeResult,
    TimeLimit,
    load_latest,
    load_result,
    run_search,
    save_result,
    try_again,
)
from .search import BinarySearch, Halving, Predictive, Search, Trial
from .throughput import (
    NEWER_FIELDS,
    OBJECTIVES,
    FastestSearch,
    Pieces,
    Throughput,
    needs_times,
)
from .trial import DryRun, TrialStep

__all__ = [
    "NEWER_FIELDS",
    "OBJECTIVES",
    "BinarySearch",
    "CachedCurve",
    "DryRun",
    "FastestSearch",
    "Halving",
    "Pieces",
    "Predictive",
    "ProbeResult",
    "Search",
    "Throughput",
    "TimeLimit",
    "Trial",
    "TrialStep",
    "load_latest",
    "load_result",
    "needs_times",
    "run_search",
    "save_result",
    "try_again",
]
