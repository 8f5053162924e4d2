"""Measures what trials run, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._util import format_bytes
from adaptive_batch.distributed import Sharding
from adaptive_batch.errors import AdaptiveBatchError, DoesNotFitError, RankLostError
from adaptive_batch.memory import (
    DeviceMemory,
    OptimizerInBackward,
    Usage,
    is_out_of_memory,
    optimizer_state_tensors,
    recover,
)


@dataclass
class _Attempt:
    """How far a run came.

    Attributes:
        is_prepared: whether the gradients were made that are there when it begins.
        has_run: whether it came to its end, so that no other rank waits for it; it may still be
            over its budget.
        usage: memory that it used; None where it ran out of memory.
        held_bytes: most bytes held before it ran out of memory; None where that is not known.
        message: message of the device where it ran out of memory.
    """

    is_prepared: bool = False
    has_run: bool = False
    usage: Usage | None = None
    held_bytes: int | None = None
    message: str = ""


class TrialMeter:
    """Runs a part of a trial and measures it, with the gradients that training has when it begins;
    what does not fit is cleared away on all ranks.

    Args:
        model: model of the trial.
        optimizer: optimizer of its parameters, or the optimizers in backward.
        memory: memory of the device.
        budget_bytes: bytes that a trial may use, all that is resident included.
        sharding: sharding of the model.
        accumulates: whether gradients are there when a forward begins.
        keep_gradients: function that leaves the unsharded gradients that are there in mid-step, if
            `accumulates`; None where gradients are only the parameters' own.
        remedies: end of the error that one row does not fit.
        held: frozen modules that lie on the device beside the model.

    Attributes:
        retried: whether the allocator had to ask twice in what was measured last.
        held_bytes: most bytes held before that ran out of memory; None where it did not, or that is
            not known.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackward,
        *,
        memory: DeviceMemory,
        budget_bytes: int,
        sharding: Sharding,
        accumulates: bool,
        keep_gradients: Callable[[], object] | None,
        remedies: str,
        held: Sequence[nn.Module],
    ) -> None:
        self.retried = False
        self.held_bytes: int | None = None
        self._model = model
        self._optimizer = optimizer
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._sharding = sharding
        self._accumulates = accumulates
        self._keep_gradients = keep_gradients if accumulates else None
        self._remedies = remedies
        self._held = held

    def measure(
        self,
        run: Callable[[], object],
        what: str,
        *,
        within: int | None = None,
        prepare: bool = True,
        is_timed: bool = False,
        is_first: bool = False,
    ) -> Usage | None:
        """Run, and return what it used; None where it does not fit on some rank.

        What makes the allocator free its cache and ask again does not fit.

        Args:
            run: function that runs what is measured.
            what: its name in errors.
            within: bytes that it may use; None for the budget.
            prepare: whether gradients are made that are there when it begins.
            is_timed: whether `run` times itself, so that nothing is counted in Python meanwhile.
            is_first: whether ranks learn their collectives from it.

        Raises:
            DoesNotFitError: the first row of several ranks ran out of memory.
            RankLostError: out of memory where the other ranks cannot be told.
            RuntimeError: it failed for another reason than memory.
        """
        budget_bytes = self._budget_bytes if within is None else within
        attempt = self._attempt(run, what, budget_bytes, prepare=prepare, is_timed=is_timed)
        usage = attempt.usage
        self.retried = usage is not None and usage.retried
        self.held_bytes = attempt.held_bytes
        fits = usage is not None and not usage.retried
        # Where a rank failed in mid-run, the others wait in collectives that it has to go through.
        can_rejoin = attempt.has_run or distributed.world_size() == 1
        if not can_rejoin:
            can_rejoin = attempt.is_prepared and self._sharding.can_finish
        if not can_rejoin:
            if is_first:
                raise self.does_not_fit(what, f"more than {format_bytes(budget_bytes)}")
            raise self._lost(what, attempt.message, budget_bytes)
        try:
            if not fits:
                self.drop_gradients()
                recover(self._memory)
                self._sharding.finish()
            fits_everywhere = not distributed.any_of_ranks(not fits)
        except Exception as error:
            if distributed.world_size() == 1 or not is_out_of_memory(error):
                raise
            raise self._lost(f"what came after {what}", str(error), budget_bytes) from error
        if fits and not fits_everywhere:
            self.drop_gradients()
            self._memory.release()
        if not fits_everywhere:
            return None
        return usage

    def _attempt(
        self,
        run: Callable[[], object],
        what: str,
        budget_bytes: int,
        *,
        prepare: bool,
        is_timed: bool,
    ) -> _Attempt:
        """Run until it ends or runs out of memory.

        Nothing is released here: the traceback of an error keeps tensors alive until the except
        block has been left.
        """
        attempt = _Attempt()
        usage: Usage | None = None
        try:
            if prepare:
                self.prepare_gradients()
            attempt.is_prepared = True
            measuring = self._memory.measure(self.resident(), budget_bytes=budget_bytes)
            counts_in_python = self._memory.granularity_bytes == 1
            # Counting in Python would be timed along with the run.
            if is_timed and counts_in_python:
                measuring = nullcontext(Usage(0))
            with measuring as usage:
                run()
                attempt.has_run = True
            attempt.usage = usage
        except AdaptiveBatchError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise RuntimeError(f"{what} failed, and not for lack of memory: {error}") from error
            attempt.message = str(error) or type(error).__name__
            if usage is not None:
                attempt.held_bytes = usage.peak_bytes
        return attempt

    def _lost(self, what: str, message: str, budget_bytes: int) -> RankLostError:
        return RankLostError(
            f"{what} ran out of memory on {self._memory.device} within"
            f" {format_bytes(budget_bytes)}, where the other ranks wait and cannot be told:"
            f" {message.partition(chr(10))[0]}",
            {"doing": what, "error": message},
        )

    def does_not_fit(self, what: str, needs: str) -> DoesNotFitError:
        """Return the error of what needs more than the budget."""
        place = str(self._memory.device)
        if distributed.world_size() > 1:
            place = f"rank {distributed.rank()}"
        allowed = format_bytes(self._budget_bytes)
        return DoesNotFitError(f"{what} needs {needs}, {place} allows {allowed}; {self._remedies}")

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that training holds between two of its steps."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
        for module in self._held:
            yield from (*module.parameters(), *module.buffers())
        yield from self._sharding.kept_gradients()
        optimizers: Iterable[Optimizer]
        if isinstance(self._optimizer, OptimizerInBackward):
            optimizers = self._optimizer.optimizers.values()
        else:
            optimizers = [self._optimizer]
        yield from optimizer_state_tensors(optimizers)

    def prepare_gradients(self) -> None:
        """Make the gradients that are there when a forward begins."""
        if self._keep_gradients:
            self.drop_gradients()
            self._keep_gradients()
            return
        for parameter in self._model.parameters():
            if not self._accumulates:
                parameter.grad = None
            elif parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def drop_gradients(self) -> None:
        """Leave no gradient."""
        self._sharding.reset()
        for parameter in self._model.parameters():
            parameter.grad = None
