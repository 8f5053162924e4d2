"""The house: rooms import from lower floors only, the core needs torch alone, two seams ask the outside."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "adaptive_batch"

FLOORS = (
    {
        "errors",
        "progress",
        "extrapolation",
        "curve",
        "noise_scale",
        "preemption",
        "full_batch_loss",
        "agreement",
        "cuda_difference",
        "processes",
    },
    {
        "counting",
        "keys",
        "order",
        "filling",
        "schedule",
        "epoch_plan",
        "durations",
        "state_tree",
        "report",
        "schedule_rule",
        "saved_tensors",
    },
    {"attribution", "memory", "distributed", "token_batches", "clock", "batch_schedules", "named_state", "rank_parts"},
    {
        "search",
        "growth",
        "batching",
        "learning_rate",
        "fingerprint",
        "lengths",
        "varying_budget",
        "sharding",
        "watch",
        "point_reading",
        "point_content",
        "devices",
    },
    {
        "curve_cache",
        "snapshot",
        "stream",
        "probe",
        "components",
        "replay",
        "plan",
        "dealing",
        "resume_point",
        "any_rows",
    },
    {"in_backward", "accumulation", "probe_settings", "validation_settings", "resume", "step_rows"},
    {"trial", "evaluation", "fake_step"},
    {"memory_plan", "settings", "shipped", "environment", "loop"},
    {
        "no_effect",
        "history.lineage",
        "history.coverage",
        "history.changes",
        "history.repeats",
        "figures.series",
        "saved_plan",
    },
    {"history.ledger", "history.timeline", "figures.figure"},
    {"audit", "figures.look", "figures.facts", "figures.probe_figure", "figures.plan_figure", "figures.beside"},
    {"figures.drawing", "figures.of_run"},
    {"figures.images"},
    {"page"},
    {"__main__"},
)
STANDARD_LIBRARY_OR_TORCH = sys.stdlib_module_names | {"torch", "__future__"}
# What an extra brings, imported where it is used and never with the package.
OPTIONAL = {"figures.drawing": {"matplotlib"}, "figures.images": {"matplotlib"}}


def rooms() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Names of the rooms that a room imports, and of the top-level packages from outside."""
    inside, outside = set(), set()
    names = {name_of(room) for room in rooms()}
    folder = ["adaptive_batch", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            begin = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*begin, *([node.module] if node.module else [])])
            found = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in found:
            first, _, rest = module.partition(".")
            if first == "adaptive_batch":
                inside.add(rest)
            else:
                outside.add(first)
    return inside & names, outside


def floor(room: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if room in names)


@pytest.mark.parametrize("path", rooms(), ids=name_of)
def test_a_room_imports_from_lower_floors_only(path):
    inside, _ = imports(path)
    assert {room for room in inside if floor(room) >= floor(name_of(path))} == set()


@pytest.mark.parametrize("path", rooms(), ids=name_of)
def test_the_core_imports_torch_and_the_standard_library_only(path):
    _, outside = imports(path)
    assert outside <= STANDARD_LIBRARY_OR_TORCH | OPTIONAL.get(name_of(path), set())


@pytest.mark.parametrize(
    ("seam", "words"),
    [
        ("memory", r"empty_cache|mem_get_info|\.memory_stats"),
        (
            "distributed",
            r"all_reduce|all_gather_object|broadcast_object|new_group|rendezvous\(|dist\.init_process_group\(",
        ),
        ("watch", r"os\._exit"),
        ("sharding", r"FSDPModule|_get_fsdp_state"),
    ],
)
def test_a_seam_is_the_only_room_that_asks(seam, words):
    asking = {name_of(path) for path in rooms() if re.search(words, path.read_text())}
    assert asking == {seam}


def test_the_package_imports_where_torchtune_and_its_needs_are_blocked():
    program = textwrap.dedent(
        """
        import importlib, pkgutil, sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"torchtune", "torchao", "torchdata", "omegaconf", "datasets", "tokenizers", "tqdm", "matplotlib"}:
                    raise ImportError(name + " is blocked")

        sys.meta_path.insert(0, Block())
        import adaptive_batch
        for room in pkgutil.walk_packages(adaptive_batch.__path__, "adaptive_batch."):
            if room.name != "adaptive_batch.__main__":
                importlib.import_module(room.name)
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_architecture_page_has_each_room_on_its_floor():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    found, number = {}, -1
    for line in re.findall(r"^\| *(\d*) *\| (`.*?) \|", page, re.MULTILINE):
        number = int(line[0]) if line[0] else number
        found |= dict.fromkeys(re.findall(r"`([\w.]+)`", line[1]), number)
    assert found.items() >= {name: floor for floor, names in enumerate(FLOORS) for name in names}.items()
