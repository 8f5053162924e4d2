"""Memory of compiled functions on fake tensors.

test_allocator_logs_on_cuda_stack.py compares it with Inductor's code.
"""

from __future__ import annotations

import pytest
import torch
from support.model_families import Combination
from torch import nn
from torch._functorch import config as partitioner
from torch.nn import functional

from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import CompiledParts, CudaKernels, FakeDevice, estimate_memory
from adaptive_batch.torchtune import estimate_devices
from adaptive_batch.training import isolated_rows

# Bytes of each tensor below.
SIZE = 4 * 256 * 256


@pytest.fixture
def device():
    return FakeDevice(CudaKernels((9, 0)))


def test_a_part_with_a_graph_break_is_estimated_eagerly(device):
    def breaks(x, y, z):
        torch._dynamo.graph_break()
        return (x * y).exp() + z

    parts = CompiledParts(device)
    compiled = parts.compiled(breaks, "Layer")
    with device.counting() as counter:
        tensors = [torch.empty(256, 256) for _ in range(3)]
        before = len(counter.log)
        compiled(*tensors)
    assert [entry for entry in counter.log[before:] if entry > 0] == [SIZE] * 3
    (sentence,) = parts.left_out
    assert sentence.startswith(
        "Layer is compiled, but estimated as the eager program: it is not one graph (Unsupported: "
    )


@pytest.mark.parametrize(("capability", "is_compiled"), [((9, 0), True), ((7, 5), False)])
def test_attention_of_packed_rows_is_compiled_if_one_kernel_supports_them(capability, is_compiled):
    device = FakeDevice(CudaKernels(capability))
    parts = CompiledParts(device)

    def attend(query, key, value):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).exp()

    compiled = parts.compiled(attend, "Attention")
    with device.counting(), isolated_rows([100, 156]):
        heads = [torch.empty(1, 4, 256, 64, dtype=torch.float16) for _ in range(3)]
        assert compiled(*heads).shape == (1, 4, 256, 64)
    reason = (
        "Attention is compiled, but estimated as the eager program: it is not one graph"
        " (NotImplementedError: the attention of packed rows runs once for each row)"
    )
    assert parts.left_out == ([] if is_compiled else [reason])


ROWS = 4096


def estimate(**keys):
    """Estimate a compiled step of the recipe with additional keys."""
    settings = {"devices": ["80GiB"], "changes": False}
    compiled = Combination("llama3_2", 64, dtype="bf16", device="cuda", compiled=True)
    cfg = compiled.to_estimate(**settings)
    cfg.merge_with(keys)
    return estimate_devices(cfg, show=lambda text: None)


def test_a_compiled_step_follows_its_activation_budget():
    eager = estimate(compile=False).lengths[0].curve.peak_bytes(ROWS)
    peaks = []
    # A later estimate has its own budget.
    for keys in ({"activation_memory_budget": 0.2, "micro_batch_layout": "grouped"}, {}):
        estimated = estimate(**keys)
        assert partitioner.activation_memory_budget == 1.0
        assert torch.compiler.config.assume_static_by_default
        assert not any("the eager program" in sentence for sentence in estimated.left_out)
        peaks.append(estimated.lengths[0].curve.peak_bytes(ROWS))
    assert peaks[0] < peaks[1] < eager


@pytest.mark.slow
@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_a_compiled_step_of_a_sharded_model_is_estimated():
    block = {"estimate": {"world_size": 2}}
    eager = estimate(compile=False, **block)
    compiled = estimate(**block)
    assert not any("the eager program" in sentence for sentence in compiled.left_out)
    peaks = [found.lengths[0].curve.peak_bytes(ROWS) for found in (compiled, eager)]
    assert peaks[0] < peaks[1]


def test_cuda_graphs_are_refused(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "cudagraphs")
    with pytest.raises(SettingError, match=r"compile=True: .* CUDA graphs"):
        estimate()


class Gated(nn.Module):
    """A layer that saves less for backward when it is compiled."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 256)
        self.value = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, hidden):
        return hidden + self.down(functional.silu(self.gate(hidden)) * self.value(hidden))


def scripts_model(**how):
    """Return a model of two layers, compiled as `how` describes."""
    layers = [Gated(), Gated()]
    if "wraps" in how:
        layers = [torch.compile(layer, **how["wraps"]) for layer in layers]
    if "compiles" in how:
        for layer in layers:
            layer.compile(**how["compiles"])
    model = nn.Sequential(nn.Embedding(50, 64), *layers, nn.Linear(64, 50))
    return torch.compile(model) if "whole" in how else model


MOST_ROWS = 256


def estimate_of(model, *, maximum=MOST_ROWS):
    tokens = torch.zeros(2, 32, dtype=torch.int64)

    def mean_loss(batch):
        logits = model(batch["tokens"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())

    return estimate_memory(
        model,
        {"tokens": tokens},
        torch.optim.AdamW(model.parameters()),
        "1GiB",
        mean_loss=mean_loss,
        maximum=maximum,
    )


def peak_of(estimate):
    return estimate.lengths[0].curve.peak_bytes(MOST_ROWS)


@pytest.fixture(scope="module")
def eager_peak():
    return peak_of(estimate_of(scripts_model()))


def about_compile(estimate):
    return [sentence for sentence in estimate.left_out if "the eager program" in sentence]


def what_runs(model):
    return [(vars(module).get("forward"), module._compiled_call_impl) for module in model.modules()]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"compiles": {}}, id="by layer"),
        pytest.param({"wraps": {}}, id="wrapped"),
        pytest.param({"whole": True}, id="whole", marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_model_of_a_script_is_estimated_and_not_changed(eager_peak, how):
    model = scripts_model(**how)
    before = what_runs(model)
    compiled = estimate_of(model)
    assert not about_compile(compiled)
    assert peak_of(compiled) < 0.95 * eager_peak
    assert what_runs(model) == before


def test_a_compiled_forward_method_is_estimated_eagerly():
    model = scripts_model()
    model[1].forward = torch.compile(model[1].forward)
    (sentence,) = about_compile(estimate_of(model))
    assert sentence.endswith("its forward is compiled, not the module; give module.compile()")


def test_another_backend_of_a_script_is_estimated_eagerly(eager_peak):
    estimate = estimate_of(scripts_model(compiles={"backend": "aot_eager"}))
    assert about_compile(estimate) == [
        "Gated is compiled, but estimated as the eager program: its backend is not inductor"
    ]
    assert peak_of(estimate) == eager_peak


@pytest.mark.parametrize("way", ["compiles", "wraps"])
def test_cuda_graphs_of_a_script_are_refused(way):
    model = scripts_model(**{way: {"mode": "reduce-overhead"}})
    before = what_runs(model)
    with pytest.raises(SettingError, match="'Gated compiled with CUDA graphs'"):
        estimate_of(model)
    assert what_runs(model) == before
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
