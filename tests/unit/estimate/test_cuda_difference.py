import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import embedding, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_batch.estimate import workspace_bytes
from adaptive_batch.estimate.cuda_workspace import (
    Attention,
    attention_backend,
    attention_difference_bytes,
    embedding_backward_bytes,
    left_out,
    library_workspace_bytes,
)
from adaptive_batch.memory import MemoryTracker, storage_bytes

MIB = 1024**2
LLAMA_8B = Attention(batch=1, heads=32, queries=8192, keys=8192, head_dim=128, dtype=torch.bfloat16, key_heads=32)

calls = st.builds(
    Attention,
    batch=st.integers(1, 8),
    heads=st.just(4),
    queries=st.integers(1, 300),
    keys=st.integers(1, 300),
    head_dim=st.sampled_from([8, 32, 64, 96, 128, 256]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    key_heads=st.just(4),
)


def cpu_saved_bytes(call: Attention) -> int:
    """Return what a CPU keeps from the forward operation until the backward one, without query, key and value.

    ``_scaled_dot_product_flash_attention_for_cpu`` takes a mask and any floating dtype (native/transformers/sdp_utils_cpp.cpp). It gives the
    output and the logarithm of the sums ``[batch, heads, queries]``, in float32, or float64 for that
    (native/transformers/attention.cpp). A boolean mask is kept as one of the dtype.
    """
    rows = call.batch * call.heads * call.queries
    mask_bytes = math.prod(call.mask) * call.itemsize if call.mask is not None else 0
    sums = rows * (8 if call.dtype == torch.float64 else 4)
    return rows * call.head_dim * call.itemsize + sums + mask_bytes


def cpu_backward_bytes(call: Attention) -> int:
    """Return the size of the gradients of query, key and value."""
    rows = call.heads * call.queries + 2 * call.key_heads * call.keys
    return call.batch * rows * call.head_dim * call.itemsize


def tensors(call, device="cpu"):
    query = torch.ones(call.batch, call.heads, call.queries, call.head_dim, dtype=call.dtype, device=device)
    key = torch.ones(call.batch, call.key_heads, call.keys, call.head_dim, dtype=call.dtype, device=device)
    mask = None if call.mask is None else torch.ones(call.mask, dtype=torch.bool, device=device)
    return query.requires_grad_(), key.requires_grad_(), torch.ones_like(key).requires_grad_(), mask


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("mask", [None, (2, 1, 24, 40), (24, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_a_cpu_saves_and_its_peak_are_as_the_formulas_say(dtype, mask, key_heads):
    call = Attention(batch=2, heads=4, queries=24, keys=40, head_dim=16, dtype=dtype, key_heads=key_heads, mask=mask)
    query, key, value, is_allowed = tensors(call)
    gradient = torch.ones_like(query)
    with MemoryTracker(2**40) as counter:
        counter.add([query, key, value, gradient])
        before = counter.live_bytes
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=is_allowed, is_causal=mask is None, enable_gqa=key_heads != 4
        )
        saved = counter.live_bytes - before
        counter.peak_bytes = 0
        gradients = torch.autograd.grad(output, (query, key, value), gradient)
        during_backward = counter.peak_bytes - before
    assert call == Attention.of(query, key, is_allowed)
    assert saved == cpu_saved_bytes(call)
    assert during_backward == cpu_saved_bytes(call) + cpu_backward_bytes(call)
    assert storage_bytes(gradients) == cpu_backward_bytes(call)


@given(calls)
def test_what_cuda_saves_has_the_sizes_that_torch_gives_these_operations(call):
    query, key, value, _ = tensors(call, device="meta")
    aten = torch.ops.aten
    results = {
        "efficient": aten._scaled_dot_product_efficient_attention(query, key, value, None, True),
        "flash": aten._scaled_dot_product_flash_attention(query, key, value),
        "cudnn": aten._scaled_dot_product_cudnn_attention(query, key, value, None, True),
    }
    for backend, (output, sums, *_) in results.items():
        saved = cpu_saved_bytes(call) + attention_difference_bytes(call, backend).saved_bytes
        assert saved == storage_bytes([output, sums])


@given(calls)
def test_cuda_never_takes_less_than_a_cpu_and_more_for_more_rows(call):
    twice = dataclasses.replace(call, batch=2 * call.batch)
    for backend in ("flash", "efficient", "cudnn", "math"):
        one = dataclasses.astuple(attention_difference_bytes(call, backend))
        two = dataclasses.astuple(attention_difference_bytes(twice, backend))
        assert all(0 <= a <= b for a, b in zip(one, two, strict=True))


def test_the_backward_of_flash_attention_adds_up_in_float32_with_rounded_queries_and_head_dim():
    assert attention_difference_bytes(LLAMA_8B, "flash").backward_bytes == 4 * 32 * 8192 * (128 + 1)
    uneven = Attention(batch=3, heads=8, queries=130, keys=130, head_dim=80, dtype=torch.bfloat16, key_heads=8)
    assert attention_difference_bytes(uneven, "flash").backward_bytes == 4 * 3 * 8 * 256 * (96 + 1)
    wide = dataclasses.replace(uneven, head_dim=160)
    assert attention_difference_bytes(wide, "flash").backward_bytes == 4 * 3 * 8 * 256 * (192 + 1)
    grouped = dataclasses.replace(uneven, key_heads=2)
    expanded = 2 * 3 * 8 * 130 * 80 * 2
    assert attention_difference_bytes(grouped, "flash").backward_bytes == 4 * 3 * 8 * 256 * 97 + expanded


def test_the_backward_of_efficient_attention_has_a_block_with_a_lock_for_each_part_of_the_query():
    delta = 4 * 32 * 8192
    blocks = 4 * 32 * (8192 // 128) * (4 + 128 * 128)
    assert attention_difference_bytes(LLAMA_8B, "efficient").backward_bytes == delta + blocks
    in_float32 = dataclasses.replace(LLAMA_8B, dtype=torch.float32)
    assert attention_difference_bytes(in_float32, "efficient").backward_bytes == 4 * 32 * 8192 * (128 + 2)
    wide = dataclasses.replace(LLAMA_8B, head_dim=256)
    blocks = 4 * 32 * ((8192 // 128) * 4 * (4 + 128 * 64) + 2 * (200 // 32) * 64 * 256)
    assert attention_difference_bytes(wide, "efficient") == dataclasses.replace(
        attention_difference_bytes(LLAMA_8B, "efficient"),
        forward_bytes=4 * 32 * 8192 * 256,
        backward_bytes=delta + blocks,
    )


def test_efficient_attention_copies_a_mask_whose_rows_are_no_multiple_of_eight():
    even = dataclasses.replace(LLAMA_8B, queries=64, keys=64, mask=(1, 1, 64, 64))
    assert attention_difference_bytes(even, "efficient").saved_bytes == 0
    uneven = dataclasses.replace(LLAMA_8B, queries=64, keys=61, mask=(1, 1, 64, 61))
    difference = attention_difference_bytes(uneven, "efficient")
    assert (difference.saved_bytes, difference.forward_bytes) == (64 * 3 * 2, 64 * 64 * 2)


@pytest.mark.parametrize(
    ("capability", "changes", "backend"),
    [
        (None, {}, "flash"),
        ((8, 0), {}, "flash"),
        ((8, 9), {}, "flash"),
        ((12, 0), {}, "flash"),
        ((9, 0), {}, "cudnn"),
        ((10, 0), {"mask": (1, 1, 8, 8)}, "cudnn"),
        ((9, 0), {"head_dim": 256}, "flash"),
        ((8, 0), {"mask": (1, 1, 8, 8)}, "efficient"),
        ((9, 0), {"dtype": torch.float32}, "efficient"),
        ((8, 0), {"head_dim": 512}, "efficient"),
        ((8, 0), {"head_dim": 208}, "flash"),
        ((8, 6), {"head_dim": 208}, "efficient"),
        ((7, 5), {"dtype": torch.float16}, "efficient"),
        ((7, 0), {"dtype": torch.float32, "head_dim": 63}, "efficient"),
        ((7, 5), {}, "math"),
        ((8, 0), {"dtype": torch.float64}, "math"),
        ((8, 0), {"dtype": torch.float32, "head_dim": 63}, "math"),
    ],
)
def test_the_kernel_of_attention_follows_from_device_dtype_mask_and_head_dim(capability, changes, backend):
    assert attention_backend(dataclasses.replace(LLAMA_8B, **changes), capability) == backend


def test_math_attention_differs_in_nothing_since_a_trial_can_count_it():
    assert dataclasses.astuple(attention_difference_bytes(LLAMA_8B, "math")) == (0, 0, 0)


def test_the_backward_of_an_embedding_takes_nothing_for_few_tokens_and_a_row_for_each_part_beyond():
    assert embedding_backward_bytes(tokens=3072, vocabulary=128_256, dim=4096) == 0
    rows = 819 + 8192
    indices = 8 * (3 * 8192 + 2 * 8192 + rows)
    assert embedding_backward_bytes(tokens=8192, vocabulary=128_256, dim=4096) == 4 * rows * 4096 + indices
    rows = 10_000 + 256
    indices = 8 * (3 * 100_000 + 2 * 256 + rows)
    assert embedding_backward_bytes(tokens=100_000, vocabulary=256, dim=64) == 4 * rows * 64 + indices


class Workspaces(TorchDispatchMode):
    """Notes what each operation would take on CUDA, where that is anything."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if taken := workspace_bytes(func, args, kwargs, compute_capability=(8, 9)):
            self.noted.append((func.__name__.removesuffix(".default"), taken))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mask", "backend"), [(None, "flash"), ((2, 1, 24, 37), "efficient")], ids=str)
def test_an_operation_that_is_dispatched_on_a_cpu_takes_what_its_kernel_on_cuda_takes(mask, backend):
    call = Attention(batch=2, heads=4, queries=24, keys=37, head_dim=16, dtype=torch.bfloat16, key_heads=4, mask=mask)
    query, key, value, is_allowed = tensors(call)
    table = torch.ones(10, 16, requires_grad=True)
    with Workspaces() as workspaces:
        scaled_dot_product_attention(query, key, value, attn_mask=is_allowed).sum().backward()
        embedding(torch.zeros(4, 1024, dtype=torch.long), table).sum().backward()
        embedding(torch.zeros(4, 512, dtype=torch.long), table).sum().backward()
    difference = attention_difference_bytes(call, backend)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    expected = {
        name: difference.forward_bytes,
        f"{name}_backward": difference.backward_bytes,
        "embedding_dense_backward": embedding_backward_bytes(tokens=4096, vocabulary=10, dim=16),
    }
    assert workspaces.noted == [item for item in expected.items() if item[1]]


def test_cublas_keeps_two_workspaces_of_a_size_that_the_architecture_says():
    assert library_workspace_bytes("sm_80") == 2 * 8_519_680
    assert library_workspace_bytes("sm_90") == library_workspace_bytes("sm_120") == 2 * 32 * MIB
    assert library_workspace_bytes("gfx942") == 2 * 128 * MIB
    assert library_workspace_bytes("gfx90a") == 2 * 32 * MIB
    assert library_workspace_bytes() == max(library_workspace_bytes(f"sm_{n}") for n in (75, 80, 89, 90, 100, 120))


def test_what_is_left_out_is_said_where_it_matters() -> None:
    everywhere = left_out(["sm_80"], dtype=torch.bfloat16)
    assert "not measured on a GPU" in everywhere[0]
    assert len(everywhere) == 2
    for more, architectures, dtype, ranks in (
        ("cuDNN", ["sm_90"], torch.bfloat16, 1),
        ("before Ampere", ["", "sm_75"], torch.bfloat16, 1),
        ("rms_norm", ["sm_80"], torch.float32, 1),
        ("NCCL", ["sm_80"], torch.bfloat16, 8),
        ("ROCm", ["gfx942"], torch.bfloat16, 1),
    ):
        beyond = set(left_out(architectures, dtype=dtype, world_size=ranks)) - set(everywhere)
        assert [more in sentence for sentence in beyond] == [True]
