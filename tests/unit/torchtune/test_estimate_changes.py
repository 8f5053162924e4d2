"""Single changes of a configuration that an estimate tries."""

from __future__ import annotations

import torch
from omegaconf import OmegaConf

from adaptive_batch.config_files import config_path
from adaptive_batch.torchtune import FullModel
from adaptive_batch.torchtune.estimate_changes import candidates


def budgets(*changed, world_size=1):
    """The budgets of activations among the changes."""
    demo = OmegaConf.load(config_path("demo_cpu"))
    cfg = OmegaConf.merge(demo, OmegaConf.from_dotlist(list(changed)))
    model = FullModel().skeleton(cfg, dtype=torch.float32)
    typed = [one.overrides[0] for one in candidates(cfg, model, tokens=64, world_size=world_size)]
    return [
        float(one.partition("=")[2]) for one in typed if one.startswith("activation_memory_budget")
    ]


def test_budgets_of_activations_below_the_configured_one_are_tried_under_compile():
    compiled = ("device=cuda", "compile=True")
    assert budgets(*compiled) == [0.5, 0.3, 0.15]
    assert budgets(*compiled, "activation_memory_budget=0.3") == [0.15]
    assert budgets(*compiled, "activation_memory_budget=0.0") == []
    assert budgets("device=cuda", "compile=False") == []
    assert budgets("device=cpu", "compile=True") == []
    assert budgets(*compiled, world_size=2) == [0.5, 0.3, 0.15]
    assert budgets(*compiled, "tensor_parallel_dim=2", world_size=2) == []
