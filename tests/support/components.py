"""Components that tests name by dotted paths: valid and invalid growth functions, unusual datasets,
and models, losses and optimizers that record batches or run out of memory.
"""

import itertools
import json
import os
import sys

import numpy as np
import torch
from support.cli import MODEL
from torch.optim.lr_scheduler import StepLR
from torchtune.data import padded_collate_sft
from torchtune.models.qwen2 import qwen2

ASKED = []


def four_more(epoch, batch_size):
    ASKED.append((epoch, batch_size))
    return 4 if epoch else 0


def exits_in_second_epoch(epoch, batch_size):
    return sys.exit(0) if epoch == 1 else 0


def exits(*_, **__):
    """A component or growth function that ends the program with status 0."""
    sys.exit(0)


NOT_CALLABLE = 3


def unbuildable(tokenizer, **_):
    raise KeyError("column")


class Stream(torch.utils.data.IterableDataset):
    """A dataset whose rows have no numbers."""

    def __init__(self, tokenizer, **_):
        pass

    def __iter__(self):
        return iter(())


class Endless:
    """A dataset without a length."""

    def __init__(self, tokenizer, **_):
        pass

    def __getitem__(self, row):
        return {"tokens": [1, 2, 3], "labels": [1, 2, 3]}


def _unreadable(tokens):
    raise ValueError("no text")


# Tokens and labels of rows that training cannot use.
ODD_ROWS = {
    "plain": lambda tokens: (tokens, tokens),
    "raises": _unreadable,
    "unlabelled": lambda tokens: (tokens, None),
    "long": lambda tokens: (tokens * 5 + tokens[:5],) * 2,
    "foreign": lambda tokens: ([*tokens[:-1], MODEL["vocab_size"]],) * 2,
    "negative": lambda tokens: ([*tokens[:-1], -3],) * 2,
    "empty": lambda tokens: ([], []),
    "floats": lambda tokens: ([0.5] * 12,) * 2,
    "unlike": lambda tokens: (tokens, [*tokens, 1]),
    "foreign_label": lambda tokens: (tokens, [*tokens[:-1], MODEL["vocab_size"]]),
}


class WithOddRow:
    """Rows of 12 tokens, and one row of ``ODD_ROWS``."""

    def __init__(self, tokenizer, row, at=5, **_):
        self.row, self.at = row, at

    def __len__(self):
        return 24

    def __getitem__(self, number):
        make = ODD_ROWS[self.row if number == self.at else "plain"]
        tokens, labels = make([1 + (number + i) % 500 for i in range(12)])
        return {"tokens": tokens} | ({} if labels is None else {"labels": labels})


class Augmented:
    """A dataset that draws a random number for each row, as image transforms do."""

    def __init__(self, tokenizer, **_):
        pass

    def __len__(self):
        return 16

    def __getitem__(self, row):
        shift = int(torch.randint(0, 50, (1,)))
        return {"tokens": [row + 1 + shift] * 12, "labels": [-100] * 2 + [row + 1 + shift] * 10}


# Types of tokens and labels.
KINDS = {
    "list": list,
    "array": np.array,
    "tensor": torch.tensor,
    "tuple": tuple,
    "list of numpy": lambda tokens: list(np.array(tokens)),
}


class OfLengths:
    """Rows of given lengths, some without labels. The first token of a row is its number plus 1,
    which identifies the row in a batch.

    Args:
        lengths: numbers of tokens.
        unlabelled: numbers of rows without labels.
        kind: type of tokens and labels.
        columns: names of the columns of a row.
    """

    unlabelled, kind, columns = (), "list", ("tokens", "labels")

    def __init__(self, tokenizer, lengths, unlabelled=(), kind="list", columns=columns, **_):
        self.lengths, self.unlabelled, self.kind = list(lengths), unlabelled, kind
        self.columns = columns

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        tokens = [row + 1]
        tokens += [1 + (row * row + 7 * i * i) % 500 for i in range(1, self.lengths[row])]
        labels = [-100] * len(tokens) if row in self.unlabelled else [-100, *tokens[1:]]
        make = KINDS[self.kind]
        whole = {"tokens": make(tokens), "labels": make(labels), "id": f"row {row}", "source": 3}
        return {name: whole[name] for name in self.columns}


def leaving_out(rows, padding_idx=0, ignore_idx=-100):
    """A collate function that drops the last row of each batch."""
    return padded_collate_sft(rows[:-1], padding_idx=padding_idx, ignore_idx=ignore_idx)


