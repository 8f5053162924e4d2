from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.distributed import collectives
from adaptive_batch.errors import RankLostError, SettingError


class NeedsTwoArguments(Exception):
    def __init__(self, left, right):
        super().__init__(f"{left} and {right}")
        self.right = right


class HoldsALambda(Exception):
    def __init__(self):
        super().__init__("held")
        self.function = lambda: None


def failing(error):
    raise error


def test_one_rank_needs_no_process_group_and_gets_the_same_object_or_error():
    assert not dist.is_initialized()
    assert (distributed.world_size(), distributed.rank()) == (1, 0)
    assert distributed.is_rank_zero()
    assert [f(-7) for f in (distributed.minimum, distributed.maximum)] == [-7, -7]
    assert [distributed.any_of_ranks(flag) for flag in (True, False)] == [True, False]
    result, error = object(), HoldsALambda()  # neither can be pickled
    for call in (
        distributed.from_rank_zero,
        lambda compute: distributed.from_each_rank(compute)[0],
    ):
        assert call(lambda: result) is result
        with pytest.raises(HoldsALambda) as caught:
            call(lambda: failing(error))
        assert caught.value is error


class RankEnded(Exception):
    pass


class Dying:
    """A store whose rank ends at a call of `method`."""

    def __init__(self, store, method):
        self._store, self._method = store, method

    def __getattr__(self, name):
        if name == self._method:
            raise RankEnded
        return getattr(self._store, name)


def names_of(attempt, store, size):
    """Return each rank's name of an attempt. A rank with a method in ``attempt`` ends when it calls
    that method of the store.
    """

    def named(rank):
        ends_at = attempt.get(rank)
        try:
            return collectives._agree_on_name(
                Dying(store, ends_at) if ends_at else store, rank, size
            )
        except RankEnded:
            return None
        except (RankLostError, dist.DistStoreError):
            return "waited in vain"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(named, range(size)))


def test_the_ranks_of_an_attempt_agree_on_a_new_name(monkeypatch):
    monkeypatch.setattr(collectives, "_JOIN", timedelta(seconds=0.3))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    first, second = names_of({}, store, 4), names_of({}, store, 4)
    assert len({*first}) == len({*second}) == 1
    # Rank 0 ends after all others asked, rank 2 before it asks, rank 1 before it reads the name.
    assert names_of({0: "set"}, store, 4) == [None, *["waited in vain"] * 3]
    assert names_of({2: "add"}, store, 4)[2] is None
    names_of({1: "get"}, store, 4)
    (third,) = {*names_of({}, store, 4)}
    assert third not in {None, "waited in vain", first[0], second[0]}


def test_the_error_of_rank_zero_has_the_number_of_joined_ranks(monkeypatch):
    monkeypatch.setattr(collectives, "_JOIN", timedelta(seconds=0.1))
    with pytest.raises(RankLostError, match=r"1 of 2 ranks joined within 0:00:00\.1"):
        collectives._agree_on_name(dist.HashStore(), 0, 2)


def caught_from_rank_zero(compute):
    try:
        return distributed.from_rank_zero(compute)
    except BaseException as error:
        return (
            type(error).__name__,
            str(error),
            {key: str(value) for key, value in vars(error).items()},
        )


def facts_of_rank():
    rank, calls = distributed.rank(), []

    def compute():
        calls.append(rank)
        return {"from": rank, "lengths": torch.arange(3)}

    return {
        "minimum": distributed.minimum(10 + rank),
        "maximum": distributed.maximum(10 + rank),
        "large": distributed.maximum(2**60 + rank),
        "any": [distributed.any_of_ranks(flag) for flag in (False, rank == 0, rank == 1, True)],
        "result": distributed.from_rank_zero(compute),
        "calls": calls,
        "SettingError": caught_from_rank_zero(
            lambda: failing(SettingError("epochs", 0, "must be 1 or more"))
        ),
        "NeedsTwoArguments": caught_from_rank_zero(lambda: failing(NeedsTwoArguments(1, 2))),
        "FileNotFoundError": caught_from_rank_zero(lambda: Path("/nowhere/at/all").read_text()),
        "SystemExit": caught_from_rank_zero(lambda: failing(SystemExit(3))),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_on_ranks(facts_of_rank, 2)


def test_all_ranks_get_the_reduced_values_and_the_result_of_rank_zero(ranks):
    assert [facts["calls"] for facts in ranks] == [[0], []]
    for facts in ranks:
        assert (facts["minimum"], facts["maximum"], facts["large"]) == (10, 11, 2**60 + 1)
        assert facts["any"] == [False, True, True, True]
        assert facts["result"]["from"] == 0
        assert facts["result"]["lengths"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SettingError", "epochs=0: must be 1 or more"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/nowhere/at/all'"),
        ("SystemExit", "3"),
    ],
)
def test_an_error_of_rank_zero_is_raised_on_all_ranks(ranks, name, message):
    for facts in ranks:
        assert facts[name][:2] == (name, message)
    assert ranks[0][name] == ranks[1][name]  # its attributes too


def test_an_error_that_cannot_be_sent_becomes_a_runtime_error(ranks):
    first, second = (facts["NeedsTwoArguments"][:2] for facts in ranks)
    assert first == ("NeedsTwoArguments", "1 and 2")
    assert second == ("RuntimeError", "rank 0 failed with NeedsTwoArguments: 1 and 2")
