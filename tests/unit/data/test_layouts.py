"""Each row of a step is in one micro-batch. Micro-batches are few, and ranks have equal work."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import LENGTHS, LIMITS, SHAPES

from adaptive_batch.data import (
    MicroBatchLayout,
    MicroBatchLimit,
    MicroBatchTime,
    balance_by_rows,
    balance_by_tokens,
    micro_batches,
    split_by_rows,
)


@given(rows=st.lists(st.integers()), micro_batch_size=st.integers(1, 50))
def test_split_by_rows_keeps_order_in_the_fewest_pieces_of_nearly_equal_size(
    rows, micro_batch_size
):
    pieces = split_by_rows(rows, micro_batch_size)
    assert [row for piece in pieces for row in piece] == rows
    sizes = [len(piece) for piece in pieces]
    assert len(sizes) == -(-len(rows) // micro_batch_size)
    assert all(1 <= size <= micro_batch_size for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def run_tokens(groups, lengths):
    return sum(len(group) * max(lengths[row] for row in group) for group in groups)


def partitions(rows):
    """Yield all partitions of rows into groups."""
    if not rows:
        yield []
        return
    first, *rest = rows
    for groups in partitions(rest):
        yield [[first], *groups]
        for index, group in enumerate(groups):
            yield [*groups[:index], [first, *group], *groups[index + 1 :]]


def number_and_cost(sizes, max_tokens):
    """Return the number of groups, and a cost of their tokens and squared tokens."""
    return len(sizes), sum(tokens * (max_tokens + tokens) for tokens in sizes)


def best_of_all(lengths, max_tokens):
    """Return the fewest groups and their least cost; a row above `max_tokens` is alone."""
    return min(
        number_and_cost([run_tokens([group], lengths) for group in groups], max_tokens)
        for groups in partitions(list(range(len(lengths))))
        if all(len(group) == 1 or run_tokens([group], lengths) <= max_tokens for group in groups)
    )


@given(LENGTHS, LIMITS, SHAPES)
def test_each_row_is_in_one_micro_batch_of_its_shape_within_the_limit(lengths, capacity, shapes):
    pieces = micro_batches(lengths, capacity, shapes)
    assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(lengths)))
    rows, padded = {len(piece.rows) for piece in pieces}, {piece.length for piece in pieces}
    assert len(rows) == 1 or shapes.uniform not in ("rows", "both")
    assert len(padded) == 1 or shapes.uniform not in ("lengths", "both")
    for piece in pieces:
        num_rows = len(piece.rows)
        held = num_rows if capacity.unit == "rows" else num_rows * piece.length
        assert num_rows == 1 or held <= capacity.amount
        assert piece.rows == sorted(piece.rows)
        assert piece.length >= max(lengths[row] for row in piece.rows)
        whole = piece.length % shapes.pad_to_multiple_of == 0
        assert whole or (shapes.longest is not None and piece.length >= shapes.longest)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(1, 60), st.integers(1, 4))
def test_the_grouping_by_tokens_is_optimal(lengths, tokens, multiple):
    shapes = MicroBatchLayout(pad_to_multiple_of=multiple)
    pieces = micro_batches(lengths, MicroBatchLimit(tokens, "tokens"), shapes)
    padded = [shapes.padded(length) for length in lengths]
    sizes = [len(piece.rows) * piece.length for piece in pieces]
    assert number_and_cost(sizes, tokens) == best_of_all(padded, tokens)
    assert tokens < max(padded) or sizes == sorted(sizes, reverse=True)


FACTORS = st.floats(0, 10, allow_subnormal=False)
TIMES = st.builds(MicroBatchTime, fixed=st.floats(0, 100), token=FACTORS)
PACKED = MicroBatchLayout(kind="packed")


@given(LENGTHS, LIMITS, st.sampled_from(["grouped", "packed"]), TIMES)
def test_each_row_is_grouped_or_packed_once_within_the_limit(lengths, limit, kind, time):
    layout = MicroBatchLayout(kind=kind, time=time)
    pieces = micro_batches(lengths, limit, layout)
    assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(lengths)))
    for piece in pieces:
        num_rows = len(piece.rows)
        assert piece.rows == sorted(piece.rows)
        held = num_rows if limit.unit == "rows" else piece.run_tokens
        assert num_rows == 1 or held <= limit.amount
        own = [lengths[row] for row in piece.rows]
        assert list(piece.lengths) == (own if kind == "packed" else [max(own)] * len(own))
        assert piece.run_tokens == sum(piece.lengths)
        assert piece.run_tokens <= num_rows * piece.length < piece.run_tokens + num_rows
    assert pieces == micro_batches(tuple(lengths), limit, layout)
    if limit.unit == "tokens" and limit.amount >= max(lengths):
        # Unless row order is kept, larger micro-batches come first.
        sizes = [piece.run_tokens for piece in pieces]
        assert sizes == sorted(sizes, reverse=True)


@given(LENGTHS, LIMITS)
def test_the_fullest_packed_micro_batch_has_several_rows_if_one_has(lengths, limit):
    pieces = micro_batches(lengths, limit, PACKED)
    fullest = limit.fullest(pieces)
    several = [piece for piece in pieces if len(piece.rows) > 1]
    if limit.unit == "rows":
        assert len(fullest.rows) == max(len(piece.rows) for piece in pieces)
    else:
        assert fullest.run_tokens == max(piece.run_tokens for piece in several or pieces)


MANY_LENGTHS = st.lists(st.integers(1, 30), max_size=60)
RANKS = st.integers(1, 9)


def pieces_of_ranks(lengths, dealt, capacity, shapes=None):
    return [micro_batches([lengths[row] for row in rows], capacity, shapes) for rows in dealt]


@given(st.integers(0, 60), RANKS)
def test_balance_by_rows_equals_torchs_distributed_sampler(num_rows, ranks):
    whole = num_rows - num_rows % ranks
    dealt = balance_by_rows(num_rows, ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(num_rows))
    for rank, rows in enumerate(dealt):
        sampler = torch.utils.data.DistributedSampler(range(whole), ranks, rank, shuffle=False)
        assert list(rows)[: whole // ranks] == list(sampler)
        assert len(rows) - whole // ranks in (0, 1)


GROUPED_OR_PACKED = st.builds(MicroBatchLayout, kind=st.sampled_from(["grouped", "packed"]))


@given(MANY_LENGTHS | st.lists(st.just(0), max_size=20), RANKS, LIMITS, SHAPES | GROUPED_OR_PACKED)
def test_each_row_is_on_one_rank_in_order_and_each_rank_has_rows_if_possible(
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
    MANY_LENGTHS,
    RANKS,
    LIMITS,
    SHAPES.filter(lambda shapes: shapes.uniform in (None, "lengths")),
)
def test_no_rank_has_more_micro_batches_than_its_share(lengths, ranks, capacity, shapes):
    dealt = balance_by_tokens(lengths, ranks, capacity, shapes)
    alone = len(micro_batches(lengths, capacity, shapes))
    most = max(map(len, pieces_of_ranks(lengths, dealt, capacity, shapes)))
    assert most <= -(-alone // ranks)


def test_a_few_rows_are_divided_as_expected():
    # With a limit in rows, ranks take rows in turn.
    for shapes in (None, MicroBatchLayout("rows")):
        dealt = balance_by_tokens([5, 1, 4, 2, 3, 6, 9, 7], 2, MicroBatchLimit(2), shapes)
        assert dealt == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # With uniform rows, ranks have rows of similar lengths.
    lengths = [9, 2, 8, 3, 7, 4, 5, 6]
    dealt = balance_by_tokens(lengths, 2, MicroBatchLimit(18, "tokens"), MicroBatchLayout("rows"))
    assert [[lengths[row] for row in rows] for rows in dealt] == [[9, 2, 5, 6], [8, 3, 7, 4]]
    # Simultaneous groups have similar lengths.
    lengths, capacity = [2, 40, 3, 38, 2, 41, 3, 39, 2, 3, 2, 3], MicroBatchLimit(82, "tokens")
    dealt = balance_by_tokens(lengths, 2, capacity)
    assert dealt == [[1, 2, 5, 6, 9, 11], [0, 3, 4, 7, 8, 10]]
    pieces = pieces_of_ranks(lengths, dealt, capacity)
    shapes = [[(len(piece.rows), piece.length) for piece in of_rank] for of_rank in pieces]
    assert shapes == [[(2, 41), (4, 3)], [(2, 39), (4, 2)]]


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
def test_the_slowest_rank_of_grouped_or_packed_rows_is_close_to_the_mean(
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
