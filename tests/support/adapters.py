"""Adapters on the small setup: overrides of their runs, and the files that these save."""

from __future__ import annotations

import torch
from support.cli import Finished, SmallSetup, cosine_after, make_setup, same_weights

OURS = "adaptive_lora_finetune"
STOCK, STOCK_ON_RANKS = "lora_finetune_single_device", "lora_finetune_distributed"
LORA_MODEL = (
    "model._component_=torchtune.models.qwen2.lora_qwen2",
    "model.lora_attn_modules=[q_proj,v_proj,output_proj]",
    "model.apply_lora_to_mlp=True",
    "model.lora_rank=4",
    "model.lora_alpha=8",
)
LORA = (*LORA_MODEL, *cosine_after(3), "~optimizer_in_bwd")
KINDS = {
    "LoRA": (),
    "DoRA": ("model.use_dora=True",),
    "QLoRA": ("model.quantize_base=True", "dtype=bf16"),
}


def make_wide_setup(folder) -> SmallSetup:
    """Make a setup whose weights divide into NF4 blocks, and those into shards of two ranks."""
    return make_setup(folder, embed_dim=256, intermediate_dim=512)


def adapters(finished: Finished, epoch: int) -> dict[str, torch.Tensor]:
    """Read the adapters of a saved epoch."""
    path = finished.output_dir / f"epoch_{epoch}" / "adapter_model.pt"
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return found


def same_epoch(one: Finished, other: Finished, epoch: int) -> bool:
    """Return whether two runs saved the same adapters and the same merged weights, if any.

    PEFT's file is not compared: torchtune writes its rows in an order that PEFT does not read.
    """

    def merged(run: Finished) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, tensor in run.weights(epoch).items()
            if not name.startswith("base_model.")
        }

    same = same_weights(adapters(one, epoch), adapters(other, epoch))
    both = merged(one), merged(other)
    return same and (same_weights(*both) if any(both) else True)
