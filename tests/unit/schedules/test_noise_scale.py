"""The gradient noise scale: unbiased estimates, and agreement with closed forms."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.mean_estimation import TokenMeans
from support.processes import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.schedules import NoiseSample, NoiseScale, squared_norm

ROWS = st.integers(-9, 9).map(float)


def squared_norm_of_mean(rows):
    return sum((sum(column) / len(rows)) ** 2 for column in zip(*rows, strict=True))


@given(
    population=st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=4),
    sizes=st.sampled_from([(1, 2), (1, 3), (2, 3), (1, 4), (3, 4)]),
)
@examples(60)
def test_both_estimates_are_unbiased_over_all_possible_steps(population, sizes):
    """The small batch is part of the big one."""
    small, big = sizes
    drawn = list(itertools.product(population, repeat=big))
    found = [
        NoiseSample(
            small, squared_norm_of_mean(rows[:small]), big, squared_norm_of_mean(rows)
        ).estimates()
        for rows in drawn
    ]
    mean_row = squared_norm_of_mean(population)
    variance = sum(x * x + y * y for x, y in population) / len(population) - mean_row
    noises, squared_gradients = zip(*found, strict=True)
    assert sum(squared_gradients) / len(drawn) == pytest.approx(mean_row, abs=1e-9)
    assert sum(noises) / len(drawn) == pytest.approx(variance, abs=1e-9)


def test_estimates_weigh_label_tokens():
    """Two rows of 4 label tokens and four of 1: the small batch has twice the mean per row."""
    assert NoiseSample(2, 10.0, 6, 6.0, 4 / 2).estimates() == (
        pytest.approx((2 * 10 - 6) / (1 / 2 - 1 / 6)),
        pytest.approx((6 * 6 - 2 * 2**2 * 10) / (6 - 2)),
    )


def test_the_squared_norm_sums_gradients_of_all_dtypes():
    types = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16)
    gradients = [
        torch.randn(7, 5, generator=torch.Generator().manual_seed(n)).to(t)
        for n, t in enumerate(types)
    ]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    found = squared_norm(gradients)
    assert (found.dtype, float(found)) == (torch.float32, pytest.approx(exact, rel=1e-6))
    doubles = [gradient.double() for gradient in gradients]
    assert float(squared_norm(doubles)) == pytest.approx(exact, rel=1e-14)


def sample(squared_gradient, noise, *, small=2, big=8):
    """Return a sample with the given estimates."""
    return NoiseSample(small, squared_gradient + noise / small, big, squared_gradient + noise / big)


def test_noise_and_gradient_are_averaged_before_the_division():
    scale = NoiseScale(decay=0.5, min_samples=1)
    scale.update(sample(1.0, 6.0))
    assert scale.value == pytest.approx(6)
    scale.update(sample(4.0, 3.0))  # weights 1/3 and 2/3
    assert scale.value == pytest.approx((6 + 2 * 3) / (1 + 2 * 4))


def test_the_value_needs_enough_samples_and_a_positive_gradient_estimate():
    scale = NoiseScale(decay=0.5, min_samples=3)
    assert scale.value is None
    for _ in range(2):
        scale.update(sample(1.0, 6.0))
    assert scale.value is None
    scale.update(sample(1.0, 6.0))
    assert scale.value == pytest.approx(6)
    scale.update(sample(-1.5, 6.0))
    assert scale.value is None
    scale.update(sample(1.0, 6.0))
    assert scale.value is not None
    assert scale.value > 6


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_with_a_nonfinite_norm_is_skipped(norm):
    scale = NoiseScale(min_samples=1)
    scale.update(sample(1.0, 6.0))
    before = scale.state_dict()
    scale.update(NoiseSample(2, norm, 8, 1.0))
    scale.update(NoiseSample(2, 1.0, 8, norm))
    assert scale.state_dict() == before


def test_each_step_is_sampled_until_the_first_value_then_every_fifth():
    scale, resumed = (NoiseScale(min_samples=3) for _ in range(2))
    assert all(scale.is_due(step) for step in range(9))
    for _ in range(3):
        scale.update(sample(1.0, 6.0))
    resumed.load_state_dict(scale.state_dict())
    for one in (scale, resumed):
        assert [step for step in range(9) if one.is_due(step)] == [0, 5]


NORMS = st.floats(0, 1e6)


@given(
    norms=st.lists(st.tuples(NORMS, NORMS), max_size=20),
    cut=st.integers(0, 20),
    decay=st.floats(0, 0.999),
)
def test_a_resumed_scale_is_bit_identical(norms, cut, decay):
    whole, first, second = (NoiseScale(decay=decay, min_samples=2) for _ in range(3))
    for small, big in norms:
        whole.update(NoiseSample(2, small, 8, big))
    for small, big in norms[:cut]:
        first.update(NoiseSample(2, torch.tensor(small, dtype=torch.float64), 8, big))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for small, big in norms[cut:]:
        second.update(NoiseSample(2, small, 8, big))
    assert second.state_dict() == whole.state_dict()
    assert second.value == whole.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize("true", [16.0, pytest.param(4.0, marks=pytest.mark.nightly)])
def test_rows_of_unequal_length_give_the_closed_form_within_a_tenth(true, kind):
    problem = TokenMeans(MicroBatchLimit(8), kind, noise_scale=true, seed=1)
    scale = NoiseScale(decay=0.998)
    for _ in range(400):
        scale.update(problem.sample(32))
    assert scale.value == pytest.approx(true, rel=0.1)


def samples_of(kind: str, syncs_every_micro_batch: bool) -> list[list[float]]:
    """Return the figures of the first samples."""
    # The first micro-batch of each rank: 8 rows over all.
    limit = MicroBatchLimit(8 // distributed.world_size())
    options = {"noise_scale": 12.0, "seed": 3, "syncs_every_micro_batch": syncs_every_micro_batch}
    problem = TokenMeans(limit, kind, **options)
    samples = [problem.sample(32) for _ in range(5)]
    return [[float(value) for value in vars(sample).values()] for sample in samples]


def samples_of_all_cases() -> dict[tuple[str, bool], list[list[float]]]:
    cases = itertools.product(("padded", "packed"), (True, False))
    return {case: samples_of(*case) for case in cases}


def test_two_ranks_sample_the_noise_of_one_device():
    alone = samples_of_all_cases()
    for found in run_on_ranks(samples_of_all_cases, 2):
        for case, samples in found.items():
            for sample, expected in zip(samples, alone[case], strict=True):
                assert sample == pytest.approx(expected, rel=1e-6), case
