"""The modelled time of a step: FLOPs and bytes of each operation by hand, and what checkpointing
and more tokens cost.
"""

from __future__ import annotations

import pytest
import torch
from support.fake_steps import fake_step
from torch.nn import functional as F

from adaptive_batch.estimate import CudaKernels, FakeDevice, traces_alike
from adaptive_batch.estimate.devices import DEVICES, find_device
from adaptive_batch.estimate.roofline import BY_FLOPS, DeviceSpeed, Roofline, cost_of

aten = torch.ops.aten
H100 = find_device("H100").speed
SLOW_MEMORY = DeviceSpeed((8.0, 8.0, 4.0, 2.0), 1.0)


def cost(func, *args, **kwargs):
    return cost_of(func, args, kwargs, func(*args, **kwargs))


def roofline(**options):
    few, more = traces_alike(fake_step(**options))
    return Roofline(*((rows, trace.costs) for rows, trace in (few, more)))


def test_a_matmul_multiplies_and_adds_for_each_inner_element_and_moves_three_matrices():
    a, b = torch.ones(3, 5, dtype=torch.bfloat16), torch.ones(5, 7, dtype=torch.bfloat16)
    assert cost(aten.mm.default, a, b) == (
        torch.bfloat16,
        2 * 3 * 5 * 7,
        2 * (3 * 5 + 5 * 7 + 3 * 7),
    )


def test_an_elementwise_operation_moves_its_inputs_and_its_output():
    assert cost(aten.add.Tensor, torch.ones(6, 4), torch.ones(6, 4)) == (
        torch.float32,
        0,
        3 * 24 * 4,
    )
    assert cost(aten.add.Tensor, torch.ones(6, 4), torch.ones(()).expand(6, 4)) == (
        torch.float32,
        0,
        2 * 24 * 4 + 4,
    )


def test_views_and_empty_tensors_move_nothing_and_a_lookup_does_not_read_the_whole_table():
    assert cost(aten.view.default, torch.ones(6), [2, 3]) is None
    assert cost(aten.empty.memory_format, [5]) is None
    assert (
        cost(aten.embedding.default, torch.ones(1000, 4), torch.arange(3))[2] == 3 * 8 + 3 * 4 * 4
    )


def test_the_time_is_the_sum_of_the_slower_of_arithmetic_and_traffic():
    matmul, add = (torch.float32, 100, 10), (torch.float32, 0, 7)
    twice = [(dtype, 2 * flops, 2 * moved) for dtype, flops, moved in (matmul, add)]
    line = Roofline((1, [matmul, add]), (2, twice))
    assert [line.seconds(rows, SLOW_MEMORY) for rows in (1, 2, 5)] == [57, 114, 285]
    assert line.tokens_per_second(5, 57, SLOW_MEMORY) == 1.0
    assert line.tokens_per_second(0, 57, SLOW_MEMORY) is line.tokens_per_second(5, 57, None) is None
    assert line.seconds(1, BY_FLOPS) == 100


def test_float32_is_multiplied_as_pytorch_is_set_and_no_peak_means_no_time():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert SLOW_MEMORY.peak(torch.float32) == 4.0
    finally:
        torch.set_float32_matmul_precision(before)
    assert SLOW_MEMORY.peak(torch.float32) == 2.0
    in_bf16 = [(torch.bfloat16, 1, 1)]
    assert Roofline((1, in_bf16), (2, in_bf16)).seconds(1, find_device("T4").speed) is None


def test_more_rows_take_longer():
    line = roofline(device=FakeDevice(CudaKernels((9, 0), 132)))
    times = [line.seconds(rows, H100) for rows in (1, 2, 3, 10, 100)]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("kernels", [None, CudaKernels((9, 0), 132)], ids=["cpu", "cuda"])
def test_arithmetic_is_that_of_the_formula_and_the_same_for_kernels_of_a_device(kernels):
    def line(**options):
        return roofline(device=FakeDevice(kernels), **options).seconds(10, BY_FLOPS)

    tokens, width, layers, words = 240, 64, 3, 600
    linear = 2 * tokens * width * (layers * 9 * width + words)  # of a forward
    attention = 2 * layers * tokens * 24 * width  # causal: half of 4
    assert line() == 3 * linear + 3.5 * attention
    assert 1.1 < line(checkpointing=True) / line() < 1.4


@pytest.mark.parametrize("device", [None, CudaKernels((9, 0), 132)], ids=["cpu", "cuda"])
def test_checkpointing_runs_forward_again(device):
    """A step that computes is slower by what runs again: a third, less the output layer."""

    def seconds(*, checkpointing):
        few, more = traces_alike(
            fake_step(device=FakeDevice(device), checkpointing=checkpointing, words=8)
        )
        return Roofline(*((rows, trace.costs) for rows, trace in (few, more))).seconds(50, BY_FLOPS)

    assert 1.2 < seconds(checkpointing=True) / seconds(checkpointing=False) < 1.4


def test_norms_move_bytes_on_a_device():
    kernels = CudaKernels((9, 0), 132)
    with kernels:
        given = (
            FakeDevice(kernels)
            .mode.from_tensor(torch.ones(4, 8), static_shapes=True)
            .requires_grad_()
        )
        with given.fake_mode:
            F.rms_norm(given, (8,)).sum().backward()
    sizes = [moved for _, flops, moved in kernels.costs if not flops]
    assert sizes == [256, 384]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_a_device_computes_faster_in_16_bits_than_in_32_and_moves_less_than_it_computes(device):
    fp16, bf16, tf32, fp32 = device.speed.flops_per_second
    assert fp16 > (tf32 or 0) >= 0
    assert bf16 in (None, fp16)
    assert 50 < fp16 / device.speed.bytes_per_second < 600
    if fp32 is None:  # not found; nor may it stand for TF32
        assert tf32 is None
    else:
        assert fp16 > fp32
        assert 5 < fp32 / device.speed.bytes_per_second < 200
