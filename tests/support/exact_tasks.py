"""DPO and distillation in float64, with gradients of all rows at once in plain torch to compare
them with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchtune
from omegaconf import DictConfig
from support.model_families import Combination
from support.runners import report_of, set_limit, sizer_of
from support.sharded_model import Row, make_rows, whole_gradients
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torchtune.data import padded_collate_dpo
from torchtune.modules.peft import LoRALinear

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.torchtune import Data, Job, Settings, Trainer
from adaptive_batch.torchtune.checks import TO_PLAN
from adaptive_batch.torchtune.model import builder_of
from adaptive_batch.training import StepResult

LORA = {
    "_component_": "torchtune.models.qwen2.lora_qwen2",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}
KINDS = ("LoRA", "full")
EXACT_POLICY = {"_component_": "support.exact_tasks.ExactPolicy"}
RATIO = 0.3
# Maximum difference of float64 sums in different orders.
EXACT = 1e-12


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


class Wired:
    """Task and step of a configuration with exact models; FSDP2 shards them on several ranks.

    Args:
        cfg: configuration.
        rows: rows of the dataset.
        limit: limit of a micro-batch.
        reference_limit: limit of a separate pass of the reference; None without one.
    """

    def __init__(
        self,
        cfg: DictConfig,
        rows: Sequence[Any],
        *,
        limit: MicroBatchLimit,
        reference_limit: MicroBatchLimit | None = None,
    ) -> None:
        if reference_limit is not None:
            cfg.reference_micro_batch_size = 1
        builder = builder_of(cfg)
        cfg.model = {**EXACT_POLICY, "adapters": "lora_rank" in cfg.model}
        self.job = job = Job(cfg, Settings.from_config(cfg), builder, needs=TO_PLAN)
        self.data = Data(job, rows, packed=False)
        model = self._filled(cfg.model, job.dtype, seed=1)
        job.builder.freeze(model)
        second = None
        if job.second is not None:
            second = self._filled(job.second.cfg.model, job.dtype, seed=2)
        if distributed.world_size() > 1:
            for part in filter(None, (model, second)):
                fully_shard(part)
        sizer = sizer_of(limit, layout=self.data.configured_layout, memory=job.memory)
        self.trainer = Trainer(job, self.data, model, sizer, second=second)
        if self.trainer.reference_sizer is not None and reference_limit is not None:
            set_limit(self.trainer.reference_sizer, reference_limit)
        self.model = model

    @staticmethod
    def _filled(block: DictConfig, dtype: torch.dtype, *, seed: int) -> nn.Module:
        with torch.device("cpu"), torchtune.training.set_default_dtype(dtype):
            model: nn.Module = torchtune.config.instantiate(block)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.2 * drawn)
        return model

    def run(self, rows: Sequence[Any]) -> StepResult:
        """Compute the gradients of a step of some rows."""
        self.model.zero_grad()
        return self.trainer.engine.run(rows, report_of(rows))

    def gradients(self) -> dict[str, torch.Tensor]:
        return whole_gradients(self.model)


# --- preference pairs


def config_of_pairs(kind: str, **keys: Any) -> DictConfig:
    """Return the configuration of a small model with a DPO loss."""
    cfg = Combination("qwen2", 64).config()
    cfg.loss = {"_component_": "torchtune.rlhf.loss.DPOLoss"}
    if kind == "LoRA":
        cfg.model.update(LORA)
    else:
        cfg.ref_checkpointer = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    cfg.update(keys)
    return cfg


def pair(lengths: tuple[int, int], generator: torch.Generator) -> dict[str, list[int]]:
    """Return a pair of answers of these lengths to a prompt of three tokens."""
    prompt = torch.randint(1, 60, (3,), generator=generator).tolist()
    row = {}
    for name, length in zip(("chosen", "rejected"), lengths, strict=True):
        answer = torch.randint(1, 60, (length - 3,), generator=generator).tolist()
        row[f"{name}_input_ids"] = prompt + answer
        row[f"{name}_labels"] = [-100] * 3 + answer
    return row


def pairs(number: int, *, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return pairs of answers of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 30, (number, 2), generator=generator).tolist()
    return [pair((chosen, rejected), generator) for chosen, rejected in lengths]


def job_on_pairs(kind: str, rows: Sequence[Any], *, layout: str | None = None, **how: Any) -> Wired:
    """Return a float64 job on pairs."""
    return Wired(config_of_pairs(kind, dtype="fp64", micro_batch_layout=layout), rows, **how)


def of_all_pairs_at_once(
    wired: Wired, rows: Sequence[Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients by equation 7 of the DPO paper."""
    wired.model.zero_grad()
    tokens, labels = padded_collate_dpo(list(rows))

    def log_probs(logits: torch.Tensor) -> torch.Tensor:
        targets = labels[:, 1:]
        each = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (each * (targets != -100)).sum(-1)

    with torch.no_grad():
        reference = log_probs(wired.trainer.reference_logits(tokens=tokens))
    ratios = log_probs(wired.model(tokens)) - reference
    chosen, rejected = ratios.split(len(rows))
    loss = -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()
    return loss.detach(), wired.gradients()


# --- distillation


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


def config_of_distillation(kind: str, **keys: Any) -> DictConfig:
    """Return the configuration of a small student and a teacher of another width."""
    cfg = Combination("qwen2", 64).config()
    cfg.teacher_model = {**cfg.model, "embed_dim": 32}
    cfg.teacher_checkpointer = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    cfg.kd_loss = {"_component_": "torchtune.modules.loss.ForwardKLLoss"}
    cfg.kd_ratio = RATIO
    if kind == "LoRA":
        cfg.model.update(LORA)
    cfg.update(keys)
    return cfg


def rows_of(number: int, *, seed: int = 0) -> list[Row]:
    """Return rows of different lengths; row 1 has no labels."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 40, (number,), generator=generator).tolist()
    return make_rows(lengths, unlabelled=[1], seed=seed)


def distilling(kind: str, rows: Sequence[Any], *, layout: str | None = None, **how: Any) -> Wired:
    """Return a float64 job of a student and a wider teacher."""
    kd_loss = {"_component_": "support.exact_tasks.ExactForwardKL"}
    keys = {"dtype": "fp64", "kd_loss": kd_loss, "micro_batch_layout": layout}
    cfg = config_of_distillation(kind, **keys)
    cfg.teacher_model = {**EXACT_POLICY, "adapters": False, "width": 32}
    return Wired(cfg, rows, **how)


def of_all_tokens_at_once(
    wired: Wired, rows: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return cross-entropy, divergence and gradients, computed row by row without padding."""
    wired.model.zero_grad()
    sums = torch.zeros(2, dtype=torch.float64)
    count = 0
    for row in rows:
        tokens = torch.tensor([row["tokens"]])
        labels = torch.tensor(row["labels"][1:])
        student = wired.model(tokens)[0, :-1].log_softmax(-1)
        with torch.no_grad():
            teacher = wired.trainer.reference_logits(tokens=tokens)[0, :-1].softmax(-1)
        of_labels = student.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        losses = torch.stack([-of_labels, -(teacher * student).sum(-1)])
        sums = sums + (losses * (labels != -100)).sum(1)
        count += int((labels != -100).sum())
    class_loss, kd_loss = sums / count
    # The step divides by the tokens in float32, as torchtune does.
    scale = 1 / torch.tensor(count)
    (((1 - RATIO) * sums[0] + RATIO * sums[1]) * scale).backward()
    return class_loss.detach(), kd_loss.detach(), wired.gradients()
