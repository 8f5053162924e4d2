"""The lengths that an epoch is planned by."""

from functools import partial

import torch

from adaptive_batch.data import row_order
from adaptive_batch.data.epoch_lengths import EpochLengths


def of_lengths(lengths: list[torch.Tensor]) -> EpochLengths:
    """Plan by the last of some lengths."""
    order = partial(row_order, len(lengths[-1]), order="seqlen", shuffle=False, window=None, seed=0)
    return EpochLengths(lambda: lengths[-1], order)


def test_rows_that_are_trained_keep_their_places_where_the_others_are_counted_again():
    lengths = [torch.arange(1, 21)]
    planned = of_lengths(lengths)
    assert not planned.begin(0, rows=0)
    first_order = planned.order(0).tolist()
    version = planned.version
    lengths.append(torch.arange(20, 0, -1))
    assert planned.begin(0, rows=6)
    assert planned.version > version
    assert planned.planned_from == 6
    order = planned.order(0).tolist()
    assert order[:6] == first_order[:6]
    assert order != first_order
    assert sorted(order) == [*range(20)]


def test_an_epoch_that_is_resumed_has_the_order_by_the_saved_lengths():
    lengths = [torch.arange(1, 21)]
    planned = of_lengths(lengths)
    planned.begin(0, rows=0)
    again = of_lengths([torch.arange(20, 0, -1)])
    again.load_state_dict(planned.state_dict())
    assert again.order(0).tolist() == planned.order(0).tolist()
