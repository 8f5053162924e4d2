"""The forms of a batch whose rows are not padded, by the kind of their layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from adaptive_batch.data import LAYOUT_KINDS

from .packing import Batch, isolated_rows, pack_rows, packed_lengths
from .packing_check import why_not_packed


@dataclass(frozen=True)
class BatchForm:
    """Functions that make one batch of rows without padding and isolate the rows in it.

    Attributes:
        join: function that makes one batch of rows on the host, see :func:`pack_rows`.
        lengths: function that returns the tokens of each row of such a batch.
        isolate: ``isolate(lengths)`` returns a context manager for forward and backward, in which
            no row attends to another.
        why_unfit: function that returns why such batches would train a model differently from
            padded ones, see :func:`.why_not_packed`; empty if they would not.
    """

    join: Callable[..., Batch]
    lengths: Callable[[Batch], list[int]]
    isolate: Callable[[Sequence[int]], AbstractContextManager[Any]]
    why_unfit: Callable[..., str]


# Forms of the layouts that do not pad.
FORMS: Mapping[str, BatchForm] = {
    "packed": BatchForm(pack_rows, packed_lengths, isolated_rows, why_not_packed)
}
assert FORMS.keys() == {kind for kind, layout in LAYOUT_KINDS.items() if not layout.pads}
