"""The call by which an estimate of memory answers for a kernel that the CPU does not have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def estimated_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], ends: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return the causal attention of each row alone as an estimate has it, and where rows end as
    its device has that; None in a real step.

    The mode of an estimate overrides this function, as any mode overrides a function of torch.

    Args:
        query, key, value: Tensors ``[1, heads, tokens, head_dim]`` with the rows laid end to end.
        lengths: Tokens of each row, in order.
        ends: Where rows end, as the first call for them has returned it; None in that.
    """
    tensors = (query, key, value)
    if not has_torch_function(tensors):
        return None
    result: tuple[Tensor, Tensor] | None = handle_torch_function(
        estimated_attention, tensors, *tensors, lengths, ends
    )
    return result
