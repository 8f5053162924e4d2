"""RowStep: bounds, gradients, rows of other types, and layouts."""

from __future__ import annotations

import copy
import random
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.loops import ROWS, of_ranks, train, training
from support.packed_models import loss_of, transformers_model
from support.sharded_model import (
    IGNORED,
    Decoder,
    collate,
    padded,
    relative_error,
    token_losses,
    training_state,
    whole_parameters,
)
from torch import nn
from torch.nn.functional import cross_entropy

from adaptive_batch.errors import SettingError
from adaptive_batch.memory.device import CountedMemory
from adaptive_batch.training.split_check import SplitCheck


def peak_by_hand(one: SimpleNamespace, size: int) -> int:
    """Return the peak of forward and backward of the longest rows in plain torch, with the
    optimizer's state in memory.
    """
    longest = sorted(ROWS, key=lambda row: -len(row["tokens"]))[:size]
    one.optimizer.zero_grad()
    state = [value for state in one.optimizer.state.values() for value in state.values()]
    resident = [*one.model.parameters(), *one.model.buffers(), *state]
    with CountedMemory(torch.device("cpu")).measure(resident, budget_bytes=2**60) as usage:
        batch = collate(longest)
        count = (batch["labels"][:, 1:] != IGNORED).sum()
        (token_losses(one.model, batch, "mean") * count).backward()
    one.optimizer.zero_grad()
    return usage.peak_bytes


