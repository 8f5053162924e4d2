"""The gradient noise scale over ranks has the samples of one device."""

from __future__ import annotations

import itertools

import pytest
from support.mean_estimation import TokenMeans
from support.processes import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit


def samples_of(kind: str, syncs_every_micro_batch: bool) -> list[list[float]]:
    """The numbers of the first samples."""
    # The first micro-batch of each rank: 8 rows over all.
    limit = MicroBatchLimit(8 // distributed.world_size())
    how = {"noise_scale": 12.0, "seed": 3, "syncs_every_micro_batch": syncs_every_micro_batch}
    problem = TokenMeans(limit, kind, **how)
    samples = [problem.sample(32) for _ in range(5)]
    return [[float(value) for value in vars(sample).values()] for sample in samples]


def everything() -> dict[tuple[str, bool], list[list[float]]]:
    cases = itertools.product(("padded", "packed"), (True, False))
    return {case: samples_of(*case) for case in cases}


def test_two_ranks_sample_the_noise_of_one_device():
    alone = everything()
    for found in run_on_ranks(everything, 2):
        for case, samples in found.items():
            for sample, expected in zip(samples, alone[case], strict=True):
                assert sample == pytest.approx(expected, rel=1e-6), case
