"""The rows of a configured dataset: each is checked as it is read, and all of them are measured
once.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from adaptive_batch import distributed
from adaptive_batch._torch import disable_current_modes
from adaptive_batch._util import (
    cache_directory,
    count,
    described_with_files,
    fingerprint,
    installed_version,
)
from adaptive_batch.data import Measured, ReadAhead, measure_rows
from adaptive_batch.errors import AdaptiveBatchError, SettingError

from .config_errors import as_dict, one_line
from .job import Job
from .sources import sources_of

log = logging.getLogger("adaptive_batch")

_TOKENS, _REAL, _WORST = range(3)  # what is measured of a row


class Rows(Dataset[Any]):
    """The rows of ``dataset`` or ``dataset_val``, each as its dataset gives it.

    Args:
        job: of the run; its model takes so many tokens of a row, out of its vocabulary.
        key: of the configuration.
        dataset: map-style, with rows.
        name: of the dataset, for errors.
        real_tokens: counts the tokens of a row that are not padding; None counts all.

    Raises:
        SettingError: a row that is read cannot be, or is none that the model takes; it names the
            row by its number.
    """

    def __init__(
        self,
        job: Job,
        key: str,
        dataset: Any,
        *,
        name: str,
        real_tokens: Callable[[Mapping[str, Any]], int] | None = None,
    ) -> None:
        self._job = job
        self._key = key
        self._dataset = dataset
        self._name = name
        self._ahead = ReadAhead(
            dataset
        )  # each row is checked where it is used, not where it is read
        if (
            job.device.type != "cpu"
        ):  # which training itself keeps busy: there it cost up to 3% of a step
            self.expect = self._ahead.expect
        self._real_tokens = real_tokens or (lambda row: len(row["tokens"]))
        self._measured: Measured | None = None
        self._cache_file: Path | None = None
        self._trusts_cache = True
        self._changed = ""  # how a row differs from what the cache says, as a sentence

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        with disable_current_modes():  # rows are real where an estimate reads them, too
            return self._read(number)

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of every row, counted once and cached on disk: int64, `[rows]`."""
        return self._numbers[:, _TOKENS]

    @property
    def real_lengths(self) -> torch.Tensor:
        """Those of them that are not padding: int64, `[rows]`."""
        return self._numbers[:, _REAL]

    def num_real_tokens(self, row: Mapping[str, Any]) -> int:
        """Count the tokens of a row that are not padding."""
        return self._real_tokens(row)

    def recount(self) -> str:
        """Drop lengths that were read from the cache where a row that was read since, on any rank,
        is not as long; return which row.

        They are counted again when they are asked for. A collective, if the lengths came from the
        cache.
        """
        if (
            self._measured is None
            or not self._measured.is_cached
            or not distributed.any_of_ranks(bool(self._changed))
        ):
            return ""
        changed = next(filter(None, distributed.all_gather(self._changed)))
        if self._cache_file is not None:
            with suppress(OSError):
                self._cache_file.unlink(missing_ok=True)
        self._measured = None
        self._trusts_cache = False
        self._changed = ""
        return changed

    def _read(self, number: int) -> Any:
        try:
            row = self._ahead[number]
        except AdaptiveBatchError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {one_line(error)}"
            raise self._refused(
                number, f"cannot be read ({why}); correct it, or filter it out"
            ) from error
        numbers = self._measure(number, row)
        self._check(number, numbers)
        counted = (
            int(self._measured.numbers[number, _TOKENS]) if self._measured else numbers[_TOKENS]
        )
        if counted != numbers[_TOKENS] and not self._changed:
            self._changed = (
                f"row {number} has {count(numbers[_TOKENS], 'token')}, and had {counted} when it"
                " was counted"
            )
            if self._measured and not self._measured.is_cached:
                message = (
                    "rows change as they are read, so that a step may hold other than was planned"
                )
                log.warning("%s: %s; %s", self._key, self._changed, message)
        return row

    @property
    def _numbers(self) -> torch.Tensor:
        if self._measured is None:
            self._measured = distributed.from_rank_zero(self._measure_all)
            numbers = self._measured.numbers
            worst = (
                numbers[:, _TOKENS].argmax(),
                numbers[:, _WORST].argmin(),
                numbers[:, _WORST].argmax(),
            )
            for number in map(
                int, worst
            ):  # what was cached may have been measured for another model
                self._check(number, numbers[number].tolist())
        return self._measured.numbers

    def _measure_all(self) -> Measured:
        configured = as_dict(self._job.cfg)
        blocks = configured[self._key], configured["tokenizer"]
        described = described_with_files(blocks), sources_of(self._dataset, blocks)
        name = fingerprint("rows", described, installed_version("torchtune"))
        self._cache_file = cache_directory() / f"lengths-{name}.bin"
        return measure_rows(
            self,
            self._measure,
            num_numbers=3,
            cache_file=self._cache_file,
            reads_cache=self._trusts_cache,
        )

    def _measure(self, number: int, row: Any) -> list[int]:
        """Return the tokens of a row, those that are not padding, and its token id that is most
        likely outside of a vocabulary.
        """
        tokens, labels = (
            row.get(key) if isinstance(row, Mapping) else None for key in ("tokens", "labels")
        )
        ids = self._ids(number, "tokens", tokens)
        if not len(ids):
            raise self._refused(number, "has no tokens; filter it out")
        extremes = [int(ids.min()), int(ids.max())]
        if labels is None and self._job.cfg.get("collate_fn") is None:
            raise self._refused(
                number,
                f"has no labels; give each token its label, or {self._job.loss_fn.ignore_index} for"
                " none",
            )
        if labels is not None:
            targets = self._ids(number, "labels", labels)
            if len(targets) != len(ids):
                raise self._refused(
                    number,
                    f"has {count(len(ids), 'token')} and {count(len(targets), 'label')}; give each"
                    " token its label",
                )
            targets = targets[targets != self._job.loss_fn.ignore_index]
            extremes += [int(targets.min()), int(targets.max())] if len(targets) else []
        least = min(extremes)
        most = max(extremes)
        return [len(ids), self._real_tokens(row), least if least < 0 else most]

    def _ids(self, number: int, key: str, ids: Any) -> np.ndarray[Any, Any]:
        """Return what a row has under a key as numbers `[tokens]`."""
        ids = ids.cpu() if isinstance(ids, torch.Tensor) else ids
        if isinstance(ids, list | tuple) or len(getattr(ids, "shape", ())) == 1:
            try:  # numpy takes four times as long to find out what a list holds
                packed = (
                    struct.pack(f"{len(ids)}q", *ids) if isinstance(ids, list | tuple) else None
                )
                found = np.asarray(ids) if packed is None else np.frombuffer(packed, np.int64)
            except (TypeError, ValueError, struct.error):
                found = np.empty((0, 0))
            if found.ndim == 1 and found.dtype.kind in "iu":
                return found
        raise self._refused(
            number, f"must be a mapping with a list or 1-D tensor of whole numbers '{key}'"
        )

    def _check(self, number: int, numbers: list[int]) -> None:
        """Refuse a row that the model does not take."""
        job = self._job
        length = numbers[_TOKENS]
        worst = numbers[_WORST]
        if job.max_seq_len is not None and length > job.max_seq_len:
            most = job.max_seq_len
            remedy = (
                f"has {count(length, 'token')}, and the model takes {most} at most; set"
                f" tokenizer.max_seq_len={most} or less"
            )
            raise self._refused(number, remedy)
        if job.vocab_size is not None and not 0 <= worst < job.vocab_size:
            has = (
                f"has the token id {worst}, and the model's vocabulary has 0 to"
                f" {job.vocab_size - 1}"
            )
            raise self._refused(
                number, f"{has}; give the tokenizer of this model, and the model its vocab_size"
            )

    def _refused(self, number: int, why: str) -> SettingError:
        return SettingError(self._key, self._name, f"row {number} {why}")
