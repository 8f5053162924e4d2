"""A search on real trials that starts from what is known: a curve that was estimated on fake
tensors, or counted before.
"""

from __future__ import annotations

import json
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
from adaptive_batch.torchtune.probe_cache import ProbeCache, memory_keys
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
    job.count_batches_on(began_on)
    if memory:
        job.memory = memory
    data = Data.read(job)
    bounds = LimitFinder(job, data)
    bounds.check()
    trainer = Trainer.load(job, data, RunStore(cfg, settings), data.sizers())
    return bounds.search_training(trainer, length="longest")[-1]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ADAPTIVE_BATCH_CACHE", str(tmp_path))
    return tmp_path / "curves"


def test_a_counted_search_is_remembered_whatever_the_budget(
    small: SmallSetup, own_cache: Path
) -> None:
    first = searched(small, "probe.device_memory=8MiB")
    other = searched(small, "probe.device_memory=6MiB")
    alone = searched(small, "probe.device_memory=6MiB", "probe.cache=False")
    assert len(first.trials) > 1
    assert len(other.trials) == 1
    assert other.max_batch_size == alone.max_batch_size < first.max_batch_size
    assert len(list(own_cache.iterdir())) == 1


def test_a_rank_that_holds_the_rows_of_another_is_tried_beside_gradients(small: SmallSetup) -> None:
    options = ("probe.device_memory=6MiB", "probe.cache=False")
    whole = searched(small, *options)
    several = searched(small, *options, "gradient_accumulation_steps=2")
    holds_more = searched(small, *options, began_on=2)
    assert holds_more.max_batch_size == several.max_batch_size < whole.max_batch_size


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ({"lr": 1e-3}, {"lr": 3}, True),
        ({"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-4, "weight_decay": 0.2}, True),
        ({"betas": [0.9, 0.99], "eps": 1e-8}, {"betas": [0.8, 0.95], "eps": 1e-6}, True),
        ({"momentum": 0.9}, {"momentum": 0.8}, True),
        ({"momentum": 0.9}, {"momentum": 0}, False),
        ({"momentum": 0}, {"momentum": 0.0}, True),
        ({"betas": [0.9, 0.99]}, {"betas": [0.0, 0.99]}, False),
        ({"weight_decay": 0.1}, {"weight_decay": 0.0}, False),
        ({"momentum": 0.9}, {}, False),
        ({"alpha": None}, {"alpha": 0.5}, False),
        *(
            ({key: False}, {key: True}, False)
            for key in ("amsgrad", "fused", "foreach", "capturable", "nesterov")
        ),
        ({"block_size": 128}, {"block_size": 256}, False),
        ({"_component_": "torch.optim.SGD"}, {"_component_": "torch.optim.AdamW"}, False),
    ],
    ids=str,
)
def test_numbers_of_the_optimizer_matter_by_whether_they_are_zero(
    before: dict[str, object], after: dict[str, object], is_same: bool
) -> None:
    assert (memory_keys({"optimizer": before}) == memory_keys({"optimizer": after})) is is_same


def test_of_the_clipping_it_matters_whether_there_is_any() -> None:
    def of(norm: float | None) -> object:
        return memory_keys({"optimizer": {}, "clip_grad_norm": norm})

    assert of(1.0) == of(0.5) != of(None)


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


@pytest.mark.slow
def test_another_loss_dtype_or_optimizer_is_not_taken_for_known(
    small: SmallSetup, own_cache: Path
) -> None:
    searched(small, "probe.device_memory=8MiB")
    for change in (
        "enable_activation_checkpointing=True",
        "loss._component_=torch.nn.CrossEntropyLoss",
        "optimizer.fused=False",
        "dtype=bf16",
    ):
        assert len(searched(small, "probe.device_memory=8MiB", change).trials) > 1, change
    assert len(list(own_cache.iterdir())) == 5


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_as_good_as_none(small: SmallSetup, own_cache: Path) -> None:
    first = searched(small, "probe.device_memory=8MiB")
    (path,) = own_cache.iterdir()
    whole = path.read_text()
    for torn in ("", "[]", whole[: len(whole) // 2], json.dumps({"format": 1, "lines": []})):
        path.write_text(torn)
        assert searched(small, "probe.device_memory=8MiB").trials == first.trials


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
    small: SmallSetup, own_cache: Path, overrides: tuple[str, ...], caplog: pytest.LogCaptureFixture
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
    again = searched(small, memory, *chosen, memory=InBlocks(torch.device("cpu")))
    assert again.max_batch_size == planned.max_batch_size
    assert caplog.text.count("estimated on fake tensors") == 1


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


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_loses_no_search(
    small: SmallSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "curves").touch()  # where a folder should be
    found = searched(small, "probe.device_memory=8MiB")
    assert len(found.trials) > 1
