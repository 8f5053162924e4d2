"""Tasks: the layout of a row, its collation and its loss. Next tokens are the usual task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any, ClassVar, Protocol, cast

import torch
from omegaconf import DictConfig
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from adaptive_batch.data import lengthened
from adaptive_batch.errors import SettingError
from adaptive_batch.training import BatchForm, count_shifted_labels

from .config_errors import as_dict, building, component_of, computing
from .keys import load_function
from .model import SecondModel

Row = Any
Batch = dict[str, Any]
Collate = Callable[[Sequence[Row]], Batch]
# Classes of the logits that a loss is tried with.
_CLASSES = 8
COLLATE_REMEDY = "give torchtune.data.padded_collate_sft or one like it"


class Models(Protocol):
    """Models that a loss calls."""

    def logits(self, **batch: Any) -> Any:
        """Return the logits of the trained model; a list if it returns chunks."""

    def reference_logits(self, **batch: Any) -> Any:
        """Return the logits of the frozen model that the task compares with."""


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

    def made_up_row(self, length: int, *, packed: bool = False) -> Row:
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

    def join(self, rows: Sequence[Row], form: BatchForm) -> tuple[Batch, list[int]]:
        """Return one batch of the sequences of rows on the host, without padding, and the tokens of
        each sequence.
        """
        sequences = self.rows_of_sequences(rows)
        batch = form.join(sequences, ignore_index=self.ignore_index)
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

    def second_model(self, *, keeps_base: bool) -> SecondModel | None:
        """Return the frozen second model of the task, or None.

        Args:
            keeps_base: whether adapters train on a frozen base.

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
        """Raise SettingError for a loss, or a model on the meta device, of another task."""

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

    def made_up_row(self, length: int, *, packed: bool = False) -> Row:
        """Return a row of `length` tokens; a packed one as torchtune's packed datasets."""
        if not packed:
            return super().made_up_row(length)
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
        with building("collate_fn", self.cfg.get("collate_fn"), COLLATE_REMEDY):
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
        if model is None:
            _check_loss_computes(self.loss_fn, self.cfg)
        elif takes_chunks(self.loss_fn) and not hasattr(model, "set_num_output_chunks"):
            remedy = (
                f"{component_of(self.cfg.model)} has no set_num_output_chunks, so it cannot return"
                " chunks; give torch.nn.CrossEntropyLoss"
            )
            raise SettingError("loss", component, remedy)

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


def _check_loss_computes(loss_fn: Any, cfg: DictConfig) -> None:
    """Raise if a loss of torch or torchtune fails, or is not the mean cross-entropy of labels."""
    # User-defined losses may take other inputs.
    if not type(loss_fn).__module__.startswith(("torch.nn.", "torchtune.")):
        return
    label = 1 if loss_fn.ignore_index != 1 else 2
    with computing("loss", cfg.loss):
        if takes_chunks(loss_fn):
            num_labels = loss_fn.num_output_chunks
            logits = [torch.zeros(1, 1, _CLASSES)] * num_labels
            loss = loss_fn(logits, torch.full((1, num_labels), label))
        else:
            loss = loss_fn(torch.zeros(2, _CLASSES), torch.full((2,), label))
    expected = math.log(_CLASSES)
    if loss.dim() or not math.isclose(loss, expected, rel_tol=1e-4):
        remedy = (
            f"equal logits of {_CLASSES} classes give {loss.tolist()}, and their mean cross-entropy"
            f" is {expected:.4g}; give torch.nn.CrossEntropyLoss with reduction=mean"
        )
        raise SettingError("loss", as_dict(cfg.loss), remedy)
