"""Checks of a configuration before data and weights load."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from support.model_families import Combination

from adaptive_batch import distributed
from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.torchtune import Job, NextTokens, Settings
from adaptive_batch.torchtune.checks import TO_TRAIN, check_output_dir, check_parallel
from adaptive_batch.torchtune.configuration import plainly
from adaptive_batch.torchtune.resume import check_fewer_ranks
from adaptive_batch.training import differences, raise_if_answers_differ

SMALL = Combination("qwen2", 32)
OTHER_BLOCKS = {
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 2,
    },
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "base",
        "output_dir": "output",
    },
}


def test_compile_defaults_to_false_as_in_torchtunes_recipe():
    cfg = SMALL.config()
    del cfg.compile
    job = Job(cfg, Settings.from_config(OmegaConf.to_container(cfg)))
    assert job.cfg.compile is False
    assert cfg.compile is False  # the recipe also reads this object


@pytest.mark.parametrize("key", TO_TRAIN)
def test_the_error_names_a_missing_key(key):
    cfg = SMALL.config()
    del cfg[key]
    with pytest.raises(SettingError, match=f"^{key}=None: it is missing; give "):
        Job(cfg, Settings.from_config(OmegaConf.to_container(cfg)))


# Invalid values of each key.
REFUSED = {
    "output_dir": ["${nowhere}/x"],
    "dataset.source": ["${no.where}"],
    "dataset.column_map": [{"input:text": None, "input": "former"}],
    "dataset": [[{"source": "json"}]],
    "model": [
        "${nowhere}",
        "torchtune.models.qwen2.qwen2",
        {"_component_": "torchtune.models.qwen2.qwen2", "nlayers": 2},
    ],
    "teacher_model": [{"_component_": "torchtune.models.qwen2.qwen2"}],
    "ref_checkpointer": [{"_component_": "torchtune.training.FullModelHFCheckpointer"}],
    "model.embed_dim": [33, "abc", 10**25],
    "model.num_heads": [0, "abc"],
    "model.num_layers": ["abc"],
    "model.vocab_size": ["abc"],
    "model.rope_base": ["abc"],
    "model.attn_dropout": [1.5, float("nan"), "abc"],
    "model.norm_eps": ["text", -1],
    "model.tie_word_embeddings": ["abc"],
    "tokenizer": [None],
    "tokenizer.max_seq_len": [0, -5, "abc"],
    "tokenizer.merges_file": [0, "vocab.json"],
    "loss": [None],
    "loss.ignore_idx": [3],
    "loss.ignore_index": ["abc"],
    "loss.num_output_chunks": [None, 0, -2, 2.0, "abc"],
    "optimizer._component_": ["torch.optim.LBFGS", "torch.optim.SparseAdam"],
    "optimizer.learning_rate": [1e-3],
    "optimizer.lr": [None, -1.0, "text"],
    "optimizer.weight_decay": ["abc"],
    "optimizer.betas": [0.9, [0.9], [0.9, 1.5], ["a", "b"]],
    "optimizer.amsgrad": [1, "abc"],
    "optimizer.maximize": ["abc"],
    "optimizer.fused": ["abc"],
    "optimizer.foreach": [1],
    "lr_scheduler": ["a.b", {"num_cycles": 2}],
    "lr_scheduler.num_warmup_steps": [-1, 2.5, "abc", True],
    "checkpointer": [3],
    "checkpointer.adapter_checkpoint": ["adapter_model.pt"],
    "metric_logger": ["abc", {"_component_": None}],
    "tensor_parallel_plan": ["abc"],
    "profiler": [3],
    "dataset.packed": ["maybe", 1],
    "dtype": ["fp8", "fp16"],
    "device": ["gpu", "meta"],
    "seed": [-1, 1.5, "abc", True, [1], 2**32],
    "log_every_n_steps": [0, -1, 1.5, "abc"],
    "shuffle": ["maybe"],
    "compile": ["maybe"],
    "enable_activation_checkpointing": ["maybe"],
    "enable_activation_offloading": [True],
    "log_peak_memory_stats": [3],
    "cudnn_deterministic_mode": ["some"],
    "clip_grad_norm": [-1.0, 0, "0", "nan", "lots"],
    "custom_sharded_layers": ["output", [1]],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values], ids=str
)
def test_an_invalid_value_is_refused_by_its_key_or_its_block(key, value):
    cfg = OmegaConf.merge(SMALL.config(), OTHER_BLOCKS)
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    with pytest.raises(SettingError) as refused:
        built(cfg)
    assert refused.value.key in (key, key.partition(".")[0])
    assert "\n" not in str(refused.value)


def built(cfg):
    """Build the objects that a job builds before weights load."""
    job = Job(cfg, Settings.from_config(OmegaConf.to_container(cfg)), task=NextTokens)
    job.check_model()
    job.optimizer_of_one_weight()


def test_activation_offloading_requires_cuda(monkeypatch):
    offloaded = {"enable_activation_checkpointing": True, "enable_activation_offloading": True}
    cfg = OmegaConf.to_container(SMALL.config()) | offloaded | {"device": None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    Settings.from_config(cfg)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match=r"^enable_activation_offloading=True: it needs device="):
        Settings.from_config(cfg)


@pytest.mark.parametrize("given", [None, "", 3, ["a"]])
def test_an_invalid_output_dir_is_refused(given):
    with pytest.raises(SettingError, match=r"^output_dir=.*: give a folder of yours"):
        check_output_dir(given)


def test_clip_grad_norm_accepts_strings_as_in_torchtune():
    """torchtune's recipes document `inf`, which logs norms without clipping."""
    cfg = OmegaConf.to_container(SMALL.config())
    assert Settings.from_config(cfg | {"clip_grad_norm": "inf"}).clip_grad_norm == float("inf")
    assert Settings.from_config(cfg | {"clip_grad_norm": "1.0"}).clip_grad_norm == 1.0


