"""Small models of several families, and the configurations that train them; no file is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import config, training
from torchtune.models.qwen2 import qwen2

from adaptive_batch.estimate import LengthEstimate
from adaptive_batch.torchtune import (
    estimate_devices,
)

_NARROW = {
    "num_layers": 2,
    "num_heads": 4,
    "embed_dim": 64,
    "intermediate_dim": 160,
    "max_seq_len": 256,
}
_GROUPED = {**_NARROW, "vocab_size": 1000, "num_kv_heads": 2}

MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"_component_": "torchtune.models.llama2.llama2", **_GROUPED},
    "llama3": {"_component_": "torchtune.models.llama3.llama3", **_GROUPED},
    "llama3_1": {"_component_": "torchtune.models.llama3_1.llama3_1", **_GROUPED},
    "llama3_2": {"_component_": "torchtune.models.llama3_2.llama3_2", **_GROUPED},
    "qwen2": {"_component_": "torchtune.models.qwen2.qwen2", **_GROUPED},
    "qwen2, tied": {
        "_component_": "torchtune.models.qwen2.qwen2",
        **_GROUPED,
        "tie_word_embeddings": True,
    },
    "gemma": {"_component_": "torchtune.models.gemma.gemma", **_GROUPED, "head_dim": 16},
    "gemma2": {
        "_component_": "torchtune.models.gemma2.gemma2",
        **_GROUPED,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },
    "mistral": {"_component_": "torchtune.models.mistral.mistral", **_GROUPED},
    "phi3": {"_component_": "torchtune.models.phi3.phi3", **_GROUPED},
    "qwen2_5_0_5b": {"_component_": "torchtune.models.qwen2_5.qwen2_5_0_5b"},
    "llama3_2_1b": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"},
    "llama3_2_3b": {"_component_": "torchtune.models.llama3_2.llama3_2_3b"},
    "llama3_1_8b": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
    "qwen2_5_7b": {"_component_": "torchtune.models.qwen2_5.qwen2_5_7b_base"},
    "gemma2_2b": {"_component_": "torchtune.models.gemma2.gemma2_2b"},
    "phi4_14b": {"_component_": "torchtune.models.phi4.phi4_14b"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"_component_": "torch.optim.AdamW"},
    "AdamW fused": {"_component_": "torch.optim.AdamW", "fused": True},
}
LOSSES = {
    "plain": "torch.nn.CrossEntropyLoss",
    "chunked": "torchtune.modules.loss.CEWithChunkedOutputLoss",
}
KD_LOSSES = {
    "plain": "torchtune.modules.loss.ForwardKLLoss",
    "chunked": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss",
}
# Of distillation; other models are taught by one like themselves.
TEACHERS = {"llama3_2_1b": "llama3_1_8b", "llama3_2_3b": "llama3_1_8b"}
ADAPTERS = {
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointing": {"enable_activation_checkpointing": True},
    "every 2nd layer": {"ac_mode": "selective", "ac_option": 2},
}


@dataclass(frozen=True)
class Combination:
    """One way of training: keys of the tables above, and the rest as the configuration has it."""

    model: str
    length: int
    optimizer: str = "AdamW fused"
    loss: str = "plain"
    checkpointing: str = ""
    dtype: str = "fp32"
    in_backward: bool = False
    packed: bool = False
    accumulation: int = 1
    clips: bool = False
    ranks: int = 1
    reshards: bool = True
    syncs: bool = True
    apart: tuple[str, ...] = ()
    device: str = "cpu"
    layout: str | None = None
    compiled: bool = False
    task: str = ""
    adapters: bool = False
    budget: float = 1.0  # of the activations that compiled parts keep

    def __str__(self) -> str:
        marks = [
            self.task,
            self.model + ", LoRA" * self.adapters,
            str(self.length),
            self.optimizer + " in backward" * self.in_backward,
            self.loss,
        ]
        marks += [
            self.checkpointing,
            "bf16" * (self.dtype == "bf16"),
            "packed" * self.packed,
            "clipping" * self.clips,
            "compiled" * self.compiled,
            f"budget {self.budget}" * (self.budget < 1),
            self.layout or "",
        ]
        marks += ["accumulating" * (self.accumulation > 1)]
        if self.ranks > 1:
            marks += [
                f"{self.ranks} ranks",
                "no resharding" * (not self.reshards),
                "late sums" * (not self.syncs),
            ]
            marks += [f"apart: {'+'.join(self.apart)}" if self.apart else ""]
        return ", ".join(filter(None, marks))

    def config(self) -> DictConfig:
        """The configuration."""
        settings: dict[str, Any] = {
            "output_dir": "nowhere",
            "seed": 7,
            "model": MODELS[self.model],
            "tokenizer": {
                "_component_": "nowhere.tokenizer",
                "path": "nowhere/tokenizer.model",
                "max_seq_len": None,
            },
            "dataset": {
                "_component_": "nowhere.dataset",
                "source": "nowhere",
                "packed": self.packed,
            },
            "batch_size": 1,
            "shuffle": True,
            "gradient_accumulation_steps": self.accumulation,
            "epochs": 1,
            "optimizer": {**OPTIMIZERS[self.optimizer], "lr": 1e-4},
            "optimizer_in_bwd": self.in_backward,
            "loss": {"_component_": LOSSES[self.loss]},
            "device": self.device,
            "dtype": self.dtype,
            "compile": self.compiled,
            "activation_memory_budget": self.budget,
            "clip_grad_norm": 1.0 if self.clips else None,
            "use_maximum_batch_size": True,
            "micro_batch_layout": self.layout,
            "fsdp_reshard_after_forward": self.reshards,
            "sync_gradients_every_micro_batch": self.syncs,
            "custom_sharded_layers": list(self.apart),
            "probe": {"cache": False, "headroom": 0.0, "round_to_power_of_two": False},
            **CHECKPOINTING[self.checkpointing],
            **self._of_task(),
        }
        if self.adapters:
            module, _, function = settings["model"]["_component_"].rpartition(".")
            component = {"_component_": f"{module}.lora_{function}"}
            settings["model"] = {**settings["model"], **component, **ADAPTERS}
        cfg = OmegaConf.create(settings)
        assert isinstance(cfg, DictConfig)
        return cfg

    def _of_task(self) -> dict[str, Any]:
        """The keys of its task."""
        if not self.task:
            return {}
        model = MODELS[TEACHERS.get(self.model, self.model) if self.task != "DPO" else self.model]
        zeros = {
            "_component_": "support.model_families.ZeroWeights",
            "model": model,
            "dtype": self.dtype,
        }
        if self.task == "DPO":
            loss = {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}
            return loss if self.adapters else {**loss, "ref_checkpointer": zeros}
        return {
            "teacher_model": model,
            "teacher_checkpointer": zeros,
            "kd_loss": {"_component_": KD_LOSSES[self.loss]},
        }

    def to_estimate(self, **estimate: Any) -> DictConfig:
        """The configuration, with its length and those keys in its ``estimate`` block."""
        block = {"sequence_lengths": [self.length], "headroom": 0, **estimate}
        cfg = OmegaConf.merge(self.config(), {"estimate": block})
        assert isinstance(cfg, DictConfig)
        return cfg

    def planned(self, **estimate: Any) -> LengthEstimate:
        """Its estimate, of a single row too: on 1 MiB no two rows fit."""
        settings = {"devices": ["1MiB"], "changes": False, "world_size": self.ranks, **estimate}
        cfg = self.to_estimate(**settings)
        return estimate_devices(cfg, show=lambda text: None).lengths[0]


class ZeroWeights:
    """Stands for a checkpointer; its weights are zeros that take no memory.

    Args:
        model: block of the model.
        dtype: of the weights.
        should_load_recipe_state: as torchtune's checkpointers take it.
    """

    def __init__(
        self, model: dict[str, Any], dtype: str, should_load_recipe_state: bool = False
    ) -> None:
        assert not should_load_recipe_state
        self._zero = torch.zeros((), dtype=training.get_dtype(dtype, torch.device("cpu")))
        with torch.device("meta"):
            self._model: nn.Module = config.instantiate(OmegaConf.create(model))

    def load_checkpoint(self) -> dict[str, Any]:
        shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        weights = {name: self._zero.expand(shape) for name, shape in shapes.items()}
        return {training.MODEL_KEY: weights}


class LooksAtValues(nn.Module):
    """A model whose forward depends on what is in its tokens, which fake ones do not have."""

    def __init__(self, **dimensions: Any) -> None:
        super().__init__()
        self.decoder = qwen2(**dimensions)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        largest = tokens.max().item()
        return self.decoder(tokens) * (1 + 0 * largest)


def looks_at_values(**dimensions: Any) -> LooksAtValues:
    """Builds it."""
    return LooksAtValues(**dimensions)
