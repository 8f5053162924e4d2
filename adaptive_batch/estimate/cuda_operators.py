"""Memory that CUDA operators allocate besides their results.

Fake tensors are on a CPU, which has other kernels for attention, norms and dropout.
:class:`CudaKernels` replaces these functions by ones that save the tensors of CUDA's for backward
and allocate the same large buffers; `_BUFFERS` has their shapes. Buffers below a thousandth of the
peak are not counted: semaphores, partial sums of rows, split keys, buffers for sorting.
docs/accuracy.md compares the estimates with PyTorch's CUDA build.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from adaptive_batch import memory
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced, round_up

private = PrivateNames("memory estimates")

aten = torch.ops.aten

Kernel = Literal["cudnn", "flash", "efficient", "math"]
Shapes = list[tuple[int, ...]]

_CUDA: Any = torch.backends.cuda

# Float32 buffers in the backward of attention [rows, heads, tokens, head_dim]: sums of the
# gradient, and the gradient of the query padded to the kernel's blocks. Flash attention pads each
# packed row. In efficient attention, each block has a header of 4 numbers.
_BUFFERS: dict[str, Callable[[Tensor, int], Shapes]] = {
    "flash": lambda query, rows: [
        (query.shape[1], _padded(query, rows), width)
        for width in (1, round_up(query.shape[3], 32 if query.shape[3] <= 128 else 64))
    ],
    "efficient": lambda query, _: [
        (*query.shape[:2], ceil(query.shape[2] / 64), ceil(query.shape[3] / 64), 64 * 64 + 4)
    ],
    "cudnn": lambda query, _: [(*query.shape[:3], query.shape[3] + 1)],
}
_FORWARDS = {
    "efficient": aten._scaled_dot_product_efficient_attention,
    "cudnn": aten._scaled_dot_product_cudnn_attention,
}
_BACKWARDS = {
    "flash": aten._scaled_dot_product_flash_attention_backward.default,
    "efficient": aten._scaled_dot_product_efficient_attention_backward.default,
    "cudnn": aten._scaled_dot_product_cudnn_attention_backward.default,
}


def left_out(
    model: torch.nn.Module, architectures: Collection[str], *, world_size: int = 1
) -> tuple[str, ...]:
    """Return the significant uncounted memory, one sentence each.

    Args:
        model: estimated model.
        architectures: names such as ``"sm_90"``; "" for a device given as a size.
        world_size: number of ranks.
    """
    sentences = []
    if any(isinstance(module, torch.nn.RNNBase) for module in model.modules()):
        sentences.append(
            "buffers of fused recurrent kernels: a step with an LSTM or a GRU needs 7 to 10% more"
        )
    if any(name.startswith(("sm_90", "sm_10")) for name in architectures):
        sentences.append("cuDNN's own workspace for attention on Hopper and Blackwell")
    if world_size > 1:
        sentences.append("NCCL's buffers, and temporary memory of loading on each rank")
    if any(name.startswith("gfx") for name in architectures):
        sentences.append("ROCm's attention, which is counted as CUDA's")
    return tuple(sentences)


_rms_norm: Callable[..., Tensor] = torch.rms_norm
_real_dropout: Callable[..., Tensor] = functional.dropout
# Replaced functions by module. Norms of `functional` call those of `torch`.
_REPLACED: dict[Any, tuple[str, ...]] = {
    torch: ("rms_norm", "layer_norm"),
    functional: ("scaled_dot_product_attention", "dropout"),
    memory: ("estimated_attention",),
}


class CudaKernels:
    """The kernels of PyTorch for a CUDA device.

    Args:
        compute_capability: capability such as (9, 0); None for (8, 0).
        multiprocessors: multiprocessors of the device; 0 for those of an A100.
    """

    def __init__(
        self, compute_capability: tuple[int, int] | None = None, multiprocessors: int = 0
    ) -> None:
        self.capability = compute_capability or (8, 0)
        self._multiprocessors = multiprocessors or 108
        self._has_small_multiprocessors = (
            self.capability in ((8, 6), (8, 7), (8, 9)) or self.capability[0] == 12
        )
        self._functions: dict[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": self.attention,
            "estimated_attention": self._packed_attention,
            "rms_norm": _fused_rms_norm,
            "layer_norm": _layer_norm,
            "dropout": _dropout,
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace attention, norms and dropout of fake tensors by those of CUDA in this context.

        A TorchFunctionMode would not work: it is disabled in backward, where activation
        checkpointing runs these functions again.
        """
        with ExitStack() as stack:
            for module, names in _REPLACED.items():
                fakes = {
                    name: _ForFakes(self._functions[name], getattr(module, name)) for name in names
                }
                stack.enter_context(replaced(module, **fakes))
            yield

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """native/transformers/attention.cpp: ``scaled_dot_product_attention``."""
        head_dim = query.shape[-1]
        options = (dropout_p, is_causal, enable_gqa)
        kernel = self.kernel(query, key, value, attn_mask, *options)
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            # A boolean mask is converted to numbers that are added to the scores.
            mask = torch.empty(mask.shape, dtype=query.dtype)
        if kernel == "math":
            return _math_attention(query, key, value, mask, dropout_p, is_causal, enable_gqa)
        output: Tensor
        if kernel == "flash":
            # The kernel needs a multiple of 8 as head_dim, and takes no mask.
            padding = -head_dim % 8
            tensors = [query, key, value]
            if padding:
                tensors = [functional.pad(tensor, (0, padding)) for tensor in tensors]
            output, *_ = aten._scaled_dot_product_flash_attention(*tensors, dropout_p, is_causal)
            return output[..., :head_dim] if padding else output
        if kernel == "efficient" and mask is not None:
            # The rows of the mask begin at multiples of 8 numbers.
            if mask.shape[-1] % 8:
                mask = functional.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
            mask = mask.expand(*query.shape[:3], key.shape[-2])
        keeps_sums = torch.is_grad_enabled()
        forward = _FORWARDS[kernel]
        output, *_ = forward(query, key, value, mask, keeps_sums, dropout_p, is_causal)
        return output

    def _packed_attention(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], ends: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Stand in for `estimated_attention` of adaptive_batch.memory."""
        if not self.takes_packed_rows(query, key, value):
            return None
        if ends is None:
            ends = torch.empty(len(lengths) + 1, dtype=torch.int32)
        flat = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        output, _ = memory.packed_attention(*flat, ends, None)
        return output.transpose(0, 1)[None], ends

    def takes_packed_rows(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether one kernel supports packed rows in ``[1, heads, tokens, head_dim]``."""
        return (
            self.kernel(query, key, value, is_causal=True, enable_gqa=True, cudnn=False) == "flash"
        )

    def kernel(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
        cudnn: bool = True,
    ) -> Kernel:
        """Return the kernel that CUDA selects.

        Order and constraints are those of native/transformers/cuda/sdp_utils.cpp.
        """
        tensors = (query, key, value)
        # (8, x) is Ampere or Ada, (9, 0) Hopper, (10, x) and (12, x) Blackwell.
        capability = self.capability
        if any(tensor.dim() != 4 or 0 in tensor.shape for tensor in tensors):
            return "math"
        if any(tensor.stride(-1) != 1 for tensor in (*tensors, mask) if tensor is not None):
            return "math"
        head_dim, value_dim = query.shape[-1], value.shape[-1]
        heads, key_heads = query.shape[1], key.shape[1]
        is_half = query.dtype == torch.float16
        if capability >= (8, 0):
            is_half = query.dtype in (torch.float16, torch.bfloat16)
        has_equal_heads = heads == key_heads == value.shape[1]
        shares_key_heads = enable_gqa and heads % key_heads == 0 and key_heads == value.shape[1]

        fits_cudnn = (
            capability[0] in (9, 10)
            and is_half
            and (has_equal_heads or shares_key_heads)
            and max(head_dim, value_dim) <= (256 if capability == (9, 0) else 128)
            and head_dim % 8 == value_dim % 8 == 0
            and key.shape[2] > 1
            and 16 * dropout % 1 == 0  # a multiple of 1/16
            and not (dropout and query.shape[2] == 1)
        )
        if cudnn and fits_cudnn and _CUDA.cudnn_sdp_enabled():
            return "cudnn"

        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        lacks_backward = (
            self._has_small_multiprocessors and head_dim > 192 and (head_dim <= 224 or dropout > 0)
        )
        fits_flash = (
            capability >= (8, 0)
            and is_half
            and (has_equal_heads or shares_key_heads)
            and head_dim == key.shape[-1] == value_dim <= 256
            and mask is None
            and not (trains and lacks_backward)
            and not (is_causal and query.shape[2] != key.shape[2])
        )
        if fits_flash and _CUDA.flash_sdp_enabled():
            return "flash"

        # Tensor cores read 16 bytes at once, on architectures that have them for the dtype.
        alignment = 1
        if query.dtype.itemsize == 2 and capability >= (7, 0):
            alignment = 8
        elif query.dtype.itemsize != 2 and capability >= (8, 0):
            alignment = 4
        fits_efficient = (
            (is_half or query.dtype == torch.float32)
            and has_equal_heads
            and head_dim == key.shape[-1]
            and head_dim % alignment == value_dim % alignment == 0
        )
        if fits_efficient and _CUDA.mem_efficient_sdp_enabled():
            return "efficient"
        return "math"

    def operators(self) -> dict[Any, Callable[..., Any]]:
        """Return the replacements of operators; all others allocate only their results."""
        replacements: dict[Any, Callable[..., Any]] = {
            aten._safe_softmax.default: _safe_softmax,
            aten._softmax_backward_data.default: _softmax_backward,
            aten.embedding_dense_backward.default: _embedding_backward,
            aten._trilinear.default: _trilinear,
            aten._grouped_mm.default: _grouped_mm,
            torch.ops.adaptive_batch.packed_attention_backward.default: _packed_backward,
        }
        for kernel, operator in _BACKWARDS.items():
            replacements[operator] = partial(_attention_backward, kernel)
        for operator in (aten.sum.dim_IntList, aten.mean.dim):
            replacements[operator] = partial(self._sum, operator)
        return replacements

    def _sum(
        self, operator: Any, tensor: Tensor, dims: Sequence[int] | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        result: Tensor = operator(tensor, dims, *args, **kwargs)
        partial_sums = 0
        # The dimension whose elements are adjacent in memory.
        adjacent = min(range(tensor.dim()), key=tensor.stride, default=0)
        if dims and adjacent not in {dim % tensor.dim() for dim in dims}:
            partial_sums = self._most_partial_sums(tensor.numel(), result.numel())
        # At least one byte, so that the program does not depend on the number of rows.
        num_bytes = max(1, partial_sums * max(4, result.element_size()))
        torch.empty(num_bytes, dtype=torch.uint8)
        return result

    def _most_partial_sums(self, num_elements: int, columns: int) -> int:
        """Return at most the number of partial sums of a sum over the rows of a matrix.

        native/cuda/Reduce.cuh, ``setReduceConfig``: a block of 128 threads adds up 128 columns, and
        several blocks share the rows of a column if the device has more blocks than needed. Each
        of them writes a partial sum for each of its threads.
        """
        rows = num_elements // max(1, columns)
        blocks = self._multiprocessors * (12 if self._has_small_multiprocessors else 16)
        if rows < 1024 or columns > 128 * blocks:
            return 0
        blocks_of_a_column = min(ceil(128 * blocks / columns), ceil(rows / 64))
        return 128 * columns * max(blocks_of_a_column, ceil(rows / 1024))


@contextmanager
def real_functions() -> Iterator[None]:
    """Restore PyTorch's own functions, which Dynamo supports, in this context."""
    with ExitStack() as stack:
        for module, names in _REPLACED.items():
            functions = {name: getattr(module, name) for name in names}
            # Outside of CudaKernels.in_place(), the functions are PyTorch's own already.
            real = {
                name: function.real
                for name, function in functions.items()
                if isinstance(function, _ForFakes)
            }
            stack.enter_context(replaced(module, **real))
        yield


class _ForFakes:
    """A function that calls `fake` for fake tensors and `real` for others."""

    def __init__(self, fake: Callable[..., Any], real: Callable[..., Any]) -> None:
        self._fake = fake
        self.real = real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for operand in (*args, *kwargs.values()):
            if type(operand) is private.FakeTensor:
                return self._fake(*args, **kwargs)
        return self.real(*args, **kwargs)


def workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of a cuBLAS workspace without CUBLAS_WORKSPACE_CONFIG.

    Source: cuda/CublasHandlePool.cpp, ``parseChosenWorkspaceSize``.
    """
    if compute_capability >= (9, 0):
        return 32 * 1024 * 1024
    return (2 * 4096 + 8 * 16) * 1024


def _attention_backward(
    kernel: str,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    rows: int = 0,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and mask, after allocating the kernel's buffers.

    Args:
        rows: number of packed rows; 0 if rows are not packed.
    """
    # Like the buffers of the kernel, these are alive until it returns.
    buffers: list[Tensor] = []
    if kernel != "cudnn":
        buffers.append(gradient.transpose(1, 2).contiguous())
    if kernel == "flash":
        output = others[0]
        buffers.append(output.transpose(1, 2).contiguous())
    gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    if kernel == "efficient":
        buffers.append(_sums_of_products(gradient, others[1]))
    buffers += [_floats(shape) for shape in _BUFFERS[kernel](query, rows)]
    if kernel == "flash" and key.shape[1] != query.shape[1]:
        # Key and value, which query heads share, first get one gradient for each query head.
        shape = (len(key), query.shape[1], *key.shape[2:])
        buffers += [key.new_empty(shape), key.new_empty(shape)]
    if kernel == "efficient":
        return (*gradients, None)
    return gradients


def _sums_of_products(gradient: Tensor, output: Tensor) -> Tensor:
    # Both converted tensors exist until the sums do.
    factors = gradient.transpose(1, 2).float(), output.transpose(1, 2).float()
    product = factors[0] * factors[1]
    return product.sum(-1).transpose(1, 2).contiguous()


def _packed_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *others: Any
) -> tuple[Tensor | None, ...]:
    """Backward of packed_attention in adaptive_batch.memory, on ``[tokens, heads, head_dim]``."""
    flat = (gradient, query, key, value, output)
    # [1, heads, tokens, head_dim]
    tensors = [tensor.transpose(0, 1)[None] for tensor in flat]
    _, cu_seqlens, *_ = others
    gradients = _attention_backward("flash", *tensors, rows=len(cu_seqlens) - 1)
    return tuple(part[0].transpose(0, 1) for part in gradients if part is not None)


