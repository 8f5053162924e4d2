"""Packed batches in the formats of several libraries, and a model that attends within documents."""

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 23


def flat(lengths, seed=0):
    """Return tokens, labels and positions of documents; the first label of each is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    labels = torch.where(positions == 0, -100, tokens)
    return tokens, labels, positions


def ends_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def numbers_of(lengths):
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def row_of(lengths, **values):
    tokens, labels, _ = flat(lengths)
    return {"input_ids": tokens[None], "labels": labels[None], **values}


def flattened(lengths):
    """Make a batch as DataCollatorWithFlattening does for flash attention."""
    ends = ends_of(lengths)
    named = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return row_of(lengths, **named, max_length_q=max(lengths), max_length_k=max(lengths))


def filled_up(lengths):
    """Make a batch as Automodel does, with document ends padded to a fixed number."""
    ends = functional.pad(ends_of(lengths), (0, 3), value=-1000)[None]
    return row_of(lengths, cu_seqlens=ends, max_seqlen=torch.tensor(max(lengths)), qkv_format="thd")


def of_torchtitan(lengths):
    """Make a batch as torchtitan does: labels are shifted, and tensors have no row dimension."""
    tokens, labels, positions = flat(lengths)
    return {"tokens": tokens, "labels": labels.roll(-1), "positions": positions}


def with_mask(lengths):
    numbers = numbers_of(lengths)
    mask = numbers[:, None] == numbers
    positions = flat(lengths)[2][None]
    return row_of(lengths, position_ids=positions, attention_mask=mask[None, None])


FORMS = {
    "positions": lambda lengths: row_of(lengths, position_ids=flat(lengths)[2][None]),
    "flattened": flattened,
    "filled up": filled_up,
    "numbers": lambda lengths: row_of(lengths, seq_idx=numbers_of(lengths)[None].int()),
    "numbered mask": lambda lengths: row_of(lengths, attention_mask=numbers_of(lengths)[None] + 1),
    "torchtitan": of_torchtitan,
    "mask of tokens x tokens": with_mask,
}


def in_rows(make):
    """Return a function that makes two padded rows of documents, each with `make`."""

    def make_rows(lengths):
        middle = -(-len(lengths) // 2)
        rows = [make(lengths[:middle]), make(lengths[middle:])]
        return {key: padded([row[key] for row in rows], key) for key in rows[0]}

    return make_rows


def padded(values, key):
    width = max(value.shape[-1] for value in values)
    fill = {"labels": -100, "cu_seqlens": -1000}.get(key, 0)
    return torch.cat(
        [functional.pad(value, (0, width - value.shape[-1]), value=fill) for value in values]
    )


def nested(lengths):
    tokens, labels, _ = flat(lengths)
    split = [torch.split(tensor, lengths) for tensor in (tokens, labels)]
    own, own_labels = (torch.nested.nested_tensor([*each], layout=torch.jagged) for each in split)
    return {"input_ids": own, "labels": own_labels}


FORMS_IN_ROWS = {
    "rows of positions": in_rows(FORMS["positions"]),
    "rows of ends": in_rows(lambda lengths: row_of(lengths, cu_seqlens=ends_of(lengths)[None])),
    "rows of numbers": in_rows(FORMS["numbers"]),
    "rows of a numbered mask": in_rows(
        lambda lengths: {**FORMS["positions"](lengths), **FORMS["numbered mask"](lengths)}
    ),
}


def documents_in(batch, num_tokens):
    """Return the document number of each token, read from the batch."""
    for key, value in batch.items():
        if key.startswith("cu_seq") and len(value) == 2 and value.dim() == 2:
            columns = torch.arange(num_tokens // 2)
            numbers = [
                torch.searchsorted(row[row > 0].long(), columns, right=True) for row in value
            ]
            return torch.cat([numbers[0], numbers[1] + num_tokens])
        if key.startswith("cu_seq"):
            ends = value.flatten()[1:]
            longest = value[value >= 0].diff().max()
            assert batch.get("max_length_q", batch.get("max_seqlen", longest)) == longest
            return torch.searchsorted(ends[ends > 0].long(), torch.arange(num_tokens), right=True)
    for key in ("seq_idx", "attention_mask"):
        if key in batch and batch[key].dim() == 2:
            row = torch.arange(len(batch[key]))[:, None]
            return (batch[key] + num_tokens * row).flatten()
    positions = batch.get("position_ids", batch.get("positions")).flatten()
    return (positions == 0).cumsum(0)


class Attends(nn.Module):
    """One layer of causal attention within each document, in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.project = nn.Linear(8, 24)
        self.head = nn.Linear(8, VOCABULARY)
        self.double()

    def forward(self, batch):
        if batch.get("input_ids", self.head.weight).is_nested:
            lengths = batch["input_ids"].offsets().diff().tolist()
            values = {key: value.values()[None] for key, value in batch.items()}
            return self({**values, "seq_idx": numbers_of(lengths)[None]})
        tokens = batch.get("tokens", batch.get("input_ids")).flatten()
        numbers = documents_in(batch, len(tokens))
        sees = (numbers[:, None] == numbers).tril()
        if batch.get("attention_mask", tokens).dim() == 4:
            sees = batch["attention_mask"][0, 0].tril()
        hidden = self.embedding(tokens)
        query, key, value = self.project(hidden).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        logits = self.head(hidden + mixed)
        if "tokens" in batch:
            return functional.cross_entropy(logits, batch["labels"])
        return functional.cross_entropy(logits[:-1], batch["labels"].flatten()[1:])
