"""Code that ends the process within a run: no run that is not over ends as if it were."""

import pytest
from support.cli import OURS

from adaptive_batch.errors import AdaptiveBatchError

ENDS = ("loss=support.components.LossThatEnds", "epochs=1", "max_steps_per_epoch=2")


@pytest.mark.parametrize("recipe", [OURS, "adaptive_probe"])
@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_is_an_error_that_names_the_line(small, recipe, status):
    with pytest.raises(
        AdaptiveBatchError,
        match=rf"sys\.exit\({status}\) was called in forward \(.*components\.py:\d+\)",
    ):
        small.run_in_process(recipe, *ENDS, f"loss.status={status}")


def test_ctrl_c_goes_through(small):
    with pytest.raises(KeyboardInterrupt):
        small.run_in_process(OURS, *ENDS, "loss.status=null")
