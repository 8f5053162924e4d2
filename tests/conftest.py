"""Fixtures of several test files."""

import gc
import os
import random
import re
import signal

import pytest

# torch reads this at its import, here and in processes of tests. The models are tiny, and threads
# of two workers on two cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import support.processes  # noqa: F401  # sets the imports of the server of forked processes
import torch
from hypothesis import settings

from adaptive_batch.memory import ALLOCATOR_VARIABLES

# Examples have no deadline, since their time depends on other load. `make test` and CI draw the
# same examples each time. `make nightly` draws new ones, ten times as many, and prints how to
# repeat a failure.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# No test needs data on the disk after a power cut, and small saves mostly wait for the disk.
os.fsync = lambda descriptor: None


def pytest_ignore_collect(collection_path, config):
    """Import only files with the mark of `-m`, since all imports take 17 seconds."""
    asked = re.fullmatch(r"(\w+)( and not \w+)*", config.option.markexpr)
    if asked and collection_path.name.startswith("test_"):
        return f"pytest.mark.{asked[1]}" not in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_finish():
    """Freeze imported objects, since trials and retries collect garbage hundreds of times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _objects_of_earlier_files_are_frozen():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _each_test_begins_with_the_same_seeds():
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed would prepare devices too.
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _allocator_settings_are_restored():
    """Restore the settings, since a step switches on expandable segments for the process and its
    children.
    """
    before = {name: os.environ.get(name) for name in ALLOCATOR_VARIABLES}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if torch.cuda.is_initialized():
        # The second call makes the allocator's text empty, as if no program had set anything.
        for text in ("expandable_segments:False", ""):
            torch._C._accelerator_setAllocatorSettings(text)


@pytest.fixture
def usual_signal_handlers():
    """Set the handlers of a process in a terminal; a background process may ignore some signals."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small setup for runs of recipes; each run writes into a new folder."""
    from support.cli import make_setup  # imports torchtune, which most tests do without

    return make_setup(tmp_path_factory.mktemp("small"))
