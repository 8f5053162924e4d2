"""How code meets the eye, in figures: ``python tests/support/readability.py [PATH ...]``.

Figures describe. They are no target to meet by renaming or by tearing lines apart: a reader who
knows PyTorch and not this project should say what a function does after reading it once.
"""

import ast
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from support.paths import ROOT

# Locals that say where a value was met, and not what it is.
PRONOUNS = {
    *("one", "ones", "found", "before", "after", "most", "least", "why", "mine", "those", "these"),
    *("here", "there", "other", "others", "each", "given", "said", "asked", "taken", "what"),
    *("which", "known", "held", "wanted"),
}


@dataclass
class Figures:
    """Counts of some files.

    Attributes:
        lines: lines of text.
        statements: statements, docstrings apart.
        pronouns: assignments to a local of :data:`PRONOUNS`.
        conditional_expressions: ``a if b else c``.
        parallel_assignments: ``a, b = x, y``.
        walruses: ``a := x``.
        comments: lines that hold only a comment.
    """

    lines: int = 0
    statements: int = 0
    pronouns: int = 0
    conditional_expressions: int = 0
    parallel_assignments: int = 0
    walruses: int = 0
    comments: int = 0

    def per_thousand_lines(self, name: str) -> float:
        """Return one of the counts, per 1,000 lines."""
        return 1000 * getattr(self, name) / max(1, self.lines)

    def add(self, text: str) -> None:
        """Count one file."""
        lines = text.splitlines()
        self.lines += len(lines)
        self.comments += sum(line.lstrip().startswith("#") for line in lines)
        for node in ast.walk(ast.parse(text)):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            self.statements += isinstance(node, ast.stmt) and not is_docstring
            self.pronouns += (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Store)
                and node.id in PRONOUNS
            )
            self.conditional_expressions += isinstance(node, ast.IfExp)
            self.walruses += isinstance(node, ast.NamedExpr)
            self.parallel_assignments += (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and any(isinstance(target, ast.Tuple) for target in node.targets)
            )


def figures_of(*paths: Path) -> Figures:
    """Count all Python files below some folders."""
    figures = Figures()
    for path in paths:
        for file in sorted(path.rglob("*.py")):
            figures.add(file.read_text(encoding="utf-8"))
    return figures


def class_lines(*paths: Path) -> dict[str, int]:
    """Return the lines of each class below some folders, docstrings included, by file and name."""
    lines = {}
    for path in paths:
        for file in sorted(path.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    assert node.end_lineno is not None
                    name = f"{file.relative_to(ROOT).as_posix()}:{node.name}"
                    lines[name] = node.end_lineno - node.lineno + 1
    return lines


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]]
    figures = figures_of(*(paths or [ROOT / "adaptive_batch", ROOT / "recipes"]))
    for field in fields(figures):
        count = getattr(figures, field.name)
        rate = figures.per_thousand_lines(field.name)
        print(f"{field.name:24} {count:7,} {rate:7.1f} per 1,000 lines")
