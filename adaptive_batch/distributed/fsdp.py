"""FSDP2 control of gradient reduction, and recovery of a rank that failed within a micro-batch.

A rank that runs out of memory leaves the other ranks waiting in their next collective. The sequence
of collectives does not depend on the rows of a micro-batch, so the failed rank runs the remaining
collectives with zero-filled buffers. The other ranks compute invalid values until the end of the
step. When all ranks count their label tokens, they learn that the step must be repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from adaptive_batch._torch import PrivateNames
from adaptive_batch.errors import TorchVersionError

from . import collectives as distributed

private = PrivateNames("FSDP2")


class Sharding:
    """FSDP modules of a model; does nothing if the model has none.

    Args:
        model: model with `fully_shard`.
        finishes: whether a micro-batch that fails on one rank can be completed; False if it has
            collectives other than FSDP's, as with tensor parallelism.
        syncs_every_micro_batch: reduce gradients after each micro-batch; False keeps unsharded
            gradients until the last one.

    Raises:
        TorchVersionError: the model has FSDP modules and torch is older than 2.13.

    Attributes:
        is_sharded: whether the model has FSDP modules on several ranks.
        reduces_in_backward: whether ranks wait for each other in the last micro-batch only.
    """

    reduces_in_backward = False

    def __init__(
        self, model: nn.Module, *, finishes: bool = True, syncs_every_micro_batch: bool = True
    ) -> None:
        self._modules = _fsdp_modules(model)
        # A failed forward leaves modules in an intermediate state, on a single rank too.
        if self._modules and not hasattr(self._modules[0], "reset_iter_state"):
            raise TorchVersionError(
                f"torch {torch.__version__} cannot reset FSDP2 after a step that failed:"
                " pip install 'torch>=2.13'"
            )
        self._states = [module._get_fsdp_state() for module in self._modules]
        self._syncs_every = syncs_every_micro_batch
        self._finishes = finishes
        self.is_sharded = bool(self._modules) and distributed.world_size() > 1
        # Collectives of a whole micro-batch, by its kind. Each function repeats one with zeros, for
        # a rank whose micro-batch has failed while other ranks wait in it.
        self._recorded: dict[str, list[Callable[[], object]]] = {}
        # Kind of the micro-batch that runs or has failed, and its collectives so far.
        self._kind = ""
        self._completed: list[Callable[[], object]] = []
        self._is_in_collective = False
        if self.is_sharded:
            for group in _param_groups(self._states):
                private(group, "_all_gather_comm", "_reduce_scatter_comm", "fsdp_params")
                group._all_gather_comm = _RecordedCollective(group._all_gather_comm, self)
                group._reduce_scatter_comm = _RecordedCollective(group._reduce_scatter_comm, self)

    # --- micro-batches

    def needs_dummy(self, *, is_last: bool) -> bool:
        """Return whether a rank without a micro-batch must run a dummy because other ranks wait for
        it.
        """
        return self.is_sharded or (is_last and self.reduces_in_backward)

    @contextmanager
    def micro_batch(
        self, *, is_last: bool = True, evaluates: bool | str = False, is_trial: bool = False
    ) -> Iterator[None]:
        """Record the collectives of one micro-batch: forward and backward, or forward only.

        Args:
            is_last: whether this is the last micro-batch of the step, which always reduces
                gradients.
            evaluates: whether there is no backward; a name for a function other than the loss,
                whose collectives differ.
            is_trial: whether this is a trial.
        """
        if self.is_sharded and not self._syncs_every and not evaluates:
            for module in self._modules:
                module.set_requires_gradient_sync(is_last, recurse=False)
        self._kind = kind = self._kind_of(is_last, evaluates)
        self._completed = []
        self._is_in_collective = False
        yield
        # Not in a finally block: after a failure, finish() needs the kind and its collectives so
        # far, and the record of a kind must be complete.
        self._kind = ""
        self._recorded.setdefault(kind, list(self._completed))
        # Without a backward, parameters stay unsharded.
        if evaluates:
            self.reset()

    def _kind_of(self, is_last: bool, evaluates: bool | str) -> str:
        """Return a key of the micro-batch's sequence of collectives."""
        if evaluates:
            return f"evaluation of {evaluates}"
        if is_last or self._syncs_every:
            return "training"
        return "training, gradients kept"

    # --- after a failure

    @property
    def can_finish(self) -> bool:
        """True if the failed micro-batch can be completed, so that the other ranks can continue.

        False for a failure within a collective or in the first micro-batch of its kind.
        """
        if distributed.world_size() == 1:
            return True
        is_recorded = self._kind in self._recorded
        return self.is_sharded and self._finishes and is_recorded and not self._is_in_collective

    @property
    def can_skip(self) -> bool:
        """True if this rank can run the collectives of a micro-batch without running the
        micro-batch.
        """
        has_recorded = self.has_recorded(is_last=False) and self.has_recorded(is_last=True)
        return self._finishes and has_recorded

    def has_recorded(self, *, is_last: bool = True, evaluates: bool | str = False) -> bool:
        """Return whether a micro-batch of this kind has run, as :meth:`run_dummy_collectives`
        requires.
        """
        return not self.is_sharded or self._kind_of(is_last, evaluates) in self._recorded

    def finish(self) -> None:
        """Run the collectives that a failed micro-batch did not reach, since other ranks wait in
        them. Call :meth:`reset` first: it restores FSDP's modules, and keeps the record.
        """
        if self._kind and self.is_sharded:
            num_completed = len(self._completed)
            for run_with_zeros in self._recorded[self._kind][num_completed:]:
                run_with_zeros()
        self._kind = ""

    def run_dummy_collectives(self, *, is_last: bool = True, evaluates: bool | str = False) -> None:
        """Run only the collectives of a micro-batch."""
        with self.micro_batch(is_last=is_last, evaluates=evaluates):
            self.finish()

    def reset(self) -> None:
        """Reset FSDP's modules to their state between two steps, and drop unsharded gradients."""
        if not self._modules:
            return
        for root in self._roots():
            groups = _param_groups(root._state_ctx.all_states)
            sharded = [
                parameter.sharded_param for group in groups for parameter in group.fsdp_params
            ]
            reduced_gradients = [parameter.grad for parameter in sharded]
            # The public reset_iter_state() needs the root module, which may be outside this model.
            root._reset_iter_state()
            # torch 2.15 has dropped the reduced gradients too, so restore them.
            for parameter, gradient in zip(sharded, reduced_gradients, strict=True):
                parameter.grad = gradient
        for parameter in self._fsdp_parameters():
            # torch before 2.15 keeps an unsharded gradient in the first attribute, later releases
            # in the second.
            if "unsharded_accumulated_grad" in vars(parameter):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "unsharded_param"):
                parameter.unsharded_param.grad = None

    def unsharded_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the unsharded parameters of forward and backward."""
        for parameter in self._fsdp_parameters():
            # The first forward creates it.
            if hasattr(parameter, "unsharded_param"):
                yield parameter.unsharded_param

    def kept_gradients(self) -> Iterator[torch.Tensor]:
        """Yield the unsharded gradients that exist between two micro-batches."""
        for parameter in self._fsdp_parameters():
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad
            elif (
                hasattr(parameter, "unsharded_param") and parameter.unsharded_param.grad is not None
            ):
                yield parameter.unsharded_param.grad

    def _roots(self) -> list[Any]:
        """Return the states of the outermost modules that have run, inside or outside this
        model.
        """
        roots: dict[int, Any] = {}
        for state in self._states:
            # FSDP initializes a state in its first forward; before that, _is_root is None.
            if state._is_root is not None:
                for other in state._state_ctx.all_states:
                    if other._is_root:
                        roots[id(other)] = other
        return list(roots.values())

    def _fsdp_parameters(self) -> Iterator[Any]:
        for state in self._states:
            for group in state._fsdp_param_groups:
                yield from group.fsdp_params


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; a plain tensor unchanged."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor on all ranks, or a plain tensor unchanged; a
    collective.
    """
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor


