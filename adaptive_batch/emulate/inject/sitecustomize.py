"""Python runs this file at the start of each process of an emulated program: the launcher puts its
folder first on PYTHONPATH.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PACKAGE = FOLDER.parent
NAME = "_adaptive_batch_emulate"


def run(spec: ModuleSpec | None) -> None:
    """Import a module that was found."""
    if spec is not None and spec.loader is not None:
        sys.modules[spec.name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


# By the path: the program's environment may lack adaptive_batch.
run(
    spec_from_file_location(NAME, PACKAGE / "process.py", submodule_search_locations=[str(PACKAGE)])
)
sys.modules[NAME].install()

# The sitecustomize that this one hides. sys.path stays: torch.compile's workers get it as theirs.
others = [path for path in sys.path if Path(path).resolve() != FOLDER]
run(PathFinder.find_spec("sitecustomize", others))
