"""Runs the micro-batches of one optimizer step: ranks agree on them, and all of them run again,
smaller, where memory runs out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.distributed import Sharding, sharding_of
from adaptive_batch.errors import (
    MEMORY_REMEDIES,
    AdaptiveBatchError,
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

from .compilations import CompilationLog
from .gradients import OtherLeaves, SavedGradients
from .model_checks import optimizers_wait
from .oom_retry import OOMRetry, OutOfMemoryElsewhereError
from .sizing import MicroBatchSizer

_ABSENT = "nothing"

Result = TypeVar("Result")


class MicroBatchPlan(NamedTuple):
    """The micro-batches of a step, as all ranks have agreed.

    Attributes:
        micro_batches: micro-batches of this rank.
        number: micro-batches on the rank that has most; all ranks run as many.
        ends: whether any rank was asked to end before the step.
    """

    micro_batches: list[MicroBatch]
    number: int
    ends: bool = False

    @classmethod
    def agreed(cls, micro_batches: list[MicroBatch], *, ends: bool = False) -> MicroBatchPlan:
        """Return the plan of these micro-batches; a collective that finds the largest number."""
        (number,) = distributed.all_reduce_max([len(micro_batches)])
        return cls(micro_batches, number, ends)

    @property
    def slots(self) -> list[MicroBatch | None]:
        """Return what this rank runs in turn: None if other ranks have more micro-batches."""
        return [*self.micro_batches, *[None] * (self.number - len(self.micro_batches))]


class RankReport(NamedTuple):
    """What each rank reports before a step.

    Attributes:
        batch_size: rows that run at once where no size is configured and all of them fit, see
            :meth:`MicroBatchSizer.limit`; the same on all ranks.
        num_rows: rows of the step on all ranks, as this one counts them; 0 if none does.
        requested: batch that was requested for the step; a user's rule may have given another
            answer on another rank.
        ends: whether this rank was asked to end.
    """

    batch_size: int
    num_rows: int = 0
    requested: int = 0
    ends: bool = False


def same_answers(answers: Mapping[str, int]) -> None:
    """Refuse a user's function that answers differently on some rank.

    Args:
        answers: that it gave here, by what it was asked: the key of the function, and when.

    Raises:
        GrowthFunctionError: naming the rank.
    """
    texts = {call: str(answer) for call, answer in answers.items()}
    first, *later = distributed.all_gather(texts)
    for rank, of_rank in enumerate(later, start=1):
        for name, value, of_first in differences(of_rank, first):
            raise GrowthFunctionError(
                f"{name} answers {value} on rank {rank} and {of_first} on rank 0; it must be the"
                " same function of the same arguments on all ranks"
            )


def differences(
    mine: Mapping[str, str], first: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each difference between two ranks, and the value of each."""
    for name in sorted(first.keys() | mine.keys()):
        if first.get(name) != mine.get(name):
            yield name, mine.get(name, _ABSENT), first.get(name, _ABSENT)


