"""Distillation on the small setup: a student with adapters and a wider teacher."""

from __future__ import annotations

import torch
from support.adapters import LORA_MODEL
from support.cli import MODEL, SmallSetup, block, checkpointer_of, cosine_after, write_checkpoint
from torch import nn

OURS = "adaptive_distill"
CORRECTED = "support/corrected_distillation.py"
TEACHER = {**MODEL, "num_layers": 3, "embed_dim": 48, "intermediate_dim": 80}
METRICS = ("class_loss", "kd_loss")
KD_LOSS = "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"
# The command line overrides single keys of a block of the setup.
FULL = (
    f"kd_loss._component_={KD_LOSS}",
    "kd_ratio=0.3",
    *block("teacher_model", "torchtune.models.qwen2.qwen2", **TEACHER),
    *cosine_after(3),
)
LORA = (*FULL, *LORA_MODEL, "~optimizer_in_bwd")
PLAIN = (
    "loss=torch.nn.CrossEntropyLoss",
    "kd_loss._component_=torchtune.modules.loss.ForwardKLLoss",
)


def write_teacher(setup: SmallSetup) -> tuple[str, ...]:
    """Write a teacher's checkpoint; return the overrides that read it."""
    folder = setup.folder / "teacher"
    folder.mkdir(exist_ok=True)
    # With a uniform prediction, the teacher would not matter.
    write_checkpoint(folder, TEACHER, output_scale=8)
    return checkpointer_of("teacher_checkpointer", folder)


class ExactForwardKL(nn.Module):
    """Forward KL divergence without the teacher's entropy, in the dtype of the logits. torchtune's
    loss computes in float32.
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

    def forward(self, student_logits, teacher_logits, labels):  # type: ignore[no-untyped-def]
        return super().forward(student_logits, teacher_logits, torch.zeros_like(labels))


class SumOfTokens(ExactForwardKL):
    """A sum over tokens, which a split would change."""

    def forward(self, student_logits, teacher_logits, labels):  # type: ignore[no-untyped-def]
        mean = super().forward(student_logits, teacher_logits, labels)
        return mean * (labels != self.ignore_index).sum()