def _padded(query: Tensor, rows: int) -> int:
    """Return the padded tokens of all rows in the backward of flash attention.

    Args:
        query: ``[batch, heads, tokens, head_dim]``.
        rows: rows that are packed into one sequence, each with 128 tokens of padding; 0 if each
            sequence is a row, which is padded to a multiple of 128 tokens.
    """
    num_sequences, _, tokens, _ = query.shape
    if rows:
        return tokens + 128 * rows
    return num_sequences * round_up(tokens, 128)


def _fused_rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None
) -> Tensor:
    # native/layer_norm.cpp: weights of another dtype are not fused.
    if weight is not None and weight.dtype != input.dtype:
        return _rms_norm(input, normalized_shape, weight)
    # One root mean square per row is saved.
    shape = input.shape[: -len(normalized_shape)]
    return _run(_Norm, [shape], input, weight)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    # A mean and a deviation per row are saved.
    shape = input.shape[: -len(normalized_shape)]
    return _run(_Norm, [shape, shape], input, weight, bias)


class _Norm(torch.autograd.Function):
    """native/cuda/layer_norm_kernel.cu: ``layer_norm_cuda``, ``_fused_rms_norm_cuda``."""

    @staticmethod
    def forward(ctx: Any, saved_sums: Shapes, tensor: Tensor, *weights: Tensor | None) -> Tensor:
        output = torch.empty_like(tensor.contiguous())
        ctx.save_for_backward(tensor, *weights, *map(_floats, saved_sums))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tensor, *weights_and_sums = ctx.saved_tensors
        # The kernel copies both if they are not contiguous, and keeps the copies until it returns.
        copies = gradient.contiguous(), tensor.contiguous()
        # needs_input_grad has no entries for the sums.
        inputs = zip((copies[1], *weights_and_sums), ctx.needs_input_grad[1:], strict=False)
        return None, *(torch.empty_like(input) if needs else None for input, needs in inputs)


