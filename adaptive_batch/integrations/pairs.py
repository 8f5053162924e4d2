"""Batches of preference collators: all chosen rows, then all rejected rows in that order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from adaptive_batch.training import RowsOfBatch, SplitBatch

from .arguments import AdaptiveArguments

# Class names in TRL and in LLaMA-Factory, compared by name to avoid the imports.
_COLLATORS = ("DataCollatorForPreference", "PairwiseDataCollatorWithPadding")


def stacks_pairs(collator: Any) -> bool:
    """Return whether a collator of TRL, LLaMA-Factory or ms-swift makes such batches."""
    # ms-swift's is a method of its template; with padding_free it packs all rows into one.
    template: Any = getattr(getattr(collator, "func", None), "__self__", None)
    is_of_swift = getattr(template, "mode", "") == "rlhf" and not template.padding_free
    return is_of_swift or type(collator).__name__ in _COLLATORS


def by_pairs(adaptive: AdaptiveArguments) -> AdaptiveArguments:
    """Return arguments that split batches by pairs, unless `adaptive` has its own `split`."""
    if adaptive.split is not None:
        return adaptive
    return replace(
        adaptive,
        split=_split_pairs,
        row_length=adaptive.row_length or _longer_of_pair,
        num_labels=adaptive.num_labels or _num_pairs,
    )


def _num_pairs(batch: Mapping[str, Any]) -> int:
    return RowsOfBatch(batch).num_rows // 2


def _longer_of_pair(row: Mapping[str, Sequence[int]]) -> int:
    ids = "ids" if "chosen_ids" in row else "input_ids"
    longer = max(len(row[f"chosen_{ids}"]), len(row[f"rejected_{ids}"]))
    return len(row.get("prompt_ids", ())) + longer


def _split_pairs(batch: Mapping[str, Any]) -> SplitBatch:
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

    lengths = rows.lengths
    if lengths is not None:
        # Both rows are padded to the longer one.
        pairs_of_lengths = zip(lengths[:num_pairs], lengths[num_pairs:], strict=True)
        lengths = [2 * max(pair) for pair in pairs_of_lengths]
    return SplitBatch(num_pairs, part, lengths)
