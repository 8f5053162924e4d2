"""A batch that is split, before or after an OOM, has the gradients of the whole batch."""

from __future__ import annotations

import logging
import random
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from support.losses import CASES, Batch, Page, taken_gradients, whole_gradients_of
from support.same_state import bits, seed_all
from support.sharded_model import Decoder, collate, make_rows, relative_error, training_state
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from adaptive_batch.data import IGNORE_INDEX
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.training import AdaptiveStep, Part, SplitBatch, StepOptions

LENGTHS = (9, 7, 12, 6, 4, 11, 5, 8, 3, 10, 12, 6)
# Documented tolerance for float32, relative to the largest entry of each gradient.
ROUNDING = 2e-6


def make_batch(*, seed: int = 1) -> dict[str, torch.Tensor]:
    return collate(make_rows(LENGTHS, seed=seed))


def mean_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over labels; the loss of this causal model shifts them."""
    logits = model(batch["tokens"])[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def run_out_of_memory() -> None:
    """Raise the CPU allocator's error by allocating more than the address space."""
    torch.empty(2**50, dtype=torch.uint8)


class Script:
    """A `forward_backward` that records its parts and runs out of memory above `most_rows`."""

    def __init__(self, model: nn.Module, *, loss: Any = None, most_rows: int = 10**9) -> None:
        self.model, self.loss, self.most_rows = model, loss or mean_loss, most_rows
        self.trained: list[Part] = []
        self.trials: list[Part] = []

    def __call__(self, part: Part) -> torch.Tensor:
        (self.trials if part.is_trial else self.trained).append(part)
        loss = self.loss(self.model, part.batch) * part.share
        if part.num_rows > self.most_rows:
            run_out_of_memory()
        loss.backward()
        return loss.detach()

    @property
    def rows(self) -> list[int]:
        return [part.num_rows for part in self.trained]


