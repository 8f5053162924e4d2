"""Where things are, and the environment in which a process of its own finds what tests name by
dotted paths.
"""

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
