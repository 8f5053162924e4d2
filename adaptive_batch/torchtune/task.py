"""Tasks: the layout of a row, its collation and its loss. Next tokens are the usual task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Protocol, cast

import torch
from omegaconf import DictConfig
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torchtune import training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_dpo
from torchtune.rlhf import get_batch_log_probs

from adaptive_batch._torch import PrivateNames
from adaptive_batch.data import lengthened
from adaptive_batch.errors import SettingError
from adaptive_batch.training import REFERENCE_VALUES, count_shifted_labels, pack_rows

from .configuration import (
    as_dict,
    check_block,
    component_of,
    instantiate,
    load_function,
    refusing,
)
from .model import SecondModel, num_token_embeddings
from .settings import fraction

Row = Any
Batch = dict[str, Any]
Collate = Callable[[Sequence[Row]], Batch]
# Number of classes of the random logits that losses are checked with.
_CLASSES = 8


class Models(Protocol):
    """Models that a loss calls."""

    def logits(self, **batch: Any) -> Any:
        """Return the logits of the trained model; a list if it returns chunks."""

    def reference_logits(self, **batch: Any) -> Any:
        """Return the logits of the frozen reference model."""


class Task(ABC):
    """Measurement, collation and loss of the rows of a task.

    A row has one or more sequences. Its tokens count as if all sequences were padded to the
    longest, in packed micro-batches too.

    Args:
        cfg: configuration of the recipe.
        loss_fn: loss of the recipe.

    Attributes:
        fields: keys of a row with the tokens and the labels of each sequence.
        keys: keys of the configuration that only this task has.
        recipe_hint: reason to refuse `keys` in runs of other tasks; it names this task's recipe.
        counts_rows, metrics: see :class:`RowLoss`.
        num_reference_values: numbers of a row that the loss needs from a reference, which may then
            run in separate micro-batches; 0 if the loss needs more, or has no reference.
        ignore_index: label of tokens that are not trained on.
        losses: losses that are compiled with the model.
    """

    fields: ClassVar[tuple[tuple[str, str], ...]]
    keys: ClassVar[tuple[str, ...]] = ()
    recipe_hint: ClassVar[str] = ""
    counts_rows: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()
    num_reference_values: ClassVar[int] = 0
    ignore_index: int

    def __init__(self, cfg: DictConfig, loss_fn: Any) -> None:
        self.cfg = cfg
        self.loss_fn = loss_fn
        self.losses: tuple[Any, ...] = (loss_fn,)

    # --- rows

    def length(self, row: Row) -> int:
        """Return the tokens of a collated row, including padding to its longest sequence."""
        return len(self.fields) * max(len(row[tokens]) for tokens, _ in self.fields)

    def num_real_tokens(self, row: Row) -> int:
        """Return the tokens of a row, padding excluded."""
        return sum(len(row[tokens]) for tokens, _ in self.fields)

    def sequences(self, row: Row) -> Iterator[tuple[Any, Any]]:
        """Yield tokens and labels of each sequence of a row; None for missing ones."""
        for tokens, labels in self.fields:
            yield row.get(tokens), row.get(labels)

    def sequence_length(self, length: int) -> int:
        """Return the length of one sequence of a row: its `length` tokens are divided among one
        sequence for each field, rounded up.
        """
        return -(-length // len(self.fields))

    def lengthened(self, rows: Sequence[Row], length: int, *, pad_id: int) -> Sequence[Row]:
        """Return the rows, one of them padded, so that collation pads all to `length` tokens.

        Raises:
            SettingError: rows have no labels, so that padding would be labelled too.
        """
        if length <= max(map(self.length, rows)):
            return rows
        # Rows without labels get them from the collate function, which would label the padding too.
        if any(labels is None for row in rows for _, labels in self.sequences(row)):
            remedy = (
                "rows are padded to one length before it makes their labels; have the dataset give"
                " each row its labels"
            )
            raise SettingError("collate_fn", self.cfg.get("collate_fn"), remedy)
        return lengthened(
            rows,
            self.sequence_length(length),
            pad_id=pad_id,
            ignore_index=self.ignore_index,
            fields=self.fields,
        )

    def resized(self, row: Row, length: int) -> Row:
        """Return a row of text, with each of its lists cut or repeated to the tokens that a
        sequence has in a row of `length` tokens.
        """
        num_tokens = self.sequence_length(length)
        return {
            key: (list(value) * (num_tokens // len(value) + 1))[:num_tokens]
            for key, value in row.items()
        }

    def filled(self, row: Row) -> Row:
        """Return a row with all sequences as long as its longest: the row of its length that needs
        the most memory, also in layouts without padding.
        """
        if len(self.fields) == 1:
            return row
        lists = {key: row[key] for pair in self.fields for key in pair}
        return {**row, **self.resized(lists, self.length(row))}

    def synthetic_row(self, length: int, *, packed: bool = False) -> Row:
        """Return a row of `length` tokens, each with a label; a packed one has the keys of
        torchtune's packed rows.
        """
        num_tokens = self.sequence_length(length)
        row: Row = {key: [0] * num_tokens for pair in self.fields for key in pair}
        if packed:
            row = {key: torch.tensor(values) for key, values in row.items()}
            row |= {"input_pos": torch.arange(length), "seq_lens": torch.tensor([length])}
        return row

    def labelled(self, row: Row) -> Row:
        """Return a row whose loss is defined. A rank without a row runs it."""
        return row

    # --- batches

    def rows_of_sequences(self, rows: Sequence[Row]) -> list[Row]:
        """Return each sequence of rows as a row of ``tokens`` and ``labels``: the first sequences
        of all rows, then the second ones.
        """
        return [
            {"tokens": row[tokens], "labels": row[labels]}
            for tokens, labels in self.fields
            for row in rows
        ]

    def pack(self, rows: Sequence[Row]) -> tuple[Batch, list[int]]:
        """Return one batch of the sequences of rows on the host, without padding, and the tokens of
        each sequence.
        """
        sequences = self.rows_of_sequences(rows)
        batch = pack_rows(sequences, ignore_index=self.ignore_index)
        return batch, [len(sequence["tokens"]) for sequence in sequences]

    @abstractmethod
    def collate_function(self, pad_id: int) -> Collate:
        """Return the function that collates rows to ``tokens`` and ``labels``
        `[rows x sequences, length]`.

        Raises:
            SettingError: the configured function cannot be used.
        """

    @abstractmethod
    def count_labels(self, batch: Batch) -> torch.Tensor:
        """Return the number of labels or rows that the loss is a mean over, as a scalar tensor."""

    # --- model and loss

    def second_model(self, *, has_frozen_base: bool) -> SecondModel | None:
        """Return the frozen second model of the task, or None.

        Args:
            has_frozen_base: whether adapters train on a frozen base.

        Raises:
            SettingError: a key of the second model is missing, or given without one.
        """
        return None

    @abstractmethod
    def check_loss(self) -> None:
        """Raise SettingError for a loss of another task, and for keys that contradict the task."""

    def check_models(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Raise SettingError if the loss takes chunks and a model on the meta device cannot return
        chunks.
        """
        for key, each in (("model", model), ("teacher_model", second)):
            cannot_chunk = each is not None and not hasattr(each, "set_num_output_chunks")
            if takes_chunks(self.loss_fn) and cannot_chunk:
                remedy = (
                    f"{component_of(self.cfg[key])} has no set_num_output_chunks, so it cannot"
                    " return chunks; give a loss without chunks, such as torch.nn.CrossEntropyLoss"
                )
                raise SettingError("loss", component_of(self.cfg.loss), remedy)

    @abstractmethod
    def prepare(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Set up the models for the loss."""

    @abstractmethod
    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch on the device. It may remove entries of the batch, and
        adds each of `metrics`.
        """

    @abstractmethod
    def token_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of all labels in a batch of single sequences on the device,
        to compare packed with padded batches.
        """

    def reference_values(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the reference's values of each row, without gradients
        `[rows, num_reference_values]`.

        Args:
            models: models that the loss calls.
            batch: batch on the device; its entries may be removed.
        """
        raise AssertionError(f"{type(self).__name__} takes no numbers of rows from a reference")

    def loss_of(self, **metrics: torch.Tensor) -> torch.Tensor | None:
        """Return the loss of a step from the means of `metrics`; None if unknown."""
        return None


class NextTokens(Task):
    """Next-token prediction: each token of a sequence predicts the next label."""

    fields = (("tokens", "labels"),)

    def __init__(self, cfg: DictConfig, loss_fn: Any) -> None:
        super().__init__(cfg, loss_fn)
        # A loss without one is refused by :meth:`check_loss`.
        self.ignore_index = getattr(loss_fn, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)

    def labelled(self, row: Row) -> Row:
        """Return the row with every token labelled."""
        tokens = row["tokens"]
        # The loss shifts labels by one, so a single token would have no label.
        if len(tokens) == 1:
            tokens = [*tokens] * 2
        return {**row, "tokens": tokens, "labels": tokens}

    def collate_function(self, pad_id: int) -> Collate:
        """Return the configured function; torchtune's by default."""
        configured = self.cfg.get("collate_fn")
        name = "torchtune.data.padded_collate_sft" if configured is None else configured
        collate = load_function(name, key="collate_fn")
        with refusing("collate_fn", configured, "give torchtune.data.padded_collate_sft"):
            # Raises TypeError if the function does not take these arguments.
            signature(collate).bind([], padding_idx=pad_id, ignore_idx=self.ignore_index)
        return partial(collate, padding_idx=pad_id, ignore_idx=self.ignore_index)

    def count_labels(self, batch: Batch) -> torch.Tensor:
        """Return the number of label tokens after the shift by one."""
        return count_shifted_labels(batch, self.ignore_index)

    def check_loss(self) -> None:
        """Raise SettingError for a loss of another task."""
        if not isinstance(getattr(self.loss_fn, "ignore_index", None), int):
            remedy = (
                "not a next-token loss: it has no ignore_index (preferences are trained on by `tune"
                " run adaptive_dpo`, and rewards are not); give"
                " torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss"
            )
            raise SettingError("loss", component_of(self.cfg.loss), remedy)
        # It accepts logits without an error.
        if isinstance(self.loss_fn, torch.nn.NLLLoss):
            remedy = "it takes log probabilities, and the model returns logits"
            raise SettingError(
                "loss", component_of(self.cfg.loss), f"{remedy}; give torch.nn.CrossEntropyLoss"
            )
        # User-defined losses are not computed: they may take other inputs.
        if type(self.loss_fn).__module__.startswith(("torch.nn.", "torchtune.")):
            self._check_mean("loss", self.loss_fn, num_models=1)

    def _check_mean(self, key: str, loss_fn: Any, *, num_models: int) -> None:
        """Compute a loss of random logits. Raise SettingError if it fails, or if it is not the mean
        over label tokens, so that it would depend on the split of a step.

        Args:
            key: key of the loss.
            loss_fn: loss of the logits of all models and of labels.
            num_models: number of models whose logits the loss takes.
        """
        block = as_dict(self.cfg[key])
        problem = "it cannot be computed from logits in the chunks of loss"
        with refusing(key, block, "check its arguments", problem=problem):
            num_chunks = self.loss_fn.num_output_chunks if takes_chunks(self.loss_fn) else 1
            # With chunks, the first and the last token are in different ones. A token between them
            # has no label.
            num_tokens = 3 * num_chunks
            generator = torch.Generator().manual_seed(0)
            logits = torch.randn(num_models, 1, num_tokens, _CLASSES, generator=generator)
            label = 1 if self.ignore_index != 1 else 2

            def loss_with_labels_at(*positions: int) -> torch.Tensor:
                labels = torch.full((1, num_tokens), self.ignore_index)
                labels[0, list(positions)] = label
                if not takes_chunks(self.loss_fn):
                    return torch.as_tensor(loss_fn(*logits[:, 0], labels[0]))
                chunks = [list(tensor.chunk(num_chunks, dim=1)) for tensor in logits]
                return torch.as_tensor(loss_fn(*chunks, labels))

            last = num_tokens - 1
            loss_of_both = loss_with_labels_at(0, last)
            # Change the logits of a token without a label: it must not count.
            logits[:, :, 1] = 0
            mean = (loss_with_labels_at(0) + loss_with_labels_at(last)) / 2
        if loss_of_both.dim() or not torch.allclose(loss_of_both, mean, rtol=1e-4):
            remedy = (
                f"for two label tokens it is {loss_of_both.tolist()}, and the mean of both is"
                f" {mean.tolist()}: it is not the mean over tokens with a label, so it would depend"
                " on how a step is split; give a loss of torchtune, or reduction=mean"
            )
            raise SettingError(key, block, remedy)

    def prepare(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Set the number of chunks that the models return if the loss takes chunks of logits."""
        if not takes_chunks(self.loss_fn):
            return
        for each in (model, second):
            if each is not None:
                cast(Any, each).set_num_output_chunks(self.loss_fn.num_output_chunks)

    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss over label tokens; position `i` predicts the label at `i + 1`."""
        labels = batch.pop("labels")
        logits = flat(models.logits(**batch))
        # The same name frees the labels that are not shifted.
        labels = self.shifted(labels, logits)
        loss: torch.Tensor = self.loss_fn(logits, labels)
        return loss

    def token_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of all labels of a batch."""
        count = self.count_labels(batch)
        return self.mean_loss(models, batch) * count

    def shifted(self, labels: torch.Tensor, logits: Any) -> torch.Tensor:
        """Return the label that each position predicts, in the shape of :func:`flat` logits."""
        # The last position predicts nothing.
        ignored = labels.new_full((labels.shape[0], 1), self.ignore_index)
        next_labels = torch.hstack((labels[..., 1:], ignored))
        return next_labels if isinstance(logits, list) else next_labels.reshape(-1)


def flat(logits: Any) -> Any:
    """Return logits as `[rows x length, vocabulary]`; chunks of logits are returned unchanged."""
    if isinstance(logits, list):
        return logits
    return logits.reshape(-1, logits.size(-1))


def takes_chunks(loss_fn: Any) -> bool:
    """Return whether a loss takes logits in chunks."""
    return type(loss_fn).__name__ == "CEWithChunkedOutputLoss"


# --- preference pairs

# Arguments of torchtune's preference losses.
_PAIR_ARGUMENTS = (
    "policy_chosen_logps",
    "policy_rejected_logps",
    "reference_chosen_logps",
    "reference_rejected_logps",
)

# Key of the token counts of each answer in a packed batch.
_ANSWER_LENGTHS = "answer_lengths"

# Number of chunks of a sequence whose softmax is computed one by one, as in torchtune's chunked
# losses.
_SOFTMAX_CHUNKS = 8


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
    recipe_hint = "only `tune run adaptive_dpo` trains on preferences"
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

    def collate_function(self, pad_id: int) -> Collate:
        """Return torchtune's function, which puts the chosen answers before the rejected ones."""

        def collate(rows: Sequence[Row]) -> Batch:
            tokens, labels = padded_collate_dpo(
                list(rows), padding_idx=pad_id, ignore_idx=self.ignore_index
            )
            return {"tokens": tokens, "labels": labels}

        return collate

    def count_labels(self, batch: Batch) -> torch.Tensor:
        """Return the number of pairs in a batch."""
        # The tokens of a packed batch are a single sequence.
        per_answer = batch[_ANSWER_LENGTHS] if _ANSWER_LENGTHS in batch else batch["tokens"]
        return torch.tensor(len(per_answer) // len(self.fields))

    def pack(self, rows: Sequence[Row]) -> tuple[Batch, list[int]]:
        """Pack the chosen and then the rejected answers; return the batch and the tokens of each
        answer, which the batch also contains.
        """
        batch, lengths = super().pack(rows)
        batch[_ANSWER_LENGTHS] = torch.tensor(lengths)
        return batch, lengths

    # --- model and loss

    def second_model(self, *, has_frozen_base: bool) -> SecondModel | None:
        """Return the reference model for full fine-tuning; None for adapters, whose reference is
        their base.
        """
        key = "ref_checkpointer"
        block = as_dict(self.cfg).get(key)
        if not has_frozen_base:
            check_block(key, block)
            return SecondModel(self.cfg, checkpointer_key=key)
        if block is not None:
            remedy = "the reference of adapters is their base, with adapters disabled; remove it"
            raise SettingError(key, component_of(block), remedy)
        return None

    def check_loss(self) -> None:
        """Raise SettingError for a loss that is not of preference pairs, and for `collate_fn`."""
        cfg = self.cfg
        if not takes_pairs(self.loss_fn):
            remedy = (
                "not a loss of preference pairs; give torchtune.rlhf.loss.DPOLoss, or train next"
                " tokens by `tune run adaptive_full_finetune`"
            )
            raise SettingError("loss", cfg.loss.get("_component_"), remedy)
        # Compute the loss of two pairs.
        zeros = torch.zeros(2)
        with refusing("loss", as_dict(cfg.loss), "check its arguments", problem="it fails"):
            shapes = [tuple(result.shape) for result in self.loss_fn(zeros, zeros, zeros, zeros)]
        if shapes != [(2,), (2,), (2,)]:
            remedy = (
                f"of two pairs it returns shapes {shapes}; it must return losses, rewards of chosen"
                " and rewards of rejected answers, [pairs] each"
            )
            raise SettingError("loss", as_dict(cfg.loss), remedy)
        if cfg.get("collate_fn") is not None:
            remedy = "pairs are collated by torchtune.data.padded_collate_dpo; remove it"
            raise SettingError("collate_fn", cfg.collate_fn, remedy)

    def prepare(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Disable dropout in the two models whose log probabilities are compared."""
        # As in torchtune's recipes, adapters keep the dropout of their block.
        if second is not None:
            training.disable_dropout(model)
            training.disable_dropout(second)

    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss over pairs, and add the metrics to the batch."""
        labels = batch.pop("labels")
        lengths = batch.pop(_ANSWER_LENGTHS, None)
        # [pairs, 2], computed in separate micro-batches; None if the reference runs here.
        reference_values = batch.pop(REFERENCE_VALUES, None)
        inputs = dict(batch)
        logits = models.logits(**inputs)
        log_probs = self._log_probs(logits, labels, lengths)
        mean_chosen_logits, mean_rejected_logits = _mean_logits(logits.detach(), lengths)
        # Free the largest tensor before the reference allocates its logits.
        del logits
        if reference_values is None:
            with torch.no_grad():
                reference_log_probs = self._log_probs(
                    models.reference_logits(**inputs), labels, lengths
                )
        else:
            # All chosen answers, then all rejected ones, like log_probs.
            reference_log_probs = reference_values.T.flatten()
        chosen, rejected = log_probs.chunk(2)
        losses, chosen_rewards, rejected_rewards = self.loss_fn(
            chosen, rejected, *reference_log_probs.chunk(2)
        )
        batch |= {
            "rewards/chosen": chosen_rewards.mean(),
            "rewards/rejected": rejected_rewards.mean(),
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float().mean(),
            "rewards/margins": (chosen_rewards - rejected_rewards).mean(),
            "log_probs/chosen": chosen.detach().mean(),
            "log_probs/rejected": rejected.detach().mean(),
            "logits/chosen": mean_chosen_logits,
            "logits/rejected": mean_rejected_logits,
        }
        loss: torch.Tensor = losses.mean()
        return loss

    def token_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the negative log probability of all labels of answers that are not paired."""
        labels = batch.pop("labels")
        return -self._token_log_probs(models.logits(**batch), labels).sum()

    @torch.no_grad()
    def reference_values(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the log probabilities of the chosen and the rejected answer of each pair."""
        logits = models.reference_logits(tokens=batch["tokens"])
        log_probs = self._token_log_probs(logits, batch["labels"]).sum(-1)
        # The batch has all chosen answers, then all rejected ones.
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
        # Token i scores label i + 1, so there is one value less than tokens: append a 0.
        token_log_probs = pad(self._token_log_probs(logits, labels)[0], (0, 1))
        return _answer_sums(token_log_probs, lengths)

    def _token_log_probs(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the log probability of each label after the first `[answers, length - 1]`; 0 for
        tokens without a label.

        Their sums over an answer have the bits of `get_batch_log_probs`.
        """
        next_labels = labels[:, 1:]
        is_label = next_labels != self.ignore_index
        # gather() needs a valid class everywhere.
        classes = next_labels.masked_fill(~is_label, 0)[..., None]
        # One softmax of all logits would take as much memory again, so compute it in chunks.
        chunks = [
            chunk_logits.log_softmax(-1).gather(-1, chunk_classes)
            for chunk_logits, chunk_classes in zip(
                logits[:, :-1].chunk(_SOFTMAX_CHUNKS, dim=1),
                classes.chunk(_SOFTMAX_CHUNKS, dim=1),
                strict=True,
            )
        ]
        log_probs: torch.Tensor = torch.cat(chunks, dim=1).squeeze(-1) * is_label
        return log_probs


def _answer_sums(token_values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sum over the tokens of each packed answer, in the dtype of `token_values`.

    No tensor here has the size answers x longest answer, so memory depends on the tokens alone.
    """
    # segment_reduce() adds in the dtype of its input, and bf16 would lose most of a long sum.
    exact = token_values.to(torch.promote_types(token_values.dtype, torch.float32))
    # `unsafe` skips the check of the lengths, which would wait for the device.
    sums = torch.segment_reduce(exact, "sum", lengths=lengths, unsafe=True)
    return sums.to(token_values.dtype)


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
    answer_means = _answer_sums(logits.mean(-1)[0], lengths) / lengths
    chosen, rejected = answer_means.chunk(2)
    return chosen.mean(), rejected.mean()


def takes_pairs(loss_fn: Any) -> bool:
    """Return whether a loss takes log probabilities of pairs, as torchtune's losses name them."""
    function = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        return tuple(signature(function).parameters) == _PAIR_ARGUMENTS
    # Not a function, or one without a signature.
    except (TypeError, ValueError):
        return False


# --- distillation

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
    recipe_hint = "nothing is distilled here, which `tune run adaptive_distill` does"
    metrics = ("class_loss", "kd_loss")

    def __init__(self, cfg: DictConfig, loss_fn: Any) -> None:
        super().__init__(cfg, loss_fn)
        given = as_dict(cfg)
        for key in ("teacher_model", "teacher_checkpointer", "kd_loss"):
            check_block(key, given.get(key))
        ratio = given.get("kd_ratio")
        self.kd_ratio = 0.5 if ratio is None else ratio
        fraction("kd_ratio", self.kd_ratio)
        self.kd_loss_fn = instantiate("kd_loss", cfg.kd_loss)
        self.losses = (self.loss_fn, self.kd_loss_fn)

    def second_model(self, *, has_frozen_base: bool) -> SecondModel:
        """Return the teacher."""
        return SecondModel(self.cfg, key="teacher_model", checkpointer_key="teacher_checkpointer")

    def check_loss(self) -> None:
        """Raise SettingError for losses that do not fit together."""
        super().check_loss()
        kd_ignore_index = getattr(self.kd_loss_fn, "ignore_index", self.ignore_index)
        if kd_ignore_index != self.ignore_index:
            remedy = f"loss ignores the label {self.ignore_index}, and both must; give that"
            raise SettingError("kd_loss.ignore_index", kd_ignore_index, remedy)
        self._check_mean("kd_loss", self.kd_loss_fn, num_models=2)

    def check_models(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Raise SettingError for a teacher with another vocabulary."""
        super().check_models(model, second)
        # Each is None if unknown.
        student_size = num_token_embeddings(model)
        teacher_size = None if second is None else num_token_embeddings(second)
        if student_size and teacher_size and student_size != teacher_size:
            remedy = (
                f"it has {teacher_size} token embeddings, and the student {student_size}; give a"
                " teacher of the student's family with the same number"
            )
            raise SettingError("teacher_model", component_of(self.cfg.teacher_model), remedy)

    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss over label tokens, and add both of its parts to the batch."""
        labels = batch.pop("labels")
        logits = flat(models.logits(**batch))
        teacher_logits = flat(models.reference_logits(**batch))
        # The same name frees the labels that are not shifted.
        labels = self.shifted(labels, logits)
        with _AssumeLabels() if isinstance(labels, private.FakeTensor) else nullcontext():
            kd_loss = self.kd_loss_fn(logits, teacher_logits, labels)
        class_loss = self.loss_fn(logits, labels)
        batch["class_loss"] = class_loss.detach()
        batch["kd_loss"] = kd_loss.detach()
        return self.loss_of(class_loss=class_loss, kd_loss=kd_loss)

    def loss_of(self, **metrics: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of both parts, of a batch or of a step."""
        class_loss = metrics["class_loss"]
        return (1 - self.kd_ratio) * class_loss + self.kd_ratio * metrics["kd_loss"]


class _AssumeLabels(TorchFunctionMode):
    """Mode for estimates, whose fake tensors have no values. torchtune's losses ask whether a batch
    has no labels at all; this mode answers False.
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
