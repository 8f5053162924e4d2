"""Tasks: the layout of a row, its collation and its loss. Next tokens are the usual task."""

from __future__ import annotations

import math
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
# Number of classes in logits that a loss is checked with.
_CLASSES = 8
COLLATE_REMEDY = "give torchtune.data.padded_collate_sft or one like it"


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
        without_it: sentence for runs of other tasks; it names the recipe of this task.
        counts_rows, metrics: see :class:`RowLoss`.
        num_reference_values: numbers of a row that the loss needs from a reference, which may then
            run in separate micro-batches; 0 if the loss needs more, or has no reference.
        ignore_index: label of tokens that are not trained on.
    """

    fields: ClassVar[tuple[tuple[str, str], ...]]
    keys: ClassVar[tuple[str, ...]] = ()
    without_it: ClassVar[str] = ""
    counts_rows: ClassVar[bool] = False
    metrics: ClassVar[tuple[str, ...]] = ()
    num_reference_values: ClassVar[int] = 0
    ignore_index: int

    def __init__(self, cfg: DictConfig, loss_fn: Any) -> None:
        self.cfg = cfg
        self.loss_fn = loss_fn

    # --- rows

    def length(self, row: Row) -> int:
        """Return the tokens of a collated row, padding included."""
        return len(self.fields) * max(len(row[tokens]) for tokens, _ in self.fields)

    def num_real_tokens(self, row: Row) -> int:
        """Return the tokens of a row, padding excluded."""
        return sum(len(row[tokens]) for tokens, _ in self.fields)

    def sequences(self, row: Row) -> Iterator[tuple[Any, Any]]:
        """Yield tokens and labels of each sequence of a row; None for missing ones."""
        for tokens, labels in self.fields:
            yield row.get(tokens), row.get(labels)

    def sequence_length(self, length: int) -> int:
        """Return the tokens of each sequence of a row of `length` tokens, rounded up."""
        return -(-length // len(self.fields))

    def lengthened(self, rows: Sequence[Row], length: int, *, pad_id: int) -> Sequence[Row]:
        """Return the rows, one of them padded, so that collation pads all to `length` tokens."""
        return lengthened(
            rows,
            self.sequence_length(length),
            pad_id=pad_id,
            ignore_index=self.ignore_index,
            fields=self.fields,
        )

    def resized(self, row: Row, length: int) -> Row:
        """Return a row of text, cut or repeated to `length` tokens."""
        length = self.sequence_length(length)
        return {
            key: (list(value) * (length // len(value) + 1))[:length] for key, value in row.items()
        }

    def filled(self, row: Row) -> Row:
        """Return a row with all sequences as long as its longest: the worst row of its length in
        any layout.
        """
        if len(self.fields) == 1:
            return row
        sequences = {key: row[key] for pair in self.fields for key in pair}
        return {**row, **self.resized(sequences, self.length(row))}

    def synthetic_row(self, length: int, *, packed: bool = False) -> Row:
        """Return a row of `length` tokens, each with a label."""
        assert not packed, "rows of this task are not packed"
        length = self.sequence_length(length)
        return {key: [0] * length for pair in self.fields for key in pair}

    @abstractmethod
    def labelled(self, row: Row) -> Row:
        """Return a copy of a row with a label, for a rank without a row."""

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

    @property
    def losses(self) -> tuple[Any, ...]:
        """Losses that are compiled with the model."""
        return (self.loss_fn,)

    @abstractmethod
    def check(self, model: torch.nn.Module | None, second: torch.nn.Module | None = None) -> None:
        """Raise SettingError for a loss of another task. Called first without a model, and again
        with the model on the meta device, which is then checked, too.
        """

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
        # A loss without one is refused by :meth:`check`.
        self.ignore_index = getattr(loss_fn, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)

    def lengthened(self, rows: Sequence[Row], length: int, *, pad_id: int) -> Sequence[Row]:
        """Return the rows, one of them padded to `length` tokens.

        Raises:
            SettingError: rows have no labels, so that padding would be labelled too.
        """
        if length <= max(map(self.length, rows)):
            return rows
        # A function that makes labels would label the padding, too.
        if any(row.get("labels") is None for row in rows):
            remedy = (
                "rows are padded to one length before it makes their labels; have the dataset give"
                " each row its labels"
            )
            raise SettingError("collate_fn", self.cfg.get("collate_fn"), remedy)
        return super().lengthened(rows, length, pad_id=pad_id)

    def synthetic_row(self, length: int, *, packed: bool = False) -> Row:
        """Return a row of `length` tokens; a packed one as torchtune's packed datasets."""
        if not packed:
            return super().synthetic_row(length)
        tokens = torch.zeros(length, dtype=torch.int64)
        return {
            "tokens": tokens,
            "labels": tokens,
            "input_pos": torch.arange(length),
            "seq_lens": torch.tensor([length]),
        }

    def labelled(self, row: Row) -> Row:
        """Return the row with every token labelled."""
        tokens = row["tokens"]
        # A single token has no label after the shift.
        if len(tokens) == 1:
            tokens = [*tokens] * 2
        return {**row, "tokens": tokens, "labels": tokens}

    def collate_function(self, pad_id: int) -> Collate:
        """Return the configured function; torchtune's by default."""
        name = self.cfg.get("collate_fn")
        if name is None:
            name = "torchtune.data.padded_collate_sft"
        collate = load_function(name, key="collate_fn")
        with refusing("collate_fn", self.cfg.get("collate_fn"), COLLATE_REMEDY):
            signature(collate).bind([], padding_idx=pad_id, ignore_idx=self.ignore_index)
        return partial(collate, padding_idx=pad_id, ignore_idx=self.ignore_index)

    def count_labels(self, batch: Batch) -> torch.Tensor:
        """Return the number of label tokens after the shift by one."""
        return count_shifted_labels(batch, self.ignore_index)

    def check(self, model: torch.nn.Module | None, second: torch.nn.Module | None = None) -> None:
        """Raise for another loss, and for a loss of chunks if the model returns none."""
        component = component_of(self.cfg.loss)
        if not isinstance(getattr(self.loss_fn, "ignore_index", None), int):
            remedy = (
                "not a next-token loss: it has no ignore_index (preferences are trained on by `tune"
                " run adaptive_dpo`, and rewards are not); give"
                " torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss"
            )
            raise SettingError("loss", component, remedy)
        # User-defined losses may take other inputs.
        if model is None and type(self.loss_fn).__module__.startswith(("torch.nn.", "torchtune.")):
            self._check_mean("loss", self.loss_fn, num_models=1)
        if not takes_chunks(self.loss_fn):
            return
        for key, part in (("model", model), ("teacher_model", second)):
            if part is not None and not hasattr(part, "set_num_output_chunks"):
                remedy = (
                    f"{component_of(self.cfg[key])} has no set_num_output_chunks, so it cannot"
                    " return chunks; give a loss without chunks, such as torch.nn.CrossEntropyLoss"
                )
                raise SettingError("loss", component, remedy)

    def _check_mean(self, key: str, loss_fn: Any, *, num_models: int) -> None:
        """Raise SettingError for a loss that fails, or is not the mean over label tokens, so that
        it would depend on the split of a step.

        Args:
            key: key of the loss.
            loss_fn: loss of the logits of all models and of labels.
            num_models: number of models.
        """
        block = as_dict(self.cfg[key])
        problem = "it cannot be computed from logits in the chunks of loss"
        with refusing(key, block, "check its arguments", problem=problem):
            num_chunks = self.loss_fn.num_output_chunks if takes_chunks(self.loss_fn) else 1
            num_tokens = 3 * num_chunks
            generator = torch.Generator().manual_seed(0)
            logits = torch.randn(num_models, 1, num_tokens, _CLASSES, generator=generator)
            label = 1 if self.ignore_index != 1 else 2

            def loss_of(*labelled: int) -> torch.Tensor:
                labels = torch.full((1, num_tokens), self.ignore_index)
                labels[0, list(labelled)] = label
                if not takes_chunks(self.loss_fn):
                    return torch.as_tensor(loss_fn(*logits[:, 0], labels[0]))
                chunks = [list(tensor.chunk(num_chunks, dim=1)) for tensor in logits]
                return torch.as_tensor(loss_fn(*chunks, labels))

            last = num_tokens - 1
            whole = loss_of(0, last)
            # The logits of a token without a label must not count.
            logits[:, :, 1] = 0
            mean = (loss_of(0) + loss_of(last)) / 2
            # NLLLoss takes log probabilities, and would train something else on logits.
            logits.zero_()
            equal = loss_of(0)
        if whole.dim() or not torch.allclose(whole, mean, rtol=1e-4):
            remedy = (
                f"for two label tokens it is {whole.tolist()}, and the mean of both is"
                f" {mean.tolist()}: it is not the mean over tokens with a label, so it would depend"
                " on how a step is split; give a loss of torchtune, or reduction=mean"
            )
            raise SettingError(key, block, remedy)
        if num_models == 1 and not math.isclose(equal, math.log(_CLASSES), rel_tol=1e-4):
            remedy = (
                f"for equal logits of {_CLASSES} classes it is {equal.tolist()}, and their"
                f" cross-entropy is {math.log(_CLASSES):.4g}; give torch.nn.CrossEntropyLoss"
            )
            raise SettingError(key, block, remedy)

    def prepare(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Have the models return chunks if the loss takes chunks."""
        if not takes_chunks(self.loss_fn):
            return
        for chunked in (model, second):
            if chunked is not None:
                cast(Any, chunked).set_num_output_chunks(self.loss_fn.num_output_chunks)

    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss over label tokens; position `i` predicts the label at `i + 1`."""
        labels = batch.pop("labels")
        logits = flat(models.logits(**batch))
        labels = self.shifted(labels, logits)
        loss: torch.Tensor = self.loss_fn(logits, labels)
        return loss

    def token_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of all labels of a batch."""
        count = self.count_labels(batch)
        return self.mean_loss(models, batch) * count

    def shifted(self, labels: torch.Tensor, logits: Any) -> torch.Tensor:
        """Return the label that each position predicts, in the shape for :func:`flat`."""
        nothing = labels.new_full((labels.shape[0], 1), self.ignore_index)
        labels = torch.hstack((labels[..., 1:], nothing))
        return labels if isinstance(logits, list) else labels.reshape(-1)


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

# Parts of a sequence whose log probabilities are computed one by one; as many as torchtune's losses
# in chunks have.
_SLICES = 8


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
    without_it = "only `tune run adaptive_dpo` trains on preferences"
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

    def pack(self, rows: Sequence[Row]) -> tuple[Batch, list[int]]:
        """Pack the chosen and then the rejected answers; return the batch and the tokens of each
        answer, which the batch also contains.
        """
        batch, lengths = super().pack(rows)
        batch[_ANSWER_LENGTHS] = torch.tensor(lengths)
        return batch, lengths

    # --- model and loss

    def second_model(self, *, has_frozen_base: bool) -> SecondModel | None:
        """Return the reference if every weight trains; the reference of adapters is their base."""
        key = "ref_checkpointer"
        given = as_dict(self.cfg).get(key)
        if has_frozen_base:
            if given is not None:
                remedy = (
                    "the reference of adapters is their base, with adapters disabled; remove it"
                )
                raise SettingError(key, component_of(given), remedy)
            return None
        if given is None:
            problem = "every weight is trained, so the reference is a separate model"
            remedy = "give the block of checkpointer, with the files of the reference"
            raise SettingError(key, None, f"{problem}; {remedy}")
        check_block(key, given)
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
        zeros = torch.zeros(2)
        with refusing("loss", as_dict(cfg.loss), "check its arguments", problem="it fails"):
            shapes = [tuple(part.shape) for part in self.loss_fn(zeros, zeros, zeros, zeros)]
        if shapes != [(2,)] * 3:
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
        return -self._token_log_probs(models.logits(**batch), labels).sum()

    @torch.no_grad()
    def reference_values(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the log probabilities of the chosen and the rejected answer of each pair."""
        logits = models.reference_logits(tokens=batch["tokens"])
        log_probs = self._token_log_probs(logits, batch["labels"]).sum(-1)
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
        return _answer_sums(pad(self._token_log_probs(logits, labels)[0], (0, 1)), lengths)

    def _token_log_probs(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
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
                logits[:, :-1].chunk(_SLICES, dim=1),
                targets.chunk(_SLICES, dim=1),
                strict=True,
            )
        ]
        of_tokens: torch.Tensor = torch.cat(of_chunks, dim=1).squeeze(-1) * is_label
        return of_tokens


