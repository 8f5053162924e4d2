"""Single changes of a configuration that an estimate suggests."""

from __future__ import annotations

import torch
from omegaconf import OmegaConf

from adaptive_batch.config_files import config_files
from adaptive_batch.torchtune import FullModel
from adaptive_batch.torchtune.changes import candidates


def budgets(*changed, world_size=1):
    """Return the activation memory budgets among the changes."""
    demo = OmegaConf.load(config_files()["demo_cpu"])
    cfg = OmegaConf.merge(demo, OmegaConf.from_dotlist(list(changed)))
    model = FullModel().skeleton(cfg, dtype=torch.float32)
    typed = [one.overrides[0] for one in candidates(cfg, model, tokens=64, world_size=world_size)]
    return [
        float(one.partition("=")[2]) for one in typed if one.startswith("activation_memory_budget")
    ]


def typed(name, **model):
    cfg = OmegaConf.load(config_files()[name])
    cfg.model.update(model)
    skeleton = torch.nn.Linear(2, 2)
    return [one.overrides[0] for one in candidates(cfg, skeleton, tokens=64, world_size=8)]


def test_a_quantized_base_is_suggested_with_an_argument_or_another_builder():
    qwen = "torchtune.models.qwen2_5.lora_qwen2_5_7b_base"
    assert "model.quantize_base=True" in typed("llama3_2_1B_lora", _component_=qwen)
    whole = typed("llama3_2_1B_lora", _component_=qwen, quantize_base=True)
    assert "model.quantize_base=True" not in whole
    llama = typed("llama3_2_1B_lora")
    assert "model=torchtune.models.llama3_2.qlora_llama3_2_1b" in llama


def test_lower_activation_memory_budgets_are_suggested_with_compile():
    compiled = ("device=cuda", "compile=True")
    assert budgets(*compiled) == [0.5, 0.3, 0.15]
    assert budgets(*compiled, "activation_memory_budget=0.3") == [0.15]
    assert budgets(*compiled, "activation_memory_budget=0.0") == []
    assert budgets("device=cuda", "compile=False") == []
    assert budgets("device=cpu", "compile=True") == []
    assert budgets(*compiled, world_size=2) == [0.5, 0.3, 0.15]
    assert budgets(*compiled, "tensor_parallel_dim=2", world_size=2) == []
