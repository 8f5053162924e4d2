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
    """How rows become one batch without padding, and what keeps them apart in it.

    Attributes:
        join: function that makes one batch of rows on the host, see :func:`pack_rows`.
        lengths: function that returns the tokens of each row of such a batch.
        isolate: function that returns, given these, a context manager in which forward and backward
            run, and no row sees another.
        why_unfit: function that returns why a model would not be trained by such batches as by
            padded ones, see :func:`.why_not_packed`; empty where it would.
    """

    join: Callable[..., Batch]
    lengths: Callable[[Batch], list[int]]
    isolate: Callable[[Sequence[int]], AbstractContextManager[Any]]
    why_unfit: Callable[..., str]


# Of each kind of layout that does not pad.
FORMS: Mapping[str, BatchForm] = {
    "packed": BatchForm(pack_rows, packed_lengths, isolated_rows, why_not_packed)
}
assert FORMS.keys() == {kind for kind, layout in LAYOUT_KINDS.items() if not layout.pads}
