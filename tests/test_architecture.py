"""The house: rooms import from lower floors only, the core needs torch alone, two seams ask the outside."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "adaptive_batch"

FLOORS = (
    {"errors", "progress", "extrapolation"},
    {"counting", "keys", "order", "filling", "schedule"},
    {"memory", "distributed", "token_batches"},
    {"search", "growth", "batching", "learning_rate", "fingerprint", "lengths"},
    {"snapshot", "stream", "probe", "components", "replay"},
    {"in_backward", "accumulation", "probe_settings"},
    {"trial", "evaluation"},
    {"settings", "report", "shipped", "environment"},
    {"__main__"},
)
STANDARD_LIBRARY_OR_TORCH = sys.stdlib_module_names | {"torch", "__future__"}


def rooms() -> list[Path]:
    return sorted(path for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Names of the rooms that a room imports, and of the top-level packages from outside."""
    inside, outside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                (inside.add(rest[0]) if first == "adaptive_batch" and rest else outside.add(first))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or module.split(".")[0] == "adaptive_batch":
                module = module.removeprefix("adaptive_batch").lstrip(".")
                inside.update([module.split(".")[0]] if module else [alias.name for alias in node.names])
            else:
                outside.add(module.split(".")[0])
    return inside & {room.stem for room in rooms()}, outside - {"adaptive_batch"}


def floor(room: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if room in names)


@pytest.mark.parametrize("path", rooms(), ids=lambda path: path.stem)
def test_a_room_imports_from_lower_floors_only(path):
    inside, _ = imports(path)
    assert {room for room in inside if floor(room) >= floor(path.stem)} == set()


@pytest.mark.parametrize("path", rooms(), ids=lambda path: path.stem)
def test_the_core_imports_torch_and_the_standard_library_only(path):
    _, outside = imports(path)
    assert outside <= STANDARD_LIBRARY_OR_TORCH


@pytest.mark.parametrize(
    ("seam", "words"),
    [("memory", ("empty_cache", "mem_get_info", ".memory_stats")), ("distributed", ("torch.distributed",))],
)
def test_a_seam_is_the_only_room_that_asks(seam, words):
    asking = {path.stem for path in rooms() if any(word in path.read_text() for word in words)}
    assert asking == {seam}


def test_the_package_imports_where_torchtune_and_its_needs_are_blocked():
    program = textwrap.dedent(
        """
        import importlib, pkgutil, sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"torchtune", "torchao", "torchdata", "omegaconf", "datasets", "tokenizers", "tqdm"}:
                    raise ImportError(name + " is blocked")

        sys.meta_path.insert(0, Block())
        import adaptive_batch
        for room in pkgutil.iter_modules(adaptive_batch.__path__):
            if room.name != "__main__":
                importlib.import_module("adaptive_batch." + room.name)
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
