"""A model without memory takes as many operations whatever its size."""

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.dtypes.nf4tensor import CHUNK_SIZE, to_nf4

from adaptive_batch.torchtune import FullModel


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


class Rounded(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = torch.nn.Parameter(to_nf4(torch.empty(rows, 1024)), requires_grad=False)


@pytest.mark.parametrize("chunks", [1, 8])
def test_a_weight_of_4_bits_is_rounded_in_one_piece(chunks):
    component = {"_component_": f"{__name__}.Rounded", "rows": chunks * CHUNK_SIZE // 1024}
    with Counting() as counting:
        model = FullModel().skeleton(OmegaConf.create({"model": component}), dtype=torch.bfloat16)
    assert model.weight.quantized_data.numel() == chunks * CHUNK_SIZE // 2
    assert counting.operations < 60
