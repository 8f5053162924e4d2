"""What a dotted path or a `_component_` block of the configuration names: a function to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from adaptive_batch._util import nearest
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress, check_increment, check_schedule


def load_function(path: str, *, key: str) -> Any:
    """Import what a dotted path names.

    Raises:
        SettingError: naming `key`, the path and what is missing.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise SettingError(key, path, "give the dotted path of a function, such as my_module.my_function")
    for split in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:split])
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name and (module == error.name or module.startswith(error.name + ".")):
                continue
            raise SettingError(key, path, f"importing {module} failed: {error}") from error
        except Exception as error:
            raise SettingError(key, path, f"importing {module} failed: {type(error).__name__}: {error}") from error
        for part in parts[split:]:
            if not hasattr(found, part):
                names = [name for name in dir(found) if not name.startswith("_")]
                raise SettingError(key, path, f"{module} has no {part}; {nearest(part, names)}")
            found = getattr(found, part)
        return found
    raise SettingError(
        key,
        path,
        f"no module {parts[0]} can be imported; run from the folder that holds it, or put that folder on PYTHONPATH",
    )


def load_increment(value: object, *, key: str) -> Callable[[int, int], int]:
    """The growth function that a setting names: a dotted path of it, or a block whose `_component_` builds one.

    Raises:
        SettingError: it cannot be imported, built, or called with an epoch and a batch size.
    """
    function: Callable[[int, int], int] = _load(value, key=key)
    check_increment(function, key=key)
    return function


def load_schedule(value: object, *, key: str) -> Callable[[Progress], int]:
    """The same of a rule that says what a step holds.

    Raises:
        SettingError: it cannot be imported, built, or called with a progress.
    """
    function: Callable[[Progress], int] = _load(value, key=key)
    check_schedule(function, key=key)
    return function


def _load(value: object, *, key: str) -> Any:
    if isinstance(value, str):
        return load_function(value, key=key)
    if isinstance(value, Mapping) and isinstance(value.get("_component_"), str):
        build = load_function(value["_component_"], key=f"{key}._component_")
        arguments = {str(k): v for k, v in value.items() if k != "_component_"}
        try:
            return build(**arguments)
        except SettingError:
            raise
        except Exception as error:
            raise SettingError(
                f"{key}._component_",
                value["_component_"],
                f"it is called with {arguments} to build the function, and failed: {error}; "
                f"for a function itself write {key}: {value['_component_']}",
            ) from error
    raise SettingError(key, value, "give the dotted path of a function, or a block with _component_ that builds one")