def without_labels(rows, padding_idx=0, ignore_idx=-100):
    """A collate function that returns only tokens."""
    batch = padded_collate_sft(rows, padding_idx=padding_idx, ignore_idx=ignore_idx)
    return {"tokens": batch["tokens"]}


def labelling(rows, padding_idx=0, ignore_idx=-100):
    """A collate function that adds labels to rows."""
    rows = [{**row, "labels": [ignore_idx, *row["tokens"][1:]]} for row in rows]
    return padded_collate_sft(rows, padding_idx=padding_idx, ignore_idx=ignore_idx)


class OfLengthsNow(OfLengths):
    """Rows whose lengths are read from :data:`NOW` or the environment each time, like a file whose
    content changes.
    """

    def __init__(self, tokenizer, **_):
        self.num_rows = len(self.lengths)

    def __len__(self):
        return self.num_rows

    @property
    def lengths(self):
        return NOW.get("lengths") or json.loads(os.environ["LENGTHS"])


# --- rows and memory that change in a run

NOW = {}  # current lengths of rows


def watched(*, rows_fit=None, refused=None, **model):
    """Build a Qwen2. In training it runs out of memory with more than `rows_fit` rows: in each
    micro-batch, or in those with one of the rows `refused` of
    :class:`OfLengths`.
    """
    built = qwen2(**model)

    def before(module, args, kwargs):
        tokens = kwargs["tokens"]
        numbers = (tokens[:, 0] - 1).tolist()
        is_large = rows_fit and torch.is_grad_enabled() and len(numbers) > rows_fit
        if is_large and (refused is None or not set(numbers).isdisjoint(refused)):
            out_of_memory()

    built.register_forward_pre_hook(before, with_kwargs=True)
    return built


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class FailingAdamW(torch.optim.AdamW):
    """An optimizer that runs out of memory in its step number `fails_at`, counted from 1."""

    def __init__(self, params, fails_at, **rest):
        super().__init__(params, **rest)
        self.fails_at, self.taken = fails_at, 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken == self.fails_at:
            out_of_memory()
        return super().step(closure)


def rows_by_rank(epoch, batch_size):
    """A growth function that differs between ranks."""
    return int(os.environ["RANK"])


def batch_by_rank(progress):
    """A schedule that differs between ranks from step 3 on."""
    return 2 + (int(os.environ["RANK"]) if progress.steps >= 3 else 0)


class SpoiledLoss(torch.nn.CrossEntropyLoss):
    """A loss that is NaN, or has NaN gradients, in the micro-batches `at`, counted from 1."""

    def __init__(self, at, gradients_alone=False):
        super().__init__(ignore_index=-100)
        self.at, self.gradients_alone, self.calls = at, gradients_alone, 0

    def forward(self, logits, labels):
        self.calls += 1
        loss = super().forward(logits, labels)
        if self.calls not in self.at:
            return loss
        return loss + torch.sqrt(0 * logits.sum()) if self.gradients_alone else loss * float("nan")


class LossThatEnds(torch.nn.CrossEntropyLoss):
    """A loss that ends the process in the micro-batch `at`, counted from 1, on one rank or on all.
    It calls ``sys.exit`` with a status; if the status is None, it raises KeyboardInterrupt.
    """

    def __init__(self, status, at=1, rank=None):
        super().__init__(ignore_index=-100)
        self.status, self.at, self.calls = status, at, 0
        self.is_there = rank is None or int(os.environ["RANK"]) == rank

    def forward(self, logits, labels):
        self.calls += 1
        if self.calls < self.at or not self.is_there:
            return super().forward(logits, labels)
        raise KeyboardInterrupt if self.status is None else SystemExit(self.status)


def sgd_with_options(parameters, lr, options):
    return torch.optim.SGD(
        parameters, lr=lr, momentum=options["momentum"], dampening=options["dampening"]
    )


# --- rules of the batch and of the learning rate

CALLS = itertools.count()


def another_each_time(progress):
    return 4 + next(CALLS) % 3


def raises_in_second_epoch(progress):
    if progress.epoch == 1:
        raise KeyError("no such stage")
    return 4


def doubles_every_fourth_step(progress):
    """A schedule that depends on the batch of the previous step."""
    if not progress.batch:
        return 4
    return min(16, 2 * progress.batch) if progress.steps % 4 == 0 else progress.batch


def doubles_its_tokens(progress):
    """A schedule in tokens that doubles every third step."""
    if not progress.batch:
        return 128
    return min(512, 2 * progress.batch) if progress.steps % 3 == 0 else progress.batch


def step_lr(optimizer, num_training_steps, last_epoch):
    return StepLR(optimizer, step_size=2, last_epoch=last_epoch)
