"""The command line ``adaptive-batch check | configs | keys | audit | report | emulate | run``.

``python -m adaptive_batch`` is the same.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive_batch import __version__
from adaptive_batch.config_files import copy_config, shipped_configs
from adaptive_batch.errors import AdaptiveBatchError, SettingError
from adaptive_batch.integrations.run_command import run_program

if TYPE_CHECKING:
    from adaptive_batch.emulate import Device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: arguments after the program's name; None for those of the command line.

    Returns: The exit status: 0; 1 if ``check`` finds a problem, ``audit`` fails or ``report`` lacks
    matplotlib; or that of the program of ``emulate`` and ``run``. Invalid arguments exit with 2.
    """
    parser, commands = _make_parser()
    # Folders can have arbitrary names, and a terminal may support only ASCII.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = options.command
        remedy = f"see adaptive-batch {name} --help"
        commands[name].error(f"unrecognized arguments: {' '.join(unknown)}; {remedy}")
    try:
        return _run(options)
    except SettingError as error:
        # Prints the usage and exits with 2.
        commands[options.command].error(str(error))
    except AdaptiveBatchError as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1


def _make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parser of each command by name."""
    parser = argparse.ArgumentParser(
        prog="adaptive-batch", description="Find, split and grow the batch of a fine-tuning run."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "check",
        help="check versions and devices, and print a command that fixes each problem",
    )
    configs = commands.add_parser(
        "configs", help="list the shipped configurations, or copy one for editing"
    )
    configs.add_argument("name", nargs="?", metavar="NAME", help="the configuration to copy")
    configs.add_argument(
        "destination",
        nargs="?",
        metavar="DEST",
        help="a folder, or the new file; never overwritten",
    )
    commands.add_parser("keys", help="print tables of the configuration keys")
    audit = commands.add_parser(
        "audit",
        help=(
            "check from a run's log that each row was used exactly once per epoch, across all"
            " restarts"
        ),
    )
    report = commands.add_parser("report", help="write the report of a run: an HTML page and a PNG")
    for command in (audit, report):
        command.add_argument("output_dir", metavar="OUTPUT_DIR", help="the output_dir of the run")
    report.add_argument(
        "--output", metavar="FILE", help="the page, if not OUTPUT_DIR/adaptive_batch/report.html"
    )
    emulate = commands.add_parser(
        "emulate",
        help="run a training program on an emulated GPU, and report its memory",
        usage="adaptive-batch emulate --device h100 [options] -- python train.py ...",
    )
    emulate.add_argument("--device", metavar="NAME", help="a device, or a size such as 24GiB")
    emulate.add_argument(
        "--architecture",
        metavar="SM",
        default="sm_80",
        help="architecture of a device given as a size: sm_80 (the default), sm_89, sm_90 ...",
    )
    # The same limit as MAX_DEVICES of csrc/stack.h.
    emulate.add_argument(
        "--devices",
        metavar="N",
        type=int,
        default=1,
        choices=range(1, 17),
        help="number; default 1",
    )
    emulate.add_argument("--steps", metavar="N", type=int, help="end after N optimizer steps")
    emulate.add_argument("--minutes", metavar="M", type=float, help="end after M minutes")
    emulate.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON")
    emulate.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        help="run in this new folder and keep the files; by default they are deleted",
    )
    emulate.add_argument("--list", action="store_true", help="list the devices")
    emulate.add_argument(
        "--install",
        action="store_true",
        help="install the CUDA build of an installed CPU build of torch into the cache folder",
    )
    run = commands.add_parser(
        "run",
        help="run a program with Transformers' Trainer, in micro-batches that fit",
        usage="adaptive-batch run [options] -- python train.py ...",
    )
    run.add_argument(
        "--micro-batch-size",
        metavar="N",
        type=_number_or_text,
        help="maximum rows of a micro-batch: a number, or auto to search for the largest",
    )
    run.add_argument(
        "--micro-batch-tokens",
        metavar="N",
        type=_number_or_text,
        help="maximum tokens of a micro-batch, padding included: a number or auto",
    )
    run.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=_number_or_text,
        help="memory that the search may use, such as 12GiB",
    )
    run.add_argument(
        "--headroom",
        metavar="SHARE",
        type=_number_or_text,
        help="share of that memory to leave free; 0.05",
    )
    run.add_argument(
        "--loss-reduction",
        metavar="NAME",
        help="mean weights the losses of micro-batches, sum adds them; or auto",
    )
    for command in (emulate, run):
        command.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...")
    return parser, commands.choices


def _number_or_text(text: str) -> int | float | str:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _emulate(options: argparse.Namespace, program: Sequence[str]) -> int:
    from adaptive_batch.emulate import EmulationError, emulate, install_cuda_build
    from adaptive_batch.estimate import DEVICES

    if options.list:
        for device in DEVICES:
            if device.compute_capability:
                size = f"{device.total_bytes / 2**30:.2f} GiB"
                print(f"{device.name:<14} {device.architecture:<7} {size:>11}")
        return 0
    try:
        if options.install:
            return install_cuda_build()
        if options.device is None or not program:
            raise SettingError("--device", options.device, "give it and, after --, the program")
        emulated = emulated_device(options.device, options.architecture)
        _check_options(options)
        # Raise KeyboardInterrupt on SIGTERM (`timeout`, scancel) too, and on SIGINT in background
        # jobs of a shell, which ignore it, so that the program can be ended with a report.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return emulate(
            program,
            emulated,
            num_devices=options.devices,
            max_steps=options.steps,
            max_minutes=options.minutes,
            json_file=options.json,
            output=options.output,
        )
    except EmulationError as error:
        print(f"emulate: {error}", file=sys.stderr)
        return 2


def _check_options(options: argparse.Namespace) -> None:
    """Raise if an option of `emulate` is out of range or names a file that cannot be written."""
    if options.steps is not None and options.steps < 1:
        raise SettingError("--steps", options.steps, "give 1 or more")
    if options.minutes is not None and not options.minutes > 0:
        raise SettingError("--minutes", options.minutes, "give more than 0")
    json, output = options.json, options.output
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
            is_empty = not any(output.iterdir())
        except OSError as error:
            remedy = f"{error.strerror}; give a new folder"
            raise SettingError("--output", str(output), remedy) from None
        if not is_empty:
            # Its files would hide those of the program's folder.
            raise SettingError("--output", str(output), "it is not empty; give a new folder")
    if json is not None:
        written = json if json.exists() else json.absolute().parent
        if json.is_dir() or not os.access(written, os.W_OK):
            raise SettingError("--json", str(json), "it cannot be written; give a file")


def emulated_device(name_or_size: str, architecture: str) -> Device:
    """Return the device to emulate.

    Args:
        name_or_size: a device of ``--list``, or a size.
        architecture: architecture of a device given as a size, such as ``sm_89``.

    Raises:
        SettingError: the device is unknown, for ROCm or smaller than the CUDA context, or the
            architecture is unknown.
    """
    from adaptive_batch.emulate import Device
    from adaptive_batch.estimate import DEVICES, find_device

    device = find_device(name_or_size, "--device")
    if device.architecture.startswith("gfx"):
        raise SettingError("--device", name_or_size, "it does not run CUDA; give one of --list")
    if not device.architecture:
        # A device given as a size. It gets the multiprocessors of a known device.
        known = {one.architecture: one for one in DEVICES if one.compute_capability}
        if architecture not in known:
            remedy = f"give one of {', '.join(sorted(known))}"
            raise SettingError("--architecture", architecture, remedy)
        multiprocessors = known[architecture].multiprocessors
        device = replace(device, architecture=architecture, multiprocessors=multiprocessors)
    if device.total_bytes <= device.context_bytes:
        raise SettingError(
            "--device",
            name_or_size,
            "the CUDA context needs more memory; give a larger size, such as 24GiB",
        )
    return Device(
        device.name,
        int(device.architecture.removeprefix("sm_")),
        device.multiprocessors,
        device.total_bytes,
        device.context_bytes,
    )


def _run(options: argparse.Namespace) -> int:
    """Run the command of these options and return the exit status."""
    if options.command in ("emulate", "run"):
        # argparse keeps the -- before the program.
        program = options.program[1:] if options.program[:1] == ["--"] else options.program
        if options.command == "emulate":
            return _emulate(options, program)
        if not program:
            raise SettingError("PROGRAM", None, "give the program after --")
        # All options but these two are arguments of AdaptiveArguments.
        given = {
            name: value
            for name, value in vars(options).items()
            if name not in ("command", "program") and value is not None
        }
        return run_program(program, given)
    if options.command == "audit":
        from adaptive_batch.report import audit

        result = audit(options.output_dir)
        print("\n".join(result.lines))
        return 0 if result.holds else 1
    if options.command == "report":
        from adaptive_batch.report import write_report

        print("\n".join(map(str, write_report(options.output_dir, output=options.output))))
        return 0
    if options.command == "check":
        from adaptive_batch.doctor import check

        return 0 if check() else 1
    if options.command == "keys":
        from adaptive_batch.torchtune import reference_tables

        print("\n\n".join(reference_tables().values()))
        return 0
    # The last command, `configs`, lists all configurations or copies one.
    if options.name is None:
        configs = shipped_configs()
        width = max((len(name) for name, _ in configs), default=0)
        for name, description in configs:
            print(f"{name:<{width}}  {description}")
    else:
        print(copy_config(options.name, options.destination))
    return 0


def run_as_program() -> None:
    """Run one command, and exit with its status."""
    if hasattr(signal, "SIGPIPE"):
        # End silently on a closed pipe, as with `| head`.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())


if __name__ == "__main__":
    run_as_program()
