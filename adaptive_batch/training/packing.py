"""Packed micro-batches: rows laid end to end in one sequence without padding, whose attention keeps
them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from adaptive_batch.memory import RandomState, estimated_attention

Row = Any
Batch = dict[str, Any]


class PackedAttention:
    """Causal attention of each row alone, in place of `scaled_dot_product_attention`; `calls`
    counts them, `dtype` is the last's.
    """

    def __init__(self, lengths: Sequence[int], attend: Callable[..., Tensor]) -> None:
        self.calls = 0
        self.dtype = torch.float32
        self._lengths = list(lengths)
        self._longest = max(lengths)
        self._attend = attend
        self._ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *given: Any, **how: Any
    ) -> Tensor:
        """Return ``[1, heads, tokens, head_dim]``, as the query is; raise ValueError where a tensor
        is of another shape.
        """
        tensors = (query, key, value)
        tokens = sum(self._lengths)
        if any(tensor.dim() != 4 or tensor.shape[::2] != (1, tokens) for tensor in tensors):
            raise ValueError(
                f"attention of {list(query.shape)} to {list(key.shape)} cannot keep packed rows of"
                f" {tokens} tokens in all apart; it can where both are [1, heads, tokens, head_dim]"
            )
        self.calls = self.calls + 1
        self.dtype = query.dtype
        how.update(zip(("attn_mask", "dropout_p"), given, strict=False))
        how.update(attn_mask=None, is_causal=True)
        is_even = (
            query.shape[3] == value.shape[3]
            and query.shape[3] % 8 == 0
            and not how.get("dropout_p")
        )
        if is_even:
            estimated = estimated_attention(*tensors, self._lengths)
            if estimated is not None:
                return estimated
        if (
            query.is_cuda
            and is_even
            and can_use_flash_attention(SDPAParams(*tensors, None, 0.0, True, True))
        ):
            self._ends = self._ends.to(query.device)
            flat = [tensor.squeeze(0).transpose(0, 1) for tensor in tensors]
            bounds = (self._ends, self._ends, self._longest, self._longest)
            output = _varlen_attention()(*flat, *bounds, scale=how.get("scale"))
            return output.transpose(0, 1)[None]
        rows = zip(*(torch.split(tensor, self._lengths, 2) for tensor in tensors), strict=True)
        outputs = [self._attend(*row, **how).transpose(1, 2) for row in rows]
        # Joined as [1, tokens, heads, head_dim], the layout that kernels return.
        return torch.cat(outputs, 1).transpose(1, 2)


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


@contextmanager
def rows_apart(lengths: Sequence[int]) -> Iterator[PackedAttention]:
    """Inside, `torch.nn.functional.scaled_dot_product_attention` is causal attention of each row of
    a sequence alone.

    `lengths` are the rows' tokens, in order. Forward and backward both run inside: with activation
    checkpointing, backward attends again. In half precision on CUDA a call is one of
    `torch.nn.attention.varlen`, whose backward takes 512 bytes for each row, head and element of a
    head, beside what it takes for tokens. Elsewhere, and with dropout, it is one call for each row,
    which on a CPU took seven to nine tenths of the time of rows of like length padded together.

    The function is replaced where models look it up, for all threads. A `TorchFunctionMode` would
    see every other function too, which made small steps 2 to 11% slower, and PyTorch switches it
    off where backward computes activations again.
    """
    attend: Any = functional.scaled_dot_product_attention
    assert not isinstance(attend, PackedAttention), "rows are apart already"
    packed: Any = PackedAttention(lengths, attend)
    functional.scaled_dot_product_attention = packed
    try:
        yield packed
    finally:
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
    name = _tokens_key(rows[0])
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


def _tokens_key(row: Row) -> str:
    return "tokens" if "tokens" in row else "input_ids"


def packed_lengths(batch: Batch) -> list[int]:
    """Return the tokens of each row of a batch that :func:`pack_rows` has made."""
    positions = batch["input_pos" if "input_pos" in batch else "position_ids"]
    begins = (positions[0] == 0).nonzero()[:, 0].tolist()
    ends = [*begins[1:], positions.shape[1]]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def why_not_packed(
    model: nn.Module,
    token_loss: Callable[[Batch], Tensor | float],
    rows: Sequence[Row],
    *,
    collate: Callable[[Sequence[Row], int], Batch],
    pack: Callable[[Sequence[Row]], Batch],
) -> str:
    """Return why packed rows would not train the model as single rows do; empty if they would.

    Five forward passes, in evaluation mode, compare the loss of two short rows, packed in both
    orders, with that of each alone. It may differ by a small share of the change that the rows'
    seeing each other would make, and by rounding. All else stays as it was.

    Args:
        model: called by `token_loss`, which returns the sum of the token losses of a batch that is
            on the host.
        rows: the two longest of the dataset, as for :func:`pack_rows`; their first tokens are used,
            all of them as labels.
        collate: makes an ordinary batch of rows, padded to a length.
        pack: makes a packed one.
    """
    name = _tokens_key(rows[0])
    longest = max(len(row[name]) for row in rows)
    window = _attention_window(model)
    if window is not None and window < longest:
        return (
            f"a layer sees {window} tokens, and packed it would see all {longest} of the longest"
            f" row: cut rows to {window}"
        )
    short_rows = [
        _first_tokens(row, name, tokens) for row, tokens in zip(rows, (5, 8), strict=False)
    ]
    lengths = [len(row[name]) for row in short_rows]
    training = [module for module in model.modules() if module.training]
    random_state = RandomState(next(model.parameters()).device)
    model.eval()
    try:
        with torch.no_grad():
            alone = sum(float(token_loss(collate([row], len(row[name])))) for row in short_rows)
            with rows_apart(lengths):
                packed = float(token_loss(pack(short_rows)))
            with rows_apart(lengths[::-1]):
                reversed_order = float(token_loss(pack(short_rows[::-1])))
            # As one row, in which the second row sees the first.
            with rows_apart([sum(lengths)]) as attention:
                mixed = float(token_loss(pack(short_rows)))
    except (TypeError, ValueError) as error:
        return f"it does not run on packed rows: {error}"
    finally:
        for module in training:
            module.training = True
        random_state.restore()
    if not attention.calls:
        return (
            "it does not attend by torch's scaled_dot_product_attention: load a model of"
            " transformers with attn_implementation='sdpa'"
        )
    allowed = _allowed_difference([packed, reversed_order, mixed], alone, attention.dtype)
    if abs(packed - alone) <= allowed and abs(reversed_order - alone) <= allowed:
        return ""
    positions = "input_pos" if name == "tokens" else "position_ids"
    return (
        f"the loss of two rows is {packed:.6g} packed, {reversed_order:.6g} in the other order and"
        f" {alone:.6g} alone: the model must be causal, use {positions}, and mix tokens by torch's"
        " scaled_dot_product_attention alone"
    )


def _attention_window(model: nn.Module) -> int | None:
    """Return the tokens that a layer of a transformers model sees; None where it sees all."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if set(getattr(config, "layer_types", None) or ()) == {"full_attention"}:
        return None
    sizes = (
        getattr(config, "sliding_window", None),
        getattr(config, "attention_chunk_size", None),
    )
    return min((size for size in sizes if size), default=None)


def _first_tokens(row: Row, name: str, tokens: int) -> dict[str, Any]:
    """Return the first tokens of a row, all of them labels."""
    short: dict[str, Any] = {}
    for key, value in row.items():
        has_tokens = isinstance(value, list | tuple) or getattr(value, "ndim", False)
        short[key] = value[:tokens] if has_tokens else value
    short["labels"] = row[name][:tokens]
    return short


def _allowed_difference(losses: Sequence[float], alone: float, dtype: torch.dtype) -> float:
    """Return by how much the loss of packed rows may differ from that of the rows alone.

    Args:
        losses: of the packed rows; the last of them as one row.
        alone: sum of the losses of the rows alone.
        dtype: that attention was computed in.
    """
    eps = torch.finfo(dtype).eps
    # float32 on CUDA may be multiplied in TF32, which rounds by 2**-10.
    allowed: float = max(eps, 2**-10) ** 0.5 * abs(losses[-1] - alone)
    exact = torch.tensor(losses, dtype=torch.float64)
    # Logits in the dtype of attention give losses that are rounded to it.
    is_rounded = exact.to(dtype).tolist() == list(losses)
    return allowed + (2 * eps * is_rounded + 2**-13) * abs(alone)
