"""Scaled rates in CUDA graphs, on PyTorch's CUDA build without a device."""

import pytest
import torch

from adaptive_batch.errors import SettingError
from adaptive_batch.training import AdaptiveRate

pytestmark = pytest.mark.cuda_stack


@pytest.mark.parametrize("scaling", ["none", "linear"])
def test_only_a_scaled_step_is_refused_in_a_cuda_graph(scaling):
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.5, capturable=True)
    adaptive = AdaptiveRate(optimizer, lr_scaling=scaling, reference_batch_size=4)
    weight.grad = torch.ones_like(weight)
    # The reference batch has a factor of 1.
    adaptive.set(rows=4)
    optimizer.step()
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    if scaling == "none":
        with capture:
            optimizer.step()
    else:
        with capture, pytest.raises(SettingError, match=r"^optimizer='AdamW': .* CUDA graph"):
            optimizer.step()
    adaptive.set(rows=8)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
