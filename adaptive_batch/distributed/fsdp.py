"""FSDP2 from inside: when gradients are reduced, and how a rank that failed lets the others
continue.

A rank that runs out of memory within a micro-batch leaves the others waiting in the next
collective. Which collectives a micro-batch has does not depend on its rows, so the rank that failed
runs the rest of them with buffers of zeros. The others compute nonsense to the end of the step, and
learn where all ranks count their label tokens that it is to be retried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    """The FSDP modules of a model; does nothing where it has none.

    Args:
        model: with `fully_shard` applied.
        finishes: a micro-batch that fails on one rank can be brought to its end; False where other
            collectives than FSDP's are part of it, as with tensor parallelism.
        syncs_every_micro_batch: reduce gradients after each micro-batch; False keeps unsharded ones
            until the last.

    Raises:
        TorchVersionError: torch is older than 2.13, and the model has FSDP modules.

    Attributes:
        is_sharded: the model has FSDP modules, and several ranks share it.
        reduces_in_backward: the last micro-batch alone is one that ranks run together.
    """

    reduces_in_backward = False

    def __init__(
        self, model: nn.Module, *, finishes: bool = True, syncs_every_micro_batch: bool = True
    ) -> None:
        # On one rank too: a forward that failed leaves them in its midst there as well.
        self._modules = _fsdp_modules(model)
        if self._modules and not hasattr(self._modules[0], "reset_iter_state"):
            raise TorchVersionError(
                f"torch {torch.__version__} cannot reset FSDP2 after a step that failed:"
                " pip install 'torch>=2.13'"
            )
        self._states = [module._get_fsdp_state() for module in self._modules]
        self._syncs_every = syncs_every_micro_batch
        self._finishes = finishes
        self.is_sharded = bool(self._modules) and distributed.world_size() > 1
        self._known: dict[str, list[Callable[[], object]]] = {}
        self._kind = ""
        self._calls: list[Callable[[], object]] = []
        self._is_running = False
        self._is_inside = False
        for group in _param_groups(self._states) if self.is_sharded else ():
            private(group, "_all_gather_comm", "_reduce_scatter_comm", "fsdp_params")
            group._all_gather_comm = _Recorded(group._all_gather_comm, self)
            group._reduce_scatter_comm = _Recorded(group._reduce_scatter_comm, self)

    # --- micro-batches

    def needs_dummy(self, *, is_last: bool) -> bool:
        """Return whether a rank without a micro-batch runs a dummy, as the others wait for it."""
        return self.is_sharded or (is_last and self.reduces_in_backward)

    def micro_batch(
        self, *, is_last: bool = True, evaluates: bool | str = False, is_trial: bool = False
    ) -> AbstractContextManager[object]:
        """Inside, one micro-batch runs forward and backward, or forward alone; the gradients of the
        last are reduced in any case.

        Args:
            is_last: whether gradients are reduced where not each micro-batch does.
            evaluates: whether there is no backward; a name where another function than the loss
                runs, whose collectives are others.
            is_trial: whether it is no training.
        """
        if not self._modules:
            return nullcontext()
        return self._recorded(is_last=is_last, evaluates=evaluates)

    @contextmanager
    def _recorded(self, *, is_last: bool, evaluates: bool | str) -> Iterator[None]:
        """Note the collectives of the micro-batch that runs inside."""
        if self.is_sharded and not self._syncs_every and not evaluates:
            for module in self._modules:
                module.set_requires_gradient_sync(is_last, recurse=False)
        self._kind = self._kind_of(is_last, evaluates)
        self._calls = []
        self._is_running = True
        self._is_inside = False
        yield
        self._is_running = False
        self._known.setdefault(self._kind, list(self._calls))
        # There is no backward that would reshard.
        if evaluates:
            self.reset()

    def _kind_of(self, is_last: bool, evaluates: bool | str) -> str:
        """Return the kind of a micro-batch, by its collectives."""
        if evaluates:
            return f"evaluation of {evaluates}"
        if is_last or self._syncs_every:
            return "training"
        return "training, gradients kept"

    # --- a step

    def begin_step(self) -> None:
        """Make the ranks alike before a step, where something has to."""

    def reduce_gradients(self) -> None:
        """Reduce the gradients of a step over ranks, where no backward has."""

    # --- after a failure

    @property
    def can_finish(self) -> bool:
        """Whether what has just failed was a micro-batch that can be brought to its end, so that
        the others continue.

        One that failed within a collective cannot, nor the first ever of its kind.
        """
        if distributed.world_size() == 1:
            return True
        is_known = self._is_running and not self._is_inside and self._kind in self._known
        return self.is_sharded and self._finishes and is_known

    @property
    def can_skip(self) -> bool:
        """Whether this rank can run the collectives of micro-batches that it does not run."""
        return (
            self.is_sharded
            and self._finishes
            and self.knows(is_last=False)
            and self.knows(is_last=True)
        )

    def knows(self, *, is_last: bool = True, evaluates: bool | str = False) -> bool:
        """Return whether :meth:`run_dummy_collectives` can run: a micro-batch of that kind has been
        run.
        """
        return not self.is_sharded or self._kind_of(is_last, evaluates) in self._known

    def finish(self) -> None:
        """Run what is left of the collectives of a micro-batch that has failed, if any is;
        :meth:`reset` comes first.
        """
        if self._is_running and self.is_sharded:
            for call in self._known[self._kind][len(self._calls) :]:
                call()
        self._is_running = False

    def run_dummy_collectives(self, *, is_last: bool = True, evaluates: bool | str = False) -> None:
        """Run the collectives of a whole micro-batch, and nothing else."""
        with self.micro_batch(is_last=is_last, evaluates=evaluates):
            self.finish()

    def reset(self) -> None:
        """Bring FSDP's modules back to where they are between two steps, gradients that are kept
        unsharded dropped.
        """
        for root in self._roots():
            parameters = _fsdp_parameters(root._state_ctx.all_states)
            sharded = [parameter.sharded_param for parameter in parameters]
            gradients = [parameter.grad for parameter in sharded]
            # FSDPModule.reset_iter_state() of a root that may lie outside of this model.
            root._reset_iter_state()
            # torch 2.15 drops reduced gradients too.
            for parameter, gradient in zip(sharded, gradients, strict=True):
                parameter.grad = gradient
        for parameter in self._fsdp_parameters():
            # Before torch 2.15, where it is the gradient below.
            if "unsharded_accumulated_grad" in vars(parameter):
                parameter.unsharded_accumulated_grad = None
        for unsharded in self.unsharded_parameters():
            unsharded.grad = None

    def unsharded_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the whole parameters that forward and backward run with."""
        for parameter in self._fsdp_parameters():
            # It is made by the first forward.
            if hasattr(parameter, "unsharded_param"):
                yield parameter.unsharded_param

    def kept_gradients(self) -> Iterator[torch.Tensor]:
        """Yield the unsharded gradients that are there between two micro-batches."""
        for parameter in self._fsdp_parameters():
            if parameter.unsharded_accumulated_grad is not None:
                yield parameter.unsharded_accumulated_grad
            elif (
                hasattr(parameter, "unsharded_param") and parameter.unsharded_param.grad is not None
            ):
                yield parameter.unsharded_param.grad

    def _roots(self) -> list[Any]:
        """Return the states of the outermost modules that have run; one may lie outside of this
        model.
        """
        # FSDP sets itself up when it first runs.
        contexts = [state._state_ctx for state in self._states if state._is_root is not None]
        together = chain.from_iterable(context.all_states for context in contexts)
        return list({id(state): state for state in together if state._is_root}.values())

    def _fsdp_parameters(self) -> Iterator[Any]:
        return _fsdp_parameters(self._states)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor; one that is not divided, as it is."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that is divided over ranks, on each of them; a collective."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor


