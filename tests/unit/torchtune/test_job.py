"""A job sets up its process before it builds anything."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch._functorch import config as functorch_config

from adaptive_batch.config_files import config_files
from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import Job, Settings
from adaptive_batch.torchtune.job import restored_compiler


class Layer(nn.Linear):
    def forward(self, rows):
        hidden = super().forward(torch.sin(super().forward(rows)))
        return super().forward(torch.sigmoid(hidden))


def bytes_kept_within(budget):
    """Return the bytes that a layer keeps for backward if a job with this budget compiles it."""
    cfg = OmegaConf.load(config_files()["demo_cpu"])
    cfg.merge_with({"compile": True, "activation_memory_budget": budget})
    Job(cfg, Settings.from_config(cfg))
    layer = Layer(16, 16)
    layer.compile(backend="aot_eager_decomp_partition")
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.ones(64, 16, requires_grad=True)).sum().backward()
    return sum(kept.values())


def test_an_unknown_device_is_refused():
    cfg = OmegaConf.load(config_files()["demo_cpu"])
    cfg.device = "meta"
    with pytest.raises(SettingError, match="sees no such device"):
        Job(cfg, Settings.from_config(cfg))


@pytest.mark.parametrize("budgets", [(1.0, 0.0), (0.0, 1.0)])
def test_a_model_is_compiled_with_the_budget_of_its_job(budgets):
    torch.compiler.reset()
    before = functorch_config.activation_memory_budget
    with restored_compiler():
        kept = dict(zip(budgets, map(bytes_kept_within, budgets), strict=True))
    torch.compiler.reset()
    assert kept[0.0] < kept[1.0] / 2
    assert functorch_config.activation_memory_budget == before
