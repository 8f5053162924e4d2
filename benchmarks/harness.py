"""The harness of all benchmarks: arguments, a loop over cases, tables, and records.

A record names the date, the command, the machine and the versions. `results/newest.json` has the
figures of the newest run of each benchmark. If a page, a test or another benchmark reads every
value of a run, these are in `results/NAME-DATE.json`.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NEWEST = RESULTS / "newest.json"
# Records that something reads, so that every value is kept.
READ = {
    *("compare_batching", "compare_estimators", "compare_resume", "compare_searches"),
    *("cuda_stack-cases", "cuda_stack-compiled", "emulated_programs", "kills", "on_gpu"),
    *("published", "search_in_trainers"),
}
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
UNFINISHED = ROOT / ".measure"
# Benchmarks use modules of the tests and examples.
sys.path += [str(ROOT / "tests"), str(ROOT / "examples")]


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
    """Redirect the output of this process and its libraries into a file."""
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
    """A table that prints its titles now, and each row when it is known.

    A list is shown by its length, a bool as yes or NO, and None as a dash.

    Args:
        columns: names of values with their formats, such as ``"search:<20 seconds:>8.1f"``.
    """

    def __init__(self, columns: str) -> None:
        self._formats = dict(column.split(":") for column in columns.split())
        self.print({name: name.replace("_", " ") for name in self._formats})

    def print(self, row: Mapping[str, Any], /, **others: Any) -> None:
        """Print the values of a row that have a column. A text is not cut to its column."""
        cells = []
        for name, spec in self._formats.items():
            value = {**row, **others}.get(name)
            if isinstance(value, list | tuple | dict):
                value = len(value)
            elif value is None or isinstance(value, bool):
                value = {None: "-", True: "yes", False: "NO"}[value]
            width = re.match(r"[<>]\d+", spec)
            assert width is not None, f"{spec!r} begins without alignment and width"
            cells.append(format(value, width[0] if isinstance(value, str) else spec))
        print(" ".join(cells).rstrip(), flush=True)


class Finished:
    """Entries of the finished cases of a measurement, each saved at once: an interrupted
    measurement resumes with the next case.

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
        self, case: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return a case with its measured values and seconds. An error is not saved."""
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


def quietly(
    tasks: Iterable[Callable[[], Iterable[dict[str, Any]]]],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of each task, and hide its output."""
    for task in tasks:
        with printing_into():
            rows = list(task())
        yield from rows


def run(
    name: str,
    output: Path,
    cases: Iterable[Any],
    measure: Callable[[Any], Mapping[str, Any]],
    *,
    columns: str,
    errors: Callable[[dict[str, Any]], Iterable[object]] = lambda row: (),
    figures: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda rows: {},
    resumes: bool = False,
) -> NoReturn:
    """Measure cases one after the other, print a row for each, write the record, and exit. The
    status is 1 if a case has errors or if there are no cases.

    Args:
        name: of the record.
        output: folder of the record.
        cases: what `measure` takes.
        measure: returns the values of a case.
        columns: of the table, see :class:`Table`; `seconds` is added to each row.
        errors: returns the errors of a row.
        figures: returns sums over all rows, for the top of the record.
        resumes: whether an interrupted run resumes, see :class:`Finished`; cases are then
            dataclasses or dictionaries, and one that raises an error does not end the others.
    """
    begin = time.perf_counter()
    finished = Finished(name) if resumes else None
    table = Table(columns)
    rows: list[dict[str, Any]] = []
    num_errors = 0
    start = begin
    for case in cases:
        row: dict[str, Any]
        if finished is None:
            row = {**measure(case)}
        else:
            key = case if isinstance(case, dict) else asdict(case)
            row = finished.entry(key, partial(measure, case))
        row.setdefault("seconds", round(time.perf_counter() - start, 1))
        start = time.perf_counter()
        rows.append(row)
        table.print(row)
        for error in [row["failed"]] if row.get("failed") else errors(row):
            num_errors += 1
            print(f"  WRONG {error}", flush=True)
    totals = figures(rows)
    print(f"\n{len(rows)} cases, {num_errors} errors")
    for key, value in totals.items():
        print(f"{key.replace('_', ' ')}: {value}")
    seconds = round(time.perf_counter() - begin, 1)
    write(name, output, **totals, errors=num_errors, seconds=seconds, cases=rows)
    if finished is not None:
        finished.forget()
    sys.exit(bool(num_errors or not rows))


def _arguments() -> list[str]:
    """Return the arguments without the folders of this machine."""
    arguments = list(sys.argv)
    for option in {"--output", "--sources", "--work"}.intersection(arguments):
        place = arguments.index(option)
        del arguments[place : place + 2]
    return arguments


def is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, float) for one in value.values())


def figures_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures at the top of a record, the number of entries of each of its lists, the
    mappings of names to numbers, and the summaries of its parts.
    """
    figures: dict[str, Any] = {}
    for key, value in record.items():
        # The command names the folder of the output.
        if key == "command":
            continue
        if isinstance(value, list):
            figures[key] = len(value)
        elif isinstance(value, dict) and "summary" in value:
            figures[key] = value["summary"]
        elif isinstance(value, int | float | str) or is_numbers(value):
            figures[key] = value
    return figures


def write(name: str, folder: Path, /, **measured: Any) -> None:
    """Write ``NAME-YYYY-MM-DD.json``, and print the counts that differ from the newest figures.

    Among the results, the newest figures are updated and an older record of the name is removed,
    if it has the same command: a short form does not replace a full one. Every value is kept only
    of a name in :data:`READ`.
    """
    today = date.today().isoformat()
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    about = {
        "date": today,
        "command": " ".join([Path(sys.executable).name, *_arguments()]),
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": versions,
    }
    newest = json.loads(NEWEST.read_text())
    figures = figures_of(measured)
    before = newest.get(name, about | {"figures": figures})
    is_same = before["command"] == about["command"]
    for key, value in before["figures"].items():
        if is_same and isinstance(value, int) and figures.get(key, value) != value:
            print(f"{key}: {value} on {before['date']}, {figures[key]} now")
    if folder == RESULTS:
        if not is_same:
            print(f"\nnot written: {NEWEST.name} has the figures of `{before['command']}`")
            print("give --output, or remove them")
            return
        for older in folder.glob(f"{name}-20*.json"):
            older.unlink()
        newest[name] = about | {"figures": figures}
        lines = [f"{json.dumps(key)}: {json.dumps(newest[key])}" for key in sorted(newest)]
        NEWEST.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"\nthe newest figures of {name} are in {NEWEST}")
        if name not in READ:
            return
    path = folder / f"{name}-{today}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | measured, indent=1) + "\n")
    print(f"\nwritten to {path}")
