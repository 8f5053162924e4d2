"""Search strategies: invariants for any results, and the number of trials on typical curves."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from adaptive_batch.memory import Trace
from adaptive_batch.probe import BinarySearch, Halving, Predictive, Search, Trial

BUDGET = 16 * 1024**3
FIXED_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)

Peak = Callable[[int], float]


def run(search: Search, answer: Callable[[int], Trial], *, at_most: int = 400) -> list[Trial]:
    """Run a search to its end."""
    trials: list[Trial] = []
    while (rows := search.candidate) is not None:
        assert len(trials) < at_most, "the search does not end"
        trials.append(answer(rows))
        search.record(trials[-1])
    return trials


def ideal(peak: Peak, *, noise: float = 0.0, seed: int = 0) -> Callable[[int], Trial]:
    """A device whose reported peaks have relative `noise`; sizes fit by their true peaks."""
    source = random.Random(seed)

    def answer(rows: int) -> Trial:
        fits = peak(rows) <= BUDGET
        return Trial(
            rows, fits, round(peak(rows) * (1 + source.uniform(-noise, noise))) if fits else None
        )

    return answer


def power(true_maximum: int, fixed: float, exponent: float) -> Peak:
    """``fixed + c * rows ** exponent``, which reaches the budget half a row above the maximum."""
    slope = (1 - fixed) * BUDGET / (true_maximum + 0.5) ** exponent
    return lambda rows: fixed * BUDGET + slope * rows**exponent


def out_of_memory(trials: list[Trial]) -> int:
    return sum(not trial.fits for trial in trials)


searches = st.one_of(
    st.integers(1, 5000).map(lambda start: (Halving(start=start), start)),
    st.integers(1, 5000).map(lambda maximum: (BinarySearch(maximum=maximum), maximum)),
    st.builds(
        lambda maximum, resident: (
            Predictive(budget_bytes=1000, maximum=maximum, resident_bytes=resident),
            maximum,
        ),
        st.integers(1, 5000),
        st.integers(0, 1100),
    ),
)


BLOCK = 20 * 1024**2  # segment of an accelerator's allocator


def in_blocks(peak: Peak, *, held_share: float | None = None) -> Callable[[int], Trial]:
    """A device whose allocator reserves blocks; at an OOM it holds a share of the budget."""
    held_bytes = None if held_share is None else int(held_share * BUDGET)

    def answer(rows: int) -> Trial:
        if peak(rows) <= BUDGET:
            return Trial(rows, True, ceil(peak(rows) / BLOCK) * BLOCK)
        return Trial(rows, False, held_bytes=held_bytes)

    return answer


def of_blocks(fixed: float) -> Predictive:
    resident = int(fixed * BUDGET)
    options = {"resident_bytes": resident, "granularity_bytes": BLOCK}
    return Predictive(budget_bytes=BUDGET, maximum=4096, **options)


@given(st.integers(1, 4000), st.sampled_from(FIXED_SHARES))
@examples(100)
def test_an_allocator_that_reserves_blocks_needs_more_trials_but_loses_no_rows(
    true_maximum: int, fixed: float
) -> None:
    search = of_blocks(fixed)
    trials = run(search, in_blocks(power(true_maximum, fixed, 1)), at_most=15)
    assert out_of_memory(trials) <= 1
    assert true_maximum >= search.best >= min(true_maximum - 1, 0.95 * true_maximum)


@pytest.mark.parametrize("held_share", [0.5, 0.9])
def test_an_oom_below_the_budget_of_a_device_that_reserves_blocks_is_ignored(
    held_share: float,
) -> None:
    def peak(rows: int) -> float:
        jump = 0.4 * BUDGET if rows > 500 else 0
        return power(700, 0.1, 1)(rows) + jump

    without, search = of_blocks(0.1), of_blocks(0.1)
    expected = run(without, in_blocks(peak))
    trials = run(search, in_blocks(peak, held_share=held_share))
    sizes = [trial.batch_size for trial in trials]
    assert not all(trial.fits for trial in trials)
    assert sizes == [trial.batch_size for trial in expected]


@given(searches, st.data())
def test_any_search_ends_and_tries_each_size_once_within_its_range(
    search_and_maximum: tuple[Search, int], data: st.DataObject
) -> None:
    search, maximum = search_and_maximum
    peaks = st.none() | st.integers(0, 2000)

    trials = run(
        search,
        lambda rows: Trial(rows, data.draw(st.booleans()), data.draw(peaks), data.draw(peaks)),
    )

    sizes = [trial.batch_size for trial in trials]
    assert len(set(sizes)) == len(sizes)
    assert all(1 <= size <= maximum for size in sizes)
    assert search.best == max((trial.batch_size for trial in trials if trial.fits), default=0)


@given(st.integers(1, 100_000), st.data())
def test_binary_search_finds_the_true_maximum_in_log2_trials(
    maximum: int, data: st.DataObject
) -> None:
    true_maximum = data.draw(st.integers(0, maximum))
    search = BinarySearch(maximum=maximum)

    trials = run(search, lambda rows: Trial(rows, rows <= true_maximum))

    assert search.best == true_maximum
    assert len(trials) <= ceil(log2(maximum + 1))


@given(st.integers(1, 5000), st.data())
def test_predictive_without_peaks_doubles_and_bisects_to_the_last_percent(
    maximum: int, data: st.DataObject
) -> None:
    true_maximum = data.draw(st.integers(0, maximum))
    search = Predictive(budget_bytes=BUDGET, maximum=maximum)

    trials = run(search, lambda rows: Trial(rows, rows <= true_maximum))

    assert true_maximum / 1.012 - 1 <= search.best <= true_maximum
    assert true_maximum >= 80 or search.best == true_maximum
    assert len(trials) <= 2 * log2(maximum) + 2


@pytest.mark.parametrize("true_maximum", [37, 700, 3000])
@pytest.mark.parametrize("exponent", [0.9, 1, 1.1, 1.3])
@pytest.mark.parametrize("fixed", FIXED_SHARES)
def test_a_power_curve_takes_eight_trials_and_one_oom_and_a_line_five_and_none(
    true_maximum: int, exponent: float, fixed: float
) -> None:
    search = Predictive(budget_bytes=BUDGET, maximum=100_000 if true_maximum == 3000 else 4096)
    trials = run(search, ideal(power(true_maximum, fixed, exponent)))
    assert search.best == true_maximum
    assert len(trials) <= (5 if exponent == 1 else 8)
    assert out_of_memory(trials) <= (exponent != 1)


@pytest.mark.parametrize("exponent", [0.9, 1.0, 1.1, 1.3])
@pytest.mark.parametrize("fixed", FIXED_SHARES)
def test_a_large_maximum_is_approximated_with_one_percent_of_noise(
    exponent: float, fixed: float
) -> None:
    for seed in range(30):
        search = Predictive(budget_bytes=BUDGET, maximum=100_000)
        trials = run(search, ideal(power(3000, fixed, exponent), noise=0.01, seed=seed))
        assert 3000 / 1.02 <= search.best <= 3000
        assert len(trials) <= 13
        assert out_of_memory(trials) <= 4


@st.composite
def maxima_of_lines(draw: st.DrawFn) -> tuple[int, Peak]:
    """Resident bytes, and a maximum of lines that start at or above them."""
    resident = draw(st.integers(0, BUDGET // 2))
    free = BUDGET - resident
    lines = [
        (resident + draw(st.floats(0, 0.9)) * free, free / draw(st.floats(1, 3000)))
        for _ in range(draw(st.integers(1, 5)))
    ]
    return resident, lambda rows: max(start + slope * rows for start, slope in lines)


@examples(300)
@given(maxima_of_lines())
def test_any_maximum_of_lines_is_found_to_a_percent(curve: tuple[int, Peak]) -> None:
    resident, peak = curve
    search = Predictive(budget_bytes=BUDGET, maximum=4096, resident_bytes=resident)

    trials = run(search, ideal(peak))

    true_maximum = max((rows for rows in range(1, 3002) if peak(rows) <= BUDGET), default=0)
    if out_of_memory(trials) == 0 or true_maximum < 80:
        assert search.best == true_maximum
    assert true_maximum / 1.012 - 1 <= search.best <= true_maximum


lines = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=12)


def traced(rows: int, program: list[tuple[int, int]], budget: int) -> Trial:
    alive = [fixed + slope * rows for fixed, slope in program]
    fits = max(alive) <= budget
    return Trial(
        rows,
        fits,
        max(alive) if fits else None,
        trace=Trace(hash(tuple(program)), alive) if fits else None,
    )


@pytest.mark.slow
@given(program=lines, room=st.floats(1, 60))
@examples(300)
def test_two_traces_determine_the_maximum(program, room):
    budget = max(1, int(max(fixed + slope for fixed, slope in program) * room))
    search = Predictive(budget_bytes=budget, maximum=4096)
    trials = run(search, lambda rows: traced(rows, program, budget))
    true = max((rows for rows in range(1, 4097) if traced(rows, program, budget).fits), default=0)
    assert search.best == true
    assert len(trials) <= 4
    assert [trial.batch_size for trial in trials if not trial.fits] in ([], [2])


def on_smaller_device(rows: int, room: int, *, shows_held: bool = True) -> Trial:
    """A trial of forty operations of 250 bytes per row, on a device with `room` bytes."""
    alive = [1000 + 250 * rows * number for number in range(1, 41)]
    if max(alive) <= room:
        return Trial(rows, True, max(alive), trace=Trace(1, alive))
    held = max((live for live in alive if live <= room), default=1000)
    return Trial(rows, False, held_bytes=held if shows_held else 1000)


@pytest.mark.parametrize("true_maximum", [1, 2, 3, 37, 128, 129, 700, 3000])
@pytest.mark.parametrize(
    ("shows_held", "most_trials", "most_ooms"), [(True, 11, 4), (False, 18, 8)]
)
def test_a_device_with_less_than_its_budget_is_approached_from_below(
    true_maximum: int, shows_held: bool, most_trials: int, most_ooms: int
) -> None:
    room = 1000 + 10_000 * true_maximum + 5000
    search = Predictive(budget_bytes=10**12, maximum=4096, resident_bytes=1000)
    trials = run(search, lambda rows: on_smaller_device(rows, room, shows_held=shows_held))
    assert true_maximum >= search.best >= true_maximum / 1.013
    assert len(trials) <= most_trials
    assert out_of_memory(trials) <= most_ooms
