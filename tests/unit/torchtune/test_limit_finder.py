"""A search on real trials."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from support.cli import SmallSetup

from adaptive_batch.probe import ProbeResult
from adaptive_batch.torchtune import Data, Job, LimitFinder, RunStore, Settings, Trainer


def searched(small: SmallSetup, *overrides: str, began_on: int = 1) -> ProbeResult:
    """Search once as the probe recipe does, into a fresh folder; so many ranks began the run."""
    given = [f"output_dir={small.fresh_folder()}", "probe.round_to_power_of_two=False", *overrides]
    cfg = OmegaConf.merge(OmegaConf.load(small.config), OmegaConf.from_dotlist(given))
    assert isinstance(cfg, DictConfig)
    job = Job(cfg, Settings.from_config(OmegaConf.to_container(cfg, resolve=True)))
    job.ranks = began_on
    data = Data.read(job)
    bounds = LimitFinder(job, data)
    bounds.check()
    trainer = Trainer.load(job, data, RunStore(job), data.new_sizer())
    return bounds.search_training(trainer, length="longest")


def test_a_rank_that_holds_the_rows_of_another_is_tried_beside_gradients(small: SmallSetup) -> None:
    options = ("probe.device_memory=6MiB", "probe.cache=False")
    whole = searched(small, *options)
    several = searched(small, *options, "gradient_accumulation_steps=2")
    holds_more = searched(small, *options, began_on=2)
    assert holds_more.max_batch_size == several.max_batch_size < whole.max_batch_size
