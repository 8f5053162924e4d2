"""The rows of a run: tokenizer, datasets, collate functions and lengths, and the checks that need
rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from types import NoneType
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch.utils.data import ConcatDataset
from torchtune import config
from torchtune.data import padded_collate_packed
from torchtune.datasets import PackedDataset

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import (
    MicroBatchLayout,
    PlannedEpoch,
    RowLengths,
    count_rows,
    longest_rows,
)
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import RandomState
from adaptive_batch.schedules import Progress
from adaptive_batch.training import LongestRows, RowLoss

from .checks import has_tensor_parallelism
from .configuration import refusing, values_of
from .job import Job
from .rows import DatasetRows

# Columns whose memory follows the tokens of a row; images, for example, do not.
_MEASURED_BY_TOKENS = {"mask", "input_pos", "seq_lens"}

# Keys that take tokens for the memory of a row.
_MEASURING_KEYS = (
    *("batch_tokens", "micro_batch_tokens", "uniform_micro_batches", "micro_batch_layout"),
    "pad_to_multiple_of",
)

# Rows that are collated before weights load, to see that they can be.
_COLLATED_FIRST = 4


class Collator:
    """Collation of rows on the host: padded, or stacked if the dataset packs them.

    Args:
        job: context of the run.
        pad_id: token of the padding.
        packed: whether the dataset packs its rows.

    Attributes:
        packed: as given.
        collate: function that collates rows of any length.
    """

    def __init__(self, job: Job, *, pad_id: int, packed: bool) -> None:
        self.packed = packed
        self._job = job
        self._pad_id = pad_id
        # Check the configured function even if rows are packed.
        padded = job.task.collate_function(pad_id)
        self.collate = job.with_values(padded_collate_packed if packed else padded)

    def to_length(self, rows: Sequence[dict[str, Any]], length: int) -> dict[str, Any]:
        """Collate rows to at least that many tokens each.

        Raises:
            SettingError: the batch lacks rows, which would count as trained.
        """
        lengthened = self._job.task.lengthened(rows, length, pad_id=self._pad_id)
        batch: dict[str, Any] = self.collate(lengthened)
        # A row has a sequence in each field, such as a chosen and a rejected one.
        num_sequences = len(rows) * len(self._job.task.fields)
        # A `collate_fn` may also pack all sequences into one.
        if "tokens" in batch and len(batch["tokens"]) not in (1, num_sequences):
            remedy = (
                f"it made {len(batch['tokens'])} rows of {num_sequences}; return all of them, and"
                " filter rows in the dataset"
            )
            raise SettingError("collate_fn", self._job.cfg.get("collate_fn"), remedy)
        return batch


class Data:
    """Rows of training and validation, their collation and layouts, and the rows of trials.

    :meth:`read` reads the configured datasets. The constructor takes any dataset. Synthetic rows
    need no tokenizer.

    Attributes:
        collator: collator of training.
        configured_layout: layout of micro-batches, unless ``auto`` chooses another one; the sizer
            has the current one.
        layout_val: layout of validation.
        trial_rows: :meth:`_rows_for_trials`, which reads the rows of each length once.
    """

    def __init__(
        self,
        job: Job,
        dataset: Any,
        *,
        packed: bool,
        tokenizer: Any = None,
        dataset_val: Any = None,
        packed_val: bool = False,
    ) -> None:
        self._job = job
        self._settings = job.settings
        self._task = job.task
        self.packed = packed
        self.tokenizer = tokenizer
        pad_id: int = 0 if tokenizer is None else tokenizer.pad_id
        first_dataset = dataset.datasets[0] if isinstance(dataset, ConcatDataset) else dataset
        # Packed datasets have a padding id of their own: torchtune's builders leave it at 0,
        # whatever the tokenizer's is.
        self._pack_padding_id: int = getattr(first_dataset, "padding_idx", pad_id)
        self.collator = Collator(job, pad_id=pad_id, packed=packed)
        self._collator_val = Collator(job, pad_id=pad_id, packed=packed_val)
        self.dataset = DatasetRows(
            job,
            "dataset",
            dataset,
            name=_names(job.cfg.dataset),
            num_real_tokens=self._num_tokens_in_pack if packed else None,
        )
        # None without `dataset_val`.
        self.dataset_val: Any = None
        if dataset_val is not None:
            self.dataset_val = DatasetRows(
                job, "dataset_val", dataset_val, name=_names(job.cfg.dataset_val)
            )
        self.configured_layout = _layout_of(
            job, job.settings.uniform_micro_batches, is_packed_dataset=packed
        )
        self.layout_val = _layout_of(job, None, is_packed_dataset=packed_val)
        self.trial_rows = cache(self._rows_for_trials)

    @classmethod
    def read(cls, job: Job) -> Data:
        """Read the configured tokenizer and datasets.

        Args:
            job: context of the run.

        Raises:
            SettingError: the model, the loss, the tokenizer or a dataset cannot be used, or the
                dataset has fewer rows than there are ranks.
        """
        # Reading a dataset may take minutes, so refuse a wrong model first.
        job.check_model()
        remedy = (
            "give the tokenizer's files (those of demo_cpu are made by `make demo`) and arguments"
        )
        with refusing("tokenizer", job.cfg.tokenizer._component_, remedy):
            tokenizer = config.instantiate(job.cfg.tokenizer)
        dataset, packed = _dataset(job, "dataset", tokenizer)
        dataset_val = None
        packed_val = False
        if job.settings.validates:
            dataset_val, packed_val = _dataset(job, "dataset_val", tokenizer)
        rows = len(dataset)
        ranks = distributed.data_parallel_size()
        if rows < ranks:
            remedy = (
                f"its rows ({rows}) are fewer than the ranks ({ranks}); start at most {rows}, or"
                " give it more rows"
            )
            raise SettingError("dataset", _names(job.cfg.dataset), remedy)
        return cls(
            job,
            dataset,
            packed=packed,
            tokenizer=tokenizer,
            dataset_val=dataset_val,
            packed_val=packed_val,
        )

    def loss_val(self, loss: RowLoss) -> RowLoss:
        """Return the loss of training with the collation and the rows of validation."""
        pack = None if self._collator_val.packed else loss.pack
        return replace(
            loss,
            collate=self._collator_val.to_length,
            pack=pack,
            dummy_row=lambda: self.dataset_val[0],
        )

    # --- rows

    def read_row(self, row: int) -> Any:
        """Return one row. Random numbers that reading draws do not change the random state."""
        with RandomState(self._job.device):
            return self.dataset[row]

    def longest(self, number: int) -> list[Any]:
        """Return the longest rows, filled by :meth:`Task.filled`.

        Args:
            number: number of rows; fewer if the dataset has fewer.
        """
        lengths = self.dataset.lengths
        longest = longest_rows(lengths, min(number, len(lengths)))
        return [self._task.filled(self.read_row(row)) for row in longest]

    @cached_property
    def dummy_row(self) -> Any:
        """The first row with a label. A rank runs it if only other ranks have rows."""
        return self._task.labelled(self.read_row(0))

    # --- rows of trials

    def _rows_for_trials(self, length: int | str) -> LongestRows:
        """Return the rows of training for trials.

        Args:
            length: ``longest``, ``max_seq_len`` or a number of tokens.

        Raises:
            SettingError: the model does not take the length, or rows cannot be resized to it.
        """
        if length == "longest":
            return LongestRows.of_dataset(
                self.dataset, prepare=self._task.filled, order=cache(self._trial_order)
            )
        if length == "max_seq_len":
            limit = getattr(self.tokenizer, "max_seq_len", None)
            if limit is None:
                remedy = "the tokenizer has no max_seq_len; set it, or give a number"
                raise SettingError("probe.sequence_length", length, remedy)
            tokens = int(limit) * len(self._task.fields)
        else:
            tokens = int(length)
        max_tokens = self._job.max_row_length or sys.maxsize
        if tokens > max_tokens:
            remedy = f"the model takes {count(max_tokens, 'token')} at most; give that or less"
            raise SettingError("probe.sequence_length", tokens, remedy)

        def resized(row: dict[str, Any]) -> dict[str, Any]:
            # Other columns, such as an image, cannot be cut or repeated with the tokens.
            extra_fields = sorted(set(row) - {"mask"}.union(*self._task.fields))
            if extra_fields:
                remedy = (
                    f"rows with {', '.join(extra_fields)} have a length of their own; use longest"
                )
                raise SettingError("probe.sequence_length", tokens, remedy)
            return self._task.resized(row, tokens)  # type: ignore[no-any-return]

        return LongestRows.of_dataset(
            self.dataset,
            length=tokens,
            prepare=resized,
            order=cache(partial(self._trial_order, tokens)),
        )

    def _trial_order(self, longest: int = sys.maxsize) -> torch.Tensor:
        """Return the numbers of the rows of up to `longest` tokens in the order of
        :meth:`_first_epoch`.
        """
        order = self._first_epoch().order
        return order[self.dataset.lengths[order] <= longest]

    def _first_epoch(self) -> PlannedEpoch:
        """Plan the first epoch without `batch_size_schedule`. A schedule may need the learning
        rate, which is not known yet, and changes the order of the rows little.
        """
        rows = self.dataset
        batching = replace(
            self._settings, seed=0, batch_size_schedule=None, max_steps_per_epoch=None
        )
        return PlannedEpoch(
            len(rows),
            batching,
            Progress(),
            ranks=distributed.data_parallel_size(),
            divisible=self.configured_layout.uniform in ("rows", "both"),
            measure=lambda: RowLengths(rows.lengths, rows.real_lengths),
        )

    def _num_tokens_in_pack(self, row: Mapping[str, Any]) -> int:
        """Return the number of tokens of a packed row up to its padding, which is at the end."""
        positions = (row["tokens"] != self._pack_padding_id).nonzero()
        return int(positions[-1]) + 1 if len(positions) else 0

    # --- checks

    def check_rows(self) -> None:
        """Check the rows against the settings.

        Raises:
            SettingError: a step takes more rows than there are, tokens do not measure the rows,
                rows cannot be collated, or no row has a label.
        """
        settings = self._settings
        global_rows = settings.step_rows * self._job.ranks
        rows = len(self.dataset)
        if settings.drop_last and not settings.batch_tokens and rows < global_rows:
            remedy = (
                f"one optimizer step takes {global_rows} rows and the dataset has {rows}; lower"
                " batch_size or gradient_accumulation_steps, or set drop_last=False to train the"
                " short step"
            )
            raise SettingError("batch_size", settings.batch_size, remedy)
        self._check_tokens_measure_rows()
        self._check_collation()
        self._check_labels("dataset", self.dataset, rows)
        if settings.layout_kind == "packed" and self.why_unpacked:
            remedy = f"{self.why_unpacked}; give grouped"
            raise SettingError("micro_batch_layout", settings.micro_batch_layout, remedy)
        # If training needs the lengths, measure them now: this refuses a row that the model does
        # not take.
        if settings.uniform_micro_batches or settings.lr_clock == "tokens":
            _ = self.dataset.lengths
        max_tokens = settings.micro_batch_tokens
        if isinstance(max_tokens, int):
            needed = self.configured_layout.padded(int(self.dataset.lengths.max()))
            if max_tokens < needed:
                remedy = (
                    f"a row is padded to {needed} tokens; give {needed} or more, or shorten the"
                    " rows (tokenizer.max_seq_len)"
                )
                raise SettingError("micro_batch_tokens", max_tokens, remedy)
        if settings.batch_tokens:
            self._check_batch_tokens()
        if settings.validates:
            num_validated = settings.validated_rows(len(self.dataset_val), ranks=self._job.ranks)
            self._check_labels("dataset_val", self.dataset_val, num_validated)

    def _check_batch_tokens(self) -> None:
        """Raise SettingError if no step of `batch_tokens` has a row, or the only one is dropped."""
        settings = self._settings
        # `drop_last` drops one step, which may be the only one.
        num_dropped = 1 if settings.drop_last else 0
        if len(self._first_epoch().token_steps.sizes) <= num_dropped:
            remedy = (
                "no step of an epoch is trained: every row has more tokens, or drop_last drops the"
                " only step; change it, long_rows or drop_last"
            )
            raise SettingError("batch_tokens", settings.batch_tokens, remedy)

    def _check_collation(self) -> None:
        """Raise SettingError if the first rows cannot be collated, or lose their labels."""
        # A collate function may not take more rows than training collates.
        num_rows = min(_COLLATED_FIRST, self._settings.batch_size, len(self.dataset))
        configured = self._job.cfg.get("collate_fn")
        remedy = "give torchtune.data.padded_collate_sft or one like it"
        problem = "it fails on the dataset's rows"
        with (
            RandomState(self._job.device),
            refusing("collate_fn", configured, remedy, problem=problem),
        ):
            # Copies: a collate function may change its rows.
            rows = [dict(self.dataset[number]) for number in range(num_rows)]
            _ = self.collator.to_length(rows, 1)["labels"]

    def _check_labels(self, key: str, rows: DatasetRows, num_rows: int) -> None:
        """Raise SettingError if none of the first rows has a label."""
        if not rows.has_label(num_rows):
            remedy = (
                "no row has a label after its first token; see its train_on_input and masks, and"
                " tokenizer.max_seq_len, to which rows are cut"
            )
            raise SettingError(key, _names(self._job.cfg[key]), remedy)

    @property
    def _columns_beside_tokens(self) -> list[str]:
        """Columns of a row that reach the model, and whose memory does not follow its tokens."""
        # torchtune's collate function drops numbers and text, such as an id.
        dropped: Any = () if self._job.cfg.get("collate_fn") else (str, int, float, NoneType)
        following_tokens = _MEASURED_BY_TOKENS.union(*self._task.fields)
        return sorted(
            name
            for name, value in self.read_row(0).items()
            if name not in following_tokens and not isinstance(value, dropped)
        )

    @property
    def why_unpacked(self) -> str:
        """Reason why the rows of a micro-batch cannot be packed, or an empty string."""
        cfg = self._job.cfg
        columns = ", ".join(self._columns_beside_tokens)
        reasons = (
            (self._settings.pad_to_multiple_of > 1, "pad_to_multiple_of is set"),
            (cfg.get("collate_fn"), "collate_fn makes the batches"),
            (has_tensor_parallelism(cfg), "tensor_parallel_dim divides attention among ranks"),
            (self.packed, "dataset.packed is True: its rows are packed already"),
            (columns, f"rows have {columns}"),
        )
        return next((reason for applies, reason in reasons if applies), "")

    def _check_tokens_measure_rows(self) -> None:
        """Raise SettingError for a key that takes tokens for the memory of a row if rows have other
        columns.
        """
        values = values_of(self._settings)
        # None, 1 and "padded" are the defaults of these keys.
        keys = [key for key in _MEASURING_KEYS if values[key] not in (None, 1, "padded")]
        columns = self._columns_beside_tokens
        if keys and columns:
            remedy = (
                f"the memory of {', '.join(columns)} does not depend on tokens; remove it, and use"
                " micro_batch_size"
            )
            raise SettingError(keys[0], values[keys[0]], remedy)


def _layout_of(job: Job, uniform: str | None, *, is_packed_dataset: bool) -> MicroBatchLayout:
    """Return the configured layout: padding and shape constraints of micro-batches."""
    kind = job.settings.micro_batch_layout or "padded"
    # The rows of a packed dataset already have one length, so they are not padded.
    if is_packed_dataset:
        return MicroBatchLayout(uniform, kind=kind)
    multiple = job.settings.pad_to_multiple_of
    # The key is for a sequence, and a row may have two.
    if multiple > 1:
        multiple *= len(job.task.fields)
    shortest = 1
    if distributed.data_parallel_size() > 1 and "output" in job.settings.custom_sharded_layers:
        # Each rank gathers the sharded output layer once per chunk of the loss. With different
        # numbers of chunks, ranks would wait for each other forever. torch.chunk(n) may give fewer
        # than n chunks for few tokens, but always gives n from n (n - 1) + 1 tokens on.
        num_chunks = getattr(job.loss_fn, "num_output_chunks", 1)
        shortest = min(num_chunks * (num_chunks - 1) + 1, job.max_row_length or sys.maxsize)
    return MicroBatchLayout(
        uniform,
        multiple,
        longest=job.max_row_length if multiple > 1 else None,
        shortest=shortest,
        kind=kind,
    )


def _dataset(job: Job, key: str, tokenizer: Any) -> tuple[Any, bool]:
    """Return the dataset of a block, or of a list of them, and whether its rows are packed."""
    blocks = job.cfg[key]
    if not isinstance(blocks, ListConfig):
        return _built(key, blocks, tokenizer), bool(blocks.get("packed", False))
    datasets = [_built(key, block, tokenizer) for block in blocks]
    # One value if all are packed or none is.
    are_packed = {isinstance(dataset, PackedDataset) for dataset in datasets}
    if len(are_packed) != 1:
        raise SettingError(key, _names(blocks), "give datasets that are all packed, or none")
    return ConcatDataset(datasets), are_packed.pop()


def _built(key: str, block: DictConfig, tokenizer: Any) -> Any:
    """Build the dataset of one block; raise SettingError if it is empty or not map-style."""
    name = _names(block)
    with refusing(key, name, "check its source and arguments"):
        dataset = config.instantiate(block, tokenizer)
        count_rows(dataset, key=key, name=name)
    return dataset


def _names(cfg_dataset: Any) -> str:
    """Return the names of datasets for errors: their sources, or their components without one."""
    blocks = cfg_dataset if isinstance(cfg_dataset, ListConfig) else [cfg_dataset]
    return ", ".join(str(block.get("source") or block.get("_component_")) for block in blocks)
