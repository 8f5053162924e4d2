"""What the ranks of one process group do together: each learns what all made, or that one failed, and none is left waiting."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

Result = TypeVar("Result")
Answer = TypeVar("Answer")


class Agreement:
    """The ranks of a process group, or one process alone.

    Both methods are collectives: every rank calls them, in the same order, and they end alike on all. They use this process
    group and no other, so that a thread may call them where nothing else uses it.

    Args:
        process_group: None for one process.

    Attributes:
        process_group: the same.
        rank: of this process, from 0.
        num_ranks: how many there are.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group
        self.rank: int = 0 if process_group is None else process_group.rank()
        self.num_ranks: int = 1 if process_group is None else process_group.size()

    def gathered(self, part: Callable[[], Result]) -> list[Result]:
        """Each rank does its part.

        Returns:
            What the parts returned, by rank, on every rank.

        Raises:
            Exception: the part failed, and this is one process alone.
            CheckpointException: it failed on one rank at least; raised on every rank.
        """
        if self.num_ranks == 1:
            return [part()]
        return self._alike(lambda ranks, safe: ranks.all_gather("part", safe), part)

    def from_rank_zero(self, part: Callable[[], Result]) -> Result:
        """Rank zero does the part alone.

        Returns:
            What it returned, on every rank.

        Raises:
            Exception, CheckpointException: as in :meth:`gathered`.
        """
        if self.num_ranks == 1:
            return part()
        return self._alike(lambda ranks, safe: ranks.broadcast("part of rank zero", safe), part)

    def reason(self, error: BaseException) -> str:
        """What failed, out of what is wrapped around it, and on which rank where there are several."""
        if isinstance(error, CheckpointException) and error.failures:
            rank, (failed, _) = next(iter(error.failures.items()))
            return f"{f'rank {rank}: ' if self.num_ranks > 1 else ''}{_root(failed)}"
        return str(_root(error))

    def _alike(
        self, exchange: Callable[[_DistWrapper, Callable[[], Result]], Answer], part: Callable[[], Result]
    ) -> Answer:
        interruption: list[BaseException] = []

        def safe() -> Result:
            try:
                return part()
            except Exception as error:
                raise portable(error) from error
            except BaseException as error:  # a request to end is this process's own; the others learn that it failed
                interruption.append(error)
                raise RuntimeError(f"interrupted by {type(error).__name__}") from error

        try:
            return exchange(_DistWrapper(self.process_group, True, 0), safe)
        except CheckpointException:
            if interruption:
                raise interruption[0] from None
            raise


def portable(error: Exception) -> Exception:
    """A copy of an error as other processes read it: of the system's own where others are wrapped around it, which a copy has not."""
    root = _root(error)
    try:
        copy = pickle.loads(pickle.dumps(root))
    except Exception:
        copy = None
    if isinstance(copy, Exception) and str(copy) == str(root):
        return copy
    return RuntimeError(f"{type(root).__name__}: {root}")


def _root(error: BaseException) -> BaseException:
    """The system's error, if there is one below what torch wraps around it."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError):
            return below
        below = below.__cause__ or below.__context__
    return error