def test_plainly_converts_only_errors_of_the_configuration():
    assert plainly(KeyError("model")) is None
    ours = SettingError("a", 1, "b")
    assert plainly(ours) is ours


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
def test_an_invalid_key_for_ranks_is_refused(key, keys):
    with pytest.raises(SettingError) as refused:
        check_parallel(OmegaConf.create(OPTIMIZER | keys), world_size=8)
    assert refused.value.key == key


def test_one_process_ignores_keys_for_ranks():
    cfg = OmegaConf.create(OPTIMIZER | {"tensor_parallel_dim": 1, "fsdp_cpu_offload": True})
    assert check_parallel(cfg, world_size=1) == 1


def test_a_function_that_returns_another_value_on_a_rank_is_refused_with_the_rank(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather", lambda mine: [mine, {"f in epoch 1": "9"}])
    with pytest.raises(GrowthFunctionError, match="f in epoch 1 is 9 on rank 1 but 8 on rank 0"):
        raise_if_answers_differ({"f in epoch 1": 8})


def test_a_difference_between_ranks_is_named_with_both_values():
    mine, first = {"batch_size": "3", "seed": "1"}, {"seed": "1", "batch_size": "4", "epochs": "2"}
    assert list(differences(mine, first)) == [("batch_size", "3", "4"), ("epochs", "nothing", "2")]


def test_fewer_ranks_are_refused_if_steps_cannot_be_split(monkeypatch):
    cfg = OmegaConf.to_container(SMALL.config())
    in_backward = {
        "optimizer_in_bwd": True,
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": None,
    }
    job = Job(SMALL.config(), Settings.from_config(cfg | in_backward))
    job.ranks = 2
    with pytest.raises(SettingError, match="start 2 or more"):
        check_fewer_ranks(job)
    monkeypatch.setattr(distributed, "data_parallel_size", lambda: 4)
    check_fewer_ranks(job)
