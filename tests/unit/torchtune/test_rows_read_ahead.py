"""The rows of a run are read ahead where a device trains, and not where the processor does."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from adaptive_batch.torchtune.rows import DatasetRows
from adaptive_batch.torchtune.task import NextTokens


class Watched:
    """Rows of three tokens; remembers in which thread each was read."""

    def __init__(self) -> None:
        self.readers: dict[int, str] = {}

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        self.readers[number] = threading.current_thread().name
        return {"tokens": [number, 1, 2], "labels": [number, 1, 2]}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_are_read_ahead_on_an_accelerator_alone(device: str) -> None:
    loss = SimpleNamespace(ignore_index=-100)
    job: Any = SimpleNamespace(
        device=torch.device(device),
        max_seq_len=None,
        vocab_size=None,
        cfg={},
        task=NextTokens(OmegaConf.create(), loss),
        settings=None,
    )
    watched = Watched()
    rows = DatasetRows(job, "dataset", watched, name="rows")
    # The first are watched for random numbers that they draw.
    first = [rows[number] for number in range(40)]
    rows.expect(range(40, 60))
    time.sleep(0.05)
    assert len(watched.readers) == 40, "read where kernels are still to be launched"
    rows.read_ahead()
    deadline = time.monotonic() + 60
    while device != "cpu" and len(watched.readers) < 60 and time.monotonic() < deadline:
        time.sleep(0.01)
    rest = [rows[number] for number in range(40, 60)]
    assert [row["tokens"][0] for row in first + rest] == list(range(60))
    main = threading.current_thread().name
    assert {watched.readers[number] == main for number in range(40)} == {True}
    assert {watched.readers[number] == main for number in range(40, 60)} == {device == "cpu"}
