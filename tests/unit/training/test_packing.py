"""Rows laid end to end train a model as rows beside each other do, and none sees another."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
)

from adaptive_batch.training import pack_rows, rows_apart, why_not_packed

pytestmark = pytest.mark.usefixtures("one_thread")

IGNORED, VOCABULARY = -100, 97
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


MODELS = {
    "llama3_2": lambda: torchtune_model(llama3_2),
    "llama3_2, checkpointing": lambda: torchtune_model(llama3_2, checkpointing=True),
    "llama3_2, as many heads": lambda: torchtune_model(llama3_2, num_kv_heads=4),
    "qwen2": lambda: torchtune_model(qwen2),
    "qwen2, checkpointing": lambda: torchtune_model(qwen2, checkpointing=True),
    "transformers": transformers_model,
    "transformers, checkpointing": lambda: checkpointed(transformers_model()),
}


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_and_gradients(model, batch, lengths=None):
    model.zero_grad()
    if lengths is None:
        loss = loss_of(model, batch)
        loss.backward()
    else:
        with rows_apart(lengths):
            loss = loss_of(model, batch)
            loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


def attended(lengths, *, heads=3, key_heads=3, seed=0, dtype=torch.float64):
    """Query, key and value of packed rows, as views of [1, tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, sum(lengths), number, 8, generator=generator, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for number in (heads, key_heads, key_heads)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_leave_the_loss_and_gradients_of_padded_ones(name):
    model, lengths = MODELS[name](), [9, 30, 1, 17, 2]
    ids = "input_ids" if name.startswith("transformers") else "tokens"
    rows = random_rows(lengths, name=ids)
    loss, gradients = loss_and_gradients(model, padded(rows, name=ids))
    packed, of_packed = loss_and_gradients(model, pack_rows(rows, ignore_index=IGNORED), lengths)
    torch.testing.assert_close(packed, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_packed, gradients, rtol=1e-12, atol=1e-12)


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([None, 0.3]),
)
@settings(max_examples=40)
def test_attention_is_that_of_each_row_whatever_mask_is_given(lengths, grouped, scale):
    query, key, value = attended(lengths, heads=4, key_heads=2 if grouped else 4)
    inside = [1, sum(lengths), sum(lengths)]
    with rows_apart(lengths) as packed:
        out = functional.scaled_dot_product_attention(
            query, key, value, torch.ones(inside, dtype=torch.bool), scale=scale, enable_gqa=grouped
        )
    assert packed.calls == 1
    same_row = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool().tril()
    expected = functional.scaled_dot_product_attention(
        query, key, value, same_row, scale=scale, enable_gqa=grouped
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.data())
@settings(max_examples=30)
def test_what_is_not_finite_in_one_row_stays_there(lengths, data):
    bad = data.draw(st.integers(0, len(lengths) - 1))
    gradients, outs = [], []
    for planted in (0.0, torch.nan):
        tensors = attended(lengths)
        first = sum(lengths[:bad])
        plant = torch.zeros(1, 1, sum(lengths), 1, dtype=torch.float64)
        plant[:, :, first : first + lengths[bad]] = planted
        with rows_apart(lengths):
            out = functional.scaled_dot_product_attention(*(one + plant for one in tensors))
            others = torch.cat(
                [one for row, one in enumerate(out.split(lengths, 2)) if row != bad], 2
            )
            others.square().sum().backward()
        outs.append(others.detach())
        of_rows = [one.grad.split(lengths, 2) for one in tensors]
        gradients.append([one for rows in of_rows for row, one in enumerate(rows) if row != bad])
    assert torch.equal(*outs)
    assert torch.isfinite(outs[1]).all()
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("name", ["llama3_2", "transformers"])
def test_cost_is_linear_in_the_rows(name):
    model, ids = MODELS[name](), "input_ids" if name == "transformers" else "tokens"

    def multiplied(rows):
        lengths = [20] * rows
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(
                model, pack_rows(random_rows(lengths, name=ids), ignore_index=IGNORED), lengths
            )
        return counter.get_total_flops()

    assert multiplied(8) == 4 * multiplied(2)


def test_a_transformers_model_makes_no_mask_of_tokens_by_tokens():
    lengths = [10] * 20
    model, batch = (
        transformers_model(),
        pack_rows(random_rows(lengths, name="input_ids"), ignore_index=IGNORED),
    )
    masks = []
    with rows_apart(lengths) as packed:
        take = packed._attend
        packed._attend = lambda *args, **how: (
            masks.append(how.get("attn_mask")) or take(*args, **how)
        )
        loss_of(model, batch)
    assert packed.calls == 2
    assert len(masks) == 40
    assert set(masks) == {None}
    assert batch["attention_mask"].untyped_storage().nbytes() == 1


def test_attention_is_pytorchs_again_outside_even_after_an_error():
    before = functional.scaled_dot_product_attention
    with pytest.raises(ValueError, match="packed"), rows_apart([3]):
        functional.scaled_dot_product_attention(*[torch.randn(1, 1, 2, 8)] * 3)
    assert functional.scaled_dot_product_attention is before


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 6, 8), (3, 5, 8)])
def test_attention_of_another_shape_is_refused(shape):
    with (
        rows_apart([2, 3]),
        pytest.raises(ValueError, match=r"cannot keep packed rows of 5 tokens in all apart"),
    ):
        functional.scaled_dot_product_attention(*[torch.randn(shape)] * 3)


