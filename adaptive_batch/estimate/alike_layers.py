"""Logs of a step at many shapes, from runs that leave out most of the layers that are alike.

A layer that is left out allocates what a layer like it does, which is kept. So a run of all layers
at one shape, and runs of a few layers at that shape and at another, give the log of all layers at
the other.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import nn

from .step_log import Phase

# With fewer, the runs that are needed beside take as long as is saved.
_LEAST_LEFT_OUT = 4
# Modules that are run in a fraction of a second.
_FEW_MODULES = 200
# Entries on each side by which two of one size are told apart.
_NEIGHBOURS = 4


@dataclass(eq=False)
class _Traced:
    """A run of all layers, and its log; that of a few layers once it is asked for."""

    trace: Callable[[], Phase]
    whole: Phase
    few: Phase | None = None


class AlikeLayers:
    """Traces the steps of a model, and leaves layers out where the log follows from others.

    Of layers that are alike the first is kept, and the last where what they follow is not trained.
    What is allocated in a run of a few layers has, at each shape, the sizes of what is allocated in
    the same place of the layers that are left out. So the sizes at a new shape are looked up by
    those at shapes of which both logs are there, in their order where both have as many. A shape is
    traced with all layers until one log that was expected in this way was equal to the traced one;
    and wherever a size is not known or not unique, or the layers run other operations than at any
    shape before.

    Args:
        model: whose lists of modules are searched for layers that are alike.
        is_used: whether layers may be left out.
    """

    def __init__(self, model: nn.Module, *, is_used: bool) -> None:
        self._model = model
        self._shorter: list[tuple[nn.Module, dict[str, nn.Module]]] = []
        # What is compiled knows its layers.
        self._is_compiled = any("forward" in vars(module) for module in model.modules())
        if is_used and not self._is_compiled:
            self._shorter = list(_shorter_lists(model))
        num_left_out = sum(len(owner._modules) - len(kept) for owner, kept in self._shorter)
        self._is_used = num_left_out >= _LEAST_LEFT_OUT
        # Shapes of a few programs come in turn.
        self._places = lru_cache(maxsize=4)(_Places)
        self._confirmed: set[Hashable] = set()
        self._traced: dict[Hashable, list[_Traced]] = {}

    @property
    def runs_few(self) -> bool:
        """Whether a trace runs few modules, since layers are left out or there are no more, and
        compiles none of them.
        """
        if self._is_compiled:
            return False
        with self._shortened() if self._is_used else nullcontext():
            return len(list(self._model.modules())) <= _FEW_MODULES

    def add(self, trace: Callable[[], Phase], whole: Phase, *, kind: Hashable) -> None:
        """Take in a log from which others may follow.

        Args:
            trace: function that runs the layers and returns their log.
            whole: its log with all layers.
            kind: of the run; logs of one kind follow from each other.
        """
        if self._is_used:
            self._traced.setdefault(kind, []).append(_Traced(trace, whole))

    def phase(self, trace: Callable[[], Phase], *, kind: Hashable) -> Phase:
        """Return the log with all layers; for the arguments see :meth:`add`."""
        few = None
        if self._traced.get(kind):
            few = self._trace_few(trace)
        if few is None:
            whole = trace()
            self.add(trace, whole, kind=kind)
            return whole
        known: list[_Traced] = []
        for traced in self._traced[kind]:
            if traced.few is None:
                traced.few = self._trace_few(traced.trace)
                self._confirm(known, traced, kind)
            known.append(traced)
        expected = self._expected(known, few)
        if expected is not None and kind in self._confirmed:
            return expected
        traced = _Traced(trace, trace(), few)
        self._confirm(known, traced, kind)
        if self._is_used:
            self._traced[kind].append(traced)
        return traced.whole

    def _confirm(self, known: Sequence[_Traced], traced: _Traced, kind: Hashable) -> None:
        """Compare a log with what was expected from those of other shapes that are known."""
        others = [other for other in known if other.whole.log != traced.whole.log]
        expected = self._expected(others, traced.few)
        if expected is None:
            return
        if expected.log == traced.whole.log:
            self._confirmed.add(kind)
        else:
            self._give_up()

    def _expected(self, known: Sequence[_Traced], few: Phase | None) -> Phase | None:
        """Return the log with all layers that belongs to one with a few; None where it does not
        follow from those that are known.
        """
        if few is None:
            return None
        alike = tuple(
            traced
            for traced in known
            if traced.few is not None and traced.few.is_like(few) and traced.few.once == few.once
        )
        return self._places(alike).expected(few) if alike else None

    def _trace_few(self, trace: Callable[[], Phase]) -> Phase | None:
        """Return the log with a few layers; None where the model does not run with these."""
        if not self._is_used:
            return None
        try:
            with self._shortened():
                return trace()
        except Exception:
            # Any error of a model that needs all its layers; one of its own is raised with these.
            self._give_up()
            return None

    def _give_up(self) -> None:
        self._is_used = False
        self._confirmed.clear()
        self._traced.clear()

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        whole_lists = [dict(owner._modules) for owner, _ in self._shorter]
        try:
            for owner, kept in self._shorter:
                owner._modules = dict(kept)
            yield
        finally:
            for (owner, _), modules in zip(self._shorter, whole_lists, strict=True):
                owner._modules = modules


class _Places:
    """Places of the entries of logs with all layers in those with a few.

    Args:
        alike: at several shapes, whose logs with a few layers differ in sizes alone.
    """

    def __init__(self, alike: Sequence[_Traced]) -> None:
        self._whole = alike[0].whole
        # Of each entry, the more certain first.
        self._candidates: list[list[tuple[int, ...]]] = []
        self._are_alike = all(traced.whole.is_like(self._whole) for traced in alike)
        if not self._are_alike:
            return
        keys_of_whole = list(_keys([traced.whole for traced in alike]))
        few_places: dict[Hashable, list[int]] = {}
        for place, keys in enumerate(_keys([traced.few for traced in alike])):
            for key in keys:
                few_places.setdefault(key, []).append(place)
        totals = Counter(chain.from_iterable(keys_of_whole))
        earlier: Counter[Hashable] = Counter()
        for keys in keys_of_whole:
            candidates = []
            for key in keys:
                places = tuple(few_places.get(key, ()))
                # Outside of the layers both logs have the same entries in the same order.
                if len(places) == totals[key]:
                    places = places[earlier[key] : earlier[key] + 1]
                earlier[key] += 1
                candidates.append(places)
            self._candidates.append(candidates)

    def expected(self, few: Phase) -> Phase | None:
        """Return the log with all layers that belongs to one with a few; None where the size of
        some entry is not known or not unique.
        """
        if not self._are_alike:
            return None
        log = array("q")
        for candidates, entry in zip(self._candidates, self._whole.log, strict=True):
            # Frees have other numbers in each log.
            if entry <= 0:
                log.append(entry)
                continue
            sizes_by_key = ({few.log[place] for place in places} for places in candidates)
            size = next((sizes.pop() for sizes in sizes_by_key if len(sizes) == 1), None)
            if size is None:
                return None
            log.append(size)
        return replace(self._whole, log=log)


def _keys(phases: Sequence[Phase | None]) -> Iterator[Sequence[Hashable]]:
    """Yield for each entry of logs that are alike its sizes in all of them, first with those of its
    neighbours, then with those of one side: layers that are left out have other layers beside them.
    What is freed has none.
    """
    # Numbers of what is freed are no sizes.
    logs = [[max(0, entry) for entry in phase.log] for phase in phases if phase is not None]
    entries = list(zip(*logs, strict=True))
    for place, entry in enumerate(entries):
        if not entry[0]:
            yield ()
            continue
        before = tuple(entries[max(0, place - _NEIGHBOURS) : place + 1])
        after = tuple(entries[place : place + _NEIGHBOURS + 1])
        yield (before, after), (before, None), (None, after), entry


def _shorter_lists(
    module: nn.Module, *, has_gradient: bool = False
) -> Iterator[tuple[nn.Module, dict[str, nn.Module]]]:
    """Yield the outermost lists of modules with some that can be left out, and those that stay.

    Args:
        module: which is searched.
        has_gradient: whether the last module before it that has parameters is trained, so that
            what it is called with has a gradient.
    """
    children = list(module.children())
    if isinstance(module, nn.ModuleList | nn.Sequential):
        places: dict[Hashable, list[int]] = {}
        for place, kind in enumerate(_kinds(children)):
            places.setdefault(kind, []).append(place)
        kept_places = {own[0] for own in places.values()}
        # The first layer's backward is not that of the others.
        if not has_gradient:
            kept_places.update(own[-1] for own in places.values())
        if len(kept_places) < len(children):
            kept = [children[place] for place in sorted(kept_places)]
            yield module, {str(number): child for number, child in enumerate(kept)}
            return
    for child in children:
        yield from _shorter_lists(child, has_gradient=has_gradient)
        is_trained = [parameter.requires_grad for parameter in child.parameters()]
        # A decoder behind a trained encoder begins with frozen words of its own.
        has_gradient = any(is_trained) if is_trained else has_gradient


def _kinds(layers: Sequence[nn.Module]) -> list[Hashable]:
    """Return for each layer what those that are alike have in common."""
    described = [_described(layer) for layer in layers]
    numbering = set()
    for key, first in described[0].items() if described else ():
        numbers = [description.get(key) for description in described]
        # The place of a layer is no difference.
        if type(first) is int and numbers == [*range(first, first + len(layers))]:
            numbering.add(key)
    return [
        frozenset(item for item in description.items() if item[0] not in numbering)
        for description in described
    ]


def _described(layer: nn.Module) -> dict[Hashable, Any]:
    """Return the types, the tensors and the plain attributes of a layer's modules, by name."""
    description: dict[Hashable, Any] = {}
    for name, module in layer.named_modules():
        description[name] = type(module)
        tensors: dict[str, Any] = {**module._parameters, **module._buffers}
        for own_name, tensor in tensors.items():
            if tensor is not None:
                looks = (type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad)
                description[name, own_name] = looks
        for attribute, value in vars(module).items():
            if isinstance(value, int | float | str):
                description[name, attribute] = value
            elif isinstance(value, tuple):
                description[name, attribute] = repr(value)
    return description
