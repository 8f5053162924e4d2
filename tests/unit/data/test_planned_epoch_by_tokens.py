import itertools
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.data import ORDERS, row_order
from adaptive_batch.data.planned_epoch import fill_steps
from adaptive_batch.errors import SettingError

NOT_FITTING = "shortest rows have"


def lognormal(num_rows):
    """Lengths of mean 385 tokens, 8 to 2048, of which 16 random rows waste 72.3% as padding."""
    normal = torch.randn(num_rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (5.53 + 0.97 * normal).exp().clamp(8, 2048).round().to(torch.int64)


def fill(lengths, max_tokens, *, order=None, **arguments):
    """Fill steps of one budget."""
    order = torch.arange(len(lengths)) if order is None else order
    return fill_steps(lengths, max_tokens, order=order, **arguments)


def batches_of(plan):
    return [rows.tolist() for rows in plan.split()]


@st.composite
def plans(draw, **fixed):
    """Lengths, arguments and what they are planned to; cases where min_rows does not fit at all are
    left out.
    """
    most = draw(st.sampled_from([5, 20, 100]))
    lengths = draw(st.lists(st.integers(1, most), max_size=120))
    min_rows = draw(st.integers(1, 6))
    arguments = {
        "min_rows": min_rows,
        "max_rows": draw(st.none() | st.integers(min_rows, min_rows + 40)),
        "long_rows": draw(st.sampled_from(["drop", "alone"])),
        "divisible": draw(st.booleans()),
        **fixed,
    }
    if arguments["min_rows"] > 1:
        arguments["long_rows"] = "drop"
    max_tokens = draw(st.integers(most // 2 + 8, 40 * most))
    order = row_order(
        len(lengths),
        order=draw(st.sampled_from(ORDERS)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        window=draw(st.none() | st.integers(1, 50)),
        seed=draw(st.integers(0, 5)),
    )
    arguments["order"] = order
    try:
        plan = fill(lengths, max_tokens, **arguments)
    except SettingError as error:
        if NOT_FITTING not in str(error):
            raise
        fixed_min = {**arguments, "min_rows": 1}
        return lengths, max_tokens, fixed_min, fill(lengths, max_tokens, **fixed_min)
    return lengths, max_tokens, arguments, plan


# Invariants of every plan.


@given(plans())
def test_each_row_is_in_one_batch_within_the_limits_in_order_or_is_dropped(case):
    lengths, max_tokens, arguments, plan = case
    too_long = [row for row, tokens in enumerate(lengths) if tokens > max_tokens]
    dropped = plan.dropped.tolist()
    assert sorted(dropped) == (too_long if arguments["long_rows"] == "drop" else [])
    assert sorted([*plan.rows.tolist(), *dropped]) == list(range(len(lengths)))
    in_order = [row for row in arguments["order"].tolist() if row not in set(dropped)]
    assert plan.rows.tolist() == in_order
    sizes = plan.sizes.tolist()
    assert all(size >= arguments["min_rows"] for size in sizes[:-1])
    assert all(1 <= size <= (arguments["max_rows"] or math.inf) for size in sizes)
    for batch in batches_of(plan):
        is_alone = len(batch) == 1 and arguments["long_rows"] == "alone"
        is_least = len(batch) <= arguments["min_rows"] > 1
        assert sum(lengths[row] for row in batch) <= max_tokens or is_alone or is_least


@given(plans(divisible=True))
def test_divisible_batches_are_multiples_of_an_eighth_to_a_sixteenth_but_the_last(case):
    _, _, arguments, plan = case
    for size in plan.sizes.tolist()[:-1]:
        part = max(1, 2 ** (math.floor(math.log2(size)) - 3))
        assert size % part == 0 or size - size % part < arguments["min_rows"]


@given(plans(divisible=False))
def test_a_batch_is_closed_only_when_the_next_row_would_take_it_beyond_a_limit(case):
    lengths, max_tokens, arguments, plan = case
    for batch, following in itertools.pairwise(batches_of(plan)):
        tokens = [lengths[row] for row in [*batch, following[0]]]
        assert sum(tokens) > max_tokens or len(tokens) > (arguments["max_rows"] or math.inf)


FACTS = [
    ([100, 100, 100, 10, 10, 10, 10, 100], 120, {"min_rows": 2}, [[0, 1], [2, 3, 4], [5, 6, 7]]),
    ([4, 5, 6, 7], 11, {"order": torch.tensor([3, 1])}, [[3], [1]]),
    ([], 10, {"min_rows": 2}, []),
]


@pytest.mark.parametrize(("lengths", "max_tokens", "arguments", "batches"), FACTS)
def test_a_few_rows_are_planned_as_by_hand(lengths, max_tokens, arguments, batches):
    assert batches_of(fill(lengths, max_tokens, **arguments)) == batches


# What cannot be planned.


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"max_tokens": 5}, "batch_tokens=5: "),
        ({"min_rows": 2}, "min_rows_per_batch=2: "),
        ({"lengths": [3, 0]}, "lengths=0: row 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_key_and_its_value(arguments, key):
    arguments = {"lengths": [5, 6, 7], "max_tokens": 10, **arguments}
    with pytest.raises(SettingError, match=f"^{key}"):
        fill(arguments.pop("lengths"), arguments.pop("max_tokens"), **arguments)


# Time, memory and padding.


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_planning_takes_time_and_memory_in_proportion_to_the_rows():
    program = textwrap.dedent("""
        import time, torch
        from pathlib import Path
        from adaptive_batch.data import row_order
        from adaptive_batch.data.planned_epoch import fill_steps

        def peak_kibibytes():  # not ru_maxrss, which starts at what the parent had
            return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

        def planned(num_rows):
            lengths = torch.randint(8, 2049, (num_rows,))
            start, before = time.perf_counter(), peak_kibibytes()
            order = row_order(num_rows, order="seqlen", lengths=lengths, window=4096)
            fill_steps(lengths, 16_384, order=order)
            return time.perf_counter() - start, peak_kibibytes() - before

        planned(1000)
        (few, _), (many, kibibytes) = planned(200_000), planned(2_000_000)
        print(few, many, kibibytes * 1024 / 2_000_000)
        """)
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300
    )
    few, many, bytes_per_row = map(float, ran.stdout.split())
    # Ten times the rows: twenty leaves room for a busy machine, and a quadratic plan takes a
    # hundred times.
    assert many < 20 * max(few, 0.05)
    assert 8 <= bytes_per_row <= 100


def test_padding_is_what_sorting_by_length_is_known_to_leave():
    lengths = lognormal(20_000)

    def wasted(order):
        batches = batches_of(fill(lengths, 10**9, order=order, max_rows=16))
        padded = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
        return 1 - int(lengths.sum()) / padded

    assert wasted(None) == pytest.approx(0.723, abs=0.005)
    assert wasted(row_order(20_000, order="seqlen", lengths=lengths)[:]) <= 0.006
    assert wasted(row_order(20_000, order="seqlen", lengths=lengths, window=4096)[:]) <= 0.05
