"""Formats of amounts, counts and values in messages."""

from __future__ import annotations

import pytest

from adaptive_batch._util import count, format_bytes
from adaptive_batch.errors import SettingError


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (80 * 2**30, "80.00 GiB"),
        (2**30 + 2**29, "1.50 GiB"),
        (103 * 2**20, "0.101 GiB"),
        (16 * 2**20, "0.016 GiB"),
        (16 * 2**20 - 1, "16.00 MiB"),
        (3000 * 2**10, "2.93 MiB"),
        (2**17, "0.125 MiB"),
        (2**16, "64.00 KiB"),
        (3000, "2.93 KiB"),
        (1023, "1023 bytes"),
        (11, "11 bytes"),
        (1, "1 byte"),
        (0, "0 bytes"),
    ],
)
def test_memory_is_formatted_in_a_suitable_unit(num_bytes: int, said: str) -> None:
    assert format_bytes(num_bytes) == said


@pytest.mark.parametrize(("number", "said"), [(0, "0 rows"), (1, "1 row"), (1234, "1,234 rows")])
def test_counts_are_formatted(number: int, said: str) -> None:
    assert count(number, "row", ",") == said


def test_a_long_value_is_cut_in_the_message() -> None:
    error = SettingError("batch_size", 10**4000, "give 1 or less")
    assert error.value == 10**4000
    assert str(error) == f"batch_size=1{'0' * 999}...: give 1 or less"