@pytest.mark.parametrize("begun_by", ["a larger batch", "a loaded bound", "ranks"])
def test_a_bound_of_whole_steps_does_not_apply_to_steps_of_several_micro_batches(begun_by):
    """Fewer rows fit if earlier micro-batches have left gradients."""
    reference = training()
    train(reference, until=1)
    budget = {"device_memory": peak_by_hand(reference, 10), "headroom": 0.0}
    searched, larger = training(), training()
    assert searched.loop.find_bound(**budget).max_batch_size == 10
    larger.loop.batch_size = 24
    one = searched
    if begun_by == "a larger batch":
        one.loop.batch_size = 24
    elif begun_by == "a loaded bound":
        one = training()
        searched.loop.batch_size = 24
        one.loop.load_state_dict(searched.loop.state_dict())
    else:
        one.loop.load_state_dict(of_ranks(training().loop.state_dict(), 6))
    rows = next(iter(one.loop))
    with pytest.raises(SettingError, match="batch_size=24: 10 rows fit without existing"):
        one.loop.run(rows)
    beside_gradients = one.loop.find_bound(**budget).max_batch_size
    assert 0 < beside_gradients < 10
    result = one.loop.run(rows)  # the same rows
    assert (result.rows, result.micro_batches) == (24, -(-24 // beside_gradients))
    one.optimizer.zero_grad()
    other = training()
    # The state records that the bound was found with gradients.
    other.loop.load_state_dict(one.loop.state_dict())
    assert other.loop.run(next(iter(other.loop))).micro_batches > 1
    assert larger.loop.find_bound(**budget).max_batch_size == 9


def test_a_search_restores_random_numbers_that_a_dataset_draws():
    class Draws(list):
        def __getitem__(self, number: int) -> Any:
            torch.rand(1), random.random(), np.random.rand()
            return super().__getitem__(number)

    for options in (
        {},
        {"micro_batch_tokens": "auto"},
        {"batch_tokens": 60},
        {"sample_order": "seqlen"},
        {"micro_batch_layout": "grouped"},
    ):
        one = training(rows=Draws(ROWS), **options)
        before = training_state(one.model, one.optimizer)
        one.loop.find_bound(device_memory="1GiB", maximum=8)
        assert training_state(one.model, one.optimizer) == before


class Captions(nn.Module):
    """A model of tokens and image tiles: `[rows, tiles, 16]`, or `[tiles, 16]` of all rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.tiles, self.head = nn.Embedding(53, 8), nn.Linear(16, 8), nn.Linear(8, 53)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen = torch.tanh(self.tiles(batch["tiles"])).flatten(0, -2).mean(0)
        logits = self.head(torch.tanh(self.text(batch["tokens"]) + seen))
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@pytest.mark.parametrize("pads_tiles", [True, False])
@pytest.mark.parametrize("expected", [1, 2, 9])
def test_a_bound_holds_if_the_longest_rows_are_not_the_largest(pads_tiles, expected):
    """Half of the rows have 40 tokens and one tile, half have 36 tokens and 64 tiles."""
    small, large = (
        {"tokens": [1] * length, "labels": [1] * length, "tiles": torch.randn(tiles, 16)}
        for length, tiles in ((40, 1), (36, 64))
    )

    def collate_captions(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tiles = [row["tiles"] for row in rows]
        join = partial(nn.utils.rnn.pad_sequence, batch_first=True) if pads_tiles else torch.cat
        return {**collate([{**row, "row": 0} for row in rows]), "tiles": join(tiles)}

    def begin() -> SimpleNamespace:
        model = Captions()
        rows, options = [small, large] * 12, {"mean_loss": model, "collate": collate_captions}
        return training(model=model, rows=rows, optimizer=torch.optim.SGD, **options)

    def largest_peak(size: int) -> int:
        model, peaks = begin().model, []
        for number in range(size + 1):
            model.zero_grad()
            with CountedMemory(torch.device("cpu")).measure(
                model.parameters(), budget_bytes=2**40
            ) as usage:
                model(collate_captions([large] * number + [small] * (size - number))).backward()
            peaks.append(usage.peak_bytes)
        return max(peaks)

    budget = (largest_peak(expected) + largest_peak(expected + 1)) // 2
    found = begin().loop.find_bound(device_memory=budget, headroom=0.0)
    assert found.max_batch_size == expected


def llama(**options: Any) -> SimpleNamespace:
    """Return training of a small Transformers model, on rows with its keys."""
    model = transformers_model().float()

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return loss_of(model, batch) / (batch["labels"][:, 1:] != IGNORED).sum()

    given = {
        "model": model,
        "rows": [
            {"row": row["row"], "input_ids": row["tokens"], "labels": row["labels"]} for row in ROWS
        ],
        "collate": partial(padded, input_ids=0, labels=IGNORED),
        "mean_loss": mean_loss,
        "optimizer": torch.optim.SGD,
        "batch_size": 8,
    }
    return training(**{**given, **options})


@pytest.mark.parametrize("limit", [{"micro_batch_size": 3}, {"micro_batch_tokens": 40}], ids=str)
@pytest.mark.parametrize("layout", ["packed", "grouped"])
def test_all_layouts_have_the_losses_of_padded_rows(layout: str, limit: dict[str, int]) -> None:
    found, expected = (llama(micro_batch_layout=kind, **limit) for kind in (layout, "padded"))
    seen, steps = train(found), train(expected)
    assert [step.rows for step in seen] == [step.rows for step in steps]
    assert [step.loss for step in seen] == pytest.approx([step.loss for step in steps], rel=1e-5)
    assert all(step.result.padding_fraction == 0 for step in seen) == (layout == "packed")
    assert relative_error(whole_parameters(found.model), whole_parameters(expected.model)) < 1e-4


@pytest.mark.parametrize("row", [{"input_ids": [1, 2, 3]}, torch.arange(5)], ids=type)
def test_rows_that_cannot_be_packed_are_refused(row: Any) -> None:
    says = "^micro_batch_layout='packed': rows are not mappings"
    with pytest.raises(SettingError, match=says):
        llama(rows=[row] * 8, micro_batch_layout="packed", row_length=len)


def test_the_fastest_micro_batches_are_restored_unless_others_are_configured() -> None:
    one = llama(micro_batch_tokens="auto")
    before = training_state(one.model, one.optimizer)
    found = one.loop.find_bound(device_memory="1GiB", maximum=8)
    assert training_state(one.model, one.optimizer) == before
    fastest = found.throughput
    assert fastest is not None
    assert {trial.kind for trial in fastest.trials} <= {"grouped", "packed"}
    assert one.loop._step.sizer.layout.kind == fastest.kind
    assert one.loop._step.sizer.limit(8) == fastest.limit
    train(one, until=2)
    state, weights = copy.deepcopy((one.loop.state_dict(), one.model.state_dict()))
    rest = train(one)
    for finds_again in (False, True):
        again = llama(micro_batch_tokens="auto")
        again.model.load_state_dict(weights)
        again.loop.load_state_dict(state)
        if finds_again:
            assert again.loop.find_bound(device_memory="1GiB", maximum=8).throughput is None
        assert again.loop._step.sizer.layout == one.loop._step.sizer.layout
        assert again.loop._step.sizer.limit(8) == fastest.limit
        assert [(step.rows, step.loss) for step in train(again)] == [
            (step.rows, step.loss) for step in rest
        ]
    padded = {"micro_batch_tokens": "auto", "micro_batch_layout": "padded"}
    for now in ({"micro_batch_tokens": 30}, padded):
        again = llama(**now)
        again.loop.load_state_dict(state)
        assert again.loop._step.sizer.layout.kind == "padded"
        assert again.loop._step.sizer.throughput is None
    # A result of a search before loading is kept.
    smaller = llama(micro_batch_tokens="auto")
    found = smaller.loop.find_bound(device_memory="1GiB", maximum=1)
    smaller.loop.load_state_dict(state)
    assert smaller.loop._step.sizer.throughput == found.throughput is not None
    assert smaller.loop.max_batch_size == 1


def test_micro_batches_as_large_as_the_largest_step_are_timed() -> None:
    one = llama(micro_batch_tokens="auto", micro_batch_layout="packed")
    lengths = torch.tensor([len(ROWS[row]["tokens"]) for row in one.loop._batches.order])
    tokens_of_steps = lengths.reshape(-1, 8).sum(1)
    assert tokens_of_steps[0] < tokens_of_steps.max()
    found = one.loop.find_bound(device_memory="1GiB")
    assert found.throughput.trials[-1].limit.amount == tokens_of_steps.max()


def test_micro_batches_that_fit_only_shorter_rows_are_not_chosen() -> None:
    longest = max(len(row["tokens"]) for row in ROWS)

    class Runs(nn.Module):
        """Packed rows are faster, but several of the most tokens do not fit."""

        def __init__(self) -> None:
            super().__init__()
            self.model = transformers_model().float()

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            is_packed = "position_ids" in batch
            time.sleep(0.005 if is_packed else 0.02)
            num_rows = int((batch["position_ids"] == 0).sum()) if is_packed else 1
            if num_rows > 1 and batch["input_ids"].numel() == num_rows * longest:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return loss_of(self.model, batch) / (batch["labels"][:, 1:] != IGNORED).sum()

    model = Runs()
    one = llama(model=model, mean_loss=model, micro_batch_tokens="auto")
    fastest = one.loop.find_bound(device_memory="1GiB").throughput
    assert fastest is not None
    faster = [
        trial for trial in fastest.trials if trial.tokens_per_second > fastest.tokens_per_second
    ]
    assert {trial.kind for trial in faster} == {"packed"}
    assert min(trial.limit.amount for trial in faster) >= 2 * longest
    assert fastest.kind == "grouped" or fastest.limit.amount < 2 * longest


def test_trials_of_packed_rows_fill_the_limit_although_few_rows_are_long() -> None:
    ids = [list(range(1, length + 1)) for length in (40, *(6,) * 99)]
    rows = [{"row": row, "input_ids": each, "labels": each} for row, each in enumerate(ids)]
    model = transformers_model().float()
    tried: list[int] = []

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tried.append(batch["input_ids"].numel())
        return loss_of(model, batch) / (batch["labels"][:, 1:] != IGNORED).sum()

    layout = {"micro_batch_tokens": "auto", "micro_batch_layout": "packed"}
    one = llama(model=model, mean_loss=mean_loss, rows=rows, **layout)
    one.loop.find_bound(device_memory="3MiB", objective="largest")
    assert one.loop.limit.amount == max(tried) > 40


@pytest.mark.parametrize("dynamic", [True, False])
def test_only_a_dynamically_compiled_model_is_timed(dynamic, caplog):
    torch.compiler.reset()
    one = llama(micro_batch_tokens="auto")
    for layer in one.model.model.layers:
        layer.mlp.compile(backend="aot_eager", dynamic=dynamic)
    before = training_state(one.model, one.optimizer)
    with caplog.at_level("INFO", logger="adaptive_batch"):
        found = one.loop.find_bound(device_memory="1GiB", maximum=8)
    assert training_state(one.model, one.optimizer) == before
    fastest = found.throughput
    lengths = [len(row["tokens"]) for row in ROWS]
    if dynamic:
        assert {trial.kind for trial in fastest.trials} <= {"grouped", "packed"}
        # Compilation takes hundreds of times longer than a micro-batch here.
        assert 100 * sum(lengths) / fastest.tokens_per_second < fastest.seconds
    else:
        reason = "micro-batches are excluded"
        assert all(f"{layout} {reason}" in caplog.text for layout in ("grouped", "packed"))
        assert fastest is None
        assert one.loop._step.sizer.limit(8).amount == found.max_batch_size * max(lengths)


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_model_that_attends_to_padding_is_refused_before_a_step_is_split(multiple):
    class Mean(Decoder):
        """A model that adds the mean over all columns, padding included, to each token."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = super().forward(tokens)
            return logits + logits.mean(1, keepdim=True)

    model = Mean()
    # The check must not mistake padding for an auxiliary loss of experts.
    model.config = SimpleNamespace(router_aux_loss_coef=0.5)

    def collate_to_multiple(rows: list[Any]) -> Any:
        batch = collate(rows)
        padding = -batch["tokens"].shape[1] % multiple
        pad = partial(nn.functional.pad, pad=(0, padding))
        return {"tokens": pad(batch["tokens"]), "labels": pad(batch["labels"], value=IGNORED)}

    options = {"batch_size": 16, "micro_batch_tokens": 60, "collate": collate_to_multiple}
    loop = training(model=model, **options).loop
    with pytest.raises(SettingError, match=r"^mean_loss=.*the model sees padding, of"):
        loop.run(next(iter(loop)))


@pytest.mark.parametrize("draws", [False, True])
def test_classes_of_rows_whose_mean_contains_padding_are_refused_or_named(draws, caplog):
    model = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 3))

    def collate_to_multiple(rows: list[Any]) -> Any:
        tokens = collate(rows)["tokens"]
        noise = torch.rand(len(rows)) if draws else torch.zeros(len(rows))
        tokens = nn.functional.pad(tokens, (0, -tokens.shape[1] % 8))
        return {"tokens": tokens, "noise": noise, "classes": tokens[:, 0] % 3}

    def mean_loss(batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch["tokens"]).mean(1), batch["classes"])

    # Until a batch has rows above 8 tokens, all parts have the same columns.
    short = [row for row in ROWS if len(row["tokens"]) < 9][:12]
    one = training(
        model=model,
        rows=[*short, *short, *ROWS[:12]],
        shuffle=False,
        batch_size=12,
        micro_batch_size=2,
        collate=collate_to_multiple,
        mean_loss=mean_loss,
        # Tokens of another unit than columns.
        row_length=5,
    )
    train(one, until=2)
    if draws:
        train(one)
        assert "no check shows whether the model sees padding" in caplog.text
    else:
        with pytest.raises(SettingError, match=r"^mean_loss=.*the model sees padding, of"):
            train(one)


