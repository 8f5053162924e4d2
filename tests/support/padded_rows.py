"""Rows of tokens as padded batches, as trainers collate them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def collate(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in features)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in features:
        ids = row["input_ids"]
        padding = longest - len(ids)
        batch["input_ids"].append([*ids, *[0] * padding])
        batch["attention_mask"].append([*[1] * len(ids), *[0] * padding])
        batch["labels"].append([*ids, *[-100] * padding])
    return {name: torch.tensor(values) for name, values in batch.items()}
