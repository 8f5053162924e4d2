"""The recipes' adapters, DPO and distillation on the tests' small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from support.runners import IGNORED
from torch import nn
from torchtune.modules import peft
from torchtune.rlhf.loss import DPOLoss

from adaptive_batch.torchtune import Distillation, PreferencePairs
from adaptive_batch.torchtune.model import FrozenModel
from adaptive_batch.training import RowLoss


def put_adapters(model: nn.Module, kind: str) -> None:
    """Replace each linear layer by torchtune's adapter and freeze all else. QLoRA's base has four
    bits and no bias.
    """
    make = peft.DoRALinear if kind == "DoRA" else peft.LoRALinear
    options: dict[str, Any] = {"rank": 4, "alpha": 8, "dropout": 0.1, "use_bias": True}
    if kind == "QLoRA":
        options |= {"use_bias": False, "quantize_base": True}
        options |= {"block_size": 64, "scaler_block_size": 32}
    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                adapted = make(linear.in_features, linear.out_features, **options)
                setattr(module, name, adapted.to(linear.weight))
                if kind == "DoRA":
                    adapted.initialize_dora_magnitude()
    peft.set_trainable_params(model, peft.get_adapter_params(model))


class LearnedTask:
    """DPO or distillation with its trained model and a frozen second model. Without a second one,
    the reference of DPO is the base of the adapters.
    """

    def __init__(self, task: str, model: nn.Module, second: nn.Module | None) -> None:
        self._reference = FrozenModel(model, second)
        self._model = model
        self.models = self._reference.models
        block = {"_component_": "torchtune.modules.loss.ForwardKLLoss"}
        keys = ("teacher_model", "teacher_checkpointer", "kd_loss")
        cfg = DictConfig(dict.fromkeys(keys, block))
        self._task: Any = Distillation(cfg, nn.CrossEntropyLoss(ignore_index=IGNORED))
        if task == "DPO":
            self._task = PreferencePairs(cfg, DPOLoss())
        self._task.prepare(model, second)

    @property
    def held(self) -> tuple[nn.Module, ...]:
        """The second model, if there is one."""
        second = self._reference.second
        return () if second is None else (second,)

    def collate(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows of tokens and labels, as pairs for DPO."""
        if self._task.counts_rows:
            rows = [self._pair(row) for row in rows]
        batch: dict[str, Any] = self._task.collate_function(0)(rows)
        return batch

    def mean_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = self._task.mean_loss(self, batch)
        return loss

    def logits(self, tokens: torch.Tensor) -> Any:
        return self._model(tokens)

    def reference_logits(self, **batch: torch.Tensor) -> Any:
        return self._reference.logits(**batch)

    def of_rows(self, loss: RowLoss, collate: Callable[[Sequence[Any]], Any]) -> RowLoss:
        """Return a loss with this task's collate function, label count and metrics; its mean loss
        stays.
        """
        task = self._task
        return replace(
            loss,
            collate=lambda rows, length: collate(rows),
            count_labels=task.count_labels,
            counts_rows=task.counts_rows,
            metrics=task.metrics,
            loss_of=task.loss_of,
        )

    @staticmethod
    def _pair(row: dict[str, Any]) -> dict[str, Any]:
        """Return a pair: a row as the chosen answer, its reversed tokens as the rejected one."""
        return {
            "chosen_input_ids": row["tokens"],
            "chosen_labels": row["labels"],
            "rejected_input_ids": row["tokens"][::-1],
            "rejected_labels": row["labels"],
        }
