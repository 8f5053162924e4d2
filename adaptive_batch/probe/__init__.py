"""The search for the maximum batch size: strategies, trials, results and their store."""

from .finder import ProbeResult, Store, run_search, try_again
from .search import BinarySearch, Halving, Predictive, Search, Trial
from .throughput import (
    OBJECTIVES,
    FastestSearch,
    Throughput,
    needs_times,
)
from .trial import DryRun, TrialStep

__all__ = [
    "OBJECTIVES",
    "BinarySearch",
    "DryRun",
    "FastestSearch",
    "Halving",
    "Predictive",
    "ProbeResult",
    "Search",
    "Store",
    "Throughput",
    "Trial",
    "TrialStep",
    "needs_times",
    "run_search",
    "try_again",
]
