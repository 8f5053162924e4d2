"""The gradient noise scale over ranks: their samples are those of one device, whichever rank has
which rows.
"""

from __future__ import annotations

import itertools

import pytest
from support.mean_estimation import TokenMeans
from support.ranks import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.schedules import NoiseScale

TRUE, STEPS = 12.0, 300


def samples_of(
    kind: str, syncs_every_micro_batch: bool, steps: int
) -> tuple[list[list[float]], float | None]:
    """The numbers of the first samples, and the value after some steps."""
    problem = TokenMeans(noise_scale=TRUE, seed=3)
    # The first micro-batch of each rank: 8 rows over all.
    limit = MicroBatchLimit(8 // distributed.world_size())
    sampler = problem.sampler(limit, kind, syncs_every_micro_batch=syncs_every_micro_batch)
    scale, numbers = NoiseScale(decay=0.998), []
    for _ in range(steps):
        sample = sampler(problem.rows(32))
        numbers.append([float(value) for value in vars(sample).values()])
        scale.update(sample)
    return numbers[:5], scale.value


def everything() -> dict[tuple[str, bool], list[list[float]]]:
    cases = itertools.product(("padded", "packed"), (True, False))
    return {case: samples_of(*case, steps=5)[0] for case in cases}


def test_two_ranks_sample_what_one_device_does():
    alone = everything()
    for found in run_on_ranks(everything, 2):
        for case, samples in found.items():
            for sample, expected in zip(samples, alone[case], strict=True):
                assert sample == pytest.approx(expected, rel=1e-6), case


@pytest.mark.slow
def test_two_ranks_are_within_a_tenth_of_the_closed_form():
    first, second = run_on_ranks(samples_of, 2, "packed", False, STEPS)
    assert first == second
    assert first[1] == pytest.approx(TRUE, rel=0.1)
