"""The engine: ranks agree on the micro-batches of a step and run them; after an OOM all ranks run
the step again with a smaller limit.

One step is these calls::

    Step.run_step                    ranks agree, gradients of earlier batches are set aside
        Attempts.repeat              repeats the rest after an OOM
            Weighting.begin          makes the parts of a batch and their weights
            Step.run_micro_batches   runs Weighting.run for each micro-batch
            Weighting.end            gives the result
        SavedGradients.add_up        adds the gradients to those of earlier batches

The failed attempt is undone first, so that the retry leaves the same bits as a step that had the
smaller limit from the start. Either all ranks fail an attempt or none does: a rank that had enough
memory raises :class:`OutOfMemoryElsewhereError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import NO_LIMIT, MicroBatch, MicroBatchLimit
from adaptive_batch.distributed import Replicas, Sharding, sharding_of
from adaptive_batch.errors import (
    MEMORY_REMEDIES,
    AdaptiveBatchError,
    DoesNotFitError,
    GrowthFunctionError,
    RankLostError,
)
from adaptive_batch.memory import (
    DeviceMemory,
    RandomState,
    TensorSnapshot,
    device_memory,
    is_out_of_memory,
    recover,
)

from .gradients import SavedGradients, clip_gradients
from .model_checks import Compilations, check_hooks, is_compiled, optimizers_wait
from .sizing import MicroBatchSizer, ShrinkRequest

_ABSENT = "nothing"
# Micro-batch to name in an error if this rank has none and runs a row of weight 0.
DUMMY = MicroBatch([0], 0)

Result = TypeVar("Result")


class RankReport(NamedTuple):
    """Report of a rank to the others before a step.

    Attributes:
        batch_size: argument of :meth:`MicroBatchSizer.limit`; the same on all ranks.
        num_rows: rows of the step on all ranks, as this rank counts them; 0 if not counted.
        requested: rows of the step on one device, within the maximum and with accumulation, or its
            tokens with `batch_tokens`. Ranks compare it, since the user's rule may differ on some
            rank.
        stop_requested: whether this rank was requested to stop.
    """

    batch_size: int = NO_LIMIT
    num_rows: int = 0
    requested: int = 0
    stop_requested: bool = False


def raise_if_answers_differ(answers: Mapping[str, int]) -> None:
    """Raise if ranks have different answers of the user's functions. A collective.

    Args:
        answers: answers on this rank, by a name for the error.

    Raises:
        GrowthFunctionError: a rank has another answer.
    """
    texts = {name: str(answer) for name, answer in answers.items()}
    of_rank_zero, *of_others = distributed.all_gather(texts)
    for rank, of_rank in enumerate(of_others, start=1):
        for name, value, value_of_rank_zero in differences(of_rank, of_rank_zero):
            raise GrowthFunctionError(
                f"{name} is {value} on rank {rank} but {value_of_rank_zero} on rank 0; use the same"
                " function and arguments on all ranks"
            )


def differences(
    values: Mapping[str, str], other_values: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield each name whose values differ between two ranks, with both values."""
    for name in sorted(values.keys() | other_values.keys()):
        value, other = values.get(name, _ABSENT), other_values.get(name, _ABSENT)
        if value != other:
            yield name, value, other


