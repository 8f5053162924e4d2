"""What another's code makes, read: labels counted, losses checked, rows named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.sharded_model import make_rows
from torch import nn
from torch.nn.functional import cross_entropy

from adaptive_batch.data import DatasetAdapter, check_loss
from adaptive_batch.errors import SettingError
from adaptive_batch.training import AdaptiveLoop

WEIGHTS = torch.ones(4, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ((WEIGHTS.mean(), WEIGHTS), "mean_loss='tuple': that is what it returned; return the"),
        ({"loss": WEIGHTS.mean()}, "mean_loss='dict': "),
        (1.5, "mean_loss='float': "),
        (None, "mean_loss='NoneType': "),
        (WEIGHTS.sum(1), r"mean_loss='torch.float32 of \[4\]': "),
        (WEIGHTS.sum().long(), r"mean_loss='torch.int64 of \[\]': "),
        (WEIGHTS.sum().detach(), r"mean_loss=12\.0: its result depends on no parameter that needs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_mean_loss_is_refused_with_what_it_is(loss: Any, said: str) -> None:
    with pytest.raises(SettingError, match=f"^{said}"):
        check_loss(loss)


def test_a_mean_loss_is_one_number_of_32_bits_or_more() -> None:
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        for shape in ((), (1,), (1, 1)):
            given = WEIGHTS.mean().to(dtype).reshape(shape)
            loss = check_loss(given)
            assert (loss.dtype, loss.shape, loss.item()) == (expected, (), given.item())
    single = WEIGHTS.mean()
    assert check_loss(single) is single
    with torch.no_grad():  # as the loss of a validation
        assert check_loss(WEIGHTS.mean()) == 1


def test_a_loss_that_cannot_be_used_is_said_by_the_search_and_by_training() -> None:
    net = nn.Linear(4, 2)
    rows = [(torch.ones(4), number % 2) for number in range(8)]

    def loss_and_logits(batch: Any) -> Any:
        return cross_entropy(net(batch[0]), batch[1]), net(batch[0])

    loop = AdaptiveLoop(
        net,
        torch.optim.SGD(net.parameters()),
        rows,
        collate=torch.utils.data.default_collate,
        mean_loss=loss_and_logits,
        num_labels=lambda batch: len(batch[1]),
        row_length=1,
        batch_size=4,
    )
    with pytest.raises(SettingError, match=r"^mean_loss='tuple': "):
        loop.find_bound(device_memory="1GiB")
    with pytest.raises(SettingError, match=r"^mean_loss='tuple': "):
        loop.run(next(iter(loop)))


def test_the_labels_of_an_encoder_decoder_are_counted_as_they_are_not_shifted() -> None:
    """With the count of a causal model, the parts of a split step would have other weights than
    their labels.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(53, 8), nn.Linear(8, 53)).double()
    rows = make_rows([2 + 3 * (number % 4) for number in range(12)])

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(row["tokens"]) for row in rows], True, 0)
        return {"tokens": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}

    def gradient(micro_batch_size: int, **options: Any) -> torch.Tensor:
        net.zero_grad()
        loop = AdaptiveLoop(
            net,
            torch.optim.SGD(net.parameters()),
            rows,
            collate=collate,
            mean_loss=lambda batch: cross_entropy(
                net(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
            ),
            batch_size=12,
            micro_batch_size=micro_batch_size,
            **options,
        )
        loop.run(next(iter(loop)))
        assert net[1].weight.grad is not None
        return net[1].weight.grad.clone()

    whole = gradient(12)
    split = gradient(2, num_labels=lambda batch: (batch["labels"] != -100).sum())
    assert torch.allclose(split, whole, rtol=1e-6, atol=1e-9)
    # The check of the first split shows it too.
    assert torch.allclose(gradient(2), whole, rtol=1e-6, atol=1e-9)
    with pytest.raises(SettingError, match="so a split would train something else"):
        gradient(2, num_labels=lambda batch: (batch["labels"][:, 1:] != -100).sum())


def test_rows_are_measured_by_tokens_and_by_the_bytes_of_all_but_text() -> None:
    text = {"input_ids": torch.arange(5), "mask": [True] * 5, "weight": np.int64(3)}
    tiles = [torch.ones(2, 3), {"pixels": np.ones((4, 4), np.uint8)}, (torch.ones(5),), "name"]
    rows = DatasetAdapter([text, {**text, "tiles": tiles}])
    assert (rows.lengths.tolist(), rows.other_bytes.tolist()) == ([5, 5], [0, 24 + 16 + 20])
    assert DatasetAdapter([text], 7).other_bytes.tolist() == [0]
