"""Each row once an epoch, in torchtune's order, in batches of any sizes, from any position."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from adaptive_batch.data import RowSampler

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(rows=st.integers(1, 100), counts=sizes, epoch=st.integers(0, 3), shuffle=st.booleans())
@settings(max_examples=50)
def test_batches_of_any_sizes_hand_out_the_samplers_order(rows, counts, epoch, shuffle):
    sampler = DistributedSampler(range(rows), 1, 0, shuffle=shuffle, seed=0)
    sampler.set_epoch(epoch)
    stream = RowSampler(list(range(rows)), shuffle=shuffle)
    stream.start_epoch(epoch)
    taken = [row for count in counts for row in stream.take(count)]
    assert taken == list(sampler)[: sum(counts)]
    assert stream.position == len(taken)


@given(rows=st.integers(1, 100), position=st.integers(0, 100), counts=sizes)
@settings(max_examples=50)
def test_going_on_from_any_position_hands_out_the_rest(rows, position, counts):
    whole, rest = (RowSampler(list(range(rows)), shuffle=True) for _ in range(2))
    whole.start_epoch(2)
    rest.start_epoch(2, position=position)
    whole.take(position)
    assert [whole.take(count) for count in counts] == [rest.take(count) for count in counts]


def test_epochs_have_orders_of_their_own():
    stream = RowSampler(list(range(50)), shuffle=True)
    orders = []
    for epoch in range(2):
        stream.start_epoch(epoch)
        orders.append(stream.take(50))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert stream.take(1) == []


def test_rows_are_handed_on_as_they_are():
    rows = [{"tokens": [1, 2], "labels": [1, 2]}, {"tokens": [3], "labels": [3]}]
    stream = RowSampler(rows, shuffle=False)
    stream.start_epoch(0)
    assert stream.take(2)[0] is rows[0]
