"""Every row of a step on one rank, in as few micro-batches as can be, and ranks that wait little
for each other.
"""

from itertools import count, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.data import (
    MicroBatchLayout,
    MicroBatchLimit,
    balance_by_rows,
    balance_by_tokens,
    micro_batches,
)

UNIFORM = st.sampled_from([None, "rows", "lengths", "both"])
UNITS = st.sampled_from(["rows", "tokens"])
CAPACITIES = st.builds(MicroBatchLimit, st.integers(1, 200), UNITS)
ROUNDING = {"pad_to_multiple_of": st.integers(1, 8), "longest": st.none() | st.integers(1, 40)}
SHAPES = st.builds(MicroBatchLayout, uniform=UNIFORM, **ROUNDING)
LENGTHS = st.lists(st.integers(1, 30), max_size=60)
FEW_LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)
RANKS = st.integers(1, 9)


def pieces_of_ranks(lengths, dealt, capacity, shapes=None):
    return [micro_batches([lengths[row] for row in rows], capacity, shapes) for rows in dealt]


def shapes_of(pieces):
    return [(len(piece.rows), piece.length) for piece in pieces]


def most_pieces(lengths, dealt, capacity, shapes=None):
    return max(map(len, pieces_of_ranks(lengths, dealt, capacity, shapes)))


def largest_total(lengths, dealt, capacity, shapes=None):
    pieces = pieces_of_ranks(lengths, dealt, capacity, shapes)
    return max(sum(piece.run_tokens for piece in of_rank) for of_rank in pieces)


def all_dealings(num_rows, ranks):
    for rank_of_row in product(range(ranks), repeat=num_rows):
        yield [
            [row for row in range(num_rows) if rank_of_row[row] == rank] for rank in range(ranks)
        ]


# in turn


@given(st.integers(0, 60), RANKS)
def test_in_turn_rows_are_those_of_torchs_distributed_sampler(num_rows, ranks):
    whole = num_rows - num_rows % ranks
    dealt = balance_by_rows(num_rows, ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(num_rows))
    for rank, rows in enumerate(dealt):
        sampler = torch.utils.data.DistributedSampler(range(whole), ranks, rank, shuffle=False)
        assert list(rows)[: whole // ranks] == list(sampler)
        assert len(rows) - whole // ranks in (0, 1)


# by tokens


KINDS = st.builds(MicroBatchLayout, kind=st.sampled_from(["grouped", "packed"]))


@given(LENGTHS | st.lists(st.just(0), max_size=20), RANKS, CAPACITIES, SHAPES | KINDS)
def test_every_row_is_dealt_once_in_order_and_none_goes_without_while_there_are_rows(
    lengths, ranks, capacity, shapes
):
    dealt = balance_by_tokens(lengths, ranks, capacity, shapes)
    for same in (tuple(lengths), torch.tensor(lengths, dtype=torch.int32)):
        assert balance_by_tokens(same, ranks, capacity, shapes) == dealt
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in dealt)
    assert len(dealt) == ranks
    assert sum(map(bool, dealt)) == min(ranks, len(lengths))
    most_apart = max(map(len, dealt)) - min(map(len, dealt))
    if shapes.uniform in ("rows", "both"):
        assert most_apart <= (len(lengths) % ranks != 0)
    if shapes.kind == "grouped" or (shapes.kind == "packed" and capacity.unit == "rows"):
        assert most_apart <= 1


