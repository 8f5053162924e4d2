import json
import random
from functools import partial
from itertools import product

import pytest
import torch
from support.allocations import (
    Attention,
    Divergence,
    InPlace,
    Norm,
    Packed,
    on_cuda,
    on_fake_tensors,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from adaptive_batch.estimate import CudaKernels, FakeDevice, left_out
from adaptive_batch.estimate.cuda_operators import workspace_bytes

MIB = 1024**2
DEVICES = {  # names of the stack: compute capability, multiprocessors
    "rtx4090": ((8, 9), 128),
    "l4": ((8, 9), 58),
    "a100": ((8, 0), 108),
    "h100": ((9, 0), 132),
    "b200": ((10, 0), 148),
}
DTYPES = ("bfloat16", "float16", "float32")

GRID = [
    Attention(
        head_dim,
        dtype,
        mask,
        layout,
        key_heads=2 if grouping else 8,
        grouped=grouping == "enable_gqa",
    )
    for head_dim, dtype, mask, layout, grouping in product(
        (64, 80, 96, 128, 192, 256),
        DTYPES,
        ("causal", "bool", "none"),
        ("bshd", "bhsd"),
        ("", "repeat", "enable_gqa"),
    )
]


def drawn(count: int) -> list[Attention]:
    """Return calls of all sorts of sizes, layouts and masks."""
    draw = random.Random(5)
    calls = []
    for _ in range(count):
        heads, queries = (
            draw.choice((1, 4, 8, 14, 32)),
            draw.choice((2, 17, 61, 100, 200, 333, 512, 1000, 2048)),
        )
        calls.append(
            Attention(
                head_dim=draw.choice(
                    (8, 16, 40, 60, 64, 72, 96, 100, 112, 128, 160, 192, 200, 224, 240, 256, 288)
                ),
                dtype=draw.choice(DTYPES),
                mask=draw.choice(("causal", "bool", "tokens", "heads", "float", "none")),
                layout=draw.choice(("bshd", "bhsd", "sbhd", "fused")),
                key_heads=draw.choice(
                    [number for number in (1, 2, 4, heads) if heads % number == 0]
                ),
                grouped=draw.random() < 0.4,
                batch=draw.choice((1, 2, 3, 5)),
                heads=heads,
                queries=queries,
                keys=queries if draw.random() < 0.8 else draw.choice((2, 61, 512)),
                dropout=draw.choice((0.0, 0.0, 0.1, 0.125)),
            )
        )
    return calls


PACKED = [
    Packed(lengths, head_dim, dtype, layout, key_heads)
    for head_dim, dtype, (lengths, key_heads), layout in product(
        (8, 64, 80, 128, 192, 256, 288),
        DTYPES,
        (((500, 12, 1000), 8), ((128,) * 10, 2), ((700,), 1)),
        ("bshd", "bhsd", "fused"),
    )
]
IN_PLACE = [InPlace(view) for view in ("transposed", "reshaped", "part", "itself")]
DIVERGENCES = [
    Divergence(loss, dtype, tokens)
    for loss, dtype, tokens in product(
        ("ForwardKLLoss", "ReverseKLLoss"), DTYPES[::2], (7, 300, 4096)
    )
]
NORMS = [
    Norm(kind, dtype, weight, rows, dim, is_contiguous)
    for kind, (dtype, weight), (rows, dim), is_contiguous in product(
        ("rms_norm", "layer_norm"),
        (
            *((dtype, dtype) for dtype in DTYPES),
            ("float32", "bfloat16"),
            ("bfloat16", "float32"),
            ("bfloat16", ""),
        ),
        (
            (16, 64),
            (1024, 2048),
            (8192, 4096),
            (65536, 128),
            (70000, 128),
            (70000, 2048),
            (70000, 4096),
        ),
        (True, False),
    )
    if kind == "rms_norm" or weight in ("", dtype)
]


RECORDED = [  # on PyTorch 2.13.0+cu130, by on_cuda()
    (
        "a100",
        Attention(128, layout="bhsd"),
        [2097152, 32768, 131072, 16777216, 16, 8, -3, -4],
        [2097152] * 4 + [32768, 4194304, -6, -5, -1],
    ),
    (
        "a100",
        Attention(96, mask="bool", keys=500),
        [2, 2, 1024000, -2, -1, 1032192, -3, 1572864, 32768],
        [1572864, 1536000, 1536000, 32768, 4195328, -4, -5],
    ),
    (
        "rtx4090",
        Attention(128, mask="bool", queries=200, keys=200),
        [2, 2, 160000, -2, -1, 819200, 14336],
        [819200] * 3 + [12800, 6293504, -4, -5],
    ),
    (
        "a100",
        Attention(dtype="float32", mask="none"),
        [2097152, 32768],
        [2097152] * 4 + [32768, 32768, -5, -4, 2099200, -6, -7],
    ),
    (
        "h100",
        Attention(key_heads=2, grouped=True),
        [8, 8, 1048576, 32768],
        [1048576, 262144, 262144, 2129920, -4],
    ),
    (
        "a100",
        Attention(mask="bool", key_heads=2, grouped=True),
        [
            2,
            2,
            1048576,
            -2,
            -1,
            2097152,
            524288,
            524288,
            *[2097152] * 5,
            16777216,
            16777216,
            4194304,
            8192,
            4,
            -16,
            -15,
            -14,
            -12,
            8388608,
            2097152,
            1048576,
            -18,
            -8,
            -7,
            -6,
            -5,
            -4,
            -17,
            -3,
        ],
        [
            2097152,
            2097152,
            -1,
            2097152,
            16777216,
            -2,
            16777216,
            16777216,
            -6,
            -4,
            2097152,
            2097152,
            -5,
            2097152,
            -7,
            524288,
            -3,
            524288,
            -9,
            2097152,
            -8,
            262144,
            -10,
            262144,
            -11,
            1048576,
            -12,
        ],
    ),
    (
        "a100",
        Packed(key_heads=2),
        [1548288, 48384, 16, 8, -4, 16, -3],
        [
            48384,
            16,
            1548288,
            387072,
            387072,
            60672,
            3883008,
            1548288,
            1548288,
            -9,
            -8,
            -7,
            -6,
            -2,
            -1,
        ],
    ),
    (
        "h100",
        Packed((128,) * 10, 80, layout="bhsd"),
        [1638400, 40960, 16, 8, -4, 16, -3],
        [40960, 16, *[1638400] * 4, 81920, 7864320, -8, -7, -3, -2, -1],
    ),
    ("h100", Norm(), [4194304, 4096], [4194304, 4096]),
    (
        "h100",
        Norm("layer_norm", "float32", "float32"),
        [8388608, 4096, 4096],
        [8388608, 8192, 8192],
    ),
    ("h100", InPlace(), [4194304], [4194304] * 5 + [-4, -5, -2, -1]),
    (
        "h100",
        Divergence(tokens=7),
        [
            *[140000, 140000, -1, 70000, 35000, -3, 140000, 140000, -5, 140000, 140000, -7],
            *[28, 7, 28, -10, 28, 4, -12, 4, -13, -8, -9],
        ],
        [4, 4, 28, -2, 140000, -3, 140000, -4, 140000, -5, 70000, -6, -1],
    ),
]


@pytest.mark.parametrize(("device", "call", "forward", "backward"), RECORDED, ids=str)
def test_a_call_allocates_what_was_recorded_on_cuda(device, call, forward, backward):
    assert on_fake_tensors([call], CudaKernels(*DEVICES[device])) == [(forward, backward)]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.cuda_stack
@pytest.mark.parametrize(
    "device",
    [pytest.param(name, marks=[] if name == "h100" else pytest.mark.slow) for name in DEVICES],
)
@pytest.mark.parametrize(
    "calls",
    [GRID, drawn(300), PACKED, NORMS, IN_PLACE, DIVERGENCES],
    ids=["grid", "drawn", "packed", "norms", "in place", "divergences"],
)
def test_calls_allocate_what_they_do_on_cuda_in_the_same_order(device, calls):
    capability, multiprocessors = DEVICES[device]
    counted = on_fake_tensors(calls, CudaKernels(capability, multiprocessors))
    other = [
        (call, fake, real)
        for call, fake, real in zip(calls, counted, on_cuda(calls, device=device), strict=True)
        if fake != real
    ]
    assert not other, (
        f"{len(other)} of {len(calls)}: {json.dumps([repr(part) for part in other[0]], indent=1)}"
    )


LLAMA = {"dtype": torch.bfloat16, "head_dim": 128, "mask": False, "requires_grad": True}


@pytest.mark.parametrize(
    ("capability", "changes", "kernel"),
    [
        (None, {}, "flash"),
        ((8, 0), {}, "flash"),
        ((8, 9), {}, "flash"),
        ((12, 0), {}, "flash"),
        ((9, 0), {}, "cudnn"),
        ((10, 0), {"mask": True}, "cudnn"),
        ((9, 0), {"head_dim": 256}, "cudnn"),
        ((10, 0), {"head_dim": 256}, "flash"),
        ((8, 0), {"mask": True}, "efficient"),
        ((9, 0), {"dtype": torch.float32}, "efficient"),
        ((8, 0), {"head_dim": 512}, "efficient"),
        ((8, 0), {"head_dim": 208}, "flash"),
        ((8, 6), {"head_dim": 208}, "efficient"),
        ((8, 6), {"head_dim": 208, "requires_grad": False}, "flash"),
        ((7, 5), {"dtype": torch.float16}, "efficient"),
        ((7, 0), {"dtype": torch.float32, "head_dim": 63}, "efficient"),
        ((7, 5), {}, "math"),
        ((8, 0), {"dtype": torch.float64}, "math"),
        ((8, 0), {"dtype": torch.float32, "head_dim": 63}, "math"),
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


def test_a_kernel_that_is_switched_off_is_not_taken():
    tensors = [torch.empty(1, 8, 16, 64, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        assert CudaKernels((9, 0)).kernel(*tensors) == "math"
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        assert CudaKernels((9, 0)).kernel(*tensors) == "flash"


def names_of(output: torch.Tensor) -> set[str]:
    names, nodes = set(), [output.grad_fn]
    while nodes:
        if node := nodes.pop():
            names.add(node.name())
            nodes += [other for other, _ in node.next_functions]
    return names


def test_attention_inside_of_multi_head_attention_is_replaced_and_left_as_it_was():
    real = functional.scaled_dot_product_attention
    with FakeTensorMode():
        module, rows = nn.MultiheadAttention(64, 4, batch_first=True), torch.empty(2, 16, 64)
        assert not any(
            "EfficientAttention" in name
            for name in names_of(module(rows, rows, rows, need_weights=False)[0])
        )
        with CudaKernels((8, 0)):
            assert "_EfficientAttentionBackward" in names_of(
                module(rows, rows, rows, need_weights=False)[0]
            )
    assert functional.scaled_dot_product_attention is real


def test_real_tensors_are_left_alone():
    rows = torch.ones(2, 16, 64)
    with CudaKernels():
        assert torch.equal(functional.rms_norm(rows, (64,)), rows)


def test_dropout_keeps_a_byte_for_each_element():
    with FakeTensorMode(), CudaKernels():
        tensor = torch.empty(4, 8, requires_grad=True)
        output = functional.dropout(tensor, 0.5)
        assert output.grad_fn.saved_tensors[0].dtype == torch.bool
        assert functional.dropout(tensor, 0.5, training=False) is tensor


def test_cublas_keeps_workspaces_of_a_size_that_the_architecture_says():
    assert workspace_bytes((8, 0)) == workspace_bytes((8, 9)) == 8_519_680
    assert workspace_bytes((9, 0)) == workspace_bytes((12, 0)) == 32 * MIB


@pytest.mark.parametrize("more", [(), (MIB,)])
def test_products_with_a_bias_have_a_workspace_of_their_own_in_older_versions(monkeypatch, more):
    monkeypatch.setattr("adaptive_batch.estimate.cuda_operators._MORE_WORKSPACES", more)
    device = FakeDevice(CudaKernels((9, 0), 132))
    with device.counting() as counter:
        rows, weight, bias = (torch.empty(size) for size in ((64, 32), (32, 16), (16,)))
        sizes = []
        for multiply in (
            partial(torch.mm, rows, weight),
            partial(torch.addmm, bias.expand(64, 16), rows, weight),
            partial(torch.addmm, bias, rows, weight, beta=0.5),
            partial(torch.addmm, bias, rows, weight),
            partial(torch.addmm, bias, rows, weight),
        ):
            before = len(counter.log)
            multiply()
            sizes.append([size for size in counter.log[before:] if size > 0])
    result = 4 * 64 * 16
    assert sizes == [[result, 32 * MIB], [result], [result], [result, *more], [result]]


def test_what_is_left_out_is_said_where_it_matters() -> None:
    everywhere = left_out(["sm_80"])
    assert "on a GPU in a few cases" in everywhere[0]
    assert len(everywhere) == 2
    for more, architectures, ranks in (
        ("cuDNN", ["sm_90"], 1),
        ("NCCL", ["sm_80"], 8),
        ("ROCm", ["", "gfx942"], 1),
    ):
        beyond = set(left_out(architectures, world_size=ranks)) - set(everywhere)
        assert [more in sentence for sentence in beyond] == [True]
