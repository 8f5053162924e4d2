"""Small models of torchtune and transformers, rows for them, and the loss of both."""

import torch
from torch import nn
from torch.nn import functional
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing
from transformers import LlamaConfig, LlamaForCausalLM

IGNORED = -100
VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 256,
}


def random_rows(lengths, *, name="tokens", seed=0):
    """Rows whose first third has no labels, as lists and tensors in turn."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for length in lengths:
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3] = IGNORED
        row = {name: tokens, "labels": labels}
        rows.append(row if len(rows) % 2 else {key: value.tolist() for key, value in row.items()})
    return rows


def padded(rows, *, name="tokens"):
    """The batch of rows beside each other."""
    return {
        key: nn.utils.rnn.pad_sequence([torch.as_tensor(row[key]) for row in rows], True, padding)
        for key, padding in ((name, 0), ("labels", IGNORED))
    }


def loss_of(model, batch, *, in_float32=True):
    """The sum of the token losses of a batch, of a model of torchtune or transformers."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs)
    logits = torch.cat(logits, 1) if isinstance(logits, list) else getattr(logits, "logits", logits)
    if in_float32 and logits.dtype.itemsize == 2:
        logits = logits.float()
    labels = batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
    )


def torchtune_model(build, *, checkpointing=False, **changes):
    torch.manual_seed(0)
    model = build(**{**SHAPE, **changes}).double()
    model.set_num_output_chunks(
        2
    )  # which are of the model's dtype, and logits in one are rounded to float32
    if checkpointing:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    return model


def transformers_model():
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **shape)
    ).double()


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()
