import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from adaptive_batch.data import ORDERS, row_order
from adaptive_batch.errors import SettingError

row_lengths = st.lists(st.integers(1, 2048), max_size=60).map(
    lambda values: torch.tensor(values, dtype=torch.int64)
)
windows = st.none() | st.integers(1, 70)
seeds = st.integers(0, 2**63)


@given(row_lengths, st.sampled_from(ORDERS), windows, seeds, st.integers(0, 10**6))
def test_every_row_comes_once_in_the_same_order_whatever_was_drawn_before(
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
def test_within_a_window_rows_go_from_short_to_long_and_windows_are_of_shuffled_rows(
    lengths, window, seed, epoch
):
    rows = row_order(
        len(lengths), order="seqlen", lengths=lengths, window=window, seed=seed, epoch=epoch
    )
    shuffled = row_order(len(lengths), order="random", seed=seed, epoch=epoch)
    for ours, drawn in zip(rows.split(window), shuffled.split(window), strict=True):
        assert (lengths[ours].diff() >= 0).all()
        assert set(ours.tolist()) == set(drawn.tolist())


LENGTHS = torch.arange(200) % 20 + 1


@pytest.mark.parametrize(("order", "window"), [("random", None), ("seqlen", None), ("seqlen", 50)])
@pytest.mark.parametrize("stored_rows", [200, 0])
def test_every_epoch_and_every_seed_has_an_order_of_its_own(order, window, stored_rows):
    arguments = {"order": order, "lengths": LENGTHS, "window": window, "stored_rows": stored_rows}
    orders = [
        row_order(200, **arguments, seed=seed, epoch=epoch)[:].tolist()
        for seed in range(5)
        for epoch in range(5)
    ]
    assert len(set(map(tuple, orders))) == 25


def test_what_cannot_be_ordered_is_refused():
    for key, value in (("order", "shuffled"), ("window", 0)):
        with pytest.raises(SettingError, match=f"^{key}={value!r}: give "):
            row_order(3, **{"order": "seqlen", key: value})


@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 50), st.booleans())
def test_a_stored_order_is_that_of_torchs_sampler(num_rows, seed, epoch, shuffle):
    sampler = DistributedSampler(range(num_rows), 1, 0, shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    assert row_order(num_rows, shuffle=shuffle, seed=seed, epoch=epoch).tolist() == list(sampler)


def test_an_order_of_more_than_1048576_rows_is_computed_unless_by_length():
    assert isinstance(row_order(2**20, shuffle=True), torch.Tensor)
    for order, shuffle in (("dataloader", False), ("dataloader", True), ("random", True)):
        assert not isinstance(row_order(2**20 + 1, order=order, shuffle=shuffle), torch.Tensor)
    lengths = torch.ones(2**20 + 1)
    assert isinstance(row_order(2**20 + 1, order="seqlen", lengths=lengths), torch.Tensor)


def computed(num_rows, **arguments):
    """Compute an order of few rows as that of many is computed."""
    return row_order(num_rows, **{"order": "random", **arguments}, stored_rows=0)


# Parts are computed in blocks of 2,048 rows.
many_rows = st.integers(1, 100) | st.integers(2000, 9000)


@given(many_rows, st.sampled_from(["dataloader", "random"]), st.booleans(), seeds, seeds)
def test_a_computed_order_has_every_row_once(num_rows, order, shuffle, seed, epoch):
    state = torch.get_rng_state()
    arguments = {"seed": seed >> 23, "epoch": epoch // 2}
    made = computed(num_rows, order=order, shuffle=shuffle, **arguments)
    assert len(made) == num_rows
    rows = made[:]
    assert torch.get_rng_state().equal(state)
    assert rows.dtype == torch.int64
    assert rows.sort().values.equal(torch.arange(num_rows))
    is_shuffled = shuffle or order == "random"
    assert num_rows < 2000 or rows.equal(torch.arange(num_rows)) != is_shuffled


@given(num_rows=many_rows, shuffle=st.booleans(), data=st.data())
def test_parts_of_a_computed_order_are_those_of_the_whole(num_rows, shuffle, data):
    rows = computed(num_rows, order="dataloader", shuffle=shuffle)
    whole = rows[:]
    places = st.integers(0, num_rows + 10)
    for _ in range(5):
        begin = data.draw(places)
        end = data.draw(places)
        step = data.draw(st.integers(1, 3))
        assert rows[begin:end:step].equal(whole[begin:end:step])
    places = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1))), dtype=torch.int64)
    assert rows[places].equal(whole[places])


def test_computed_orders_are_the_same_on_every_machine():
    """A run that is resumed elsewhere, with another torch, must go on in the order in which it
    began.
    """
    rows = row_order(5 * 10**7, shuffle=True, seed=1, epoch=2)
    assert rows[49_999_995:].tolist() == [14494069, 25060103, 20211266, 47530259, 4225116]
    rows = row_order(5 * 10**7, order="random", seed=1, epoch=2)
    assert rows[:5].tolist() == [34648684, 35242564, 13557001, 26089293, 13123361]


# --- whether a computed order is as good as one that is drawn


@pytest.fixture(scope="module")
def orders():
    """The orders of 1,000 rows by 2,000 seeds: [seeds, rows]."""
    return torch.stack([computed(1000, seed=seed)[:] for seed in range(2000)])


@pytest.fixture(scope="module")
def million():
    """One order of a million rows."""
    return computed(10**6, seed=5)[:]


def in_standard_errors(numbers):
    """Return by how many standard errors chi-square of the counts of numbers is off what chance
    makes it.
    """
    counts = numbers.unique(return_counts=True)[1].double()
    chi_square = counts.var() / counts.mean() * (len(counts) - 1)
    return abs(float(chi_square - (len(counts) - 1))) / (2 * (len(counts) - 1)) ** 0.5


@pytest.mark.parametrize("distance", [1, 2, 31, 32, 33, 64])
def test_rows_at_a_distance_are_as_likely_at_each_other_one(orders, distance):
    """At risk are distances of about the root of the rows, the base in which their numbers are
    taken apart.
    """
    apart = (orders[:, distance:] - orders[:, :-distance]) % 1000
    assert len(apart.unique()) == 999
    assert in_standard_errors(apart.flatten()) < 4


@pytest.mark.parametrize("size", [1000, 4096, 100_000])
def test_a_part_of_an_epoch_takes_rows_from_everywhere(million, size):
    parts = million[: 10**6 // size * size].view(-1, size) // 10**5
    tenths = torch.stack([(parts == tenth).sum(1) for tenth in range(10)]).double()
    chi_squares = ((tenths - size / 10) ** 2).sum(0) / (size / 10)
    # Rows are drawn without being put back, so that counts are that much more alike.
    expected = 9 * (1 - size / 10**6)
    assert float(chi_squares.mean()) == pytest.approx(
        expected, abs=4 * (18 / chi_squares.numel()) ** 0.5
    )
