"""CUDA's kernels, for a device that is not here: which one a call takes, and what it allocates.

Fake tensors are of a CPU, which has other kernels for attention, norms and dropout. Inside
:class:`CudaKernels` these calls allocate what CUDA's do: their results, what they save for
backward, and what they need while they run. It is written after the source of PyTorch (each formula
names the file, below aten/src/ATen), and held against PyTorch's CUDA build on a CUDA runtime
without a device, where the order and the sizes of all allocations are equal
(tests/unit/estimate/test_cuda_operators.py). docs/cuda.md has what was measured on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import replaced, round_up
from adaptive_batch.memory import estimated_attention

private = PrivateNames("memory estimates")

Kernel = Literal["cudnn", "flash", "efficient", "math"]

_CUDA: Any = torch.backends.cuda
# Whether the name of a function is one that changes its first argument.
_IN_PLACE = re.compile(r"__i[a-z]+__$|[a-z].*[a-z]_$").match

# The most multiprocessors that a device of a compute capability has.
_MULTIPROCESSORS = {
    (7, 0): 80,
    (7, 5): 72,
    (8, 0): 108,
    (8, 6): 84,
    (8, 9): 142,
    (9, 0): 132,
    (10, 0): 148,
    (12, 0): 188,
}


def left_out(architectures: Collection[str], *, world_size: int = 1) -> tuple[str, ...]:
    """Return what is not counted, a sentence each.

    Args:
        architectures: names such as ``"sm_90"``; one is empty where only a size is known.
        world_size: number of ranks.
    """
    sentences = [
        "kernels and allocator are those of PyTorch's CUDA build, held against it without a device,"
        " and on a GPU in a few cases",
        "what other processes and a display take of the device, and kernels that are not PyTorch's"
        " own (flex attention)",
    ]
    if any(name.startswith(("sm_90", "sm_10")) for name in architectures):
        sentences.append(
            "what cuDNN takes by itself for attention on Hopper and Blackwell is not known"
        )
    if world_size > 1:
        sentences.append("the buffers of NCCL, and what loading takes for a time on each rank")
    if any(name.startswith("gfx") for name in architectures):
        sentences.append("ROCm: attention is modelled as on CUDA, but is done by another library")
    return tuple(sentences)


class CudaKernels(TorchFunctionMode):
    """Inside, attention, norms and dropout of fake tensors allocate what they would on CUDA.

    Args:
        compute_capability: such as (9, 0); None is taken as (8, 0).
        multiprocessors: how many the device has; None is taken as the most that one of its
            capability has.
    """

    def __init__(
        self, compute_capability: tuple[int, int] | None = None, multiprocessors: int | None = None
    ) -> None:
        super().__init__()
        self.capability = compute_capability or (8, 0)
        self.multiprocessors = multiprocessors or _MULTIPROCESSORS.get(self.capability, 128)
        self.has_little_shared_memory = (
            self.capability in ((8, 6), (8, 7), (8, 9)) or self.capability[0] == 12
        )
        self._instead: dict[Any, Callable[..., Any]] = {
            functional.scaled_dot_product_attention: self._attention,
            functional.multi_head_attention_forward: self._multi_head_attention,
            estimated_attention: self._varlen_attention,
            **dict.fromkeys((functional.rms_norm, torch.rms_norm), self._rms_norm),
            **dict.fromkeys((functional.layer_norm, torch.layer_norm), self._layer_norm),
            **dict.fromkeys((functional.dropout, torch.dropout), _dropout),
        }

    @classmethod
    def of_this_device(cls) -> CudaKernels:
        """Return those of the device that PyTorch uses."""
        properties = torch.cuda.get_device_properties()
        return cls((properties.major, properties.minor), properties.multi_processor_count)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = func
        if args and type(args[0]) is private.FakeTensor:
            function = self._instead.get(func, func)
        result = function(*args, **(kwargs or {}))
        # Fake tensors would repeat the views of a tensor in its backward; CUDA takes its memory.
        if args and result is args[0] and _IN_PLACE(func.__name__) and _is_rearranged(result):
            result.register_hook(partial(_as_strided_backward, result.stride()))
        return result

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        """The mode does not see what a call that it has seen calls in its turn."""
        with replaced(functional, scaled_dot_product_attention=self._attention):
            return functional.multi_head_attention_forward(*args, **kwargs)

    def _attention(
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
        run: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """native/transformers/attention.cpp: ``scaled_dot_product_attention``."""
        head_dim = query.shape[-1]
        keys = key.shape[-2]
        options = (dropout_p, is_causal, enable_gqa)
        kernel = self.kernel(query, key, value, attn_mask, *options)
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, query.dtype)
        if kernel == "math":
            return _math_attention(query, key, value, mask, *options)
        if kernel == "flash" and head_dim % 8:
            query, key, value = (
                functional.pad(tensor, (0, -head_dim % 8)) for tensor in (query, key, value)
            )
        if kernel == "efficient" and mask is not None:
            if keys % 8:
                mask = functional.pad(mask, (0, -keys % 8))[..., :keys]
            mask = mask.expand(*query.shape[:3], keys)
        run = run or self._counted_attention
        output = run(kernel, query, key, value, mask, dropout_p, is_causal)
        if output.shape[-1] != head_dim:
            output = output[..., :head_dim]
        return output

    def _counted_attention(
        self,
        kernel: Kernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
    ) -> Tensor:
        function = {
            "cudnn": _CudnnAttention,
            "flash": _FlashAttention,
            "efficient": _EfficientAttention,
        }[kernel]
        return _run(function, query, key, value, mask, dropout, self)

    def attention_operator(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attention by the operator that CUDA takes, for a graph of operators."""
        return self._attention(*args, **kwargs, run=_attention_operator)

    def operators_of_graphs(self) -> dict[Any, Callable[..., Any]]:
        """Return what runs in the place of attention's operators in a graph: each allocates what
        its kernel does.
        """
        aten = torch.ops.aten

        def flash_backward(
            gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, *_: Any
        ) -> tuple[Tensor, ...]:
            buffers = [
                tensor.transpose(1, 2)
                for tensor in (gradient, output)
                if not tensor.transpose(1, 2).is_contiguous()
            ]
            buffers = [buffer.contiguous() for buffer in buffers]
            return _flash_gradients(query, key, value, buffers, padded=_padded_queries(query))

        def efficient_backward(
            _: Tensor,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            __: Tensor | None,
            output: Tensor,
            *options: Any,
            **___: Any,
        ) -> tuple[Tensor | None, ...]:
            dropout = options[3]
            workspace_bytes = _efficient_workspace_bytes(query, key, value, dropout, self)
            return (*_efficient_gradients(query, key, value, output, workspace_bytes), None)

        def cudnn_backward(
            _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
        ) -> list[Tensor]:
            return _cudnn_gradients(query, key, value)

        return {
            aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
            aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
            aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
        }

    def _varlen_attention(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], ends: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        tensors = query, key, value
        if not self.takes_packed_rows(*tensors):
            return None
        if ends is None:
            ends = torch.empty(len(lengths) + 1, dtype=torch.int32)
        flat = [tensor.squeeze(0).transpose(0, 1) for tensor in tensors]
        output = _run(_VarlenAttention, *flat, len(lengths))
        return output.transpose(0, 1)[None], ends

    def takes_packed_rows(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether one kernel attends to rows of several lengths, laid end to end in ``[1,
        heads, tokens, head_dim]``.
        """
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
        """Return the kernel that CUDA takes.

        The order, and the constraints of each, are those of
        native/transformers/cuda/sdp_utils.cpp.
        """
        tensors = (query, key, value)
        capability = self.capability
        if any(tensor.dim() != 4 or 0 in tensor.shape for tensor in tensors):
            return "math"
        if any(tensor.stride(-1) != 1 for tensor in (*tensors, mask) if tensor is not None):
            return "math"
        head_dim = query.shape[-1]
        value_dim = value.shape[-1]
        heads = query.shape[1]
        key_heads = key.shape[1]
        is_half = query.dtype == torch.float16
        if capability >= (8, 0):
            is_half = query.dtype in (torch.float16, torch.bfloat16)
        same_heads = heads == key_heads == value.shape[1]
        same_dims = head_dim == key.shape[-1] == value_dim
        heads_fit = same_heads or (
            enable_gqa and heads % key_heads == 0 and key_heads == value.shape[1]
        )
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        limit = 256 if capability == (9, 0) else 128
        dims_fit = (
            max(head_dim, value_dim) <= limit
            and head_dim % 8 == value_dim % 8 == 0
            and key.shape[2] > 1
        )
        dropout_fits = 16 * dropout % 1 == 0 and not (dropout and query.shape[2] == 1)
        has_cudnn = cudnn and is_half and capability[0] in (9, 10) and _CUDA.cudnn_sdp_enabled()
        if has_cudnn and heads_fit and dims_fit and dropout_fits:
            return "cudnn"
        no_backward = (
            self.has_little_shared_memory and head_dim > 192 and (head_dim <= 224 or dropout > 0)
        )
        has_flash = (
            is_half and capability >= (8, 0) and head_dim <= 256 and not (trains and no_backward)
        )
        is_even = not is_causal or query.shape[2] == key.shape[2]
        if (
            has_flash
            and is_even
            and mask is None
            and heads_fit
            and same_dims
            and _CUDA.flash_sdp_enabled()
        ):
            return "flash"
        # Tensor cores read 16 bytes at once, from the architecture on that has them for the dtype.
        alignment = 1
        if query.dtype.itemsize == 2 and capability >= (7, 0):
            alignment = 8
        elif query.dtype.itemsize != 2 and capability >= (8, 0):
            alignment = 4
        has_efficient = (
            is_half or query.dtype == torch.float32
        ) and head_dim % alignment == value_dim % alignment == 0
        is_efficient = (
            has_efficient
            and same_heads
            and head_dim == key.shape[-1]
            and _CUDA.mem_efficient_sdp_enabled()
        )
        return "efficient" if is_efficient else "math"

    def _rms_norm(
        self,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        # native/layer_norm.cpp: weights of another dtype are not fused.
        if weight is not None and weight.dtype != input.dtype:
            return torch.rms_norm(input, normalized_shape, weight, eps)
        return _run(_Norm, self, len(normalized_shape), 1, input, weight)

    def _layer_norm(
        self,
        input: Tensor,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        return _run(_Norm, self, len(normalized_shape), 2, input, weight, bias)


class _FlashAttention(torch.autograd.Function):
    """native/transformers/cuda/flash_attn/flash_api.cpp: ``mha_fwd``, ``mha_bwd``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _: None,
        dropout: float,
        device: CudaKernels,
    ) -> Tensor:
        output = torch.empty_like(query)
        sums = _floats(*query.shape[:3])
        parts = []
        splits = _num_splits(query, key, 2 * device.multiprocessors)
        if splits > 1 and not dropout:
            parts.append(_floats(splits, *query.shape[:3], 1))
            parts.append(_floats(splits, *query.shape[:3], _rounded(query.shape[3])))
        state = torch.empty(2, dtype=torch.uint64)
        offset = torch.empty((), dtype=torch.uint64)
        if dropout:
            state = torch.empty_like(state)
        while parts:
            del parts[0]
        # In the order in which they are freed.
        ctx.save_for_backward(query, key, value, sums, output, state, offset)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, _, output, *_ = ctx.saved_tensors
        gradient = gradient.transpose(1, 2).contiguous()
        output = output.transpose(1, 2).contiguous()
        buffers = [gradient, output]
        del gradient, output
        gradients = _flash_gradients(query, key, value, buffers, padded=_padded_queries(query))
        return (*gradients, None, None, None)


