"""Growth functions that a user might write, good and bad, and odd datasets, named by dotted paths in tests."""

import torch

ASKED = []


def four_more(epoch, batch_size):
    ASKED.append((epoch, batch_size))
    return 4 if epoch else 0


def a_thousand_more(epoch, batch_size):
    return 1000


def raises(epoch, batch_size):
    raise KeyError("no such stage")


def returns_none(epoch, batch_size):
    return None


def returns_float(epoch, batch_size):
    return 4.0


def returns_bool(epoch, batch_size):
    return True


def returns_negative(epoch, batch_size):
    return -1


def returns_huge(epoch, batch_size):
    return 10**12


def raises_in_second_epoch(epoch, batch_size):
    if epoch == 1:
        raise KeyError("no such stage")
    return 0


def takes_one(epoch):
    return 0


def no_more(epoch, batch_size):
    return 0


NOT_CALLABLE = 3


def empty_dataset(tokenizer, **_):
    return []


class Masked:
    """A dataset none of whose rows has a label."""

    def __init__(self, tokenizer, **_):
        pass

    def __len__(self):
        return 8

    def __getitem__(self, row):
        return {"tokens": [1, 2, 3 + row], "labels": [-100] * 3}


class Augmented:
    """A dataset that draws a random number for each row that is read, as image transforms do."""

    def __init__(self, tokenizer, **_):
        pass

    def __len__(self):
        return 16

    def __getitem__(self, row):
        shift = int(torch.randint(0, 50, (1,)))
        return {"tokens": [row + 1 + shift] * 12, "labels": [-100] * 2 + [row + 1 + shift] * 10}
