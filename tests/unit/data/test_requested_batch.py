"""The batch that is requested for a step."""

from types import SimpleNamespace

import pytest

from adaptive_batch.data import Batching
from adaptive_batch.data.requested_batch import RequestedBatch
from adaptive_batch.schedules import Progress, at_epochs, linear_ramp


def growing(maximum: int | None) -> RequestedBatch:
    batching = Batching(batch_size=2, batch_increase_function=at_epochs({1: 3, 2: 5}))
    return RequestedBatch(batching, SimpleNamespace(max_batch_size=maximum))


@pytest.mark.parametrize(("maximum", "sizes"), [(None, [2, 5, 10, 10]), (8, [2, 5, 8, 8])])
def test_looking_ahead_answers_as_growing_does(maximum, sizes):
    batch = growing(maximum)
    ahead = batch.ahead(Progress(), 4)
    grown = []
    for epoch in range(4):
        batch.request(Progress(epoch=epoch))
        grown.append(batch.batch_size)
    assert [*ahead.values()] == grown == sizes


def test_an_epoch_that_is_resumed_does_not_grow_again():
    batch = growing(None)
    batch.request(Progress())
    batch.request(Progress(epoch=1))
    again = growing(None)
    again.load_state_dict(batch.state_dict())
    assert not again.grows_at(Progress(epoch=1))
    again.request(Progress(epoch=1))
    assert again.batch_size == batch.batch_size == 5


def test_a_saved_batch_that_is_not_kept_is_the_configured_one():
    sizer = SimpleNamespace(max_batch_size=20)
    grown = growing(None)
    grown.begin()
    grown.request(Progress(epoch=1))
    batching = Batching(batch_size=3, batch_increase_function=at_epochs({1: 3}))
    resumed = RequestedBatch(batching, sizer)
    resumed.load_state_dict(grown.state_dict())
    resumed.begin_again()
    assert resumed.grows_at(Progress(epoch=1))
    resumed.begin()
    assert resumed.batch_size == resumed.first_batch_size == 3


def test_a_schedule_continues_to_the_saved_maximum_until_that_is_forgotten():
    rule = linear_ramp(start=2, end=32, over="10ba")
    batching = Batching(batch_size=2, batch_size_schedule=rule)
    saved = RequestedBatch(batching, SimpleNamespace(max_batch_size=20))
    batch = RequestedBatch(batching, SimpleNamespace(max_batch_size=8))
    batch.load_state_dict(saved.state_dict())
    assert batch.request(Progress(steps=10)) == 20
    batch.forget_saved_maximum()
    assert batch.request(Progress(steps=10)) == 8
