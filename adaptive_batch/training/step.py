"""The engine: ranks agree on the micro-batches of a step and run them; after an OOM all ranks run
the step again with a smaller limit.

The failed attempt is undone first, so that the retry leaves the same bits as a step that had the
smaller limit from the start. Either all ranks fail an attempt or none does: a rank that had enough
memory raises :class:`OutOfMemoryElsewhereError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import NO_LIMIT, MicroBatch, MicroBatchLimit
from adaptive_batch.distributed import Sharding, sharding_of
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

Result = TypeVar("Result")


class MicroBatchPlan(NamedTuple):
    """Micro-batches of a step that all ranks have agreed on.

    Attributes:
        micro_batches: micro-batches of this rank.
        number: largest number of micro-batches on any rank; all ranks run this number.
        batch_size: argument of :meth:`MicroBatchSizer.limit`.
        stop_requested: whether any rank was requested to stop before the step.
    """

    micro_batches: Sequence[MicroBatch] = ()
    number: int = 0
    batch_size: int = NO_LIMIT
    stop_requested: bool = False

    def with_micro_batches(self, micro_batches: Sequence[MicroBatch]) -> MicroBatchPlan:
        """Return the plan with other micro-batches. A collective."""
        (number,) = distributed.all_reduce_max([len(micro_batches)])
        return self._replace(micro_batches=micro_batches, number=number)


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
    After an OOM it calls :meth:`drop` and begins again.

    Attributes:
        stand_in: micro-batch to name in an error if this rank has none.
        reduces_first: whether gradients are also reduced after the first micro-batch; set by
            :meth:`begin`.
    """

    stand_in = MicroBatch([0], 1)
    reduces_first = False

    @abstractmethod
    def divide(self, limit: MicroBatchLimit) -> list[MicroBatch]:
        """Divide the rows within a limit."""

    @abstractmethod
    def begin(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        """Prepare an attempt before its first backward; return the plan to run, which may be
        another one.
        """

    @abstractmethod
    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Run forward and backward of a micro-batch.

        Args:
            micro_batch: next micro-batch of the plan; None for a dummy of weight 0 on a rank that
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
        suspect: micro-batch to blame for an OOM, whose size gives the smaller limit: the one that
            is running; before the first and after the last one, the fullest.
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
        self.suspect = MicroBatch([], 0)
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
            # The context sets _has_succeeded.
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
        """Context manager for an attempt: record an OOM, so that :meth:`attempts` retries."""
        try:
            yield
            self._has_succeeded = True
        except OutOfMemoryElsewhereError:
            # Each rank that ran out of memory has recorded its own error in run().
            pass
        except Exception as error:
            if isinstance(error, RankLostError) or not is_out_of_memory(error):
                raise
            # An OOM that is not recorded in run(): the other ranks wait for this one.
            if distributed.world_size() > 1:
                raise self.lost(error, doing) from error
            if not self.retries:
                raise
            # The text alone: the error keeps the tensors of the failed forward alive.
            self.error = _message(error)

    def suspect_fullest(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set `suspect` to the fullest micro-batch: an OOM may come before the first one runs."""
        self.suspect = micro_batches[0]
        if len(micro_batches) > 1:
            self.suspect = self.sizer.limit().fullest(micro_batches)

    def prepare(self, make: Callable[[], Result]) -> Result | None:
        """Call a function before the first micro-batch, and return its result; None after an OOM.

        After an OOM, :meth:`run` runs only the collectives, so that other ranks finish the
        attempt.
        """
        try:
            return make()
        except Exception as error:
            can_continue = self.retries and self._sharding.can_skip
            if not (can_continue and is_out_of_memory(error)):
                raise
            self.error = _message(error)
        # Outside of the except block, in which the error keeps the failed call's tensors alive.
        recover(self.memory)
        return None

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        run_one: Callable[[MicroBatch | None, bool], object],
        *,
        context_options: Sequence[Mapping[str, Any]],
        stand_in: MicroBatch,
        free: Callable[[], object],
        context: Callable[..., AbstractContextManager[object]] | None = None,
    ) -> None:
        """Run micro-batches one after the other; after an OOM, only the collectives of the rest.

        Args:
            micro_batches: micro-batches of this rank.
            run_one: ``run_one(micro_batch, is_last)`` runs one of them, or a dummy if it is None.
            context_options: arguments of `context` for each micro-batch, the same number on all
                ranks. A rank with fewer micro-batches runs dummies last.
            stand_in: micro-batch to name in an error if this rank has none.
            free: function that frees the tensors of a failed micro-batch.
            context: function that returns the context of a micro-batch; None for
                :meth:`Sharding.micro_batch`.
        """
        context = context or self._sharding.micro_batch
        self.suspect_fullest(micro_batches or [stand_in])
        fullest = self.suspect
        for number, (micro_batch, options) in enumerate(
            zip_longest(micro_batches, context_options)
        ):
            # Only a micro-batch with a backward has this option.
            is_last = options.get("is_last", False)
            # If ranks wait for each other in this backward, it runs on all of them or on none.
            has_waiting_ranks = is_last and self._sharding.reduces_in_backward
            if has_waiting_ranks and distributed.any_of_ranks(self.error is not None):
                break
            if self.error is not None:
                # This rank has failed, but the other ranks wait in its collectives.
                self._sharding.run_dummy_collectives(**options)
                continue
            if micro_batch is not None:
                self.suspect = micro_batch
            try:
                with context(**options):
                    run_one(micro_batch, is_last)
            except Exception as error:
                if not self._can_finish(error, context_options[number + 1 :]):
                    raise
                self.error = _message(error)
            # Outside of the except block, in which the error keeps the forward's tensors alive.
            if self.error is not None:
                free()
                recover(self.memory)
                self._sharding.finish()
        if self.error is None:
            # An OOM may come after the last micro-batch, as losses are summed.
            self.suspect = fullest

    def _can_finish(self, error: Exception, options: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether this rank can finish the collectives of a micro-batch that failed, and
        those of the following ones, so that other ranks can finish the attempt.

        Args:
            error: error of the micro-batch.
            options: context options of the following micro-batches.
        """
        if distributed.world_size() == 1 or not self.retries or not is_out_of_memory(error):
            return False
        can_run_following = all(self._sharding.has_recorded(**each) for each in options)
        return self._sharding.can_finish and can_run_following

    def lost(self, error: BaseException, doing: str) -> RankLostError:
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
            f"{self.memory.device} ran out of memory {doing}, with {size} at once:"
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
                place = f"rank {rank}" if distributed.world_size() > 1 else str(self.memory.device)
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
        runner: runs micro-batches.
        largest_size: size of the largest micro-batch since the allocator's cache was last emptied,
            in tokens; in rows if lengths are unknown.
        is_trial: whether a trial is running.
        saved_gradients: gradients of earlier batches while a step runs.
        plan: micro-batches of the last attempt at a step.
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
        self.runner = MicroBatchRunner(
            sizer, memory=self.memory, sharding=self.sharding, retries=retries, remedies=remedies
        )
        self.largest_size = 0
        self._is_compiled = is_compiled(model)
        self._max_grad_norm = max_grad_norm
        self.is_trial = False
        self.saved_gradients = SavedGradients({}, self.drop_gradients, self.own_leaves)
        self.plan = MicroBatchPlan()
        # Only persistent buffers outlive a forward.
        self._persistent_buffers = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    # --- training

    def run_step(self, weighting: Weighting[Result], plan: MicroBatchPlan) -> Result:
        """Run the micro-batches of a step and add to the gradients of earlier batches. After an
        OOM, run smaller micro-batches.

        Args:
            weighting: rows of this rank.
            plan: plan that :meth:`agree_on_plan` returned.

        Returns:
            The result of the weighting.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        self.saved_gradients = saved = self.save_gradients()
        self.sharding.begin_step()
        restore = self.snapshot()

        def undo() -> None:
            weighting.drop()
            saved.drop_new()
            restore()
            # MicroBatchRunner empties the allocator's cache next, see `largest_size`.
            self.largest_size = 0

        try:
            with self.compiling():
                for attempt in self.runner.attempts(undo=undo, doing="in a step"):
                    with attempt:
                        if self.runner.num_failures:
                            limit = self.sizer.limit(plan.batch_size)
                            plan = plan.with_micro_batches(weighting.divide(limit))
                        result = self._run_plan(weighting, plan)
        except BaseException as error:
            saved.put_back()
            # A script may repeat the rows after its own error.
            if not isinstance(error, RankLostError):
                restore()
            raise
        try:
            self.sharding.reduce_gradients()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.runner.lost(error, "as gradients were reduced") from error
        saved.add_up()
        return result

    def _run_plan(self, weighting: Weighting[Result], plan: MicroBatchPlan) -> Result:
        """Run the micro-batches of a plan once."""
        self.plan = plan
        # An OOM may come before the first micro-batch.
        self.runner.suspect_fullest(plan.micro_batches or [weighting.stand_in])
        if self.sharding.is_sharded:
            # A forward of the user's own validation leaves parameters gathered.
            self.sharding.reset()
        is_split = plan.number > 1
        if is_split:
            check_hooks(self.own_leaves())
        optimizers = optimizers_wait() if is_split else nullcontext()
        with optimizers, self.saved_gradients.watch_backward(is_split=is_split):
            self.plan = plan = weighting.begin(plan)
            largest_size = max(map(attrgetter("size"), plan.micro_batches), default=0)
            if largest_size > self.largest_size:
                self.largest_size = largest_size
                self.memory.make_room_for_larger()
            reducing = {plan.number - 1}
            if weighting.reduces_first:
                reducing.add(0)
            self.runner.run(
                plan.micro_batches,
                weighting.run,
                context_options=[{"is_last": number in reducing} for number in range(plan.number)],
                stand_in=weighting.stand_in,
                free=self.drop_gradients,
            )
            return weighting.end()

    def agree_on_plan(self, weighting: Weighting[Any], report: RankReport) -> MicroBatchPlan:
        """Agree with all ranks on the micro-batches of a step, in one small collective. Retry
        the former limit if it is due on all of them.

        Args:
            weighting: rows of this rank.
            report: report of this rank.

        Raises:
            GrowthFunctionError: ranks have different batches.
        """
        sizer = self.sizer
        micro_batches = weighting.divide(sizer.limit(report.batch_size))
        # The maximum of -x over ranks is minus the minimum of x, so one collective returns both.
        numbers = [
            int(not sizer.retry_is_due),
            int(report.stop_requested),
            report.requested,
            -report.requested,
            report.num_rows,
            -report.num_rows,
            len(micro_batches),
        ]
        agreed = distributed.all_reduce_max(numbers)
        some_wait, stop, max_requested, minus_min_requested, max_rows, minus_min_rows, number = (
            agreed
        )
        if max_requested != -minus_min_requested or max_rows != -minus_min_rows:
            raise_if_answers_differ(
                {
                    "batch_size_schedule": report.requested,
                    "the number of rows of the next step": report.num_rows,
                }
            )
        plan = MicroBatchPlan(micro_batches, number, report.batch_size, bool(stop))
        if some_wait:
            return plan
        sizer.retry_former_limit()
        return plan.with_micro_batches(weighting.divide(sizer.limit(report.batch_size)))

    # --- without gradients

    def run_forward(
        self,
        plan: MicroBatchPlan,
        forward: Callable[[MicroBatch | None], Result],
        *,
        runner: MicroBatchRunner,
        evaluates: bool | str,
        stand_in: MicroBatch | None = None,
    ) -> list[tuple[MicroBatch | None, Result]]:
        """Run the micro-batches of a plan once without gradients.

        Args:
            plan: micro-batches, the same number on all ranks.
            forward: function that runs a micro-batch without gradients; None is a dummy.
            runner: runs them.
            evaluates: kind of micro-batch, which identifies its collectives, see
                :meth:`Sharding.micro_batch`.
            stand_in: micro-batch to name in an error if this rank has none.

        Returns:
            Each micro-batch with the function's result.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory; all ranks raise it.
        """
        results: list[tuple[MicroBatch | None, Result]] = []

        def run_one(micro_batch: MicroBatch | None, _: bool) -> None:
            results.append((micro_batch, forward(micro_batch)))

        runner.run(
            plan.micro_batches,
            run_one,
            context_options=[{"evaluates": evaluates}] * plan.number,
            stand_in=stand_in or MicroBatch([0], 1),
            free=self.sharding.reset,
        )
        if distributed.any_of_ranks(runner.error is not None):
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
        self.runner.suspect_fullest([row])
        try:
            restore = self.snapshot()
            saved = self.save_gradients()
            try:
                with saved.watch_backward():
                    run_trials()
            finally:
                saved.put_back()
                restore()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.runner.lost(error, "with a single row") from error

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
        runner = self.runner.with_sizer(MicroBatchSizer())
        drop_gradients = self.saved_gradients.drop_new
        restore = self.snapshot()
        remaining = iter(trials)
        has_failed = False

        # The runner only counts micro-batches here: each call runs the next trial.
        def run_next_trial(_: MicroBatch | None, is_last: bool) -> None:
            try:
                next(remaining)()
            finally:
                restore()

        try:
            runner.run(
                [rows] * len(trials),
                run_next_trial,
                context_options=[{"evaluates": evaluates}] * len(trials),
                stand_in=rows,
                free=drop_gradients,
                context=self.trial,
            )
        except Exception as error:
            if isinstance(error, AdaptiveBatchError) or not is_out_of_memory(error):
                raise
            # The runner has recorded an OOM after which this rank could finish the collectives.
            # After this one it could not.
            if distributed.world_size() > 1:
                raise runner.lost(error, doing) from error
            has_failed = True
        finally:
            drop_gradients()
        if has_failed:
            # Outside of the except block, in which the error keeps the forward's tensors alive.
            recover(self.memory)
        return not distributed.any_of_ranks(has_failed or runner.error is not None)

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

    @cached_property
    def _parameters_of_modules(self) -> list[dict[str, nn.Parameter | None]]:
        """Parameters of each module at the first step.

        Each step reads all gradients; walking through the modules takes three times as long.
        """
        return [module._parameters for module in self.model.modules() if module._parameters]

    def own_leaves(self) -> Iterator[torch.Tensor | None]:
        """Yield the leaves of the model, unsharded parameters included."""
        for parameters in self._parameters_of_modules:
            yield from parameters.values()
        yield from self.sharding.unsharded_parameters()

    def gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the current gradients of the model by parameter."""
        return {
            parameter: parameter.grad
            for parameters in self._parameters_of_modules
            for parameter in parameters.values()
            if parameter is not None and parameter.grad is not None
        }

    def save_gradients(self) -> SavedGradients:
        """Move the current gradients, those of earlier batches, out of the parameters."""
        return SavedGradients(self.gradients(), self.drop_gradients, self.own_leaves)

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients as configured; return the norm before clipping."""
        return clip_gradients(self.model, self._max_grad_norm)

    def drop_gradients(self) -> None:
        """Clear all gradients. A step of the optimizer then changes nothing."""
        self.sharding.reset()
        for parameter in self.model.parameters():
            parameter.grad = None
