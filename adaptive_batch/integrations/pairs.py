"""Batches of TRL's preference collator: all chosen rows, then all rejected rows in that order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adaptive_batch.training import RowsOfBatch, SplitBatch

from .arguments import AdaptiveArguments

# Class name in TRL, compared by name to avoid the import.
COLLATOR = "DataCollatorForPreference"


def by_pairs(adaptive: AdaptiveArguments) -> AdaptiveArguments:
    """Return arguments that split batches by pairs, unless `adaptive` has its own `split`."""
    if adaptive.split is not None:
        return adaptive
    counts_tokens = adaptive.micro_batch_tokens is not None
    row_length = adaptive.row_length
    if row_length is None:
        row_length = _longer_of_pair

    def split(batch: Mapping[str, Any]) -> SplitBatch:
        return _split_pairs(batch, counts_tokens)

    return replace(adaptive, split=split, row_length=row_length)


def _longer_of_pair(row: Mapping[str, Sequence[int]]) -> int:
    prompt = row.get("prompt_ids", ())
    return len(prompt) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def _split_pairs(batch: Mapping[str, Any], counts_tokens: bool) -> SplitBatch:
    rows = RowsOfBatch(batch)
    num_pairs = rows.num_rows // 2

    def part(pairs: Sequence[int]) -> dict[str, Any]:
        both = rows.part([*pairs, *(num_pairs + pair for pair in pairs)])
        # Tensors with one entry per pair, such as the log-probabilities of the reference model.
        of_pairs = {
            key: value[list(pairs)]
            for key, value in batch.items()
            if isinstance(value, torch.Tensor) and value.dim() and len(value) == num_pairs
        }
        return {**both, **of_pairs}

    lengths = None
    if counts_tokens and rows.lengths is not None:
        pairs_of_lengths = zip(rows.lengths[:num_pairs], rows.lengths[num_pairs:], strict=True)
        # Both rows are padded to the longer one.
        lengths = [2 * max(pair) for pair in pairs_of_lengths]
    return SplitBatch(num_pairs, part, lengths)
