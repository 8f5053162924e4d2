"""A search on real trials that starts from what is known: an earlier result, or a curve that was
estimated on fake tensors.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from support.cli import SmallSetup

from adaptive_batch.memory import DeviceMemory
from adaptive_batch.probe import ProbeResult, Trial
from adaptive_batch.torchtune import (
    Data,
    Job,
    LimitFinder,
    RunStore,
    Settings,
    Trainer,
)
from adaptive_batch.torchtune.limit_finder import ProbeCache
from adaptive_batch.training import ProbeOptions, SearchScope


def searched(
    small: SmallSetup, *overrides: str, memory: DeviceMemory | None = None, began_on: int = 1
) -> ProbeResult:
    """Search once as the probe recipe does, into a fresh folder; so many ranks began the run."""
    folder = small.fresh_folder()
    given = [override for override in overrides if override != "~fused"]
    cfg = OmegaConf.merge(
        OmegaConf.load(small.config),
        OmegaConf.from_dotlist(
            [f"output_dir={folder}", "probe.round_to_power_of_two=False", *given]
        ),
    )
    assert isinstance(cfg, DictConfig)
    if "~fused" in overrides:
        del cfg.optimizer["fused"]
    settings = Settings.from_config(OmegaConf.to_container(cfg, resolve=True))
    job = Job(cfg, settings)
    job.ranks = began_on
    if memory:
        job.memory = memory
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


def test_a_measured_throughput_is_not_used_for_a_dataset_of_other_lengths(
    small: SmallSetup, tmp_path: Path
) -> None:
    cfg = OmegaConf.load(small.config)
    assert isinstance(cfg, DictConfig)
    cfg.output_dir = str(tmp_path)
    job = Job(cfg, Settings.from_config(OmegaConf.to_container(cfg, resolve=True)))
    data = Data.read(job)
    (longest,) = data.longest(1)
    few_are_long = Data(job, [longest, *[data.dataset[0]] * 7], packed=False)
    all_are_long = Data(job, [longest] * 8, packed=False)

    def cache(data: Data, *kinds: str) -> ProbeCache:
        return ProbeCache(
            job,
            data,
            SearchScope(data.trial_rows("longest"), layouts=kinds, timed_rows=4),
            ProbeOptions(maximum=8),
            path=tmp_path / "probe.json",
        )

    trial = Trial(8, fits=True, peak_bytes=2**20)
    bound = ProbeResult(8, 8, trials=(trial,), seconds=(1.0,), budget_bytes=2**30)
    cache(few_are_long, "grouped").learn(bound)
    assert cache(few_are_long, "grouped").known(2**30) is not None
    assert cache(few_are_long, "grouped", "packed").known(2**30) is None
    assert cache(all_are_long, "grouped").known(2**30) is None
    # The bound itself depends on the longest rows alone.
    cache(few_are_long).learn(bound)
    assert cache(all_are_long).known(2**30) is not None
