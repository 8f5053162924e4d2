import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.data import ORDERS, row_order

row_lengths = st.lists(st.integers(1, 2048), max_size=60).map(
    lambda values: torch.tensor(values, dtype=torch.int64)
)
windows = st.none() | st.integers(1, 70)
seeds = st.integers(0, 2**63)


@given(row_lengths, st.sampled_from(ORDERS), windows, seeds, st.integers(0, 10**6))
def test_each_row_comes_once_in_an_order_that_ignores_the_random_state(
    lengths, order, window, seed, epoch
):
    arguments = {"order": order, "lengths": lengths, "window": window, "seed": seed, "epoch": epoch}
    state = torch.get_rng_state()
    rows = row_order(len(lengths), **arguments)
    assert torch.get_rng_state().equal(state)
    assert rows.dtype == torch.int64
    assert rows.sort().values.tolist() == list(range(len(lengths)))
    torch.rand(3)
    assert rows.equal(row_order(len(lengths), **arguments))
    if order == "seqlen" and window is None:
        assert (lengths[rows].diff() >= 0).all()


@given(lengths=row_lengths, window=st.integers(1, 70), seed=seeds, epoch=st.integers(0, 10))
def test_each_window_of_shuffled_rows_is_sorted_by_length(lengths, window, seed, epoch):
    rows = row_order(
        len(lengths), order="seqlen", lengths=lengths, window=window, seed=seed, epoch=epoch
    )
    shuffled = row_order(len(lengths), order="random", seed=seed, epoch=epoch)
    for ours, drawn in zip(rows.split(window), shuffled.split(window), strict=True):
        assert (lengths[ours].diff() >= 0).all()
        assert set(ours.tolist()) == set(drawn.tolist())


LENGTHS = torch.arange(200) % 20 + 1


@pytest.mark.parametrize(("order", "window"), [("random", None), ("seqlen", None), ("seqlen", 50)])
def test_each_epoch_and_each_seed_has_another_order(order, window):
    arguments = {"order": order, "lengths": LENGTHS, "window": window}
    orders = [
        row_order(200, **arguments, seed=seed, epoch=epoch).tolist()
        for seed in range(5)
        for epoch in range(5)
    ]
    assert len(set(map(tuple, orders))) == 25
