"""Preference pairs: the log probabilities of a chosen and a rejected answer are compared with those
of a frozen reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from omegaconf import DictConfig
from torch.nn.functional import pad
from torchtune import training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_dpo
from torchtune.rlhf import get_batch_log_probs

from adaptive_batch.errors import SettingError
from adaptive_batch.training import REFERENCE_VALUES, BatchForm

from .config_errors import as_dict, check_block, component_of, computing
from .model import SecondModel
from .task import Batch, Collate, Models, Row, Task

# What torchtune's losses of preferences take.
_ARGUMENTS = (
    "policy_chosen_logps",
    "policy_rejected_logps",
    "reference_chosen_logps",
    "reference_rejected_logps",
)

# The key of a packed batch under which it has the tokens of each answer, in order.
_ANSWER_LENGTHS = "answer_lengths"

# Parts of a sequence whose log probabilities are computed one by one; as many as torchtune's losses
# in chunks have.
_CHUNKS = 8


class PreferencePairs(Task):
    """A row is a pair of answers to one prompt; the loss is the mean over pairs.

    The losses are torchtune's: DPO (Rafailov et al., https://arxiv.org/abs/2305.18290, equation 7)
    and RSO (https://arxiv.org/abs/2309.06657).
    """

    fields = (
        ("chosen_input_ids", "chosen_labels"),
        ("rejected_input_ids", "rejected_labels"),
    )
    keys = ("ref_checkpointer", "reference_micro_batch_size")
    without_it = "there are no preferences to train on here, which `tune run adaptive_dpo` does"
    counts_rows = True
    metrics = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "log_probs/chosen",
        "log_probs/rejected",
        "logits/chosen",
        "logits/rejected",
    )
    num_reference_values = len(fields)
    ignore_index = CROSS_ENTROPY_IGNORE_IDX

    # --- rows

    def labelled(self, row: Row) -> Row:
        """Return the pair unchanged: its loss is defined without labels, too."""
        return row

    def collate_function(self, pad_id: int) -> Collate:
        """Return torchtune's function, which puts the chosen answers before the rejected ones."""

        def collate(rows: Sequence[Row]) -> Batch:
            tokens, labels = padded_collate_dpo(
                list(rows), padding_idx=pad_id, ignore_idx=self.ignore_index
            )
            return {"tokens": tokens, "labels": labels}

        return collate

    def count_labels(self, batch: Batch) -> torch.Tensor:
        """Return the pairs of a batch."""
        answers = batch[_ANSWER_LENGTHS] if _ANSWER_LENGTHS in batch else batch["tokens"]
        return torch.tensor(len(answers) // len(self.fields))

    def join(self, rows: Sequence[Row], form: BatchForm) -> tuple[Batch, list[int]]:
        """Return the chosen and then the rejected answers without padding, and the tokens of each,
        which are in the batch, too.
        """
        batch, lengths = super().join(rows, form)
        batch[_ANSWER_LENGTHS] = torch.tensor(lengths)
        return batch, lengths

    # --- model and loss

    def second_model(self, *, keeps_base: bool) -> SecondModel | None:
        """Return the reference if every weight trains; the reference of adapters is their base."""
        key = "ref_checkpointer"
        given = self.cfg.get(key)
        if not keeps_base and given is None:
            problem = "every weight is trained here, and the reference is a model of its own"
            remedy = "give the block of checkpointer, with the files of the reference"
            raise SettingError(key, None, f"{problem}; {remedy}")
        if keeps_base and given is not None:
            remedy = "the reference of adapters is their base, with adapters disabled; remove it"
            raise SettingError(key, component_of(given), remedy)
        if keeps_base:
            return None
        check_block(key, as_dict(self.cfg)[key])
        return SecondModel(self.cfg, checkpointer_key=key)

    def check(self, model: torch.nn.Module | None, second: torch.nn.Module | None = None) -> None:
        """Raise SettingError for a loss that is not of preference pairs, and for `collate_fn`."""
        cfg = self.cfg
        if not takes_pairs(self.loss_fn):
            remedy = (
                "not a loss of preference pairs; give torchtune.rlhf.loss.DPOLoss, or train next"
                " tokens by `tune run adaptive_full_finetune`"
            )
            raise SettingError("loss", cfg.loss.get("_component_"), remedy)
        _check_loss_computes(self.loss_fn, cfg)
        if cfg.get("collate_fn") is not None:
            remedy = "pairs are collated by torchtune.data.padded_collate_dpo; remove it"
            raise SettingError("collate_fn", cfg.collate_fn, remedy)

    def prepare(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Disable dropout in the two models whose log probabilities are compared."""
        if second is not None:
            training.disable_dropout(model)
            training.disable_dropout(second)

    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss over pairs; leave the metrics in the batch."""
        labels = batch.pop("labels")
        lengths = batch.pop(_ANSWER_LENGTHS, None)
        values = batch.pop(REFERENCE_VALUES, None)
        inputs = dict(batch)
        logits = models.logits(**inputs)
        log_probs = self._log_probs(logits, labels, lengths)
        batch["logits/chosen"], batch["logits/rejected"] = _mean_logits(logits.detach(), lengths)
        # They take more memory than all else, and the reference makes its own.
        del logits
        if values is None:
            with torch.no_grad():
                reference_log_probs = self._log_probs(
                    models.reference_logits(**inputs), labels, lengths
                )
        else:
            reference_log_probs = values.T.flatten()
        chosen, rejected = log_probs.chunk(2)
        losses, chosen_rewards, rejected_rewards = self.loss_fn(
            chosen, rejected, *reference_log_probs.chunk(2)
        )
        batch["rewards/chosen"] = chosen_rewards.mean()
        batch["rewards/rejected"] = rejected_rewards.mean()
        batch["rewards/accuracies"] = (chosen_rewards > rejected_rewards).float().mean()
        batch["rewards/margins"] = (chosen_rewards - rejected_rewards).mean()
        batch["log_probs/chosen"] = chosen.detach().mean()
        batch["log_probs/rejected"] = rejected.detach().mean()
        loss: torch.Tensor = losses.mean()
        return loss

    def token_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the negative log probability of all labels of single answers."""
        labels = batch.pop("labels")
        return -self._of_tokens(models.logits(**batch), labels).sum()

    @torch.no_grad()
    def reference_values(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the log probabilities of the chosen and the rejected answer of each pair."""
        logits = models.reference_logits(tokens=batch["tokens"])
        log_probs = self._of_tokens(logits, batch["labels"]).sum(-1)
        return log_probs.view(len(self.fields), -1).T

    def _log_probs(
        self, logits: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the log probability of each answer.

        Args:
            logits: `[answers, length, vocabulary]`, or `[1, tokens, vocabulary]` if packed.
            labels: `[answers, length]`, or `[1, tokens]` if packed.
            lengths: tokens of each answer `[answers]` if packed; else None.
        """
        if lengths is None:
            log_probs: torch.Tensor = get_batch_log_probs(logits, labels)
            return log_probs
        # The last token predicts nothing.
        return _sums_of_answers(pad(self._of_tokens(logits, labels)[0], (0, 1)), lengths)

    def _of_tokens(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the log probability of each label after the first `[answers, length - 1]`; 0
        without a label.

        The softmax runs chunk by chunk: without gradients, the softmax of all logits would take
        twice their memory. Sums have the bits of `get_batch_log_probs`.
        """
        labels = labels[:, 1:]
        is_label = labels != self.ignore_index
        targets = labels.masked_fill(~is_label, 0)[..., None]
        of_chunks = [
            chunk.log_softmax(-1).gather(-1, of_chunk)
            for chunk, of_chunk in zip(
                logits[:, :-1].chunk(_CHUNKS, dim=1), targets.chunk(_CHUNKS, dim=1), strict=True
            )
        ]
        of_tokens: torch.Tensor = torch.cat(of_chunks, dim=1).squeeze(-1) * is_label
        return of_tokens


def _sums_of_answers(of_tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tokens of each packed answer, in the dtype of `of_tokens`.

    Nothing here has a size of answers x longest answer, so that memory follows the tokens alone.
    """
    # It adds in the dtype that it is given, and halves would lose most of a long sum.
    exact = of_tokens.to(torch.promote_types(of_tokens.dtype, torch.float32))
    sums = torch.segment_reduce(exact, "sum", lengths=lengths, unsafe=True)
    return sums.to(of_tokens.dtype)


def _mean_logits(
    logits: torch.Tensor, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean of the logits of chosen and of rejected answers; see
    :meth:`PreferencePairs._log_probs` for the arguments.
    """
    if lengths is None:
        # Padding is part of these means, as in torchtune's recipes.
        chosen, rejected = logits.chunk(2)
        return chosen.mean(), rejected.mean()
    chosen, rejected = (_sums_of_answers(logits.mean(-1)[0], lengths) / lengths).chunk(2)
    return chosen.mean(), rejected.mean()


def takes_pairs(loss_fn: Any) -> bool:
    """Return whether a loss takes log probabilities of pairs, as torchtune's losses name them."""
    function = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        return tuple(signature(function).parameters) == _ARGUMENTS
    except (TypeError, ValueError):
        return False


def _check_loss_computes(loss_fn: Any, cfg: DictConfig) -> None:
    """Raise SettingError unless the loss returns a loss and two rewards for each pair."""
    zeros = torch.zeros(2)
    with computing("loss", cfg.loss):
        losses, chosen_rewards, rejected_rewards = loss_fn(zeros, zeros, zeros, zeros)
        shapes = [tuple(part.shape) for part in (losses, chosen_rewards, rejected_rewards)]
    if shapes != [(2,)] * 3:
        remedy = (
            f"of two pairs it returns shapes {shapes}; it must return losses, rewards of chosen and"
            " rewards of rejected answers, [pairs] each"
        )
        raise SettingError("loss", as_dict(cfg.loss), remedy)
