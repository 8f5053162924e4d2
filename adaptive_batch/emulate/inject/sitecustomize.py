"""Python runs this file at the start of each process of an emulated program: the launcher puts its
folder first on PYTHONPATH.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

NAME = "_adaptive_batch_emulate"


def load_hook() -> None:
    """Import the emulation from beside this file: the program's environment may lack it."""
    package = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(
        NAME, package / "process.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    sys.modules[NAME].install()


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


load_hook()
run_other_sitecustomize()