def plain_gradients(
    model: nn.Module, batch: Any, loss: Any = mean_loss
) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradients and loss of the whole batch, and clear the gradients."""
    model.zero_grad()
    whole_loss = loss(model, batch)
    whole_loss.backward()
    return taken_gradients(model), whole_loss.item()


def decoder(**options: Any) -> Decoder:
    return Decoder(dtype=torch.float32, **options)


class Regression(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def regression_data(num_rows: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(num_rows, 6, generator=generator)
    return inputs, torch.randn(num_rows, 2, generator=generator)


@pytest.mark.parametrize(
    ("unlabelled", "size", "parts"), [((), 5, 3), ((0, 1, 2, 3, 10, 11), 2, 3)]
)
def test_the_share_of_a_part_is_its_share_of_the_labels(unlabelled, size, parts):
    model = decoder()
    batch = collate(make_rows(LENGTHS, unlabelled=unlabelled))
    expected, whole_loss = plain_gradients(model, batch)
    script = Script(model)
    losses = AdaptiveStep(model, script, micro_batch_size=size)(batch)
    labels = [int((part.batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for part in script.trained]
    assert len(losses) == len(labels) == parts
    assert [part.share for part in script.trained] == [number / sum(labels) for number in labels]
    assert [part.is_last for part in script.trained] == [False] * (parts - 1) + [True]
    assert float(sum(losses)) == pytest.approx(whole_loss, rel=ROUNDING)
    assert relative_error(taken_gradients(model), expected) <= ROUNDING


def test_labels_that_both_collate_and_the_loss_shift_are_refused():
    tokens = make_batch()["tokens"]
    labels = tokens.masked_fill(tokens == 0, IGNORE_INDEX)
    once = {"tokens": tokens, "labels": labels}
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    twice = {"tokens": tokens, "labels": shifted}
    model = decoder()
    step = AdaptiveStep(model, Script(model), micro_batch_size=5)
    with pytest.raises(SettingError, match="labels='shifted twice'"):
        step(twice)
    AdaptiveStep(model, Script(model), micro_batch_size=5)(once)
    # num_labels allows a model that predicts the token after the next.
    num_labels = lambda batch: int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())  # noqa: E731
    AdaptiveStep(model, Script(model), micro_batch_size=5, num_labels=num_labels)(twice)


@pytest.mark.parametrize("is_tensor", [True, False])
def test_num_labels_may_be_a_sum_of_label_weights(is_tensor):
    model = nn.Linear(6, 3)
    batch = {"x": regression_data()[0], "labels": torch.arange(11) * 7 % 3}
    weight = torch.tensor([1.0, 5.0, 0.25])

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch["x"]), batch["labels"], weight=weight)

    def num_labels(batch: Any) -> Any:
        total = weight[batch["labels"]].sum()
        return total if is_tensor else total.item()

    expected, _ = plain_gradients(model, batch, loss)
    script = Script(model, loss=loss)
    AdaptiveStep(model, script, micro_batch_size=3, num_labels=num_labels)(batch)
    assert len(script.trained) == 4
    assert sum(part.share for part in script.trained) == pytest.approx(1.0)
    assert relative_error(taken_gradients(model), expected) <= ROUNDING


@pytest.mark.parametrize(
    "count", [-0.5, float("nan"), float("inf"), 1j, "two", None, torch.ones(2)]
)
def test_an_invalid_result_of_num_labels_is_refused(count):
    model = Regression()
    step = AdaptiveStep(model, Script(model), micro_batch_size=4, num_labels=lambda batch: count)
    with pytest.raises(SettingError, match=r"^num_labels=.*returns the number of labels"):
        step(regression_data())


def masked_batch() -> dict[str, torch.Tensor]:
    """Return rows with trailing padding; only the attention mask has their lengths."""
    mask = torch.arange(16) < torch.tensor(LENGTHS).unsqueeze(1)
    tokens = torch.randint(1, 53, (12, 16), generator=torch.Generator().manual_seed(3)) * mask
    return {
        "tokens": tokens,
        "labels": tokens.masked_fill(~mask, IGNORE_INDEX),
        "attention_mask": mask.long(),
        "positions": torch.zeros(12, 5, 2),
        "scores": torch.zeros(12, 3),
        "classes": torch.arange(12),
    }


def test_parts_by_tokens_omit_trailing_padding():
    model = decoder()
    batch = masked_batch()
    expected, _ = plain_gradients(model, batch)
    script = Script(model)
    AdaptiveStep(model, script, micro_batch_tokens=40)(batch)
    lengths = torch.tensor(LENGTHS)
    assert len(script.trained) > 2
    for part in script.trained:
        longest = int(lengths[part.batch["classes"]].max())
        assert part.batch["tokens"].shape == part.batch["labels"].shape == (part.num_rows, longest)
        assert part.num_rows * longest <= 40
        # Models of Transformers call view() on labels.
        assert part.batch["labels"].is_contiguous()
        # Tensors of another width keep all columns.
        assert part.batch["positions"].shape == (part.num_rows, 5, 2)
        assert part.batch["scores"].shape == (part.num_rows, 3)
        assert list(part.rows) == part.batch["classes"].tolist()
    assert sorted(number for part in script.trained for number in part.rows) == [*range(12)]
    assert relative_error(taken_gradients(model), expected) <= ROUNDING
    AdaptiveStep(model, script)(batch)
    assert list(script.trained[-1].rows) == [*range(12)]


class Translation(nn.Module):
    """Predicts each target token from itself and the mean of its source tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(53, 8)
        self.head = nn.Linear(8, 53)

    def forward(self, batch):
        mask = batch["attention_mask"][..., None].float()
        if bool((mask < 0).any()):
            mask = mask.exp()
        columns = mask.shape[1]
        source = self.embedding(batch["input_ids"])
        if "bbox" in batch:
            source = source + batch["bbox"].sum(-1, keepdim=True)
        if "position_ids" in batch:
            source = source * batch["position_ids"][..., None].cos()
        context = (source[:, -columns:] * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        target = batch.get("decoder_input_ids", batch["labels"]).clamp(min=0)
        return self.head(self.embedding(target) + context)


def translation_batch(source, target, *, columns=(12, 12), left=False, holes=False):
    """Return source and target rows of these lengths, padded to `columns`."""
    numbers = torch.Generator().manual_seed(3)
    tables = []
    for lengths, width, padding in zip((source, target), columns, (0, IGNORE_INDEX), strict=True):
        table = torch.randint(1, 53, (len(lengths), width), generator=numbers)
        used = torch.arange(width) < torch.tensor(lengths)[:, None]
        if left:
            used = used.flip(1)
        tables.append(table.where(used, padding))
    tokens, labels = tables
    mask = (tokens > 0).long()
    if holes:
        mask[:, 1] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


SHORT, LONG = [5, 3, 2, 4], [12, 5, 4, 9]
SQUARE = translation_batch([4, 2, 3, 2], [4, 2, 3, 2], columns=(4, 4))
TRANSLATIONS = {
    "both padded to a maximum": (translation_batch(SHORT, [4, 2, 9, 3], columns=(16, 16)), 9),
    "left padding of both": (translation_batch(SHORT, LONG, left=True), 12),
    "target shorter than source": (translation_batch(LONG, SHORT), 9),
    "wider labels": (translation_batch(SHORT, LONG, columns=(6, 12)), 4),
    "narrower labels": (translation_batch(LONG, SHORT, columns=(12, 6)), 9),
    "holes in the mask": (translation_batch(SHORT, SHORT, holes=True), 4),
    "no row fills its width": (translation_batch(SHORT, SHORT), 4),
    "as many rows as columns": ({**SQUARE, "classes": torch.arange(4)}, 3),
}


def without_cut(**others):
    return {**translation_batch(SHORT, SHORT), **others}


LEFT = translation_batch(SHORT, SHORT, left=True)
FEWER = translation_batch([3, 3, 2, 2], SHORT, columns=(8, 12))["attention_mask"]
SHIFTED = translation_batch(SHORT, LONG)["labels"].clamp(min=0)
UNCUT_TRANSLATIONS = {
    "decoder_input_ids": without_cut(decoder_input_ids=SHIFTED),
    "boxes": without_cut(bbox=torch.ones(4, 12, 4)),
    "positions of all rows": without_cut(position_ids=torch.arange(12)[None]),
    "additive mask": {**LEFT, "attention_mask": 1e4 * (LEFT["attention_mask"].float() - 1)},
    "narrower mask": without_cut(attention_mask=FEWER),
}


@pytest.mark.parametrize(
    ("batch", "columns"),
    [*TRANSLATIONS.values(), *((batch, None) for batch in UNCUT_TRANSLATIONS.values())],
    ids=[*TRANSLATIONS, *UNCUT_TRANSLATIONS],
)
def test_parts_cut_only_padding_from_source_and_target(batch, columns):
    model = Translation()
    parts = []

    def loss(batch):
        return cross_entropy(
            model(batch).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE_INDEX
        )

    loss(batch).backward()
    expected = taken_gradients(model)

    def forward_backward(part):
        if not part.is_trial:
            parts.append(part.batch)
        (loss(part.batch) * part.share).backward()

    def num_labels(batch):
        return (batch["labels"] != IGNORE_INDEX).sum()

    AdaptiveStep(model, forward_backward, micro_batch_size=2, num_labels=num_labels)(batch)
    assert relative_error(taken_gradients(model), expected) <= ROUNDING
    assert sum(map(num_labels, parts)) == num_labels(batch)
    widths = [part["attention_mask"].shape[1] for part in parts]
    # The last part has rows 2 and 3.
    assert widths[-1] == (columns or batch["attention_mask"].shape[1])


def test_parts_of_a_compiled_model_keep_all_columns_within_the_token_budget():
    torch.compiler.reset()
    model = torch.compile(decoder(), backend="eager", dynamic=True)
    script = Script(model)
    AdaptiveStep(model, script, micro_batch_tokens=40)(masked_batch())
    assert [part.batch["tokens"].shape for part in script.trained] == [(2, 16)] * 6
    torch.compiler.reset()


def test_micro_batch_tokens_for_rows_without_lengths_is_refused():
    model = Regression()
    script = Script(model)
    step = AdaptiveStep(model, script, micro_batch_tokens=8)
    with pytest.raises(SettingError, match=r"micro_batch_tokens.*nothing shows the tokens of a"):
        step(regression_data())
    assert script.trained == script.trials == []


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (lambda batch: None, "='NoneType': give a function that returns SplitBatch"),
        (lambda batch: SplitBatch(24, batch.__getitem__, lengths=[3, 4]), "='SplitBatch of 2 len"),
        (lambda batch: SplitBatch(10, lambda rows: batch[list(rows)]), "='SplitBatch of 10 rows'"),
    ],
)
@pytest.mark.parametrize("limit", [{}, {"micro_batch_size": 5}])
def test_an_invalid_split_is_refused_before_a_part_runs(split, says, limit):
    model = Regression()
    script = Script(model, loss=lambda model, batch: model(batch).mean())
    step = AdaptiveStep(model, script, split=split, **limit)
    with pytest.raises(SettingError, match=f"^split{says}"):
        step(torch.randn(24, 6))
    assert script.trained == script.trials == []
    if not limit and "10" in says:
        # A later batch is checked too, if one part has all rows of the first batch.
        step(torch.randn(10, 6))
        with pytest.raises(SettingError, match=f"^split{says}"):
            step(torch.randn(24, 6))


