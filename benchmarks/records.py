"""The harness of all benchmarks: arguments, tables, and records that name the date, the command,
the machine and the versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "torch",
    "torchao",
    "torchdata",
    "torchtune",
    "numpy",
    "adaptive-batch",
    "bitsandbytes",
    "transformers",
    "trl",
    "accelerate",
    "lightning",
    "datasets",
)
UNFINISHED = Path(__file__).parents[1] / ".measure"


def parser(description: str | None, *, quick: str = "") -> argparse.ArgumentParser:
    """Return a parser with ``--output``, and with ``--quick`` if its help is given."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR")
    return parser


@contextmanager
def printing_into(path: Path | str = os.devnull) -> Iterator[None]:
    """Write what this process and its libraries print into a file."""
    sys.stdout.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with open(path, "w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            sys.stdout.flush()
            for descriptor, original in zip((1, 2), kept, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


class Table:
    """A table that prints its titles now and each row as it comes.

    Args:
        columns: names of values with their formats, such as ``"search:<20 seconds:>8.1f"``.
    """

    def __init__(self, columns: str) -> None:
        self._formats = dict(column.split(":") for column in columns.split())
        self.print({name: name.replace("_", " ") for name in self._formats})

    def print(self, row: Mapping[str, Any], /, **others: Any) -> None:
        """Print the values of a row that have a column. Text has the column's width alone."""
        cells = []
        for name, spec in self._formats.items():
            value = {**row, **others}[name]
            width = re.match(r"[<>]\d+", spec)
            assert width is not None, f"{spec!r} begins without alignment and width"
            cells.append(format(value, width[0] if isinstance(value, str) else spec))
        print(" ".join(cells).rstrip(), flush=True)


class Finished:
    """Entries of the finished cases of a measurement, kept in a file as soon as they are there: a
    measurement that was stopped resumes with the next case.

    Args:
        name: of the measurement, and of the file.
    """

    def __init__(self, name: str) -> None:
        self._path = UNFINISHED / f"{name}.jsonl"
        self._entries: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                case, entry = json.loads(line)
                self._entries[case] = entry
            print(f"{len(self._entries)} finished cases are read from {self._path}")

    def entry(
        self, case: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return a case with what was measured and the seconds that it took, or with the error that
        it ended with; one that failed is not kept.
        """
        key = json.dumps(case)
        if key in self._entries:
            return self._entries[key]
        start = time.perf_counter()
        try:
            entry = {**case, **measure()}
        except Exception as error:
            traceback.print_exc()
            return {**case, "failed": f"{type(error).__name__}: {error}"}
        entry["seconds"] = round(time.perf_counter() - start, 1)
        self._path.parent.mkdir(exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps([key, entry]) + "\n")
        self._entries[key] = entry
        return entry

    def forget(self) -> None:
        """Remove the file, once a record has all entries."""
        self._path.unlink(missing_ok=True)


def _arguments() -> list[str]:
    """Return the arguments without the folders of this machine."""
    arguments = list(sys.argv)
    for option in {"--output", "--sources", "--work"}.intersection(arguments):
        place = arguments.index(option)
        del arguments[place : place + 2]
    return arguments


def write(name: str, folder: Path, /, **measured: Any) -> Path:
    """Write ``NAME-YYYY-MM-DD.json`` and say where."""
    today = date.today().isoformat()
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    record = {
        "date": today,
        "command": " ".join([Path(sys.executable).name, *_arguments()]),
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "device": device,
        },
        "versions": versions,
        **measured,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{today}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nwritten to {path}")
    return path
