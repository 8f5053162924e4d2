"""Validation in which a rank fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.runners import build_runner

from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit
from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune.trainer import Validation


class UnreadableRows:
    """Rows that cannot be read; counts how often ranks are asked for changed lengths."""

    num_recounts = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        raise SettingError("dataset_val", "rows", f"row {number} cannot be read")

    def recount(self) -> str:
        """Count."""
        self.num_recounts += 1
        return ""


def test_a_rank_that_fails_in_validation_begins_no_collective_alone() -> None:
    rows = UnreadableRows()
    runner = build_runner(
        torch.nn.Linear(1, 1), MicroBatchLimit(2), collate=dict, mean_loss=lambda batch: batch["x"]
    )
    settings = SimpleNamespace(
        batch_size_val=2, run_val_every_n_steps=1, validated_rows=lambda rows, ranks: rows
    )
    job = SimpleNamespace(settings=settings, ranks=1, device=torch.device("cpu"), memory=None)
    data = SimpleNamespace(
        dataset_val=rows, loss_val=lambda loss: loss, layout_val=MicroBatchLayout()
    )
    log = SimpleNamespace(limit_change=lambda change, **how: None)
    parts: Any = (job, data, SimpleNamespace(engine=runner), log)
    validation = Validation(*parts)
    with pytest.raises(SettingError, match="row 0 cannot be read"):
        validation.run_where_due(1)
    assert rows.num_recounts == 0
