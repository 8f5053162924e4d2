"""The least time of operations by a device's data sheet.

Each takes as long as the slower of its arithmetic and its traffic. This is the roofline model
(Williams, Waterman, Patterson: Roofline: an insightful visual performance model for multicore
architectures, CACM 52(4), 2009). FLOPs are counted by PyTorch's formulas, and each operation reads
its inputs and writes its outputs once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

# Of an operation: the dtype of its arithmetic, FLOPs, bytes read and written.
Cost = tuple[torch.dtype, int, int]


def attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> int:
    """Return the FLOPs of an attention's forward; backward has 2.5 times as many."""
    rows = math.prod(query.shape[:-1])
    flops = 2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    # Kernels leave out what a causal mask hides.
    return flops // 2 if is_causal else flops


def _forward_flops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> int:
    return attention_flops(query, key, value, is_causal)


def _backward_flops(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **__: Any
) -> int:
    is_causal = others[3]
    return attention_flops(query, key, value, is_causal) * 5 // 2


_FREE = {
    *(aten._unsafe_view, aten.lift_fresh, aten.empty, aten.empty_like, aten.empty_strided),
    *(aten.new_empty, aten.new_empty_strided),
}
_WRITTEN = (
    *(aten.copy_, aten.fill_, aten.zero_, aten.zeros_like, aten.ones_like, aten.full_like),
    *(aten.new_zeros, aten.new_ones),
)
_LOOKED_UP = (aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward)
# Places of arguments that an operation does not read, or only in part.
_NOT_READ = {**dict.fromkeys((*_WRITTEN, *_LOOKED_UP), 0), aten.nll_loss_backward: 1}
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


@dataclass(frozen=True)
class DeviceSpeed:
    """Peaks of a device by its data sheet.

    Attributes:
        flops_per_second: of dense matrices in fp16, bf16, TF32 and fp32; None where it states none.
        bytes_per_second: of its memory.
    """

    flops_per_second: tuple[float | None, ...]
    bytes_per_second: float

    def peak(self, dtype: torch.dtype) -> float | None:
        """Return FLOPs a second in a dtype; of float32 as TF32 where PyTorch is set to that."""
        fp16, bf16, tf32, fp32 = self.flops_per_second
        takes_tf32 = torch.get_float32_matmul_precision() != "highest"
        of_32 = (takes_tf32 and tf32) or fp32
        return {torch.float16: fp16, torch.bfloat16: bf16, torch.float32: of_32}.get(dtype)


# Of a device that is not known: times compare by arithmetic alone.
BY_FLOPS = DeviceSpeed((1.0, 1.0, 1.0, 1.0), math.inf)


class Roofline:
    """The least time of forward and backward: each operation's cost is a straight line in the rows.

    Args:
        few, more: rows of two steps that run the same operations, and the costs of these in their
            order.
    """

    def __init__(self, few: tuple[int, Sequence[Cost]], more: tuple[int, Sequence[Cost]]) -> None:
        self._few = few[0]
        self._more = more[0]
        self._lines = Counter(zip(few[1], more[1], strict=True))

    def seconds(self, rows: int, speed: DeviceSpeed) -> float | None:
        """Return the sum over operations of max(FLOPs / peak of their dtype, bytes / bandwidth).

        None where a peak is not known.
        """
        share = (rows - self._few) / (self._more - self._few)
        total = 0.0
        for ((dtype, *few), (_, *more)), number in self._lines.items():
            flops, moved = (
                fewer + (larger - fewer) * share for fewer, larger in zip(few, more, strict=True)
            )
            peak = speed.peak(dtype) if flops else math.inf
            if peak is None:
                return None
            total += number * max(flops / peak, moved / speed.bytes_per_second)
        return total

    def tokens_per_second(self, rows: int, tokens: int, speed: DeviceSpeed | None) -> float | None:
        """Return the most tokens a second of rows of so many tokens.

        None where nothing is known of the device, or for no rows.
        """
        seconds = self.seconds(rows, speed) if rows and speed else None
        return rows * tokens / seconds if seconds else None


def cost_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost | None:
    """Return the cost of an operation that has run; None for one that moves nothing, as a view."""
    packet = _moving(func)
    if packet is None:
        return None
    not_read = _NOT_READ.get(packet)
    read = list(args)
    if not_read is not None:
        del read[not_read : not_read + 1]
    # What a result is written to is that result.
    read += [value for name, value in kwargs.items() if name != "out"]
    moved = num_bytes([*read, result])
    formula = _FORMULAS.get(packet)
    if formula is None:
        return torch.float32, 0, moved
    # The backward of a convolution on data returns None in the place of the input's gradient.
    results = (result,) if isinstance(result, torch.Tensor) else result
    first = next(value for value in results if value is not None)
    return first.dtype, int(formula(*args, **kwargs, out_val=result)), moved


@cache
def _moving(func: Any) -> Any:
    """The operation whose overload it is; None for one that moves nothing."""
    packet = getattr(func, "overloadpacket", func)
    return None if packet in _FREE or getattr(func, "is_view", False) else packet


def num_bytes(values: Any) -> int:
    """Return the bytes of the tensors among some values."""
    if isinstance(values, torch.Tensor):
        # One that is expanded has fewer bytes than its shape says.
        return min(values.numel() * values.element_size(), values.untyped_storage().nbytes())
    if isinstance(values, (tuple, list)):
        return sum(map(num_bytes, values))
    return 0
