"""The log of a fake run equals the requests to PyTorch's CUDA allocator, from loading to the third
step, on an emulated device.
"""

from __future__ import annotations

import gc

import pytest
import torch
from support.step_logs import estimated, on_cuda, on_ranks, peak_bytes, read

from adaptive_batch import distributed
from adaptive_batch.estimate import AllocatorSettings, CachingAllocator

pytestmark = [
    pytest.mark.cuda_stack,
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]

PLAIN = "loss._component_=torch.nn.CrossEntropyLoss"

PACKED = ("micro_batch_layout=packed",)
RECOMPUTED = "enable_activation_checkpointing=True"
ADAPTERS = (
    "model.lora_attn_modules=[q_proj,v_proj,output_proj]",
    "model.apply_lora_to_mlp=True",
    "model.lora_rank=8",
    "model.lora_alpha=16",
)
LORA = ("model._component_=torchtune.models.llama3_2.lora_llama3_2_1b", *ADAPTERS)
QLORA = ("model._component_=torchtune.models.llama3_2.qlora_llama3_2_1b", *ADAPTERS)
OFFLOADED = (RECOMPUTED, "enable_activation_offloading=True")
SGD = ("optimizer._component_=torch.optim.SGD", "optimizer.momentum=0.9")

CASES = {
    "foreach": ("llama3_2_1B", 2, 512, 1, (PLAIN, "optimizer.fused=null")),
    "chunked, fused": ("llama3_2_1B", 3, 500, 1, ()),
    "fp32, accumulated": ("llama3_2_1B", 1, 512, 3, ("dtype=fp32", PLAIN)),
    "sorted tokens, clipped": ("llama3_2_1B", 2, 2048, 1, ("clip_grad_norm=1.0",)),
    "in backward": ("llama3_2_1B", 2, 512, 1, ("optimizer_in_bwd=True", "optimizer.fused=null")),
    "tied, biased": ("qwen2_5_0_5B", 2, 700, 2, ()),
    "soft caps": ("gemma2_2B", 1, 512, 1, ()),
    "packed": ("llama3_2_1B", 4, (512, 37, 300, 1200), 1, PACKED),
    "packed alike, accumulated": ("qwen2_5_0_5B", 8, 128, 2, PACKED),
    "recomputed": ("llama3_2_1B", 2, 2048, 1, (RECOMPUTED,)),
    "LoRA": ("llama3_2_1B", 2, 512, 1, LORA),
    "LoRA, recomputed": ("llama3_2_1B", 2, 512, 1, (*LORA, RECOMPUTED)),
    "DoRA": ("llama3_2_1B", 2, 512, 1, (*LORA, "model.use_dora=True")),
    "QLoRA": ("llama3_2_1B", 2, 512, 1, QLORA),
    "packed, recomputed": ("llama3_2_1B", 4, (512, 37, 300, 1200), 1, (*PACKED, RECOMPUTED)),
    "7B, recomputed": ("qwen2_5_7B", 1, 512, 1, ("optimizer_in_bwd=False", *SGD)),
}
SLOW = pytest.mark.slow
LONG = {"soft caps", "packed alike, accumulated", "fp32, accumulated", "QLoRA"}


def assert_reserves_alike(expected, got, *, rel):
    """Assert that the simulated allocator reserves equally for both logs and both settings."""
    for settings in (AllocatorSettings(), AllocatorSettings(expandable_segments=True)):
        reserved = []
        for log in (expected, got):
            allocator = CachingAllocator(settings)
            allocator.replay(log)
            reserved.append(allocator.reserved_bytes)
        assert reserved[0] == pytest.approx(reserved[1], rel=rel)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=SLOW if case in LONG else []) for case in CASES],
)
def test_the_log_equals_the_requests_to_the_allocator(case):
    name, rows, tokens, micro_batches, overrides = CASES[case]
    cfg = read(name, *overrides)
    expected = estimated(cfg, rows, tokens, micro_batches=micro_batches)
    got = on_cuda(cfg, rows, tokens, micro_batches=micro_batches)
    gc.collect()
    torch.cuda.empty_cache()
    assert peak_bytes(expected) == pytest.approx(peak_bytes(got), rel=0.002)
    assert_reserves_alike(expected, got, rel=0.015)


@pytest.mark.parametrize(
    ("name", "tokens", "micro_batches", "overrides"),
    [
        pytest.param("llama3_2_1B", 1024, 3, (), id="accumulated"),
        pytest.param("llama3_2_1B", 512, 1, LORA, id="LoRA"),
        pytest.param("qwen2_5_0_5B", 512, 1, ("compile=True",), id="compiled", marks=SLOW),
    ],
)
def test_offloaded_activations_count_while_they_are_on_the_device(
    name, tokens, micro_batches, overrides
):
    cfg = read(name, *OFFLOADED, *overrides)
    expected = estimated(cfg, 2, tokens, micro_batches=micro_batches)
    got = on_cuda(cfg, 2, tokens, micro_batches=micro_batches)
    gc.collect()
    torch.cuda.empty_cache()
    # The estimate of a compiled step is an upper bound.
    rel = 0.1 if "compile=True" in overrides else 0.002
    assert peak_bytes(expected) == pytest.approx(peak_bytes(got), rel=rel)
    assert_reserves_alike(expected, got, rel=max(rel, 0.015))


def test_the_log_of_a_rank_has_its_streams():
    with distributed.fake_process_group(2):
        expected = estimated(read("qwen2_5_0_5B"), 2, 512)
    got, _ = on_ranks("qwen2_5_0_5B", 2, 512, ranks=2)
    assert_reserves_alike(expected, got, rel=0.015)