class Weighting(ABC, Generic[Result]):
    """The rows of a step on this rank, and the weights of their losses in the step's gradients.

    A step calls :meth:`divide`, :meth:`begin`, :meth:`run` for each micro-batch, and :meth:`end`.
    After an OOM it calls :meth:`drop`, divides the rows within a smaller limit, and begins again.

    Attributes:
        reduces_first: whether gradients are also reduced after the first micro-batch; set by
            :meth:`begin`.
    """

    reduces_first = False

    @abstractmethod
    def divide(self, limit: MicroBatchLimit) -> list[MicroBatch]:
        """Divide the rows within a limit."""

    @abstractmethod
    def begin(self) -> None:
        """Prepare an attempt at the step's micro-batches before their first backward."""

    @abstractmethod
    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Run forward and backward of a micro-batch.

        Args:
            micro_batch: next micro-batch of the step; None for a dummy of weight 0 on a rank that
                has fewer.
            is_last: whether its gradients are reduced over ranks.
        """

    def drop(self) -> None:
        """Free the results of a failed attempt."""

    @abstractmethod
    def end(self) -> Result:
        """Finish the gradients after all micro-batches; return the result of the step.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory.
        """


class OutOfMemoryElsewhereError(torch.OutOfMemoryError):
    """Another rank ran out of memory in the attempt that all ranks made."""


class Attempts:
    """Repeats a pass over rows that ran out of memory, each time with a smaller limit.

    Args:
        sizer: limits a micro-batch.
        memory: memory of the device.
        retries: whether an attempt is repeated; False raises the out-of-memory error.
        remedies: end of the message that one row does not fit.
        is_of_training: whether `sizer` limits training. If this rank is lost, a restart then begins
            with the smaller limit.

    Attributes:
        sizer, remedies, retries: as given.
        suspect: micro-batch to blame for an OOM, whose size gives the smaller limit: the one that
            is running; before the first and after the last one, the fullest.
        num_failures: failed attempts of the current pass.
        error: message of an OOM of this rank in the current attempt; None without one.
    """

    def __init__(
        self,
        sizer: MicroBatchSizer,
        memory: DeviceMemory,
        *,
        retries: bool = True,
        remedies: str = MEMORY_REMEDIES,
        is_of_training: bool = False,
    ) -> None:
        self.sizer = sizer
        self.retries = retries
        self.remedies = remedies
        self.suspect = MicroBatch([], 0)
        self.num_failures = 0
        self.error: str | None = None
        self._memory = memory
        self._is_of_training = is_of_training
        self._has_failed = False

    def repeat(
        self, *, undo: Callable[[], object], doing: str
    ) -> Iterator[AbstractContextManager[None]]:
        """Yield a context for each attempt. After an OOM inside it, undo the attempt, lower the
        limit, and yield again::

            for attempt in attempts.repeat(undo=undo, doing="in a step"):
                with attempt:
                    ...

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
            self._has_failed = False
            # The context sets _has_failed.
            yield self.attempt(doing)
            if not self._has_failed:
                self.sizer.after_attempt()
                return
            try:
                undo()
                recover(self._memory)
            except Exception as error:
                if distributed.world_size() == 1 or not is_out_of_memory(error):
                    raise
                raise self._lost(error, "as an attempt was undone") from error
            self._shrink()

    @contextmanager
    def attempt(self, doing: str) -> Iterator[None]:
        """Context manager that records an OOM in `error` instead of raising it. On several ranks,
        only :meth:`Step.run_micro_batches` may run out of memory in it.

        Raises:
            RankLostError: this rank ran out of memory elsewhere and cannot notify the others.
        """
        try:
            yield
        except OutOfMemoryElsewhereError:
            # Each rank that ran out of memory has already recorded its own error.
            self._has_failed = True
        except Exception as error:
            if isinstance(error, AdaptiveBatchError) or not is_out_of_memory(error):
                raise
            # The other ranks wait for this one.
            if distributed.world_size() > 1:
                raise self._lost(error, doing) from error
            if not self.retries:
                raise
            self._has_failed = True
            # The text alone: the error keeps the tensors of the failed forward alive.
            self.error = _message(error)

    def suspect_fullest(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Blame an OOM before the first micro-batch on the fullest one: set `suspect` to it."""
        self.suspect = micro_batches[0]
        if len(micro_batches) > 1:
            self.suspect = self.sizer.limit().fullest(micro_batches)

    def _lost(self, error: BaseException, doing: str) -> RankLostError:
        """Build the error of a rank that ran out of memory and cannot notify the others. Its facts
        contain the limit for a restart.
        """
        message = _message(error)
        request = self.sizer.after_out_of_memory(self.suspect, "")
        facts: dict[str, Any] = {"rows": request.rows, "length": request.length, "error": message}
        remedy = self.remedies
        smaller_limit = request.limit
        if smaller_limit is not None:
            remedy = f"use at most {smaller_limit}"
            if self._is_of_training:
                facts |= {"limit": smaller_limit.amount, "unit": smaller_limit.unit}
        size = f"{count(request.rows, self.sizer.noun)} of {count(request.length, 'token')}"
        return RankLostError(
            f"{self._memory.device} ran out of memory {doing}, with {size} at once:"
            f" {message.splitlines()[0]}; the other ranks wait in a collective, so all ranks end;"
            f" {remedy}",
            facts,
        )

    def _shrink(self) -> None:
        """Lower the limit by the requests of all ranks."""
        self.num_failures += 1
        own_request: ShrinkRequest | None = None
        if self.error is not None:
            own_request = self.sizer.after_out_of_memory(
                self.suspect, self.error, failures=self.num_failures
            )
        requests: dict[int, ShrinkRequest] = {}
        for rank, request in enumerate(distributed.all_gather(own_request)):
            if request is None:
                continue
            if request.limit is None:
                place = f"rank {rank}" if distributed.world_size() > 1 else str(self._memory.device)
                tokens = f" of {count(request.length, 'token')}" if request.length else ""
                raise DoesNotFitError(
                    f"one {self.sizer.noun}{tokens} ran out of memory on {place}, alone in its"
                    f" micro-batch: {request.error}; {self.remedies}"
                )
            requests[rank] = request
        self.sizer.lower(requests)


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


class Step:
    """Runs the micro-batches of a step, and micro-batches without gradients.

    Subclasses supply the rows and their losses.

    Args:
        model: model whose gradients are summed.
        sizer: limits a micro-batch.
        memory: memory of the model's device; None asks torch.
        sharding: FSDP modules of the model; None finds them.
        retries: whether a step that runs out of memory is repeated.
        remedies: end of the message that one row does not fit.
        max_grad_norm: see :func:`clip_gradients`.

    Attributes:
        model, sizer, memory, sharding: as given.
        attempts: repeats a step after an OOM.
        micro_batches: micro-batches of the last attempt at a step, on this rank.
        num_micro_batches: largest number of micro-batches on any rank, which all ranks run.
        stop_requested: whether any rank was requested to stop before the step.
        saved_gradients: gradients of earlier batches while a step runs.
        is_trial: whether a trial is running.
        largest_size: size of the largest micro-batch since the allocator's cache was last emptied,
            in tokens; in rows if lengths are unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        sizer: MicroBatchSizer,
        *,
        memory: DeviceMemory | None = None,
        sharding: Sharding | None = None,
        retries: bool = True,
        remedies: str = MEMORY_REMEDIES,
        max_grad_norm: float | None = None,
    ) -> None:
        self.model = model
        self.sizer = sizer
        self.memory = memory or device_memory(
            next(model.parameters()).device, shared_by=distributed.local_world_size()
        )
        self.sharding = sharding or sharding_of(model)
        self.attempts = Attempts(
            sizer, self.memory, retries=retries, remedies=remedies, is_of_training=True
        )
        self.micro_batches: list[MicroBatch] = []
        self.num_micro_batches = 0
        self.stop_requested = False
        self.saved_gradients = SavedGradients((), self.drop_gradients, self.own_leaves)
        self.is_trial = False
        self.largest_size = 0
        self._batch_size = NO_LIMIT
        self._is_compiled = is_compiled(model)
        self._max_grad_norm = max_grad_norm
        # Only persistent buffers outlive a forward.
        self._persistent_buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    # --- training

    def run_step(self, weighting: Weighting[Result], report: RankReport) -> Result:
        """Run the micro-batches of a step and add to the gradients of earlier batches. After an
        OOM, run smaller micro-batches. A collective.

        Args:
            weighting: rows of this rank.
            report: report of this rank to the others.

        Returns:
            The result of the weighting.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            GrowthFunctionError: ranks have different batches.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        self._agree(weighting, report)
        self.saved_gradients = saved = self.save_gradients()
        if isinstance(self.sharding, Replicas):
            self.sharding.begin_step()
        restore = self.snapshot()

        def undo() -> None:
            weighting.drop()
            saved.drop_new()
            restore()
            # The allocator's cache is emptied next, see `largest_size`.
            self.largest_size = 0

        try:
            with self.compiling():
                for attempt in self.attempts.repeat(undo=undo, doing="in a step"):
                    with attempt:
                        if self.attempts.num_failures:
                            self.divide_rows(weighting)
                        result = self._run_attempt(weighting)
        except BaseException as error:
            saved.put_back()
            # A script may repeat the rows after its own error.
            if not isinstance(error, RankLostError):
                restore()
            raise
        if isinstance(self.sharding, Replicas):
            # DDP has several ranks, so an OOM here ends them with RankLostError.
            with self.attempts.attempt("as gradients were reduced"):
                self.sharding.reduce_gradients()
        saved.add_up()
        return result

    def _agree(self, weighting: Weighting[Any], report: RankReport) -> None:
        """Divide the rows of a step, and agree with all ranks on the number of micro-batches, in
        one small collective. Retry the former limit if it is due on all of them.

        Raises:
            GrowthFunctionError: ranks have different batches.
        """
        sizer = self.sizer
        self._batch_size = report.batch_size
        self.micro_batches = weighting.divide(sizer.limit(report.batch_size))
        # The maximum of -x over ranks is minus the minimum of x, so one collective returns both.
        agreed = distributed.all_reduce_max(
            [
                len(self.micro_batches),
                int(report.stop_requested),
                int(not sizer.retry_is_due),
                report.requested,
                -report.requested,
                report.num_rows,
                -report.num_rows,
            ]
        )
        self.attempts.suspect_fullest(self.micro_batches or [DUMMY])
        self.num_micro_batches, stop, some_wait, max_requested, minus_min_requested = agreed[:5]
        max_rows, minus_min_rows = agreed[5:]
        if max_requested != -minus_min_requested or max_rows != -minus_min_rows:
            raise_if_answers_differ(
                {
                    "batch_size_schedule": report.requested,
                    "the number of rows of the next step": report.num_rows,
                }
            )
        self.stop_requested = bool(stop)
        if not some_wait:
            sizer.retry_former_limit()
            self.divide_rows(weighting)

    def divide_rows(self, weighting: Weighting[Any]) -> None:
        """Divide this rank's rows within the current limit; count the micro-batches that all ranks
        run. A collective.
        """
        self.micro_batches = weighting.divide(self.sizer.limit(self._batch_size))
        self.num_micro_batches = distributed.maximum(len(self.micro_batches))
        self.attempts.suspect_fullest(self.micro_batches or [DUMMY])

    def _run_attempt(self, weighting: Weighting[Result]) -> Result:
        """Run the micro-batches of a step once."""
        is_split = self.num_micro_batches > 1
        if is_split:
            check_hooks(self.own_leaves())
        optimizers = optimizers_wait() if is_split else nullcontext()
        with optimizers, self.saved_gradients.watch_backward(is_split=is_split):
            weighting.begin()
            largest_size = max(map(attrgetter("size"), self.micro_batches), default=0)
            if largest_size > self.largest_size:
                self.largest_size = largest_size
                self.memory.make_room_for_larger()
            reducing = {self.num_micro_batches - 1}
            if weighting.reduces_first:
                reducing.add(0)
            self.run_micro_batches(
                self.micro_batches,
                weighting.run,
                reduces=[number in reducing for number in range(self.num_micro_batches)],
            )
            return weighting.end()

    def prepare(self, make: Callable[[], Result]) -> Result | None:
        """Call a function before the first micro-batch of a step, and return its result; None after
        an OOM if this rank can still run the collectives of the step.
        """
        try:
            return make()
        except Exception as error:
            can_continue = distributed.world_size() > 1 and self.sharding.can_skip
            if not (can_continue and self.attempts.retries and is_out_of_memory(error)):
                raise
            self.attempts.error = _message(error)
        # Outside of the except block, in which the error keeps the failed call's tensors alive.
        recover(self.memory)
        return None

    def run_micro_batches(
        self,
        micro_batches: Sequence[MicroBatch],
        run_one: Callable[[MicroBatch | None, bool], object],
        *,
        reduces: Sequence[bool],
        evaluates: bool | str = False,
        attempts: Attempts | None = None,
    ) -> None:
        """Run micro-batches one after the other; after an OOM, only the collectives of the rest.

        Args:
            micro_batches: micro-batches of this rank.
            run_one: ``run_one(micro_batch, is_last)`` runs one of them, or a dummy if it is None.
            reduces: whether each micro-batch reduces gradients, the same on all ranks. A rank with
                fewer micro-batches runs dummies last.
            evaluates: kind of micro-batch, which identifies its collectives, see
                :meth:`Sharding.micro_batch`.
            attempts: records an OOM; None for the attempts of the step.
        """
        attempts = attempts or self.attempts
        sharding = self.sharding
        fullest = attempts.suspect
        reduces_in_backward = sharding.reduces_in_backward and not (evaluates or self.is_trial)
        for number, (micro_batch, is_last) in enumerate(zip_longest(micro_batches, reduces)):
            # If ranks wait for each other in this backward, it runs on all of them or on none.
            has_waiting_ranks = is_last and reduces_in_backward
            if has_waiting_ranks and distributed.any_of_ranks(attempts.error is not None):
                break
            if attempts.error is not None:
                # This rank has failed, but the other ranks wait in its collectives.
                sharding.run_dummy_collectives(is_last=is_last, evaluates=evaluates)
                continue
            if micro_batch is not None:
                attempts.suspect = micro_batch
            try:
                with sharding.micro_batch(
                    is_last=is_last, evaluates=evaluates, is_trial=self.is_trial
                ):
                    run_one(micro_batch, is_last)
            except Exception as error:
                # The other ranks wait in the collectives of this micro-batch and those that follow.
                can_finish = distributed.world_size() > 1 and sharding.can_finish
                can_finish &= all(
                    sharding.has_recorded(is_last=following, evaluates=evaluates)
                    for following in reduces[number + 1 :]
                )
                if not (can_finish and attempts.retries and is_out_of_memory(error)):
                    raise
                attempts.error = _message(error)
            # Outside of the except block, in which the error keeps the forward's tensors alive.
            if attempts.error is not None:
                if evaluates:
                    sharding.reset()
                else:
                    self.saved_gradients.drop_new()
                recover(self.memory)
                sharding.finish()
        if attempts.error is None:
            # An OOM may come after the last micro-batch, as losses are summed.
            attempts.suspect = fullest

    # --- without gradients

    def run_forward(
        self,
        micro_batches: Sequence[MicroBatch],
        forward: Callable[[MicroBatch | None], Result],
        *,
        number: int,
        evaluates: bool | str,
        attempts: Attempts,
    ) -> list[tuple[MicroBatch | None, Result]]:
        """Run micro-batches once without gradients.

        Args:
            micro_batches: micro-batches of this rank.
            forward: function that runs a micro-batch without gradients; None is a dummy.
            number: largest number of micro-batches on any rank.
            evaluates, attempts: see :meth:`run_micro_batches`.

        Returns:
            Each micro-batch with the function's result.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory; all ranks raise it.
        """
        results: list[tuple[MicroBatch | None, Result]] = []

        def run_one(micro_batch: MicroBatch | None, _: bool) -> None:
            results.append((micro_batch, forward(micro_batch)))

        reduces = [False] * number
        self.run_micro_batches(
            micro_batches, run_one, reduces=reduces, evaluates=evaluates, attempts=attempts
        )
        if distributed.any_of_ranks(attempts.error is not None):
            raise OutOfMemoryElsewhereError
        return results

    def compiling(self) -> AbstractContextManager[object]:
        """Return a context that frees the garbage of compilations; it does nothing if the model
        was not compiled at construction.
        """
        return Compilations() if self._is_compiled else nullcontext()

    # --- trials

    @contextmanager
    def trial(self, *, is_last: bool = True, evaluates: bool | str = False) -> Iterator[None]:
        """Context manager for a trial of one micro-batch, which all ranks finish together."""
        recorded = self.sharding.micro_batch(is_last=is_last, evaluates=evaluates, is_trial=True)
        with recorded, self.compiling():
            self.is_trial = True
            try:
                yield
            finally:
                self.is_trial = False

    def record_collectives(self, run_trials: Callable[[], object], row: MicroBatch) -> None:
        """Run trials and undo them, so that a rank can finish the collectives of the first
        micro-batch of training after an OOM.

        Args:
            run_trials: function that runs a trial of each kind of micro-batch.
            row: micro-batch of the trials, for errors.

        Raises:
            RankLostError: out of memory.
        """
        self.attempts.suspect_fullest([row])
        with self.attempts.attempt("with a single row"):
            restore = self.snapshot()
            saved = self.save_gradients()
            try:
                with saved.watch_backward():
                    run_trials()
            finally:
                saved.put_back()
                restore()

    def run_trials(
        self,
        trials: Sequence[Callable[[], object]],
        rows: MicroBatch,
        *,
        evaluates: bool | str,
        doing: str,
    ) -> bool:
        """Run trials within a step and undo each; return whether all of them fit on all ranks.

        Args:
            trials: functions that run a micro-batch, the same number on all ranks.
            rows: the largest micro-batch, which errors name for each trial.
            evaluates: see :meth:`trial`.
            doing: phrase for the error of a lost rank.

        Raises:
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        # A sizer of its own: an OOM of a trial must not lower the limit of training.
        attempts = Attempts(MicroBatchSizer(), self.memory)
        attempts.suspect = rows
        restore = self.snapshot()
        remaining = iter(trials)

        # Micro-batches are only counted here: each call runs the next trial.
        def run_next_trial(_: MicroBatch | None, is_last: bool) -> None:
            try:
                next(remaining)()
            finally:
                restore()

        self.is_trial = True
        try:
            with attempts.attempt(doing):
                self.run_micro_batches(
                    [rows] * len(trials),
                    run_next_trial,
                    reduces=[True] * len(trials),
                    evaluates=evaluates,
                    attempts=attempts,
                )
        finally:
            self.is_trial = False
            self.saved_gradients.drop_new()
        if attempts.error is not None:
            # Outside of the except block, in which the error keeps the forward's tensors alive.
            recover(self.memory)
        return not distributed.any_of_ranks(attempts.error is not None)

    # --- state before an attempt

    def snapshot(self) -> Callable[[], None]:
        """Copy the random numbers and running statistics that a forward changes; return the
        function that restores them.
        """
        random_state = RandomState(self.memory.device)
        if not self._persistent_buffers:
            return random_state.restore
        buffers = [
            (module, name, module._buffers[name]) for module, name in self._persistent_buffers
        ]
        values = TensorSnapshot(buffer for _, _, buffer in buffers if buffer is not None)

        def restore() -> None:
            # A forward may have replaced a buffer with another tensor.
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            values.restore()
            random_state.restore()

        return restore

    def own_leaves(self) -> Iterator[torch.Tensor]:
        """Yield the leaves of the model, unsharded parameters included."""
        yield from self.model.parameters()
        yield from self.sharding.unsharded_parameters()

    def gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the current gradients of the model by parameter."""
        return {
            parameter: parameter.grad
            for parameter in self.model.parameters()
            if parameter.grad is not None
        }

    def save_gradients(self) -> SavedGradients:
        """Move the current gradients, those of earlier batches, out of the parameters."""
        # A forward of the user's own validation leaves parameters gathered; only shards have
        # gradients.
        self.sharding.reset()
        return SavedGradients(self.model.parameters(), self.drop_gradients, self.own_leaves)

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients as configured; return the norm before clipping."""
        return clip_gradients(self.model, self._max_grad_norm)

    def drop_gradients(self) -> None:
        """Clear all gradients. A step of the optimizer then changes nothing."""
        self.sharding.reset()
        for parameter in self.model.parameters():
            parameter.grad = None