class StepSnapshot:
    """Running statistics and random numbers of a model in training.

    Args:
        model: model whose persistent buffers a forward may change.
        device: device whose random numbers it draws.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        # Those that outlive a forward: a checkpoint holds them.
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    def take(self) -> Callable[[], None]:
        """Return the function that puts everything back as it is now."""
        random_state = RandomState(self._device)
        if not self._places:
            return random_state.restore
        # A forward may also put another tensor in a buffer's place.
        buffers = [(module, name, module._buffers[name]) for module, name in self._places]
        statistics = TensorSnapshot(buffer for *_, buffer in buffers if buffer is not None)

        def restore() -> None:
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            statistics.restore()
            random_state.restore()

        return restore


class Weighting(ABC, Generic[Result]):
    """The rows of one step on this rank, and how the losses of their micro-batches add up.

    Attributes:
        idle: micro-batch that errors name if this rank has none.
        reduces_first: whether gradients are also reduced after the first micro-batch; read after
            :meth:`begin`.
    """

    idle = MicroBatch([0], 1)
    reduces_first = False

    @abstractmethod
    def divide(self) -> list[MicroBatch]:
        """Divide the rows within the limit of the sizer."""

    @abstractmethod
    def begin(self, plan: MicroBatchPlan) -> MicroBatchPlan:
        """Begin an attempt, whose sums are 0; return the plan, or the one that replaces it."""

    @abstractmethod
    def run(self, micro_batch: MicroBatch | None, is_last: bool, /) -> None:
        """Run forward and backward of a micro-batch; None is a dummy of weight 0, for a rank that
        has fewer than others.

        Args:
            micro_batch: of the plan, in turn.
            is_last: whether its gradients are reduced over ranks.
        """

    def drop(self) -> None:
        """Free what a failed attempt has computed."""

    @abstractmethod
    def end(self) -> Result:
        """Finish the gradients once all micro-batches have run, and return what they add up to.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory.
        """


class Step:
    """Runs forward and backward of the micro-batches of a step, and of others without gradients.

    Its clients supply the rows and their losses.

    Args:
        model: model whose gradients are summed.
        sizer: decides what a micro-batch may hold.
        memory: memory of the model's device; None asks torch.
        sharding: FSDP modules of the model; None for those that it has.
        retries: whether a step that runs out of memory is run again.
        remedies: end of the sentence that one row does not fit.

    Attributes:
        model, sizer, memory, sharding: as given.
        retry: runs micro-batches.
        compilations: counts and logs what is compiled again.
        other_leaves: finds the trained leaves that the model does not have.
        largest_size: size of the largest micro-batch since the allocator's cache was last emptied,
            in tokens; in rows if lengths are unknown.
        is_trial: whether a trial runs now, and not training.
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
    ) -> None:
        self.model = model
        self.sizer = sizer
        self.memory = memory or device_memory(
            next(model.parameters()).device, shared_by=distributed.local_world_size()
        )
        self.sharding = sharding or sharding_of(model)
        self.retry = OOMRetry(
            sizer, memory=self.memory, sharding=self.sharding, retries=retries, remedies=remedies
        )
        self.largest_size = 0
        self.compilations = CompilationLog(model)
        self.is_trial = False
        self.saved_gradients = SavedGradients({}, self.drop_gradients)
        self.plan = MicroBatchPlan([], 0)
        self._snapshot = StepSnapshot(model, self.memory.device)
        self.other_leaves = OtherLeaves(self.own_leaves)

    # --- training

    def run_step(self, weighting: Weighting[Result], plan: MicroBatchPlan) -> Result:
        """Run the micro-batches of a step until memory suffices for all of them; the gradients of
        earlier batches are kept.

        Args:
            weighting: rows of this rank.
            plan: what :meth:`agree` returned.

        Returns:
            What the micro-batches add up to.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        self.saved_gradients = saved = self.save_gradients()
        self.sharding.begin_step()
        restore = self._snapshot.take()

        def undo() -> None:
            weighting.drop()
            saved.drop_new()
            restore()
            # The cache is emptied then.
            self.largest_size = 0

        try:
            with self.compilations.without_garbage(), self.other_leaves.watched(saved.set_aside):
                for attempt in self.retry.attempts(undo=undo, doing="in a step"):
                    with attempt:
                        if self.retry.num_failures:
                            plan = MicroBatchPlan.agreed(weighting.divide(), ends=plan.ends)
                        result = self._run_plan(weighting, plan)
        except BaseException as error:
            saved.put_back()
            # A script may run the rows again after an error of its own.
            if not isinstance(error, RankLostError):
                restore()
            raise
        try:
            self.sharding.reduce_gradients()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.retry.lost(error, "as gradients were reduced") from error
        saved.add_up()
        self.saved_gradients = SavedGradients({}, self.drop_gradients)
        return result

    def _run_plan(self, weighting: Weighting[Result], plan: MicroBatchPlan) -> Result:
        """Run the micro-batches of a plan once."""
        self.plan = plan
        # Memory may run out before the first micro-batch.
        self.retry.set_suspects(plan.micro_batches or [weighting.idle])
        if self.sharding.is_sharded:
            # A forward of the user's, as in a validation, leaves parameters gathered.
            self.sharding.reset()
        with optimizers_wait() if plan.number > 1 else nullcontext():
            self.plan = plan = weighting.begin(plan)
            self.other_leaves.begin_step(is_split=plan.number > 1)
            size = max(map(attrgetter("size"), plan.micro_batches), default=0)
            if size > self.largest_size:
                self.largest_size = size
                self.memory.make_room_for_larger()
            reduced = {plan.number - 1, 0} if weighting.reduces_first else {plan.number - 1}
            self.retry.run_in_turn(
                plan.slots,
                weighting.run,
                drop=self.drop_gradients,
                idle=weighting.idle,
                kinds=[{"is_last": number in reduced} for number in range(plan.number)],
            )
            return weighting.end()

    def agree(self, weighting: Weighting[Any], report: RankReport) -> MicroBatchPlan:
        """Agree with all ranks on a step before it runs, in one small collective; the former limit
        is tried again if it is due, see :meth:`MicroBatchSizer.agree`.

        Args:
            weighting: rows of this rank.
            report: what this rank reports to the others.

        Raises:
            GrowthFunctionError: a rule has answered differently on some rank.
        """
        self.sizer.begin_step(report.batch_size)
        micro_batches = weighting.divide()
        numbers = [
            int(report.ends),
            report.requested,
            -report.requested,
            report.num_rows,
            -report.num_rows,
            len(micro_batches),
        ]
        agreed, limit_changes = self.sizer.agree(numbers)
        any_ends, most_batch, least_batch, most_rows, least_rows, number = agreed
        if most_batch != -least_batch or most_rows != -least_rows:
            same_answers(
                {
                    "batch_size_schedule": report.requested,
                    "the rows of the next step, which": report.num_rows,
                }
            )
        ends = bool(any_ends)
        if limit_changes:
            return MicroBatchPlan.agreed(weighting.divide(), ends=ends)
        return MicroBatchPlan(micro_batches, number, ends)

    # --- without gradients

    def run_forward(
        self,
        plan: MicroBatchPlan,
        forward: Callable[[MicroBatch | None], Result],
        *,
        retry: OOMRetry,
        evaluates: bool | str,
        idle: MicroBatch | None = None,
    ) -> list[tuple[MicroBatch | None, Result]]:
        """Run the micro-batches of a plan once without gradients.

        Args:
            plan: micro-batches, as many on all ranks.
            forward: function that runs a micro-batch without gradients; None is a dummy.
            retry: runs them.
            evaluates: kind of micro-batch, which identifies its collectives, see
                :meth:`Sharding.micro_batch`.
            idle: micro-batch that errors name where this rank has none.

        Returns:
            Each micro-batch with what the function returned.

        Raises:
            OutOfMemoryElsewhereError: a rank ran out of memory, and all of them have come here.
        """
        results: list[tuple[MicroBatch | None, Result]] = []

        def run(micro_batch: MicroBatch | None, _: bool) -> None:
            results.append((micro_batch, forward(micro_batch)))

        retry.run_in_turn(
            plan.slots,
            run,
            drop=self.sharding.reset,
            idle=idle or MicroBatch([0], 1),
            kinds=[{"evaluates": evaluates}] * plan.number,
        )
        if distributed.any_of_ranks(retry.has_failed):
            raise OutOfMemoryElsewhereError
        return results

    # --- trials

    @contextmanager
    def trial(self, *, is_last: bool = True, evaluates: bool | str = False) -> Iterator[None]:
        """Run one micro-batch as a trial. The whole micro-batch must run inside, so that all ranks
        finish it together.
        """
        micro_batch = self.sharding.micro_batch(is_last=is_last, evaluates=evaluates, is_trial=True)
        with micro_batch, self.compilations.without_garbage():
            self.is_trial = True
            try:
                yield
            finally:
                self.is_trial = False

    def record_collectives(self, run: Callable[[], object], row: MicroBatch) -> None:
        """Run trials and undo them, so that a rank which runs out of memory even in the first
        micro-batch of training can bring its collectives to their end.

        Args:
            run: function that runs a trial of each kind of micro-batch.
            row: what they run, for errors.

        Raises:
            RankLostError: out of memory.
        """
        self.retry.set_suspects([row])
        try:
            restore = self._snapshot.take()
            saved = self.save_gradients()
            try:
                with self.other_leaves.watched(saved.set_aside):
                    run()
            finally:
                saved.put_back()
                restore()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.retry.lost(error, "with a single row") from error

    def run_trials(
        self,
        trials: Sequence[Callable[[], object]],
        rows: MicroBatch,
        *,
        evaluates: bool | str,
        doing: str,
    ) -> bool:
        """Run trials within a step and undo each of them; return whether memory sufficed for all of
        them on all ranks, which run the same number.

        Args:
            trials: functions that run a micro-batch.
            rows: the largest of their micro-batches, for errors.
            evaluates: see :meth:`trial`.
            doing: end of a sentence, for a rank that is lost.

        Raises:
            RankLostError: this rank ran out of memory and cannot notify the others.
        """
        retry = self.retry.with_sizer(MicroBatchSizer())
        drop = self.saved_gradients.drop_new
        restore = self._snapshot.take()
        left = iter(trials)
        has_failed = False

        def run(_: MicroBatch | None, is_last: bool) -> None:
            try:
                next(left)()
            finally:
                restore()

        try:
            retry.run_in_turn(
                [rows] * len(trials),
                run,
                drop=drop,
                idle=rows,
                kinds=[{"evaluates": evaluates}] * len(trials),
                context=self.trial,
            )
        except Exception as error:
            if isinstance(error, AdaptiveBatchError) or not is_out_of_memory(error):
                raise
            if distributed.world_size() > 1:
                raise retry.lost(error, doing) from error
            has_failed = True
        finally:
            drop()
        if has_failed:
            # Outside of the except block, which keeps the failed forward's tensors alive.
            recover(self.memory)
        return not distributed.any_of_ranks(has_failed or retry.has_failed)

    # --- gradients

    @cached_property
    def _parameters_of_modules(self) -> list[dict[str, nn.Parameter | None]]:
        """The parameters of each module, as of the first step.

        Each step looks at all gradients, and the way through the modules takes three times as long.
        """
        return [module._parameters for module in self.model.modules() if module._parameters]

    def own_leaves(self) -> Iterator[torch.Tensor | None]:
        """Yield the leaves of the model, the whole ones of sharded parameters too."""
        parameters = map(dict.values, self._parameters_of_modules)
        return chain(*parameters, self.sharding.unsharded_parameters())

    def _gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients that are there, by parameter."""
        return {
            parameter: parameter.grad
            for parameter in chain.from_iterable(map(dict.values, self._parameters_of_modules))
            if parameter is not None and parameter.grad is not None
        }

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the gradients of parameters by their ids, of those outside of the model too."""
        others = [
            leaf for leaf, _ in self.saved_gradients.others() if isinstance(leaf, nn.Parameter)
        ]
        gradients = self._gradients()
        gradients |= {leaf: leaf.grad for leaf in others if leaf.grad is not None}
        return {id(parameter): gradient for parameter, gradient in gradients.items()}

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient."""
        return bool(self._gradients())

    def save_gradients(self) -> SavedGradients:
        """Set the gradients of earlier batches aside, and leave none."""
        return SavedGradients(self._gradients(), self.drop_gradients)

    def drop_gradients(self) -> None:
        """Leave no gradient, so that a step of the optimizer changes nothing."""
        self.sharding.reset()
        for parameter in self.model.parameters():
            parameter.grad = None
