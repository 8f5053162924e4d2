"""The command line of the package itself: ``python -m adaptive_batch check | configs | keys | audit | report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from adaptive_batch.errors import AdaptiveBatchError, SettingError

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; None takes it from the command line.

    Returns:
        The exit status: 0, or 1 where ``check`` found something wrong or what ``audit`` is to prove does not hold, or
        ``report`` has no matplotlib. A mistake in the arguments exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m adaptive_batch", description="The batch size, known instead of guessed."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_check, _add_configs, _add_keys, _add_audit, _add_report):
        add(commands)
    given = parser.parse_args(arguments)
    run: Command = given.run
    try:
        return run(given)
    except SettingError as error:
        commands.choices[given.command].error(str(error))


def _add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser(
        "check", help="look at the versions and devices here; print what is wrong and the command that mends it"
    )
    check.set_defaults(run=_check)


def _check(given: argparse.Namespace) -> int:
    from adaptive_batch.torchtune import check

    return 0 if check() else 1


def _add_configs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    configs = commands.add_parser("configs", help="list the shipped configurations, or copy one to edit it")
    configs.add_argument("name", nargs="?", metavar="NAME", help="the configuration to copy")
    configs.add_argument("destination", nargs="?", metavar="DEST", help="a folder, or the new file; never overwritten")
    configs.set_defaults(run=_configs)


def _configs(given: argparse.Namespace) -> int:
    from adaptive_batch.torchtune import copy_config, shipped_configs

    if given.name is None:
        listed = shipped_configs()
        width = max((len(name) for name, _ in listed), default=0)
        for name, description in listed:
            print(f"{name:<{width}}  {description}")
        return 0
    if given.destination is None:
        raise SettingError("DEST", None, f"give where to copy it: configs {given.name} DEST")
    print(copy_config(given.name, given.destination))
    return 0


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser(
        "keys", help="print the configuration keys as tables, or rewrite those of a page of the docs"
    )
    keys.add_argument("page", nargs="?", metavar="PAGE", help="docs/configuration.md, whose tables are rewritten")
    keys.set_defaults(run=_keys)


def _keys(given: argparse.Namespace) -> int:
    from adaptive_batch.torchtune import reference_tables, write_reference

    if given.page is None:
        print("\n\n".join(reference_tables().values()))
    else:
        write_reference(Path(given.page))
    return 0


def _add_audit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    audit = commands.add_parser(
        "audit", help="prove from a run's log that each row was used exactly once an epoch, across all restarts"
    )
    audit.add_argument("output_dir", metavar="OUTPUT_DIR", help="the output_dir of the run")
    audit.set_defaults(run=_audit)


def _audit(given: argparse.Namespace) -> int:
    from adaptive_batch.report import audit

    found = audit(given.output_dir)
    print("\n".join(found.lines))
    return 0 if found.holds else 1


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    report = commands.add_parser("report", help="draw a run: one HTML page to look at, and the same as a PNG")
    report.add_argument("output_dir", metavar="OUTPUT_DIR", help="the output_dir of the run")
    report.add_argument(
        "--output", metavar="FILE", help="the page; OUTPUT_DIR/adaptive_batch/report.html where it is not given"
    )
    report.set_defaults(run=_report)


def _report(given: argparse.Namespace) -> int:
    from adaptive_batch.report import write_report

    try:
        for path in write_report(given.output_dir, output=given.output):
            print(path)
    except SettingError:
        raise
    except AdaptiveBatchError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
