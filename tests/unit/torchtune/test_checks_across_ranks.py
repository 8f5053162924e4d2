"""Checks of several ranks before a run begins; recipes/ has the tests of their runs."""

import pytest
from omegaconf import OmegaConf
from support.model_families import Combination

from adaptive_batch import distributed
from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.torchtune import Job, Settings
from adaptive_batch.torchtune.checks import check_parallel
from adaptive_batch.torchtune.resume import check_fewer_ranks
from adaptive_batch.training import differences, raise_if_answers_differ

IN_BACKWARD = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None}
OPTIMIZER = {"optimizer": {"_component_": "torch.optim.AdamW"}, "device": "cuda"}


BITSANDBYTES = {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}
FUSED = {"_component_": "torch.optim.AdamW", "fused": True}
PLAN = {"tensor_parallel_plan": {"_component_": "a.b"}}


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("tensor_parallel_dim", {"tensor_parallel_dim": 3}),
        ("tensor_parallel_dim", {"tensor_parallel_dim": 0}),
        ("tensor_parallel_plan", {"tensor_parallel_dim": 2}),
        ("fsdp_cpu_offload", {"fsdp_cpu_offload": True, "device": "cpu"}),
        ("fsdp_cpu_offload", {"fsdp_cpu_offload": True, "optimizer": BITSANDBYTES}),
        ("optimizer.fused", {"tensor_parallel_dim": 2, "optimizer": FUSED} | PLAN),
    ],
    ids=str,
)
def test_a_key_for_ranks_that_cannot_be_used_is_refused(key, keys):
    with pytest.raises(SettingError) as refused:
        check_parallel(OmegaConf.create(OPTIMIZER | keys), world_size=8)
    assert refused.value.key == key


def test_one_process_ignores_what_is_for_many():
    cfg = OmegaConf.create(OPTIMIZER | {"tensor_parallel_dim": 1, "fsdp_cpu_offload": True})
    assert check_parallel(cfg, world_size=1) == 1


def test_what_differs_is_named_with_both_values():
    mine, first = {"batch_size": "3", "seed": "1"}, {"seed": "1", "batch_size": "4", "epochs": "2"}
    assert list(differences(mine, first)) == [("batch_size", "3", "4"), ("epochs", "nothing", "2")]


def test_a_function_that_answers_differently_is_refused_with_the_rank(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather", lambda mine: [mine, {"f in epoch 1": "9"}])
    with pytest.raises(GrowthFunctionError, match="f in epoch 1 is 9 on rank 1 but 8 on rank 0"):
        raise_if_answers_differ({"f in epoch 1": 8})


def test_fewer_ranks_are_refused_where_a_step_cannot_be_split(monkeypatch):
    job = Job(
        cfg := Combination("qwen2", 32).config(),
        Settings.from_config(OmegaConf.to_container(cfg) | IN_BACKWARD),
    )
    job.ranks = 2
    with pytest.raises(SettingError, match="start 2 or more"):
        check_fewer_ranks(job)
    monkeypatch.setattr(distributed, "data_parallel_size", lambda: 4)
    check_fewer_ranks(job)


@pytest.mark.parametrize("optimizer", [None, "torch.optim.AdamW"])
def test_what_is_no_block_is_left_to_the_check_that_names_it(optimizer):
    assert (
        check_parallel(OmegaConf.create({"optimizer": optimizer, "device": "cpu"}), world_size=1)
        == 1
    )