@pytest.mark.parametrize(("given", "named"), [((), {"dropout_p": 0.5}), ((None, 0.5, True), {})])
def test_dropout_drops_within_rows(given, named):
    lengths = [4, 7]
    query, key, _ = attended(lengths)
    value = torch.eye(11, dtype=torch.float64).expand(1, 3, 11, 11)
    with rows_apart(lengths):
        weights = functional.scaled_dot_product_attention(query, key, value, *given, **named)
    assert torch.equal(
        weights, weights * torch.block_diag(torch.ones(4, 4), torch.ones(7, 7)).tril()
    )
    assert (weights == 0).sum() > (weights.shape[1] * (121 - 10 - 28)) + 10


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["tokens", "input_ids"])
)
@settings(max_examples=40)
def test_a_packed_batch_has_every_token_and_the_labels_that_the_rows_have(lengths, name):
    rows = random_rows(lengths, name=name)
    batch = pack_rows(rows, ignore_index=IGNORED)
    positions = batch["position_ids" if name == "input_ids" else "input_pos"]
    assert positions.tolist() == [[place for length in lengths for place in range(length)]]
    assert batch[name].tolist() == [
        torch.cat([torch.as_tensor(row[name]) for row in rows]).tolist()
    ]
    expected = [torch.as_tensor(row["labels"])[1:].tolist() for row in rows]
    assert [
        row[1:] for row in (one.tolist() for one in batch["labels"][0].split(lengths))
    ] == expected
    assert (batch["labels"][0][positions[0] == 0] == IGNORED).all()
    assert {batch[key].dtype for key in (name, "labels")} == {torch.int64}


def test_rows_are_as_they_were_after_packing():
    rows = [{"tokens": torch.tensor([1, 2]), "labels": torch.tensor([1, 2])}]
    pack_rows(rows, ignore_index=IGNORED)
    assert rows[0]["labels"].tolist() == [1, 2]


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
        self.dropout, self.attend, self.takes_positions, self.mixes = (
            nn.Dropout(),
            attend,
            takes_positions,
            mixes,
        )

    def forward(self, tokens, input_pos=None):
        if not self.takes_positions or input_pos is None:
            input_pos = torch.arange(tokens.shape[1])
        hidden = self.dropout(self.ids(tokens) + self.places(input_pos))
        if self.mixes:
            hidden = hidden + functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        heads = self.project(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attend = self.attend or functional.scaled_dot_product_attention
        return self.out(hidden + attend(*heads, is_causal=True).transpose(1, 2).flatten(2))


def matmul_attention(query, key, value, *, is_causal):
    weights = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    later = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
    return weights.masked_fill(later, -torch.inf).softmax(-1) @ value


def half(model):
    return model.to(torch.bfloat16)


def reason(model, *, name="tokens", longest_row=40, **options):
    """Why the check refuses a model, given rows of the dataset."""

    def collate(rows, length):
        assert {len(row[name]) for row in rows} == {length}
        return padded(rows, name=name)

    rows = random_rows([longest_row, 12], name=name)
    return why_not_packed(
        model,
        lambda batch: loss_of(model, batch, **options),
        rows,
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
    "no window in use, transformers": lambda: from_config(Qwen2Config(**WIDE, sliding_window=8)),
}
REFUSED = {
    "gemma2": (
        lambda: gemma2(**SHAPE, head_dim=8, query_pre_attn_scalar=8),
        "does not attend by torch's scaled_dot_product",
    ),
    "matmul": (
        lambda: Small(attend=matmul_attention),
        "does not attend by torch's scaled_dot_product",
    ),
    "matmul in bfloat16": (lambda: half(Small(attend=matmul_attention)), "does not attend by"),
    "a function taken before": (lambda: Small(), "does not attend by torch's scaled_dot_product"),
    "eager, transformers": (
        lambda: from_config(LlamaConfig(**WIDE), attn_implementation="eager"),
        "attn_implementation='sdpa'",
    ),
    "its own positions": (lambda: Small(attend=None, takes_positions=False), "use input_pos"),
    "its own positions in bfloat16": (
        lambda: half(Small(attend=None, takes_positions=False)),
        "use input_pos",
    ),
    "a convolution": (
        lambda: Small(attend=None, mixes=True),
        "mix tokens by torch's scaled_dot_product_attention alone",
    ),
    "a convolution in bfloat16": (lambda: half(Small(attend=None, mixes=True)), "mix tokens by"),
    "no positions": (lambda: nn.Sequential(Small(attend=None)), "unexpected keyword argument"),
    "a window, transformers": (
        lambda: from_config(MistralConfig(**WIDE, sliding_window=39)),
        "a layer sees 39 tokens, and packed it would see all 40 of the longest row",
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_model_that_keeps_rows_apart_is_packed(case):
    assert reason(ACCEPTED[case](), name="input_ids" if "transformers" in case else "tokens") == ""


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_does_not_is_refused(case):
    build, message = REFUSED[case]
    assert message in reason(build(), name="input_ids" if "transformers" in case else "tokens")


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
