import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch._util import described_with_files, file_signature, fingerprint

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def typed(value):
    """Return a value as text with types, independent of the order of keys."""
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(sorted(f"{typed(key)}:{typed(item)}" for key, item in value.items()))
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(typed, value)) + "]"
    return f"{type(value).__name__}({value!r})"


@given(left=plain, right=plain)
def test_fingerprints_are_equal_exactly_when_the_parts_are(left, right):
    assert (fingerprint(left) == fingerprint(right)) == (typed(left) == typed(right))


@given(mapping=st.dictionaries(st.text(), plain), seed=st.integers())
def test_the_order_of_keys_is_ignored(mapping, seed):
    items = list(mapping.items())
    random.Random(seed).shuffle(items)
    assert fingerprint(dict(items)) == fingerprint(mapping)


def test_types_nesting_and_order_of_parts_matter():
    different = [
        (1,), ("1",), (1.0,), (True,), ("true",), (None,), ("",), (), ([],), ({},), ([[]],),
        (1, 2), (2, 1), ([1, 2],), ("a", "b"), ("ab",), ({"a": 1},), ({"a": "1"},), ([["a", 1]],),
        ({"1": 1},), ({"1": "a"},), ({"null": "a"},),
    ]  # fmt: skip
    assert len({fingerprint(*parts) for parts in different}) == len(different)


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


# file_signature


def test_a_small_file_is_known_by_its_content(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    before = file_signature(file)
    os.utime(file, (1, 1))
    assert file_signature(str(file)) == before
    file.write_bytes(b"abd")
    os.utime(file, (1, 1))
    assert file_signature(file) != before


def test_a_large_file_is_known_by_size_and_time(tmp_path):
    file = tmp_path / "file"
    with file.open("wb") as handle:
        handle.truncate(64 * 2**20 + 1)  # sparse
    os.utime(file, ns=(5, 5))
    assert file_signature(file) == ["file", 64 * 2**20 + 1, 5]


def test_a_missing_file_has_a_signature(tmp_path):
    assert file_signature(tmp_path / "absent") == file_signature("no\0name") == ["missing"]


def test_every_signature_is_a_part_of_a_fingerprint(tmp_path):
    (tmp_path / "file").write_text("a")
    for path in (tmp_path / "file", tmp_path / "absent"):
        fingerprint(file_signature(path))


def test_settings_are_described_with_files_but_not_folders(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("{}")
    settings = {"source": "json", "files": [str(file)], "cache_dir": str(tmp_path), "limit": 3}
    before = described_with_files(settings)
    (tmp_path / "written by a run").touch()
    assert described_with_files(settings) == before
    file.write_text("{} ")
    assert described_with_files(settings) != before
    assert before["source"] == "json"
