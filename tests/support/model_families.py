"""Configurations of small and released models of several families. They read no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune.models.qwen2 import qwen2

_NARROW = {
    "num_layers": 2,
    "num_heads": 4,
    "embed_dim": 64,
    "intermediate_dim": 160,
    "max_seq_len": 256,
    "vocab_size": 1000,
    "num_kv_heads": 2,
}


def _narrow(family: str, **dimensions: Any) -> dict[str, Any]:
    """Return the block of a narrow model of a family."""
    return {"_component_": f"torchtune.models.{family}.{family}", **_NARROW, **dimensions}


def _released(family: str, name: str) -> dict[str, Any]:
    """Return the block of a released model."""
    return {"_component_": f"torchtune.models.{family}.{name}"}


_FAMILIES = ("llama2", "llama3", "llama3_1", "llama3_2", "qwen2", "mistral", "phi3")
MODELS: dict[str, dict[str, Any]] = {
    **{family: _narrow(family) for family in _FAMILIES},
    "qwen2, tied": _narrow("qwen2", tie_word_embeddings=True),
    "gemma": _narrow("gemma", head_dim=16),
    "gemma2": _narrow("gemma2", head_dim=16, query_pre_attn_scalar=16),
    "qwen2_5_0_5b": _released("qwen2_5", "qwen2_5_0_5b"),
    "llama3_2_1b": _released("llama3_2", "llama3_2_1b"),
    "llama3_2_3b": _released("llama3_2", "llama3_2_3b"),
    "llama3_1_8b": _released("llama3_1", "llama3_1_8b"),
    "qwen2_5_7b": _released("qwen2_5", "qwen2_5_7b_base"),
    "gemma2_2b": _released("gemma2", "gemma2_2b"),
    "phi4_14b": _released("phi4", "phi4_14b"),
}
LOSSES = {
    "plain": "torch.nn.CrossEntropyLoss",
    "chunked": "torchtune.modules.loss.CEWithChunkedOutputLoss",
}
ADAPTERS = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}


@dataclass(frozen=True)
class Combination:
    """Choices of a training configuration."""

    model: str  # key of MODELS
    length: int
    fused: bool = True  # argument of AdamW
    loss: str = "plain"  # key of LOSSES
    checkpointing: bool = False
    dtype: str = "fp32"
    packed: bool = False
    device: str = "cpu"
    compiled: bool = False
    adapters: bool = False
    budget: float = 1.0  # activation_memory_budget

    def __str__(self) -> str:
        marks = (
            self.model + ", LoRA" * self.adapters,
            str(self.length),
            "AdamW" + " fused" * self.fused,
            self.loss,
            "checkpointing" * self.checkpointing,
            "bf16" * (self.dtype == "bf16"),
            "packed" * self.packed,
            "compiled" * self.compiled,
            f"budget {self.budget}" * (self.budget < 1),
        )
        return ", ".join(filter(None, marks))

    def config(self) -> DictConfig:
        """Return the configuration."""
        model = MODELS[self.model]
        if self.adapters:
            module, _, function = model["_component_"].rpartition(".")
            model = {**model, "_component_": f"{module}.lora_{function}", **ADAPTERS}
        optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e-4}
        if self.fused:
            optimizer["fused"] = True
        tokenizer = {"path": "nowhere/tokenizer.model", "max_seq_len": None}
        return OmegaConf.create(
            {
                "output_dir": "nowhere",
                "seed": 7,
                "model": model,
                "tokenizer": {"_component_": "nowhere.tokenizer", **tokenizer},
                "dataset": {
                    "_component_": "nowhere.dataset",
                    "source": "nowhere",
                    "packed": self.packed,
                },
                "batch_size": 1,
                "shuffle": True,
                "gradient_accumulation_steps": 1,
                "epochs": 1,
                "optimizer": optimizer,
                "optimizer_in_bwd": False,
                "loss": {"_component_": LOSSES[self.loss]},
                "device": self.device,
                "dtype": self.dtype,
                "compile": self.compiled,
                "activation_memory_budget": self.budget,
                "enable_activation_checkpointing": self.checkpointing,
                "use_maximum_batch_size": True,
                "probe": {"cache": False, "headroom": 0.0, "round_to_power_of_two": False},
            }
        )

    def to_estimate(self, **estimate: Any) -> DictConfig:
        """Return the configuration with an ``estimate`` block of its length and further keys."""
        cfg = self.config()
        cfg.estimate = {"sequence_lengths": [self.length], "headroom": 0, **estimate}
        return cfg


class LooksAtValues(nn.Module):
    """A model whose forward reads the values of its tokens, which fake tensors do not have."""

    def __init__(self, **dimensions: Any) -> None:
        super().__init__()
        self.decoder = qwen2(**dimensions)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        largest = tokens.max().item()
        return self.decoder(tokens) * (1 + 0 * largest)
