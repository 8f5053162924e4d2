"""Saved tensors and buffers of CUDA operators, on fake tensors."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive_batch.estimate import CudaKernels, DevicesAsHost, FakeDevice, find_device, left_out

LLAMA = {"dtype": torch.bfloat16, "head_dim": 128, "mask": False, "requires_grad": True}


@contextmanager
def allocations(counter):
    """Yield a list that has the sizes of the allocations of the block, after it."""
    before, sizes = len(counter.log), []
    yield sizes
    sizes += [size for size in counter.log[before:] if size > 0]


@pytest.mark.parametrize(
    ("capability", "changes", "kernel"),
    [
        (None, {}, "flash"),
        ((12, 0), {}, "flash"),
        ((9, 0), {}, "cudnn"),
        ((10, 0), {"mask": True}, "cudnn"),
        ((10, 0), {"head_dim": 256}, "flash"),
        ((8, 0), {"mask": True}, "efficient"),
        ((9, 0), {"dtype": torch.float32}, "efficient"),
        ((8, 0), {"head_dim": 512}, "efficient"),
        ((8, 0), {"head_dim": 208}, "flash"),
        ((8, 6), {"head_dim": 208}, "efficient"),
        ((8, 6), {"head_dim": 208, "requires_grad": False}, "flash"),
        ((7, 0), {"dtype": torch.float32, "head_dim": 63}, "efficient"),
        ((7, 5), {}, "math"),
        ((8, 0), {"dtype": torch.float64}, "math"),
    ],
)
def test_the_kernel_of_attention_follows_from_device_dtype_mask_and_head_dim(
    capability, changes, kernel
):
    call = LLAMA | changes
    options = {"dtype": call["dtype"], "device": "meta", "requires_grad": call["requires_grad"]}
    tensors = [torch.empty(1, 8, 16, call["head_dim"], **options) for _ in range(3)]
    mask = torch.empty(16, 16, dtype=torch.bool, device="meta") if call["mask"] else None
    assert CudaKernels(capability).kernel(*tensors, mask) == kernel


def names_of(output: torch.Tensor) -> set[str]:
    names, nodes = set(), [output.grad_fn]
    while nodes:
        if node := nodes.pop():
            names.add(node.name())
            nodes += [other for other, _ in node.next_functions]
    return names


def test_multi_head_attention_uses_the_replacement():
    real = functional.scaled_dot_product_attention
    with FakeTensorMode():
        module, rows = nn.MultiheadAttention(64, 4, batch_first=True), torch.empty(2, 16, 64)
        of_cuda = "ScaledDotProductEfficientAttentionBackward0"
        assert of_cuda not in names_of(module(rows, rows, rows, need_weights=False)[0])
        with CudaKernels((8, 0)).in_place():
            assert of_cuda in names_of(module(rows, rows, rows, need_weights=False)[0])
    assert functional.scaled_dot_product_attention is real


def test_dropout_saves_a_boolean_mask():
    with FakeTensorMode(), CudaKernels().in_place():
        tensor = torch.empty(4, 8, requires_grad=True)
        output = functional.dropout(tensor, 0.5)
        assert output.grad_fn.saved_tensors[0].dtype == torch.bool
        assert functional.dropout(tensor, 0.5, training=False) is tensor


def test_values_may_be_wider_than_keys():
    with FakeTensorMode(), CudaKernels((8, 0)).in_place():
        key, value = torch.empty(1, 2, 16, 64), torch.empty(1, 2, 16, 128)
        assert functional.scaled_dot_product_attention(key, key, value).shape == value.shape


@pytest.mark.parametrize(
    ("capability", "dtype", "columns"),
    [((8, 0), torch.bfloat16, 64), ((8, 0), torch.float32, 64), ((9, 0), torch.bfloat16, 65)],
    ids=["flash", "efficient", "cudnn"],
)
def test_attention_saves_sums_and_its_backward_needs_a_float32_gradient(capability, dtype, columns):
    device = FakeDevice(CudaKernels(capability))
    with device.counting() as counter:
        tensors = [torch.empty(1, 8, 512, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
        with allocations(counter) as forward:
            output = functional.scaled_dot_product_attention(*tensors, is_causal=True)
        with allocations(counter) as backward:
            output.backward(torch.empty_like(output))
    # The rest is the seed of dropout.
    assert forward[:2] == [8 * 512 * 64 * dtype.itemsize, 4 * 8 * 512]
    assert sum(forward[2:]) <= 24
    assert 4 * 8 * 512 * columns in backward


def test_uncounted_memory_is_named() -> None:
    model = nn.Linear(2, 2)
    assert left_out(model, ["sm_80"]) == ()
    for words, module, architectures, ranks in (
        ("cuDNN", model, ["sm_90"], 1),
        ("NCCL", model, ["sm_80"], 8),
        ("ROCm", model, ["", "gfx942"], 1),
        ("LSTM", nn.Sequential(nn.GRU(2, 2)), ["sm_80"], 1),
    ):
        (sentence,) = left_out(module, architectures, world_size=ranks)
        assert words in sentence


@pytest.mark.parametrize(
    ("name", "shape", "dims", "dtype", "num_bytes"),
    [
        ("RTX4090", (4096, 2304), [0], torch.bfloat16, 75497472),
        ("RTX4090", (4096, 2304), [0], torch.float64, 150994944),
        ("RTX4090", (1000, 2304), [0], torch.float32, 1),
        ("RTX4090", (100000, 4096), [0], torch.bfloat16, 205520896),
        ("RTX4090", (64, 512, 768), [0, 1], torch.float32, 100663296),
        ("RTX4090", (70000, 33), [0], torch.float32, 811008),
        ("RTX4090", (16, 128, 28, 28), [0, 2, 3], torch.float32, 1),
        ("RTX4090", (4096, 768), [-1], torch.float32, 1),
        ("H100", (8192, 2304), [0], torch.bfloat16, 139198464),
    ],
)
def test_a_sum_over_columns_has_at_least_the_partial_sums_of_an_emulated_device(
    name, shape, dims, dtype, num_bytes
):
    device = FakeDevice(find_device(name).kernels)
    with device.counting() as counter:
        tensor = torch.empty(shape, dtype=dtype)
        with allocations(counter) as sizes:
            result = tensor.sum(dims)
    assert sizes[0] == result.nbytes
    # The estimate is an upper bound, below the memory of the device's blocks.
    assert num_bytes <= sizes[1] <= max(num_bytes, 128 * 2**20)


def test_the_products_of_bilinear_are_counted():
    device = FakeDevice(CudaKernels())
    with device.counting() as counter:
        module = nn.Bilinear(32, 8, 16, bias=False)
        inputs = torch.empty(100, 32), torch.empty(100, 8)
        with allocations(counter) as sizes:
            module(*inputs)
    # For each output: a product with the weight, and its product with the second input.
    assert sizes == [4 * 100 * 16, *(4 * 100 * 8, 4 * 100) * 16]


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [
        ((6, 8), (3, 8, 16), [2, 4, 6]),
        ((8, 12), (12, 16), [4, 8, 12]),
        ((3, 6, 8), (8, 12), [4, 8, 12]),
        ((3, 6, 8), (3, 8, 16), None),
    ],
)
def test_grouped_products_have_the_shapes_of_real_ones_in_float32(first, second, ends):
    offsets = ends and torch.tensor(ends, dtype=torch.int32)
    real = functional.grouped_mm(torch.ones(first), torch.ones(second), offs=offsets)
    with FakeDevice(CudaKernels()).counting():
        offsets = ends and torch.tensor(ends, dtype=torch.int32)
        fake = functional.grouped_mm(torch.empty(first), torch.empty(second), offs=offsets)
    assert fake.shape == real.shape


@pytest.mark.parametrize(
    ("dtype", "arguments", "change", "node"),
    [
        (torch.float32, {}, None, None),
        (torch.float32, {"attention_mask"}, None, None),
        (torch.float32, {"position_ids"}, None, None),
        (torch.bfloat16, {}, None, "Flash"),
        (torch.bfloat16, {"attention_mask"}, None, "Efficient"),
        (torch.bfloat16, {"position_ids"}, None, "Efficient"),
        (torch.bfloat16, {"position_ids"}, torch.clone, "Efficient"),
        (torch.bfloat16, {"position_ids"}, lambda positions: positions[:, :16] + 1, "Efficient"),
        (torch.bfloat16, {"position_ids"}, lambda positions: positions.to("cuda"), "Efficient"),
        (torch.bfloat16, {"position_ids"}, lambda _: torch.arange(16)[None] + 1, "Flash"),
        (torch.bfloat16, {"position_ids"}, lambda _: torch.arange(16)[None] % 8, "Efficient"),
        (torch.bfloat16, {"position_ids"}, lambda _: torch.arange(16)[None].zero_(), "Efficient"),
    ],
)
def test_transformers_runs_the_attention_with_the_most_memory_that_the_batch_allows(
    dtype, arguments, change, node
):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 8}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    device = FakeDevice(CudaKernels((8, 9)))
    device.move(model)
    with device.counting():
        batch = {name: torch.ones(2, 16, dtype=torch.long) for name in ("input_ids", *arguments)}
        device.move_batch(batch)
        with DevicesAsHost():
            batch.update(input_ids=batch["input_ids"].cuda())
            if change:
                batch.update(position_ids=change(batch["position_ids"]))
        output = model(**batch, use_cache=False).logits
    names = [name for name in names_of(output) if "ScaledDotProduct" in name]
    # None: products and a softmax.
    assert names == ([f"ScaledDotProduct{node}AttentionBackward0"] if node else [])
