"""Compilations of ``torch.compile``: their number and seconds, and the garbage that they leave."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from contextlib import AbstractContextManager, suppress
from typing import Any

from adaptive_batch._torch import PrivateNames

private = PrivateNames("compiled steps")


class Compilations(AbstractContextManager["Compilations"]):
    """Context manager that counts the compilations inside and frees the garbage of each.

    Attributes:
        number: compilations so far, including those of the backward at its first run.
        seconds: total duration.
        variants: numbers of the compiled variants of each function, by torch's number of the
            function.
    """

    def __init__(self) -> None:
        self.number = 0
        self.seconds = 0.0
        self.variants: defaultdict[str, set[str]] = defaultdict(set)
        self._start = 0.0

    def __enter__(self) -> Compilations:
        private.compilation_callbacks.register_start_callback(self._begin)
        private.compilation_callbacks.register_end_callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        # torch.compiler.reset() removes callbacks.
        with suppress(ValueError):
            private.compilation_callbacks.remove_start_callback(self._begin)
            private.compilation_callbacks.remove_end_callback(self._end)

    def _begin(self, _: object) -> None:
        self._start = time.perf_counter()

    def _end(self, compilation: Any) -> None:
        self.number += 1
        # The id is "function/variant_attempt"; a backward has the id of its forward.
        function, _, variant = compilation.compile_id.partition("/")
        self.variants[function].add(variant.partition("_")[0])
        self.seconds += time.perf_counter() - self._start
        # The error of a kernel that needs too much shared memory is in a cycle with the frames of
        # its callers, and keeps their logits alive. Torch collects only younger generations.
        gc.collect()
