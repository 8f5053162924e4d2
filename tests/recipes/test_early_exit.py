"""Code that ends the process within a run: no run that is not over ends as if it were."""

import pytest
from support.cli import OURS

from adaptive_batch.errors import AdaptiveBatchError

ENDS = ("loss=support.components.LossThatEnds", "epochs=1", "max_steps_per_epoch=2")


@pytest.mark.parametrize("recipe", [OURS, "adaptive_probe"])
def test_an_exit_with_success_is_an_error_that_names_the_line(small, recipe):
    with pytest.raises(AdaptiveBatchError, match=r"components\.py:\d+ \(forward\) ended the process with status 0"):
        small.run_in_process(recipe, *ENDS, "loss.status=0")


@pytest.mark.parametrize(("status", "error"), [(3, AssertionError), ("null", KeyboardInterrupt)])
def test_another_exit_goes_through(small, status, error):
    with pytest.raises(error):
        small.run_in_process(OURS, *ENDS, f"loss.status={status}")
