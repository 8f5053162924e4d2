"""Fingerprints, progress bars, temporary attributes and messages."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch import _util
from adaptive_batch._util import (
    ProgressBar,
    described_with_files,
    file_signature,
    fingerprint,
    replaced,
)
from adaptive_batch.errors import SettingError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def typed(value):
    """Return a value with its types, independent of the order of keys."""
    if isinstance(value, dict):
        return [(key, typed(value[key])) for key in sorted(value)]
    if isinstance(value, list):
        return tuple(map(typed, value))
    return f"{type(value).__name__}({value!r})"


@given(left=plain, right=plain)
def test_fingerprints_are_equal_only_for_equal_parts(left, right):
    assert (fingerprint(left) == fingerprint(right)) == (typed(left) == typed(right))


def test_a_fingerprint_is_the_same_on_every_machine():
    assert fingerprint({"b": Path("x/y"), "a": (1, 2.5)}, None) == fingerprint(
        {"a": [1, 2.5], "b": "x/y"}, None
    )
    assert fingerprint("alpaca", {"max_seq_len": 512}, 1, True, None) == "e6deeb908acb0235877a510a"


@pytest.mark.parametrize(
    "part", [torch.tensor(1), np.int64(1), b"a", {1, 2}, object(), len, torch.float32, 1j]
)
def test_other_types_are_refused(part):
    for nested in (part, [part], {"a": [part]}):
        with pytest.raises((TypeError, ValueError)):
            fingerprint(nested)


def test_the_signature_of_a_file_is_its_content_or_for_a_large_file_size_and_time(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    before = file_signature(file)
    os.utime(file, (1, 1))
    assert file_signature(str(file)) == before
    file.write_bytes(b"abd")
    os.utime(file, (1, 1))
    assert file_signature(file) != before
    with file.open("wb") as handle:
        handle.truncate(64 * 2**20 + 1)  # sparse
    os.utime(file, ns=(5, 5))
    assert file_signature(file) == ["file", 64 * 2**20 + 1, 5]
    assert file_signature(tmp_path / "absent") == file_signature("no\0name") == ["missing"]


def test_the_description_of_settings_contains_files_but_not_folders(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("{}")
    settings = {"source": "json", "files": [str(file)], "cache_dir": str(tmp_path), "limit": 3}
    before = described_with_files(settings)
    (tmp_path / "written by a run").touch()
    assert described_with_files(settings) == before
    file.write_text("{} ")
    assert described_with_files(settings) != before
    assert before["source"] == "json"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def advance(times, **arguments):
    with ProgressBar(4, "steps", "trained", **arguments) as bar:
        for number in range(times):
            bar.advance(f"loss {number}")


@pytest.fixture
def clock(monkeypatch):
    """Advance the clock by 4 seconds at each call."""
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(_util.time, "monotonic", lambda: next(seconds))


@pytest.mark.usefixtures("clock")
def test_without_a_terminal_lines_are_logged_every_ten_seconds_and_at_the_end(caplog, capsys):
    caplog.set_level("INFO")
    advance(4)
    assert caplog.messages == ["loss 2: 3 of 4 steps", "loss 3: 4 of 4 steps"]
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_replaces_log_lines(caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    caplog.set_level("INFO")
    advance(4)
    assert "loss 3: 100%" in terminal.getvalue()
    assert caplog.messages == []


def test_attributes_are_restored_even_after_an_error():
    owner = SimpleNamespace(kept=1, changed=2)
    with suppress(KeyError), replaced(owner, changed=3, added=4):
        assert vars(owner) == {"kept": 1, "changed": 3, "added": 4}
        raise KeyError
    assert vars(owner) == {"kept": 1, "changed": 2}


def test_the_error_names_a_file_that_cannot_be_written(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(IsADirectoryError) as failed:
        _util.atomic_write(folder, "text for a folder")
    assert failed.value.filename == str(folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_long_value_is_cut_in_the_message() -> None:
    error = SettingError("batch_size", 10**4000, "give 1 or less")
    assert error.value == 10**4000
    assert str(error) == f"batch_size=1{'0' * 999}...: give 1 or less"
