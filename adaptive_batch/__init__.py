"""adaptive_batch: the batch size of a fine-tuning run, known instead of guessed."""

__version__ = "0.1.0"
