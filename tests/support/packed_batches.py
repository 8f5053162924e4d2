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


def documents_in(batch, num_tokens):
    """Return the document number of each token, read from the batch."""
    for key, value in batch.items():
        if key.startswith("cu_seq"):
            ends = value.flatten()[1:]
            longest = value[value >= 0].diff().max()
            assert batch.get("max_length_q", batch.get("max_seqlen", longest)) == longest
            return torch.searchsorted(ends[ends > 0].long(), torch.arange(num_tokens), right=True)
    for key in ("seq_idx", "attention_mask"):
        if key in batch and batch[key].dim() == 2:
            return batch[key].flatten()
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
