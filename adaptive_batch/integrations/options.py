"""Arguments of a trainer that a command line or a configuration file can give; no torch is needed
to read them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, fields
from typing import Any


def _option(default: Any, metavar: str, meaning: str) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": meaning})


@dataclass(frozen=True)
class PlainArguments:
    """Arguments that are numbers or text; :class:`.AdaptiveArguments` describes them."""

    micro_batch_size: int | str | None = _option(
        None, "N", "the most rows of a part: a number, or auto for what a search finds"
    )
    micro_batch_tokens: int | str | None = _option(
        None, "N", "the most tokens of a part, padding included: a number or auto"
    )
    device_memory: int | float | str | None = _option(
        None, "SIZE", "memory that the search may use, such as 12GiB"
    )
    headroom: float | str = _option("auto", "SHARE", "share of it that is left free; 0.05")
    loss_reduction: str = _option(
        "auto", "NAME", "mean, sum, or auto: whether losses of parts are weighted or added up"
    )


def add_options(parser: ArgumentParser) -> None:
    """Add an option for each plain argument."""
    for each in fields(PlainArguments):
        option = "--" + each.name.replace("_", "-")
        parser.add_argument(option, type=_number_or_text, **each.metadata)


def given_options(options: Namespace) -> dict[str, Any]:
    """Return the plain arguments that a command line has given, by name."""
    values = {each.name: getattr(options, each.name) for each in fields(PlainArguments)}
    return {name: value for name, value in values.items() if value is not None}


def _number_or_text(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
