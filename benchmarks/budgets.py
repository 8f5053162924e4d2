"""What a budget of activations leaves of the peak, estimated beside what Inductor's code asks of
PyTorch's allocator, on PyTorch's CUDA stack without a device.

    make cuda-stack; .venv-cuda-stack/bin/python benchmarks/budgets.py [--layers N] [--output DIR]

The budgets are the seven of https://github.com/pytorch/pytorch/issues/197838, whose peaks were
published: 1145, 508, 275, 325, 359, 411 and 457 MB above what the model holds, of 32 layers and 2
rows of 1024 tokens in float32. The width of that model was not published, and its operators were
not fused; here is a Llama of 256 channels, compiled as a whole by Inductor.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import records
import torch
from records import Finished
from torch import nn
from torch.nn import functional
from torchtune.models.llama2 import llama2

from adaptive_batch.estimate import CudaKernels, FakeDevice, FakeStep
from adaptive_batch.estimate.compiled_parts import CompiledParts

BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35)
ROWS, LENGTH, VOCABULARY = 2, 1024, 1000
NUM_STEPS = 3


def made(device: str, layers: int) -> nn.Module:
    """Return the model, which is compiled as a whole."""
    with torch.device(device):
        model = llama2(
            vocab_size=VOCABULARY,
            num_layers=layers,
            num_heads=8,
            num_kv_heads=8,
            embed_dim=256,
            intermediate_dim=688,
            max_seq_len=LENGTH,
        )
    model.compile(dynamic=False)
    return model


def loss_of(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def made_batch(rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.ones(rows, LENGTH, dtype=torch.long) for name in ("tokens", "labels")}


def estimated(layers: int) -> int:
    """Return the peak of forward and backward above what the model holds, in bytes."""
    model = made("meta", layers)
    device = FakeDevice(CudaKernels.of_this_device())
    device.move(model)
    compiled = CompiledParts(device)
    compiled.take_over_modules(model)
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)

    def forward_backward(rows: int) -> None:
        batch = made_batch(rows)
        device.batch(batch)
        loss_of(model, batch).backward()

    step = FakeStep(
        model=model,
        optimizer=optimizer,
        forward_backward=forward_backward,
        step=optimizer.step,
        accumulates=False,
        device=device,
    )
    live_bytes = step.trace(ROWS).trace.live_bytes
    assert not compiled.left_out, compiled.left_out
    return max(live_bytes) - held_bytes(model)


def counted(layers: int) -> int:
    """Return the same, as PyTorch counts it in a step whose kernels are there."""
    model = made("cuda", layers)
    batch = {name: tensor.cuda() for name, tensor in made_batch(ROWS).items()}
    for _ in range(NUM_STEPS):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, batch).backward()
        model.zero_grad()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - held_bytes(model)


def held_bytes(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def both_peaks(layers: int, budget: float) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    with torch._functorch.config.patch(activation_memory_budget=budget):
        for name, peak in (("estimated", estimated), ("counted", counted)):
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
            entry[name] = peak(layers)
    entry["error"] = entry["estimated"] / entry["counted"] - 1
    return entry


def measure(layers: int, finished: Finished) -> list[dict[str, Any]]:
    """Return the two peaks for each budget."""
    table = []
    print(f"{'budget':>6} {'estimated':>10} {'counted':>10} MB")
    for budget in BUDGETS:
        key = {"layers": layers, "budget": budget}
        entry = finished.entry(key, partial(both_peaks, layers, budget))
        table.append(entry)
        print(
            f"{budget:>6} {entry['estimated'] / 1e6:>10.1f} {entry['counted'] / 1e6:>10.1f}"
            f" {entry['error']:+.3%}",
            flush=True,
        )
    return table


def in_order(table: list[dict[str, Any]], name: str) -> list[float]:
    """Return the budgets, that with the lowest peak first."""
    return [entry["budget"] for entry in sorted(table, key=lambda entry: entry[name])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32, metavar="N")
    parser.add_argument("--output", type=Path, default=records.RESULTS, metavar="DIR")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("run it by the Python of `make cuda-stack`")
    finished = Finished("budgets")
    table = measure(arguments.layers, finished)
    orders = {name: in_order(table, name) for name in ("estimated", "counted")}
    print("\n" + "\n".join(f"in order, {name}: {order}" for name, order in orders.items()))
    records.write("budgets", arguments.output, budgets=table, in_order=orders)
    finished.forget()


if __name__ == "__main__":
    main()
