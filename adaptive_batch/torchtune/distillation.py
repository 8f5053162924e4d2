"""Knowledge distillation: next tokens as the labels have them, and as a frozen teacher does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from omegaconf import DictConfig
from torch.overrides import TorchFunctionMode
from torchtune.modules.peft import get_adapter_params

from adaptive_batch._torch import PrivateNames
from adaptive_batch.errors import SettingError

from .config_errors import as_dict, check_block, component_of, computing, instantiate, missing
from .model import SecondModel, num_token_embeddings
from .settings import fraction
from .task import Batch, Models, NextTokens, flat, takes_chunks

private = PrivateNames("distillation")


class Distillation(NextTokens):
    """Rows of next tokens with the loss ``(1 - kd_ratio) x class_loss + kd_ratio x kd_loss``.

    Both losses are means over label tokens. `kd_loss` is torchtune's forward, reverse or symmetric
    Kullback-Leibler divergence of student and teacher (Hinton et al.,
    https://arxiv.org/abs/1503.02531; Ko et al., https://arxiv.org/abs/2402.03898), without the
    teacher's constant entropy.

    Attributes:
        kd_loss_fn: divergence of student and teacher.
        kd_ratio: share of `kd_loss`, 0 to 1.

    Raises:
        SettingError: a key of distillation is missing, or cannot be used.
    """

    keys = ("teacher_model", "teacher_checkpointer", "kd_loss", "kd_ratio")
    without_it = "nothing is distilled here, which `tune run adaptive_distill` does"
    metrics = ("class_loss", "kd_loss")

    def __init__(self, cfg: DictConfig, loss_fn: Any) -> None:
        super().__init__(cfg, loss_fn)
        given = as_dict(cfg)
        for key in ("teacher_model", "teacher_checkpointer", "kd_loss"):
            if given.get(key) is None:
                raise missing(key)
            check_block(key, given[key])
        ratio = given.get("kd_ratio")
        self.kd_ratio = 0.5 if ratio is None else ratio
        fraction("kd_ratio", self.kd_ratio)
        self.kd_loss_fn = instantiate("kd_loss", cfg.kd_loss)

    # --- model and loss

    def second_model(self, *, keeps_base: bool) -> SecondModel:
        """Return the teacher."""
        return SecondModel(self.cfg, key="teacher_model", checkpointer_key="teacher_checkpointer")

    @property
    def losses(self) -> tuple[Any, ...]:
        """The losses that are compiled with the model."""
        return (self.loss_fn, self.kd_loss_fn)

    def check(self, model: torch.nn.Module | None, second: torch.nn.Module | None = None) -> None:
        """Raise SettingError for losses that do not fit together, and for an unfit teacher."""
        super().check(model)
        size = self.cfg.get("reference_micro_batch_size")
        if size is not None:
            remedy = (
                "the loss takes the teacher's logits of every token, which are larger than all else"
                " that the teacher makes: they would be kept from its micro-batch until training's;"
                " remove it"
            )
            raise SettingError("reference_micro_batch_size", size, remedy)
        if model is None:
            self._check_chunks()
            self._check_kd_loss()
        elif second is not None:
            self._check_teacher(model, second)

    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss over label tokens; leave both parts of it in the batch."""
        labels = batch.pop("labels")
        logits = flat(models.logits(**batch))
        teacher_logits = flat(models.reference_logits(**batch))
        labels = self.shifted(labels, logits)
        with _HasLabels() if isinstance(labels, private.FakeTensor) else nullcontext():
            kd_loss = self.kd_loss_fn(logits, teacher_logits, labels)
        class_loss = self.loss_fn(logits, labels)
        batch["class_loss"] = class_loss.detach()
        batch["kd_loss"] = kd_loss.detach()
        return self.loss_of(class_loss=class_loss, kd_loss=kd_loss)

    def loss_of(self, **metrics: torch.Tensor) -> torch.Tensor:
        """Return the loss by its parts, of a batch or of a step."""
        class_loss = metrics["class_loss"]
        return (1 - self.kd_ratio) * class_loss + self.kd_ratio * metrics["kd_loss"]

    # --- what is refused

    def _check_chunks(self) -> None:
        """Raise SettingError if the two losses take different numbers of chunks."""
        chunks = getattr(self.kd_loss_fn, "num_output_chunks", None)
        expected = self.loss_fn.num_output_chunks if takes_chunks(self.loss_fn) else None
        if chunks != expected:
            remedy = (
                f"its num_output_chunks is {chunks}, and that of loss is {expected}; for a loss"
                " without chunks give torchtune.modules.loss.ForwardKLLoss, for one with chunks"
                " ForwardKLWithChunkedOutputLoss with the same number"
            )
            raise SettingError("kd_loss", component_of(self.cfg.kd_loss), remedy)

    def _check_kd_loss(self) -> None:
        """Raise SettingError for a loss that fails, ignores another label, or is not the mean over
        label tokens, so that it would depend on the split of a step.
        """
        ignored = getattr(self.kd_loss_fn, "ignore_index", self.ignore_index)
        if ignored != self.ignore_index:
            remedy = f"loss ignores the label {self.ignore_index}, and both must; give that"
            raise SettingError("kd_loss.ignore_index", ignored, remedy)
        num_chunks = getattr(self.kd_loss_fn, "num_output_chunks", None)
        num_tokens = 3 * (num_chunks or 1)
        logits = torch.randn(2, 1, num_tokens, 8, generator=torch.Generator().manual_seed(0))
        label = 1 if self.ignore_index != 1 else 2

        def loss_of(*labelled: int) -> torch.Tensor:
            labels = torch.full((1, num_tokens), self.ignore_index)
            labels[0, list(labelled)] = label
            if num_chunks is None:
                return torch.as_tensor(self.kd_loss_fn(*logits[:, 0], labels[0]))
            chunks = [list(tensor.chunk(num_chunks, dim=1)) for tensor in logits]
            return torch.as_tensor(self.kd_loss_fn(*chunks, labels))

        last = num_tokens - 1
        with computing("kd_loss", self.cfg.kd_loss):
            whole = loss_of(0, last)
            # The logits of a token without a label must not count.
            logits[:, :, 1] = 0
            mean = (loss_of(0) + loss_of(last)) / 2
        if whole.dim() or not torch.allclose(whole, mean, rtol=1e-4):
            remedy = (
                f"for two label tokens it is {whole.tolist()}, and the mean of both is"
                f" {mean.tolist()}: it is not the mean over tokens with a label, so it would depend"
                " on how a step is split; give torchtune.modules.loss.ForwardKLLoss or one like it"
            )
            raise SettingError("kd_loss", as_dict(self.cfg.kd_loss), remedy)

    def _check_teacher(self, student: torch.nn.Module, teacher: torch.nn.Module) -> None:
        """Raise SettingError for a teacher with adapters, with another vocabulary, or without
        chunks.
        """
        component = component_of(self.cfg.teacher_model)
        if get_adapter_params(teacher):
            remedy = (
                "it has adapters; give the model without adapters, and a checkpoint into which they"
                " are merged"
            )
            raise SettingError("teacher_model", component, remedy)
        sizes = [num_token_embeddings(model) for model in (student, teacher)]
        if None not in sizes and sizes[0] != sizes[1]:
            remedy = (
                f"it has {sizes[1]} token embeddings, and the student {sizes[0]}; give a teacher of"
                " the student's family with as many"
            )
            raise SettingError("teacher_model", component, remedy)
        if takes_chunks(self.loss_fn) and not hasattr(teacher, "set_num_output_chunks"):
            remedy = (
                "it has no set_num_output_chunks, by which it would return chunks; give"
                " torch.nn.CrossEntropyLoss as loss, and torchtune.modules.loss.ForwardKLLoss as"
                " kd_loss"
            )
            raise SettingError("teacher_model", component, remedy)


class _HasLabels(TorchFunctionMode):
    """Mode for estimates: torchtune's losses ask whether a batch has no label, and fake tensors
    have no values, so the answer is no.
    """

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        arguments: Any = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.__bool__:
            return False
        return function(*arguments, **(named or {}))
