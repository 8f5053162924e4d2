"""What CUDA's operators allocate besides their results, in their order.

This is buffers of reductions and sorts, and copies to another dtype. An operator here takes fake
tensors of a CPU and makes what CUDA makes. It is read from the source of PyTorch
(each names the file, below aten/src/ATen) and equal to what PyTorch's CUDA build allocates on a
CUDA runtime without a device; docs/cuda.md has what was measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import round_up

from .cuda_workspace import free_last_first, varlen_gradients

private = PrivateNames("memory estimates")

aten = torch.ops.aten

_MATMULS = (
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
    *(aten.mm.out, aten.addmm.out, aten.bmm.out, aten.baddbmm.out),
)
# Workspaces beside cuBLAS's own: of cuBLASLt, which adds biases, before torch 2.12.
_MORE_WORKSPACES = (2**20,) if torch.__version__ < "2.12" else ()
# Threads of a multiprocessor, where they are not 2048.
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
# Values that a thread of a reduction adds up.
_MAX_VALUES = 256
_MIN_VALUES = 16


class CudaOperators:
    """The operators of a device.

    Attributes:
        instead: what runs in the place of an operator; other operators allocate their results
            alone.
        workspaces: of cuBLAS and cuBLASLt, which are kept: each for forward and backward.
    """

    def __init__(self, compute_capability: tuple[int, int], multiprocessors: int) -> None:
        self._slots = multiprocessors * _THREADS.get(compute_capability, 2048)
        self._workspace_sizes = (workspace_bytes(compute_capability), *_MORE_WORKSPACES)
        self.workspaces: dict[tuple[bool, int], torch.Tensor] = {}
        self.instead: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys(
                (aten.sum.default, aten.sum.dim_IntList), partial(self._reduced, aten.sum)
            ),
            aten.linalg_vector_norm.default: self._norm,
            **dict.fromkeys((aten.mean.default, aten.mean.dim), partial(self._reduced, aten.mean)),
            aten._softmax_backward_data.default: _softmax_backward,
            aten.isinf.default: _is_infinite,
            aten._foreach_norm.Scalar: _norms,
            aten.embedding_dense_backward.default: _embedding_backward,
            torch.ops.adaptive_batch.packed_attention_backward.default: _packed_attention_backward,
            **{operator: partial(self._multiplied, operator) for operator in _MATMULS},
        }

    def _multiplied(self, operator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Multiply; a thread's first product takes a workspace, which is kept."""
        result: torch.Tensor = operator(*args, **kwargs)
        # Forward and backward run in threads of their own.
        is_backward = private.current_graph_task_id() != -1
        num_needed = 2 if _adds_bias(operator, *args, **kwargs) else 1
        for number, size in enumerate(self._workspace_sizes[:num_needed]):
            if (is_backward, number) not in self.workspaces:
                workspace = torch.empty(size, dtype=torch.uint8)
                self.workspaces[is_backward, number] = workspace
        if len(self.workspaces) == 2 * len(self._workspace_sizes):
            for matmul in _MATMULS:
                self.instead.pop(matmul, None)
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
        """native/ReduceOps.cpp, native/cuda/Reduce.cuh: copy what has another dtype, and reduce."""
        result: torch.Tensor = operator(tensor, *args, **kwargs)
        summand = tensor
        # Halves are read as they are, also where they give float32.
        if tensor.dtype != result.dtype and tensor.dtype.itemsize != 2:
            summand = tensor.to(result.dtype)
        dims: Sequence[int] = range(tensor.ndim)
        if args and args[0]:
            dims = args[0]
        sizes = self.reduction_bytes(summand, dims)
        free_last_first([torch.empty(size, dtype=torch.uint8) for size in sizes])
        return result

    def reduction_bytes(self, tensor: torch.Tensor, dims: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes of the buffer and of the semaphores of blocks that share an output.

        native/cuda/Reduce.cuh: ``setReduceConfig``. Empty where no blocks share one.
        """
        reduced_dims = {dim % tensor.ndim for dim in dims if tensor.ndim}
        kept_dims = set(range(tensor.ndim)) - reduced_dims
        # Pairs of size and stride.
        reduced = _coalesced(tensor, sorted(reduced_dims, key=tensor.stride))
        kept = _coalesced(tensor, sorted(kept_dims, reverse=True))
        outputs = math.prod(size for size, _ in kept)
        inputs = math.prod(size for size, _ in reduced)
        if not reduced or not outputs:
            return ()

        # Neighbouring threads read along the dimension with the smaller stride.
        is_along = not kept or reduced[0][1] < kept[0][1]
        vector = 1
        if is_along:
            width = inputs
            height = outputs
            if reduced[0][1] == 1 and inputs > 128 and len(reduced) + len(kept) == 1:
                width //= 4
        else:
            width = outputs
            height = inputs
            if kept[0][1] == 1:
                strides = [stride for _, stride in reduced + kept[1:]]
                vector = math.gcd(4, kept[0][0], *strides)
                width //= vector
        max_threads = 512 // vector
        width = _power_of_two_below(width, at_most=max_threads)
        height = _power_of_two_below(height, at_most=max_threads)
        block_height = min(height, max_threads // min(width, 32))
        block_width = min(width, max_threads // block_height)
        inputs_at_once = block_width if is_along else 1
        outputs_at_once = 1 if is_along else block_width

        values = _ceil_div(inputs, inputs_at_once)
        if values < block_height * 16 and values < _MAX_VALUES:
            return ()
        values = _ceil_div(inputs, inputs_at_once * block_height)
        grid = _ceil_div(outputs // vector, outputs_at_once)
        target = self._slots // (block_width * block_height)
        if values < _MAX_VALUES or grid > target:
            return ()
        blocks = min(_ceil_div(target, grid), _ceil_div(values, _MIN_VALUES))
        blocks = max(blocks, _ceil_div(values, _MAX_VALUES))
        if blocks <= 1:
            return ()
        buffer_bytes = max(4, tensor.dtype.itemsize) * outputs * blocks
        if not is_along:
            buffer_bytes *= block_width * vector
        return buffer_bytes, 4 * grid


def _ceil_div(amount: int, divisor: int) -> int:
    return -(-amount // divisor)


def _power_of_two_below(amount: int, *, at_most: int) -> int:
    if amount >= at_most:
        return at_most
    return 1 << (amount.bit_length() - 1)


def workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of a workspace of cuBLAS, where CUBLAS_WORKSPACE_CONFIG is not set.

    cuda/CublasHandlePool.cpp: ``parseChosenWorkspaceSize``.
    """
    if compute_capability >= (9, 0):
        return 32 * 1024 * 1024
    return (2 * 4096 + 8 * 16) * 1024


def _adds_bias(operator: Any, first: torch.Tensor, *factors: torch.Tensor, **options: Any) -> bool:
    """Return whether cuBLASLt multiplies.

    native/cuda/Blas.cpp: ``isInputCompliesAddmmCudaLt``.
    """
    if operator not in (aten.addmm.default, aten.addmm.out) or options.get("beta", 1) != 1:
        return False
    num_columns = factors[1].shape[1]
    return first.shape == (num_columns,) and num_columns > 1 and first.is_contiguous()


def _softmax_backward(gradient: torch.Tensor, output: torch.Tensor, *args: Any) -> torch.Tensor:
    """native/cuda/SoftMax.cu: the product of gradient and output."""
    result: torch.Tensor = aten._softmax_backward_data.default(gradient, output, *args)
    torch.empty_like(gradient)
    return result


def _is_infinite(tensor: torch.Tensor) -> torch.Tensor:
    """native/TensorCompare.cpp: the absolute values, which are compared with infinity."""
    absolute = tensor.abs() if tensor.is_floating_point() else None
    result: torch.Tensor = aten.isinf.default(tensor)
    del absolute
    return result


def _norms(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """native/cuda/ForeachReduceOp.cu: partial sums, as many for each tensor as for the largest."""
    parts_per_tensor = max(_ceil_div(tensor.numel(), 65536) for tensor in tensors)
    parts = torch.empty(len(tensors) * parts_per_tensor, dtype=torch.float32)
    result = aten._foreach_norm.Scalar(tensors, *args, **kwargs)
    del parts
    return result


def _embedding_backward(
    gradient: torch.Tensor, tokens: torch.Tensor, words: int, padding: int, scales: bool
) -> torch.Tensor:
    """native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu: many tokens are sorted, then summed."""
    count = tokens.numel()
    (dim,) = gradient.shape[-1:]
    if count <= 3072 and not scales:
        return gradient.new_empty(words, dim)

    def integers(*sizes: int) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.int64) for size in sizes]

    def scratch(size: int) -> None:
        torch.empty(size, dtype=torch.uint8)

    buffers = integers(count, count)
    positions = integers(count)
    # cub's sort, by 8 bits of a token at once.
    passes = _ceil_div(max(1, (words - 1).bit_length()), 8)
    scratch(2 * round_up(8 * count, 256) + 2048 * passes + 1024 * _ceil_div(count, 4608) + 511)
    del positions[0]
    result = gradient.new_empty(words, dim)
    segments = min(count, words)
    buffers += integers(count, 1)
    keys = integers(count)
    # cub's search for distinct tokens.
    scratch(round_up(16 * _ceil_div(count, 7168) + 832, 256) + 255)
    del keys[0]
    buffers += integers(segments, segments)
    # cub's prefix sum.
    scratch(round_up(16 * _ceil_div(segments, 1024) + 816, 256) + 255)
    # Rows of one token are added up in parts of 10.
    parts = count // 10 + segments
    buffers += integers(1, parts)
    dtype = torch.float32 if gradient.dtype.itemsize == 2 else gradient.dtype
    buffers.append(torch.empty(parts, dim, dtype=dtype))
    free_last_first(buffers)
    return result


def _packed_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """The operator of adaptive_batch.memory, which calls ``_flash_attention_backward``."""
    # The ends of rows on the device, and the state of random numbers, which are not drawn.
    buffers = [torch.empty(len(ends), dtype=torch.int32), torch.empty(2, dtype=torch.uint64)]
    tensors = (query, key, value, output)
    return varlen_gradients(gradient, *tensors, rows=len(ends) - 1, buffers=buffers)


def _coalesced(tensor: torch.Tensor, dims: Sequence[int]) -> list[tuple[int, int]]:
    """Return sizes and strides of some dimensions, those that lie next to each other as one."""
    merged: list[tuple[int, int]] = []
    for dim in dims:
        size = tensor.shape[dim]
        stride = tensor.stride(dim)
        if size == 1:
            continue
        if merged:
            inner_size, inner_stride = merged[-1]
            if inner_size * inner_stride == stride:
                merged[-1] = (inner_size * size, inner_stride)
                continue
        merged.append((size, stride))
    return merged
