"""Records of ``torch.compile``: the number, causes and seconds of compilations."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import nn

from adaptive_batch._torch import PrivateNames
from adaptive_batch._util import count

from .model_checks import is_compiled

private = PrivateNames("compiled steps")

# Torch's message for a function that has the most variants allowed.
_LIMIT_IS_REACHED = "recompile limit exceeded"


@dataclass(frozen=True)
class Compilation:
    """A graph that was compiled, or a failed attempt.

    Attributes:
        function: name of the compiled function; empty for a graph of backward, which is compiled
            when it first runs.
        reason: cause of a recompilation; empty for the first compilation.
        seconds: duration.
        gives_up: whether the function has too many variants, so that it now runs without the
            compiler.
    """

    function: str
    reason: str
    seconds: float
    gives_up: bool = False

    def describe(self) -> str:
        """Return one line, with the cause."""
        if self.gives_up:
            return (
                f"{self.function} runs without the compiler from now on, as it has as many variants"
                f" as torch._dynamo.config.recompile_limit allows: {self.reason}"
            )
        return f"{self.function} was compiled again in {self.seconds:.1f} s: {self.reason}"


class Compilations:
    """Reads the compilations of this process since the last call, or since construction."""

    def __init__(self) -> None:
        self._last_microsecond = time.time_ns() // 1000

    def new(self) -> list[Compilation]:
        """Return the new compilations in order; torch keeps the last 64."""
        # Before this import nothing was compiled.
        if "torch._dynamo" not in sys.modules:
            return []
        compilations = []
        begin = self._last_microsecond
        names: dict[str, str] = {}
        for metrics in private.compilation_metrics():
            start = metrics.start_time_us or 0
            # Variants of one function share its number; a failed attempt has no name.
            number = str(metrics.compile_id).partition("/")[0]
            name = metrics.co_name or ""
            if name:
                names[number] = name
            if start <= begin:
                continue
            self._last_microsecond = max(self._last_microsecond, start)
            gives_up = _LIMIT_IS_REACHED in (metrics.fail_reason or "")
            if gives_up:
                name = names.get(number, "a function")
            compilations.append(
                Compilation(
                    function=name,
                    reason=_first_line(metrics.recompile_reason or ""),
                    seconds=(metrics.duration_us or 0) / 1e6,
                    gives_up=gives_up,
                )
            )
        return compilations


class CompilationLog:
    """Counts and logs recompilations of this process while a model trains, and frees the garbage of
    the compiler. It is off if no part of the model is compiled at construction.

    Args:
        model: model that trains.

    Attributes:
        num_again: how often a function was compiled again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.num_again = 0
        self._compilations = Compilations() if is_compiled(model) else None

    def forget(self) -> None:
        """Skip the compilations since the last call of this or `log_new`, as of trials."""
        if self._compilations is not None:
            self._compilations = Compilations()

    def without_garbage(self) -> AbstractContextManager[object]:
        """Free the compiler's reference cycles after each compilation inside."""
        if self._compilations is None:
            return nullcontext()
        return _garbage_is_collected()

    def log_new(self, event: Callable[..., object]) -> None:
        """Log each recompilation since the last call of this or `forget`, with its cause.

        Args:
            event: ``event(kind, message, **facts)`` logs an event.
        """
        if self._compilations is None:
            return
        for compilation in self._compilations.new():
            if not compilation.reason:
                continue
            self.num_again += not compilation.gives_up
            event(
                "recompiled",
                f"{compilation.describe()} ({self.num_again} in this run)",
                function=compilation.function,
                reason=compilation.reason,
                seconds=round(compilation.seconds, 3),
                gives_up=compilation.gives_up,
                count=self.num_again,
            )


@contextmanager
def _garbage_is_collected() -> Iterator[None]:
    handler = private.compilation_callbacks
    handler.register_end_callback(_collect_garbage)
    try:
        yield
    finally:
        # torch.compiler.reset() has removed it.
        with suppress(ValueError):
            handler.remove_end_callback(_collect_garbage)


def _collect_garbage(_: object) -> None:
    # The error of a kernel that needs too much shared memory is in a cycle with the frames of its
    # callers, and so keeps their logits alive. Torch collects only the younger generations.
    gc.collect()


def _first_line(reason: str) -> str:
    """Return the cause without the number of the variant and without its place in the code."""
    line = reason.partition("\n")[0].partition("  #")[0]
    variant, separator, cause = line.partition(": ")
    return cause if separator and "/" in variant else line


def describe_all(compilations: Sequence[Compilation]) -> str:
    """Describe the number of compiled graphs and their seconds."""
    num_graphs = sum(bool(compilation.function) for compilation in compilations)
    seconds = sum(compilation.seconds for compilation in compilations)
    return f"{count(num_graphs, 'graph')} compiled in {seconds:.0f} s"


@contextmanager
def any_number_of_variants() -> Iterator[None]:
    """Allow any number of variants of a compiled function inside."""
    with torch.compiler.config.patch(  # type: ignore[attr-defined]
        recompile_limit=2**20, accumulated_recompile_limit=2**20
    ):
        yield
