"""Batches of many layouts are divided by rows, or refused with the treatment of each key."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from support.losses import taken_gradients
from support.sharded_model import relative_error
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import TokenClassifierOutput

from adaptive_batch.errors import SettingError
from adaptive_batch.training import AdaptiveStep, Part
from adaptive_batch.training.splitters import RowSplitter

ROUNDING = 2e-6
Pair = namedtuple("Pair", "x y")
random = torch.Generator().manual_seed(1)


def rows_of(*lengths, k=4):
    return [torch.randn(length, k, generator=random) for length in lengths]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4)
        self.linear = nn.Linear(4, 3)
        self.conv = nn.Conv2d(3, 3, 3)
        self.rnn = nn.GRU(4, 3)


def gradients_of_whole(model, loss, batch):
    model.zero_grad()
    loss(model, batch).backward()
    return taken_gradients(model)


def new_step(model, loss, size=2, **arguments):
    """Return a step that splits batches by rows, and the list of its trained parts."""
    parts: list[Part] = []

    def forward_backward(part):
        if not part.is_trial:
            parts.append(part)
        (loss(model, part.batch) * part.share).backward()

    return AdaptiveStep(model, forward_backward, micro_batch_size=size, **arguments), parts


Y = torch.tensor([0, 2, 1, 2])
IDS = torch.tensor([[1, 2, 3, 4], [1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0]])


def of_targets(model, batch):
    pictures, targets = batch["pictures"], batch["targets"]
    outputs = torch.stack([model.conv(picture[None]).mean() for picture in pictures])
    return (outputs - torch.stack([target["score"] for target in targets])).square().mean()


def of_mean(model, batch):
    outputs = torch.stack([model.linear(row).mean(0) for row in batch["x"]])
    return cross_entropy(outputs, torch.as_tensor(batch["y"]))


PICTURES = [torch.randn(3, 8 + row, 9, generator=random) for row in range(4)]
TARGETS = [{"score": torch.ones(()), "boxes": torch.zeros(row + 2, 4)} for row in range(4)]
EXACT = {
    "lists of pictures and targets with a tensor": (
        {"pictures": PICTURES, "targets": tuple(TARGETS), "y": Y},
        of_targets,
    ),
    "a tensor": (
        torch.randn(4, 4, generator=random),
        lambda model, batch: model.linear(batch).square().mean(),
    ),
    "a list of words with a tensor": (
        Pair([["a"], ["bb", "c"], ["dd"], ["e"]], Y),
        lambda model, batch: cross_entropy(
            model.linear(model.embedding(torch.tensor([len(row) for row in batch.x]))), batch.y
        ),
    ),
    "an array of texts": (
        {"x": torch.randn(4, 2, 4, generator=random), "y": np.array(["0", "2", "1", "2"], object)},
        lambda model, batch: of_mean(model, {**batch, "y": list(map(int, batch["y"]))}),
    ),
}


@pytest.mark.parametrize(("batch", "loss"), EXACT.values(), ids=EXACT)
def test_rows_of_many_layouts_are_divided(batch, loss):
    model = Model()
    expected = gradients_of_whole(model, loss, batch)
    step, parts = new_step(model, loss)
    step(batch)
    assert [part.num_rows for part in parts] == [2, 2]
    assert all(type(part.batch) is type(batch) for part in parts)
    assert relative_error(taken_gradients(model), expected) <= ROUNDING


UNDIVIDED = {
    "a packed sequence": {"x": pack_sequence(rows_of(5, 4, 3, 2)), "y": Y},
    "jagged rows": {"x": torch.nested.nested_tensor(rows_of(2, 4, 3, 5), layout=torch.jagged)},
    "nested rows": {"x": torch.nested.nested_tensor(rows_of(2, 4, 3, 5)), "y": Y},
    "a sparse tensor": {"x": torch.eye(4).to_sparse(), "y": Y},
    "views of all rows": {"x": [torch.ones(4, 3), torch.ones(4, 3)], "y": Y},
    "as many views of all rows as rows": {"x": [torch.ones(4, 3)] * 4, "y": Y},
    "a list that has a tensor of all rows": {"x": [Y, torch.ones(3)], "y": Y},
    "pictures of one size": {"x": [torch.ones(4, 8, 9)] * 3, "y": Y},
    "tensors of several sizes in a list": [torch.ones(4, 3), torch.ones(5, 3)],
    "a named tuple": {"x": Pair(Y, Y), "y": Y},
}


@pytest.mark.parametrize("batch", UNDIVIDED.values(), ids=UNDIVIDED)
def test_rows_that_cannot_be_indexed_train_whole_and_a_split_of_them_is_refused(batch):
    step, parts = new_step(Model(), lambda model, batch: model.linear.weight.sum(), size=4)
    for _ in range(2):
        step(batch)
    assert [(part.num_rows, type(part.batch)) for part in parts] == [(4, type(batch))] * 2
    # A later batch does not change the decision.
    split = RowSplitter(trims=True)
    split(batch)
    with pytest.raises(SettingError, match=r"cannot be divided by rows \(.*\); give split="):
        split(batch).part([0, 1])


def test_a_tensor_of_another_size_in_a_tuple_is_never_divided():
    split = RowSplitter(trims=True)
    split((torch.ones(8, 3), WEIGHTS))
    says = r"\[1\] cannot be divided by rows \(\[0\] divided; \[1\] not divisible\)"
    with pytest.raises(SettingError, match=says):
        split((torch.ones(4, 3), WEIGHTS)).part([0, 1])


@pytest.mark.parametrize(
    ("batch", "treatment"),
    [
        ({"scale": 2.0, "name": "train"}, "scale, name kept whole"),
        ({"texts": ["a", "b"], "sizes": [1, 2, 3]}, "texts, sizes kept whole"),
        ([{"x": torch.ones(3)}, {"x": torch.ones(2)}], "the batch kept whole"),
        (([torch.ones(3)] * 4, [torch.ones(2, 4)] * 4), r"\[0\], \[1\] kept whole"),
        (nn.Identity(), "the batch kept whole"),
    ],
)
def test_a_batch_without_a_number_of_rows_is_refused(batch, treatment):
    step, _ = new_step(Model(), lambda model, batch: None)
    kind = type(batch).__name__
    with pytest.raises(SettingError, match=rf"^batch='{kind}': nothing .* \({treatment}\); give"):
        step(batch)


def classified(num_rows, **others):
    x = torch.randn(num_rows, 4, generator=random)
    return {"x": x, "y": torch.arange(num_rows) % 3, **others}


def weighted(model, batch):
    losses = cross_entropy(model.linear(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["weights"][batch["y"]]).mean()


WEIGHTS = torch.tensor([1.0, 3.0, 9.0, 1.0])


@pytest.mark.parametrize("num_rows", [4, 3, 8, 1])
def test_a_key_that_was_kept_whole_in_the_first_batch_stays_whole(num_rows):
    model = Model()
    step, parts = new_step(model, weighted)
    step(classified(8, weights=WEIGHTS))
    batch = classified(num_rows, weights=WEIGHTS, names=["a"] * num_rows)
    expected = gradients_of_whole(model, weighted, batch)
    parts.clear()
    step(batch)
    assert [part.num_rows for part in parts] == [2] * (num_rows // 2) + [1] * (num_rows % 2)
    # A key that the first batch lacks is divided if it has one value per row here.
    assert sum(len(part.batch["names"]) for part in parts) == num_rows
    assert relative_error(taken_gradients(model), expected) <= ROUNDING


def test_splitting_a_batch_that_contradicts_the_first_is_refused():
    model = Model()
    loss = lambda model, batch: weighted(model, {**batch, "weights": WEIGHTS})  # noqa: E731
    step, parts = new_step(model, loss)
    step(classified(4, weights=WEIGHTS))
    parts.clear()
    says = "^batch='dict': weights was divided in an earlier batch, but has 4 rows in this one of 3"
    with pytest.raises(SettingError, match=says):
        step(classified(3, weights=WEIGHTS))
    with pytest.raises(SettingError, match="y was divided in an earlier batch, but has no rows"):
        step(classified(4, weights=WEIGHTS, y={"labels": torch.zeros(4)}))
    assert parts == []
    step(classified(2, weights=WEIGHTS))
    assert [len(part.batch["weights"]) for part in parts] == [4]


def test_an_empty_key_of_the_first_batch_is_decided_later():
    """A collator may return None or an empty tensor for rows without images."""
    model = Model()
    step, parts = new_step(model, lambda model, batch: model.linear(batch["x"]).mean())
    step(classified(4, images=None, masks=torch.ones(0, 4), boxes=[]))
    parts.clear()
    step(classified(6, images=torch.ones(6, 3), masks=torch.ones(6, 4), boxes=list(range(6))))
    for part in parts:
        assert [len(part.batch[key]) for key in ("images", "masks", "boxes")] == [2] * 3


def test_keys_that_an_earlier_batch_divided_show_the_number_of_rows():
    split = RowSplitter(trims=True)
    split({"x": torch.ones(4, 3)})
    rows = split({"x": torch.ones(3, 3), "images": torch.ones(7, 2), "masks": torch.ones(7, 2)})
    assert rows.num_rows == 3
    assert len(rows.part([0, 1])["images"]) == 7


@pytest.mark.parametrize("first", ["one row", "a search"])
def test_one_row_or_a_sample_of_a_search_does_not_decide_which_keys_are_divided(first):
    """Positions that all rows share look like a row's own positions if the batch has one row."""
    model = Model()

    def loss(model, batch):
        hidden = model.embedding(batch["ids"]) + model.embedding(batch["positions"])
        return cross_entropy(model.linear(hidden.sum(1)), batch["y"])

    def make(num_rows):
        return {"ids": IDS[:num_rows], "positions": torch.arange(4)[None], "y": Y[:num_rows]}

    step, parts = new_step(model, loss)
    if first == "one row":
        step(make(1))
        model.zero_grad()
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        step.find_bound(optimizer, make, maximum=4, device_memory="1GiB")
    expected = gradients_of_whole(model, loss, make(4))
    step(make(4))
    assert [part.num_rows for part in parts][-2:] == [2, 2]
    assert relative_error(taken_gradients(model), expected) <= ROUNDING


