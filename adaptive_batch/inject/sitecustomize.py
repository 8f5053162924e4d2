"""Python runs this file at the start of each process of a program that ``adaptive-batch emulate``
or ``adaptive-batch run`` has started: the launcher puts its folder first on PYTHONPATH.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path


def load_hooks() -> None:
    """Import the hooks from their files, as the program's environment may lack this package, and
    install them in this process. A hook that is gone, as after an upgrade, is left out.
    """
    files = map(Path, os.environ.get("ADAPTIVE_BATCH_HOOKS", "").split(os.pathsep))
    for file in filter(Path.is_file, files):
        name = f"_adaptive_batch_{file.parent.name}"
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(file.parent)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        sys.modules[name].install()


def run_other_sitecustomize() -> None:
    """Import the sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own
    finally:
        sys.path.insert(0, here)  # torch.compile's workers get sys.path as their PYTHONPATH


load_hooks()
run_other_sitecustomize()