def reshard(model: nn.Module) -> None:
    """Give a model its shards back where a forward without a backward, as of a validation, has left
    whole parameters.

    Whole ones are no parameters that an optimizer knows, and their memory is freed under whoever
    holds them.
    """
    if not distributed.has_group():
        # fully_shard has divided nothing, and to look through all modules takes a while.
        return
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def shapes_worked_out_apart() -> Iterator[None]:
    """Context manager: inside, DTensor works out shapes under no dispatch mode: it does so with
    whole tensors, which no rank has.
    """
    if distributed.world_size() == 1:
        yield
        return
    kind = private(
        "torch.distributed.tensor._sharding_prop", "ShardingPropagator"
    ).ShardingPropagator
    private(kind, "_propagate_tensor_meta_non_cached")
    work_out = kind._propagate_tensor_meta_non_cached

    def apart(self: Any, *arguments: Any) -> Any:
        with private.disable_current_modes():
            return work_out(self, *arguments)

    kind._propagate_tensor_meta_non_cached = apart
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = work_out


class _Recorded:
    """A collective of FSDP whose calls a sharding notes once they have been made."""

    def __init__(self, comm: Any, sharding: Sharding) -> None:
        self._comm = comm
        self._sharding = sharding

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = self._comm.allocate(*arguments, **options)
        return tensor

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any
    ) -> Any:
        self._sharding._is_inside = True
        result = self._comm(
            output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options
        )
        self._sharding._is_inside = False
        sizes = output_tensor.numel(), input_tensor.numel()
        zeros = partial(torch.zeros, dtype=output_tensor.dtype, device=output_tensor.device)
        self._sharding._calls.append(
            partial(_run_with_zeros, self._comm, sizes, zeros, group=group, **options)
        )
        return result


def _run_with_zeros(
    comm: Callable[..., object],
    sizes: tuple[int, int],
    zeros: Callable[[int], torch.Tensor],
    **options: Any,
) -> None:
    output, input = map(zeros, sizes)
    comm(output_tensor=output, input_tensor=input, **options)


def _fsdp_modules(model: nn.Module) -> list[Any]:
    # Where nobody has imported it there are none.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _param_groups(states: Iterable[Any]) -> Iterator[Any]:
    """Return the groups of parameters that FSDP gathers together."""
    return chain.from_iterable(state._fsdp_param_groups for state in states)


def _fsdp_parameters(states: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(group.fsdp_params for group in _param_groups(states))
