"""The keys of validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adaptive_batch._util import check_whole
from adaptive_batch.errors import SettingError

from .keys import auto_or_whole, whole


@dataclass(frozen=True)
class ValidationSettings:
    """Validation during training.

    Attributes:
        every_n_steps: validate after each so many optimizer steps.
        batch_size: rows of a validation batch.
        fits_itself: run as many rows at once as fit (``batch_size_val: auto``).
        max_batches: validate on the first so many batches; None for all.
    """

    every_n_steps: int
    batch_size: int
    fits_itself: bool
    max_batches: int | None

    def rows_of(self, rows: int, *, ranks: int = 1) -> int:
        """How many of the `rows` of a dataset are validated on: its first; `ranks` run a batch each at a time."""
        return rows if self.max_batches is None else min(rows, self.max_batches * self.batch_size * ranks)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ValidationSettings | None:
        """Read and check the keys of validation; None where there is none.

        Raises:
            SettingError: a value cannot be used, or `dataset_val` is missing.
        """
        every = whole(config, "run_val_every_n_steps")
        size = auto_or_whole(config, "batch_size_val")
        most = config.get("max_validation_batches")
        most = None if most in (None, -1) else check_whole("max_validation_batches", most)
        if every is None:
            return None
        dataset = config.get("dataset_val")
        if dataset is None:
            raise SettingError(
                "run_val_every_n_steps", every, "there is nothing to validate on; set dataset_val to a dataset block"
            )
        blocks = dataset if isinstance(dataset, list) else [dataset]
        if not blocks or not all(isinstance(block, Mapping) and block.get("_component_") for block in blocks):
            raise SettingError(
                "dataset_val", dataset, "give a block with _component_, as dataset is, or a list of such"
            )
        rows = size if isinstance(size, int) else config["batch_size"]
        return cls(every, rows, size == "auto", most)
