"""What one row is to a run and what is learned from it; next tokens, the usual task."""

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
from .reference import SecondModel

Row = Any
Batch = dict[str, Any]
Collate = Callable[[Sequence[Row]], Batch]
# Classes of the logits that a loss is tried with.
_CLASSES = 8
COLLATE_REMEDY = "give torchtune.data.padded_collate_sft or one like it"


class Models(Protocol):
    """The models that a loss is computed by."""

    def logits(self, **batch: Any) -> Any:
        """Return the logits of the model that trains; a list where it returns chunks."""

    def reference_logits(self, **batch: Any) -> Any:
        """Return the same of the frozen model that the task compares with, where it has one."""


class Task(ABC):
    """How rows of a task are measured, collated and learned from.

    A row has one or more sequences. Its tokens count as if all of them were padded to the longest,
    also where they are packed.

    Args:
        cfg: the recipe's configuration.
        loss_fn: its loss.

    Attributes:
        fields: keys of a row under which each sequence has its tokens and its labels.
        keys: keys of the configuration that no other task has.
        without_it: what a run of another task does not do, and which recipe does.
        counts_rows, metrics: see :class:`RowLoss`.
        num_reference_values: numbers of each row that are all that the loss takes from a reference,
            so that this may run in micro-batches of its own; 0 where it takes more, or has none.
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
        """Return the tokens of a row as it is collated."""
        return len(self.fields) * max(len(row[tokens]) for tokens, _ in self.fields)

    def num_real_tokens(self, row: Row) -> int:
        """Return the tokens of a row that are not padding."""
        return sum(len(row[tokens]) for tokens, _ in self.fields)

    def sequences(self, row: Row) -> Iterator[tuple[Any, Any]]:
        """Yield tokens and labels of each sequence of a row; what it does not have is None."""
        for tokens, labels in self.fields:
            yield row.get(tokens), row.get(labels)

    def of_each_sequence(self, length: int) -> int:
        """Return the tokens of each sequence of a row that has so many; rounded up."""
        return -(-length // len(self.fields))

    def lengthened(self, rows: Sequence[Row], length: int, *, pad_id: int) -> Sequence[Row]:
        """Return the rows, one padded so that collating pads all to so many tokens."""
        return lengthened(
            rows,
            self.of_each_sequence(length),
            pad_id=pad_id,
            ignore_index=self.ignore_index,
            fields=self.fields,
        )

    def resized(self, row: Row, length: int) -> Row:
        """Return a row of text cut or repeated to so many tokens."""
        length = self.of_each_sequence(length)
        return {
            key: (list(value) * (length // len(value) + 1))[:length] for key, value in row.items()
        }

    def filled(self, row: Row) -> Row:
        """Return a row whose sequences are all as long as its longest, so that no row of its length
        takes more, however it lies in a micro-batch.
        """
        if len(self.fields) == 1:
            return row
        sequences = {key: row[key] for pair in self.fields for key in pair}
        return {**row, **self.resized(sequences, self.length(row))}

    def made_up_row(self, length: int, *, packed: bool = False) -> Row:
        """Return a row of so many tokens, each with a label."""
        assert not packed, "rows of this task are not packed"
        length = self.of_each_sequence(length)
        return {key: [0] * length for pair in self.fields for key in pair}

    @abstractmethod
    def labelled(self, row: Row) -> Row:
        """Return a row like this one that has a label, for a rank that has no row."""

    # --- batches

    def rows_of_sequences(self, rows: Sequence[Row]) -> list[Row]:
        """Return the sequences of rows, each as a row of ``tokens`` and ``labels``: the first of
        all rows, then the second.
        """
        return [
            {"tokens": row[tokens], "labels": row[labels]}
            for tokens, labels in self.fields
            for row in rows
        ]

    def join(self, rows: Sequence[Row], form: BatchForm) -> tuple[Batch, list[int]]:
        """Return one batch on the host of the sequences of rows, without padding; and the tokens of
        each.
        """
        sequences = self.rows_of_sequences(rows)
        batch = form.join(sequences, ignore_index=self.ignore_index)
        return batch, [len(sequence["tokens"]) for sequence in sequences]

    @abstractmethod
    def collate_function(self, pad_id: int) -> Collate:
        """Return what makes a batch of rows: ``tokens`` and ``labels`` of all of their sequences,
        `[rows x sequences, length]`.

        Raises:
            SettingError: the configured function cannot be used.
        """

    @abstractmethod
    def count_labels(self, batch: Batch) -> torch.Tensor:
        """Return what the loss of a batch is the mean over, as a whole scalar tensor."""

    # --- model and loss

    def second_model(self, *, keeps_base: bool) -> SecondModel | None:
        """Return the frozen model that is held beside the one that trains; None where there is
        none.

        Args:
            keeps_base: whether adapters train, and the base below them stays as it is.

        Raises:
            SettingError: a key of it is missing, or given where there is none.
        """
        return None

    @property
    def losses(self) -> tuple[Any, ...]:
        """The losses that are compiled with the model."""
        return (self.loss_fn,)

    @abstractmethod
    def check(self, model: torch.nn.Module | None, second: torch.nn.Module | None = None) -> None:
        """Refuse a loss, or models without memory, that are not of this task."""

    @abstractmethod
    def prepare(self, model: torch.nn.Module, second: torch.nn.Module | None) -> None:
        """Set up the models for what the loss takes."""

    @abstractmethod
    def mean_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch on the device, which it may empty; leave each of
        `metrics` in it.
        """

    @abstractmethod
    def token_loss(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses of all labels of a batch of single sequences on the device,
        by which packed ones are compared with others.
        """

    def reference_values(self, models: Models, batch: Batch) -> torch.Tensor:
        """Return what the loss takes of each row from the reference, without gradients:
        `[rows, num_reference_values]`.

        Args:
            models: models that the loss is computed by.
            batch: batch on the device, which may be emptied.
        """
        raise AssertionError(f"{type(self).__name__} takes no numbers of rows from a reference")

    def loss_of(self, **metrics: torch.Tensor) -> torch.Tensor | None:
        """Return the loss of a step by the means of `metrics`; None where they do not tell it."""
        return None


class NextTokens(Task):
    """Each token of a row's one sequence predicts the label of the next."""

    fields = (("tokens", "labels"),)

    def __init__(self, cfg: DictConfig, loss_fn: Any) -> None:
        super().__init__(cfg, loss_fn)
        # A loss without one is refused by :meth:`check`.
        self.ignore_index = getattr(loss_fn, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)

    def lengthened(self, rows: Sequence[Row], length: int, *, pad_id: int) -> Sequence[Row]:
        """Return the rows, one padded to so many tokens.

        Raises:
            SettingError: rows have no labels, and the padding would be labelled too.
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
        """Return a row of so many tokens; a packed one as torchtune's packed datasets give it."""
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
        """Return the configured function; torchtune's where there is none."""
        name = self.cfg.get("collate_fn")
        if name is None:
            name = "torchtune.data.padded_collate_sft"
        collate = load_function(name, key="collate_fn")
        with building("collate_fn", self.cfg.get("collate_fn"), COLLATE_REMEDY):
            signature(collate).bind([], padding_idx=pad_id, ignore_idx=self.ignore_index)
        return partial(collate, padding_idx=pad_id, ignore_idx=self.ignore_index)

    def count_labels(self, batch: Batch) -> torch.Tensor:
        """Return the label tokens that are left after the shift by one."""
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
        """Let the models return chunks where the loss takes them."""
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
        """Return the label that each position predicts, in the shape that goes with logits as
        :func:`flat` returns them.
        """
        nothing = labels.new_full((labels.shape[0], 1), self.ignore_index)
        labels = torch.hstack((labels[..., 1:], nothing))
        return labels if isinstance(logits, list) else labels.reshape(-1)


def flat(logits: Any) -> Any:
    """Return logits as `[rows x length, vocabulary]`, and chunks of them as they are."""
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
