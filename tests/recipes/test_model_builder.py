"""The bytes that a builder saves at the end of an epoch, and a disk that cannot hold them."""

import pytest
import torch
from omegaconf import OmegaConf
from support.cli import OURS, records
from torch.utils._pytree import tree_leaves
from torchtune.models.qwen2 import lora_qwen2, qwen2

from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import AdapterModel, FullModel


def test_an_epoch_that_the_disk_cannot_hold_is_refused_before_the_first_step(small, monkeypatch):
    monkeypatch.setattr(FullModel, "num_bytes_saved", lambda *_: 2**60)
    folder = small.fresh_folder()
    with pytest.raises(
        SettingError,
        match=r"^output_dir='.*': an epoch takes 1073741824\.00 GiB, but only [\d.]+ GiB are",
    ):
        small.run_in_process(OURS, f"output_dir={folder}")
    assert not records(folder, "step")


@pytest.mark.parametrize("keys", [{}, {"save_adapter_weights_only": True}], ids=str)
@pytest.mark.parametrize(
    "builder", [FullModel(), AdapterModel()], ids=lambda one: type(one).__name__
)
def test_the_bytes_of_an_epoch_are_about_those_of_what_is_saved(builder, keys):
    shape = {
        "vocab_size": 64,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": 32,
        "intermediate_dim": 64,
        "max_seq_len": 32,
    }
    lora = {
        "lora_attn_modules": ["q_proj"],
        "apply_lora_to_mlp": False,
        "lora_rank": 2,
        "lora_alpha": 4.0,
    }
    model = lora_qwen2(**shape, **lora) if isinstance(builder, AdapterModel) else qwen2(**shape)
    cfg = OmegaConf.create({"model": {**shape, **lora}, **keys})
    expected = builder.num_bytes_saved(model, cfg)
    saved = builder.to_save(model, cfg, device=torch.device("cpu"))
    tensors = [leaf for leaf in tree_leaves(saved) if isinstance(leaf, torch.Tensor)]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    assert num_bytes <= expected <= 1.05 * num_bytes