class _Dropout(torch.autograd.Function):
    """native/cuda/Dropout.cu: ``native_dropout``, whose mask is boolean."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(tensor, dtype=torch.bool))
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return _real_dropout(input, p, training, inplace)
    return _run(_Dropout, input)


def _softmax_backward(gradient: Tensor, output: Tensor, *args: Any) -> Tensor:
    """native/cuda/SoftMax.cu: the product of gradient and output."""
    result: Tensor = aten._softmax_backward_data.default(gradient, output, *args)
    torch.empty_like(gradient)
    return result


def _embedding_backward(
    gradient: Tensor, tokens: Tensor, words: int, padding: int, scales: bool
) -> Tensor:
    """native/cuda/EmbeddingBackwardKernel.cu: gradients of a token are summed in groups of 10."""
    num_tokens = tokens.numel()
    result = gradient.new_empty(words, gradient.shape[-1])
    # A kernel for few tokens needs no sums, but cannot scale gradients by frequency.
    if num_tokens > 3072 or scales:
        num_groups = num_tokens // 10 + min(num_tokens, words)
        _floats((num_groups, gradient.shape[-1]))
    return result


def _trilinear(*args: Any) -> Tensor:
    """Run the operators of nn.Bilinear one by one, as its kernels do, to count each result."""
    keys = private.DispatchKeySet(private.DispatchKey.CPU)
    result: Tensor = aten._trilinear.default.redispatch(keys, *args)
    return result


def _grouped_mm(
    first: Tensor,
    second: Tensor,
    ends: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """native/cuda/GroupedBlas.cpp: the products of groups, in any dtype."""
    shape = [*first.shape[:-1], second.shape[-1]]
    if first.dim() == second.dim() == 2:
        assert ends is not None
        shape = [len(ends), *shape]
    elif second.dim() == 2:
        # The groups are columns of the second matrix.
        shape = shape[1:]
    return first.new_empty(shape, dtype=dtype)


def _safe_softmax(scores: Tensor, *args: Any) -> Tensor:
    """native/transformers/attention.cpp: a boolean mask marks rows without any visible token."""
    result = scores.softmax(*args)
    torch.empty_like(scores, dtype=torch.bool)
    return result


def _math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> Tensor:
    """Allocate the tensors of ``_scaled_dot_product_attention_math`` in
    native/transformers/attention.cpp; their values do not matter.
    """
    dtype = query.dtype
    if dtype.itemsize == 2 and not _CUDA.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    # The products with 1.0 stand for the scaled query and key, which are new tensors.
    scaled_query = query * 1.0
    if is_causal:
        mask = torch.empty(query.shape[-2], key.shape[-2], dtype=scaled_query.dtype)
    if enable_gqa and query.shape[-3] > key.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    weights = scaled_query.matmul(key.transpose(-2, -1) * 1.0)
    if mask is not None:
        weights.add_(mask)
    weights = _dropout(aten._safe_softmax(weights, -1), dropout)
    return weights.matmul(value).to(dtype)


def _run(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _floats(shape: Sequence[int]) -> Tensor:
    return torch.empty(*shape, dtype=torch.float32)