def _flash_gradients(
    query: Tensor, key: Tensor, value: Tensor, buffers: list[Tensor], *, padded: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value, having allocated what ``mha_bwd`` and
    ``mha_varlen_bwd`` need; what is there beside is freed with it.

    Args:
        query, key, value: Tensors whose heads are their second dimension.
        buffers: What is there beside; emptied.
        padded: Shape of the query without its last dimension, padded for the kernel.
    """
    gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    buffers.append(_floats(*padded, 1))
    buffers.append(_floats(*padded, _rounded(query.shape[-1])))
    # Key heads that several heads share have a gradient for each of these first.
    heads = query.shape[1]
    if key.shape[1] != heads:
        buffers += [key.new_empty(len(key), heads, *key.shape[2:]) for _ in range(2)]
    free_last_first(buffers)
    return gradients


def _padded_queries(query: Tensor) -> tuple[int, ...]:
    return (*query.shape[:2], round_up(query.shape[2], 128))


class _VarlenAttention(torch.autograd.Function):
    """torch/nn/attention/varlen.py; flash_api.cpp: ``mha_varlen_fwd``, ``mha_varlen_bwd``, of
    [tokens, heads, head_dim].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: int) -> Tensor:
        output = torch.empty_like(query)
        sums = _floats(*query.shape[1::-1])
        state = torch.empty(2, dtype=torch.uint64)
        offset = torch.empty((), dtype=torch.uint64)
        del offset
        state = torch.empty_like(state)
        ctx.rows = rows
        ctx.save_for_backward(query, key, value, output, sums, state)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *tensors, sums, state = ctx.saved_tensors
        # The operator's further results have gradients too.
        buffers = [torch.empty_like(sums), torch.empty_like(state)]
        return (*varlen_gradients(gradient, *tensors, rows=ctx.rows, buffers=buffers), None)


