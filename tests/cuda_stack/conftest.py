"""Tests on PyTorch's CUDA build with an emulated device: see docs/without_a_gpu.md."""

import gc

import pytest
import torch
from support.cuda_stack.squeezing import library

MIB = 2**20


def pytest_runtest_setup(item):
    if library() is None:
        pytest.skip("needs the CUDA without a device: make cuda-stack")


@pytest.fixture(autouse=True)
def _the_device_is_whole_again():
    yield
    library().cudastub_set_reserved(500 * MIB)
    gc.collect()
    # A workspace of cuBLAS may keep a large block alive.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
