"""The line of packages: imports go downward along it, through faces, and the core needs torch alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adaptive_batch"
LINE = "schedules, distributed < data, memory < probe, estimate, checkpoint < training, report < torchtune < recipes"
TIER = {name: tier for tier, names in enumerate(LINE.split(" < ")) for name in names.split(", ")}
BELOW_ALL = {"errors", "_util", "_torch"}
OUTSIDE = sys.stdlib_module_names | {"torch"}
OPTIONAL = {"report": {"matplotlib", "jinja2"}, "_util.py": {"tqdm"}}  # imported where it is used
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "recipes").glob("*.py"))]


def imports(path):
    """Absolute dotted names of what a file imports, each with the name it takes from there."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_go_down_the_line_and_through_faces(path):
    parts = path.relative_to(ROOT).parts
    own = "recipes" if parts[0] == "recipes" else parts[1]
    if own in ("__init__.py", "__main__.py"):
        return
    for module, name in imports(path):
        first, *rest = module.split(".")
        if first != "adaptive_batch":
            assert own in ("torchtune", "recipes") or first in OUTSIDE | OPTIONAL.get(own, set()), module
            continue
        other = rest[0] if rest else name
        if other == own or other in BELOW_ALL or other == "__version__":
            continue
        assert own not in ("errors.py", "_util.py", "_torch.py"), f"{own} lies below all, and imports {module}"
        assert TIER[other] < TIER[own], f"{own} imports {module}: against {LINE}"
        assert len(rest) < 2, f"{module}.{name}: past the face of {other}"
        if rest:
            assert f'"{name}"' in (PACKAGE / other / "__init__.py").read_text(), f"{name} is not in {other}.__all__"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_private_names_of_torch_are_asked_for_in_one_place(path):
    if path.name != "_torch.py":
        modules = [f"{module}.{name}" for module, name in imports(path)]
        used = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        private = [name for name in modules + used if re.match(r"torch(\.\w+)*\._[a-zA-Z]", name)]
        # an operator's own name; the profiler, whose call PyTorch documents under this one
        allowed = ("torch.ops.", "torch.cuda.memory._record_memory_history")
        assert [name for name in private if not name.startswith(allowed)] == []


def test_the_core_imports_where_torchtune_and_its_needs_are_blocked():
    blocked = ("torchtune", "torchao", "torchdata", "omegaconf", "datasets", "tokenizers", "tqdm", "matplotlib")
    core = [name for name in TIER if name not in ("torchtune", "recipes")]
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); "
    program += "import adaptive_batch; assert 'torch' not in sys.modules; " + "; ".join(
        f"import adaptive_batch.{name}" for name in core
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