def pop_y(inner):
    inner.pop("y")


CONTAINERS = {
    "a mapping": (dict, pop_y),
    "a mapping class": (UserDict, pop_y),
    "an encoding": (BatchEncoding, pop_y),
    "an output": (lambda values: TokenClassifierOutput(logits=values["y"]), dict.clear),
    "a list": (lambda values: [2.0], list.pop),
    "a list of mappings": (
        lambda values: [{"y": each} for each in values["y"]],
        lambda inner: [each.pop("y") for each in inner],
    ),
    "a view": (lambda values: MappingProxyType(values), lambda inner: inner["y"]),
}


@pytest.mark.parametrize(("build", "pop"), CONTAINERS.values(), ids=CONTAINERS)
def test_values_that_a_function_removes_from_a_batch_are_restored_for_the_retry(build, pop):
    model = Model()
    batch = {"x": torch.randn(4, 4, generator=random), "more": build({"y": Y})}
    attempts = []

    def forward_backward(part):
        inner = part.batch["more"]
        if part.num_rows == 4:
            assert type(inner) is type(batch["more"])
        assert len(inner)
        pop(inner)
        if not part.is_trial:
            attempts.append(part.num_rows)
            if part.num_rows > 2:
                torch.empty(2**50, dtype=torch.uint8)
        (model.linear(part.batch["x"]).mean() * part.share).backward()

    def statistics(part):
        pop(part.batch["more"])
        return {"rows": part.num_rows}

    AdaptiveStep(model, forward_backward, statistics=statistics)(batch)
    assert attempts == [4, 2, 2]
    assert len(batch["more"])


def test_a_batch_without_the_divided_keys_of_an_earlier_batch_is_refused():
    split = RowSplitter(trims=True)
    split({"x": torch.ones(4, 2)})
    with pytest.raises(SettingError, match=r"nothing in it shows the number of rows \(x divided\)"):
        split({"x": None})
