"""Token budgets: the rows of an epoch are put into batches in their order, with one budget or one
for each step.

Pure, no device; the time is close to linear in the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import KEY, Progress, request_batch

LONG_ROWS = ("error", "drop", "alone")
# Most rows that are Python numbers at one time: tensors take a quarter of the memory.
_CHUNK = 65_536


@dataclass(frozen=True, eq=False)
class TokenBatchPlan:
    """The batches of an epoch: a sequence of lists of row numbers, held as tensors.

    Attributes:
        rows: int64 ``[kept rows]``, row numbers in the order of use, each once.
        starts: int64 ``[batches + 1]``, start of each batch in `rows`; the last is the number of
            kept rows.
        dropped: int64, numbers of the rows that are in no batch (``long_rows="drop"``).
    """

    rows: torch.Tensor
    starts: torch.Tensor
    dropped: torch.Tensor

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> list[int]:
        start, end = self.starts[range(len(self))[index] :][:2].tolist()
        batch: list[int] = self.rows[start:end].tolist()
        return batch

    @property
    def sizes(self) -> torch.Tensor:
        """Rows of each batch, int64 ``[batches]``."""
        return self.starts.diff()

    def tolist(self) -> list[list[int]]:
        """Return all batches as lists of row numbers."""
        rows = self.rows.tolist()
        return [rows[start:end] for start, end in pairwise(self.starts.tolist())]


@dataclass(frozen=True)
class _Limits:
    """Limits of each batch; see :func:`plan_batches`."""

    min_rows: int
    max_rows: int | None
    long_rows: str
    divisible: bool

    def is_full(self, rows: int, tokens: int, max_tokens: int) -> bool:
        """Return whether a batch of `rows` rows takes no further row, which would bring it to
        `tokens` tokens. `min_rows` comes before the budget.
        """
        return rows >= self.min_rows and (tokens > max_tokens or rows == self.max_rows)

    def kept(self, rows: int) -> int:
        """Return the rows of a batch that may hold `rows` rows: all, or with `divisible` up to an
        eighth fewer.
        """
        if not self.divisible:
            return rows
        # An eighth of the rows at most is left: 2 ** (floor(log2(rows)) - 3).
        multiple = 1 << max(0, rows.bit_length() - 4)
        fewer = rows - rows % multiple
        return fewer if fewer >= self.min_rows else rows


def plan_batches(
    lengths: Sequence[int] | torch.Tensor,
    max_tokens: int,
    *,
    order: torch.Tensor | None = None,
    min_rows: int = 1,
    max_rows: int | None = None,
    long_rows: str = "error",
    divisible: bool = False,
    last_rows: int = 1,
) -> TokenBatchPlan:
    """Plan batches that are filled to a budget of tokens. Each row of `order` is in one batch, or
    listed as dropped.

    Rows are taken in order. A batch is closed when it has `min_rows` rows and the next row would
    take it beyond `max_tokens` or `max_rows`. So a batch of `min_rows` long rows may have more than
    `max_tokens`. The last batch has the remaining rows, which may be fewer than `min_rows`.

    Args:
        lengths: int ``[rows]``, tokens of each row, 1 or more.
        max_tokens: the most tokens of a batch of more than `min_rows` rows.
        order: int64, row numbers in the order of their use, each at most once; None for the order
            of the dataset.
        min_rows: fewest rows of a batch, except the last.
        max_rows: most rows of a batch; None for no limit.
        long_rows: treatment of a row that alone has more than `max_tokens`: ``error``, ``drop``, or
            ``alone``, a batch of one row.
        divisible: whether the number of rows of each batch but the last is a multiple of a power of
            two of 1/16 to 1/8 of it, so that the batch divides into equal micro-batches. A batch
            then has up to 1/8 fewer rows than would fit, but not fewer than `min_rows`.
        last_rows: rows that the last batch should have. It takes missing ones from the batch
            before, unless `divisible` is set, it would then pass `max_tokens`, or the batch before
            would have fewer than `last_rows`.

    Raises:
        SettingError: a row is too long, or the shortest `min_rows` rows do not fit in one batch.
            The message names the configured keys.
    """
    limits = _Limits(min_rows, max_rows, long_rows, divisible)
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    _check_lengths(lengths)
    rows = torch.arange(len(lengths)) if order is None else order
    sizes = lengths[rows]
    is_long = sizes > max_tokens
    dropped = rows[:0]
    if long_rows == "error" and is_long.any():
        row = int(rows[is_long][0])
        remedy = (
            f"row {row} alone has {int(lengths[row])} tokens; give {int(sizes.max())} or more, or"
            " set long_rows to drop or alone"
        )
        raise SettingError("batch_tokens", max_tokens, remedy)
    if long_rows == "drop":
        dropped = rows[is_long]
        rows = rows[~is_long]
        sizes = sizes[~is_long]
    if 1 < min_rows <= len(sizes):
        needed = int(torch.topk(sizes, min_rows, largest=False).values.sum())
        if needed > max_tokens:
            remedy = (
                f"the {min_rows} shortest rows have {needed} tokens, and {max_tokens} are allowed;"
                " lower one, or raise the other"
            )
            raise SettingError("min_rows_per_batch", min_rows, remedy)
    filled = _filled(sizes, max_tokens, limits)
    missing = last_rows - filled[-1] if filled else 0
    fits = int(sizes[-last_rows:].sum()) <= max_tokens
    if missing > 0 and filled[-2:-1] >= [last_rows + missing] and fits and not divisible:
        filled[-2] -= missing
        filled[-1] += missing
    return TokenBatchPlan(rows, torch.tensor([0, *filled]).cumsum(0), dropped)


def _check_lengths(lengths: torch.Tensor) -> None:
    if len(lengths) and int(lengths.min()) < 1:
        row = int(lengths.argmin())
        raise SettingError("lengths", int(lengths[row]), f"row {row} must have 1 token or more")


def _filled(sizes: torch.Tensor, max_tokens: int, limits: _Limits) -> list[int]:
    """Return the number of rows of each batch."""
    filled: list[int] = []
    rows = total = position = 0
    for first in range(0, len(sizes), _CHUNK):
        for size in sizes[first : first + _CHUNK].tolist():
            while limits.is_full(rows, total + size, max_tokens):
                filled.append(limits.kept(rows))
                rows -= filled[-1]
                total = int(sizes[position - rows : position].sum()) if rows else 0
            rows += 1
            total += size
            position += 1
    return [*filled, rows] if rows else filled


def plan_batches_by_rule(
    lengths: torch.Tensor,
    rule: Callable[[Progress], object],
    *,
    order: torch.Tensor,
    progress: Progress,
    ranks: int = 1,
    min_rows: int,
    max_rows: int | None,
    long_rows: str,
    divisible: bool,
) -> tuple[TokenBatchPlan, list[int]]:
    """Plan an epoch whose steps are filled to the real tokens that a rule requests at the beginning
    of each. With a constant rule this is :func:`plan_batches`.

    The treatment of a row that is longer than a budget does not depend on its place in the order.
    ``error`` refuses every budget below the longest row of the epoch. With ``drop``, the row waits
    for a budget that holds it, and is dropped only if none comes before the epoch ends. ``alone``
    makes it a step in its turn.

    Args:
        lengths: int64 ``[rows]``, real tokens of each row, 1 or more.
        rule: ``rule(progress) -> tokens of a step on one device``, a function of progress alone.
        order: int64, row numbers in the order of their use, each at most once.
        progress: progress at the beginning of the epoch.
        ranks: number of devices; a step is filled to this many times the tokens of the rule.
        min_rows, max_rows, long_rows, divisible: see :func:`plan_batches`, of a step on all
            devices.

    Returns:
        The batches, and the requested tokens of each on one device.

    Raises:
        SettingError: a row is too long.
        GrowthFunctionError: the rule failed, or gives another answer when it is called again.
    """
    limits = _Limits(min_rows, max_rows, long_rows, divisible)
    _check_lengths(lengths)
    sizes: list[int] = lengths[order].tolist()
    filler = _Filler(sizes, limits)
    longest = max(sizes, default=0)
    batches: list[list[int]] = []
    begins: list[Progress] = []
    budgets: list[int] = []
    is_last = not sizes
    while not is_last:
        budget = request_batch(rule, progress, maximum=None).after
        if long_rows == "error" and longest > budget * ranks:
            remedy = (
                f"these are the tokens of step {progress.steps} on one device, and a row alone has"
                f" {longest}"
            )
            needed = math.ceil(longest / ranks)
            raise SettingError(
                KEY, budget, f"{remedy}; return {needed} or more, or set long_rows to drop or alone"
            )
        places, is_last = filler.next_batch(budget * ranks)
        if places:
            batches.append(places)
            begins.append(progress)
            budgets.append(budget)
            tokens = sum(sizes[place] for place in places)
            progress = progress.after_step(rows=len(places), tokens=tokens, batch=budget)
    for begin, budget in zip(begins, budgets, strict=True):
        again = request_batch(rule, begin, maximum=None).after
        if again != budget:
            raise GrowthFunctionError(
                f"{KEY} {rule!r} returned {budget}, and {again} when called again: with"
                " batch_tokens it must be a function of progress alone"
            )
    starts = torch.tensor([0, *map(len, batches)]).cumsum(0)
    used = torch.tensor([*chain.from_iterable(batches)], dtype=torch.int64)
    is_dropped = torch.ones(len(sizes), dtype=torch.bool)
    is_dropped[used] = False
    return TokenBatchPlan(order[used], starts, order[is_dropped]), budgets


class _Filler:
    """Filling of batches by a rule. Rows are identified by their place in the order, and long rows
    may wait for a larger budget.
    """

    def __init__(self, sizes: list[int], limits: _Limits) -> None:
        self._sizes = sizes
        self._limits = limits
        self._waiting: list[int] = []
        self._coming = 0

    def next_batch(self, budget: int) -> tuple[list[int], bool]:
        """Return the places of the rows of the next step, and whether it is the last."""
        sizes = self._sizes
        limits = self._limits
        places: list[int] = []
        tokens = 0
        end = len(sizes)
        is_last = True
        for place in chain(self._waiting, range(self._coming, len(sizes))):
            if limits.long_rows == "drop" and sizes[place] > budget:
                continue
            if limits.is_full(len(places), tokens + sizes[place], budget):
                end = max(place, self._coming)
                places = places[: limits.kept(len(places))]
                is_last = False
                break
            places.append(place)
            tokens += sizes[place]
        used = set(places)
        seen = chain(self._waiting, range(self._coming, end))
        self._waiting = [place for place in seen if place not in used]
        self._coming = end
        return places, is_last
