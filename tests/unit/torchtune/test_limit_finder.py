"""Searches with real trials."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf
from support.cli import SmallSetup
from support.tasks import PAIRS

from adaptive_batch.errors import SettingError
from adaptive_batch.probe import ProbeResult
from adaptive_batch.torchtune import Data, Job, LimitFinder, RunStore, Settings, Trainer
from adaptive_batch.torchtune.configuration import merged
from adaptive_batch.training import MicroBatchSizer


def set_up(small: SmallSetup, *overrides: str, began_on: int = 1) -> tuple[LimitFinder, Trainer]:
    """Prepare searches in a new folder for a run that began on ``began_on`` ranks."""
    given = [f"output_dir={small.fresh_folder()}", "probe.round_to_power_of_two=False", *overrides]
    cfg = merged(OmegaConf.load(small.config), given)
    job = Job(cfg, Settings.from_config(cfg))
    job.ranks = began_on
    data = Data.read(job)
    finder = LimitFinder(job, data)
    finder.check()
    sizer = MicroBatchSizer(
        micro_batch_size=job.settings.micro_batch_size,
        micro_batch_tokens=job.settings.micro_batch_tokens,
        layout=data.configured_layout,
        memory=job.memory,
    )
    return finder, Trainer.load(job, data, RunStore(job).weights, sizer)


def searched(small: SmallSetup, *overrides: str, began_on: int = 1) -> ProbeResult:
    finder, trainer = set_up(small, *overrides, began_on=began_on)
    return finder.search_training(trainer, length="longest")


def test_trials_hold_gradients_if_a_rank_takes_the_rows_of_another(small: SmallSetup) -> None:
    options = ("probe.device_memory=6MiB", "probe.cache=False")
    whole = searched(small, *options)
    several = searched(small, *options, "gradient_accumulation_steps=2")
    holds_more = searched(small, *options, began_on=2)
    assert holds_more.max_batch_size == several.max_batch_size < whole.max_batch_size


def test_a_search_does_not_set_the_bounds_of_sizers(small: SmallSetup) -> None:
    finder, trainer = set_up(small, *PAIRS.overrides(small), "reference_micro_batch_size=auto")
    assert finder.search_training(trainer, length="longest").max_batch_size
    assert finder.search_reference(trainer, batch_size=2).max_batch_size
    for sizer in (trainer.engine.sizer, trainer.reference_sizer):
        assert sizer.max_batch_size is None


def test_the_error_of_a_reference_that_was_not_tried_gives_the_tried_rows(
    small: SmallSetup,
) -> None:
    options = ("reference_micro_batch_size=16", "probe.maximum=2")
    finder, trainer = set_up(small, *PAIRS.overrides(small), *options)
    with pytest.raises(SettingError, match=r"of up to 2 rows of \d+ tokens found that 2 rows fit"):
        finder.search_reference(trainer, batch_size=2)


@pytest.mark.parametrize(
    "changed", ["probe.trial_seconds=50", "sample_order=seqlen", "uniform_micro_batches=lengths"]
)
def test_a_stored_result_is_used_under_its_own_conditions_alone(
    small: SmallSetup, changed: str
) -> None:
    options = [
        f"output_dir={small.fresh_folder()}",
        "probe.device_memory=6MiB",
        "micro_batch_tokens=auto",
        "uniform_micro_batches=rows",
    ]
    given = (options, options, [*options, changed])
    found = [searched(small, *each) for each in given]
    assert [result.from_cache for result in found] == [False, True, False]
    assert all(result.throughput for result in found)


def test_a_preview_uses_only_results_of_trials_with_the_gradients_of_its_steps(
    small: SmallSetup,
) -> None:
    options = (f"output_dir={small.fresh_folder()}", "use_maximum_batch_size=True")
    found = searched(small, *options)
    for steps, expected in ((1, found.max_batch_size), (2, None)):
        finder, _ = set_up(small, *options, f"gradient_accumulation_steps={steps}")
        known = finder.known()
        assert (known and known.max_batch_size) == expected
