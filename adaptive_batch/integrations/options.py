"""Trainer arguments for command lines and configuration files; imports no torch."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, fields
from typing import Any

from adaptive_batch._util import Option, one_of


def _plain(default: Any, metavar: str, meaning: str, **checked: Option) -> Any:
    return field(default=default, metadata={"metavar": metavar, "help": meaning, **checked})


@dataclass(frozen=True)
class PlainArguments:
    """Numeric and text arguments; documented in :class:`.AdaptiveArguments`."""

    micro_batch_size: int | str | None = _plain(
        None, "N", "maximum rows of a micro-batch: a number, or auto to search for the largest"
    )
    micro_batch_tokens: int | str | None = _plain(
        None, "N", "maximum tokens of a micro-batch, padding included: a number or auto"
    )
    device_memory: int | float | str | None = _plain(
        None, "SIZE", "memory that the search may use, such as 12GiB"
    )
    headroom: float | str = _plain("auto", "SHARE", "share of that memory to leave free; 0.05")
    loss_reduction: str = _plain(
        "auto",
        "NAME",
        "mean weights the losses of micro-batches, sum adds them; or auto",
        option=Option(one_of("auto", "mean", "sum")),
    )


def add_options(parser: ArgumentParser) -> None:
    """Add an option for each plain argument."""
    for each in fields(PlainArguments):
        parser.add_argument(
            "--" + each.name.replace("_", "-"),
            type=_number_or_text,
            metavar=each.metadata["metavar"],
            help=each.metadata["help"],
        )


def given_options(options: Namespace) -> dict[str, Any]:
    """Return the plain arguments given on the command line, by name."""
    names = {each.name for each in fields(PlainArguments)}
    given = vars(options).items()
    return {name: value for name, value in given if name in names and value is not None}


def _number_or_text(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