OWN_NUMBERS = random.Random(1)


def by_length(rows: list[Any]) -> Any:
    return collate(sorted(rows, key=lambda row: -len(row["tokens"])))


def with_values_of_all_rows(rows: list[Any]) -> Any:
    tiles = [torch.tensor(row["tokens"]) for row in rows]
    return {**collate(rows), "tiles": torch.cat(tiles), "sizes": torch.tensor([*map(len, tiles)])}


def with_columns_of_rows(rows: list[Any]) -> Any:
    tokens = torch.tensor([(row["tokens"] * 4)[:12] for row in rows])
    return {"tokens": tokens.T, "labels": tokens.T}


def with_texts_and_nan(rows: list[Any]) -> Any:
    texts = [str(row["row"]) for row in rows]
    scores = torch.full((len(rows),), torch.nan)
    return {**collate(rows), "arrays": np.array(texts), "texts": texts, "scores": scores}


def with_nested(rows: list[Any]) -> Any:
    lengths = [torch.ones(len(row["tokens"])) for row in rows]
    return {**collate(rows), "nested": torch.nested.nested_tensor(lengths)}


def with_sparse(rows: list[Any]) -> Any:
    batch = collate(rows)
    return {**batch, "sparse": batch["tokens"].to_sparse()}


def with_rare_masks(rows: list[Any]) -> Any:
    batch = collate(rows)
    return {**batch, "tokens": batch["tokens"] * (random.random() > 0.1)}


