"""The demo of `make demo`: its data, its base model, and a growth function. See ``__main__.py``."""

from .data import (
    NUM_TRAIN_ROWS,
    SEED,
    docstring_rows,
    first_sentence,
    instruction_rows,
    read_rows,
    write_pairs,
)
from .model import (
    INITIALIZER_RANGE,
    MODEL,
    answer_log_probs,
    build_model,
    held_out_loss,
    load,
    make_once,
    prepare,
    sample,
    write_pairs_once,
    write_tokenizer,
)

__all__ = [
    "DIRECTORY",
    "INITIALIZER_RANGE",
    "MODEL",
    "NUM_TRAIN_ROWS",
    "SEED",
    "answer_log_probs",
    "build_model",
    "docstring_rows",
    "first_sentence",
    "grow",
    "held_out_loss",
    "instruction_rows",
    "load",
    "make_once",
    "prepare",
    "read_rows",
    "sample",
    "write_pairs",
    "write_pairs_once",
    "write_tokenizer",
]

DIRECTORY = "./adaptive_batch_demo"


def grow(epoch: int, batch_size: int) -> int:
    """Return the rows to add: none in epoch 0, 4 in epoch 1, half of the batch in each later epoch.

    Args:
        epoch: the epoch that is about to start, counted from 0.
        batch_size: the rows of a step so far.
    """
    if epoch == 0:
        return 0
    return 4 if epoch == 1 else batch_size // 2
