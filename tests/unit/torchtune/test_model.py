"""Fused RMS norms compute torchtune's norms; models that a run cannot use are refused."""

from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune.modules import RMSNorm
from torchtune.modules.model_fusion import FusionEmbedding

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


class FusionModel(FullModel):
    """Builder of a model with an embedding for additional tokens."""

    def new_model(self, cfg, *, dtype, device):
        model = super().new_model(cfg, dtype=dtype, device=device)
        with device:
            model.tok_embeddings = FusionEmbedding(LLAMA["vocab_size"], 2, LLAMA["embed_dim"])
        return model


def test_fusion_layers_on_several_ranks_are_refused_unless_ranks_read_shards_of_a_checkpoint():
    cfg = OmegaConf.create({"model": LLAMA, "compile": False})
    build = partial(FusionModel().build, cfg, dtype=torch.float32, device=torch.device("cpu"))
    with fake_process_group(2):
        with pytest.raises(SettingError, match=r"fusion layers on several"):
            build(Weights(lambda: pytest.fail("weights were loaded")))
        resumed = []
        build(Weights(dict, load_shards=resumed.append))
    assert "tok_embeddings.fusion_embedding.weight" in resumed[0]
