"""Distillation on the small setup: a student with adapters, and a teacher that is wider."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from support.adapters import LORA_MODEL
from support.cli import MODEL, SmallSetup, cosine_after, fill
from torch import nn
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

OURS = "adaptive_distill"
STOCK = "knowledge_distillation_single_device"
STOCK_ON_RANKS = "knowledge_distillation_distributed"
CORRECTED = "support/corrected_distillation.py"
TEACHER = {**MODEL, "num_layers": 3, "embed_dim": 48, "intermediate_dim": 80}
METRICS = ("class_loss", "kd_loss")
KD_LOSS = "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"
# Over a block of the setup the command line takes single keys.
FULL = (
    f"kd_loss._component_={KD_LOSS}",
    "kd_ratio=0.3",
    "teacher_model._component_=torchtune.models.qwen2.qwen2",
    *(f"teacher_model.{name}={value}" for name, value in TEACHER.items()),
    *cosine_after(3),
)
LORA = (*FULL, *LORA_MODEL, "~optimizer_in_bwd")
PLAIN = (
    "loss=torch.nn.CrossEntropyLoss",
    "kd_loss._component_=torchtune.modules.loss.ForwardKLLoss",
)


def write_teacher(setup: SmallSetup) -> tuple[str, ...]:
    """Write a teacher's checkpoint; return the overrides by which a run reads it."""
    folder = setup.folder / "teacher"
    folder.mkdir(exist_ok=True)
    written = {
        "num_attention_heads": TEACHER["num_heads"],
        "num_key_value_heads": TEACHER["num_kv_heads"],
        "hidden_size": TEACHER["embed_dim"],
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(written))
    model = qwen2(**TEACHER)
    fill(model)
    # Far from a uniform prediction, so that what it says matters.
    model.output.weight.data *= 8
    state = qwen2_tune_to_hf(
        model.state_dict(),
        num_heads=TEACHER["num_heads"],
        num_kv_heads=TEACHER["num_kv_heads"],
        dim=TEACHER["embed_dim"],
    )
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return (
        "teacher_checkpointer._component_=torchtune.training.FullModelHFCheckpointer",
        f"teacher_checkpointer.checkpoint_dir={folder}",
        "teacher_checkpointer.checkpoint_files=[model.safetensors]",
        "teacher_checkpointer.recipe_checkpoint=null",
        "teacher_checkpointer.output_dir=${output_dir}",
        "teacher_checkpointer.model_type=QWEN2",
    )


class ExactForwardKL(nn.Module):
    """Forward KL divergence without the teacher's entropy, in the dtype of its logits; torchtune's
    computes in float32.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        losses = -(teacher_logits.softmax(-1) * student_logits.log_softmax(-1)).sum(-1)
        return losses[labels != self.ignore_index].mean()


class MeanOfAllTokens(ExactForwardKL):
    """A mean that counts tokens without a label too."""

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        return super().forward(student_logits, teacher_logits, torch.zeros_like(labels))


class SumOfTokens(ExactForwardKL):
    """The same as a sum, which a split would change."""

    def forward(
        self, student_logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        mean = super().forward(student_logits, teacher_logits, labels)
        return mean * (labels != self.ignore_index).sum()
