"""An amount of memory in an error says something, however small it is."""

from __future__ import annotations

import pytest

from adaptive_batch._util import format_bytes


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
def test_memory_is_said_in_the_unit_that_shows_it(num_bytes: int, said: str) -> None:
    assert format_bytes(num_bytes) == said
