"""Paths of the checkout, and the environment of processes that tests start."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def subprocess_environment(**variables: str) -> dict[str, str]:
    """Return the environment with the tests' folder on PYTHONPATH, and `variables` set."""
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
