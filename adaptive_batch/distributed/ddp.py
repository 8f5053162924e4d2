"""DDP without collectives inside micro-batches.

Gradients are reduced after all ranks have run their micro-batches, so all ranks can retry the
failure of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adaptive_batch._torch import PrivateNames
from adaptive_batch.errors import SettingError

from . import collectives as distributed
from .fsdp import Sharding

private = PrivateNames("DDP")

# Gradients up to this size are reduced together, with a copy of them.
_SMALL_BYTES = 2**20


class Replicas(Sharding):
    """Replicas of a model under DDP.

    A micro-batch runs no collectives: DDP does not reduce gradients in backward and does not
    broadcast buffers in forward. If a rank fails, only that rank skips its micro-batches.

    Args:
        ddp: module that holds the model.
        overlaps: whether gradients are reduced during the backward of a step's last micro-batch,
            as DDP does. A failure in that micro-batch cannot be retried.

    Raises:
        SettingError: a DDP option changes the gradient reduction, which micro-batches bypass.
    """

    def __init__(self, ddp: DistributedDataParallel, *, overlaps: bool = False) -> None:
        super().__init__(ddp)
        self._ddp = ddp
        self._ignored = getattr(ddp, "parameters_to_ignore", ())
        self.reduces_in_backward = overlaps
        self._is_reducing = False
        self._refuse_options_of_reduction()

    def _refuse_options_of_reduction(self) -> None:
        """Raise if DDP has an option that works only in its own gradient reduction."""
        if self._ddp.mixed_precision is not None:
            remedy = (
                "DDP restores the dtype of parameters when it reduces gradients, which"
                " micro-batches bypass; use torch.autocast instead"
            )
            raise SettingError("mixed_precision", self._ddp.mixed_precision, remedy)
        ddp = private(self._ddp, "_get_ddp_logging_data")
        hook = ddp._get_ddp_logging_data().get("comm_hook")
        if hook and not self.reduces_in_backward:
            remedy = (
                "the communication hook would not run: gradients are reduced without DDP after all"
                " micro-batches; give options=StepOptions(overlap_reduction=True), with which DDP"
                " reduces them in the last micro-batch, and register the hook after"
                " find_max_batch_size"
            )
            raise SettingError("register_comm_hook", hook, remedy)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters that DDP replicates, in the same order on all ranks."""
        return [
            parameter
            for name, parameter in self._ddp.module.named_parameters()
            if parameter.requires_grad and name not in self._ignored
        ]

    @contextmanager
    def micro_batch(
        self, *, is_last: bool = True, evaluates: bool | str = False, is_trial: bool = False
    ) -> Iterator[None]:
        """Run one micro-batch without collectives, unless it reduces gradients."""
        # Otherwise forward might broadcast buffers and wait for a rank that failed.
        self._ddp.require_forward_param_sync = False
        self._is_reducing = self.reduces_in_backward and is_last and not (evaluates or is_trial)
        with nullcontext() if self._is_reducing else self._ddp.no_sync():
            yield
        # Not in a finally block: after a failure, can_finish reads whether gradients were reduced.
        self._is_reducing = False

    @property
    def can_finish(self) -> bool:
        """True unless the failed micro-batch reduced gradients, for which other ranks wait."""
        return not self._is_reducing

    def begin_step(self) -> None:
        """Broadcast the buffers of rank 0, as DDP does before each forward."""
        # A hook may have been registered since the last step.
        self._refuse_options_of_reduction()
        if not self._ddp.broadcast_buffers:
            return
        for name, buffer in self._ddp.module.named_buffers():
            if name not in self._ignored:
                dist.broadcast(buffer, group=self._ddp.process_group, group_src=0)

    def reduce_gradients(self) -> None:
        """Average gradients over ranks in place; a gradient stays None if all ranks have None. A
        sparse gradient becomes dense.
        """
        if self.reduces_in_backward:
            return
        parameters = self.parameters
        has_gradient = [parameter.grad is not None for parameter in parameters]
        has_gradient_on_any_rank = distributed.all_reduce_max(has_gradient)
        small: dict[object, list[torch.Tensor]] = {}
        for parameter in compress(parameters, has_gradient_on_any_rank):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad = parameter.grad.to_dense()
            if gradient.nbytes > _SMALL_BYTES:
                self._reduce([gradient])
            else:
                # Only tensors of one dtype and device can be joined for one collective.
                small.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for gradients in small.values():
            self._reduce(gradients)

    def _reduce(self, gradients: Sequence[torch.Tensor]) -> None:
        # A large gradient is reduced without a copy, since memory estimates do not count one.
        if len(gradients) == 1 and gradients[0].is_contiguous():
            self._reduce_in_place(gradients[0])
            return
        joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._reduce_in_place(joined)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, reduced in zip(gradients, torch.split(joined, sizes), strict=True):
            gradient.copy_(reduced.view_as(gradient))

    def _reduce_in_place(self, tensor: torch.Tensor) -> None:
        group = self._ddp.process_group
        # Divide before the sum, as DDP does: the sum could overflow in float16.
        tensor /= dist.get_world_size(group)
        dist.all_reduce(tensor, group=group)


def sharding_of(model: nn.Module, *, overlaps: bool = False, **options: Any) -> Sharding:
    """Return the sharding of a model over several ranks.

    Args:
        model: model with `fully_shard`, in a DDP module, or neither.
        overlaps: see :class:`Replicas`.
        options: see :class:`Sharding`.
    """
    if distributed.world_size() > 1:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                return Replicas(module, overlaps=overlaps)
    return Sharding(model, **options)
