"""Errors name an invalid row and its dataset; rows without a label are counted."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import ConcatDataset

from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune.rows import DatasetRows
from adaptive_batch.torchtune.task import NextTokens


class Listed:
    """A dataset of a list of rows; reading an exception in the list raises it."""

    def __init__(self, rows, columns=()):
        self.rows = rows
        self._data = SimpleNamespace(column_names=[*columns])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        if isinstance(row, Exception):
            raise row
        return row


GOOD = {"tokens": [1, 2, 3], "labels": [-100, 2, 3]}
MASKED = {"tokens": [1, 2, 3], "labels": [1, -100, -100]}
MISSING = KeyError("instruction")


def rows_of(dataset, name="mine", **cfg):
    cfg = OmegaConf.create({"dataset": {"_component_": name}, "tokenizer": {}} | cfg)
    job = SimpleNamespace(
        device=torch.device("cpu"),
        max_seq_len=None,
        vocab_size=None,
        cfg=cfg,
        task=NextTokens(cfg, SimpleNamespace(ignore_index=-100)),
    )
    return DatasetRows(job, "dataset", dataset, name=name)


def refusal(read):
    with pytest.raises(SettingError) as refused:
        read()
    return refused.value


def test_the_error_names_an_unreadable_row_and_its_columns():
    rows = rows_of(Listed([GOOD, MISSING, GOOD], columns=["input", "output"]))
    error = refusal(lambda: rows[1])
    assert error.key == "dataset"
    assert "row 1 cannot be read" in str(error)
    assert "columns are ['input', 'output']" in str(error)


def test_the_error_names_the_dataset_of_a_row_in_a_concatenation():
    both = ConcatDataset([Listed([GOOD, GOOD]), Listed([GOOD, {"tokens": []}])])
    error = refusal(lambda: rows_of(both, name="first, second")[3])
    assert error.value == "second"
    assert "row 1 has no tokens" in str(error)


def test_rows_without_a_label_are_counted(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("ADAPTIVE_BATCH_CACHE", str(tmp_path))
    rows = rows_of(Listed([GOOD, MASKED, MASKED]), tokenizer={"max_seq_len": 3})
    with caplog.at_level("WARNING", logger="adaptive_batch"):
        _ = rows.lengths
    assert "2 of 3 rows have no label" in caplog.text
    assert "3 rows may be cut to tokenizer.max_seq_len=3" in caplog.text