@given(
    LENGTHS,
    RANKS,
    CAPACITIES,
    st.builds(MicroBatchLayout, uniform=st.sampled_from([None, "lengths"]), **ROUNDING),
)
def test_no_rank_has_more_micro_batches_than_its_share_of_the_whole_steps(
    lengths, ranks, capacity, shapes
):
    dealt = balance_by_tokens(lengths, ranks, capacity, shapes)
    alone = len(micro_batches(lengths, capacity, shapes))
    assert most_pieces(lengths, dealt, capacity, shapes) <= -(-alone // ranks)


@given(
    FEW_LENGTHS, st.integers(2, 3), st.integers(1, 72), UNITS, st.sampled_from([None, "lengths"])
)
def test_no_dealing_has_fewer_micro_batches_nor_where_they_are_one_a_smaller_largest_one(
    lengths, ranks, amount, unit, uniform
):
    capacity, shapes = MicroBatchLimit(amount, unit), MicroBatchLayout(uniform)
    dealt = balance_by_tokens(lengths, ranks, capacity, shapes)
    others = [*all_dealings(len(lengths), ranks)]
    numbers = [most_pieces(lengths, other, capacity, shapes) for other in others]
    fewest = min(numbers)
    if uniform is None:
        assert most_pieces(lengths, dealt, capacity) == fewest
    if amount >= 12 and (fewest == 1 or uniform):
        fewest = most_pieces(lengths, dealt, capacity, shapes)
        assert largest_total(lengths, dealt, capacity, shapes) == min(
            largest_total(lengths, other, capacity, shapes)
            for other, number in zip(others, numbers, strict=True)
            if number <= fewest
        )


def test_few_rows_are_dealt_as_by_hand():
    # By rows, several micro-batches keep the order of the step.
    for shapes in (None, MicroBatchLayout("rows")):
        dealt = balance_by_tokens([5, 1, 4, 2, 3, 6, 9, 7], 2, MicroBatchLimit(2), shapes)
        assert dealt == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # Where equal rows are asked for, the longest are one on each rank.
    lengths = [9, 2, 8, 3, 7, 4, 5, 6]
    dealt = balance_by_tokens(lengths, 2, MicroBatchLimit(18, "tokens"), MicroBatchLayout("rows"))
    assert [[lengths[row] for row in rows] for rows in dealt] == [[9, 3, 7, 5], [2, 8, 4, 6]]
    # The groups of a wave are neighbours.
    lengths, capacity = [2, 40, 3, 38, 2, 41, 3, 39, 2, 3, 2, 3], MicroBatchLimit(82, "tokens")
    dealt = balance_by_tokens(lengths, 2, capacity)
    assert dealt == [[1, 2, 5, 6, 9, 11], [0, 3, 4, 7, 8, 10]]
    pieces = pieces_of_ranks(lengths, dealt, capacity)
    assert list(map(shapes_of, pieces)) == [[(2, 41), (4, 3)], [(2, 39), (4, 2)]]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), RANKS)
def test_groups_that_may_have_any_number_of_rows_are_as_small_as_neighbours_can_be(lengths, ranks):
    def groups_of(max_tokens):
        left, groups = sorted(lengths, reverse=True), 0
        while left:
            left, groups = left[max_tokens // left[0] :], groups + 1
        return groups

    least = next(tokens for tokens in count(max(lengths)) if groups_of(tokens) <= ranks)
    capacity = MicroBatchLimit(len(lengths))
    assert largest_total(lengths, balance_by_tokens(lengths, ranks, capacity), capacity) == least


@given(st.integers(1, 30), st.integers(1, 12), RANKS, CAPACITIES, SHAPES)
def test_rows_of_equal_length_that_come_out_even_give_every_rank_the_same(
    length, rows, ranks, capacity, shapes
):
    lengths = [length] * (rows * ranks)
    pieces = pieces_of_ranks(
        lengths, balance_by_tokens(lengths, ranks, capacity, shapes), capacity, shapes
    )
    assert all(shapes_of(of_rank) == shapes_of(pieces[0]) for of_rank in pieces)


# grouped and packed rows


@given(LENGTHS, RANKS, st.integers(1, 200))
def test_no_rank_of_packed_rows_has_more_tokens_than_another_by_more_than_a_row(
    lengths, ranks, tokens
):
    dealt = balance_by_tokens(
        lengths, ranks, MicroBatchLimit(tokens, "tokens"), MicroBatchLayout(kind="packed")
    )
    loads = [sum(lengths[row] for row in rows) for rows in dealt]
    assert len(lengths) <= ranks or max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("kind", "limit", "most", "most_at_the_mean"),
    [
        ("packed", MicroBatchLimit(16384, "tokens"), 0.02, 0.01),
        ("packed", MicroBatchLimit(4096, "tokens"), 0.03, 0.01),
        ("grouped", MicroBatchLimit(16384, "tokens"), 0.2, 0.05),
        ("packed", MicroBatchLimit(64), 0.25, 0.06),
    ],
    ids=str,
)
def test_the_slowest_rank_of_grouped_or_packed_rows_takes_little_more_than_the_mean(
    ranks, kind, limit, most, most_at_the_mean
):
    generator, slower = torch.Generator().manual_seed(ranks), []
    layout = MicroBatchLayout(kind=kind)
    for rows in sorted((32, 64, 128) * 10):
        drawn = torch.empty(rows * ranks).log_normal_(5.5, 0.8, generator=generator)
        lengths = drawn.long().clamp(8, 4096).tolist()
        dealt = balance_by_tokens(lengths, ranks, limit, layout)
        pieces = pieces_of_ranks(lengths, dealt, limit, layout)
        time = layout.time
        times = torch.tensor(
            [sum(time.fixed + time.token * piece.run_tokens for piece in each) for each in pieces]
        )
        slower.append(float(times.max() / times.mean()) - 1)
    assert max(slower) <= most
    assert sum(slower) / len(slower) <= most_at_the_mean
