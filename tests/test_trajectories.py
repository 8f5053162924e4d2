"""A disturbed run trains the same as an undisturbed one, with each driver and each disturbance.

benchmarks/kills.py kills runs at random moments; benchmarks/resume_across_ranks.py has more numbers
of ranks.
"""

import pytest
from support.trajectories import same_trajectory

CASES = ("constant", "growth", "schedule")
PROGRAMS = [
    (driver, case, disturbance)
    for driver in ("script", "loop", "Trainer")
    for case in CASES
    for disturbance in ("kill", "OOM", "split")
    # Transformers' Trainer takes no schedule of the batch.
    if (driver, case) != ("Trainer", "schedule")
]
RECIPES = [
    (driver, case, disturbance)
    for driver in ("tune run", "two ranks")
    for case in CASES
    for disturbance in ("kill", "OOM", "split", "other ranks")
    # With growth, the probe would find the small limit before training.
    if case == "constant" or disturbance in ("kill", "other ranks")
]
EVERY_TIME = [
    ("script", "growth", "OOM"),
    ("script", "schedule", "kill"),
    ("loop", "growth", "kill"),
    ("loop", "schedule", "OOM"),
    ("loop", "growth", "split"),
    ("Trainer", "growth", "kill"),
    ("Trainer", "growth", "OOM"),
    ("tune run", "growth", "kill"),
    ("tune run", "constant", "OOM"),
    ("tune run", "constant", "split"),
    ("two ranks", "growth", "kill"),
]


@pytest.mark.parametrize(
    ("driver", "case", "disturbance"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] * (one not in EVERY_TIME), id=", ".join(one))
        for one in (*PROGRAMS, *RECIPES)
    ],
)
def test_a_disturbed_run_trains_as_an_undisturbed_one(tmp_path, driver, case, disturbance):
    assert same_trajectory(driver, case, disturbance, tmp_path) == []
