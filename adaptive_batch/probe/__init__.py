"""The search for the maximum batch size: strategies, trials, results and their store."""

from .finder import ProbeResult, Store, Throughput, TimedTrial, run_search, try_again
from .search import BinarySearch, Halving, Predictive, Search, Trial
from .trial import DryRun, TrialStep

__all__ = [
    "BinarySearch",
    "DryRun",
    "Halving",
    "Predictive",
    "ProbeResult",
    "Search",
    "Store",
    "Throughput",
    "TimedTrial",
    "Trial",
    "TrialStep",
    "run_search",
    "try_again",
]