def with_rare_masks_of_its_own(rows: list[Any]) -> Any:
    batch = collate(rows)
    return {**batch, "tokens": batch["tokens"] * (OWN_NUMBERS.random() > 0.1)}


def with_random_lists(rows: list[Any]) -> Any:
    return {**collate(rows), "items": [torch.ones(2)] * int(np.random.randint(4))}


@pytest.mark.parametrize(
    ("collate_rows", "most_calls"),
    [
        (by_length, 60),
        (with_values_of_all_rows, 60),
        (with_columns_of_rows, 60),
        (with_nested, 60),
        (with_sparse, 60),
        (with_texts_and_nan, 30),
        (with_rare_masks_of_its_own, 60),
        (with_rare_masks, 10),
        (with_random_lists, 10),
    ],
)
def test_the_check_of_a_split_supports_batches_of_any_collate(collate_rows, most_calls, caplog):
    model = Decoder()
    numbers: list[int] = []

    def counting(rows: list[Any]) -> Any:
        numbers.append(len(rows))
        return collate_rows(rows)

    def mean_loss(batch: Any) -> torch.Tensor:
        if collate_rows is with_columns_of_rows:
            batch = {name: table.T for name, table in batch.items()}
        assert "tiles" not in batch or len(batch["tiles"]) == batch["sizes"].sum()
        return token_losses(model, batch, "mean")

    def num_labels(batch: Any) -> int:
        labels = batch["labels"]
        labels = labels.T if collate_rows is with_columns_of_rows else labels
        return int((labels[:, 1:] != IGNORED).sum())

    options = {"batch_size": 12, "micro_batch_size": 3, "num_labels": num_labels}
    loop = training(model=model, collate=counting, mean_loss=mean_loss, **options).loop
    assert loop.run(next(iter(loop))).micro_batches == 4
    assert len(numbers) <= most_calls
    assert ("no check shows" in caplog.text) == (most_calls == 10)


def test_the_check_of_a_split_restores_random_numbers_that_collate_draws(monkeypatch):
    """A resumed run checks other steps than an uninterrupted run."""

    def drawing(rows: list[Any]) -> Any:
        torch.rand(1)
        return collate(rows)

    def random_state_after() -> bytes:
        one = training(micro_batch_size=2, collate=drawing)
        train(one, until=5)
        return bytes(torch.get_rng_state().numpy())

    with_checks = random_state_after()
    monkeypatch.setattr(SplitCheck, "check", lambda *_, **__: None)
    assert random_state_after() == with_checks
