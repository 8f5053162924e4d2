"""Gradients are sums of token losses over one count of label tokens, however a step is split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from adaptive_batch.accumulation import Accumulator

IGNORED = -100
VOCABULARY = 11


def collate(rows):
    def padded(key, value):
        return pad_sequence([torch.tensor(row[key]) for row in rows], batch_first=True, padding_value=value)

    return {"tokens": padded("tokens", 0), "labels": padded("labels", IGNORED)}


def accumulator(model, **settings):
    def mean_loss(batch):
        labels = batch.pop("labels")[:, 1:]
        logits = model(batch["tokens"])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    return Accumulator(
        model,
        collate=collate,
        to_device=lambda batch: None,
        mean_loss=mean_loss,
        num_real_tokens=lambda row: len(row["tokens"]),
        ignore_index=IGNORED,
        **settings,
    )


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, VOCABULARY)).double()


@st.composite
def rows(draw):
    tokens = draw(st.lists(st.integers(1, VOCABULARY - 1), min_size=2, max_size=12))
    masked = draw(st.integers(0, len(tokens)))
    return {"tokens": tokens, "labels": [IGNORED] * masked + tokens[masked:]}


def gradients(batch, micro_batch_size):
    net = model()
    result = accumulator(net).run(batch, micro_batch_size=micro_batch_size)
    return result, [parameter.grad for parameter in net.parameters()]


@given(batch=st.lists(rows(), min_size=1, max_size=9), micro_batch_size=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_gradients_and_the_loss_of_one_batch(batch, micro_batch_size):
    whole, expected = gradients(batch, len(batch))
    split, found = gradients(batch, micro_batch_size)
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    assert int(split.label_tokens) == int(whole.label_tokens)
    assert split.tokens == whole.tokens == sum(len(row["tokens"]) for row in batch)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_a_micro_batch_without_labels_is_skipped_and_a_step_of_them_has_no_gradient():
    unlabelled = {"tokens": [1, 2, 3], "labels": [IGNORED] * 3}
    labelled = {"tokens": [4, 5, 6], "labels": [IGNORED, 5, 6]}
    result, found = gradients([unlabelled, labelled], 1)
    assert result.micro_batches == 1
    assert all(torch.isfinite(gradient).all() for gradient in found)
    result, found = gradients([unlabelled], 1)
    assert (result.loss, result.micro_batches, found) == (0.0, 0, [None] * len(found))


def test_padding_is_counted_per_micro_batch():
    batch = [{"tokens": [1] * length, "labels": [1] * length} for length in (2, 8)]
    assert gradients(batch, 2)[0].padding_fraction == 1 - 10 / 16
    assert gradients(batch, 1)[0].padding_fraction == 0


def test_in_backward_the_loss_is_a_mean_and_not_multiplied_by_its_tokens():
    batch = [{"tokens": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}]
    plain, in_backward = model(), model()
    accumulator(plain).run(batch, micro_batch_size=1)
    result = accumulator(in_backward, scale_gradients=False).run(batch, micro_batch_size=1)
    for one, other in zip(plain.parameters(), in_backward.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-12)
    assert result.loss == pytest.approx(accumulator(model()).run(batch, micro_batch_size=1).loss)
