"""What several test files need."""

import pytest


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small real setup to run recipes on; each run writes into a folder of its own."""
    from support.cli import make_setup  # imports torchtune, which most tests do without

    return make_setup(tmp_path_factory.mktemp("small"))
