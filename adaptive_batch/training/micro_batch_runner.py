"""Runs a step batch as micro-batches: gradients are sums of token losses over one count of label tokens.

A step that runs out of memory is replayed: from cleared gradients, with random numbers and running statistics put back and
less capacity, so that what it leaves is what a run with that capacity would have left.

With several ranks each runs its own rows of the step, all the same number of micro-batches. A rank that has fewer passes
fillers of weight 0; one that runs out of memory stands in until the ranks count their label tokens together, where all learn
of it and replay the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.distributed import Sharding
from adaptive_batch.errors import MEMORY_REMEDIES
from adaptive_batch.memory import DeviceMemory, RandomState, TensorSnapshot, device_memory, is_out_of_memory, recover
from adaptive_batch.schedules import NoiseSample, squared_norm

from .oom_retry import LimitChange, OOMPolicy, OOMRetry, OutOfMemoryElsewhereError, lengthened

Row = dict[str, Any]
Batch = dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """What the micro-batches of one optimizer step added up to, on all ranks.

    Attributes:
        loss: mean loss of a label token; 0 where the step had none.
        label_tokens: tokens that have a label, counted after the shift; a scalar tensor on the device.
        rows: rows of the step.
        tokens: real tokens of the step, padding not counted.
        micro_batches: forward and backward passes that were run, by each rank.
        padding_fraction: share of the padded tokens that were padding.
        grad_norm: of all gradients before they were clipped, where clipping is configured; a scalar tensor.
        noise: what the step says of the gradient's noise, where that is measured; None of a step that ran as one
            micro-batch, or whose micro-batches were grouped by length.
    """

    loss: float
    label_tokens: torch.Tensor
    rows: int
    tokens: int
    micro_batches: int
    padding_fraction: float
    grad_norm: torch.Tensor | None = None
    noise: NoiseSample | None = None


class MicroBatchRunner:
    """Forward and backward of the rows of one step, in as many micro-batches as its capacity asks for.

    Args:
        model: its gradients are summed; they must be clear when :meth:`run` begins.
        collate: makes one padded batch of rows on the host, with ``tokens`` and ``labels`` of shape `[batch, sequence]` unless
            `num_labels` counts them.
        to_device: moves a batch to the device, in place.
        mean_loss: the loss of a batch, averaged over its label tokens after the shift; may empty the batch.
        num_real_tokens: how many of a row's tokens are not padding.
        ignore_index: the label of a token that has none.
        capacity: what one micro-batch may hold.
        shapes: what micro-batches are padded to and whether they are alike; None for nothing.
        pad_id: the token that rows are padded with where `shapes` pads them.
        max_grad_norm: clip the norm of all gradients to this; None does not.
        scale_gradients: False with the optimizer in backward, whose only micro-batch is stepped as it comes.
        measures_noise: say in each result what the step's first micro-batch and the whole of it tell of the gradient's
            noise; not with the optimizer in backward, which leaves no gradient.
        replays: run a step that ran out of memory again, with the limit that the policy gives; False lets the error through.
        on_change: is told of every lowered capacity, before anything is run with it; None logs it.
        memory: of the model's device; None asks torch.
        device: where the model runs; None for where its parameters are.
        sharding: of the model; needed where there are several ranks.
        filler: gives a row for a rank that has none left, where there are several.
        row_length: tokens of a row; None for those of its ``tokens``.
        num_labels: labels of a batch, on the host and on the device, that `mean_loss` is the mean over; `filler` then gives a
            row that has one. None for label tokens after the shift.
        remedies: the end of the sentence that says that one row does not fit.
        policy: decides how the limit shrinks after an out-of-memory error; None halves it.

    Attributes:
        is_trial: whether what runs now is a trial, and not training.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        collate: Callable[[Sequence[Row]], Batch],
        to_device: Callable[[Batch], object],
        mean_loss: Callable[[Batch], torch.Tensor],
        num_real_tokens: Callable[[Row], int],
        ignore_index: int,
        capacity: MicroBatchLimit,
        shapes: MicroBatchLayout | None = None,
        pad_id: int = 0,
        max_grad_norm: float | None = None,
        scale_gradients: bool = True,
        measures_noise: bool = False,
        replays: bool = True,
        on_change: Callable[[LimitChange], object] | None = None,
        memory: DeviceMemory | None = None,
        device: torch.device | None = None,
        sharding: Sharding | None = None,
        filler: Callable[[], Row] | None = None,
        row_length: Callable[[Row], int] | None = None,
        num_labels: Callable[[Batch], torch.Tensor] | None = None,
        remedies: str = MEMORY_REMEDIES,
        policy: OOMPolicy | None = None,
    ) -> None:
        self._model = model
        self._collate_rows = collate
        self._to_device = to_device
        self._mean_loss = mean_loss
        self._num_real_tokens = num_real_tokens
        self._ignore_index = ignore_index
        self._shapes = shapes or MicroBatchLayout()
        self._pad_id = pad_id
        self._max_grad_norm = max_grad_norm
        self._scale_gradients = scale_gradients
        assert scale_gradients or not measures_noise, "there are no gradients to measure with the optimizer in backward"
        self._measures_noise = measures_noise
        self._replays = replays
        self._device = device or next(model.parameters()).device
        self._memory = memory or device_memory(self._device)
        self.sharding = sharding or Sharding(model)
        self._filler = filler
        self._length = row_length or _length
        self._num_labels = num_labels
        # One token has no label after the shift.
        self._least_length = 2 if num_labels is None else 1
        # Ranks agree on how many there are before they run: the same rows are not cut twice.
        self._cut = lru_cache(maxsize=1)(lambda lengths, capacity: micro_batches(lengths, capacity, self._shapes))
        self._replay = OOMRetry(capacity, memory=self._memory, on_change=on_change, remedies=remedies, policy=policy)
        self._running_statistics = _running_statistics(model)
        self.is_trial = False

    @property
    def capacity(self) -> MicroBatchLimit:
        """What one micro-batch may hold now; lowered after an out-of-memory error; it does not grow back."""
        return self._replay.capacity

    @capacity.setter
    def capacity(self, capacity: MicroBatchLimit) -> None:
        self._replay.capacity = capacity

    def num_micro_batches(self, rows: Sequence[Row]) -> int:
        """How many micro-batches some rows are now."""
        return len(self._cut(tuple(map(self._length, rows)), self.capacity))

    @property
    def thrashes(self) -> bool:
        """Whether :meth:`reduce_capacity` is due, on all ranks, as the allocator of this one only just had room."""
        return self._replay.thrashes

    def reduce_capacity(self) -> None:
        """Make the capacity a little smaller on all ranks, where one of them thrashes."""
        self._replay.reduce()

    def run(self, rows: Sequence[Row], *, num_micro_batches: int | None = None) -> StepResult:
        """Leave in the gradients the mean over the label tokens of all `rows`, clipped.

        Args:
            rows: of this rank; none where other ranks have some.
            num_micro_batches: that the rank with most of them needs within the capacity, where all ranks know it; None lets
                them ask each other.

        Raises:
            DoesNotFitError: one row alone ran out of memory.
            RankLostError: out of memory on this rank where the others cannot be told.
        """

        def attempt() -> StepResult:
            nonlocal num_micro_batches
            if distributed.world_size() == 1:
                return self._attempt(rows)
            self.sharding.reset()  # a forward of another's, as in its own validation, leaves parameters gathered
            known, num_micro_batches = num_micro_batches, None  # with less capacity there are more
            return self._attempt_together(rows, known)

        return self._replay.run(attempt, undo=self._snapshot()) if self._replays else attempt()

    def learn_collectives(self) -> None:
        """With several ranks, run a micro-batch of one row and undo it, so that one that fails can be brought to its end.

        All ranks call it before training, where no trial has done so. Gradients must be clear.

        Raises:
            RankLostError: out of memory.
        """
        assert self._scale_gradients
        assert self._filler is not None
        undo, row = self._snapshot(), self._filler()
        self._replay.current = MicroBatch([0], self._length(row))
        try:
            for is_last in (False, True):
                self.rehearse([row], is_last=is_last)
            self.evaluate(self.collate([row]), rehearsing=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._replay.lost(error, "with a single row") from error
        undo()

    def _snapshot(self) -> Callable[[], None]:
        """What takes back what a step has done to gradients, running statistics and random numbers from now on."""
        random_state = RandomState(self._device)
        # A forward may also put another tensor in a buffer's place.
        buffers = [(module, name, module._buffers[name]) for module, name in self._running_statistics]
        statistics = TensorSnapshot(buffer for *_, buffer in buffers if buffer is not None)

        def undo() -> None:
            self._drop_gradients()
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            statistics.restore()
            random_state.restore()

        return undo

    def rehearse(self, rows: Sequence[Row], *, is_last: bool = True) -> None:
        """Run one micro-batch as :meth:`run` does, whether it has labels or not, and forget what it computed."""
        self.is_trial = True
        try:
            with self.sharding.micro_batch(is_last=is_last):
                self.forward_backward(self.collate(rows))
        finally:
            self.is_trial = False

    def keep_gradients(self, rows: Sequence[Row]) -> None:
        """Leave what is there in mid-step: unsharded gradients and, where noise is measured, the first micro-batch's reduced ones."""
        if self._measures_noise:
            self.rehearse(rows)
        self.rehearse(rows, is_last=False)

    def evaluate(self, batch: Batch, *, rehearsing: bool = False) -> tuple[float, int]:
        """The sum of the token losses of a collated batch and its label tokens, without gradients.

        One without any label is run only where it is `rehearsing`, or where other ranks may have some.
        """
        if not rehearsing and distributed.world_size() == 1 and not self._has_labels(batch):
            return 0.0, 0
        self.is_trial = rehearsing
        try:
            with torch.no_grad(), self.sharding.micro_batch(evaluates=True):
                loss, count = self._loss_and_labels(batch)
                return (loss * count).item() if count else 0.0, int(count)
        finally:
            self.is_trial = False

    def collate(self, rows: Sequence[Row], length: int | None = None) -> Batch:
        """One batch on the host, padded to `length` tokens, or to what the shapes ask for where that is None."""
        longest = max(map(self._length, rows))
        if length is None:
            length = self._shapes.padded(longest)
        if length > longest:
            rows = lengthened(rows, length, pad_id=self._pad_id, ignore_index=self._ignore_index)
        return self._collate_rows(rows)

    def forward_backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a collated batch's gradients; return the sum of its token losses and the count of its label tokens."""
        loss, count = self._loss_and_labels(batch)
        token_loss = loss * count
        (token_loss if self._scale_gradients else loss).backward()  # type: ignore[no-untyped-call]
        return token_loss.detach(), count

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients as configured; returns the norm that they had."""
        if self._max_grad_norm is None:
            return None
        alike: dict[Any, list[nn.Parameter]] = {}  # with tensor parallelism some lie on other meshes, or on none
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        if len(alike) <= 1:
            return self.sharding.whole(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm))
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in those if p.grad is not None]) for those in alike.values()
        ]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([self.sharding.whole(norm) for norm in norms]))
        for those in alike.values():
            torch.nn.utils.clip_grads_with_norm_(those, self._max_grad_norm, norm)
        return norm

    def _attempt(self, rows: Sequence[Row]) -> StepResult:
        lengths = tuple(map(self._length, rows))
        pieces = self._cut(lengths, self.capacity)
        assert self._scale_gradients or len(pieces) == 1, "with the optimizer in backward a step is one micro-batch"
        self._replay.current = fullest = self.capacity.fullest(pieces)
        loss_sum = label_tokens = torch.zeros(())
        padded_tokens = num_run = 0
        small: tuple[torch.Tensor, torch.Tensor] | None = None  # label tokens, and squared norm
        # Grouped by length, the first micro-batch is no random sample of the step.
        in_order = self.capacity.unit == "rows" or len(set(lengths)) == 1
        measures = self._measures_noise and in_order and len(pieces) > 1
        for piece in pieces:
            self._replay.current = piece
            batch = self.collate([rows[i] for i in piece.rows], piece.length)
            padded_tokens += _padded_tokens(batch, piece)
            if not self._has_labels(batch):  # its mean would be 0/0, and it adds nothing
                continue
            token_loss, count = self.forward_backward(batch)
            loss_sum, label_tokens = (loss_sum + token_loss, label_tokens + count) if num_run else (token_loss, count)
            num_run += 1
            if measures and num_run == 1:
                small = count, squared_norm(self._gradients()) / count**2
        self._replay.current = fullest
        if self._scale_gradients and num_run:
            self._multiply_gradients_by(1 / label_tokens)
        tokens = sum(map(self._num_real_tokens, rows))
        if small is None or num_run == 1:
            grad_norm, noise = self.clip(), None
        else:
            grad_norm, squared = self._clip_and_measure()
            noise = NoiseSample(small[0] / label_tokens * len(rows), small[1], len(rows), squared)
        return StepResult(
            loss=float(loss_sum.item() / label_tokens) if num_run else 0.0,
            label_tokens=label_tokens,
            rows=len(rows),
            tokens=tokens,
            micro_batches=num_run,
            padding_fraction=max(0.0, 1 - tokens / padded_tokens),
            grad_norm=grad_norm,
            noise=noise,
        )

    # --- several ranks ----------------------------------------------------------------------------------------------

    def _attempt_together(self, rows: Sequence[Row], num_micro_batches: int | None) -> StepResult:
        said: str | None = None
        doing = "before its micro-batches"
        try:
            pieces = self._cut(tuple(map(self._length, rows)), self.capacity)
            self._replay.current = fullest = self.capacity.fullest(pieces) if pieces else self._filling()
            count = num_micro_batches or max(1, distributed.maximum(len(pieces)))
            assert len(pieces) <= count, f"{len(pieces)} micro-batches on this rank, and {count} were agreed upon"
            assert self._scale_gradients or count == 1, "with the optimizer in backward a step is one micro-batch"
            sums = _Sums(rows=len(rows), tokens=sum(map(self._num_real_tokens, rows)), device=self._device)
            copies = distributed.world_size() // distributed.data_parallel_size()
            measures = self._measures_noise and self.capacity.unit == "rows" and count > 1 and copies == 1
            small: tuple[torch.Tensor, torch.Tensor] | None = None
            # What is measured after the first has to be reduced by then.
            reduced = [number + 1 == count or (measures and number == 0) for number in range(count)]
            for number, syncs in enumerate(reduced):
                doing = "within a micro-batch"
                if said is not None:
                    self.sharding.run_dummy_collectives(is_last=syncs)
                    continue
                piece = pieces[number] if number < len(pieces) else None
                self._replay.current = piece or self._replay.current
                try:
                    with self.sharding.micro_batch(is_last=syncs):
                        self._run_piece(rows, piece, sums)
                except Exception as error:
                    goes_on = self._replays and self.sharding.can_finish
                    if not (
                        goes_on
                        and all(self.sharding.knows(is_last=one) for one in reduced[number + 1 :])
                        and is_out_of_memory(error)
                    ):
                        raise
                    said = str(error) or type(error).__name__
                doing = "between micro-batches"
                if said is not None:  # the except block has been left, which kept the failed forward's tensors alive
                    self._drop_gradients()
                    recover(self._memory)
                    self.sharding.finish()
                if measures and number == 0:
                    small = self._measure_together(sums.label_tokens)
            doing = "after its micro-batches"
            if said is None:
                self._replay.current = fullest
            return self._finish_together(sums, count, small, failed=said is not None)
        except OutOfMemoryElsewhereError:
            if said is None:
                raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._replay.lost(error, doing) from error
        raise torch.OutOfMemoryError(said)

    def _filling(self) -> MicroBatch:
        """What a rank without rows runs: one row."""
        assert self._filler is not None, "several ranks need a filler"
        return MicroBatch([0], max(self._least_length, self._length(self._filler())))

    def _filler_batch(self) -> Batch:
        assert self._filler is not None, "several ranks need a filler"
        row = self._filler()
        return self.collate([row], self._shapes.padded(max(self._least_length, self._length(row))))

    def _run_piece(self, rows: Sequence[Row], piece: MicroBatch | None, sums: _Sums) -> None:
        """One micro-batch; a filler where `piece` is None."""
        if piece is None:
            batch = self._filler_batch()
        else:
            batch = self.collate([rows[i] for i in piece.rows], max(self._least_length, piece.length))
            sums.padded += _padded_tokens(batch, piece)
        counts = piece is not None and self._has_labels(batch)
        if not counts:  # its mean would be 0/0, and 0 times that is no zero
            if self._num_labels is None:
                batch["labels"] = batch["tokens"].clone()
            elif piece is not None:
                batch = self._filler_batch()
        loss, count = self._loss_and_labels(batch)
        token_loss = loss * (count if counts else 0)
        if counts:
            # in the type that a rank without labels has too
            sums.loss = sums.loss + token_loss.detach().to(sums.loss.dtype)
            sums.label_tokens = sums.label_tokens + count
        if not self._scale_gradients:  # each parameter is stepped as soon as its gradient is there
            sums.all_reduce_sum()
            if not sums.label_tokens:
                return  # on no rank is there anything to step by
            token_loss = token_loss * (distributed.world_size() / sums.label_tokens)
        token_loss.backward()  # type: ignore[no-untyped-call]

    def _finish_together(
        self, sums: _Sums, count: int, small: tuple[torch.Tensor, torch.Tensor] | None, *, failed: bool
    ) -> StepResult:
        """Count the label tokens of all ranks, and divide the gradients by them; fails where any rank has failed."""
        if self._scale_gradients:
            sums.failed = int(failed)
            sums.all_reduce_sum()
            if sums.failed:
                raise OutOfMemoryElsewhereError
        has_labels = bool(sums.label_tokens)
        if not has_labels:
            self._drop_gradients()
        elif self._scale_gradients:  # FSDP has taken the mean over the ranks
            self._multiply_gradients_by(distributed.world_size() / sums.label_tokens)
        copies = distributed.world_size() // distributed.data_parallel_size()  # of each row, with tensor parallelism
        noise = None
        if small and has_labels and 0 < small[0] < sums.label_tokens:
            part = small[0] / sums.label_tokens * sums.rows
            noise = NoiseSample(part, small[1], sums.rows, self._measure_together(torch.ones(()))[1])
        grad_norm = self.clip()
        return StepResult(
            loss=float(sums.loss.item() / sums.label_tokens) if has_labels else 0.0,
            label_tokens=sums.label_tokens // copies,
            rows=sums.rows // copies,
            tokens=sums.tokens // copies,
            micro_batches=count if has_labels else 0,
            padding_fraction=max(0.0, 1 - sums.tokens / max(1, sums.padded)),
            grad_norm=grad_norm,
            noise=noise,
        )

    def _measure_together(self, label_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Over all ranks: label tokens, and the squared norm of the gradients that were summed over them, divided by these."""
        mine = torch.zeros(2, dtype=torch.float64, device=self._device)
        mine[0] = label_tokens
        for gradient in self._gradients():
            mine[1] += squared_norm([self.sharding.of_this_rank(gradient)])
        distributed.all_reduce_sum(mine)
        return mine[0], mine[1] * (distributed.world_size() / mine[0]) ** 2

    def _drop_gradients(self) -> None:
        self.sharding.reset()
        for parameter in self._model.parameters():
            parameter.grad = None

    # ----------------------------------------------------------------------------------------------------------------

    def _clip_and_measure(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Clip; returns the norm as :meth:`clip` does, and the squared norm that there was before."""
        gradients = self._gradients()
        if self._max_grad_norm is not None and all(gradient.dtype.itemsize >= 4 for gradient in gradients):
            grad_norm = self.clip()
            assert grad_norm is not None
            return grad_norm, grad_norm**2
        before = squared_norm(gradients)
        return self.clip(), before

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]

    def _loss_and_labels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self._to_device(batch)
        count = self._count_labels(batch)
        return self._mean_loss(batch), count

    def _has_labels(self, batch: Batch) -> bool:
        return bool(self._count_labels(batch))

    def _count_labels(self, batch: Batch) -> torch.Tensor:
        if self._num_labels is not None:
            return self._num_labels(batch)
        count: torch.Tensor = (batch["labels"][..., 1:] != self._ignore_index).sum()
        return count

    def _multiply_gradients_by(self, scale: torch.Tensor) -> None:
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad *= scale.to(parameter.grad.device)  # which is the host's where parameters are offloaded


class _Sums:
    """What the micro-batches of a step add up to: on this rank, and on all after :meth:`all_reduce_sum`."""

    def __init__(self, *, rows: int, tokens: int, device: torch.device) -> None:
        self.rows, self.tokens, self.padded, self.failed = rows, tokens, 0, 0
        self.loss = torch.zeros((), device=device)
        self.label_tokens = torch.zeros((), dtype=torch.int64, device=device)

    def all_reduce_sum(self) -> None:
        """Two small collectives: counts as whole numbers, and the loss as it is."""
        others = self.label_tokens.new_tensor([self.rows, self.tokens, self.padded, self.failed])
        counts = torch.cat([self.label_tokens[None], others])
        distributed.all_reduce_sum(counts, self.loss)
        self.label_tokens = counts[0]
        self.rows, self.tokens, self.padded, self.failed = counts[1:].tolist()


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model normalizes over the rows of a micro-batch, so that its results depend on their number."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _running_statistics(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the buffers are that a forward may change and that outlive it: those that a checkpoint holds."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _length(row: Row) -> int:
    return len(row["tokens"])


def _padded_tokens(batch: Batch, piece: MicroBatch) -> int:
    return int(batch["tokens"].numel()) if "tokens" in batch else piece.padded_tokens
