"""Packages import public names of lower packages only, and the core needs torch alone."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import adaptive_batch
from adaptive_batch import AdaptiveBatches, AdaptiveLoop, AdaptiveRate, AdaptiveStep
from adaptive_batch._torch import NAMES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "adaptive_batch"
LINE = (
    "schedules, distributed, emulate < data, memory < probe, estimate, checkpoint < training,"
    " report < torchtune, integrations < recipes"
)
# Modules that import from all packages, and that no package imports.
ABOVE_ALL = ("doctor", "__main__")
TIER = {
    name: tier
    for tier, names in enumerate((*LINE.split(" < "), *ABOVE_ALL))
    for name in names.split(", ")
}
BELOW_ALL = {"errors", "_util", "_torch", "_random", "config_files", "inject"}
# PyTorch's wheel holds both.
OUTSIDE = sys.stdlib_module_names | {"torch", "functorch"}
# Imported where it is used.
OPTIONAL = {
    "report": {"matplotlib", "jinja2"},
    "_util": {"tqdm"},
    "doctor": {"packaging"},
    # Lightning brings the second, Axolotl the third; its plugin adopts a Trainer of Transformers.
    "integrations": {"numpy", "torchmetrics", "pydantic", "transformers"},
}
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "recipes").glob("*.py"))]


def imports(path):
    """Return the absolute names of the imports of a file, each with the imported name."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_use_public_names_of_lower_packages(path):
    parts = path.relative_to(ROOT).parts
    own = "recipes" if parts[0] == "recipes" else Path(parts[1]).stem
    if own == "__init__":
        return
    for module, name in imports(path):
        first, *rest = module.split(".")
        if first != "adaptive_batch":
            known = OUTSIDE | OPTIONAL.get(own, set())
            if own == "integrations":
                known = known | {path.stem.split("_")[0]}
            assert own in ("torchtune", "recipes") or first in known, module
            continue
        other = rest[0] if rest else name
        if other == own or other in BELOW_ALL or other == "__version__":
            continue
        assert own not in BELOW_ALL, f"{own} lies below all, and imports {module}"
        assert TIER[other] < TIER[own], f"{own} imports {module}: against {LINE}"
        if other == "integrations":
            # Modules of integrations are imported by name.
            continue
        assert len(rest) < 2, f"{module}.{name}: past the face of {other}"
        if rest and other not in ABOVE_ALL:
            assert f'"{name}"' in (PACKAGE / other / "__init__.py").read_text(), (
                f"{name} is not in {other}.__all__"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_private_names_of_torch_are_read_in_one_place(path):
    # The emulation imports nothing of ours; it runs in programs that lack this package.
    if path.name != "_torch.py" and path.parent.name != "emulate":
        modules = [f"{module}.{name}" for module, name in imports(path)]
        used = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        ]
        private = [name for name in modules + used if re.match(r"torch(\.\w+)*\._[a-zA-Z]", name)]
        # an operator's own name, and two names that PyTorch documents
        allowed = (
            "torch.ops.",
            "torch.cuda.memory._record_memory_history",
            "torch.utils._python_dispatch.TorchDispatchMode",
        )
        assert [name for name in private if not name.startswith(allowed)] == []


def used_at_import(tree):
    """Yield the nodes that run at the import of a module."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from used_at_import(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_private_name_is_bound_at_import(path):
    """A renamed private name then breaks only the code that uses it."""
    for node in used_at_import(ast.parse(path.read_text())):
        is_bound = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "private"
        is_checked = isinstance(node, ast.Call) and ast.unparse(node.func) == "private"
        assert not is_bound, ast.unparse(node)
        assert not is_checked, ast.unparse(node)


def test_each_private_name_is_used():
    text = "".join(path.read_text() for path in FILES if path.name != "_torch.py")
    assert set(re.findall(r"\bprivate\.(\w+)", text)) == set(NAMES)


def test_the_core_imports_if_all_packages_but_torch_are_blocked():
    blocked = (
        *("torchtune", "torchao", "torchdata", "omegaconf", "datasets", "tokenizers", "tqdm"),
        *("transformers", "accelerate", "peft", "lightning", "matplotlib", "jinja2", "numpy"),
    )
    program = f"""
import sys, warnings
sys.modules.update(dict.fromkeys({blocked!r}))
warnings.simplefilter("ignore")
import adaptive_batch, importlib, pkgutil
assert "torch" not in sys.modules
needs_more = ("adaptive_batch.torchtune", "adaptive_batch.integrations.")
path, prefix = adaptive_batch.__path__, "adaptive_batch."
for module in pkgutil.walk_packages(path, prefix, onerror=lambda name: None):
    if not module.name.startswith(needs_more):
        importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.slow
def test_training_does_not_import_the_simulated_allocator():
    program = (
        "import sys, adaptive_batch.training; print(*(name for name in sys.modules if '.estimate'"
        " in name))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True
    )
    assert [
        name for name in finished.stdout.split() if name.startswith("adaptive_batch.estimate")
    ] == []


def test_the_public_names_are_exactly_these():
    assert {"AdaptiveLoop", "SettingError", "steps"} <= set(adaptive_batch.__all__)
    assert [
        getattr(adaptive_batch, name).__name__ for name in adaptive_batch.__all__
    ] == adaptive_batch.__all__
    with pytest.raises(
        AttributeError, match="module 'adaptive_batch' has no attribute 'AdaptiveLop'"
    ):
        _ = adaptive_batch.AdaptiveLop


def assigned_attributes(tree):
    """Return the attributes that a file assigns to, on any object."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            each_target = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            yield from (one for one in each_target if isinstance(one, ast.Attribute))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_the_sizer_sets_the_limit_of_a_micro_batch(path):
    owned = re.compile(r"limit|layout|bound|batch|watch|event|max_batch_size")
    for attribute in assigned_attributes(ast.parse(path.read_text())):
        is_own = isinstance(attribute.value, ast.Name) and attribute.value.id == "self"
        # FSDP's events are reset after a failed backward.
        is_torchs = path.name == "fsdp.py" and attribute.attr.endswith("_event")
        assert is_own or is_torchs or not owned.search(attribute.attr), ast.unparse(attribute)


@pytest.mark.parametrize(
    ("kind", "most"),
    [(AdaptiveStep, 8), (AdaptiveBatches, 8), (AdaptiveRate, 8), (AdaptiveLoop, 17)],
)
def test_public_constructors_take_few_arguments(kind, most):
    assert len(inspect.signature(kind).parameters) <= most


UNIT = ROOT / "tests" / "unit"


@pytest.mark.parametrize(
    "path", sorted(UNIT.rglob("test_*.py")), ids=lambda path: path.relative_to(UNIT).as_posix()
)
def test_a_unit_file_is_named_after_its_module(path):
    """A file is ``test_MODULE.py``, or ``test_MODULE_ASPECT.py`` if a module has several."""
    package = PACKAGE / path.parent.relative_to(UNIT)
    modules = {file.stem.lstrip("_") for file in package.iterdir()} - {"init__", "pycache__"}
    subject = path.stem.removeprefix("test_")
    assert any(subject == module or subject.startswith(f"{module}_") for module in modules)


def test_benchmarks_and_examples_import_only_names_that_exist():
    missing = []
    for folder in ("examples", "benchmarks", "docs/tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
                    continue
                if node.module.partition(".")[0] != "adaptive_batch":
                    continue
                module = importlib.import_module(node.module)
                missing += [
                    f"{path.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not (
                        hasattr(module, "__path__")
                        and importlib.util.find_spec(f"{node.module}.{alias.name}")
                    )
                ]
    assert not missing
