"""Packed micro-batches: rows concatenated without padding, with attention within each row, and the
check before training that they train a model like padded rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from adaptive_batch import distributed, memory
from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import one_thread
from adaptive_batch.distributed import reshard
from adaptive_batch.memory import RandomState, is_out_of_memory

from .model_checks import evaluation_mode
from .parts import is_table

private = PrivateNames("packed rows")

# Limits of CUDA's kernel for rows of several lengths.
_MAX_FLASH_HEAD_DIM = 256
_MIN_FLASH_CAPABILITY = 8

Row = Any
Batch = dict[str, Any]


class PackedAttention:
    """Causal attention within each row, in place of `scaled_dot_product_attention`.

    Args:
        lengths: tokens of each row, in order.
        attend: attention of one row.

    Attributes:
        calls: number of calls, without those of compiled code.
        dtype: dtype of the last query.
        cu_seqlens: cumulative lengths of the rows from 0: int32 `[rows + 1]` on the host.
    """

    def __init__(self, lengths: Sequence[int], attend: Callable[..., Tensor]) -> None:
        self.calls = 0
        self.dtype = torch.float32
        self._lengths = list(lengths)
        self._attend = attend
        self.cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        # Copy of `cu_seqlens` on the device of the last call.
        self._device_cu_seqlens: Tensor | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
    ) -> Tensor:
        """Return ``[1, heads, tokens, head_dim]``, the shape of the query.

        Raises:
            ValueError: a tensor has another shape, or the mask is not causal within each row.
        """
        tensors = (query, key, value)
        tokens = sum(self._lengths)
        # The first and the third dimension of [1, heads, tokens, head_dim].
        if any(tensor.dim() != 4 or tensor.shape[::2] != (1, tokens) for tensor in tensors):
            raise ValueError(
                f"attention of {list(query.shape)} to {list(key.shape)} cannot isolate packed rows"
                f" of {tokens} tokens; both shapes must be [1, heads, tokens, head_dim]"
            )
        options.update(zip(("attn_mask", "dropout_p", "is_causal"), arguments, strict=False))
        self._check_mask(options.get("attn_mask"), is_causal=options.get("is_causal", False))
        self.calls += 1
        self.dtype = query.dtype
        options.update(attn_mask=None, is_causal=True)
        suits_kernel = (
            query.shape[3] == value.shape[3]
            and query.shape[3] % 8 == 0
            and not options.get("dropout_p")
        )
        if suits_kernel:
            # Within a memory estimate, the kernel of the estimated device is simulated.
            estimated = memory.estimated_attention(*tensors, self._lengths, self._device_cu_seqlens)
            if estimated is not None:
                output, self._device_cu_seqlens = estimated
                return output
            if query.is_cuda and can_use_flash_attention(
                SDPAParams(*tensors, None, 0.0, True, True)
            ):
                return self._attend_in_one_kernel(*tensors, scale=options.get("scale"))
        rows = zip(*(torch.split(tensor, self._lengths, 2) for tensor in tensors), strict=True)
        outputs = [self._attend(*row, **options).transpose(1, 2) for row in rows]
        # Joined as [1, tokens, heads, head_dim], the layout that kernels return.
        return torch.cat(outputs, 1).transpose(1, 2)

    def _check_mask(self, mask: Tensor | None, *, is_causal: bool) -> None:
        """Raise if a mask is not causal within each row."""
        # `pack_rows` gives a mask of one element; a fake mask has no values to check.
        if mask is not None and (mask.numel() == 1 or isinstance(mask, private.FakeTensor)):
            return
        difference = not_causal(mask, is_causal=is_causal, lengths=self._lengths)
        if difference:
            raise ValueError(
                f"attention {difference}, and that of packed rows is causal; set"
                " micro_batch_layout=grouped"
            )

    def _attend_in_one_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None
    ) -> Tensor:
        # Layers may be on several devices.
        cu_seqlens = self._device_cu_seqlens
        if cu_seqlens is None or cu_seqlens.device != query.device:
            cu_seqlens = self._device_cu_seqlens = self.cu_seqlens.to(query.device)
        # The kernel takes [tokens, heads, head_dim], and the ends of queries and of keys.
        flat = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
        longest = max(self._lengths)
        output = _varlen_attention()(*flat, cu_seqlens, cu_seqlens, longest, longest, scale=scale)
        return output.transpose(0, 1)[None]


def not_causal(mask: Tensor | None, *, lengths: Sequence[int], is_causal: bool = False) -> str:
    """Describe the difference between attention within rows and causal attention; empty without
    one.

    Args:
        mask: mask of `scaled_dot_product_attention`, a bool tensor or a bias that broadcasts to
            `[..., tokens, tokens]`; None for no mask.
        lengths: tokens of each row of the sequence. Attention between rows is not compared.
        is_causal: argument of the same function.
    """
    if max(lengths) == 1:
        return ""
    if mask is None:
        return "" if is_causal else "lets tokens see later ones"
    tokens = sum(lengths)
    if any(size not in (1, tokens) for size in mask.shape[-2:]):
        return f"has a mask of {list(mask.shape[-2:])} for {tokens} tokens"
    row_of_token = torch.repeat_interleave(torch.tensor(lengths)).to(mask.device)
    is_same_row = row_of_token[:, None] == row_of_token
    is_seen = mask
    if mask.dtype != torch.bool:
        # The mask is a bias that is added to the scores. One below -1e4 hides a token, since it is
        # zero after softmax.
        is_seen = mask == 0
        is_hidden = mask < -1e4
        if bool((~(is_seen | is_hidden) & is_same_row).any()):
            return "adds a bias to the scores"
    is_seen_if_causal = torch.ones_like(is_same_row).tril()
    if bool(((is_seen != is_seen_if_causal) & is_same_row).any()):
        return "lets a token of a row see other tokens than all up to itself"
    return ""


@cache
def _varlen_attention() -> Callable[..., Tensor]:
    """Return PyTorch's kernel for rows of several lengths, with the arguments for causal attention
    and grouped heads that this version of PyTorch has.
    """
    # Imported here, since the import takes two seconds.
    attend: Any = import_module("torch.nn.attention.varlen").varlen_attn
    # Versions differ in the arguments; (-1, 0) is the window of all earlier tokens.
    options = {"window_size": (-1, 0), "is_causal": True, "enable_gqa": True}
    known_options = {
        name: options[name] for name in signature(attend).parameters if name in options
    }
    return partial(attend, **known_options)


# Attention inside of `isolated_rows`; empty outside of it.
_active: list[PackedAttention] = []
# Its `cu_seqlens`. A compiled graph has this tensor as an input, so that new values do not
# recompile it.
_active_cu_seqlens = torch.zeros(2, dtype=torch.int32)
# Runs `_attend_eagerly` outside of the compiled graph.
_attend_without_compiler: Callable[..., Tensor]
_without_compiler = cache(torch.compiler.disable)


def _attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return causal attention within each row, in place of `scaled_dot_product_attention`.

    All batches use this one function, since another function would recompile the graph.
    """
    if not torch.compiler.is_compiling():
        return _active[0](query, key, value, *arguments, **options)
    if _operator_takes(query, key, value, *arguments, **options):
        if not query.is_cuda and key.shape[1] != query.shape[1]:
            # On a CPU the operator needs a head of keys and values for each head of queries.
            repeats = query.shape[1] // key.shape[1]
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        # The compiler fuses these copies with the operations that produced the tensors.
        flat = [tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value)]
        output: Tensor = memory.packed_attention(*flat, _active_cu_seqlens, options.get("scale"))[0]
        return output.transpose(0, 1)[None]
    return _attend_without_compiler(query, key, value, *arguments, **options)


