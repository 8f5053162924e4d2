"""Gradients of earlier batches, saved while a batch runs, so that a failed attempt leaves them as
they were.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from adaptive_batch._util import replaced
from adaptive_batch.distributed import whole_tensor
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import is_out_of_memory

from .model_checks import check_hooks


class SavedGradients:
    """Sets aside the gradients of earlier batches, which a script accumulates, and adds those of a
    new batch to them.

    Nothing is copied: the gradients of the new batch are new tensors. Backward creates them as it
    frees activations, so that the peak of a batch in one part hardly rises. From its second part
    on, both gradients are in memory.

    Args:
        earlier: current gradients by parameter.
        drop: function that clears the model's gradients.
    """

    def __init__(
        self, earlier: Mapping[nn.Parameter, torch.Tensor], drop: Callable[[], object]
    ) -> None:
        self._earlier = earlier
        self._drop = drop
        self._external: list[tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = []
        for parameter in earlier:
            parameter.grad = None

    def set_aside(self, leaf: torch.Tensor) -> None:
        """Set aside the gradient of an external leaf, which the model does not have."""
        self._external.append((weakref.ref(leaf), leaf.grad))
        leaf.grad = None

    def external(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the external leaves with their gradients before the batch."""
        for reference, earlier in self._external:
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
            new = leaf.grad
            if earlier is None:
                continue
            if new is None:
                leaf.grad = earlier
            elif new.is_sparse or earlier.is_sparse:
                leaf.grad = earlier + new
            else:
                leaf.grad = earlier.add_(new)


class ExternalLeaves:
    """Finds the leaves that backward reaches and a model does not have.

    Searching a graph takes time. A step of one micro-batch skips it if the graph has the size of an
    earlier one.

    Args:
        own_leaves: function that returns the leaves that the model has.
        in_trials: whether trials run, so that every graph is searched.
    """

    def __init__(
        self, own_leaves: Callable[[], Iterable[torch.Tensor | None]], *, in_trials: bool = False
    ) -> None:
        self._own_leaves = own_leaves
        self._in_trials = in_trials
        self._is_split = False
        # By id; if a reference is dead, another leaf may have its id.
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}
        self._sizes: set[int] = set()
        # Each thread numbers its own nodes, and reentrant checkpoints on a GPU run in another one.
        self._latest_nodes: dict[int, int] = {}

    def begin_step(self, *, is_split: bool) -> None:
        """Begin a step.

        Args:
            is_split: whether the step has several micro-batches.

        Raises:
            SettingError: the step has several micro-batches, and a leaf has a hook that may step an
                optimizer.
        """
        self._is_split = is_split
        if self._is_split:
            check_hooks(self._own_leaves())
            check_hooks(reference() for reference in self._known.values())

    @contextmanager
    def watch_backward(self, on_leaf: Callable[[torch.Tensor], object]) -> Iterator[None]:
        """Call a function with each external leaf once, before a backward accumulates in it.

        Raises:
            SettingError: memory ran out in a backward whose graph was not searched and has unknown
                leaves; or a leaf has a hook, see :meth:`begin_step`.
        """
        for key, reference in list(self._known.items()):
            leaf = reference()
            if leaf is None:
                del self._known[key]
            else:
                on_leaf(leaf)
        # Replace the private function: `from torch.autograd import backward` keeps the old public
        # one.
        name = "_engine_run_backward"
        if not hasattr(torch.autograd, name):
            name = "backward"
        run_backward = getattr(torch.autograd, name)

        def run(roots: Any, *arguments: Any, **options: Any) -> Any:
            # torch.autograd.grad accumulates nothing.
            if not options.get("accumulate_grad", True):
                return run_backward(roots, *arguments, **options)
            nodes = [
                root.node if isinstance(root, GradientEdge) else get_gradient_edge(root).node
                for root in ([roots] if isinstance(roots, torch.Tensor) else roots)
                if isinstance(root, GradientEdge) or root.requires_grad
            ]
            is_searched = self._has_new_size(nodes) or self._is_split or self._in_trials
            new_leaves = self._new_leaves(nodes) if is_searched else []
            if self._is_split:
                check_hooks(new_leaves)
            for leaf in new_leaves:
                on_leaf(leaf)
            try:
                return run_backward(roots, *arguments, **options)
            except Exception as error:
                if is_searched or not is_out_of_memory(error):
                    raise
                if any(leaf.grad is not None for leaf in self._new_leaves(nodes)):
                    remedy = (
                        "memory ran out in a backward that reached a leaf which the module does not"
                        " have and no earlier batch has used, so its gradient cannot be restored;"
                        " pass one module that has all trained parameters"
                    )
                    # With the OOM as its cause, this error would be retried.
                    raise SettingError("model", "without a trained leaf", remedy) from None
                raise

        with replaced(torch.autograd, **{name: run}):
            yield

    def _has_new_size(self, nodes: Iterable[Any]) -> bool:
        """Return whether no earlier graph had the number of nodes of this one."""
        numbers = [node._sequence_nr() for node in nodes if hasattr(node, "_sequence_nr")]
        if not numbers:
            return True
        latest_node = max(numbers)
        thread = threading.get_ident()
        # Numbers are consecutive, so the difference counts the nodes since the last backward.
        size = latest_node - self._latest_nodes.get(thread, 0)
        self._latest_nodes[thread] = latest_node
        is_new = size not in self._sizes
        self._sizes.add(size)
        return is_new

    def _new_leaves(self, nodes: Collection[Any]) -> list[torch.Tensor]:
        """Return the external leaves of a graph that are not known yet, and remember them."""
        own = set(map(id, self._own_leaves()))
        new = []
        visited = set(nodes)
        unvisited = list(nodes)
        while unvisited:
            node = unvisited.pop()
            following = node.next_functions
            if not following and node.name() == "torch::autograd::AccumulateGrad":
                leaf = node.variable
                known = self._known.get(id(leaf))
                if id(leaf) not in own and (known is None or known() is not leaf):
                    self._known[id(leaf)] = weakref.ref(leaf)
                    new.append(leaf)
            for next_node, _ in following:
                if next_node is not None and next_node not in visited:
                    visited.add(next_node)
                    unvisited.append(next_node)
        return new


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
    norms = []
    for parameters in by_mesh.values():
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms.append(whole_tensor(torch.nn.utils.get_total_norm(gradients)))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for parameters in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return norm
