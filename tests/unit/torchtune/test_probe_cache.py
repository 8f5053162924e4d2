"""A search on real trials that starts from what is known: an earlier result, or a curve that was
estimated on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from support.cli import SmallSetup

from adaptive_batch.memory import DeviceMemory, Usage
from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.probe import ProbeResult, Trial
from adaptive_batch.torchtune import (
    Data,
    Job,
    LimitFinder,
    RunStore,
    Settings,
    Trainer,
)
from adaptive_batch.torchtune.probe_cache import ProbeCache
from adaptive_batch.training import Choices, ProbeOptions, SearchScope

BLOCK = 64 * 1024


class InBlocks(CountedMemory):
    """A CPU that answers as an accelerator's allocator does: peaks in whole blocks, and no word of
    single operations.
    """

    granularity_bytes = BLOCK

    @contextmanager
    def measure(self, resident: Iterable[torch.Tensor], *, budget_bytes: int) -> Iterator[Usage]:
        with super().measure(resident, budget_bytes=budget_bytes) as usage:
            yield usage
        usage.trace = None
        if usage.peak_bytes is not None:
            usage.peak_bytes = -(-usage.peak_bytes // BLOCK) * BLOCK


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
    trainer = Trainer.load(job, data, RunStore(job), data.sizers())
    return bounds.search_training(trainer, length="longest")[-1]


def test_a_rank_that_holds_the_rows_of_another_is_tried_beside_gradients(small: SmallSetup) -> None:
    options = ("probe.device_memory=6MiB", "probe.cache=False")
    whole = searched(small, *options)
    several = searched(small, *options, "gradient_accumulation_steps=2")
    holds_more = searched(small, *options, began_on=2)
    assert holds_more.max_batch_size == several.max_batch_size < whole.max_batch_size


def test_what_is_fastest_is_not_taken_from_a_dataset_of_other_lengths(
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
            SearchScope(
                data.trial_rows("longest"),
                choices=Choices(kinds, "tokens", 4) if kinds else None,
            ),
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("enable_activation_checkpointing=True",),
        ("optimizer_in_bwd=True",),
        ("dataset.packed=True",),
        ("gradient_accumulation_steps=2",),
        ("optimizer._component_=torchao.optim.AdamW8bit", "~fused"),
    ],
    ids=lambda overrides: " ".join(overrides) or "as it is",
)
def test_where_bytes_are_not_counted_fake_tensors_leave_three_trials_and_no_oom(
    small: SmallSetup, overrides: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = overrides
    memory = "probe.device_memory=8MiB"
    with caplog.at_level("INFO", logger="adaptive_batch"):
        planned = searched(small, memory, *chosen, memory=InBlocks(torch.device("cpu")))
    exact = searched(small, memory, *chosen, "probe.cache=False")
    assert "estimated on fake tensors" in caplog.text
    assert len(planned.trials) <= 3
    assert planned.num_out_of_memory <= 1
    assert exact.max_batch_size - 1 <= planned.max_batch_size <= exact.max_batch_size


@pytest.mark.slow
def test_a_plan_that_cannot_be_made_only_makes_the_search_longer(
    small: SmallSetup, caplog: pytest.LogCaptureFixture
) -> None:
    looks = (f"loss._component_={__name__}.LooksAtValues", "probe.device_memory=8MiB")
    with caplog.at_level("INFO", logger="adaptive_batch"):
        found = searched(small, *looks, memory=InBlocks(torch.device("cpu")))
    assert "searching without an estimate, which could not be made" in caplog.text
    assert found.max_batch_size == searched(small, *looks, "probe.cache=False").max_batch_size


class LooksAtValues(torch.nn.CrossEntropyLoss):
    """A loss that asks for a number, which fake tensors do not have."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(logits, labels)
        assert loss.item() >= 0
        return loss