def reshard(model: nn.Module) -> None:
    """Reshard the parameters of a model after a forward without backward, such as a validation.

    The optimizer does not know unsharded parameters, and FSDP frees their memory while references
    exist.
    """
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def hide_shape_propagation() -> Iterator[None]:
    """Context manager that hides DTensor's propagation of shapes from dispatch modes, such as those
    that count memory.

    DTensor propagates shapes with full-size tensors, which exist on no rank.
    """
    if distributed.world_size() == 1:
        yield
        return
    propagator = private(
        "torch.distributed.tensor._sharding_prop", "ShardingPropagator"
    ).ShardingPropagator
    private(propagator, "_propagate_tensor_meta_non_cached")
    propagate = propagator._propagate_tensor_meta_non_cached

    def propagate_without_modes(self: Any, *arguments: Any) -> Any:
        with private.disable_current_modes():
            return propagate(self, *arguments)

    propagator._propagate_tensor_meta_non_cached = propagate_without_modes
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = propagate


class _RecordedCollective:
    """FSDP collective that records its completed calls in a :class:`Sharding`."""

    def __init__(self, comm: Any, sharding: Sharding) -> None:
        self._comm = comm
        self._sharding = sharding

    def allocate(self, *arguments: Any, **options: Any) -> Any:
        return self._comm.allocate(*arguments, **options)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any
    ) -> Any:
        # Not reset after an error: other ranks wait in this collective, which cannot be repeated.
        self._sharding._is_in_collective = True
        result = self._comm(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options
        )
        self._sharding._is_in_collective = False
        # The recorded function keeps sizes only: it must not keep the tensors alive.
        zeros = partial(torch.zeros, dtype=output_tensor.dtype, device=output_tensor.device)
        output_size, input_size = output_tensor.numel(), input_tensor.numel()

        def run_with_zeros() -> None:
            self._comm(
                output_tensor=zeros(output_size),
                input_tensor=zeros(input_size),
                group=group,
                **options,
            )

        self._sharding._completed.append(run_with_zeros)
        return result


def _fsdp_modules(model: nn.Module) -> list[Any]:
    # If FSDP was not imported, no module uses it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _param_groups(states: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameter groups that FSDP gathers together."""
    return chain.from_iterable(state._fsdp_param_groups for state in states)
