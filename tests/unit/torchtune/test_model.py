"""Fused RMS norms compute torchtune's norms; models that a run cannot use are refused."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune.modules import RMSNorm

from adaptive_batch.distributed import fake_process_group
from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune.model import FullModel, FusedRMSNorm, Weights

LLAMA = {
    "_component_": "torchtune.models.llama3.llama3",
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "embed_dim": 16,
    "max_seq_len": 32,
}


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 0.0), (torch.bfloat16, 2**-7), (torch.float64, 1e-5)]
)
def test_the_fused_norm_equals_torchtunes_norm_up_to_rounding(dtype, within):
    torch.manual_seed(0)
    plain, fused = RMSNorm(64).to(dtype), FusedRMSNorm(64).to(dtype)
    nn.init.normal_(plain.scale)
    fused.load_state_dict(plain.state_dict())
    rows = torch.randn(4, 8, 64, dtype=dtype)
    torch.testing.assert_close(fused(rows), plain(rows), rtol=within, atol=within)


def test_all_norms_of_a_model_are_replaced_with_the_same_parameter_names():
    cfg = OmegaConf.create({"model": LLAMA, "fused_rms_norm": True})
    fused = FullModel().skeleton(cfg, dtype=torch.bfloat16)
    plain = FullModel().skeleton(OmegaConf.create({"model": LLAMA}), dtype=torch.bfloat16)
    norms = [type(module) for module in fused.modules() if isinstance(module, RMSNorm)]
    assert norms == [FusedRMSNorm] * 5
    assert list(fused.state_dict()) == list(plain.state_dict())


def test_a_model_without_norms_to_fuse_is_refused():
    gemma = {**LLAMA, "_component_": "torchtune.models.gemma.gemma", "head_dim": 8}
    cfg = OmegaConf.create({"model": {**gemma, "intermediate_dim": 32}, "fused_rms_norm": True})
    with pytest.raises(SettingError, match=r"^fused_rms_norm=True: torchtune.*gemma has no"):
        FullModel().skeleton(cfg, dtype=torch.bfloat16)


def test_fusion_layers_are_refused_on_several_ranks_before_weights_load():
    fusion = "torchtune.modules.model_fusion.FusionEmbedding"
    sizes = {"vocab_size": 8, "fusion_vocab_size": 2, "embed_dim": 4}
    cfg = OmegaConf.create({"model": {"_component_": fusion, **sizes}, "compile": False})
    weights = Weights(lambda: pytest.fail("weights were loaded"))
    with fake_process_group(2), pytest.raises(SettingError, match=r"fusion layers on several"):
        FullModel().build(cfg, weights, dtype=torch.float32, device=torch.device("cpu"))
