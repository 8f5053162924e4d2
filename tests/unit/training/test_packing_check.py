"""Before packed rows are trained on, a model is looked at: its masks, its losses, its modules."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.packed_models import (
    IGNORED,
    SHAPE,
    VOCABULARY,
    loss_of,
    padded,
    random_rows,
    torchtune_model,
    transformers_model,
)
from torch import nn
from torch.nn import functional
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from adaptive_batch.training import pack_rows
from adaptive_batch.training.packing_check import why_not_packed

WIDE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "num_key_value_heads": 2,
}


def from_config(config, **settings):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **settings)


class Small(nn.Module):
    """A decoder whose attention, positions and mixing of tokens are as asked for."""

    def __init__(
        self, *, attend=functional.scaled_dot_product_attention, takes_positions=True, mixes=False
    ):
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, VOCABULARY)
        self.dropout, self.attend = nn.Dropout(), attend
        self.takes_positions, self.mixes = takes_positions, mixes

    def forward(self, tokens, input_pos=None):
        if not self.takes_positions or input_pos is None:
            input_pos = torch.arange(tokens.shape[1])
        hidden = self.dropout(self.ids(tokens) + self.places(input_pos))
        if self.mixes:
            hidden = hidden + functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        heads = self.project(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attend = self.attend or functional.scaled_dot_product_attention
        return self.out(hidden + attend(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Masked(nn.Module):
    """A decoder whose tokens see what a function of them says: a mask of `[tokens, tokens]`."""

    def __init__(self, mask):
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.layers = nn.ModuleList(MaskedLayer(32, 96) for _ in range(2))
        self.out, self.mask = nn.Linear(32, VOCABULARY), mask

    def forward(self, tokens, input_pos=None):
        if input_pos is None:
            input_pos = torch.arange(tokens.shape[1])
        hidden = self.ids(tokens) + self.places(input_pos)
        mask = self.mask(tokens[0], input_pos.flatten())
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.out(hidden)


class MaskedLayer(nn.Linear):
    def forward(self, hidden, mask):
        heads = super().forward(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        if mask is not None:
            # Keys that are no tokens, as of an attention sink, come first.
            num_sinks = mask.shape[1] - mask.shape[0]
            key, value = (functional.pad(each, (0, 0, num_sinks, 0)) for each in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return hidden + attended.transpose(1, 2).flatten(2)


def causal(tokens, positions):
    place = torch.arange(len(tokens))
    return place[:, None] >= place


def window(tokens, positions, *, size=20):
    place = torch.arange(len(tokens))
    return causal(tokens, positions) & (place[:, None] - place < size)


def with_sink(tokens, positions):
    """All see a key that is no token."""
    return functional.pad(causal(tokens, positions), (1, 0), value=True)


def prefix(tokens, positions):
    """All see the first ten tokens."""
    return causal(tokens, positions) | (positions < 10)


def blocked(tokens, positions):
    """Some tokens are seen by themselves alone, where they stand behind the eighth place."""
    is_blocked = (tokens < 10) & (positions > 8)
    return causal(tokens, positions) & (~is_blocked | torch.eye(len(tokens), dtype=torch.bool))


def nearer_is_more(tokens, positions):
    distance = (positions[:, None] - positions).double()
    return (-0.1 * distance).masked_fill(~causal(tokens, positions), -torch.inf).float()


def matmul_attention(query, key, value, *, is_causal):
    weights = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    later = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
    return weights.masked_fill(later, -torch.inf).softmax(-1) @ value


def half(model):
    return model.to(torch.bfloat16)


def reason(model, *, name="tokens", longest_row=40, loss=None, changes=lambda row: row, **options):
    """Why the check refuses a model, given rows of the dataset."""

    def collate(rows, length):
        assert {len(row[name]) for row in rows} == {length}
        return padded([changes(row) for row in rows], name=name)

    return why_not_packed(
        model,
        loss or (lambda batch: loss_of(model, batch, **options)),
        random_rows([longest_row, 12], name=name),
        collate=collate,
        pack=partial(pack_rows, ignore_index=IGNORED),
    )


ACCEPTED = {
    "llama3_2": lambda: torchtune_model(llama3_2),
    "llama3_2 in float32, logits in one": lambda: llama3_2(**SHAPE),
    "qwen2 in bfloat16": lambda: half(torchtune_model(qwen2, checkpointing=True)),
    "transformers": transformers_model,
    "transformers in bfloat16": lambda: half(transformers_model()),
    "learned positions, transformers": lambda: from_config(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4),
        attn_implementation="sdpa",
    ),
    "learned positions": lambda: Small(attend=None),
    "a window longer than rows, transformers": lambda: from_config(
        MistralConfig(**WIDE, sliding_window=40)
    ),
    "a causal mask of its own": lambda: Masked(causal),
    "a window longer than rows": lambda: Masked(partial(window, size=40)),
    "no window in use, transformers": lambda: from_config(Qwen2Config(**WIDE, sliding_window=8)),
}
SEES = "attention lets token {} of a row see {} tokens and not all {} up to"
UNSEEN = "does not call torch.nn.functional.scaled_dot_product_attention"
POSITIONS, MIXES = "use input_pos", "mix tokens by torch's scaled_dot_product_attention alone"
REFUSED = {
    "gemma2": (lambda: gemma2(**SHAPE, head_dim=8, query_pre_attn_scalar=8), UNSEEN),
    "matmul": (lambda: Small(attend=matmul_attention), UNSEEN),
    "matmul in bfloat16": (lambda: half(Small(attend=matmul_attention)), UNSEEN),
    "a function taken before": (lambda: Small(), UNSEEN),
    "eager, transformers": (
        lambda: from_config(LlamaConfig(**WIDE), attn_implementation="eager"),
        "attn_implementation='sdpa'",
    ),
    "its own positions": (lambda: Small(attend=None, takes_positions=False), POSITIONS),
    "the same, bfloat16": (lambda: half(Small(attend=None, takes_positions=False)), POSITIONS),
    "a convolution": (lambda: Small(attend=None, mixes=True), MIXES),
    "a convolution in bfloat16": (lambda: half(Small(attend=None, mixes=True)), MIXES),
    "no positions": (lambda: nn.Sequential(Small(attend=None)), "unexpected keyword argument"),
    "a window": (lambda: Masked(window), SEES.format(20, 20, 21)),
    "a prefix": (lambda: Masked(prefix), SEES.format(0, 10, 1)),
    "a sink": (lambda: Masked(with_sink), "attention looks at 41 keys with 40 queries"),
    "a token that none may see": (lambda: Masked(blocked), "attention lets token "),
    "a bias by distance": (lambda: Masked(nearer_is_more), "adds a bias to the scores"),
    "not causal": (lambda: Masked(lambda *_: None), "lets tokens see later ones"),
    "a window, transformers": (
        lambda: from_config(MistralConfig(**WIDE, sliding_window=39)),
        "a layer attends to 39 tokens, but in packed rows to all 40 of the longest row",
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_model_that_keeps_rows_apart_is_packed(case):
    assert reason(ACCEPTED[case](), name="input_ids" if "transformers" in case else "tokens") == ""


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_is_refused(case):
    build, message = REFUSED[case]
    assert message in reason(build(), name="input_ids" if "transformers" in case else "tokens")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (lambda row: {key: value[:20] for key, value in row.items()}, "tokens"),
        (lambda row: {**row, "labels": [IGNORED] * 14 + [*row["labels"]][14:]}, "labels"),
    ],
)
def test_a_collate_function_that_changes_the_longest_row_is_named(changes, key):
    refusal = reason(ACCEPTED["learned positions"](), changes=changes)
    assert refusal.startswith(f"collate changes the {key} of the longest row, but packed rows")


def test_a_loss_that_does_not_shift_labels_is_not_blamed_on_the_model():
    model = ACCEPTED["learned positions"]()

    def unshifted(batch):
        logits = model(**{key: value for key, value in batch.items() if key != "labels"})
        return functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    refusal = reason(model, loss=unshifted)
    assert "packed, in either order, and" in refusal
    assert "labels must not be shifted before the loss shifts them" in refusal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_that_is_rounded_to_half_precision_is_no_reason(dtype):
    assert reason(torchtune_model(qwen2).to(dtype), in_float32=False) == ""


def test_the_check_leaves_training_modes_random_numbers_and_gradients():
    model = Small(attend=None).train()
    model.dropout.eval()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert reason(model) == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in (model, model.ids, model.dropout)] == [True, True, False]
    assert all(one.grad is None for one in model.parameters())
