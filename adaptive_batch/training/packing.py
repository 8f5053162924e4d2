"""Packed micro-batches: rows laid end to end in one sequence without padding, whose attention keeps
them apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from adaptive_batch import memory
from adaptive_batch._torch import PrivateNames

private = PrivateNames("packed rows")

# What CUDA's kernel for rows of several lengths takes: elements of a head, and the major version of
# the first architecture.
_MOST_OF_FLASH = 256
_FIRST_OF_FLASH = 8

Row = Any
Batch = dict[str, Any]


class PackedAttention:
    """Causal attention of each row alone, in place of `scaled_dot_product_attention`.

    Args:
        lengths: tokens of each row, in order.
        attend: function that attends to a row alone.

    Attributes:
        calls: how often it was called, but for calls of compiled code.
        dtype: of the last call.
        ends: 0, then the token after each row, int32 on the host.
    """

    def __init__(self, lengths: Sequence[int], attend: Callable[..., Tensor]) -> None:
        self.calls = 0
        self.dtype = torch.float32
        self._lengths = list(lengths)
        self._longest = max(lengths)
        self._attend = attend
        self.ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        # Copied by the first call on a device, and kept for the next ones there.
        self._device_ends: Tensor | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *given: Any, **how: Any
    ) -> Tensor:
        """Return ``[1, heads, tokens, head_dim]``, as the query is.

        Raises:
            ValueError: a tensor is of another shape, or a mask hides other tokens than the later
                ones and those of other rows.
        """
        tensors = (query, key, value)
        tokens = sum(self._lengths)
        if any(tensor.dim() != 4 or tensor.shape[::2] != (1, tokens) for tensor in tensors):
            raise ValueError(
                f"attention of {list(query.shape)} to {list(key.shape)} cannot keep packed rows of"
                f" {tokens} tokens in all apart; it can where both are [1, heads, tokens, head_dim]"
            )
        how.update(zip(("attn_mask", "dropout_p", "is_causal"), given, strict=False))
        self._check_mask(how.get("attn_mask"), is_causal=how.get("is_causal", False))
        self.calls = self.calls + 1
        self.dtype = query.dtype
        how.update(attn_mask=None, is_causal=True)
        is_even = (
            query.shape[3] == value.shape[3]
            and query.shape[3] % 8 == 0
            and not how.get("dropout_p")
        )
        if is_even:
            estimated = memory.estimated_attention(*tensors, self._lengths, self._device_ends)
            if estimated is not None:
                output, self._device_ends = estimated
                return output
        if (
            query.is_cuda
            and is_even
            and can_use_flash_attention(SDPAParams(*tensors, None, 0.0, True, True))
        ):
            # Layers may be on several devices.
            if self._device_ends is None or self._device_ends.device != query.device:
                self._device_ends = self.ends.to(query.device)
            flat = [tensor.squeeze(0).transpose(0, 1) for tensor in tensors]
            bounds = (self._device_ends, self._device_ends, self._longest, self._longest)
            output = _varlen_attention()(*flat, *bounds, scale=how.get("scale"))
            return output.transpose(0, 1)[None]
        rows = zip(*(torch.split(tensor, self._lengths, 2) for tensor in tensors), strict=True)
        outputs = [self._attend(*row, **how).transpose(1, 2) for row in rows]
        # Joined as [1, tokens, heads, head_dim], the layout that kernels return.
        return torch.cat(outputs, 1).transpose(1, 2)

    def _check_mask(self, mask: Tensor | None, *, is_causal: bool) -> None:
        """Refuse a mask whose meaning would be lost: what a token sees may depend on its row."""
        # The mask of one element is what `pack_rows` gives; a fake one has no values.
        if mask is not None and (mask.numel() == 1 or isinstance(mask, private.FakeTensor)):
            return
        difference = not_causal(mask, is_causal=is_causal, lengths=self._lengths)
        if difference:
            raise ValueError(
                f"attention {difference}, and that of packed rows is causal; set"
                " micro_batch_layout=grouped"
            )


def not_causal(mask: Tensor | None, *, lengths: Sequence[int], is_causal: bool = False) -> str:
    """Return how attention within rows differs from causal attention; empty where it does not.

    Args:
        mask: mask as `scaled_dot_product_attention` takes it, of `[..., tokens, tokens]` or what
            broadcasts to that: bool, or a bias.
        lengths: tokens of each row, laid end to end. What tokens see of other rows is not looked
            at.
        is_causal: flag of the same function.
    """
    if max(lengths) == 1:
        return ""
    if mask is None:
        return "" if is_causal else "lets tokens see later ones"
    tokens = sum(lengths)
    if any(size not in (1, tokens) for size in mask.shape[-2:]):
        return f"has a mask of {list(mask.shape[-2:])} for {tokens} tokens"
    row = torch.repeat_interleave(torch.tensor(lengths)).to(mask.device)
    is_same_row = row[:, None] == row
    seen = mask
    if mask.dtype != torch.bool:
        seen = mask == 0
        # Far below any score: after softmax nothing is left of it.
        is_bias = ~(seen | (mask < -1e4)) & is_same_row
        if bool(is_bias.any()):
            return "adds a bias to the scores"
    differs = ((seen != torch.ones_like(is_same_row).tril()) & is_same_row).view(-1, tokens, tokens)
    if not bool(differs.any()):
        return ""
    number, token, _ = differs.nonzero()[0].tolist()
    all_seen = (seen & is_same_row).view(-1, tokens, tokens)
    num_seen = int(all_seen[number, token].sum())
    place = token - int((row < row[token]).sum())
    return f"lets token {place} of a row see {num_seen} tokens and not all {place + 1} up to itself"


@cache
def _varlen_attention() -> Callable[..., Tensor]:
    """PyTorch's kernel for rows of several lengths, as its version is asked for causal attention
    and grouped heads.
    """
    # Imported here, since the import takes two seconds.
    attend: Any = import_module("torch.nn.attention.varlen").varlen_attn
    options = {"window_size": (-1, 0), "is_causal": True, "enable_gqa": True}
    return partial(
        attend, **{name: options[name] for name in signature(attend).parameters if name in options}
    )


# The rows that are kept apart now; at most one, as the function that looks here is one for all.
_rows_of_now: list[PackedAttention] = []
# The ends of these rows. Compiled code takes it as an argument, whatever tensor it is.
_ends_of_now = torch.zeros(2, dtype=torch.int32)
# Attends outside of compiled code. It is one function, as code is compiled again for another one.
_attend_without_compiler: Callable[..., Tensor]
_without_compiler = cache(torch.compiler.disable)


def _attend(query: Tensor, key: Tensor, value: Tensor, *given: Any, **how: Any) -> Tensor:
    """Return causal attention of each row alone, in place of `scaled_dot_product_attention`.

    It is one function for all rows, as code is compiled again for another one.
    """
    if not torch.compiler.is_compiling():
        return _rows_of_now[0](query, key, value, *given, **how)
    if _operator_takes(query, key, value, *given, **how):
        tensors = [query, key, value]
        if not query.is_cuda and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            tensors[1:] = [tensor.repeat_interleave(repeats, 1) for tensor in tensors[1:]]
        # Whatever is copied here is one kernel with what made it.
        flat = [tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in tensors]
        output: Tensor = memory.packed_attention(*flat, _ends_of_now, how.get("scale"))[0]
        return output.transpose(0, 1)[None]
    attended: Tensor = _attend_without_compiler(query, key, value, *given, **how)
    return attended


def _attend_eagerly(*tensors: Tensor, **how: Any) -> Tensor:
    return _rows_of_now[0](*tensors, **how)


def _operator_takes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Return whether a compiled program attends by one operator; other calls leave it, which parts
    its graph.
    """
    tensors = (query, key, value)
    is_of_rows = all(tensor.dim() == 4 and tensor.shape[0] == 1 for tensor in tensors)
    has_no_mask = is_causal if attn_mask is None else attn_mask.numel() == 1
    if not is_of_rows or not has_no_mask or dropout_p:
        return False
    head_dim = query.shape[3]
    is_even = key.shape[3] == head_dim == value.shape[3]
    is_alike = key.dtype == query.dtype == value.dtype
    has_heads = enable_gqa or key.shape[1] == query.shape[1] == value.shape[1]
    if not is_even or not is_alike or not has_heads:
        return False
    if torch.is_autocast_enabled(query.device.type):
        return False
    if query.is_cuda:
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        takes_heads = head_dim % 8 == 0 and head_dim <= _MOST_OF_FLASH
        major = torch.cuda.get_device_properties(query.device).major
        return is_half and takes_heads and major >= _FIRST_OF_FLASH
    return query.device.type == "cpu"


