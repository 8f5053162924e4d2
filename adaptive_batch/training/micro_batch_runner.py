"""Micro-batches run one after the other; after an OOM all ranks repeat them with a smaller limit.

The failed attempt is undone first, so that the retry leaves the same bits as a step that had the
smaller limit from the start. Either all ranks fail an attempt or none does: a rank that had enough
memory raises :class:`OutOfMemoryElsewhereError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

import torch

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import MicroBatch
from adaptive_batch.distributed import Sharding
from adaptive_batch.errors import MEMORY_REMEDIES, DoesNotFitError, RankLostError
from adaptive_batch.memory import DeviceMemory, is_out_of_memory, recover

from .sizing import MicroBatchSizer, ShrinkRequest

Result = TypeVar("Result")


class OutOfMemoryElsewhereError(torch.OutOfMemoryError):
    """Another rank ran out of memory in the attempt that all ranks made."""


class MicroBatchRunner:
    """Runs micro-batches; after an OOM undoes them and runs smaller ones.

    Args:
        sizer: limits a micro-batch.
        memory: memory of the device.
        sharding: FSDP modules of the model.
        retries: whether an attempt is repeated; False raises the out-of-memory error.
        remedies: end of the message that one row does not fit.
        is_of_training: whether `sizer` limits training. If this rank is lost, a restart then begins
            with the smaller limit.

    Attributes:
        current: micro-batch that is running; after a run, the fullest one.
        retries: as given.
        num_failures: failed attempts of the current step.
        error: message of an OOM of this rank in the current attempt; None without one.
    """

    def __init__(
        self,
        sizer: MicroBatchSizer,
        *,
        memory: DeviceMemory,
        sharding: Sharding,
        retries: bool = True,
        remedies: str = MEMORY_REMEDIES,
        is_of_training: bool = True,
    ) -> None:
        self.sizer = sizer
        self.memory = memory
        self.remedies = remedies
        self.current = MicroBatch([], 0)
        self.retries = retries
        self._sharding = sharding
        self._is_of_training = is_of_training
        self.num_failures = 0
        self.error: str | None = None
        self._has_succeeded = False

    def with_sizer(self, sizer: MicroBatchSizer) -> MicroBatchRunner:
        """Return a runner for the same model with another limit than training's."""
        return MicroBatchRunner(
            sizer, memory=self.memory, sharding=self._sharding, is_of_training=False
        )

    def attempts(
        self, *, undo: Callable[[], object], doing: str
    ) -> Iterator[AbstractContextManager[None]]:
        """Yield a context for each attempt. After an OOM inside it, undo the attempt, lower the
        limit, and yield again::

            for attempt in runner.attempts(undo=undo, doing="in a step"):
                with attempt:
                    ...

        On several ranks, micro-batches run inside by :meth:`run`.

        Args:
            undo: function that undoes a failed attempt.
            doing: phrase for the error of a lost rank, such as ``in a step``.

        Raises:
            DoesNotFitError: a micro-batch of one row ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        self.num_failures = 0
        while True:
            self.error = None
            self._has_succeeded = False
            yield self._attempt(doing)
            if self._has_succeeded:
                self.sizer.after_attempt()
                return
            try:
                undo()
                recover(self.memory)
            except Exception as error:
                if distributed.world_size() == 1 or not is_out_of_memory(error):
                    raise
                raise self.lost(error, "as an attempt was undone") from error
            self._shrink()

    @contextmanager
    def _attempt(self, doing: str) -> Iterator[None]:
        try:
            yield
            self._has_succeeded = True
        except OutOfMemoryElsewhereError:
            pass
        except Exception as error:
            if isinstance(error, RankLostError) or not is_out_of_memory(error):
                raise
            if distributed.world_size() > 1:
                raise self.lost(error, doing) from error
            if not self.retries:
                raise
            # The text alone: the error keeps the tensors of the failed forward alive.
            self.error = _message(error)

    def set_suspects(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set `current` to the fullest micro-batch, which errors name if an OOM comes before the
        first one runs.
        """
        self.current = micro_batches[0]
        if len(micro_batches) > 1:
            self.current = self.sizer.limit().fullest(micro_batches)

    def prepare(self, make: Callable[[], Result]) -> Result | None:
        """Call a function before the first micro-batch, and return its result; None after an OOM.

        After an OOM, :meth:`run` runs only the collectives, so that other ranks finish the
        attempt.
        """
        try:
            return make()
        except Exception as error:
            if not (self.retries and self._sharding.can_skip and is_out_of_memory(error)):
                raise
            self.error = _message(error)
        # Outside of the except block, which keeps what was made alive.
        recover(self.memory)
        return None

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        run: Callable[[MicroBatch | None, bool], object],
        *,
        drop: Callable[[], object],
        idle: MicroBatch,
        kinds: Sequence[Mapping[str, Any]],
        context: Callable[..., AbstractContextManager[object]] | None = None,
    ) -> None:
        """Run micro-batches one after the other; after an OOM, only the collectives of the rest.

        Args:
            micro_batches: micro-batches of this rank.
            run: ``run(micro_batch, is_last)`` runs one of them; None for a dummy.
            drop: function that frees the tensors of a micro-batch.
            idle: micro-batch that errors name if this rank has none.
            kinds: arguments of `context` for each micro-batch, the same number on all ranks. A rank
                with fewer micro-batches runs dummies last.
            context: function that returns the context of a micro-batch; None for
                :meth:`Sharding.micro_batch`.
        """
        context = context or self._sharding.micro_batch
        self.set_suspects(micro_batches or [idle])
        fullest = self.current
        for number, (micro_batch, kind) in enumerate(zip_longest(micro_batches, kinds)):
            # A micro-batch that reduces in backward runs on all ranks or on none.
            reduces = self._sharding.reduces_in_backward and kind.get("is_last")
            if reduces and distributed.any_of_ranks(self.error is not None):
                break
            if self.error is not None:
                self._sharding.run_dummy_collectives(**kind)
                continue
            self.current = micro_batch or self.current
            try:
                with context(**kind):
                    run(micro_batch, kind.get("is_last", True))
            except Exception as error:
                if not self._can_finish(error, following=kinds[number + 1 :]):
                    raise
                self.error = _message(error)
            # Outside of the except block, which keeps the failed forward's tensors alive.
            if self.error is not None:
                drop()
                recover(self.memory)
                self._sharding.finish()
        if self.error is None:
            self.current = fullest

    def _can_finish(self, error: Exception, *, following: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether an error is an OOM of one of several ranks, and this rank can finish the
        collectives of this micro-batch and of the following ones.
        """
        can_finish = distributed.world_size() > 1 and self.retries and self._sharding.can_finish
        is_known = all(self._sharding.knows(**kind) for kind in following)
        return can_finish and is_known and is_out_of_memory(error)

    def lost(self, error: BaseException, doing: str) -> RankLostError:
        """Build the error of a rank that ran out of memory and cannot notify the others; it has the
        limit for a restart.
        """
        message = _message(error)
        rows, length, smaller_limit, _ = self.sizer.after_out_of_memory(self.current, "")
        facts: dict[str, Any] = {"rows": rows, "length": length, "error": message}
        remedy = self.remedies
        if smaller_limit is not None:
            remedy = f"use at most {smaller_limit}"
            if self._is_of_training:
                facts |= {"limit": smaller_limit.amount, "unit": smaller_limit.unit}
        size = f"{count(rows, self.sizer.noun)} of {count(length, 'token')}"
        return RankLostError(
            f"{self.memory.device} ran out of memory {doing}, with {size} at once:"
            f" {message.splitlines()[0]}; the other ranks wait in a collective, so all ranks end;"
            f" {remedy}",
            facts,
        )

    def _shrink(self) -> None:
        """Lower the limit by the requests of all ranks."""
        self.num_failures += 1
        request: ShrinkRequest | None = None
        if self.error is not None:
            request = self.sizer.after_out_of_memory(
                self.current, self.error, failures=self.num_failures
            )
        gathered = enumerate(distributed.all_gather(request))
        requests = {rank: requested for rank, requested in gathered if requested is not None}
        for rank, requested in requests.items():
            if requested.limit is None:
                place = f"rank {rank}" if distributed.world_size() > 1 else str(self.memory.device)
                tokens = count(requested.length, "token")
                raise DoesNotFitError(
                    f"one {self.sizer.noun} of {tokens} ran out of memory on {place}, alone in its"
                    f" micro-batch: {requested.error}; {self.remedies}"
                )
        self.sizer.lower(requests)


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__
