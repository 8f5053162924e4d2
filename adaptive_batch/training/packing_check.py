"""Check before training that packed rows train a model like padded rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptive_batch import distributed
from adaptive_batch._util import replaced
from adaptive_batch.memory import RandomState, is_out_of_memory

from .model_checks import evaluation_mode
from .packing import Batch, Row, isolated_rows, not_causal, tokens_key
from .parts import is_table


class CheckedAttention:
    """`scaled_dot_product_attention` that checks the masks of a single row.

    Attributes:
        calls: number of calls.
        difference: description of the first mask that is not causal; empty if all are causal.
    """

    def __init__(self, num_tokens: int) -> None:
        self.calls = 0
        self.difference = ""
        self._num_tokens = num_tokens
        self._attend = functional.scaled_dot_product_attention

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        self.calls += 1
        if not self.difference:
            self.difference = not_causal(attn_mask, is_causal=is_causal, lengths=[self._num_tokens])
            num_keys = key.shape[-2]
            if num_keys != query.shape[-2]:
                self.difference = f"looks at {num_keys} keys with {query.shape[-2]} queries"
        return self._attend(query, key, value, attn_mask, dropout_p, is_causal, **options)


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
    longest = max(len(row[name]) for row in rows)
    window = _attention_window(model)
    if window is not None and window < longest:
        return (
            f"a layer attends to {window} tokens, but in packed rows to all {longest} of the"
            f" longest row: cut rows to {window} tokens"
        )
    short_rows = [
        _first_tokens(row, name, tokens) for row, tokens in zip(rows, (5, 8), strict=False)
    ]
    lengths = [len(row[name]) for row in short_rows]
    try:
        with (
            RandomState(next(model.parameters()).device),
            evaluation_mode(model),
            torch.no_grad(),
            # Compiled code does not call the replaced attention.
            torch.compiler.set_stance("force_eager"),
        ):
            for row in rows:
                whole_row = _first_tokens(row, name, longest)
                num_tokens = len(row[name])
                changed = _changed_by_collate(collate([row], num_tokens), pack([row]), name)
                if changed:
                    return (
                        f"collate changes the {changed} of the longest row, but packed rows are not"
                        " collated: change rows in the dataset"
                    )
                attention = CheckedAttention(num_tokens)
                with replaced(functional, scaled_dot_product_attention=attention):
                    token_loss(collate([whole_row], num_tokens))
                if attention.difference:
                    return f"attention {attention.difference}; packed rows are causal"
            if not attention.calls:
                return _unseen_attention(model)
            alone = sum(float(token_loss(collate([row], len(row[name])))) for row in short_rows)
            with isolated_rows(lengths):
                packed = float(token_loss(pack(short_rows)))
            with isolated_rows(lengths[::-1]):
                reversed_order = float(token_loss(pack(short_rows[::-1])))
            # Joined to one row, so that the second row attends to the first.
            with isolated_rows([sum(lengths)]) as joined:
                mixed = float(token_loss(pack(short_rows)))
    except (TypeError, ValueError) as error:
        return f"it does not run on packed rows: {error}"
    except Exception as error:
        # Other ranks would wait for this one.
        if distributed.world_size() > 1 or not is_out_of_memory(error):
            raise
        return f"memory ran out in the check of its attention: {error}"
    allowed = _allowed_difference([packed, reversed_order, mixed], alone, joined.dtype)
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
    for key, begin in ((name, 0), ("labels", 1)):
        value = collated.get(key) if isinstance(collated, Mapping) else None
        if not is_table(value) or len(value) != 1:
            return ""
        expected = packed[key][0]
        if not torch.equal(value[0, begin : len(expected)].to(expected), expected[begin:]):
            return key
    return ""


def _unseen_attention(model: nn.Module) -> str:
    """Return the problem of a model whose attention cannot be replaced, and the fix."""
    problem = "it does not call torch.nn.functional.scaled_dot_product_attention"
    if hasattr(model, "config"):
        return f"{problem}: load it with attn_implementation='sdpa'"
    return (
        f"{problem}: its own attention, flex_attention, or a function that was imported by name"
        " cannot isolate packed rows"
    )


def _attention_window(model: nn.Module) -> int | None:
    """Return the number of tokens that a layer of a transformers model attends to; None for all."""
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
    """Return the first tokens of a row, with all of them as labels."""
    short: dict[str, Any] = {}
    for key, value in row.items():
        has_tokens = isinstance(value, list | tuple) or getattr(value, "ndim", False)
        short[key] = value[:tokens] if has_tokens else value
    short["labels"] = row[name][:tokens]
    return short


def _allowed_difference(losses: Sequence[float], alone: float, dtype: torch.dtype) -> float:
    """Return the allowed difference between the loss of packed rows and that of the rows alone.

    Args:
        losses: losses of the packed rows; the last one with the rows joined to one row.
        alone: sum of the losses of the rows alone.
        dtype: dtype of attention.
    """
    eps = torch.finfo(dtype).eps
    # CUDA may multiply float32 in TF32, which rounds by 2**-10.
    allowed: float = max(eps, 2**-10) ** 0.5 * abs(losses[-1] - alone)
    exact = torch.tensor(losses, dtype=torch.float64)
    # Losses are rounded if the logits have the dtype of attention.
    is_rounded = exact.to(dtype).tolist() == list(losses)
    return allowed + (2 * eps * is_rounded + 2**-13) * abs(alone)
