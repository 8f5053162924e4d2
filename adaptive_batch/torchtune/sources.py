"""The code and the files that objects are made of, as a part of a fingerprint: names alone do not
tell what they do.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from adaptive_batch._util import file_signature

# Items of a list or a mapping that are followed: a dataset may hold its rows in one.
_MOST_ITEMS = 32
_MOST_OBJECTS = 10_000
_DEEPEST = 8


def sources_of(*roots: object) -> list[Any]:
    """Describe the code and the files of objects, as a part for `fingerprint`: another description
    means another content.

    Followed are the attributes of objects, the classes and functions among them, texts that name a
    file or what a module holds, and what modules that are not installed take from each other. Of a
    dataset of Hugging Face its own fingerprint counts.
    """
    modules: dict[str, ModuleType] = {}
    digests: list[Any] = []
    # It keeps what it has seen, so that no id is given again.
    seen: dict[int, object] = {}
    waiting = [(root, 0) for root in roots]
    while waiting and len(seen) < _MOST_OBJECTS:
        value, depth = waiting.pop()
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen[id(value)] = value
        if isinstance(value, str | Path):
            text = str(value)
            if os.path.isfile(text):
                digests.append([text, file_signature(text)])
            _add(modules, text.rpartition(".")[0])
            continue
        if isinstance(value, type | FunctionType):
            _add(modules, value.__module__)
        else:
            _add(modules, *(kind.__module__ for kind in type(value).__mro__))
        digest = getattr(value, "__dict__", {}).get("_fingerprint")
        if isinstance(digest, str):
            digests.append(digest)
            continue
        waiting.extend((part, depth + 1) for part in _parts(value))
    files = {getattr(module, "__file__", None) for module in modules.values()}
    signatures = [[str(file), file_signature(str(file))] for file in files if file]
    return [sorted(signatures), sorted(digests, key=str)]


def _parts(value: Any) -> Iterator[Any]:
    """Yield what an object is made of."""
    if isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)())
    elif isinstance(value, dict):
        yield from islice(value.values(), _MOST_ITEMS)
    elif isinstance(value, list | tuple):
        yield from value[:_MOST_ITEMS]
    elif not isinstance(value, type):
        yield from islice(getattr(value, "__dict__", {}).values(), _MOST_ITEMS)


def _add(modules: dict[str, ModuleType], *names: str) -> None:
    """Add modules that are loaded, and those which these take names from, as far as they are not
    installed.
    """
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if name in modules or not isinstance(module, ModuleType):
            continue
        modules[name] = module
        if not _is_installed(module):
            waiting.extend(_taken_from(list(vars(module).values())))


def _taken_from(values: Iterable[object]) -> Iterator[str]:
    """Yield the names of the modules, not installed, that some values are or were defined in."""
    for value in values:
        name = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            name = value.__name__
        module = sys.modules.get(str(name))
        if isinstance(module, ModuleType) and not _is_installed(module):
            yield module.__name__


@cache
def _is_installed(module: ModuleType) -> bool:
    """Whether a module is of a package whose version tells what it is, or of no file."""
    file = getattr(module, "__file__", None)
    places = (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    )
    return not file or any(
        Path(file).resolve().is_relative_to(Path(place).resolve()) for place in places
    )
