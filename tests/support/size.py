"""Count the code of each package: ``python tests/support/size.py [--write]``.

``--write`` lowers the limits in tests/project/size.csv to these counts. It never raises one.
"""

from __future__ import annotations

import ast
import csv
import io
import sys
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

TABLE = Path(__file__).parents[1] / "project" / "size.csv"
UNITS = ("statements", "tokens", "modules", "lines")
_CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Counts = dict[str, int]


def count_code(text: str) -> Counts:
    """Count the statements and tokens of a module, without docstrings and comments."""
    tree = ast.parse(text)
    statements = 0
    for node in ast.walk(tree):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        statements += isinstance(node, ast.stmt) and not is_constant
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    tokens = tokenize.generate_tokens(io.StringIO(ast.unparse(tree)).readline)
    num_tokens = sum(token.type in _CODE for token in tokens)
    return {"statements": statements, "tokens": num_tokens, "modules": 1}


def sum_code(files: Iterable[Path]) -> Counts:
    """Add up the counts of files."""
    counts = [count_code(file.read_text(encoding="utf-8")) for file in files]
    return {unit: sum(each[unit] for each in counts) for unit in UNITS[:3]}


def measure(root: Path) -> dict[str, Counts]:
    """Return the counts of a checkout: each package, their sum, and the lines of tests and of
    benchmarks.
    """
    package = root / "adaptive_batch"
    folders = sorted(path.parent for path in package.glob("*/__init__.py"))
    counts = {folder.name: sum_code(folder.rglob("*.py")) for folder in folders}
    counts["top-level files"] = sum_code(package.glob("*.py"))
    counts["recipes"] = sum_code((root / "recipes").rglob("*.py"))
    counts["sum"] = {unit: sum(each[unit] for each in counts.values()) for unit in UNITS[:3]}
    for name in ("tests", "benchmarks"):
        files = (root / name).rglob("*.py")
        lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
        counts[name] = {"lines": lines}
    return counts


def read_limits() -> dict[str, dict[str, str]]:
    """Return the rows of the table by part."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["part"]: row for row in csv.DictReader(file)}


def write_limits(counts: Mapping[str, Counts]) -> None:
    """Lower the limits to the counts, and remove the rows of parts that are gone."""
    limits = read_limits()
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["part", *UNITS, "reason"], lineterminator="\n")
        writer.writeheader()
        for part, row in limits.items():
            if part in counts:
                lowest = {u: min(int(row[u]), count) for u, count in counts[part].items()}
                writer.writerow({**row, **lowest})


if __name__ == "__main__":
    measured = measure(TABLE.parents[2])
    for part, counts in measured.items():
        print(f"{part:16}", *(f"{count:8,} {unit}" for unit, count in counts.items()))
    if "--write" in sys.argv:
        write_limits(measured)
