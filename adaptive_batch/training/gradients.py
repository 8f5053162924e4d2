"""Gradients of earlier batches, saved while a batch runs, so that a failed attempt leaves them as
they were.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adaptive_batch._util import belongs_to, one_thread
from adaptive_batch.distributed import whole_tensor

from .model_checks import check_hooks


class SavedGradients:
    """Sets aside the gradients of earlier batches, which a script accumulates, and adds those of a
    new batch to them.

    Nothing is copied: the gradients of the new batch are new tensors. Backward creates them as it
    frees activations, so that the peak of a batch in one part hardly rises. From its second part
    on, both gradients are in memory.

    Args:
        parameters: parameters of the model, whose current gradients are set aside.
        drop: function that clears the model's gradients.
        own_leaves: function that returns the leaves that the model has.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        drop: Callable[[], object],
        own_leaves: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                self._earlier[parameter] = parameter.grad
                parameter.grad = None
        self._drop = drop
        self._own_leaves = own_leaves
        # Ids of the leaves that the model has: reading them in each backward takes time.
        self._own_ids: set[int] = set()
        # Leaves outside of the model with their earlier gradients, by id; if a reference is dead,
        # another leaf may have its id.
        self._external: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}

    @contextmanager
    def watch_backward(self, *, is_split: bool = False) -> Iterator[None]:
        """Context manager: before a backward adds to the gradient of a leaf that the model does not
        have, set this gradient aside.

        Args:
            is_split: whether the batch runs in several parts, so that no hook may step an
                optimizer.

        Raises:
            SettingError: the batch is split, and a leaf has a hook that may step an optimizer.
        """
        # Replace the private function that all backwards call: code that did
        # `from torch.autograd import backward` would still call the old public one.
        name = "_engine_run_backward"
        if not hasattr(torch.autograd, name):
            name = "backward"
        thread = threading.current_thread()

        def set_aside_and_run(roots: Any, *arguments: Any, **options: Any) -> Any:
            # torch.autograd.grad accumulates nothing, and other threads train other models.
            if options.get("accumulate_grad", True) and belongs_to(thread):
                self._set_aside_external(roots, is_split)
            return run_backward(roots, *arguments, **options)

        with one_thread:
            run_backward = getattr(torch.autograd, name)
            setattr(torch.autograd, name, set_aside_and_run)
            try:
                yield
            finally:
                setattr(torch.autograd, name, run_backward)

    def _set_aside_external(self, roots: Any, is_split: bool) -> None:
        leaves = [leaf for leaf in _leaves_of(roots) if id(leaf) not in self._own_ids]
        if leaves:
            # A forward may have created leaves: FSDP's first one does.
            self._own_ids = set(map(id, self._own_leaves()))
        for leaf in leaves:
            if id(leaf) in self._own_ids:
                continue
            if is_split:
                check_hooks([leaf])
            reference, _ = self._external.get(id(leaf), (None, None))
            is_set_aside = reference is not None and reference() is leaf
            if not is_set_aside:
                self._external[id(leaf)] = (weakref.ref(leaf), leaf.grad)
                leaf.grad = None

    def external(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the leaves outside of the model with their gradients before the batch."""
        for reference, earlier in self._external.values():
            leaf = reference()
            if leaf is not None:
                yield leaf, earlier

    def fill_new(self) -> None:
        """Set the gradients of the batch to zeros."""
        for parameter, earlier in self._earlier.items():
            parameter.grad = torch.zeros_like(earlier)

    def drop_new(self) -> None:
        """Drop the gradients of a failed attempt."""
        self._drop()
        for leaf, _ in self.external():
            leaf.grad = None

    def put_back(self) -> None:
        """Restore the earlier gradients, without those of the batch."""
        self._drop()
        for leaf, earlier in (*self._earlier.items(), *self.external()):
            leaf.grad = earlier

    def add_up(self) -> None:
        """Add the batch's gradients to the earlier ones, in place, as autograd does."""
        for leaf, earlier in (*self._earlier.items(), *self.external()):
            if earlier is None:
                continue
            new = leaf.grad
            if new is None:
                leaf.grad = earlier
            elif new.is_sparse or earlier.is_sparse:
                # torch cannot add in place if only one of them is sparse.
                leaf.grad = earlier + new
            else:
                leaf.grad = earlier.add_(new)
        self._earlier = {}
        self._external = {}


def _leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """Yield the leaves in whose gradients a backward from these roots accumulates."""
    if isinstance(roots, torch.Tensor):
        roots = [roots]
    unvisited: list[Any] = []
    for root in roots:
        if isinstance(root, GradientEdge):
            unvisited.append(root.node)
        elif root.requires_grad:
            unvisited.append(get_gradient_edge(root).node)
    visited = set(unvisited)
    while unvisited:
        node = unvisited.pop()
        following = node.next_functions
        # Ask only nodes at the end of the graph for their name, which takes time.
        if not following and node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        for next_node, _ in following:
            if next_node is not None and next_node not in visited:
                visited.add(next_node)
                unvisited.append(next_node)


def clip_gradients(model: nn.Module, max_grad_norm: float | None) -> torch.Tensor | None:
    """Clip the norm of all gradients to a maximum; return the norm before clipping.

    Args:
        model: model whose gradients are clipped.
        max_grad_norm: maximum; infinity only measures the norm, None skips both.
    """
    if max_grad_norm is None:
        return None
    # With tensor parallelism some parameters lie on other meshes, or on none.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(by_mesh) <= 1:
        return whole_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
    # torch cannot combine tensors of several meshes, so combine the norms of each mesh.
    norms = []
    for parameters in by_mesh.values():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms.append(whole_tensor(torch.nn.utils.get_total_norm(gradients)))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return norm
