"""Packed micro-batches: rows laid end to end in one sequence without padding, whose attention keeps them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

Row = Mapping[str, Any]
Batch = dict[str, Any]


class PackedAttention:
    """What stands in for `scaled_dot_product_attention`: causal attention of each row alone, whatever mask is given.

    Args:
        lengths: tokens of each row, in their order in the sequence.
        attend: PyTorch's `scaled_dot_product_attention`.

    Attributes:
        calls: how many it has taken.
        dtype: of the last query.
    """

    def __init__(self, lengths: Sequence[int], attend: Callable[..., torch.Tensor]) -> None:
        self.calls, self.dtype = 0, torch.float32
        self._lengths, self._tokens, self._attend = list(lengths), sum(lengths), attend
        self._ends: dict[torch.device, torch.Tensor] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return ``[1, heads, tokens, head_dim]``, as the query is.

        Raises:
            ValueError: the call is of another shape, so that rows cannot be kept apart in it.
        """
        if any(one.dim() != 4 or one.shape[0] != 1 or one.shape[2] != self._tokens for one in (query, key, value)):
            shapes = " and ".join(str(list(one.shape)) for one in (query, key))
            raise ValueError(
                f"attention of query and key {shapes} in packed rows of {self._tokens} tokens in all, which are kept apart "
                "where both are [1, heads, tokens, head_dim]"
            )
        self.calls, self.dtype = self.calls + 1, query.dtype
        is_even = not dropout_p and query.shape[3] == value.shape[3] and query.shape[3] % 8 == 0
        if query.is_cuda and is_even:
            params = SDPAParams(query, key, value, None, 0.0, True, enable_gqa)
            if can_use_flash_attention(params):
                return self._by_kernel(query, key, value, scale)
        rows = zip(*(torch.split(one, self._lengths, 2) for one in (query, key, value)), strict=True)
        how = {"dropout_p": dropout_p, "is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        # Joined as kernels lay them out, [1, tokens, heads, head_dim], which models go on to ask for.
        return torch.cat([self._attend(*row, **how).transpose(1, 2) for row in rows], 1).transpose(1, 2)

    def _by_kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        if query.device not in self._ends:
            ends = torch.tensor([0, *accumulate(self._lengths)], dtype=torch.int32)
            self._ends[query.device] = ends.to(query.device)
        where = 2 * (self._ends[query.device],) + 2 * (max(self._lengths),)
        rows = (one[0].transpose(0, 1) for one in (query, key, value))
        out: torch.Tensor = _varlen_attention()(*rows, *where, scale=scale)
        return out.transpose(0, 1)[None]


@cache
def _varlen_attention() -> Callable[..., torch.Tensor]:
    """PyTorch's kernel for rows of several lengths, causal and for grouped heads, as each version of it is asked for that."""
    attend: Any = import_module("torch.nn.attention.varlen").varlen_attn  # which takes two seconds to import
    options = {"window_size": (-1, 0), "is_causal": True, "enable_gqa": True}
    return partial(attend, **{name: options[name] for name in signature(attend).parameters if name in options})


@contextmanager
def rows_apart(lengths: Sequence[int]) -> Iterator[PackedAttention]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is causal attention of each row of one sequence alone.

    Forward and backward both run inside, since activation checkpointing attends again in backward. A call costs time and
    memory in proportion to the sum of the squares of the lengths and to the sum of the lengths: in half precision on CUDA
    it is one of `torch.nn.attention.varlen`, and elsewhere, as with dropout, one of each row. On a CPU that took two
    thirds of the time of rows of like length padded together.

    The function is replaced in its module, where models look it up, and for all threads. A `TorchFunctionMode` added 2 to
    11% to small steps, and PyTorch switches modes off where a backward computes activations again.

    Args:
        lengths: tokens of each row, in their order in the sequence.
    """
    attend: Any = functional.scaled_dot_product_attention
    assert not isinstance(attend, PackedAttention), "rows are apart already"
    functional.scaled_dot_product_attention = packed = PackedAttention(lengths, attend)
    try:
        yield packed
    finally:
        functional.scaled_dot_product_attention = attend


def pack_rows(rows: Sequence[Row], *, ignore_index: int) -> Batch:
    """Return one batch of rows laid end to end, on the host.

    Args:
        rows: without padding; of ``tokens`` (torchtune) or ``input_ids`` (transformers), and ``labels``.
        ignore_index: the label of tokens that no loss is computed of.

    Returns:
        The tokens and ``labels``, both [1, tokens], and the positions within the rows, as ``input_pos`` or
        ``position_ids``. The first label of each row is ignored, so that after the shift by one no row predicts
        another's token. With ``input_ids`` there is an ``attention_mask`` of one element and four dimensions, for which
        transformers makes no mask of [tokens, tokens].
    """
    is_transformers = "tokens" not in rows[0]
    name = "input_ids" if is_transformers else "tokens"
    ids, labels = (
        torch.cat([torch.as_tensor(row[key], dtype=torch.int64) for row in rows]) for key in (name, "labels")
    )
    lengths = torch.tensor([len(row[name]) for row in rows])
    starts = lengths.cumsum(0) - lengths
    labels[starts] = ignore_index
    positions = torch.arange(len(ids)) - starts.repeat_interleave(lengths)
    batch = {name: ids, "labels": labels, "position_ids" if is_transformers else "input_pos": positions}
    mask = {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)} if is_transformers else {}
    return {key: value[None] for key, value in batch.items()} | mask
