"""Rows of a configured dataset: checked when they are read, measured once."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import (
    cache_directory,
    count,
    described_with_files,
    fingerprint,
    installed_version,
)
from adaptive_batch.data import ReadAhead, count_other_bytes, measure_rows
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.memory import RandomState

from .checks import values_at
from .configuration import as_dict, one_line
from .job import Job

private = PrivateNames("reading rows")

log = logging.getLogger("adaptive_batch")


class RowMeasures(NamedTuple):
    """Measurements of a row as numbers, or of all rows as columns: int64 ``[rows]``.

    Attributes:
        tokens: tokens of the row, with padding.
        real: tokens that are not padding.
        extreme_token_id: the smallest token id if it is negative, else the largest: outside of the
            vocabulary if any id is.
        other_bytes: bytes of all but the text, see :func:`.count_other_bytes`.
        labels: labels after the first token.
    """

    tokens: Any
    real: Any
    extreme_token_id: Any
    other_bytes: Any
    labels: Any


class DatasetRows(Dataset[Any]):
    """The rows of ``dataset`` or ``dataset_val``, each as its dataset gives it.

    Args:
        job: job of the run; its model limits a row's length and token ids.
        key: key of the configuration.
        dataset: map-style dataset with rows.
        name: name of the dataset, for errors.
        num_real_tokens: function that counts the tokens of a row that are not padding; None counts
            all.

    Attributes:
        num_real_tokens: function that counts the tokens of a row that are not padding.

    Raises:
        SettingError: a row cannot be read, or the model does not take it. The message has the
            number of the row.
    """

    def __init__(
        self,
        job: Job,
        key: str,
        dataset: Any,
        *,
        name: str,
        num_real_tokens: Callable[[Mapping[str, Any]], int] | None = None,
    ) -> None:
        self._job = job
        self._task = job.task
        self._key = key
        self._dataset = dataset
        self._name = name
        # The thread reads rows that are not checked yet. It starts only when the device is busy
        # (read_ahead()), since Python in a thread delays the launch of kernels.
        self._ahead = ReadAhead(dataset)
        self.num_real_tokens = num_real_tokens or job.task.num_real_tokens
        # None until a property needs them.
        self._measured: RowMeasures | None = None
        self._cache_file: Path | None = None
        # False after a row differed from the cache.
        self._trusts_cache = True
        # Sentence about the first row whose length has changed since it was measured.
        self._changed_row = ""

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        # An estimate runs on fake tensors, but needs rows with values.
        with private.disable_current_modes():
            return self._read(number)

    def expect(self, numbers: Sequence[int]) -> None:
        """Set the rows that a thread reads ahead once :meth:`read_ahead` starts it, and forget all
        other rows that it has read.
        """
        # Training on a CPU leaves it no idle time: reading ahead cost up to 3% of a step.
        if self._job.device.type != "cpu":
            self._ahead.expect(numbers)

    def read_ahead(self) -> None:
        """Start a thread that reads the expected rows, if there are any."""
        self._ahead.start()

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of every row, counted once and cached on disk: int64, `[rows]`."""
        return self._columns.tokens  # type: ignore[no-any-return]

    @property
    def real_lengths(self) -> torch.Tensor:
        """Tokens of every row that are not padding: int64, `[rows]`."""
        return self._columns.real  # type: ignore[no-any-return]

    @property
    def other_bytes(self) -> torch.Tensor:
        """Bytes of each row without its text, see :func:`.count_other_bytes`: int64, `[rows]`."""
        return self._columns.other_bytes  # type: ignore[no-any-return]

    def has_label(self, num_rows: int) -> bool:
        """Return whether any of the first rows has a label after its first token."""
        with RandomState(self._job.device):
            return any(self._measure(number, self[number]).labels for number in range(num_rows))

    def recount(self) -> str:
        """Drop the lengths if a row that any rank has read has another length now. A collective, if
        the lengths are known.

        Returns:
            Sentence about the changed row; empty without one.
        """
        if self._measured is None or not distributed.any_of_ranks(bool(self._changed_row)):
            return ""
        changed_row = next(filter(None, distributed.all_gather(self._changed_row)))
        self._measured = None
        self._trusts_cache = False
        self._changed_row = ""
        return changed_row

    def _read(self, number: int) -> Any:
        """Read and check a row."""
        try:
            row = self._ahead[number]
        except AdaptiveBatchError:
            raise
        except Exception as error:
            # torchtune's datasets keep one of Hugging Face as `_data`.
            columns = getattr(getattr(self._dataset, "_data", None), "column_names", "unknown")
            problem = (
                f"cannot be read ({type(error).__name__}: {one_line(error)}); its columns are"
                f" {columns}; correct the row or filter it out or, if no row can be read, correct"
                " column_map, conversation_style or the prompt template"
            )
            raise self._refused(number, problem) from error
        measures = self._measure(number, row)
        self._check(number, measures)
        if self._measured is not None:
            self._compare(number, measures.tokens, self._measured)
        return row

    def _compare(self, number: int, num_tokens: int, measured: RowMeasures) -> None:
        """Log a row whose length has changed since it was measured, unless one was logged.

        The cached lengths are removed, so that a resumed run measures all rows again, as this run
        does before the next epoch.
        """
        num_measured = int(measured.tokens[number])
        if num_measured == num_tokens or self._changed_row:
            return
        self._changed_row = (
            f"row {number} has {count(num_tokens, 'token')}, and had {num_measured} when it was"
            " counted"
        )
        if self._cache_file is not None:
            with suppress(OSError):
                self._cache_file.unlink()
        effect = "this epoch keeps its steps, and all rows are counted again before the next"
        log.warning("%s: %s; %s", self._key, self._changed_row, effect)

    @property
    def _columns(self) -> RowMeasures:
        """Measurements of all rows; the first read is a collective."""
        if self._measured is None:
            table = distributed.from_rank_zero(self._measure_all)
            self._measured = RowMeasures(*table.unbind(1))
            # Rows from the cache are not checked yet, and may have been measured for another model.
            # If it takes these rows, it takes all.
            extremes = self._measured.extreme_token_id
            worst_rows = self._measured.tokens.argmax(), extremes.argmin(), extremes.argmax()
            for number in map(int, worst_rows):
                self._check(number, RowMeasures(*table[number].tolist()))
        return self._measured

    def _measure_all(self) -> torch.Tensor:
        """Return the measurements of all rows ``[rows, 5]``, from the cache if it has them, and log
        rows without labels.
        """
        configured = as_dict(self._job.cfg)
        blocks = configured[self._key], configured["tokenizer"]
        # A ConcatDataset has several.
        datasets = getattr(self._dataset, "datasets", [self._dataset])
        # torchtune's datasets keep one of Hugging Face as `_data`, which has a hash of its rows.
        hashes = [getattr(getattr(each, "_data", each), "_fingerprint", None) for each in datasets]
        name = fingerprint(
            "rows, their labels and bytes",
            described_with_files(blocks),
            hashes,
            installed_version("torchtune"),
        )
        self._cache_file = cache_directory() / f"lengths-{name}.bin"
        table = measure_rows(
            self,
            self._measure,
            num_numbers=5,
            cache_file=self._cache_file,
            reads_cache=self._trusts_cache,
        )
        columns = RowMeasures(*table.unbind(1))
        num_unlabelled = int((columns.labels == 0).sum())
        if num_unlabelled:
            rows = count(len(table), "row")
            message = f"{num_unlabelled} of {rows} have no label, and train nothing"
            # The usual cause: a long prompt, after which the answer is cut off.
            limit = next(iter(values_at(self._job.cfg, "tokenizer.max_seq_len")), sys.maxsize)
            num_cut = int((columns.tokens >= limit * len(self._task.fields)).sum())
            if num_cut:
                message += f"; {count(num_cut, 'row')} may be cut to tokenizer.max_seq_len={limit}"
            log.warning("%s: %s", self._key, message)
        return table

    def _measure(self, number: int, row: Any) -> RowMeasures:
        """Measure a row; raise SettingError if its tokens or labels are malformed."""
        ignored = self._task.ignore_index
        extremes = []
        longest = 0
        num_labels = 0
        # A row that is not a mapping is refused as one without tokens.
        fields = row if isinstance(row, Mapping) else {}
        for tokens_key, labels_key in self._task.fields:
            ids = self._ids(number, tokens_key, fields.get(tokens_key))
            if not len(ids):
                raise self._refused(number, f"has no {tokens_key}; filter it out")
            longest = max(longest, len(ids))
            extremes += [int(ids.min()), int(ids.max())]
            labels = fields.get(labels_key)
            # A collate function that makes the labels is trusted to make some.
            if labels is None and self._job.cfg.get("collate_fn") is not None:
                num_labels += 1
                continue
            label_ids = self._labels(number, labels_key, labels, num_tokens=len(ids))
            num_labels += int((label_ids[1:] != ignored).sum())
            trained_ids = label_ids[label_ids != ignored]
            if len(trained_ids):
                extremes += [int(trained_ids.min()), int(trained_ids.max())]
        # A negative id is in no vocabulary. Without one, the largest id decides.
        smallest = min(extremes)
        return RowMeasures(
            tokens=longest * len(self._task.fields),
            real=self.num_real_tokens(row),
            extreme_token_id=smallest if smallest < 0 else max(extremes),
            other_bytes=count_other_bytes(row),
            labels=num_labels,
        )

    def _labels(
        self, number: int, key: str, labels: Any, *, num_tokens: int
    ) -> np.ndarray[Any, Any]:
        """Return the labels of a sequence as an array `[tokens]`."""
        ignored = self._task.ignore_index
        if labels is None:
            problem = f"has no {key}; give each token its label, or {ignored} for none"
            raise self._refused(number, problem)
        label_ids = self._ids(number, key, labels)
        if len(label_ids) != num_tokens:
            raise self._refused(
                number,
                f"has {count(num_tokens, 'token')} and {count(len(label_ids), 'label')}; give each"
                " token its label",
            )
        # With another ignore_index, the loss would train on torchtune's mark of an ignored label.
        if ignored != CROSS_ENTROPY_IGNORE_IDX and CROSS_ENTROPY_IGNORE_IDX in label_ids:
            raise SettingError(
                "loss.ignore_index",
                ignored,
                f"{self._name} marks ignored labels by {CROSS_ENTROPY_IGNORE_IDX}; give this value",
            )
        return label_ids

    def _ids(self, number: int, key: str, ids: Any) -> np.ndarray[Any, Any]:
        """Return the values of a row under a key as an array `[tokens]`."""
        if isinstance(ids, torch.Tensor):
            ids = ids.cpu()
        # These errors mean other values than whole numbers, which are refused below.
        with suppress(TypeError, ValueError):
            array = np.asarray(ids)
            # An empty list becomes an array of floats.
            if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
                return array
        raise self._refused(
            number, f"must be a mapping with a list or 1-D tensor of whole numbers '{key}'"
        )

    def _check(self, number: int, measures: RowMeasures) -> None:
        """Raise SettingError if the model does not take a row."""
        job = self._job
        length = self._task.sequence_length(measures.tokens)
        # If any id is outside of the vocabulary, this one is.
        token_id = measures.extreme_token_id
        if job.max_seq_len is not None and length > job.max_seq_len:
            remedy = (
                f"has {count(length, 'token')}, and the model takes {job.max_seq_len} at most; set"
                f" tokenizer.max_seq_len={job.max_seq_len} or less"
            )
            raise self._refused(number, remedy)
        if job.vocab_size is not None and not 0 <= token_id < job.vocab_size:
            problem = (
                f"has the token or label {token_id}, and the model's vocabulary has 0 to"
                f" {job.vocab_size - 1}"
            )
            raise self._refused(
                number,
                f"{problem}; use this model's tokenizer, and set the model's vocab_size to match",
            )

    def _refused(self, number: int, problem: str) -> SettingError:
        """Return the error for a row; of several datasets, it names one and the row within it."""
        name = self._name
        number_within = number
        if isinstance(self._dataset, ConcatDataset):
            starts = [0, *self._dataset.cumulative_sizes]
            index = bisect_right(starts, number) - 1
            name = name.split(", ")[index]
            number_within -= starts[index]
        return SettingError(self._key, name, f"row {number_within} {problem}")
