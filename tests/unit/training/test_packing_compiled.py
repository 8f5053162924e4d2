"""Packed rows in compiled code: what is trained is the same, and packs of other lengths do not
compile it again.
"""

from __future__ import annotations

import pytest
import torch
from support.packed_models import (
    IGNORED,
    loss_of,
    padded,
    random_rows,
    torchtune_model,
    transformers_model,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerSelfAttentionLayer

from adaptive_batch.training import isolated_rows, pack_rows

PACKS = [[9, 30, 1, 17, 2], [40, 20], [5, 5, 5, 5, 5, 5, 5, 5], [12], [33, 1, 1], [64, 64]]
# Dynamo's part and AOTAutograd's, without the time that Inductor takes for its kernels.
QUICK = "aot_eager"

MODELS = {
    "llama3_2": lambda: torchtune_model(llama3_2),
    "llama3_2, checkpointing": lambda: torchtune_model(llama3_2, checkpointing=True),
    "qwen2": lambda: torchtune_model(qwen2),
    "transformers": transformers_model,
}


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compile_layers(model, backend=QUICK):
    """Compile each layer, as torchtune does; of a model of others, the whole."""
    layers = [
        module for module in model.modules() if isinstance(module, TransformerSelfAttentionLayer)
    ]
    for module in layers or [model]:
        module.compile(backend=backend)


def trained(model, batch, lengths):
    model.zero_grad()
    with isolated_rows(lengths):
        loss = loss_of(model, batch)
        loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters()}


def num_compiled():
    return counters["stats"]["unique_graphs"]


def compare_packs(build, *, name="tokens", backend=QUICK, tolerance):
    """Compare packs in compiled code with those in eager code; return the graphs after each."""
    model, compiled = build(), build()
    compiled.load_state_dict(model.state_dict())
    compile_layers(compiled, backend=backend)
    graphs = []
    for seed, lengths in enumerate(PACKS):
        batch = pack_rows(random_rows(lengths, name=name, seed=seed), ignore_index=IGNORED)
        found, expected = (trained(one, dict(batch), lengths) for one in (compiled, model))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        graphs.append(num_compiled())
    return graphs


@pytest.mark.parametrize(
    "name",
    [
        "llama3_2, checkpointing",
        pytest.param("transformers", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama3_2", "qwen2")),
    ],
)
def test_loss_and_gradients_are_those_of_packed_rows_without_a_compiler(name):
    ids = "input_ids" if name.startswith("transformers") else "tokens"
    graphs = compare_packs(MODELS[name], name=ids, tolerance=1e-10)
    # The second pack makes tokens and rows a variable of the graph.
    assert graphs[0] >= 1
    assert graphs[1] == graphs[-1]


def test_rows_beside_each_other_are_not_taken_for_packed_ones_nor_the_reverse():
    model = torchtune_model(llama3_2)
    lengths = [20, 20]
    rows = random_rows(lengths)
    batch = padded(rows)
    expected = loss_of(model, dict(batch)).detach()
    compile_layers(model)
    for _ in range(2):
        torch.testing.assert_close(loss_of(model, dict(batch)).detach(), expected)
        packed = pack_rows(rows, ignore_index=IGNORED)
        torch.testing.assert_close(trained(model, packed, lengths)[0], expected)


class Attention(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, query, key, value):
        return 2 * functional.scaled_dot_product_attention(2 * query, key, value, **self.how)


def heads(tokens, *, key_heads=2, head_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(1, number, tokens, head_dim, generator=generator, dtype=dtype)
        for number in (2, key_heads, key_heads)
    ]


CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()
# Options of attention, of its heads and the size of its values; whether the graph is parted.
CASES = {
    "a mask of all tokens": ({"attn_mask": CAUSAL}, {}, 8, True),
    "heads of values that are shorter": ({"is_causal": True}, {}, 4, True),
    "keys that heads share": ({"is_causal": True, "enable_gqa": True}, {"key_heads": 1}, 8, False),
}


@pytest.mark.parametrize(("how", "options", "value_size", "is_parted"), CASES.values(), ids=CASES)
def test_attention_that_the_operator_does_not_take_parts_the_graph_and_stays_right(
    how, options, value_size, is_parted
):
    module = Attention(**how)
    query, key, value = heads(12, **options)
    tensors = query, key, value[..., :value_size]
    with isolated_rows([5, 7]):
        expected = module(*tensors)
        module.compile(backend=QUICK)
        torch.testing.assert_close(module(*tensors), expected)
    assert bool(counters["graph_break"]) == is_parted


def test_a_mask_that_is_not_causal_is_refused_as_it_is_without_a_compiler():
    module = Attention(attn_mask=torch.ones(12, 12, dtype=torch.bool))
    module.compile(backend=QUICK)
    with (
        isolated_rows([5, 7]),
        pytest.raises(ValueError, match="lets token 0 of a row see 5 tokens"),
    ):
        module(*heads(12))


def test_autocast_is_left_to_eager_code_and_casts_as_there():
    module = Attention(is_causal=True)
    tensors = heads(12, dtype=torch.float32)
    with isolated_rows([5, 7]), torch.autocast("cpu", torch.bfloat16):
        expected = module(*tensors)
        module.compile(backend=QUICK)
        attended = module(*tensors)
    assert attended.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(attended, expected)


@pytest.mark.slow
def test_inductors_code_trains_alike_and_is_compiled_twice_for_all_packs():
    build = lambda: torchtune_model(llama3_2).float()  # noqa: E731
    graphs = compare_packs(build, backend="inductor", tolerance=1e-4)
    assert graphs == [1, *[2] * (len(PACKS) - 1)]
