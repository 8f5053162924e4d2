"""Trials: forward and backward of some rows with all that is resident in training, measured,
without a trace.

With several ranks all try the same at the same time, and what does not fit on one does not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from types import TracebackType

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch import distributed
from adaptive_batch._util import count, format_bytes
from adaptive_batch.distributed import Sharding
from adaptive_batch.errors import (
    MEMORY_REMEDIES,
    AdaptiveBatchError,
    DoesNotFitError,
    RankLostError,
)
from adaptive_batch.memory import (
    DeviceMemory,
    OptimizerInBackward,
    TrainingSnapshot,
    Usage,
    is_out_of_memory,
    optimizer_state_tensors,
    recover,
)

from .search import Trial


class DryRun:
    """Runs trials of a training step; entering copies what training has, leaving puts it back bit
    for bit.

    Entering also tries one whole step with a single row, so that the optimizer's state is resident
    during every trial as it is in training, and so that the optimizer's own phase, which does not
    grow with the batch, is measured once.

    Args:
        model: weights loaded; put into training mode unless it is in it, where modules that are
            frozen in evaluation mode stay so.
        optimizer: the optimizer, or the optimizers in backward.
        forward_backward: runs this many of the longest rows through the code that training runs,
            ``backward`` included.
        step: what training does once gradients are there: clipping and ``optimizer.step()``.
        accumulates: some step may have two micro-batches or more, so gradients are already there
            when a forward begins.
        memory: the device.
        budget_bytes: what a trial may use, all that is resident included.
        row: how an error calls a single row, its length included.
        sharding: of the model; needed where there are several ranks.
        keep_gradients: runs a micro-batch of one row that leaves its gradients unsharded, as in the
            middle of a step.
        steps: of a caching allocator, which varying lengths fragment: the micro-batches of steps of
            training whose largest has so many rows. A trial is all of these then, from a fresh
            cache, and on leaving the cache stays as the last one left it.
        remedies: the end of the error that one row does not fit.

    Attributes:
        resident_bytes: alive before a trial; known after entering, as is the rest.
        optimizer_peak_bytes: peak of clipping and the optimizer's step; None with the optimizer in
            backward.

    Raises:
        DoesNotFitError: one row does not fit (on entering).
        RankLostError: out of memory on this rank where the others cannot be told.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | OptimizerInBackward,
        forward_backward: Callable[[int], None],
        step: Callable[[], object],
        accumulates: bool,
        memory: DeviceMemory,
        budget_bytes: int,
        row: str = "one row",
        sharding: Sharding | None = None,
        keep_gradients: Callable[[], object] | None = None,
        steps: Callable[[int], Iterator[Sequence[Callable[[], None]]]] | None = None,
        remedies: str = MEMORY_REMEDIES,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self.optimizer_peak_bytes: int | None = None
        self._model = model
        self._in_backward = optimizer if isinstance(optimizer, OptimizerInBackward) else None
        self._optimizers = [] if isinstance(optimizer, OptimizerInBackward) else [optimizer]
        self._forward_backward = forward_backward
        self._step = step
        self._accumulates = accumulates
        self._memory = memory
        self._row = row
        self._sharding = sharding or Sharding(model)
        self._keep_gradients = keep_gradients if accumulates else None
        self._remedies = remedies
        self._steps = steps
        self._retried = False
        self._exit = ExitStack()

    def __enter__(self) -> DryRun:
        with ExitStack() as stack:
            if self._steps is None:
                stack.callback(self._memory.release)
            snapshot = TrainingSnapshot(
                self._model,
                self._optimizers,
                device=self._memory.device,
                parameters_change=self._in_backward is None,
            )
            stack.callback(snapshot.restore)
            if self._steps is not None:
                stack.callback(self._keep_place_of_state)
            stack.callback(self._drop_gradients)
            if self._in_backward:
                stack.enter_context(self._in_backward.dry_run())
            if not self._model.training:
                self._model.train()
            self._try_one_step(snapshot)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.close()

    def __call__(self, batch_size: int) -> Trial:
        """Try `batch_size` rows.

        Raises:
            RuntimeError: the trial failed for another reason than memory; that size is not "too
                large", it is broken.
            RankLostError: out of memory where the other ranks cannot be told; whether the
                ``trial_rows`` in its facts fit is not known.
        """
        what = f"a trial of {count(batch_size, 'row')}"
        try:
            if self._steps is None:
                usage = self._measure(
                    lambda: self._forward_backward(batch_size), what, self.budget_bytes
                )
            else:
                self._drop_gradients()
                run = partial(self._run_steps, self._steps(batch_size))
                usage = self._measure(run, what, self.budget_bytes, prepare=False)
        except RankLostError as lost:
            lost.facts["trial_rows"] = batch_size
            raise
        peak, trace = (usage.peak_bytes, usage.trace) if usage else (None, None)
        retried = usage is None and self._retried
        return Trial(batch_size, usage is not None, peak, self.optimizer_peak_bytes, trace, retried)

    def time(self, runs: Sequence[Callable[[], object]]) -> list[float] | None:
        """Run micro-batches one after the other; return the seconds of each, of the slowest rank,
        None where they do not fit.

        Where memory is counted, which takes time, it is not.
        """
        seconds: list[float] = []

        def run() -> None:
            for forward_backward in runs:
                start = time.perf_counter()
                forward_backward()
                if self._memory.device.type != "cpu":
                    torch.accelerator.synchronize()
                seconds.append(time.perf_counter() - start)

        usage = self._measure(
            run, "timing micro-batches", self.budget_bytes, prepare=False, is_timed=True
        )
        self._drop_gradients()
        return (
            None
            if usage is None
            else [
                each / 1e9 for each in distributed.all_reduce_max([int(1e9 * s) for s in seconds])
            ]
        )

    def _run_steps(self, steps: Iterator[Sequence[Callable[[], None]]]) -> None:
        for micro_batches in steps:
            for forward_backward in micro_batches:
                forward_backward()
            if not self._in_backward:
                self._step()
            self._drop_gradients()

    def _keep_place_of_state(self) -> None:
        """Until a new optimizer makes its state in its first step, keep the memory that it had in
        trials from being used otherwise.
        """
        for optimizer in self._optimizers:
            place = list(optimizer_state_tensors([optimizer]))
            optimizer.register_step_pre_hook(lambda *_, place=place: place.clear())

    def evaluation(self, evaluate: Callable[[int], object], batch_size: int) -> Trial:
        """Try to evaluate `batch_size` rows: in evaluation mode, with what training has between two
        of its steps resident.
        """
        self._drop_gradients()
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            what = f"a trial of evaluating {count(batch_size, 'row')}"
            usage = self._measure(
                lambda: evaluate(batch_size), what, self.budget_bytes, prepare=False
            )
        finally:
            self._model.train()  # a module may do more in it than note its mode
            for module, training in modes:
                module.training = training
        return (
            Trial(batch_size, True, usage.peak_bytes, None, usage.trace)
            if usage
            else Trial(batch_size, False)
        )

    def _try_one_step(self, snapshot: TrainingSnapshot) -> None:
        """Run one row, so that the optimizer's state is there; raise an error with numbers if it
        does not fit.
        """
        failed, _ = self._whole_step(self.budget_bytes)
        if failed is None:
            self._prepare_gradients()
            with self._memory.measure(self._resident(), budget_bytes=self.budget_bytes) as usage:
                pass
            self.resident_bytes = usage.resident_bytes
            return
        needs = f"more than {format_bytes(self.budget_bytes)}"
        snapshot.restore_optimizers()  # a step that ran out of memory leaves states half made
        available = self._memory.available_bytes(self._resident())
        if not distributed.any_of_ranks(
            available <= self.budget_bytes
        ):  # beyond the budget it can be measured
            again, peaks = self._whole_step(available)
            if again is None and peaks:
                needs = format_bytes(max(peaks))
        raise self._does_not_fit(failed, needs)

    def _does_not_fit(self, what: str, needs: str) -> DoesNotFitError:
        where = (
            f"rank {distributed.rank()}"
            if distributed.world_size() > 1
            else str(self._memory.device)
        )
        allowed = format_bytes(self.budget_bytes)
        return DoesNotFitError(f"{what} needs {needs}, {where} allows {allowed}; {self._remedies}")

    def _whole_step(self, budget_bytes: int) -> tuple[str | None, list[int]]:
        """Run forward and backward of one row, the optimizer's step, and the former again; return
        what did not fit, and the peaks.
        """
        phases: list[tuple[str, Callable[[], object]]] = [(self._row, self._one_row)] * 2
        if not self._in_backward:
            phases.insert(1, ("the optimizer's step", self._step))
        peaks: list[int] = []
        for what, run in phases:
            usage = self._measure(run, what, budget_bytes, prepare=run != self._step)
            if usage is None:
                return what, peaks
            if usage.peak_bytes is not None:
                peaks.append(usage.peak_bytes)
            if run == self._step:
                self.optimizer_peak_bytes = usage.peak_bytes
        return None, peaks

    def _one_row(self) -> None:
        self._forward_backward(1)

    def _measure(
        self,
        run: Callable[[], object],
        what: str,
        budget_bytes: int,
        *,
        prepare: bool = True,
        is_timed: bool = False,
    ) -> Usage | None:
        """Run, and return what it used; None where it does not fit. Memory is released after the
        except block has been left.
        """
        fits = has_run = self._retried = False
        is_prepared = distributed.world_size() == 1
        message = ""
        try:
            if prepare:
                self._prepare_gradients()
            is_prepared = True
            counts_in_python = self._memory.granularity_bytes == 1
            measuring = self._memory.measure(self._resident(), budget_bytes=budget_bytes)
            with nullcontext(Usage(0)) if is_timed and counts_in_python else measuring as usage:
                run()
                has_run = True
            self._retried = usage.retried
            fits = not usage.retried
        except AdaptiveBatchError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise RuntimeError(f"{what} failed, and not for lack of memory: {error}") from error
            message = str(error) or type(error).__name__
        if not (has_run or (is_prepared and self._sharding.can_finish)):
            if run == self._one_row:  # the first of all, before which there was none to learn from
                raise self._does_not_fit(what, f"more than {format_bytes(budget_bytes)}")
            raise self._lost(what, message, budget_bytes)
        try:
            if not fits:
                self._drop_gradients()
                recover(self._memory)
                self._sharding.finish()
            fits_everywhere = not distributed.any_of_ranks(not fits)
        except Exception as error:
            if distributed.world_size() == 1 or not is_out_of_memory(error):
                raise
            raise self._lost(f"what came after {what}", str(error), budget_bytes) from error
        if fits and not fits_everywhere:
            self._drop_gradients()
            self._memory.release()
        return usage if fits_everywhere else None

    def _lost(self, what: str, message: str, budget_bytes: int) -> RankLostError:
        return RankLostError(
            f"{what} ran out of memory on {self._memory.device} within"
            f" {format_bytes(budget_bytes)}, where the other ranks wait and cannot be told:"
            f" {message.partition(chr(10))[0]}",
            {"doing": what, "error": message},
        )

    def _resident(self) -> Iterator[torch.Tensor]:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
        yield from self._sharding.kept_gradients()
        optimizers = (
            self._in_backward.optimizers.values() if self._in_backward else self._optimizers
        )
        yield from optimizer_state_tensors(optimizers)

    def _prepare_gradients(self) -> None:
        if self._keep_gradients:
            self._drop_gradients()
            self._keep_gradients()
            return
        for parameter in self._model.parameters():
            if not self._accumulates:
                parameter.grad = None
            elif parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _drop_gradients(self) -> None:
        self._sharding.reset()
        for parameter in self._model.parameters():
            parameter.grad = None
