"""Hooks that run at the start of each process of a program; see ``inject/sitecustomize.py``."""

from __future__ import annotations

import os
from pathlib import Path

_HOOKS = "ADAPTIVE_BATCH_HOOKS"


def environment_with(hook: Path) -> dict[str, str]:
    """Return this process's environment with a hook first, which within another such program is
    there once.

    Args:
        hook: Python file with a function ``install``.
    """
    hooks = [str(hook), *os.environ.get(_HOOKS, "").split(os.pathsep)]
    paths = [
        str(Path(__file__).with_name("inject")),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    return {
        **os.environ,
        _HOOKS: os.pathsep.join(filter(None, dict.fromkeys(hooks))),
        "PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(paths))),
    }
