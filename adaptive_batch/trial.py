"""Trials: forward and backward of some rows with all that is resident in training, measured, without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import nn
from torch.optim import Optimizer

from .errors import DoesNotFitError
from .in_backward import OptimizerInBackward
from .memory import GIB, DeviceMemory, is_out_of_memory
from .search import Trial
from .snapshot import TrainingSnapshot, optimizer_state_tensors

REMEDIES = (
    "shorten the rows (tokenizer.max_seq_len), set enable_activation_checkpointing=True or optimizer_in_bwd=True, "
    "use an 8-bit optimizer or a chunked loss, or allow more memory"
)


class Rehearsal:
    """Runs trials of a training step; entering copies what training has, leaving puts it back bit for bit.

    Entering also rehearses one whole step with a single row, so that the optimizer's state is resident during every trial as
    it is in training, and so that the optimizer's own phase, which does not grow with the batch, is measured once.

    Args:
        model: in training mode, weights loaded.
        optimizer: the optimizer, or the optimizers in backward.
        forward_backward: run this many of the longest rows through the code that training runs, ``backward`` included.
        step: what training does once gradients are there: clipping and ``optimizer.step()``; unused with the optimizer in
            backward.
        accumulates: some step may have two micro-batches or more, so gradients are already there when a forward begins.
        memory: the device.
        budget_bytes: what a trial may use, all that is resident included.
        row: how an error calls a single row, its length included.

    Attributes:
        resident_bytes: alive before a trial; known after entering.
        optimizer_peak_bytes: peak of clipping and the optimizer's step; None with the optimizer in backward.

    Raises:
        DoesNotFitError: one row does not fit (on entering).
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
        self._exit = ExitStack()

    def __enter__(self) -> Rehearsal:
        with ExitStack() as stack:
            stack.callback(self._memory.release)
            snapshot = TrainingSnapshot(
                self._model, self._optimizers, device=self._memory.device, parameters_change=self._in_backward is None
            )
            stack.callback(snapshot.restore)
            stack.callback(self._drop_gradients)
            if self._in_backward:
                stack.enter_context(self._in_backward.rehearsal())
            self._model.train()
            self._rehearse_one_step()
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def __call__(self, batch_size: int) -> Trial:
        """Try `batch_size` rows.

        Raises:
            RuntimeError: the trial failed for another reason than memory; that size is not "too large", it is broken.
        """
        fits, peak_bytes = self._measure(lambda: self._forward_backward(batch_size), f"a trial of {batch_size} rows")
        return Trial(batch_size, fits, peak_bytes, self.optimizer_peak_bytes)

    def _rehearse_one_step(self) -> None:
        fits, peak_bytes = self._measure(lambda: self._forward_backward(1), f"a trial of {self._row}")
        if not fits:
            raise self._does_not_fit(self._row, lambda: self._forward_backward(1))
        if not self._in_backward:
            fits, self.optimizer_peak_bytes = self._measure(self._step, "the optimizer's step", prepare=False)
            if not fits:
                self._measure(lambda: self._forward_backward(1), f"a trial of {self._row}")
                raise self._does_not_fit("the optimizer's step", self._step, prepare=False)
        self._prepare_gradients()
        with self._memory.measure(self._resident(), budget_bytes=self.budget_bytes) as usage:
            pass
        self.resident_bytes = usage.resident_bytes

    def _measure(
        self, run: Callable[[], object], what: str, *, prepare: bool = True, budget_bytes: int | None = None
    ) -> tuple[bool, int | None]:
        """Run, and say whether it fits and what it peaked at. Memory is released after the except block has been left."""
        if prepare:
            self._prepare_gradients()
        fits, peak_bytes = False, None
        try:
            with self._memory.measure(self._resident(), budget_bytes=budget_bytes or self.budget_bytes) as usage:
                run()
            fits, peak_bytes = not usage.retried, usage.peak_bytes
        except Exception as error:
            if not is_out_of_memory(error):
                raise RuntimeError(f"{what} failed, and not for lack of memory: {error}") from error
        if not fits:
            _drain_backward(self._memory.device)
            self._drop_gradients()
            self._memory.release()
        return fits, peak_bytes

    def _does_not_fit(self, what: str, run: Callable[[], object], *, prepare: bool = True) -> DoesNotFitError:
        """The error with numbers: what it would have needed, where the device has more than the budget allows."""
        available = self._memory.available_bytes(self._resident())
        needs = f"more than {self.budget_bytes / GIB:.2f} GiB"
        if available > self.budget_bytes:
            fits, peak_bytes = self._measure(run, what, prepare=prepare, budget_bytes=available)
            if fits and peak_bytes:
                needs = f"{peak_bytes / GIB:.2f} GiB"
        return DoesNotFitError(
            f"{what} needs {needs}, {self._memory.device} allows {self.budget_bytes / GIB:.2f} GiB; {REMEDIES}"
        )

    def _resident(self) -> Iterator[torch.Tensor]:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
        optimizers = self._in_backward.optimizers.values() if self._in_backward else self._optimizers
        yield from optimizer_state_tensors(optimizers)

    def _prepare_gradients(self) -> None:
        for parameter in self._model.parameters():
            if not self._accumulates:
                parameter.grad = None
            elif parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _drop_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None


def _drain_backward(device: torch.device) -> None:
    """Run a trivial backward: a failed one may leave tasks in autograd's engine that keep its graph alive."""
    scalar = torch.zeros((), device=device, requires_grad=True)
    torch.autograd.grad(scalar * 1, scalar)
