"""Preference pairs on the small setup: the chosen answer is a function's docstring, the rejected
one that of another function.
"""

from __future__ import annotations

import json

import torch
from support.adapters import LORA_MODEL
from support.cli import SmallSetup, checkpointer_of, cosine_after
from torch import nn
from torch.nn import functional as F
from torchtune.modules.peft import LoRALinear

OURS = "adaptive_dpo"
STOCK = "lora_dpo_single_device"
STOCK_ON_RANKS = "lora_dpo_distributed"
STOCK_FULL = "full_dpo_distributed"
# The command line overrides single keys of a block of the setup.
PAIRS = (
    "loss=torchtune.rlhf.loss.DPOLoss",
    "dataset._component_=torchtune.datasets.preference_dataset",
    "~dataset.packed",
    "~dataset.column_map",
    "optimizer.lr=1e-2",
    *cosine_after(3),
)
LORA = (*PAIRS, *LORA_MODEL, "~optimizer_in_bwd")
METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("log_probs/chosen", "log_probs/rejected", "logits/chosen", "logits/rejected"),
)


def write_pairs(setup: SmallSetup) -> tuple[str, ...]:
    """Write pairs of the setup's rows; return the overrides that read them."""
    rows = [json.loads(line) for line in (setup.folder / "train.jsonl").read_text().splitlines()]
    path = setup.folder / "pairs.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            other = rows[(number * 7 + 3) % len(rows)]
            pair = {
                name: [
                    {"role": "user", "content": row["signature"]},
                    {"role": "assistant", "content": answer["docstring"]},
                ]
                for name, answer in (("chosen", row), ("rejected", other))
            }
            file.write(json.dumps(pair) + "\n")
    return (f"dataset.data_files={path}",)


def reference_of(setup: SmallSetup) -> tuple[str, ...]:
    """Return the overrides that make the setup's base the reference of full fine-tuning."""
    return checkpointer_of("ref_checkpointer", setup.base)


class ExactPolicy(nn.Module):
    """A causal model that computes in its own dtype. torchtune's norms and logits are float32."""

    def __init__(self, *, adapters: bool, vocabulary: int = 64, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        if adapters:
            self.layer: nn.Module = LoRALinear(width, width, rank=4, alpha=8.0)
        else:
            self.layer = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        heads = x[:, None]
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        logits: torch.Tensor = self.output(self.layer(x).tanh())
        return logits
