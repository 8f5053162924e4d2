"""The recipes on the small setup: names of ours and of torchtune's, keys, files and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from support.cli import (
    MODEL,
    OURS,
    STOCK,
    STOCK_ON_RANKS,
    Finished,
    SmallSetup,
    block,
    checkpointer_of,
    cosine_after,
    make_setup,
    same_weights,
    write_checkpoint,
)

LORA_MODEL = (
    "model._component_=torchtune.models.qwen2.lora_qwen2",
    "model.lora_attn_modules=[q_proj,v_proj,output_proj]",
    "model.apply_lora_to_mlp=True",
    "model.lora_rank=4",
    "model.lora_alpha=8",
)
LORA = (*LORA_MODEL, *cosine_after(3), "~optimizer_in_bwd")
# Further keys of adapters.
KINDS = {
    "LoRA": (),
    "DoRA": ("model.use_dora=True",),
    "QLoRA": ("model.quantize_base=True", "dtype=bf16"),
}
# The command line overrides single keys of a block of the setup.
DPO = (
    "loss=torchtune.rlhf.loss.DPOLoss",
    "dataset._component_=torchtune.datasets.preference_dataset",
    "~dataset.packed",
    "~dataset.column_map",
    "optimizer.lr=1e-2",
    *cosine_after(3),
)
TEACHER = {**MODEL, "num_layers": 3, "embed_dim": 48, "intermediate_dim": 80}
KD = (
    "kd_loss._component_=torchtune.modules.loss.ForwardKLWithChunkedOutputLoss",
    "kd_ratio=0.3",
    *block("teacher_model", "torchtune.models.qwen2.qwen2", **TEACHER),
)
PLAIN_KD = (
    "loss=torch.nn.CrossEntropyLoss",
    "kd_loss._component_=torchtune.modules.loss.ForwardKLLoss",
)


def write_pairs(setup: SmallSetup) -> tuple[str, ...]:
    """Write pairs of the setup's rows; return the overrides that read them. The chosen answer is a
    function's docstring, the rejected one that of another function.
    """
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


def write_pairs_with_reference(setup: SmallSetup) -> tuple[str, ...]:
    """Write pairs; the setup's base is the reference of full fine-tuning."""
    return (*write_pairs(setup), *checkpointer_of("ref_checkpointer", setup.base))


def write_teacher(setup: SmallSetup) -> tuple[str, ...]:
    """Write a teacher's checkpoint; return the overrides that read it."""
    folder = setup.folder / "teacher"
    folder.mkdir(exist_ok=True)
    # With a uniform prediction, the teacher would not matter.
    write_checkpoint(folder, TEACHER, output_scale=8)
    return checkpointer_of("teacher_checkpointer", folder)


@dataclass(frozen=True)
class Recipe:
    """One of our recipes, and torchtune's for one device and for ranks.

    Attributes:
        ours, stock, stock_on_ranks: names.
        keys: overrides of the setup.
        metrics: names of the metrics that it logs in addition to the loss.
        write_files: function that writes files, and returns the overrides that read them.
    """

    ours: str
    stock: str
    stock_on_ranks: str
    keys: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    write_files: Callable[[SmallSetup], tuple[str, ...]] = lambda setup: ()

    def overrides(self, setup: SmallSetup) -> tuple[str, ...]:
        """Write the files, and return all overrides."""
        return (*self.keys, *self.write_files(setup))


FULL = Recipe(OURS, STOCK, STOCK_ON_RANKS)
ADAPTERS = Recipe(
    "adaptive_lora_finetune", "lora_finetune_single_device", "lora_finetune_distributed", LORA
)
REWARDS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("log_probs/chosen", "log_probs/rejected", "logits/chosen", "logits/rejected"),
)
PAIRS = Recipe(
    *("adaptive_dpo", "lora_dpo_single_device", "lora_dpo_distributed"),
    *((*DPO, *LORA_MODEL, "~optimizer_in_bwd"), REWARDS, write_pairs),
)
FULL_PAIRS = Recipe(
    "adaptive_dpo", "", "full_dpo_distributed", DPO, REWARDS, write_pairs_with_reference
)
CORRECTED = "support/corrected_distillation.py"
DISTILLATION = Recipe(
    *("adaptive_distill", CORRECTED, CORRECTED),
    *((*KD, *LORA), ("class_loss", "kd_loss"), write_teacher),
)
RECIPES = {
    "full": FULL,
    "adapters": ADAPTERS,
    "pairs": PAIRS,
    "pairs, full": FULL_PAIRS,
    "distillation": DISTILLATION,
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
    """Return whether two runs saved the same adapters, if any, and the same weights.

    PEFT's file is not compared: torchtune writes its rows in an order that PEFT does not read.
    """

    def saved(run: Finished) -> dict[str, torch.Tensor]:
        merged = {
            name: tensor
            for name, tensor in run.weights(epoch).items()
            if not name.startswith("base_model.")
        }
        has_adapters = (run.output_dir / f"epoch_{epoch}" / "adapter_model.pt").exists()
        return merged | (adapters(run, epoch) if has_adapters else {})

    return same_weights(saved(one), saved(other))
