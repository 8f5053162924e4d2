"""A script's search for the largest batch that fits."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from support.sharded_model import Decoder, collate, make_rows
from torch import nn
from torch.nn.functional import cross_entropy

from adaptive_batch.errors import SettingError
from adaptive_batch.memory import device_memory
from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.training import (
    AdaptiveStep,
    MicroBatchSizer,
    ProbeOptions,
    SearchScope,
    find_max_batch_size,
)
from adaptive_batch.training.bound_search import BoundSearch, LongestRows, TriedStep
from adaptive_batch.training.step import Step

ROW = collate(make_rows((17,)))
MAXIMUM = 24


def sample(number: int) -> dict[str, torch.Tensor]:
    return {key: value.repeat(number, 1) for key, value in ROW.items()}


class Training:
    """A model, its optimizer, and forward and backward of a batch."""

    def __init__(self) -> None:
        self.model = Decoder(dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def forward_backward(self, batch: dict[str, torch.Tensor]) -> None:
        logits = self.model(batch["tokens"])[:, :-1]
        cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()

    def find(self, **options: Any) -> Any:
        return find_max_batch_size(
            self.model, self.optimizer, self.forward_backward, sample, **options
        )


def peaks_by_hand(*, accumulates: bool = False) -> list[int]:
    """Return the peak bytes of steps of 1, 2, ... rows in plain torch, with optimizer state."""
    training = Training()
    training.forward_backward(sample(3))
    training.optimizer.step()
    training.optimizer.zero_grad()
    weights = [*training.model.parameters()]
    state = [value for values in training.optimizer.state.values() for value in values.values()]
    peaks = []
    for number in range(1, MAXIMUM + 2):
        if accumulates:
            for weight in weights:
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        resident = [*weights, *training.model.buffers(), *gradients, *state]
        with device_memory(torch.device("cpu")).measure(resident, budget_bytes=2**60) as usage:
            training.forward_backward(sample(number))
        training.optimizer.zero_grad()
        peaks.append(usage.peak_bytes)
    return peaks


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("search", ["predict", "binary"])
@pytest.mark.parametrize("expected", [2, 7, MAXIMUM])
def test_a_search_finds_the_result_of_brute_force(expected, search, accumulates):
    peaks = peaks_by_hand(accumulates=accumulates)
    budget = (peaks[expected - 1] + peaks[expected]) // 2
    options = {"device_memory": budget, "headroom": 0.0, "search": search}
    result = Training().find(**options, accumulates=accumulates)
    assert (result.max_batch_size, result.budget_bytes) == (expected, budget)
    tried = {trial.batch_size: trial.fits for trial in result.trials}
    assert tried[expected]
    assert search == "predict" or not tried[expected + 1]
    assert f"max_batch_size: {expected}" in result.table()


def search_on(memory, has_order, headroom):
    training = Training()
    runner = Step(training.model, MicroBatchSizer(), memory=memory)
    tried = TriedStep(runner, training.optimizer, training.forward_backward)
    in_order = (lambda begin, num_rows: [0] * num_rows) if has_order else None
    rows = LongestRows(lambda size: [0] * size, 9, "one row", in_order)
    return BoundSearch(tried, SearchScope(rows), ProbeOptions("1GiB", headroom))


@pytest.mark.parametrize(
    ("granularity_bytes", "has_order", "segments", "headroom", "left_free"),
    [
        (2 * 2**20, True, "expandable_segments:True", "auto", 0.01),
        (2 * 2**20, True, "expandable_segments:False", "auto", 0.05),
        (2 * 2**20, False, "expandable_segments:True", "auto", 0.05),
        (2 * 2**20, True, "expandable_segments:True", 0.2, 0.2),
        (1, True, "expandable_segments:True", "auto", 0.05),
    ],
)
def test_the_headroom_is_smaller_for_expandable_segments_and_rows_of_the_dataset(
    monkeypatch, granularity_bytes, has_order, segments, headroom, left_free
):
    memory = CountedMemory(torch.device("cpu"))
    memory.granularity_bytes = granularity_bytes
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", segments)
    monkeypatch.setattr(sys, "platform", "linux")
    search = search_on(memory, has_order, headroom)
    assert search.headroom == left_free
    assert search.budget_bytes() == int(2**30 * (1 - left_free))


def test_invalid_options_are_refused():
    for option, value in (
        *(("device_memory", size) for size in ("much", "900TiB")),
        *(("headroom", 1.0), ("maximum", 0), ("search", "guess")),
    ):
        with pytest.raises(SettingError, match=f"^{option}={value!r}: "):
            Training().find(**{option: value})


def test_arguments_of_other_types_are_refused():
    training = Training()
    model, optimizer, run = training.model, training.optimizer, training.forward_backward
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    for arguments, message in (
        ((model, optimizer, None, sample), "forward_backward=None: give a function"),
        ((model, optimizer, run, 8), "sample=8: give a function"),
        ((run, optimizer, run, sample), "model='method': give an nn.Module"),
        ((model, "adamw", run, sample), "optimizer='str': give one torch.optim.Optimizer"),
        ((model, other, run, sample), "2 tensors of the optimizer are not parameters of the model"),
    ):
        with pytest.raises(SettingError, match=message):
            find_max_batch_size(*arguments)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_function_without_backward_is_refused_by_each_search(accumulates):
    training = Training()
    model, optimizer = training.model, training.optimizer

    def forward(batch: Any) -> None:
        model(getattr(batch, "batch", batch)["tokens"])

    searches = [partial(find_max_batch_size, model, optimizer, forward, sample)]
    for options in ({}, {"micro_batch_size": "auto"}):
        searches.append(
            partial(AdaptiveStep(model, forward, **options).find_bound, optimizer, sample)
        )
    for search in searches:
        with pytest.raises(SettingError, match="forward_backward='forward': it left no gradient"):
            search(accumulates=accumulates)


def test_a_sample_that_ignores_the_number_of_rows_is_refused_by_each_search():
    training = Training()
    step = AdaptiveStep(training.model, lambda part: training.forward_backward(part.batch))
    find = partial(find_max_batch_size, training.model)
    for rows, says in (
        (8, r"sample\(\d+\) of 8 rows': return the"),
        (0, r"sample\(1\) of 0 rows'"),
    ):
        same = {key: value[:rows] for key, value in sample(8).items()}
        with pytest.raises(SettingError, match=says):
            find(training.optimizer, training.forward_backward, lambda number, same=same: same)
        with pytest.raises(SettingError, match=says):
            step.find_bound(training.optimizer, lambda number, same=same: same)
