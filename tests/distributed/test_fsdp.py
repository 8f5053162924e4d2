"""FSDP2 on a torch that cannot reset it, and on one rank. See also test_running_out_of_memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.sharded_model import Decoder, divided
from torch.distributed.fsdp import FSDPModule

from adaptive_batch import distributed
from adaptive_batch.distributed import Sharding, local_part, whole_tensor
from adaptive_batch.errors import TorchVersionError


def test_a_torch_that_cannot_reset_fsdp_is_refused(monkeypatch):
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    error = pytest.raises(TorchVersionError, match=r"pip install 'torch>=2\.13'")
    with distributed.fake_process_group(2), error:
        Sharding(divided(Decoder()))


def test_on_one_rank_sharding_does_nothing():
    model = Decoder()
    sharding = Sharding(model, syncs_every_micro_batch=False)
    acts: list[Callable[[], object]] = [sharding.finish, sharding.run_dummy_collectives]
    for act in [*acts, sharding.reset]:
        act()
    assert not sharding.is_sharded
    assert sharding.can_finish
    assert list(sharding.kept_gradients()) == []
    weight = model.embed.weight
    assert whole_tensor(weight) is weight
    assert local_part(weight) is weight