def varlen_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    rows: int,
    buffers: list[Tensor],
) -> tuple[Tensor, ...]:
    """Return what the backward of attention to rows of several lengths returns, having allocated
    what it needs, as ``mha_varlen_bwd`` in flash_api.cpp does.

    Args:
        gradient, query, key, value, output: Tensors ``[tokens, heads, head_dim]``.
        rows: Number of rows.
        buffers: What is there beside and is freed with its own; emptied.
    """
    buffers += [gradient.contiguous(), output.contiguous()]
    padded = (len(query) + 128 * rows, query.shape[1])
    return _flash_gradients(query, key, value, buffers, padded=padded)


class _EfficientAttention(torch.autograd.Function):
    """native/transformers/cuda/attention.cu, attention_backward.cu."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        device: CudaKernels,
    ) -> Tensor:
        batch, heads, queries, _ = query.shape
        output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
        num_sums = 0
        if any(ctx.needs_input_grad):
            num_sums = round_up(queries, 32)
        sums = _floats(batch, heads, num_sums)
        # The output is added up in float32.
        if query.dtype.itemsize == 2 and value.shape[3] > 128:
            torch.empty_like(output, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, sums, output)
        ctx.workspace_bytes = _efficient_workspace_bytes(query, key, value, dropout, device)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *_, output = ctx.saved_tensors
        gradient = gradient.transpose(1, 2).contiguous()
        gradients = _efficient_gradients(query, key, value, output, ctx.workspace_bytes)
        return (*gradients, None, None, None)


def _efficient_gradients(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, workspace_bytes: int
) -> list[Tensor]:
    """Return the gradients of query, key and value, having allocated what
    ``_efficient_attention_backward`` needs.
    """
    gradients = [
        tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)
        for tensor in (query, key, value)
    ]
    if query.dtype.itemsize == 2:
        buffers = [_floats(*query.shape[:3])]
    else:
        buffers = [torch.empty_like(output.transpose(1, 2))]
        buffers.append(buffers[0].sum(-1))
        delta = buffers[1].transpose(1, 2).contiguous()
        free_last_first(buffers)
        buffers = [delta]
        del delta
    buffers.append(torch.empty(workspace_bytes, dtype=torch.uint8))
    while buffers:
        del buffers[0]
    return gradients


class _CudnnAttention(torch.autograd.Function):
    """native/cudnn/MHA.cpp, with the sums of cuDNN's frontend; what cuDNN needs is not known."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        device: CudaKernels,
    ) -> Tensor:
        seed_and_offset = [torch.empty((), dtype=torch.int64) for _ in range(2)]
        # The output's dimensions lie in memory in the order of the query's.
        order = sorted(range(4), key=query.stride, reverse=True)
        shape = (*query.shape[:3], value.shape[3])
        output = query.new_empty([shape[dim] for dim in order]).permute(
            [order.index(dim) for dim in range(4)]
        )
        sums = _floats(0)
        if any(ctx.needs_input_grad):
            sums = _floats(*query.shape[:3])
        ctx.save_for_backward(query, key, value, mask, sums, output, *seed_and_offset)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return (*_cudnn_gradients(query, key, value), None, None, None)


