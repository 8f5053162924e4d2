"""Estimates of PyTorch models, which are left unchanged."""

from __future__ import annotations

import pickle
from array import array
from fractions import Fraction
from functools import partial

import pytest
import torch
import torchao
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz

from adaptive_batch import AdaptiveLoop, SettingError, StepOptions, estimate_memory
from adaptive_batch.estimate import (
    AllocatorSettings,
    CachingAllocator,
    LengthEstimate,
    counted_fit,
)
from adaptive_batch.estimate.fake_step import Resident
from adaptive_batch.estimate.model_estimate import replayed_fit
from adaptive_batch.memory import Line, MemoryCurve


class Tied(nn.Module):
    """A model whose embedding is tied to its output layer."""

    def __init__(self, dim=64, words=500):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.layers = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(4)))
        self.output = nn.Linear(dim, words, bias=False)
        self.output.weight = self.words.weight
        self.register_buffer("scale", torch.ones(dim))

    def forward(self, tokens):
        return self.output(torch.relu(self.layers(self.words(tokens) * self.scale)))


def mean_loss(model):
    return lambda batch: nn.functional.cross_entropy(
        model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    )


def sample(rows=2, length=32):
    return {
        "tokens": torch.zeros(rows, length, dtype=torch.int64),
        "labels": torch.zeros(rows, length, dtype=torch.int64),
    }


def estimate_mlp(*devices, **options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    return estimate_memory(
        model,
        torch.zeros(2, 64, 1024),
        torch.optim.SGD(model.parameters()),
        devices,
        mean_loss=lambda batch: model(batch).square().mean(),
        **options,
    )


def test_buffers_that_do_not_grow_linearly_need_no_warning():
    check = estimate_mlp("RTX4090").lengths[0].check
    assert check.rows > 1000
    assert not check.is_off


def test_a_small_device_has_the_same_estimate_beside_a_large_one():
    alone = estimate_mlp("1GiB", maximum=100_000).devices[0]
    assert alone.lengths[0].max_batch_size == 64
    assert estimate_mlp("1GiB", "80GiB", maximum=100_000).devices[0] == alone


def test_a_meta_model_is_estimated_and_stays_on_meta():
    with torch.device("meta"):
        model = Tied(dim=1024, words=50_000)
    optimizer = torch.optim.AdamW(model.parameters())
    estimate = estimate_memory(
        model, sample(), optimizer, ["H100", "8GiB"], mean_loss=mean_loss(model)
    )
    assert estimate.lengths[0].sequence_length == 32
    assert estimate.lengths[0].resident.optimizer == pytest.approx(
        2 * estimate.lengths[0].resident.parameters, rel=1e-4
    )
    large, small = (device.lengths[0].max_batch_size for device in estimate.devices)
    assert large > small > 0
    assert estimate.fits("H100", large)
    assert not estimate.fits("8.00 GiB", small + 1)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.output.weight is model.words.weight
    assert not optimizer.state


def test_a_real_model_and_its_optimizer_are_not_changed():
    model = Tied().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mean_loss(model)(sample()).backward()
    optimizer.step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradient, state = model.words.weight.grad, optimizer.state[model.words.weight]
    estimate_memory(
        model, sample(), optimizer, "80GiB", mean_loss=mean_loss(model), max_grad_norm=1.0
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.words.weight.grad is gradient
    assert optimizer.state[model.words.weight] is state
    assert not model.training
    assert optimizer.param_groups[0]["foreach"] is None


def test_a_low_bit_optimizer_is_estimated_with_its_states():
    model = Tied(dim=128)
    optimizer = torchao.optim.AdamW8bit(model.parameters(), block_size=128)
    # A scheduler replaces the optimizer's `step`.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    estimate = estimate_memory(model, sample(), optimizer, "1GiB", mean_loss=mean_loss(model))
    table_bytes = 256 * 4
    expected_bytes = 0
    for parameter in model.parameters():
        num_elements = parameter.numel()
        moment_bytes = num_elements * 4
        if num_elements >= 4096:
            moment_bytes = num_elements + num_elements // 128 * 4 + table_bytes
        step_bytes = 4
        expected_bytes += 2 * moment_bytes + step_bytes
    assert estimate.lengths[0].resident.optimizer == expected_bytes
    assert estimate.left_out[0].startswith("torchao: its step is compiled on a device")
    assert not optimizer.state


def test_an_error_restores_the_model():
    model = Tied()
    weight = model.words.weight

    def reads_a_value(batch):
        loss = mean_loss(model)(batch)
        assert loss.item() < 100
        return loss

    with pytest.raises(
        SettingError, match=r"^model='Tied': it cannot run on fake tensors: .*_local_scalar_dense"
    ):
        estimate_memory(
            model, sample(), torch.optim.SGD(model.parameters()), "H100", mean_loss=reads_a_value
        )
    assert model.words.weight is weight
    assert model.output.weight is weight


def test_the_estimate_of_a_loop_agrees_with_its_search():
    model = Tied()
    rows = [{"tokens": list(range(length))} for length in range(8, 40)]

    def collate(some):
        longest = max(len(row["tokens"]) for row in some)
        padded = torch.tensor(
            [row["tokens"] + [0] * (longest - len(row["tokens"])) for row in some]
        )
        return {"tokens": padded, "labels": padded}

    loop = AdaptiveLoop(
        model,
        torch.optim.SGD(model.parameters(), momentum=0.9, foreach=True),
        rows * 200,
        collate=collate,
        mean_loss=mean_loss(model),
        batch_size=2,
        options=StepOptions(max_grad_norm=1.0),
    )
    estimate = loop.estimate("68.125MiB", context=0)
    found = loop.find_bound(device_memory="60MiB", headroom=0.0)
    assert estimate.lengths[0].sequence_length == 39
    slope = float(estimate.lengths[0].curve.highest(found.max_batch_size).bytes_per_row)
    assert slope == pytest.approx(found.bytes_per_row(), rel=0.02)
    # The allocator and cuBLAS take memory too.
    assert 0 < estimate.devices[0].lengths[0].max_batch_size < found.max_batch_size


@pytest.mark.parametrize(
    ("batch", "options", "says"),
    [
        (
            {"none": 1},
            {},
            "batch='dict': give a sample with tensors whose first dimension is the batch",
        ),
        (torch.zeros(2, 8, dtype=torch.int64), {}, "mean_loss=None: "),
        (sample(), {"maximum": 0}, "maximum=0: "),
        (sample(), {"devices": "H10"}, "estimate.devices='H10': "),
    ],
)
def test_invalid_arguments_are_refused(batch, options, says):
    model = Tied()
    with pytest.raises(SettingError) as raised:
        estimate_memory(
            model, batch, torch.optim.SGD(model.parameters()), **{"devices": "H100", **options}
        )
    assert str(raised.value).startswith(says)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cuda_autocast_is_named_as_uncounted(device):
    model = Tied()

    def mean_of_autocast(batch):
        with torch.autocast(device, dtype=torch.bfloat16):
            return mean_loss(model)(batch)

    optimizer = torch.optim.AdamW(model.parameters())
    estimate = estimate_memory(model, sample(), optimizer, "T4", mean_loss=mean_of_autocast)
    assert ('left out: torch.autocast("cuda")' in estimate.table()) == (device == "cuda")
    assert ("left out" in estimate.table()) == (device == "cuda")


def test_the_trace_is_a_snapshot_of_pytorch(tmp_path):
    model = nn.Linear(512, 512)
    estimate = estimate_memory(
        model,
        {"x": torch.zeros(2, 512)},
        torch.optim.AdamW(model.parameters()),
        "1GiB",
        mean_loss=lambda batch: model(batch["x"]).mean(),
        maximum=64,
        trace=tmp_path / "trace.pickle",
    )
    snapshot = pickle.loads((tmp_path / "trace.pickle").read_bytes())
    (events,) = snapshot["device_traces"]
    alive, peak = {}, 0
    for event in events:
        if event["action"] == "alloc":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]
            peak = max(peak, sum(alive.values()))
        elif event["action"] == "free_completed":
            del alive[event["addr"]]
    assert peak == pytest.approx(estimate.devices[0].lengths[0].allocated_bytes, rel=0.01)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)


