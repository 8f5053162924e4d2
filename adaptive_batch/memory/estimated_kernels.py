"""The call by which an estimate of memory answers for a kernel that the CPU does not have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def estimated_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], ends: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Attend to each row alone in an estimate; a real step is left to its kernel.

    An estimate replaces this function in its package, from which callers take it.

    Args:
        query, key, value: Tensors ``[1, heads, tokens, head_dim]`` with the rows laid end to end.
        lengths: Tokens of each row, in order.
        ends: Int32 ``[rows + 1]``, which the first call for these rows has returned; None in the
            first call.

    Returns:
        Causal attention ``[1, heads, tokens, head_dim]`` and `ends`; None in a real step.
    """
    return None
