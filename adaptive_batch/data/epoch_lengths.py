"""The lengths of rows that an epoch is planned by, and the order of its rows by them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .order import RowOrder


@dataclass(frozen=True, eq=False)
class PlannedBy:
    """The lengths by which an epoch is planned from one of its rows on.

    Attributes:
        begin: that row, counted in the order of the epoch.
        lengths: tokens of each row: int64, `[rows]`.
    """

    begin: int
    lengths: torch.Tensor

    @cached_property
    def packed(self) -> str:
        """The lengths as text, small."""
        return base64.b64encode(
            zlib.compress(self.lengths.to(torch.int32).numpy().tobytes(), level=1)
        ).decode()

    @classmethod
    def unpacked(cls, begin: int, packed: str) -> PlannedBy:
        lengths = torch.frombuffer(
            bytearray(zlib.decompress(base64.b64decode(packed))), dtype=torch.int32
        )
        return cls(begin, lengths.to(torch.int64))


class EpochLengths:
    """The lengths that the current epoch is planned by: they may be counted again within it, and
    the rows that it has trained stay trained, whatever their lengths were taken to be.

    Args:
        now: function that returns the lengths as they are now.
        row_order: orders the rows of an epoch; called as an :class:`EpochOrder`.

    Attributes:
        version: number that is another one whenever the current epoch is planned by other lengths.
    """

    def __init__(self, now: Callable[[], torch.Tensor], row_order: Callable[..., RowOrder]) -> None:
        self._now = now
        self._row_order = row_order
        self._epoch = 0
        # Those of this epoch, each from a row on.
        self._parts: list[PlannedBy] = []
        self.version = 0

    @property
    def planned_from(self) -> int:
        """The row of the current epoch from which on its plan is that of the lengths as they are
        now.
        """
        return self._parts[-1].begin if self._parts else 0

    def begin(self, epoch: int, *, rows: int) -> bool:
        """Plan what is left of an epoch by the lengths as they are now; return whether they differ
        from those that it was planned by.

        Args:
            epoch: number of the epoch.
            rows: rows of it that are trained.
        """
        parts = self.parts(epoch)
        now = PlannedBy(rows, self._now())
        differs = not torch.equal(parts[-1].lengths, now.lengths)
        self._epoch = epoch
        self._parts = parts
        if differs or not rows:
            self._parts = [*(part for part in parts if part.begin < rows), now]
        if differs or len(parts) > len(self._parts):
            self.version += 1
        return differs

    def parts(self, epoch: int) -> list[PlannedBy]:
        """Return the lengths that an epoch is planned by, each from a row on."""
        if epoch == self._epoch and self._parts:
            return self._parts
        return [PlannedBy(0, self._now())]

    def order(self, epoch: int) -> torch.Tensor:
        """Return the row numbers of an epoch that is ordered by lengths: int64, `[rows]`."""
        order = torch.zeros(0, dtype=torch.int64)
        for part in self.parts(epoch):
            used = order[: part.begin]
            order = torch.cat([used, self.left(epoch, part, used=used)])
        return order

    def left(self, epoch: int, part: PlannedBy, *, used: torch.Tensor) -> torch.Tensor:
        """Return the rows that are left of an epoch, in their order by these lengths."""
        order = self._row_order(epoch=epoch, lengths=part.lengths)[:]
        if not len(used):
            return order
        return order[~torch.isin(order, used)]

    def state_dict(self) -> dict[str, Any]:
        """Return the lengths that the current epoch is planned by, as plain values."""
        planned_by = [[part.begin, part.packed] for part in self._parts]
        return {"epoch": self._epoch, "planned_by": planned_by}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Plan the epoch as it was planned when the state was saved."""
        self._epoch = state["epoch"]
        self._parts = [PlannedBy.unpacked(begin, packed) for begin, packed in state["planned_by"]]
        self.version += 1