@pytest.mark.parametrize("in_batch", [2, 3, 40])
def test_a_loss_that_becomes_wrong_in_a_later_batch_is_refused_soon(in_batch):
    """The loss omits some rows, and the batch is a tuple without labels."""
    model = Regression()

    def masked_loss(part: Part) -> None:
        inputs, targets, valid = part.batch
        loss = mse_loss(model(inputs)[valid], targets[valid]) * part.share
        loss.backward()

    step = AdaptiveStep(model, masked_loss, micro_batch_size=4)
    inputs, targets = regression_data(12)
    done = []

    def train() -> None:
        for number in range(1, 65):
            valid = torch.ones(12, dtype=torch.bool)
            valid[:3] = number < in_batch
            step((inputs, targets, valid))
            done.append(number)

    with pytest.raises(SettingError, match="so a split would train something else"):
        train()
    assert in_batch - 1 <= len(done) < 2 * in_batch


class Normalized(nn.Module):
    """A model with BatchNorm, dropout and a frozen module in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        self.frozen = nn.Dropout(0.9).eval()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.layers(inputs))


def regression_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_loss(model(batch[0]), batch[1])


def test_the_check_runs_in_a_few_steps_and_does_not_change_training():
    model, twin, batch = Normalized(), Normalized(), regression_data()
    script = Script(model, loss=regression_loss)
    step = AdaptiveStep(model, script, micro_batch_size=4)
    seed_all()
    step(batch)
    state = training_state(model, torch.optim.SGD(model.parameters()))
    seed_all()
    for rows in (slice(0, 4), slice(4, 8), slice(8, 11)):
        share = len(range(11)[rows]) / 11
        (regression_loss(twin, tuple(tensor[rows] for tensor in batch)) * share).backward()
    assert state == training_state(twin, torch.optim.SGD(twin.parameters()))
    assert [part.num_rows for part in script.trials] == [4, 2, 2] * 2 + [2, 1, 1]
    for _ in range(300):
        step(batch)
    assert len(script.trials) == 9 * len([1, 2, 4, 8, 16, 32, 64, 256])


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_first_split_with_batch_norm_causes_one_warning(is_frozen, caplog):
    model = Normalized()
    step = AdaptiveStep(model, Script(model, loss=regression_loss), micro_batch_size=4)
    # Scripts freeze BatchNorm after they build the step.
    model.layers[1].train(not is_frozen)
    step(regression_data(4))
    assert "BatchNorm" not in caplog.text
    for _ in range(2):
        step(regression_data(11))
    assert caplog.text.count("BatchNorm") == (not is_frozen)


def test_batch_norm_gets_at_least_two_rows():
    model = Normalized()
    script = Script(model, loss=regression_loss)
    step = AdaptiveStep(model, script, micro_batch_size=5)
    step(regression_data(16))
    assert [part.num_rows for part in script.trained] == [4, 4, 4, 4]
    optimizer = torch.optim.SGD(model.parameters())
    found = step.find_bound(optimizer, regression_data, maximum=8, device_memory="1GiB")
    assert found.max_batch_size == 8
    assert min(trial.batch_size for trial in found.trials) == 2
    with pytest.raises(DoesNotFitError, match=r"^2 rows, which BatchNorm needs, "):
        step.find_bound(optimizer, regression_data, device_memory="1KiB")
    model.layers[1].eval()
    found = step.find_bound(optimizer, regression_data, maximum=8, device_memory="1GiB")
    assert found.trials[0].batch_size == 1


@pytest.mark.parametrize("how", ["autograd.backward", "autograd.grad", "none"])
def test_the_check_supports_all_ways_to_compute_gradients_and_warns_if_there_are_none(how, caplog):
    model, batch, seen = Regression(), regression_data(), []
    weights = list(model.parameters())

    @AdaptiveStep.of(model, micro_batch_size=4)
    def step(part):
        seen.append((part.is_trial, step.is_trial))
        if how == "none" and part.is_trial:
            return
        loss = regression_loss(model, part.batch) * part.share
        if how != "autograd.grad":
            torch.autograd.backward(loss)
            return
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient

    step(batch)
    assert ("no finite gradient" in caplog.text) == (how == "none")
    assert caplog.text.count("no finite gradient") <= 1
    assert seen[-4:] == [(True, True)] + [(False, False)] * 3
    assert not step.is_trial


def repeated(number: int) -> dict[str, torch.Tensor]:
    """Return a batch of `number` copies of the longest row."""
    batch = make_batch()
    return {key: value[2:3].repeat(number, 1) for key, value in batch.items()}


@pytest.mark.parametrize("key", ["micro_batch_size", "micro_batch_tokens"])
def test_auto_splits_batches_only_after_a_search(key, caplog):
    caplog.set_level(logging.INFO, logger="adaptive_batch")
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    script = Script(model)
    step = AdaptiveStep(model, script, **{key: "auto"})
    assert caplog.text.count("auto: batches are not split before a search") == 1
    expected, _ = plain_gradients(model, make_batch())
    step(make_batch())
    assert (script.rows, step.max_batch_size) == ([12], None)
    model.zero_grad()
    before = training_state(model, optimizer)
    found = step.find_bound(optimizer, repeated, device_memory="192KiB").max_batch_size
    assert training_state(model, optimizer) == before
    assert 1 < step.max_batch_size == found < 12
    script.trained.clear()
    step(make_batch())
    assert len(script.rows) > 1
    tokens = [part.batch["tokens"].numel() for part in script.trained]
    assert max(tokens) <= found * max(LENGTHS)
    # Without a mask, padding counts as tokens.
    assert max(script.rows) == found
    assert relative_error(taken_gradients(model), expected) <= ROUNDING
    too_large = AdaptiveStep(model, script, micro_batch_size=500)
    with pytest.raises(SettingError, match=r"micro_batch_size=500: .*give \d+ or less"):
        too_large.find_bound(optimizer, repeated, device_memory="192KiB")


def test_a_lowered_limit_is_restored_from_the_state():
    model = decoder()
    script, resumed_script = (Script(model, most_rows=4) for _ in range(2))
    step, resumed = AdaptiveStep(model, script), AdaptiveStep(model, resumed_script)
    for state in ({}, {"sizer": {}}):
        with pytest.raises(SettingError, match=r"give the result of state_dict\(\) of a step"):
            step.load_state_dict(state)
    step(make_batch())
    assert script.rows[:2] == [12, 6]
    resumed.load_state_dict(step.state_dict())
    resumed(make_batch())
    assert resumed_script.rows == [3, 3, 3, 3]
    assert resumed.state_dict()["sizer"]["num_out_of_memory"] == 2


REFUSED = {
    "micro_batch_tokens": [{"micro_batch_size": 4, "micro_batch_tokens": 9}, "max"],
    "micro_batch_size": [0],
    "split": [3],
    "num_labels": [3],
    "statistics": [3],
    "forward_backward": [None],
    "model": [nn.ReLU()],
    "options": [{"options": {"on_out_of_memory": "raise"}}],
    "max_grad_norm": [{"options": StepOptions(max_grad_norm=1.0)}],
    "micro_batch_layout": [{"options": StepOptions(micro_batch_layout="packed")}],
}


@pytest.mark.parametrize("key", REFUSED)
def test_invalid_arguments_are_refused(key):
    for value in REFUSED[key]:
        arguments = value if isinstance(value, dict) else {key: value}
        with pytest.raises(SettingError, match=f"^{key}="):
            AdaptiveStep(**{"model": nn.Linear(2, 2), "forward_backward": print, **arguments})


EXACT = 1e-12
ROW_LENGTHS = [5, 9, 4, 8, 7, 12, 6]


@pytest.fixture
def page() -> Page:
    return Page()


def random_split(generator: random.Random, lengths: list[int], *, has_lengths: bool) -> Any:
    """Return random arguments of a step that splits batches."""
    layout = generator.choice(["padded", "grouped"]) if has_lengths else None
    options = StepOptions(micro_batch_layout=layout)
    if has_lengths and generator.random() < 0.5:
        tokens = generator.randint(max(lengths), sum(lengths))
        return {"micro_batch_tokens": tokens, "options": options}
    return {"micro_batch_size": generator.randint(1, len(lengths)), "options": options}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(8))
def test_any_split_has_the_gradient_of_the_whole_batch(page, name, seed):
    case = CASES[name]
    generator = random.Random(f"{name} {seed}")
    lengths = [generator.randint(3, 14) for _ in range(generator.randint(2, 10))]
    batch = case.batch(page, lengths, seed=seed)
    expected, whole_loss = whole_gradients_of(page, case.whole, batch)
    split = random_split(generator, lengths, has_lengths=not case.makes_pairs)
    losses = case.step(page, **split)(batch)
    assert sum(losses).item() == pytest.approx(whole_loss, rel=EXACT)
    assert relative_error(taken_gradients(page.model), expected) <= EXACT


def in_room_for(most_rows: int, function: Callable[[Part], Any]) -> Callable[[Part], Any]:
    """Return a function that runs out of memory after a part of more than `most_rows` rows."""

    def run(part: Part) -> Any:
        result = function(part)
        if part.num_rows > most_rows and not part.is_trial:
            run_out_of_memory()
        return result

    return run


@pytest.mark.parametrize("fails_in", ["statistics", "loss", "both"])
def test_an_oom_in_either_pass_leaves_the_bits_of_a_step_with_smaller_parts(fails_in):
    """The model has dropout, random scales and running statistics."""
    ends = []
    for fails in (False, True):
        seed_all()
        page = Page(draws=True)
        batch = page.batch(ROW_LENGTHS)
        arguments: dict[str, Any] = {"num_labels": page.completion_tokens}
        loss = page.distill
        statistics = page.sums
        if fails and fails_in in ("statistics", "both"):
            statistics = in_room_for(5, statistics)
        if fails and fails_in in ("loss", "both"):
            loss = in_room_for(2 if fails_in == "both" else 5, loss)
        if not fails:
            arguments["micro_batch_size"] = 1 if fails_in == "both" else 3
        seed_all()
        step = AdaptiveStep(page.model, loss, statistics=statistics, **arguments)
        losses = torch.stack(step(batch))
        state = {**taken_gradients(page.model), **dict(page.model.named_buffers())}
        ends.append((bits({"losses": losses, **state}), torch.rand(1), random.random()))
    assert ends[0] == ends[1]


def test_a_search_and_an_estimate_run_both_passes(page):
    rows: dict[str, list[int]] = {"statistics": [], "loss": []}

    def sums(part: Part) -> dict[str, torch.Tensor]:
        rows["statistics"].append(part.num_rows)
        return {"loss": page.token_losses(part.batch).sum()}

    def loss(part: Part) -> None:
        rows["loss"].append(part.num_rows)
        (page.token_losses(part.batch).sum() / part.statistics["loss"].abs()).backward()

    row = page.batch([9])

    def sample(number: int) -> Batch:
        return {key: tensor.repeat_interleave(number, dim=0) for key, tensor in row.items()}

    step = AdaptiveStep(page.model, loss, statistics=sums)
    optimizer = torch.optim.AdamW(page.model.parameters())
    found = step.find_bound(optimizer, sample, device_memory="1GiB", maximum=4)
    estimated = step.estimate(optimizer, sample, "1GiB", maximum=4, context=0).devices[0]
    assert found.max_batch_size == estimated.lengths[0].max_batch_size == 4
    assert rows["statistics"] == rows["loss"]


def means(page: Page, part: Part) -> dict[str, torch.Tensor]:
    """Return statistics whose sums have another ratio than those of the whole batch."""
    cross_entropy, divergence = page.distillation_losses(part.batch)
    return {"cross_entropy": cross_entropy / part.num_rows, "divergence": divergence}


@pytest.mark.parametrize(
    ("loss", "statistics", "message"),
    [
        ("token_mean", lambda page, part: 3.0, "statistics='float': return a mapping"),
        ("token_mean", lambda page, part: {f"of {part.num_rows}": 1}, "of one part and"),
        ("token_mean", lambda page, part: {"loss": torch.ones(part.num_rows)}, "of one part and"),
        ("distill", means, "so a split would train something else"),
    ],
)
def test_statistics_that_are_not_sums_are_refused(page, loss, statistics, message):
    arguments = {"micro_batch_size": 2, "num_labels": page.completion_tokens}
    arguments["statistics"] = partial(statistics, page)
    step = AdaptiveStep(page.model, page.names[loss], **arguments)
    with pytest.raises(SettingError, match=message):
        step(page.batch([5, 9, 4]))
    assert taken_gradients(page.model) == {}


def test_results_and_statistics_of_a_failed_attempt_are_freed_before_its_retry(monkeypatch):
    model = nn.Linear(4, 1)
    made: list[weakref.ref[torch.Tensor]] = []
    trained, alive = [], []

    def remember(part, tensor):
        made.extend([] if part.is_trial else [weakref.ref(tensor)])
        return tensor

    def forward_backward(part):
        trained.extend([] if part.is_trial else [part.num_rows])
        if len(trained) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = model(part.batch["x"]).square().mean() * part.share
        loss.backward()
        return remember(part, loss.detach().clone())

    def statistics(part):
        return {"rows": remember(part, torch.ones(()) * part.num_rows)}

    step = AdaptiveStep(model, forward_backward, micro_batch_size=4, statistics=statistics)
    shrink = step.attempts._shrink

    def note_alive():
        alive.append([reference() is not None for reference in made])
        shrink()

    monkeypatch.setattr(step.attempts, "_shrink", note_alive)
    step({"x": torch.randn(8, 4)})
    assert trained == [4, 4, 2, 2, 2, 2]
    assert alive == [[False] * 3]


def test_a_step_does_not_affect_other_threads():
    model = nn.Linear(4, 1)
    other = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
    seen = []

    def train_other() -> None:
        outputs = other(torch.ones(4, 64))
        outputs.sum().backward()
        optimizer.step()
        seen.append(((outputs == 0).any().item(), other[0].bias.grad is not None))

    def forward_backward(part):
        other[0].bias.grad = torch.ones(64)
        thread = threading.Thread(target=train_other)
        thread.start()
        thread.join()
        seen[-1] += ((other[0].bias.grad >= 1).all().item(),)
        (model(part.batch["x"]).square().mean() * part.share).backward()

    step = AdaptiveStep(model, forward_backward, micro_batch_size=2)
    step({"x": torch.randn(8, 4)})
    # The check runs passes too, besides the four parts.
    assert len(seen) > 4
    assert set(seen) == {(True, True, True)}


def test_simultaneous_steps_in_two_threads_do_not_affect_each_other():
    def train(seed: int, gradients: list[torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Linear(4, 1)
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)

        def forward_backward(part):
            outputs = nn.functional.dropout(model(part.batch["x"]), 0.0)
            (outputs.square().mean() * part.share).backward()

        step = AdaptiveStep(model, forward_backward, micro_batch_size=2)
        for _ in range(5):
            step({"x": torch.randn(8, 4, generator=generator)})
        gradients.append(model.weight.grad)

    alone: list[torch.Tensor] = []
    train(0, alone)
    train(1, alone)
    together: list[torch.Tensor] = []
    dropout = nn.functional.dropout
    threads = [threading.Thread(target=train, args=(seed, together)) for seed in (0, 1)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert nn.functional.dropout is dropout
    assert {tuple(gradient[0].tolist()) for gradient in together} == {
        tuple(gradient[0].tolist()) for gradient in alone
    }
