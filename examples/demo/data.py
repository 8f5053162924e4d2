"""The demo's data: docstrings of the standard library, as rows of a signature and its docstring.
Nothing is downloaded.
"""

from __future__ import annotations

import ast
import json
import pkgutil
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path

SEED = 7
NUM_TRAIN_ROWS = 2048
NUM_HELD_OUT_ROWS = 64
DATA_FILES = ("train.jsonl", "held_out.jsonl")
# Tests of the standard library, and packages that a distribution may leave out.
SKIPPED_MODULES = {"ensurepip", "idlelib", "lib2to3", "test", "tests", "tkinter", "turtledemo"}


def stdlib_sources() -> Iterator[tuple[str, str]]:
    """Yield (dotted name, source) of every public standard library module, sorted; nothing is
    imported.
    """

    def walk(names: Iterable[str], path: list[str], prefix: str) -> Iterator[tuple[str, str]]:
        for name in sorted(names):
            if name.startswith("_") or name in SKIPPED_MODULES:
                continue
            spec = PathFinder.find_spec(prefix + name, path)
            loader = spec.loader if spec is not None else None
            if spec is None or not hasattr(loader, "get_source"):
                continue  # built in, or a namespace
            try:
                source = loader.get_source(prefix + name)
            except (ImportError, UnicodeDecodeError):
                continue
            if source is not None:  # None for an extension module
                yield prefix + name, source
            if spec.submodule_search_locations:
                locations = list(spec.submodule_search_locations)
                yield from walk(
                    {module.name for module in pkgutil.iter_modules(locations)},
                    locations,
                    f"{prefix}{name}.",
                )

    yield from walk(sys.stdlib_module_names, [sysconfig.get_path("stdlib")], "")


def docstring_rows(name: str, source: str) -> Iterator[dict[str, str]]:
    """Yield one row for each public class and function of a module that has a docstring, and for
    the module itself.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return

    def walk(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[dict[str, str]]:
        for child in node.body:
            if not isinstance(
                child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) or child.name.startswith("_"):
                continue
            dotted = f"{prefix}.{child.name}"
            if isinstance(child, ast.ClassDef):
                bases = ", ".join(ast.unparse(base) for base in child.bases)
                signature = f"class {dotted}({bases})" if bases else f"class {dotted}"
            else:
                signature = f"def {dotted}({ast.unparse(child.args)})"
            if docstring := ast.get_docstring(child):
                yield {"signature": signature, "docstring": docstring}
            if isinstance(child, ast.ClassDef):
                yield from walk(child, dotted)

    if docstring := ast.get_docstring(tree):
        yield {"signature": f"module {name}", "docstring": docstring}
    yield from walk(tree, name)


def instruction_rows(num_rows: int | None = None) -> list[dict[str, str]]:
    """Return the docstrings of the standard library as rows, in a fixed random order.

    A docstring that several signatures share is kept once, so that no held-out row is a training
    row too.

    Args:
        num_rows: how many to return; ``None`` is all.
    """
    rows: dict[str, dict[str, str]] = {}
    for name, source in stdlib_sources():
        for row in docstring_rows(name, source):
            # A prompt of a few hundred characters could fill the model's sequence and leave no
            # label.
            if len(row["signature"]) <= 200 and len(row["docstring"]) >= 16:
                rows.setdefault(row["docstring"], row)
    shuffled = list(rows.values())
    random.Random(SEED).shuffle(shuffled)
    return shuffled[:num_rows]


def write_data(folder: Path, *, num_rows: int | None = None) -> None:
    """Write train.jsonl and held_out.jsonl into an empty folder."""
    rows = instruction_rows(num_rows)
    if len(rows) < 2 * NUM_HELD_OUT_ROWS:
        raise RuntimeError(
            f"{sysconfig.get_path('stdlib')} holds {len(rows)} docstrings in readable source files;"
            f" the demo needs at least {2 * NUM_HELD_OUT_ROWS}: run it with a Python that has its"
            " standard library's sources"
        )
    held_out, train = rows[:NUM_HELD_OUT_ROWS], rows[NUM_HELD_OUT_ROWS:][:NUM_TRAIN_ROWS]
    for name, part in zip(DATA_FILES, (train, held_out), strict=True):
        (folder / name).write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
        )


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring, or its first paragraph if shorter."""
    paragraph = docstring.split("\n\n")[0]
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


def write_pairs(data: Path, folder: Path) -> None:
    """Write preference pairs into an empty folder, in files named as those of their rows.

    For rows with several sentences, the first sentence is preferred to the whole docstring.

    Args:
        data: folder with train.jsonl and held_out.jsonl, rows of a signature and its docstring.
        folder: empty folder for the pairs.
    """
    for name in DATA_FILES:
        with (folder / name).open("w", encoding="utf-8") as file:
            for row in read_rows(data / name):
                answers = {
                    "chosen": first_sentence(row["docstring"]),
                    "rejected": row["docstring"],
                }
                # Two nearly equal answers express no preference.
                if 2 * len(answers["chosen"]) > len(answers["rejected"]):
                    continue
                pair = {
                    column: [
                        {"role": "user", "content": row["signature"]},
                        {"role": "assistant", "content": answer},
                    ]
                    for column, answer in answers.items()
                }
                file.write(json.dumps(pair) + "\n")
