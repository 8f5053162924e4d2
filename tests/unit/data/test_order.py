import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.data import ORDERS
from adaptive_batch.data.order import row_order
from adaptive_batch.errors import SettingError

row_lengths = st.lists(st.integers(1, 2048), max_size=60).map(lambda values: torch.tensor(values, dtype=torch.int64))
windows = st.none() | st.integers(1, 70)
seeds = st.integers(0, 2**63)


@given(lengths=row_lengths, order=st.sampled_from(ORDERS), window=windows, seed=seeds, epoch=st.integers(0, 10**6))
def test_every_row_comes_once(lengths, order, window, seed, epoch):
    rows = row_order(len(lengths), order=order, lengths=lengths, window=window, seed=seed, epoch=epoch)
    assert rows.dtype == torch.int64
    assert rows.sort().values.tolist() == list(range(len(lengths)))


@given(lengths=row_lengths, order=st.sampled_from(ORDERS), window=windows, seed=seeds, epoch=st.integers(0, 10**6))
def test_the_same_arguments_give_the_same_order_whatever_was_drawn_before(lengths, order, window, seed, epoch):
    arguments = {"order": order, "lengths": lengths, "window": window, "seed": seed, "epoch": epoch}
    first = row_order(len(lengths), **arguments)
    torch.rand(3)
    assert first.equal(row_order(len(lengths), **arguments))


def test_dataloader_keeps_the_rows_as_they_come():
    assert row_order(5, seed=3, epoch=2).tolist() == [0, 1, 2, 3, 4]


@given(lengths=row_lengths, seed=seeds)
def test_seqlen_goes_from_short_to_long(lengths, seed):
    ordered = lengths[row_order(len(lengths), order="seqlen", lengths=lengths, seed=seed)]
    assert (ordered.diff() >= 0).all()


@given(lengths=row_lengths, window=st.integers(1, 70), seed=seeds, epoch=st.integers(0, 10))
def test_within_a_window_rows_go_from_short_to_long_and_windows_are_of_shuffled_rows(lengths, window, seed, epoch):
    rows = row_order(len(lengths), order="seqlen", lengths=lengths, window=window, seed=seed, epoch=epoch)
    shuffled = row_order(len(lengths), order="random", seed=seed, epoch=epoch)
    for ours, drawn in zip(rows.split(window), shuffled.split(window), strict=True):
        assert (lengths[ours].diff() >= 0).all()
        assert set(ours.tolist()) == set(drawn.tolist())


LENGTHS = torch.arange(200) % 20 + 1


@pytest.mark.parametrize(("order", "window"), [("random", None), ("seqlen", None), ("seqlen", 50)])
def test_every_epoch_and_every_seed_has_an_order_of_its_own(order, window):
    orders = {
        tuple(row_order(200, order=order, lengths=LENGTHS, window=window, seed=seed, epoch=epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_drawing_an_order_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    row_order(50, order="random")
    assert torch.get_rng_state().equal(before)


def test_another_process_draws_the_same_order():
    program = "from adaptive_batch.data.order import row_order; print(row_order(100, order='random', seed=7, epoch=3).tolist())"
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    assert other.stdout.strip() == str(row_order(100, order="random", seed=7, epoch=3).tolist())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "shuffled"}, "order='shuffled': must be one of dataloader, random, seqlen"),
        ({"order": "seqlen", "window": 0}, "window=0: must be 1 row or more, or None to sort the whole epoch"),
        ({"order": "seqlen"}, "lengths=None: order='seqlen' needs the length of each of the 3 rows"),
        (
            {"order": "seqlen", "lengths": torch.tensor([1, 2])},
            "lengths='2 of them': order='seqlen' needs the length of each of the 3 rows",
        ),
    ],
)
def test_what_cannot_be_ordered_is_refused(arguments, message):
    with pytest.raises(SettingError) as caught:
        row_order(3, **arguments)
    assert str(caught.value) == message