def _attend_eagerly(*arguments: Any, **options: Any) -> Tensor:
    return _active[0](*arguments, **options)


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
    """Return whether the operator for compiled graphs supports these arguments. Other calls break
    the graph.
    """
    tensors = (query, key, value)
    is_one_sequence = all(tensor.dim() == 4 and tensor.shape[0] == 1 for tensor in tensors)
    has_no_mask = is_causal if attn_mask is None else attn_mask.numel() == 1
    if not is_one_sequence or not has_no_mask or dropout_p:
        return False
    head_dim = query.shape[3]
    has_one_head_dim = key.shape[3] == head_dim == value.shape[3]
    has_one_dtype = key.dtype == query.dtype == value.dtype
    heads_match = enable_gqa or key.shape[1] == query.shape[1] == value.shape[1]
    if not has_one_head_dim or not has_one_dtype or not heads_match:
        return False
    if torch.is_autocast_enabled(query.device.type):
        return False
    if query.is_cuda:
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        takes_head_dim = head_dim % 8 == 0 and head_dim <= _MAX_FLASH_HEAD_DIM
        major = torch.cuda.get_device_properties(query.device).major
        return is_half and takes_head_dim and major >= _MIN_FLASH_CAPABILITY
    return query.device.type == "cpu"


@contextmanager
def isolated_rows(lengths: Sequence[int]) -> Iterator[PackedAttention]:
    """Context manager: replace `torch.nn.functional.scaled_dot_product_attention` with causal
    attention within each row of a packed sequence.

    Run forward and backward inside, since activation checkpointing runs attention again in
    backward.
    Compiled code calls one operator, whose graph does not depend on the rows. In half precision on
    CUDA, a call runs one kernel of `torch.nn.attention.varlen`, whose backward needs 512 bytes for
    each row, head and element of a head in addition to the memory of the tokens. Elsewhere, and
    with dropout, each row is one call; on a CPU this took 70 to 90% of the time of padded rows of
    similar length.

    The function is replaced for all threads. A `TorchFunctionMode` would intercept every function,
    which made small steps 2 to 11% slower, and PyTorch disables it while backward recomputes
    activations.

    Args:
        lengths: tokens of each row, in order.

    Yields:
        The attention of these rows.
    """
    global _active_cu_seqlens, _attend_without_compiler
    with one_thread:
        assert not _active, "isolated_rows cannot be nested"
        attend: Any = functional.scaled_dot_product_attention
        packed = PackedAttention(lengths, attend)
        functional.scaled_dot_product_attention = cast(Any, _attend)
        _active.append(packed)
        _active_cu_seqlens = packed.cu_seqlens
        _attend_without_compiler = _attend_eagerly
        # `torch.compiler.disable` imports the compiler, which takes more than a second.
        if "torch._dynamo" in sys.modules:
            _attend_without_compiler = _without_compiler(_attend_eagerly)
        try:
            yield packed
        finally:
            _active.clear()
            functional.scaled_dot_product_attention = attend


