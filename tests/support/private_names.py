"""List the private names of other libraries that the package uses:
``python tests/support/private_names.py``.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path

import torch

TABLE = Path(__file__).parents[1] / "project" / "private_names.csv"
_NAME = re.compile(r"_[a-zA-Z]\w*")
_DOTTED = re.compile(r"(torch|lightning|transformers)\w*(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")
_NOT_PRIVATE = {
    # Names that Python documents.
    *("_current_frames", "_exit", "_fields", "_getframe", "_replace"),
    # A key of torchtune's configurations, the start of the names of operators, a module of ours.
    *("_component_", "_scaled_dot_product_", "_adaptive_batch_"),
    # The names in it count.
    "torch._C",
}
# Private names of nn.Module and of Trainer that classes of the package have too.
_SHARED = {
    *("_buffers", "_modules", "_parameters"),
    *("_get_learning_rate", "_init_training_state", "_run_epoch"),
}


def names_in(root: Path) -> dict[str, set[str]]:
    """Return the private names in the package and the recipes of a checkout, with their files.

    A name of a module is dotted. Registered operators are left out, since their schemas are stable.
    """
    files = [*(root / "adaptive_batch").rglob("*.py"), *(root / "recipes").rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    own = {name for tree in trees.values() for name in _defined(tree)} - _SHARED
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in _used(tree):
            is_private = _NAME.fullmatch(name) or _DOTTED.fullmatch(name)
            if is_private and name not in own | _NOT_PRIVATE:
                found.setdefault(name, set()).add(path.relative_to(root).as_posix())
    return found


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _used(tree: ast.Module) -> Iterator[str]:
    """Yield the names in imports, attributes, keywords, strings and calls of `private`."""
    joined: set[ast.expr] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                yield from (f"{module}.{alias.name}" for alias in aliases)
            case ast.Call(func=ast.Name(id="private"), args=[ast.Constant(value=owner), *names]):
                joined.update(node.args)
                constants = [name.value for name in names if isinstance(name, ast.Constant)]
                yield from (f"{owner}.{name}" for name in constants)
            case ast.Attribute(value=owner, attr=name):
                dotted = f"{ast.unparse(owner)}.{name}"
                if re.fullmatch(r"(self|cls|aten|torch\.ops\.aten)\.\w+", dotted):
                    continue
                yield dotted if _DOTTED.fullmatch(dotted) else name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)) if node not in joined:
                if not hasattr(torch.ops.aten, text):
                    yield text


def read_table() -> dict[str, dict[str, str]]:
    """Return the rows of the table by name."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


if __name__ == "__main__":
    rows = read_table()
    for name, files in sorted(names_in(TABLE.parents[2]).items()):
        library = rows[name]["library"] if name in rows else "not listed"
        print(f"{library:18} {name:50} {' '.join(sorted(files))}")
