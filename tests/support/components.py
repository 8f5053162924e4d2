"""Components that tests name by dotted paths: growth functions, valid and invalid, odd datasets,
and parts of a run that record it or run out of memory.
"""

import ctypes
import itertools
import json
import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from support.cli import MODEL, pictures
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
        if self.row == "unlabelled" and number == self.at:
            return {"tokens": tokens}
        return self.odd(tokens) if number == self.at else {"tokens": tokens, "labels": tokens}

    def odd(self, tokens):
        if self.row == "raises":
            raise ValueError("no text")
        changed = {
            "long": tokens * 5 + tokens[:5],
            "foreign": [*tokens[:-1], MODEL["vocab_size"]],
            "negative": [*tokens[:-1], -3],
            "empty": [],
            "floats": [0.5] * 12,
        }
        tokens = changed.get(self.row, tokens)
        other = {"unlike": [*tokens, 1], "foreign_label": [*tokens[:-1], MODEL["vocab_size"]]}
        return {"tokens": tokens, "labels": other.get(self.row, tokens)}


class Masked:
    """A dataset of which one row has a label, or none."""

    def __init__(self, tokenizer, rows=8, labelled=None, **_):
        self.rows = rows
        self.labelled = labelled

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        label = 2 if row == self.labelled else -100
        return {"tokens": [1, 2, 3 + row], "labels": [-100, label, -100]}


class Augmented:
    """A dataset that draws a random number for each row that is read, as image transforms do."""

    def __init__(self, tokenizer, **_):
        pass

    def __len__(self):
        return 16

    def __getitem__(self, row):
        shift = int(torch.randint(0, 50, (1,)))
        return {"tokens": [row + 1 + shift] * 12, "labels": [-100] * 2 + [row + 1 + shift] * 10}


class OfLengths:
    """Rows of given lengths; the first token of each is its number plus 1, so that it is known
    wherever it turns up.
    """

    def __init__(self, tokenizer, lengths, **_):
        self.lengths = list(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        tokens = [row + 1]
        tokens += [1 + (row * row + 7 * i * i) % 500 for i in range(1, self.lengths[row])]
        return {"tokens": tokens, "labels": [-100, *tokens[1:]]}


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


class OfKind(OfLengths):
    """Rows whose tokens are a list, an array or a tensor of some numbers."""

    def __init__(self, tokenizer, lengths, kind, **_):
        super().__init__(tokenizer, lengths)
        self.kind = kind

    def __getitem__(self, number):
        row = super().__getitem__(number)
        kinds = {
            "array": np.array,
            "tensor": torch.tensor,
            "tuple": tuple,
            "list of numpy": lambda x: list(np.array(x)),
        }
        return {key: kinds.get(self.kind, list)(value) for key, value in row.items()}


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


def with_pictures(tokenizer, **_):
    return pictures(tokenizer, packed=False, subset="")


# --- watching a run

NOW = {}  # how long rows are at this moment


class Seen(NamedTuple):
    """A batch that went through the model."""

    rows: list
    length: int
    trained: bool


SEEN = []


def watched(*, rows_fit=None, **model):
    """A Qwen2 that writes down what goes through it, and runs out of memory in training beyond so
    many rows.
    """
    built = qwen2(**model)

    def before(module, args, kwargs):
        tokens = kwargs["tokens"]
        if rows_fit and torch.is_grad_enabled() and len(tokens) > rows_fit:
            out_of_memory()
        SEEN.append(Seen((tokens[:, 0] - 1).tolist(), tokens.shape[1], torch.is_grad_enabled()))

    built.register_forward_pre_hook(before, with_kwargs=True)
    return built


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Watching(DiskLogger):
    """A log that forgets what went through the model before."""

    def __init__(self, log_dir, filename):
        super().__init__(log_dir, filename)
        SEEN.clear()


class Confining(DiskLogger):
    """A log that leaves the process, after a step, only so many bytes of address space more than it
    has.

    What is freed goes back to the system at once: what the C library would keep could be enough for
    the steps to come.
    """

    def __init__(self, log_dir, filename, after_step, bytes_left):
        super().__init__(log_dir, filename)
        assert ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD of malloc.h
        self.after_step, self.bytes_left = after_step, bytes_left

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step == self.after_step:
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(
                resource.RLIMIT_AS,
                (held + self.bytes_left, resource.getrlimit(resource.RLIMIT_AS)[1]),
            )


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


def refusing(*, refused, rows_fit, **model):
    """A Qwen2 that runs out of memory wherever one of some rows of :class:`OfLengths` is run with
    too many beside it.
    """
    built = qwen2(**model)

    def before(module, args, kwargs):
        numbers = (kwargs["tokens"][:, 0] - 1).tolist()
        if (
            torch.is_grad_enabled()
            and len(numbers) > rows_fit
            and any(number in refused for number in numbers)
        ):
            out_of_memory()

    built.register_forward_pre_hook(before, with_kwargs=True)
    return built


def rows_by_rank(epoch, batch_size):
    """A function that is not the same on all ranks."""
    return int(os.environ["RANK"])


def batch_by_rank(progress):
    """A schedule that is not the same on all ranks from step 3 on."""
    return 2 + (int(os.environ["RANK"]) if progress.steps >= 3 else 0)


class SpoiledLoss(torch.nn.CrossEntropyLoss):
    """A loss that is NaN in some micro-batches, counted from 1, or whose gradients alone are.

    Args:
        at: the micro-batches.
        gradients_alone: the loss itself stays as it is.
    """

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
    """A loss in which the process is ended: by ``sys.exit`` with a status, or as by Ctrl-C where
    that is None.

    Args:
        status: of the exit.
        at: the micro-batch that ends it, counted from 1.
        rank: whose process it is; None for all.
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