def _cudnn_gradients(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return the gradients of query, key and value, having allocated what cuDNN is given."""
    gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
    _floats(*query.shape[:3], query.shape[3] + 1)
    return gradients


class _Norm(torch.autograd.Function):
    """native/cuda/layer_norm_kernel.cu: ``layer_norm_cuda``, ``_fused_rms_norm_cuda``."""

    @staticmethod
    def forward(
        ctx: Any,
        device: CudaKernels,
        dims: int,
        num_sums: int,
        tensor: Tensor,
        *weights: Tensor | None,
    ) -> Tensor:
        contiguous = tensor.contiguous()
        output = torch.empty_like(contiguous)
        sums = [_floats(*tensor.shape[:-dims]) for _ in range(num_sums)]
        ctx.save_for_backward(tensor, *weights, *sums)
        ctx.device = device
        ctx.dim = math.prod(tensor.shape[-dims:])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tensor, *weights_and_sums = ctx.saved_tensors
        buffers = [gradient.contiguous(), tensor.contiguous()]
        inputs = [buffers[1], *weights_and_sums]
        results: list[Tensor | None] = []
        for input, needs_gradient in zip(inputs, ctx.needs_input_grad[3:], strict=False):
            results.append(torch.empty_like(input) if needs_gradient else None)
        rows = tensor.numel() // ctx.dim
        columns = math.ceil(ctx.dim / 32)
        # Gradients of weights are summed in parts where there are many rows of few columns.
        if rows > 65536 and ctx.dim // 32 < ctx.device.multiprocessors // 2:
            parts = min(32768 // columns, math.ceil(rows / 32))
            places = [place for place, result in enumerate(results) if place and result is not None]
            buffers += [inputs[place].new_empty(parts, ctx.dim) for place in places]
            for number, place in enumerate(places, 2):
                results[place] = buffers[number].sum(0).view_as(inputs[place])
        free_last_first(buffers)
        return None, None, None, *results


class _Dropout(torch.autograd.Function):
    """native/cuda/Dropout.cu: ``native_dropout``, whose mask is boolean."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        mask = torch.empty_like(tensor, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    return _run(_Dropout, input)


def _attention_operator(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
) -> Tensor:
    aten = torch.ops.aten
    tensors = (query, key, value)
    if kernel == "flash":
        results = aten._scaled_dot_product_flash_attention(*tensors, dropout, is_causal)
    else:
        operator = aten._scaled_dot_product_efficient_attention
        if kernel == "cudnn":
            operator = aten._scaled_dot_product_cudnn_attention
        results = operator(*tensors, mask, torch.is_grad_enabled(), dropout, is_causal)
    output: Tensor = results[0]
    return output


class _SafeSoftmax(torch.autograd.Function):
    """native/transformers/attention.cpp: ``_safe_softmax``."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        buffers = [scores.eq(-math.inf)]
        buffers.append(buffers[0].all(-1, keepdim=True))
        weights.masked_fill_(buffers[1], torch.zeros(()))
        free_last_first(buffers)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        result: Tensor = torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)
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
    """native/transformers/attention.cpp: ``_scaled_dot_product_attention_math``."""
    dtype = query.dtype
    # One list, since memory is freed in the order of C++'s locals.
    tensors: list[Any] = [query, key, value]
    if dtype.itemsize == 2 and not _CUDA.fp16_bf16_reduction_math_sdp_allowed():
        tensors = [query.float(), key.float(), value.float()]
    scaled = tensors[0] * 1.0
    if is_causal:
        allowed = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        mask = _additive(allowed, scaled.dtype)
        del allowed
    tensors += [mask, scaled]
    del mask, scaled
    repeats = 1
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1:
        tensors += [tensor.repeat_interleave(repeats, -3) for tensor in tensors[1:3]]
    else:
        tensors += tensors[1:3]
    weights = tensors[4].matmul(tensors[5].transpose(-2, -1) * 1.0)
    if tensors[3] is not None:
        weights.add_(tensors[3])
    weights = _run(_SafeSoftmax, weights)
    weights = _dropout(weights, dropout)
    unused = weights.to(dtype)
    output = weights.matmul(tensors[6]).to(dtype)
    free_last_first(tensors)
    del unused
    return output


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    values = [torch.zeros((), dtype=dtype), torch.full((), -math.inf, dtype=dtype)]
    result = torch.where(mask, values[0], values[1])
    free_last_first(values)
    return result


def _run(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _is_rearranged(tensor: Tensor) -> bool:
    """Return whether it is another view of all of a tensor that needs a gradient."""
    if not tensor.requires_grad or tensor._base is None:
        return False
    return tensor._base.numel() == tensor.numel()


def _as_strided_backward(stride: Sequence[int], gradient: Tensor) -> Tensor:
    """Allocate the gradient of a view that was changed in place: its memory, once."""
    return gradient.new_empty(gradient.numel()).as_strided(gradient.shape, stride)


def free_last_first(tensors: list[Tensor]) -> None:
    """Free tensors, the last first, as C++ frees the locals of a function."""
    while tensors:
        del tensors[-1]


def _floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _rounded(head_dim: int) -> int:
    if head_dim <= 128:
        return round_up(head_dim, 32)
    return round_up(head_dim, 64)


def _num_splits(query: Tensor, key: Tensor, slots: int) -> int:
    """Return in how many parts flash attention takes the keys (``num_splits_heuristic``).

    These are the fewest that use nearly all `slots`.
    """
    batch, heads, queries, head_dim = query.shape
    blocks = batch * heads * math.ceil(queries / 64)
    if blocks >= 0.8 * slots:
        return 1
    keys_per_block = 64
    if head_dim <= 64:
        keys_per_block = 256
    elif head_dim <= 128:
        keys_per_block = 128
    key_blocks = math.ceil(key.shape[2] / keys_per_block)
    used_shares = {}
    blocks_per_split = 0
    for splits in range(1, min(128, slots, key_blocks) + 1):
        previous = blocks_per_split
        blocks_per_split = math.ceil(key_blocks / splits)
        # One split more that leaves each as long as it was gains nothing.
        if blocks_per_split != previous:
            waves = blocks * splits / slots
            used_shares[splits] = waves / math.ceil(waves)
    enough = 0.85 * max(used_shares.values())
    return min(splits for splits, share in used_shares.items() if share >= enough)


def _efficient_workspace_bytes(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, device: CudaKernels
) -> int:
    """Return ``workspace_size()`` of mem_eff_attention/kernel_backward.h, in bytes.

    It is that of the first kernel of kernels/cutlassB.h that fits.
    """
    batch, heads, queries, head_dim = query.shape
    is_half = query.dtype.itemsize == 2
    largest = max(head_dim, value.shape[3])
    if largest <= 64:
        block_queries = 64
        block_keys = 64
    elif device.has_little_shared_memory and (largest <= 128 or not is_half):
        has_96 = is_half and largest <= 96 and not dropout and device.capability in ((8, 6), (8, 9))
        block_queries = 128 if has_96 else 64
        block_keys = 64
    else:
        block_queries = 128
        block_keys = 128 if is_half and largest <= 128 else 64
    blocks = math.ceil(queries / block_queries) * math.ceil(head_dim / block_keys)
    # Each block has a lock and a counter, 16 bytes in all.
    elements = blocks * (4 + block_queries * block_keys)
    # Gradients of key and value that do not stay in registers.
    if is_half and largest > block_queries:
        splits = max(1, min(math.ceil(key.shape[2] / block_keys), 200 // (batch * heads)))
        padded_dims = round_up(head_dim, block_queries) + round_up(value.shape[3], block_queries)
        elements += splits * block_keys * padded_dims
    return 4 * batch * heads * round_up(elements, 4)
