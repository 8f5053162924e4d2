"""Parts of a packed batch have whole documents, and their gradients sum to the batch's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.packed_batches import FORMS, VOCABULARY, Attends, ends_of, flat, numbers_of, row_of

from adaptive_batch import AdaptiveStep, SettingError
from adaptive_batch.training.splitters import RowSplitter, documents_of


def gradients(model, batch, **arguments):
    """Return the gradients of a batch, and the parts of its step."""
    model.zero_grad()
    seen = []

    def forward_backward(part):
        loss = model(part.batch) * part.share
        loss.backward()
        seen.append(part)

    step = AdaptiveStep(model, forward_backward, **arguments)
    step(batch)
    parts = [part for part in seen if not part.is_trial]
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), parts


LENGTHS = st.lists(st.integers(2, 9), min_size=2, max_size=8)


@pytest.mark.parametrize("form", FORMS)
@given(lengths=LENGTHS, size=st.integers(1, 30), by_tokens=st.booleans())
@examples(25)
def test_gradients_of_parts_sum_to_those_of_the_batch(form, lengths, size, by_tokens):
    batch = FORMS[form](lengths)
    assert documents_of(batch).lengths == lengths
    model = Attends()
    expected, whole = gradients(model, batch)
    assert [part.num_rows for part in whole] == [len(lengths)]
    assert all(whole[0].batch[key] is value for key, value in batch.items())
    limit = {"micro_batch_tokens": size} if by_tokens else {"micro_batch_size": -(-size // 6)}
    found, parts = gradients(model, batch, **limit)
    assert (found - expected).abs().max() < 1e-12
    assert sum(part.num_rows for part in parts) == len(lengths)
    for part in parts:
        if not by_tokens:
            assert part.num_rows <= limit["micro_batch_size"]
        # The whole batch may also have padding.
        elif part.num_rows == len(lengths):
            assert sum(lengths) <= size or part.num_rows == 1
        else:
            tokens = part.batch.get("tokens", part.batch.get("input_ids"))
            assert tokens.numel() <= size or part.num_rows == 1


@pytest.mark.parametrize("first_position", [0, 2])
def test_values_of_documents_are_divided_and_numbers_are_kept(first_position):
    positions = flat([3, 2, 4])[2][None] + first_position
    batch = row_of([3, 2, 4], position_ids=positions)
    batch |= {"weights": torch.tensor([1.0, 2.0, 3.0]), "texts": ["a", "b", "c"], "scale": 2.0}
    batch |= {"array": np.array([1.0, 2.0, 3.0]), "step": torch.tensor(3)}
    part = documents_of(batch).part([0, 2])
    assert part["weights"].tolist() == part["array"].tolist() == [1.0, 3.0]
    assert part["texts"] == ["a", "c"]
    assert (part["scale"], part["step"]) == (2.0, 3)
    assert part["input_ids"].shape == (1, 7)
    assert part["position_ids"].equal(positions[:, [0, 1, 2, 5, 6, 7, 8]])


@pytest.mark.parametrize(
    "value",
    [torch.zeros(5, 2), [1, 2], {"pixels": torch.zeros(3)}, torch.zeros(5, 3, 9, 9)],
    ids=["rows", "a list", "a mapping", "as wide as the tokens"],
)
def test_a_value_without_an_entry_per_token_or_document_is_refused(value):
    batch = row_of([3, 2, 4], position_ids=flat([3, 2, 4])[2][None], images=value)
    with pytest.raises(SettingError, match=r"^batch='images': 3 documents .* neither 3 doc"):
        gradients(Attends(), batch, micro_batch_size=1)


def test_missing_positions_and_labels_across_documents_are_refused():
    tokens, labels, positions = flat([4, 5])
    for ends in ({}, {"cu_seqlens": torch.tensor([0])}):
        with pytest.raises(SettingError, match=r"^batch='9 documents .*: without positions, a"):
            gradients(Attends(), {"tokens": tokens, "labels": labels, **ends}, micro_batch_size=2)
    # A single document is not a batch of rows.
    assert documents_of({"tokens": tokens[:4], "labels": labels[:4], "positions": positions[:4]})
    batch = row_of([4, 5], position_ids=positions[None], labels=tokens[None])
    with pytest.raises(SettingError, match="predicts the first token of the next one"):
        gradients(Attends(), batch, micro_batch_size=1)


@pytest.mark.parametrize("ends", [[0, 4, 9], [[0, 4, 9]], [ends_of([4, 5])], np.array([0, 4, 9])])
def test_ends_that_are_not_a_tensor_are_refused(ends):
    with pytest.raises(SettingError, match=r"^batch='cu_seqlens': 2 documents"):
        gradients(Attends(), row_of([4, 5], cu_seqlens=ends), micro_batch_size=1)


@pytest.mark.parametrize("ends", [[0, 9, 4], [0, 4, 12]])
def test_invalid_ends_of_documents_are_refused(ends):
    batch = row_of([4, 5], cu_seqlens=torch.tensor(ends))
    with pytest.raises(SettingError, match=r"^batch='. documents? packed into 1 row of 9 tokens':"):
        documents_of(batch).part([0])


def test_parts_omit_tokens_after_the_last_document():
    batch = row_of([4, 5, 2], cu_seqlens=torch.tensor([0, 4, 9]))
    batch["labels"][0, 9:] = -100
    parts = documents_of(batch)
    assert list(parts.lengths) == [4, 5]
    assert parts.part([1])["input_ids"].tolist() == batch["input_ids"][:, 4:9].tolist()
    batch["labels"][0, 10] = 3
    with pytest.raises(SettingError, match="there are labels after the last document"):
        documents_of(batch).part([1])


def test_unpacked_rows_have_no_documents():
    places = torch.arange(17)
    several = torch.cat([torch.arange(length) for length in (7, 2, 5, 3)])
    for positions in (
        places[None],
        # Right padding, and left padding with zeros and ones.
        (places * (places < 9))[None],
        (places - 8).clamp(min=0)[None],
        (places - 8).where(places >= 8, 1)[None],
        several.repeat(2, 1),
    ):
        assert documents_of({"tokens": positions + 1, "position_ids": positions}) is None


def packed_rows(num_rows):
    """Return packed rows whose tokens predict the next token, even in another document."""
    _, _, positions = flat([4, 5, 3])
    tokens = torch.stack([flat([4, 5, 3], seed=row)[0] for row in range(num_rows)])
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions.repeat(num_rows, 1)}


def test_a_last_batch_of_one_packed_row_stays_whole_after_batches_of_several_rows():
    embedding = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    parts = []

    def forward_backward(part):
        logits = embedding(part.batch["input_ids"][:, :-1])
        labels = part.batch["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        (loss * part.share).backward()
        if not part.is_trial:
            parts.append(part.num_rows)

    step = AdaptiveStep(embedding, forward_backward, micro_batch_size=2)
    step(packed_rows(3))
    step(packed_rows(1))
    assert parts == [2, 1, 1]


def test_several_packed_rows_are_divided_by_rows_with_the_values_of_their_documents():
    batch = packed_rows(3) | {
        "attention_mask": numbers_of([4, 5, 3]).repeat(3, 1) + 1,
        "seq_idx": numbers_of([4, 5, 3]).repeat(3, 1),
        "cu_seqlens": ends_of([4, 5, 3]).repeat(3, 1),
    }
    part = RowSplitter(trims=True)(batch | {"max_seqlen": 5}).part([0, 2])
    assert part.pop("max_seqlen") == 5
    assert all(value.equal(batch[key][[0, 2]]) for key, value in part.items())


@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_first_packed_batch_is_checked_even_after_other_batches(steps_before):
    class Mixes(Attends):
        def forward(self, batch):
            return super().forward({**batch, "position_ids": torch.arange(batch["labels"].numel())})

    model = Mixes()

    def forward_backward(part):
        if "rows" in part.batch:
            (model.head.weight.sum() * part.batch["rows"].mean() * part.share).backward()
        else:
            (model(part.batch) * part.share).backward()

    step = AdaptiveStep(model, forward_backward, micro_batch_size=1)
    for _ in range(steps_before):
        step({"rows": torch.ones(4, 3).double()})
    says = r"gradients of 4 documents and .* attention across documents must stay whole"
    with pytest.raises(SettingError, match=says):
        step(row_of([6, 5, 7, 4], position_ids=flat([6, 5, 7, 4])[2][None]))


def test_padding_that_looks_like_documents_does_not_hide_a_gradient(caplog):
    lengths = [4, 5, 6, 3, 3, 3]
    batch = row_of(lengths, position_ids=flat(lengths)[2][None])
    batch["labels"][0, sum(lengths[:3]) :] = -100
    gradients(Attends(), batch, micro_batch_size=3)
    assert "no finite gradient" not in caplog.text
