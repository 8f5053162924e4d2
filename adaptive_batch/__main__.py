"""The command line of the package itself: ``python -m adaptive_batch check | configs``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .errors import SettingError
from .shipped import copy_config, shipped_configs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; None takes it from the command line.

    Returns:
        The exit status: 0, or 1 where ``check`` found something wrong. A mistake in the arguments exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m adaptive_batch", description="The batch size, known instead of guessed."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="look at the versions and devices here; say what is wrong and what mends it")
    configs = commands.add_parser("configs", help="list the shipped configurations, or copy one to edit it")
    configs.add_argument("name", nargs="?", metavar="NAME", help="the configuration to copy")
    configs.add_argument("destination", nargs="?", metavar="DEST", help="a folder, or the new file; never overwritten")
    given = parser.parse_args(arguments)

    if given.command == "check":
        from .environment import check  # imports torch, which listing and copying need not wait for

        return 0 if check() else 1
    if given.name is None:
        listed = shipped_configs()
        width = max((len(name) for name, _ in listed), default=0)
        for name, description in listed:
            print(f"{name:<{width}}  {description}")
        return 0
    if given.destination is None:
        configs.error(f"say where to copy it: configs {given.name} DEST")
    try:
        print(copy_config(given.name, given.destination))
    except SettingError as error:
        configs.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
