"""The kernels that the estimate fuses, beside those of Inductor's own scheduler.

It runs on PyTorch's CUDA stack without a device: kernels are generated, and compute nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config, scheduler
from torch.nn import functional

from adaptive_batch.estimate import CompiledParts, CudaKernels, FakeDevice
from adaptive_batch.estimate.compiled_parts import GraphMemory

pytestmark = pytest.mark.cuda_stack

SIDE = 1024
LEAST_BYTES = 2**20  # of results that are compared: sums are made in two steps there, and one here


def norm(x, y, z):
    return functional.rms_norm(x @ y, (SIDE,)) @ z


def gated(x, y, z):
    gate = (x @ y) * (y @ x)
    value = (x @ z) * (z @ x)
    return gate, value, functional.silu(gate) * value


def near(x, y, z, *, num_products=20):
    first = x.sin() * y
    for _ in range(num_products):
        z = z @ z
    return first, z, x.cos() * y


def far(x, y, z):
    return near(x, y, z, num_products=70)


def sums_over_rows(x, y, z):
    before = x.sin() * y
    first = (x * y).sum(0)
    after = x.cos() * y
    return before, first, after, (x + z @ y).sum(0)


def delayed(x, y, z):
    first = x.sin() * y
    product = first @ z
    after = product.cos() * z
    beside = z.exp() * y
    delaying = (z @ z) * x
    return first, after, beside, delaying, after.sin() * z


def rotated(x, y, z):
    halves = (x @ y).unflatten(-1, (2, -1))
    other_halves = (x @ z).unflatten(-1, (2, -1))
    return halves.flip(-2) @ other_halves.mT, other_halves.flip(-2)


def sizes_of_kernels(results_of_kernels):
    """The bytes of the large results of each kernel, in its order."""
    sizes = [
        sorted(size for size in results if size >= LEAST_BYTES) for results in results_of_kernels
    ]
    return [results for results in sizes if results]


@pytest.fixture
def inductors_kernels(monkeypatch):
    """The bytes of the results of each kernel that Inductor has generated in a test."""
    kernels = []
    code = scheduler.Scheduler._codegen

    def recorded(self, nodes):
        for node in nodes:
            buffers = [buffer.mpi_buffer.size_alloc for buffer in node.get_outputs()]
            kernels.append(buffers)
        return code(self, nodes)

    monkeypatch.setattr(scheduler.Scheduler, "_codegen", recorded)
    # What an earlier run has cached is not scheduled.
    with config.patch(force_disable_caches=True):
        yield kernels


@pytest.fixture
def own_kernels(monkeypatch):
    """The same of the estimate."""
    kernels = []
    init = GraphMemory.__init__

    def recorded(memory, *arguments, **keywords):
        init(memory, *arguments, **keywords)
        for kernel in memory._kernels:
            values = [node.meta["val"] for node in kernel.results]
            kernels.append([value.numel() * value.element_size() for value in values])

    monkeypatch.setattr(GraphMemory, "__init__", recorded)
    return kernels


@pytest.mark.parametrize(
    "function", [norm, gated, near, far, sums_over_rows, delayed, rotated], ids=lambda f: f.__name__
)
def test_kernels_are_those_of_inductor(function, inductors_kernels, own_kernels):
    device = FakeDevice(CudaKernels.of_this_device())
    estimated = CompiledParts(device).compiled(function, function.__name__)
    with device.counting():
        estimated(*[torch.empty(SIDE, SIDE, requires_grad=True) for _ in range(3)])
    torch.compiler.reset()
    tensors = [torch.empty(SIDE, SIDE, device="cuda", requires_grad=True) for _ in range(3)]
    torch.compile(function, dynamic=False)(*tensors)
    torch.compiler.reset()
    assert inductors_kernels
    assert sizes_of_kernels(own_kernels) == sizes_of_kernels(inductors_kernels)