MIB = 2**20


def step_log(rows, each, *, steps=3):
    """Weights, then two growing buffers per step, of which the second needs a new segment."""
    log, number = array("q", [64 * MIB]), 1
    for _ in range(steps):
        log.extend([rows * each, ~number, rows * each + 3 * MIB, ~(number + 1)])
        number += 2
    return log


@given(mib=st.integers(0, 2000), each=st.integers(1, 300), margin=st.sampled_from([0.0, 0.06]))
def test_the_result_is_the_largest_that_fits(mib, each, margin):
    fixed, per_row = 67 * MIB, each * MIB
    resident = Resident(parameters=64 * MIB, buffers=0, optimizer=0, gradients=0)
    curve = MemoryCurve((Line(Fraction(fixed), Fraction(per_row)),))
    length = LengthEstimate(512, resident, curve, fixed + per_row, None, margin=margin)
    settings = AllocatorSettings()
    fit = replayed_fit(length, partial(step_log, each=per_row), settings, mib * MIB, maximum=4096)

    def reserved(rows):
        allocator = CachingAllocator(settings)
        allocator.replay(step_log(rows, per_row))
        return allocator.reserved_bytes * (1 + margin)

    most = counted_fit(length, mib * MIB, maximum=4096).max_batch_size
    assert fit.max_batch_size <= most
    if fit.max_batch_size:
        assert fit.reserved_bytes == int(reserved(fit.max_batch_size)) <= mib * MIB
    else:
        assert fit.first_too_large is not None
    if fit.max_batch_size < most:
        assert reserved(fit.max_batch_size + 1) > mib * MIB
