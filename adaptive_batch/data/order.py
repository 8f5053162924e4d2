"""In which order the rows of an epoch come."""

from __future__ import annotations

import hashlib

import torch

from adaptive_batch.errors import SettingError

ORDERS = ("dataloader", "random", "seqlen")


def row_order(
    num_rows: int,
    *,
    order: str = "dataloader",
    lengths: torch.Tensor | None = None,
    window: int | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> torch.Tensor:
    """Orders the rows of an epoch; the same arguments give the same order on every rank and machine.

    Sorting by length costs the least padding, and its batches are the least random: each has rows of one length, and
    the lengths rise through the epoch. Within windows only neighbours are alike, and every epoch differs.

    Args:
        num_rows: rows of the epoch.
        order: ``dataloader`` keeps them as they come; ``random`` draws a permutation for each epoch; ``seqlen`` sorts
            from short to long, rows of equal length in an order drawn for each epoch.
        lengths: int tensor ``[rows]``, tokens of each row; needed by ``seqlen``.
        window: with ``seqlen``, shuffle the rows and sort only within each so many of them; None sorts the whole epoch.
        seed: of what is drawn.
        epoch: from 0; what is drawn differs from epoch to epoch.

    Returns:
        int64 tensor ``[rows]``: row numbers, each once.

    Raises:
        SettingError: `order` is unknown, `window` below 1, or ``seqlen`` has no length for each row.
    """
    if order not in ORDERS:
        raise SettingError("order", order, f"must be one of {', '.join(ORDERS)}")
    if window is not None and window < 1:
        raise SettingError("window", window, "must be 1 row or more, or None to sort the whole epoch")
    if order == "dataloader":
        return torch.arange(num_rows)
    shuffled = torch.randperm(num_rows, generator=_generator(seed, epoch))
    if order == "random":
        return shuffled
    if lengths is None or len(lengths) != num_rows:
        given = None if lengths is None else f"{len(lengths)} of them"
        raise SettingError("lengths", given, f"order='seqlen' needs the length of each of the {num_rows} rows")
    keys = lengths.to(torch.int64)[shuffled]
    if window is not None and window < num_rows:
        keys += torch.arange(num_rows).div_(window, rounding_mode="floor").mul_(int(keys.max()) + 1)
    # Stable: rows of equal length stay as they were shuffled.
    return shuffled[torch.sort(keys, stable=True).indices]


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Returns a generator for one epoch. Hashed, as seed + epoch would repeat one seed's epochs under the next seed."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
