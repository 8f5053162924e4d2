"""A small model of transformers, its batches, and its loss or that of a model of torchtune."""

import torch
from support.runners import IGNORED
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97


def loss_of(model, batch):
    """The sum of the token losses of a batch, of a model of torchtune or transformers."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs)
    logits = torch.cat(logits, 1) if isinstance(logits, list) else getattr(logits, "logits", logits)
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    labels = batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
    )


def transformers_model(*, checkpointing=False):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads)).double()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model