@contextmanager
def isolated_rows(lengths: Sequence[int]) -> Iterator[PackedAttention]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is causal attention of each row of
    a sequence alone. Compiled code calls one operator for that, whose graph does not depend on
    the rows.

    `lengths` are the rows' tokens, in order. Forward and backward both run inside: with activation
    checkpointing, backward attends again. In half precision on CUDA a call is one of
    `torch.nn.attention.varlen`, whose backward takes 512 bytes for each row, head and element of a
    head, beside what it takes for tokens. Elsewhere, and with dropout, it is one call for each row,
    which on a CPU took seven to nine tenths of the time of rows of like length padded together.

    The function is replaced where models look it up, for all threads. A `TorchFunctionMode` would
    see every other function too, which made small steps 2 to 11% slower, and PyTorch switches it
    off where backward computes activations again.
    """
    global _attend_without_compiler, _ends_of_now
    assert not _rows_of_now, "rows are apart already"
    attend: Any = functional.scaled_dot_product_attention
    packed = PackedAttention(lengths, attend)
    functional.scaled_dot_product_attention = cast(Any, _attend)
    _rows_of_now.append(packed)
    _ends_of_now = packed.ends
    _attend_without_compiler = _attend_eagerly
    # `torch.compiler.disable` imports the compiler, which takes more than a second.
    if "torch._dynamo" in sys.modules:
        _attend_without_compiler = _without_compiler(_attend_eagerly)
    try:
        yield packed
    finally:
        _rows_of_now.clear()
        functional.scaled_dot_product_attention = attend


def pack_rows(rows: Sequence[Row], *, ignore_index: int) -> Batch:
    """Return one batch of rows laid end to end, on the host.

    Args:
        rows: without padding, of ``labels`` and ``tokens`` (torchtune) or ``input_ids``
            (transformers).
        ignore_index: the label without a loss. A row's first becomes it: shifted by one, no row
            predicts another's token.

    Returns:
        What rows have, and positions in the rows as ``input_pos`` or ``position_ids``: all ``[1,
        tokens]``. For transformers also an ``attention_mask`` of four dimensions and one element,
        in whose place it would make one of tokens by tokens.
    """
    name = tokens_key(rows[0])
    ids, labels = (
        torch.cat([torch.as_tensor(row[key]).long() for row in rows]) for key in (name, "labels")
    )
    positions = torch.cat([torch.arange(len(row[name])) for row in rows])
    batch = {name: ids[None], "labels": labels.masked_fill(positions == 0, ignore_index)[None]}
    if name == "tokens":
        return batch | {"input_pos": positions[None]}
    return batch | {
        "position_ids": positions[None],
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    }


def tokens_key(row: Row) -> str:
    """Return the key of a row's tokens."""
    return "tokens" if "tokens" in row else "input_ids"


def packed_lengths(batch: Batch) -> list[int]:
    """Return the tokens of each row of a batch that :func:`pack_rows` has made."""
    positions = batch["input_pos" if "input_pos" in batch else "position_ids"]
    begins = (positions[0] == 0).nonzero()[:, 0].tolist()
    ends = [*begins[1:], positions.shape[1]]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]