def pack_rows(rows: Sequence[Row], *, ignore_index: int) -> Batch:
    """Concatenate rows into one batch on the host.

    Args:
        rows: rows without padding, with ``labels`` and ``tokens`` (torchtune) or ``input_ids``
            (transformers).
        ignore_index: label without a loss. The first label of each row becomes `ignore_index`, so
            that no row predicts a token of the next row.

    Returns:
        The keys of the rows, and positions within rows as ``input_pos`` or ``position_ids``: all
        ``[1, tokens]``. For transformers also an ``attention_mask`` `[1, 1, 1, 1]`, without which
        transformers builds a mask `[1, 1, tokens, tokens]`.
    """
    name = tokens_key(rows[0])
    tokens = torch.cat([torch.as_tensor(row[name]).long() for row in rows])
    labels = torch.cat([torch.as_tensor(row["labels"]).long() for row in rows])
    positions = torch.cat([torch.arange(len(row[name])) for row in rows])
    labels = labels.masked_fill(positions == 0, ignore_index)
    batch = {name: tokens[None], "labels": labels[None]}
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
    """Return the tokens of each row of a batch from :func:`pack_rows`."""
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
    """Return the reason why packed rows would train the model differently from padded rows; empty
    if they would not. Random numbers and the training mode are restored.

    Packed rows are not collated, so `collate` must not change the tokens and labels of the longest
    rows. Attention must be causal in forward passes of whole rows. Five more forward passes compare
    the loss of two short rows: each alone, packed, packed in the other order, and joined to one
    row. The first three losses may differ by rounding, and by a small share of the difference to
    the last one. All passes run in evaluation mode.

    Args:
        model: model that `token_loss` calls.
        token_loss: function that returns the sum of the token losses of a batch on the host.
        rows: the two longest rows of the dataset, as for :func:`pack_rows`. All of their tokens are
            used as labels.
        collate: function that makes an ordinary batch of rows, padded to a length.
        pack: function that makes a packed batch.
    """
    name = tokens_key(rows[0])
    short_rows = [
        _first_tokens(row, name, tokens) for row, tokens in zip(rows, (5, 8), strict=False)
    ]
    try:
        with (
            RandomState(next(model.parameters()).device),
            evaluation_mode(model),
            torch.no_grad(),
            # Compiled code does not call the replaced attention.
            torch.compiler.set_stance("force_eager"),
        ):
            return _problem_of_whole_rows(
                model, token_loss, rows, collate=collate, pack=pack
            ) or _problem_of_two_rows(token_loss, short_rows, collate=collate, pack=pack)
    except (TypeError, ValueError) as error:
        reshard(model)
        return f"it does not run on packed rows: {error}"
    except Exception as error:
        # On several ranks, the others would wait for this one.
        if distributed.world_size() > 1 or not is_out_of_memory(error):
            raise
        return f"memory ran out in the check of its attention: {error}"