def _answer_sums(of_tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
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
    chosen, rejected = (_answer_sums(logits.mean(-1)[0], lengths) / lengths).chunk(2)
    return chosen.mean(), rejected.mean()


def takes_pairs(loss_fn: Any) -> bool:
    """Return whether a loss takes log probabilities of pairs, as torchtune's losses name them."""
    function = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        return tuple(signature(function).parameters) == _PAIR_ARGUMENTS
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
    without_it = "nothing is distilled here, which `tune run adaptive_distill` does"
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

    # --- model and loss

    def second_model(self, *, has_frozen_base: bool) -> SecondModel:
        """Return the teacher."""
        return SecondModel(self.cfg, key="teacher_model", checkpointer_key="teacher_checkpointer")

    @property
    def losses(self) -> tuple[Any, ...]:
        """The losses that are compiled with the model."""
        return (self.loss_fn, self.kd_loss_fn)

    def check(self, model: torch.nn.Module | None, second: torch.nn.Module | None = None) -> None:
        """Raise SettingError for losses that do not fit together, and for an unfit teacher."""
        super().check(model, second)
        ignored = getattr(self.kd_loss_fn, "ignore_index", self.ignore_index)
        if ignored != self.ignore_index:
            remedy = f"loss ignores the label {self.ignore_index}, and both must; give that"
            raise SettingError("kd_loss.ignore_index", ignored, remedy)
        if model is None:
            self._check_mean("kd_loss", self.kd_loss_fn, num_models=2)
            return
        size = num_token_embeddings(model)
        teacher_size = size if second is None else num_token_embeddings(second)
        if None not in (size, teacher_size) and size != teacher_size:
            remedy = (
                f"it has {teacher_size} token embeddings, and the student {size}; give a teacher of"
                " the student's family with the same number"
            )
            raise SettingError("teacher_model", component_of(self.cfg.teacher_model), remedy)

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


class _HasLabels(TorchFunctionMode):
    """Mode for estimates that answers torchtune's check for a batch without labels with no: fake
    tensors have no values.
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
