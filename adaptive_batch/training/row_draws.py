"""Random numbers that depend on the row, and not on its part of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RowDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draw the random numbers of each row with the row's own seed.

    Each operator takes one number of the global generator as the base of its seeds. Activation
    checkpointing restores that generator, so a recomputed forward pass draws the same numbers.

    Args:
        rows: numbers of the rows of the part that runs.

    Attributes:
        sizes: entries of the first dimension that each operator drew per row; 0 for a scalar, None
            for a tensor without a dimension of rows.
    """

    # Otherwise flex_attention refuses to run.
    supports_higher_order_operators = True

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self.sizes: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # A higher-order operator, such as flex_attention, has no tags.
        draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        # Operators of attention have this tag for their dropout, which is off here.
        if not draws or "attention" in func.name():
            return func(*args, **kwargs)
        if "generator" in kwargs:
            # Draw from the global generator, so that the script's own generator does not change.
            kwargs["generator"] = None
        seed = int(torch.empty((), dtype=torch.int64).random_())
        # _draw() seeds the global generator for each row.
        state = torch.get_rng_state()
        try:
            return self._draw(func, args, kwargs, seed)
        finally:
            torch.set_rng_state(state)

    def _draw(self, func: Any, args: Any, kwargs: Any, seed: int) -> Any:
        """Run an operator once for each row, with its slice of the first dimension; run it once if
        that dimension cannot be divided by rows.
        """
        num_rows = len(self._rows)
        # The shape to draw: that of a tensor argument, or the size that torch.rand() is given.
        shapes = [
            tuple(getattr(arg, "shape", arg))
            for arg in args
            if isinstance(arg, torch.Tensor | list | tuple)
        ]
        shape = next((each for each in shapes if each), ())
        if not shape or shape[0] == 0 or shape[0] % num_rows != 0:
            self.sizes.append(None if shape else 0)
            torch.manual_seed(seed)
            return func(*args, **kwargs)
        size = shape[0] // num_rows
        self.sizes.append(size)

        def of_row(number: int, arg: Any) -> Any:
            if isinstance(arg, torch.Tensor) and arg.shape[:1] == shape[:1]:
                return arg[number * size : (number + 1) * size]
            if isinstance(arg, list | tuple) and tuple(arg) == shape:
                return [size, *shape[1:]]
            return arg

        drawn = []
        for number, row in enumerate(self._rows):
            # The seed depends on the row's number in the batch, not on the part that has it.
            torch.manual_seed((seed + 7919 * row) % 2**63)
            drawn.append(func(*[of_row(number, arg) for arg in args], **kwargs))
        is_in_place = str(func.overloadpacket).endswith("_")
        # An operator in place has drawn into views of its first argument.
        return args[0] if is_in_place else torch.cat(drawn)
