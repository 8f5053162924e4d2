"""Runs what a step is divided into: agreed by all ranks, and again where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.distributed import Sharding, sharding_of
from adaptive_batch.errors import MEMORY_REMEDIES, RankLostError
from adaptive_batch.memory import (
    DeviceMemory,
    device_memory,
    is_out_of_memory,
)

from .agreement import Division, Question, same_answers
from .compilations import CompilationLog
from .gradients import GradientsApart, OtherLeaves
from .model_checks import optimizers_wait
from .oom_retry import OOMRetry
from .sizing import MicroBatchSizer
from .snapshot import StepSnapshot

Result = TypeVar("Result")


class StepRunner:
    """Runs the micro-batches of a step; knows neither rows nor losses, which its clients do.

    Args:
        model: model whose gradients are summed.
        sizer: decides what a micro-batch may hold.
        memory: memory of the model's device; None asks torch.
        sharding: FSDP modules of the model; None for those that it has.
        retries: whether a step is run again that ran out of memory.
        remedies: end of the sentence that one row does not fit.

    Attributes:
        model, sizer, memory, sharding: as given.
        retry: runs micro-batches.
        compilations: counts and logs what is compiled again.
        largest_size: tokens of the largest micro-batch that the allocator's cache has served since
            it was given back; rows where their lengths are not known.
        is_trial: whether what runs now is a trial, and not training.
        step_gradients: gradients of earlier batches, set aside while a step runs.
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
        self.step_gradients = GradientsApart({}, self.drop_gradients)
        self._snapshot = StepSnapshot(model, self.memory.device)
        self._others = OtherLeaves(self.own_leaves)

    def agree_on(self, divide: Callable[[], list[MicroBatch]], question: Question) -> Division:
        """Agree with all ranks on a step before it runs, in one small collective; the former
        limit is tried again if it is time, see :meth:`MicroBatchSizer.agree`.

        Args:
            divide: function that divides this rank's rows within the limit.
            question: what this rank says of the step to the others.

        Returns:
            The division, with the number of micro-batches of the rank that has most.

        Raises:
            GrowthFunctionError: a rule has answered differently on some rank.
        """
        self.sizer.begin_step(question.batch_size)
        pieces = divide()
        if not self.sizer.has_to_agree:
            return Division(pieces, len(pieces), question.ends)
        answers = [
            int(question.ends),
            question.requested,
            -question.requested,
            question.num_rows,
            -question.num_rows,
            len(pieces),
        ]
        agreed, limit_changes = self.sizer.agree(answers)
        any_ends, most_batch, least_batch, most_rows, least_rows, num_pieces = agreed
        if most_batch != -least_batch or most_rows != -least_rows:
            same_answers(
                {
                    "batch_size_schedule": question.requested,
                    "the rows of the next step, which": question.num_rows,
                }
            )
        ends = bool(any_ends)
        if limit_changes:
            return Division.agreed(divide(), ends=ends)
        return Division(pieces, num_pieces, ends)

    def run_step(
        self,
        attempt: Callable[[Division], Result],
        divide: Callable[[], list[MicroBatch]],
        division: Division,
    ) -> Result:
        """Call `attempt` until it does not run out of memory; gradients of earlier batches are
        kept.

        Args:
            attempt: function that runs a division, by :meth:`run_micro_batches`.
            divide: see :meth:`agree_on`.
            division: division that ranks have agreed upon.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told.
        """
        self.step_gradients = gradients = self.gradients_apart()
        self.sharding.begin_step()
        restore = self._snapshot.take()
        divisions = [division]

        def attempt_within() -> Result:
            # Where memory has run out there are more micro-batches now.
            current = divisions.pop() if divisions else Division.agreed(divide())
            if current.pieces:
                # Memory may run out before the first of them.
                self.retry.expect(current.pieces)
            if self.sharding.is_sharded:
                # A forward of the user's, as in a validation, leaves parameters gathered.
                self.sharding.reset()
            with optimizers_wait() if current.num_pieces > 1 else nullcontext():
                return attempt(current)

        def undo() -> None:
            gradients.drop_new()
            restore()
            # The cache is given back then.
            self.largest_size = 0

        try:
            with self.compilations.without_garbage(), gradients.with_others(self._others):
                result = self.retry.run(attempt_within, undo=undo, doing="in a step")
        except BaseException as error:
            gradients.put_back()
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
        gradients.add_up()
        return result

    def run_micro_batches(
        self,
        division: Division,
        run: Callable[[MicroBatch | None, bool], object],
        *,
        idle: MicroBatch,
        reduces_first: bool = False,
    ) -> None:
        """Run the micro-batches of a division in turn, as many on all ranks.

        Args:
            division: division that ranks have agreed upon.
            run: function that runs one, None for a dummy of a rank that has fewer; and is told
                whether its gradients are reduced.
            idle: micro-batch that is named in errors where this rank has none.
            reduces_first: whether the gradients of the first micro-batch are reduced too, not those
                of the last alone.
        """
        own_pieces, num_pieces, _ = division
        assert len(own_pieces) <= num_pieces, (
            f"{len(own_pieces)} micro-batches on this rank of {num_pieces} agreed upon"
        )
        pieces: list[MicroBatch | None] = [*own_pieces, *[None] * (num_pieces - len(own_pieces))]
        kinds = [
            {"is_last": number == num_pieces - 1 or (reduces_first and not number)}
            for number in range(num_pieces)
        ]
        self.begin_parts(len(pieces))
        size = max((piece.size for piece in pieces if piece), default=0)
        if size > self.largest_size:
            self.largest_size = size
            self.memory.make_room_for_larger()

        def run_number(number: int) -> None:
            is_last = kinds[number]["is_last"]
            with self.sharding.micro_batch(is_last=is_last):
                run(pieces[number], is_last)

        self.retry.run_in_turn(pieces, run_number, drop=self.drop_gradients, idle=idle, kinds=kinds)

    def begin_parts(self, num_parts: int) -> None:
        """Refuse hooks that may step an optimizer in backward if a step has several parts."""
        self._others.begin_parts(num_parts)

    @contextmanager
    def trial(self, *, is_last: bool = True, evaluates: bool | str = False) -> Iterator[None]:
        """Inside, one micro-batch runs that is no training; all of it, so that ranks come to its
        end together.
        """
        micro_batch = self.sharding.micro_batch(is_last=is_last, evaluates=evaluates, is_trial=True)
        with micro_batch, self.compilations.without_garbage():
            self.is_trial = True
            try:
                yield
            finally:
                self.is_trial = False

    def learn_collectives(self, run: Callable[[], object], row: MicroBatch) -> None:
        """Run trials and undo them, so that a rank which runs out of memory even in the first
        micro-batch of training can bring its collectives to their end.

        Args:
            run: function that runs a trial of each kind of micro-batch.
            row: what they run, for errors.

        Raises:
            RankLostError: out of memory.
        """
        self.retry.expect([row])
        try:
            self._run_undone(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self.retry.lost(error, "with a single row") from error

    def _run_undone(self, run: Callable[[], object]) -> None:
        """Call a function that runs trials, and undo what it did, also where it fails."""
        gradients = self.gradients_apart()
        restore = self._snapshot.take()
        try:
            with gradients.with_others(self._others):
                run()
        finally:
            gradients.put_back()
            restore()

    @cached_property
    def _places(self) -> list[dict[str, nn.Parameter | None]]:
        """Where the model's modules have their parameters, as of the first step.

        Each step looks at all gradients, and the way through the modules takes three times as long.
        """
        return [module._parameters for module in self.model.modules() if module._parameters]

    def _parameters(self) -> Iterator[nn.Parameter | None]:
        return chain.from_iterable(map(dict.values, self._places))

    def own_leaves(self) -> Iterator[torch.Tensor | None]:
        """Yield the leaves of the model, the whole ones of sharded parameters too."""
        return chain(self._parameters(), self.sharding.unsharded_parameters())

    def _gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients that are there, by parameter."""
        return {
            parameter: parameter.grad
            for parameter in self._parameters()
            if parameter is not None and parameter.grad is not None
        }

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the gradients of parameters by their ids, of those outside of the model too."""
        others = [
            leaf for leaf, _ in self.step_gradients.others() if isinstance(leaf, nn.Parameter)
        ]
        gradients = self._gradients()
        gradients |= {leaf: leaf.grad for leaf in others if leaf.grad is not None}
        return {id(parameter): gradient for parameter, gradient in gradients.items()}

    def has_gradients(self) -> bool:
        """Return whether a parameter has a gradient."""
        return bool(self._gradients())

    def gradients_apart(self) -> GradientsApart:
        """Set the gradients of earlier batches aside."""
        return GradientsApart(self._gradients(), self.drop_gradients)

    def drop_gradients(self) -> None:
        """Leave no gradient, so that a step of the optimizer changes nothing."""
        self.sharding.reset()
        for parameter in self.model.parameters():
            parameter.grad = None