def _problem_of_whole_rows(
    model: nn.Module,
    token_loss: Callable[[Batch], Tensor | float],
    rows: Sequence[Row],
    *,
    collate: Callable[[Sequence[Row], int], Batch],
    pack: Callable[[Sequence[Row]], Batch],
) -> str:
    """Return the reason why the longest rows cannot be packed; empty without one. Arguments as in
    :func:`why_not_packed`.

    Raises:
        ValueError: attention is not causal.
    """
    name = tokens_key(rows[0])
    longest = max(len(row[name]) for row in rows)
    for row in rows:
        num_tokens = len(row[name])
        changed = _changed_by_collate(collate([row], num_tokens), pack([row]), name)
        if changed:
            return (
                f"collate changes the {changed} of the longest row, but packed rows are not"
                " collated: change rows in the dataset"
            )
        batch = collate([_first_tokens(row, name, longest)], num_tokens)
        if isinstance(batch, Mapping) and is_table(batch.get(name)):
            # Collated rows may be padded.
            num_tokens = batch[name].shape[1]
        with isolated_rows([num_tokens]) as attention:
            token_loss(batch)
    if attention.calls:
        return ""
    remedy = (
        "its own attention, flex_attention, or a function that was imported by name cannot isolate"
        " packed rows"
    )
    if hasattr(model, "config"):
        remedy = "load it with attn_implementation='sdpa'"
    return f"it does not call torch.nn.functional.scaled_dot_product_attention: {remedy}"


def _problem_of_two_rows(
    token_loss: Callable[[Batch], Tensor | float],
    short_rows: Sequence[Row],
    *,
    collate: Callable[[Sequence[Row], int], Batch],
    pack: Callable[[Sequence[Row]], Batch],
) -> str:
    """Return the difference between the loss of two short rows packed and alone; empty if they
    differ by rounding only. Other arguments as in :func:`why_not_packed`.
    """
    name = tokens_key(short_rows[0])
    lengths = [len(row[name]) for row in short_rows]
    alone = sum(float(token_loss(collate([row], len(row[name])))) for row in short_rows)
    with isolated_rows(lengths):
        packed = float(token_loss(pack(short_rows)))
    with isolated_rows(lengths[::-1]):
        reversed_order = float(token_loss(pack(short_rows[::-1])))
    # Joined to one row, so that the second row attends to the first: the tolerance must stay below
    # the difference that this makes.
    with isolated_rows([sum(lengths)]) as attention:
        mixed = float(token_loss(pack(short_rows)))
    allowed = _allowed_difference([packed, reversed_order, mixed], alone, attention.dtype)
    if abs(packed - alone) <= allowed and abs(reversed_order - alone) <= allowed:
        return ""
    if abs(packed - reversed_order) <= allowed:
        # Rows are isolated, but the loss differs.
        return (
            f"the loss of two rows is {packed:.6g} packed, in either order, and {alone:.6g} alone:"
            " labels must not be shifted before the loss shifts them, and num_labels must count"
            " what the loss averages over"
        )
    positions = "input_pos" if name == "tokens" else "position_ids"
    return (
        f"the loss of two rows is {packed:.6g} packed, {reversed_order:.6g} in the other order and"
        f" {alone:.6g} alone: the model must be causal, use {positions}, and mix tokens by torch's"
        " scaled_dot_product_attention alone"
    )


def _changed_by_collate(collated: Batch, packed: Batch, name: str) -> str:
    """Return the key of a row whose values `collate` changes; empty without one, or if the collated
    batch has another form.

    Args:
        collated: batch of the row alone, perhaps padded.
        packed: packed batch of the same row.
        name: key of the row's tokens.
    """
    # The first label has no loss, so the batches may differ in it.
    for key, first in ((name, 0), ("labels", 1)):
        value = collated.get(key) if isinstance(collated, Mapping) else None
        if not is_table(value) or len(value) != 1:
            return ""
        expected = packed[key][0]
        # Leave out padding at the end of the collated row.
        unpadded = value[0, : len(expected)].to(expected)
        if not torch.equal(unpadded[first:], expected[first:]):
            return key
    return ""


def _first_tokens(row: Row, name: str, tokens: int) -> dict[str, Any]:
    """Return the first tokens of a row, with all of them as labels."""
    cut: dict[str, Any] = {}
    for key, value in row.items():
        is_sequence = isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0
        cut[key] = value[:tokens] if is_sequence else value
    cut["labels"] = row[name][:tokens]
    return cut


def _allowed_difference(losses: Sequence[float], alone: float, dtype: torch.dtype) -> float:
    """Return the allowed difference between the loss of packed rows and that of the rows alone.

    Args:
        losses: losses of the packed rows; the last one with the rows joined to one row.
        alone: sum of the losses of the rows alone.
        dtype: dtype of attention.
    """
    eps = torch.finfo(dtype).eps
    effect_of_mixing = abs(losses[-1] - alone)
    # CUDA may multiply float32 in TF32, which rounds by 2**-10.
    allowed: float = max(eps, 2**-10) ** 0.5 * effect_of_mixing
    relative = 2**-13
    # Losses are rounded if the logits have the dtype of attention.
    in_dtype = torch.tensor(losses, dtype=torch.float64).to(dtype).tolist()
    if in_dtype == list(losses):
        relative += 2 * eps
    return allowed + relative * abs(alone)
