"""Check before training that packed rows train a model as single rows do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from adaptive_batch import distributed
from adaptive_batch._util import replaced
from adaptive_batch.memory import RandomState, is_out_of_memory

from .model_checks import evaluation_mode
from .packing import Batch, Row, isolated_rows, not_causal, tokens_key


class WatchedAttention:
    """`scaled_dot_product_attention` that checks the masks of a single row.

    Attributes:
        calls: number of calls.
        difference: description of the first mask that is not causal, with the module that gave it;
            empty if all masks are causal.
    """

    def __init__(self, num_tokens: int, attend: Callable[..., Tensor]) -> None:
        self.calls = 0
        self.difference = ""
        self._num_tokens = num_tokens
        self._attend = attend
        # Names of the running modules, outermost first.
        self._running: list[str] = []

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
            difference = not_causal(attn_mask, is_causal=is_causal, lengths=[self._num_tokens])
            num_keys = key.shape[-2]
            if num_keys != query.shape[-2]:
                difference = f"looks at {num_keys} keys with {query.shape[-2]} queries"
            if difference:
                self.difference = f"{self._running[-1] or 'the model'} {difference}"
        return self._attend(query, key, value, attn_mask, dropout_p, is_causal, **options)

    @contextmanager
    def names_of(self, model: nn.Module) -> Iterator[None]:
        """Context manager: track the names of the modules that run."""

        def enter(name: str, *_: Any) -> None:
            self._running.append(name)

        def leave(*_: Any) -> None:
            self._running.pop()

        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            yield


@contextmanager
def _watching(model: nn.Module, num_tokens: int) -> Iterator[WatchedAttention]:
    """Context manager: check attention in forwards of a single row of `num_tokens` tokens."""
    watched = WatchedAttention(num_tokens, functional.scaled_dot_product_attention)
    with replaced(functional, scaled_dot_product_attention=watched), watched.names_of(model):
        yield watched


def why_not_packed(
    model: nn.Module,
    token_loss: Callable[[Batch], Tensor | float],
    rows: Sequence[Row],
    *,
    collate: Callable[[Sequence[Row], int], Batch],
    pack: Callable[[Sequence[Row]], Batch],
) -> str:
    """Return why packed rows would not train the model as single rows do; empty if they would.

    Packed rows are not collated: `collate` must leave tokens and labels of the longest rows as they
    are. All passes are forward alone, in evaluation mode. The masks that reach attention are looked
    at with whole rows, and must be causal. Five passes compare the loss of two short rows, packed
    in both orders, with that of each alone. It may differ by a small share of the change that the
    rows' seeing each other would make, and by rounding. All else stays as it was.

    Args:
        model: called by `token_loss`, which returns the sum of the token losses of a batch that is
            on the host.
        rows: the two longest of the dataset, as for :func:`pack_rows`, all of whose tokens are
            used as labels.
        collate: makes an ordinary batch of rows, padded to a length.
        pack: makes a packed one.
    """
    name = tokens_key(rows[0])
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
    try:
        with (
            RandomState(next(model.parameters()).device),
            evaluation_mode(model),
            torch.no_grad(),
            # Compiled code does not call what is watched.
            torch.compiler.set_stance("force_eager"),
        ):
            for row in rows:
                whole_row = _first_tokens(row, name, longest)
                num_tokens = len(row[name])
                changed = _changed_by_collate(collate([row], num_tokens), pack([row]), name)
                if changed:
                    return (
                        f"collate changes the {changed} of the longest row, and packed rows are"
                        " laid end to end without it: change rows in the dataset"
                    )
                with _watching(model, num_tokens) as watched:
                    token_loss(collate([whole_row], num_tokens))
                if watched.difference:
                    return f"attention in {watched.difference}, and that of packed rows is causal"
            if not watched.calls:
                return _unseen_attention(model)
            alone = sum(float(token_loss(collate([row], len(row[name])))) for row in short_rows)
            with isolated_rows(lengths):
                packed = float(token_loss(pack(short_rows)))
            with isolated_rows(lengths[::-1]):
                reversed_order = float(token_loss(pack(short_rows[::-1])))
            # As one row, in which the second row sees the first.
            with isolated_rows([sum(lengths)]) as attention:
                mixed = float(token_loss(pack(short_rows)))
    except (TypeError, ValueError) as error:
        return f"it does not run on packed rows: {error}"
    except Exception as error:
        # The others of several ranks would wait for this one.
        if distributed.world_size() > 1 or not is_out_of_memory(error):
            raise
        return f"there is no memory to look at its attention: {error}"
    allowed = _allowed_difference([packed, reversed_order, mixed], alone, attention.dtype)
    if abs(packed - alone) <= allowed and abs(reversed_order - alone) <= allowed:
        return ""
    if abs(packed - reversed_order) <= allowed:
        # Rows are kept apart, in whatever order, and yet it is another loss.
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
    """Return which key of a row its ordinary batch has otherwise than the packed one; empty where
    both are alike, or the ordinary one is of another form, of which the loss is compared.

    Args:
        collated: batch of the row alone, perhaps padded.
        packed: the same row, packed.
        name: key of the row's tokens.
    """
    # The first label is of no token, and each form may have it.
    for key, begin in ((name, 0), ("labels", 1)):
        own = collated.get(key) if isinstance(collated, Mapping) else None
        if not isinstance(own, Tensor) or own.dim() != 2 or len(own) != 1:
            return ""
        due = packed[key][0]
        if not torch.equal(own[0, begin : len(due)].to(due), due[begin:]):
            return key
    return ""


def _unseen_attention(model: nn.Module) -> str:
    """Return that the model attends otherwise, with what would help."""
    problem = "no call of torch.nn.functional.scaled_dot_product_attention is seen in it"
    if hasattr(model, "config"):
        return f"{problem}: load it with attn_implementation='sdpa'"
    return (
        f"{problem}: attention of its own, flex_attention, or a name that was imported before,"
        " cannot keep packed rows apart"
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
