"""What several test files need."""

import gc

import pytest
import support.ranks  # noqa: F401  # says what the server of forked processes imports before there is one
from hypothesis import settings

# how long an example takes depends on what else the machine runs
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


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


@pytest.fixture(scope="module")
def one_thread():
    """PyTorch on one thread: where models are tiny, several would mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small real setup to run recipes on; each run writes into a folder of its own."""
    from support.cli import make_setup  # imports torchtune, which most tests do without

    return make_setup(tmp_path_factory.mktemp("small"))
