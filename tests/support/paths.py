"""Paths of the checkout, and the environment in which a child finds components of tests."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def subprocess_environment(**variables: str) -> dict[str, str]:
    """This process's variables, with the tests' folder on PYTHONPATH and `variables` in place of
    what was there.
    """
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}
