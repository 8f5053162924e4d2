"""Refuses arguments of a component that are of another type than its signature has."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from adaptive_batch.errors import SettingError

from .keys import load_function

_WANTED = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def check_arguments(key: str, block: Mapping[str, Any]) -> None:
    """Refuse a value of a block that its component's signature excludes: text for a number, a
    number for a switch, null where a value is needed.

    What is no plain type, such as a list of names, is left to the component. Null for a switch is
    off.
    """
    arguments = [name for name in block if name != "_component_"]
    for name, types, parameter in _typed_parameters(key, block.get("_component_"), arguments):
        value = block[name]
        if value is None:
            if NoneType in types or parameter.default is None or types == (bool,):
                continue
            remedy = "null is none of its values; give one"
            if parameter.default is not parameter.empty:
                remedy += f", or leave it out for {parameter.default}"
            raise SettingError(f"{key}.{name}", value, remedy)
        plain_types = [kind for kind in types if kind is not NoneType]
        if not set(plain_types) <= set(_WANTED):
            continue
        if not any(_is_of(value, kind) for kind in plain_types):
            wanted = " or ".join(_WANTED[kind] for kind in plain_types)
            raise SettingError(f"{key}.{name}", value, f"give {wanted}")


def _typed_parameters(
    key: str, component: object, names: list[str]
) -> Iterator[tuple[str, tuple[Any, ...], inspect.Parameter]]:
    """Yield those of some parameters whose signature has their types: name, types, parameter."""
    try:
        builder = load_function(component, key=key)
        while isinstance(builder, partial):
            builder = builder.func
        parameters = inspect.signature(builder).parameters
        if isinstance(builder, type):
            builder = builder.__init__  # type: ignore[misc]  # the constructor's annotations
        hints = get_type_hints(builder)
    except Exception:
        # What cannot be imported is refused where it is built, and not all can be looked into.
        return
    for name in names:
        hint = hints.get(name)
        if name not in parameters or hint in (None, Any):
            continue
        types = (hint,)
        if get_origin(hint) in (Union, UnionType):
            types = get_args(hint)
        yield name, types, parameters[name]


def _is_of(value: object, kind: type) -> bool:
    # For Python a truth value is a number.
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)
