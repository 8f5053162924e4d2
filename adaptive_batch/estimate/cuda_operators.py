"""What CUDA's operators allocate besides their results, in their order: buffers of reductions and
sorts, copies to another dtype.

An operator here takes fake tensors of a CPU and makes what CUDA makes. It is read from the source
of PyTorch (each names the file, below aten/src/ATen) and equal to what PyTorch's CUDA build
allocates on a CUDA runtime without a device; nothing was measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from adaptive_batch._torch import current_graph_task_id
from adaptive_batch._util import round_up

from .cuda_workspace import free_last_first

aten = torch.ops.aten

_MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_THREADS = {
    (7, 5): 1024,
    (8, 6): 1536,
    (8, 7): 1536,
    (8, 9): 1536,
    (12, 0): 1536,
}  # of a multiprocessor
_MOST_VALUES, _FEWEST_VALUES = 256, 16  # that a thread of a reduction adds up


class CudaOperators:
    """The operators of a device.

    Attributes:
        instead: what runs in the place of an operator; other operators allocate their results
            alone.
        workspaces: of cuBLAS, which are kept, for forward and backward.
    """

    def __init__(self, compute_capability: tuple[int, int], multiprocessors: int) -> None:
        self._slots = multiprocessors * _THREADS.get(compute_capability, 2048)
        self._workspace_bytes = workspace_bytes(compute_capability)
        self.workspaces: dict[bool, torch.Tensor] = {}
        self.instead: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys(
                (aten.sum.default, aten.sum.dim_IntList), partial(self._reduced, aten.sum)
            ),
            aten.linalg_vector_norm.default: self._norm,
            **dict.fromkeys((aten.mean.default, aten.mean.dim), partial(self._reduced, aten.mean)),
            aten._softmax_backward_data.default: _softmax_backward,
            aten._foreach_norm.Scalar: _norms,
            aten.embedding_dense_backward.default: _embedding_backward,
            **{operator: partial(self._multiplied, operator) for operator in _MATMULS},
        }

    def _multiplied(self, operator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A thread's first product takes a workspace, which is kept: forward's and backward's."""
        result: torch.Tensor = operator(*args, **kwargs)
        backward = current_graph_task_id() != -1
        if backward not in self.workspaces:
            self.workspaces[backward] = torch.empty(self._workspace_bytes, dtype=torch.uint8)
        if len(self.workspaces) == 2:
            for one in _MATMULS:
                self.instead.pop(one, None)
        return result

    def _norm(
        self, tensor: torch.Tensor, order: Any = 2, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        def norm(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return aten.linalg_vector_norm.default(tensor, order, *args, **kwargs)

        return self._reduced(norm, tensor, *args, **kwargs)

    def _reduced(
        self, operator: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """native/ReduceOps.cpp, native/cuda/Reduce.cuh: other dtypes are copied first, but halves
        that give float32.
        """
        result: torch.Tensor = operator(tensor, *args, **kwargs)
        as_it_is = tensor.dtype == result.dtype or tensor.dtype.itemsize == 2
        given = tensor if as_it_is else tensor.to(result.dtype)
        dims = args[0] if args and args[0] else range(tensor.ndim)
        held = [torch.empty(size, dtype=torch.uint8) for size in self.reduction_bytes(given, dims)]
        free_last_first(held)
        return result

    def reduction_bytes(self, tensor: torch.Tensor, dims: Sequence[int]) -> tuple[int, ...]:
        """native/cuda/Reduce.cuh: ``setReduceConfig``; bytes of the buffer and the semaphores of
        blocks that share an output.
        """
        reduced = {dim % tensor.ndim for dim in dims} if tensor.ndim else set()
        shape = _coalesced(tensor, sorted(reduced, key=tensor.stride))
        kept = _coalesced(tensor, sorted(set(range(tensor.ndim)) - reduced, reverse=True))
        outputs = math.prod(n for n, _ in kept)
        inputs = math.prod(n for n, _ in shape)
        if not shape or not outputs:
            return ()
        along = not kept or shape[0][1] < kept[0][1]
        width, height, vector = (inputs, outputs, 1) if along else (outputs, inputs, 1)
        if (shape if along else kept)[0][1] == 1:
            if along and inputs > 128 and len(shape) + len(kept) == 1:
                width //= 4
            elif not along:
                others = [stride for _, stride in shape + kept[1:]]
                vector = math.gcd(4, kept[0][0], *others)
                width //= vector
        most = 512 // vector
        width, height = (most if n >= most else 1 << (n.bit_length() - 1) for n in (width, height))
        block_height = min(height, most // min(width, 32))
        block_width = min(width, most // block_height)
        inputs_at_once, outputs_at_once = (block_width, 1) if along else (1, block_width)
        values = -(-inputs // inputs_at_once)
        if values < block_height * 16 and values < _MOST_VALUES:
            return ()
        values = -(-inputs // (inputs_at_once * block_height))
        grid = -(-(outputs // vector) // outputs_at_once)
        target = self._slots // (block_width * block_height)
        if values < _MOST_VALUES or grid > target:
            return ()
        blocks = max(
            min(-(-target // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES)
        )
        if blocks <= 1:
            return ()
        return (
            max(4, tensor.dtype.itemsize)
            * outputs
            * blocks
            * (1 if along else block_width * vector),
            4 * grid,
        )


def workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """cuda/CublasHandlePool.cpp: ``parseChosenWorkspaceSize``, where CUBLAS_WORKSPACE_CONFIG does
    not say otherwise.
    """
    return (32 * 1024 if compute_capability >= (9, 0) else 2 * 4096 + 8 * 16) * 1024


def _softmax_backward(gradient: torch.Tensor, output: torch.Tensor, *args: Any) -> torch.Tensor:
    """native/cuda/SoftMax.cu: the product of gradient and output."""
    result: torch.Tensor = aten._softmax_backward_data.default(gradient, output, *args)
    torch.empty_like(gradient)
    return result


def _norms(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """native/cuda/ForeachReduceOp.cu: a partial sum for each 65536 elements of the largest tensor,
    for all of them.
    """
    parts = torch.empty(
        len(tensors) * max(-(-tensor.numel() // 65536) for tensor in tensors), dtype=torch.float32
    )
    result = aten._foreach_norm.Scalar(tensors, *args, **kwargs)
    del parts
    return result


def _embedding_backward(
    gradient: torch.Tensor, tokens: torch.Tensor, words: int, padding: int, scales: bool
) -> torch.Tensor:
    """native/cuda/Embedding.cu, native/cuda/EmbeddingBackwardKernel.cu: many tokens are sorted, and
    added up in parts of 10.
    """
    count = tokens.numel()
    (dim,) = gradient.shape[-1:]
    if count <= 3072 and not scales:
        return gradient.new_empty(words, dim)

    def whole(*sizes: int) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.int64) for size in sizes]

    def scratch(size: int) -> None:
        torch.empty(size, dtype=torch.uint8)

    held = whole(count, count)
    positions = whole(count)
    passes = -(-max(1, (words - 1).bit_length()) // 8)
    scratch(
        2 * round_up(8 * count, 256) + 2048 * passes + 1024 * -(-count // 4608) + 511
    )  # of cub's sort
    del positions[0]
    result = gradient.new_empty(words, dim)
    segments = min(count, words)
    held += whole(count, 1)
    keys = whole(count)
    scratch(round_up(16 * -(-count // 7168) + 832, 256) + 255)  # of its search for distinct ones
    del keys[0]
    held += whole(segments, segments)
    scratch(round_up(16 * -(-segments // 1024) + 816, 256) + 255)  # of its prefix sum
    parts = count // 10 + segments
    held += whole(1, parts)
    dtype = torch.float32 if gradient.dtype.itemsize == 2 else gradient.dtype
    held.append(torch.empty(parts, dim, dtype=dtype))
    free_last_first(held)
    return result


def _coalesced(tensor: torch.Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """Return sizes and strides of some dimensions, those that lie next to each other as one."""
    found: list[tuple[int, int]] = []
    for dim in dims:
        size = tensor.shape[dim]
        stride = tensor.stride(dim)
        if size == 1:
            continue
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, stride))
    return found
