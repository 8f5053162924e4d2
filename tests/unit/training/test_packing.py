"""Packed rows have the loss and gradients of padded rows, and do not attend to other rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.packed_models import IGNORED, VOCABULARY, loss_of, transformers_model
from support.sharded_model import collate, padded
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from adaptive_batch.training import isolated_rows, pack_rows, why_not_packed

SEES = "lets a token of a row see other tokens than all up to itself"
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
    """Return rows, alternately of lists and tensors, with labels after their first third."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for length in lengths:
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3] = IGNORED
        row = {name: tokens, "labels": labels}
        rows.append(row if len(rows) % 2 else {key: value.tolist() for key, value in row.items()})
    return rows


def torchtune_model(build, *, checkpointing=False):
    torch.manual_seed(0)
    model = build(**SHAPE).double()
    # Chunked logits keep the model's dtype; unchunked logits are rounded to float32.
    model.set_num_output_chunks(2)
    if checkpointing:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    return model


MODELS = {
    "llama3_2": lambda: torchtune_model(llama3_2),
    "llama3_2, checkpointing": lambda: torchtune_model(llama3_2, checkpointing=True),
    "qwen2": lambda: torchtune_model(qwen2),
    "qwen2, checkpointing": lambda: torchtune_model(qwen2, checkpointing=True),
    "transformers": transformers_model,
    "transformers, checkpointing": lambda: transformers_model(checkpointing=True),
}


def loss_and_gradients(model, batch, lengths=None):
    model.zero_grad()
    if lengths is None:
        loss = loss_of(model, batch)
        loss.backward()
    else:
        with isolated_rows(lengths):
            loss = loss_of(model, batch)
            loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


