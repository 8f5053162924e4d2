"""Components that tests name by dotted paths: growth functions, valid and invalid, odd datasets,
and parts of a run that record it or run out of memory.
"""

import itertools
import json
import os
import sys
from typing import NamedTuple

import numpy as np
import torch
from support.cli import MODEL
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torchtune.data import padded_collate_sft
from torchtune.models.qwen2 import qwen2
from torchtune.training.metric_logging import DiskLogger

ASKED = []


def four_more(epoch, batch_size):
    ASKED.append((epoch, batch_size))
    return 4 if epoch else 0


def exits_in_second_epoch(epoch, batch_size):
    return sys.exit(0) if epoch == 1 else 0


def negative_in_second_epoch(epoch, batch_size):
    return -epoch


def exits(*_, **__):
    """Any component, or a growth function, that ends the program as if all were done."""
    sys.exit(0)


def takes_one(epoch):
    return 0


NOT_CALLABLE = 3


def empty_dataset(tokenizer, **_):
    return []


def unbuildable(tokenizer, **_):
    raise KeyError("column")


class Stream(torch.utils.data.IterableDataset):
    """Rows that come one after the other, without numbers."""

    def __init__(self, tokenizer, **_):
        pass

    def __iter__(self):
        return iter(())


class Endless:
    """Rows by number, of which there is no last."""

    def __init__(self, tokenizer, **_):
        pass

    def __getitem__(self, row):
        return {"tokens": [1, 2, 3], "labels": [1, 2, 3]}


class WithOddRow:
    """Rows of 12 tokens, but for one that training cannot use."""

    def __init__(self, tokenizer, row, at=5, **_):
        self.row, self.at = row, at

    def __len__(self):
        return 24

    def __getitem__(self, number):
        tokens = [1 + (number + i) % 500 for i in range(12)]
        labels = tokens
        if number != self.at:
            return {"tokens": tokens, "labels": labels}
        match self.row:
            case "raises":
                raise ValueError("no text")
            case "unlabelled":
                return {"tokens": tokens}
            case "long":
                tokens = labels = tokens * 5 + tokens[:5]
            case "foreign":
                tokens = labels = [*tokens[:-1], MODEL["vocab_size"]]
            case "negative":
                tokens = labels = [*tokens[:-1], -3]
            case "empty":
                tokens = labels = []
            case "floats":
                tokens = labels = [0.5] * 12
            case "unlike":
                labels = [*tokens, 1]
            case "foreign_label":
                labels = [*tokens[:-1], MODEL["vocab_size"]]
        return {"tokens": tokens, "labels": labels}


class Augmented:
    """A dataset that draws a random number for each row that is read, as image transforms do."""

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
    """Rows of given lengths, some without labels; the first token of each is its number plus 1, so
    that it is known wherever it turns up.
    """

    unlabelled, kind = (), "list"

    def __init__(self, tokenizer, lengths, unlabelled=(), kind="list", **_):
        self.lengths, self.unlabelled, self.kind = list(lengths), unlabelled, kind

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        tokens = [row + 1]
        tokens += [1 + (row * row + 7 * i * i) % 500 for i in range(1, self.lengths[row])]
        labels = [-100] * len(tokens) if row in self.unlabelled else [-100, *tokens[1:]]
        make = KINDS[self.kind]
        return {"tokens": make(tokens), "labels": make(labels)}


def leaving_out(rows, padding_idx=0, ignore_idx=-100):
    """A collate function that leaves out a row of each batch."""
    return padded_collate_sft(rows[:-1], padding_idx=padding_idx, ignore_idx=ignore_idx)


class Unlabelled(OfLengths):
    """Rows without labels."""

    def __getitem__(self, number):
        return {"tokens": super().__getitem__(number)["tokens"]}


def labelling(rows, padding_idx=0, ignore_idx=-100):
    """A collate function that makes the labels of rows that have none."""
    rows = [{**row, "labels": [ignore_idx, *row["tokens"][1:]]} for row in rows]
    return padded_collate_sft(rows, padding_idx=padding_idx, ignore_idx=ignore_idx)


class OfLengthsNow(OfLengths):
    """Rows of the lengths that :data:`NOW` or the environment has, as of a file that nobody knows
    of.
    """

    def __init__(self, tokenizer, **_):
        self.num_rows = len(self.lengths)

    def __len__(self):
        return self.num_rows

    @property
    def lengths(self):
        return NOW.get("lengths") or json.loads(os.environ["LENGTHS"])


class WithIds(OfLengths):
    """Rows with a text and a number beside the tokens."""

    def __getitem__(self, row):
        return {**super().__getitem__(row), "id": f"row {row}", "source": 3}


# --- watching a run

NOW = {}  # how long rows are at this moment


class Seen(NamedTuple):
    """A batch that went through the model."""

    rows: list
    length: int
    trained: bool


SEEN = []


def watched(*, rows_fit=None, refused=None, **model):
    """A Qwen2 that writes down what goes through it, and runs out of memory in training beyond
    `rows_fit` rows: in any micro-batch, or in those with one of the rows `refused` of
    :class:`OfLengths`.
    """
    built = qwen2(**model)

    def before(module, args, kwargs):
        tokens = kwargs["tokens"]
        numbers = (tokens[:, 0] - 1).tolist()
        is_large = rows_fit and torch.is_grad_enabled() and len(numbers) > rows_fit
        if is_large and (refused is None or not set(numbers).isdisjoint(refused)):
            out_of_memory()
        SEEN.append(Seen(numbers, tokens.shape[1], torch.is_grad_enabled()))

    built.register_forward_pre_hook(before, with_kwargs=True)
    return built


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Watching(DiskLogger):
    """A log that forgets what went through the model before."""

    def __init__(self, log_dir, filename):
        super().__init__(log_dir, filename)
        SEEN.clear()


class FailingAdamW(torch.optim.AdamW):
    """An optimizer whose step runs out of memory when it is taken for the given time."""

    def __init__(self, params, fails_at, **rest):
        super().__init__(params, **rest)
        self.fails_at, self.taken = fails_at, 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken == self.fails_at:
            out_of_memory()
        return super().step(closure)


def rows_by_rank(epoch, batch_size):
    """A function that is not the same on all ranks."""
    return int(os.environ["RANK"])


def batch_by_rank(progress):
    """A schedule that is not the same on all ranks from step 3 on."""
    return 2 + (int(os.environ["RANK"]) if progress.steps >= 3 else 0)


class SpoiledLoss(torch.nn.CrossEntropyLoss):
    """A loss that is NaN in the micro-batches `at`, counted from 1, or has NaN gradients there."""

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
    """A loss that ends the process in the micro-batch `at`, counted from 1, on one rank or on all:
    by ``sys.exit`` with a status, or as by Ctrl-C where that is None.
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


def takes_two(progress, batch_size):
    return 4


def raises_in_second_epoch(progress):
    if progress.epoch == 1:
        raise KeyError("no such stage")
    return 4


def doubles_every_fourth_step(progress):
    """Follows the batch of the step before."""
    if not progress.batch:
        return 4
    return min(16, 2 * progress.batch) if progress.steps % 4 == 0 else progress.batch


def doubles_its_tokens(progress):
    """The same of tokens, with every third step."""
    if not progress.batch:
        return 128
    return min(512, 2 * progress.batch) if progress.steps % 3 == 0 else progress.batch


def step_lr(optimizer, num_training_steps, last_epoch):
    return StepLR(optimizer, step_size=2, last_epoch=last_epoch)


def plateau(optimizer, num_training_steps, last_epoch):
    return ReduceLROnPlateau(optimizer)
