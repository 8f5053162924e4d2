"""Fixtures of several test files."""

import gc
import os
import random
import re
import signal

import pytest

# Read as torch is imported, here and in processes that tests start: models are tiny, and threads of
# two workers on two cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import support.processes  # noqa: F401  # sets what the server of forked processes imports
import torch
from hypothesis import settings

from adaptive_batch.memory import ALLOCATOR_VARIABLES

# Examples have no deadline, as their time depends on what else the machine runs. `make test` and CI
# draw the same examples each time. `make nightly` draws others each night, ten times as many, and
# prints how to repeat the one that fails.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# No test takes the power away, and a small run that saves mostly waits for the disk.
os.fsync = lambda descriptor: None


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


@pytest.fixture(autouse=True)
def _random_numbers_are_the_same_in_any_order_of_tests():
    """Each test begins with the same random numbers, whatever ran before it in this process."""
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed would prepare devices too.
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _the_allocator_is_as_before():
    """Building a step switches on expandable segments for the rest of the process and for those
    that it starts.
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
    """As in a terminal: a shell's background process ignores some of these signals."""
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
    """A small real setup to run recipes on; each run writes into a folder of its own."""
    from support.cli import make_setup  # imports torchtune, which most tests do without

    return make_setup(tmp_path_factory.mktemp("small"))
