"""Hooks in the processes of a program that ``adaptive-batch emulate`` or ``adaptive-batch run``
starts.

The launcher puts the folder of this file first on PYTHONPATH, so Python runs it at the start of
each process.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

_HOOKS = "ADAPTIVE_BATCH_HOOKS"


def environment_with(hook: Path) -> dict[str, str]:
    """Return this process's environment with `hook` as the first hook. A hook that is already set
    is not repeated.

    Args:
        hook: Python file with a function ``install``.
    """
    hooks = [str(hook), *os.environ.get(_HOOKS, "").split(os.pathsep)]
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        _HOOKS: os.pathsep.join(filter(None, dict.fromkeys(hooks))),
        "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths))),
    }


def load_hooks() -> None:
    """Import the hooks from their files, as the program's environment may lack this package, and
    install them in this process. A hook that is gone, as after an upgrade, is left out.
    """
    files = map(Path, os.environ.get(_HOOKS, "").split(os.pathsep))
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


if __name__ == "sitecustomize":
    load_hooks()
    run_other_sitecustomize()
