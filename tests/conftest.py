"""What several test files need."""

import gc
import os
import re

import pytest

# Read as torch is imported, here and in processes that tests start: models are tiny, and threads of
# two workers on two cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import support.ranks  # noqa: F401  # says what the server of forked processes imports before there is one
from hypothesis import settings

# how long an example takes depends on what else the machine runs
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_ignore_collect(collection_path, config):
    """Only files with the mark that `-m` asks for are imported: all of them take 17 seconds."""
    asked = re.fullmatch(r"(\w+)( and not \w+)*", config.option.markexpr)
    if asked and collection_path.name.startswith("test_"):
        return f"pytest.mark.{asked[1]}" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_finish():
    """Trials and retries collect garbage hundreds of times, and what is imported need not be looked
    through every time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_files_left_is_not_looked_through():
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small real setup to run recipes on; each run writes into a folder of its own."""
    from support.cli import make_setup  # imports torchtune, which most tests do without

    return make_setup(tmp_path_factory.mktemp("small"))
