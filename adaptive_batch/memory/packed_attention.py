"""Causal attention of packed rows, as a custom operator.

The cumulative lengths of the rows are an argument, so one compiled graph is valid for all rows.
Estimates replace the operator, since they run on a CPU without GPU kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("adaptive_batch::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the causal attention within each row, and the log-sum-exp of its scores.

    Args:
        query: Contiguous tensor ``[tokens, heads, head_dim]`` of the packed rows; in half precision
            on CUDA.
        key: Tensor of the same shape; on CUDA it may have fewer heads.
        value: Tensor of the same shape as `key`.
        cu_seqlens: int32 tensor ``[rows + 1]`` on the host: the cumulative lengths, from 0.
        scale: Factor of the scores; None for 1 / sqrt(head_dim).

    Returns:
        The attention, shaped like `query`, and the log-sum-exp ``[heads, tokens]`` in float32
        (float64 for float64).

    Raises:
        ValueError: `cu_seqlens` does not match the number of tokens.
    """
    lengths = _lengths(query, cu_seqlens)
    if query.is_cuda:
        device_cu_seqlens = cu_seqlens.to(query.device, non_blocking=True)
        output, logsumexp, *_ = aten._flash_attention_forward(
            query,
            key,
            value,
            device_cu_seqlens,  # of the queries
            device_cu_seqlens,  # of the keys
            max(lengths),
            max(lengths),
            0.0,  # dropout_p
            True,  # is_causal
            False,  # return_debug_mask
            scale=scale,
        )
        return output.contiguous(), logsumexp
    output = query.new_empty(query.shape)
    logsumexp_of_rows = []
    # `row` has query, key and value of a row, and row_output is its view of `output`.
    for *row, row_output in _by_rows(lengths, query, key, value, output):
        attention, row_logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            *row,
            0.0,  # dropout_p
            True,  # is_causal
            scale=scale,
        )
        row_output.copy_(attention)
        logsumexp_of_rows.append(row_logsumexp[0])
    return output, torch.cat(logsumexp_of_rows, 1)


@torch.library.custom_op("adaptive_batch::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        gradient: Tensor of the shape of `output`.
        query, key, value, cu_seqlens, scale: Arguments of :func:`packed_attention`.
        output, logsumexp: Results of :func:`packed_attention`.
    """
    lengths = _lengths(query, cu_seqlens)
    if query.is_cuda:
        device_cu_seqlens = cu_seqlens.to(query.device, non_blocking=True)
        grad_query, grad_key, grad_value = aten._flash_attention_backward(
            gradient,
            query,
            key,
            value,
            output,
            logsumexp,
            device_cu_seqlens,  # of the queries
            device_cu_seqlens,  # of the keys
            max(lengths),
            max(lengths),
            0.0,  # dropout_p
            True,  # is_causal
            # The random state is unused, since there is no dropout.
            torch.empty(2, dtype=torch.uint64, device=query.device),
            torch.empty(0, device=query.device),
            scale=scale,
        )
        return grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous()
    grad_query = query.new_empty(query.shape)
    grad_key = key.new_empty(key.shape)
    grad_value = value.new_empty(value.shape)
    # `row` has the first five tensors of a row, and the others are its views of the gradients.
    rows = _by_rows(lengths, gradient, query, key, value, output, grad_query, grad_key, grad_value)
    for (*row, row_grad_query, row_grad_key, row_grad_value), row_logsumexp in zip(
        rows, torch.split(logsumexp, lengths, 1), strict=True
    ):
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *row,
            row_logsumexp[None],
            0.0,  # dropout_p
            True,  # is_causal
            scale=scale,
        )
        row_grad_query.copy_(gradients[0])
        row_grad_key.copy_(gradients[1])
        row_grad_value.copy_(gradients[2])
    return grad_query, grad_key, grad_value


def _lengths(query: Tensor, cu_seqlens: Tensor) -> list[int]:
    """Return the lengths of the rows; raise if their sum is not the number of tokens."""
    lengths: list[int] = cu_seqlens.diff().tolist()
    if sum(lengths) != len(query):
        raise ValueError(
            f"attention of {len(query)} tokens cannot separate packed rows of {sum(lengths)} tokens"
        )
    return lengths


def _by_rows(lengths: list[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors ``[tokens, heads, head_dim]`` into views ``[1, heads, tokens, head_dim]`` of
    rows.
    """
    heads_first = [tensor.transpose(0, 1)[None] for tensor in tensors]
    return zip(*(torch.split(tensor, lengths, 2) for tensor in heads_first), strict=True)


@packed_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty((heads, tokens), dtype=dtype)


@packed_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, scale = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)
    ctx.scale = scale


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*packed_attention_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None)


packed_attention.register_autograd(_backward, setup_context=_save_for_backward)


def estimated_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return the attention of packed rows in an estimate, and None in a real step.

    An estimate replaces this function in the package `adaptive_batch.memory`.

    Args:
        query, key, value: Tensors ``[1, heads, tokens, head_dim]`` of the packed rows.
        lengths: Tokens of each row, in order.
        cu_seqlens: int32 ``[rows + 1]`` that the first call for these rows returned; None in the
            first call.

    Returns:
        Causal attention ``[1, heads, tokens, head_dim]`` and `cu_seqlens`.
    """
    return None