def attended(lengths, *, heads=3, key_heads=3, seed=0, dtype=torch.float64):
    """Return query, key and value of packed rows, as views of [1, tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, sum(lengths), number, 8, generator=generator, dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for number in (heads, key_heads, key_heads)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_have_the_loss_and_gradients_of_padded_rows(name):
    model, lengths = MODELS[name](), [9, 30, 1, 17, 2]
    ids = "input_ids" if name.startswith("transformers") else "tokens"
    rows = random_rows(lengths, name=ids)
    loss, gradients = loss_and_gradients(model, padded(rows, **{ids: 0}, labels=IGNORED))
    packed, of_packed = loss_and_gradients(model, pack_rows(rows, ignore_index=IGNORED), lengths)
    torch.testing.assert_close(packed, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_packed, gradients, rtol=1e-12, atol=1e-12)


def block_causal(lengths):
    return torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool().tril()


def window(tokens, length):
    """Return the mask of sliding window attention over `tokens` tokens."""
    place = torch.arange(length)
    return (place[:, None] >= place) & (place[:, None] - place < tokens)


# Masks that a model with causal rows may pass to attention.
CAUSAL_MASKS = {
    "none": lambda lengths: None,
    "pack_rows's own": lambda lengths: torch.ones(1, 1, 1, 1, dtype=torch.bool),
    "causal": lambda lengths: window(sum(lengths), sum(lengths)),
    "block causal": block_causal,
    "a window longer than rows": lambda lengths: window(max(lengths), sum(lengths)),
    "of added scores": lambda lengths: torch.zeros(1, 1, sum(lengths), sum(lengths)).masked_fill(
        ~block_causal(lengths), torch.finfo(torch.float32).min
    ),
}


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([None, 0.3]),
    st.sampled_from(list(CAUSAL_MASKS)),
)
@examples(60)
def test_packed_attention_is_causal_in_each_row_for_all_masks(lengths, grouped, scale, kind):
    query, key, value = attended(lengths, heads=4, key_heads=2 if grouped else 4)
    mask = CAUSAL_MASKS[kind](lengths)
    with isolated_rows(lengths) as packed:
        out = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    assert packed.calls == 1
    same_row = block_causal(lengths)
    expected = functional.scaled_dot_product_attention(
        query, key, value, same_row, scale=scale, enable_gqa=grouped
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.data())
@examples(30)
def test_nan_in_one_row_does_not_reach_other_rows(lengths, data):
    bad = data.draw(st.integers(0, len(lengths) - 1))
    gradients, outs = [], []
    for planted in (0.0, torch.nan):
        tensors = attended(lengths)
        first = sum(lengths[:bad])
        plant = torch.zeros(1, 1, sum(lengths), 1, dtype=torch.float64)
        plant[:, :, first : first + lengths[bad]] = planted
        with isolated_rows(lengths):
            out = functional.scaled_dot_product_attention(
                *(one + plant for one in tensors), is_causal=True
            )
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


@pytest.mark.parametrize(
    ("of_query", "of_keys"),
    [
        *((shape, shape) for shape in ((2, 3, 5, 8), (1, 3, 6, 8), (3, 5, 8))),
        ((1, 3, 5, 8), (1, 3, 6, 8)),
    ],
)
def test_attention_of_another_shape_is_refused_and_torchs_is_restored(of_query, of_keys):
    before = functional.scaled_dot_product_attention
    keys = torch.randn(of_keys)
    with pytest.raises(ValueError, match=r"packed rows of 5 tokens"), isolated_rows([2, 3]):
        functional.scaled_dot_product_attention(torch.randn(of_query), keys, keys)
    assert functional.scaled_dot_product_attention is before


HIDES_TOKEN_2 = window(12, 12) & ((torch.arange(12) != 2) | torch.eye(12).bool())


@pytest.mark.parametrize(
    ("mask", "difference"),
    [
        (None, "lets tokens see later ones"),
        (window(4, 12), SEES),
        (block_causal([5, 7]).float(), "adds a bias to the scores"),
        (torch.ones(12, 12).bool(), SEES),
        (HIDES_TOKEN_2, SEES),
        (torch.ones(12, 13).bool(), r"has a mask of \[12, 13\] for 12 tokens"),
    ],
    ids=["none", "a window", "a bias", "all", "a hidden token", "another shape"],
)
def test_a_mask_that_is_not_causal_in_each_row_is_refused(mask, difference):
    with isolated_rows([5, 7]), pytest.raises(ValueError, match=f"^attention {difference}"):
        functional.scaled_dot_product_attention(*attended([5, 7]), mask)


@pytest.mark.parametrize(
    ("given", "named"), [((), {"dropout_p": 0.5, "is_causal": True}), ((None, 0.5, True), {})]
)
def test_dropout_drops_within_rows(given, named):
    lengths = [4, 7]
    query, key, _ = attended(lengths)
    value = torch.eye(11, dtype=torch.float64).expand(1, 3, 11, 11)
    with isolated_rows(lengths):
        weights = functional.scaled_dot_product_attention(query, key, value, *given, **named)
    assert torch.equal(
        weights, weights * torch.block_diag(torch.ones(4, 4), torch.ones(7, 7)).tril()
    )
    assert (weights == 0).sum() > (weights.shape[1] * (121 - 10 - 28)) + 10


PACKS = [[9, 30, 1, 17, 2], [40, 20], [5, 5, 5, 5, 5, 5, 5, 5], [12], [33, 1, 1], [64, 64]]
# A backend with Dynamo and AOTAutograd, without the compile time of Inductor.
QUICK = "aot_eager"


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compile_layers(model, backend=QUICK):
    """Compile each layer of a torchtune model, as torchtune does, or another model as a whole."""
    layers = [
        module for module in model.modules() if isinstance(module, TransformerSelfAttentionLayer)
    ]
    for module in layers or [model]:
        module.compile(backend=backend)


def compare_packs(build, *, name="tokens", backend=QUICK, tolerance):
    """Compare packs in compiled and eager code; return the number of graphs after each pack."""
    model, compiled = build(), build()
    compiled.load_state_dict(model.state_dict())
    compile_layers(compiled, backend=backend)
    graphs = []
    for seed, lengths in enumerate(PACKS):
        batch = pack_rows(random_rows(lengths, name=name, seed=seed), ignore_index=IGNORED)
        found, expected = (
            loss_and_gradients(one, dict(batch), lengths) for one in (compiled, model)
        )
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.parametrize(
    "name",
    [
        "llama3_2, checkpointing",
        pytest.param("transformers", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama3_2", "qwen2")),
    ],
)
def test_a_compiled_model_has_the_loss_and_gradients_of_the_eager_model(name):
    ids = "input_ids" if name.startswith("transformers") else "tokens"
    graphs = compare_packs(MODELS[name], name=ids, tolerance=1e-10)
    # From the second pack on, the numbers of tokens and rows are dynamic.
    assert graphs[0] >= 1
    assert graphs[1] == graphs[-1]


def test_compiled_code_of_padded_rows_is_not_used_for_packed_rows_or_the_reverse():
    model = torchtune_model(llama3_2)
    lengths = [20, 20]
    rows = random_rows(lengths)
    batch = collate(rows)
    expected = loss_of(model, dict(batch)).detach()
    compile_layers(model)
    for _ in range(2):
        torch.testing.assert_close(loss_of(model, dict(batch)).detach(), expected)
        packed = pack_rows(rows, ignore_index=IGNORED)
        torch.testing.assert_close(loss_and_gradients(model, packed, lengths)[0], expected)


class Attention(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, query, key, value):
        return 2 * functional.scaled_dot_product_attention(2 * query, key, value, **self.how)


CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()
# Options of attention and of heads, the size of values, and whether the graph breaks.
CASES = {
    "a mask of all tokens": ({"attn_mask": CAUSAL}, {}, 8, True),
    "shorter value heads": ({"is_causal": True}, {}, 4, True),
    "grouped-query attention": (
        {"is_causal": True, "enable_gqa": True},
        {"key_heads": 1},
        8,
        False,
    ),
}


@pytest.mark.parametrize(("how", "options", "value_size", "is_parted"), CASES.values(), ids=CASES)
def test_attention_without_the_operator_breaks_the_graph(how, options, value_size, is_parted):
    module = Attention(**how)
    query, key, value = attended([12], heads=2, **{"key_heads": 2, **options})
    tensors = query, key, value[..., :value_size]
    with isolated_rows([5, 7]):
        expected = module(*tensors)
        module.compile(backend=QUICK)
        torch.testing.assert_close(module(*tensors), expected)
    assert bool(counters["graph_break"]) == is_parted


def test_a_mask_that_is_not_causal_is_refused_in_compiled_code():
    module = Attention(attn_mask=torch.ones(12, 12, dtype=torch.bool))
    module.compile(backend=QUICK)
    with (
        isolated_rows([5, 7]),
        pytest.raises(ValueError, match=SEES),
    ):
        module(*attended([12]))


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
    """A decoder with a choice of attention, positions and mixing of tokens."""

    def __init__(self, *, attend=None, takes_positions=True, mixes=False):
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


def half(model):
    return model.to(torch.bfloat16)


def reason(model, *, name="tokens", longest_row=40, loss=None, changes=lambda row: row, **options):
    """Return the reason why the check refuses a model for rows of a dataset."""

    def collate(rows, length):
        assert {len(row[name]) for row in rows} == {length}
        return padded([changes(row) for row in rows], **{name: 0}, labels=IGNORED)

    return why_not_packed(
        model,
        loss or (lambda batch: loss_of(model, batch, **options)),
        random_rows([longest_row, 12], name=name),
        collate=collate,
        pack=partial(pack_rows, ignore_index=IGNORED),
    )


ACCEPTED = {
    "llama3_2": lambda: torchtune_model(llama3_2),
    "qwen2": lambda: half(torchtune_model(qwen2, checkpointing=True)),
    "transformers": transformers_model,
    "learned positions": lambda: Small(),
    "a window longer than rows, transformers": lambda: from_config(
        MistralConfig(**WIDE, sliding_window=40)
    ),
}
UNSEEN = "does not call torch.nn.functional.scaled_dot_product_attention"
POSITIONS, MIXES = "use input_pos", "mix tokens by torch's scaled_dot_product_attention alone"
REFUSED = {
    "gemma2": (lambda: gemma2(**SHAPE, head_dim=8, query_pre_attn_scalar=8), UNSEEN),
    "a function taken before": (
        lambda: Small(attend=functional.scaled_dot_product_attention),
        UNSEEN,
    ),
    "eager, transformers": (
        lambda: from_config(LlamaConfig(**WIDE), attn_implementation="eager"),
        "attn_implementation='sdpa'",
    ),
    "its own positions": (lambda: Small(takes_positions=False), POSITIONS),
    "a convolution": (lambda: Small(mixes=True), MIXES),
    "a convolution in bfloat16": (lambda: half(Small(mixes=True)), MIXES),
    "no positions": (lambda: nn.Sequential(Small()), "unexpected keyword argument"),
    "a window, transformers": (
        lambda: from_config(MistralConfig(**WIDE, sliding_window=39)),
        SEES,
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_model_that_isolates_rows_is_packed(case):
    assert reason(ACCEPTED[case](), name="input_ids" if "transformers" in case else "tokens") == ""


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_mixes_rows_is_refused(case):
    build, message = REFUSED[case]
    assert message in reason(build(), name="input_ids" if "transformers" in case else "tokens")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (lambda row: {key: value[:20] for key, value in row.items()}, "tokens"),
        (lambda row: {**row, "labels": [IGNORED] * 14 + [*row["labels"]][14:]}, "labels"),
    ],
)
def test_a_collate_function_that_changes_the_longest_row_is_refused(changes, key):
    refusal = reason(ACCEPTED["learned positions"](), changes=changes)
    assert refusal.startswith(f"collate changes the {key} of the longest row, but packed rows")


def test_the_refusal_of_an_unshifted_loss_mentions_shifted_labels():
    model = ACCEPTED["learned positions"]()

    def unshifted(batch):
        logits = model(**{key: value for key, value in batch.items() if key != "labels"})
        return functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    refusal = reason(model, loss=unshifted)
    assert "packed, in either order, and" in refusal
    assert "labels must not be shifted before the loss shifts them" in refusal


def test_the_check_restores_training_modes_random_numbers_and_gradients():
    model = Small().train()
    model.dropout.eval()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert reason(model) == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in (model, model.ids, model.dropout)] == [True, True, False]
    assert all(one.grad is None for one in model.parameters())
