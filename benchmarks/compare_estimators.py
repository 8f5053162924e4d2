"""Table 2 of docs/comparison.md: estimators compared with published peaks of GPU memory.

    python benchmarks/compare_estimators.py [--output DIR]

The table uses runs of published_memory.csv: full fine-tuning with known code on one A100 of 80 GB,
with a published peak or an OOM. Ours is read from the record of published.py. The functions of
accelerate and DeepSpeed run unchanged. LLMem needs a GPU, so its formula is computed instead.
PyTorch's MemTracker takes minutes for a large model, so it runs for some of the peaks only.
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import median
from typing import Any

import harness
import published
import torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from compare_batching import deepspeed_folder, deepspeed_version
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModel, GPTBigCodeConfig

from adaptive_batch.estimate.devices import DEVICES

(A100,) = (device for device in DEVICES if device.name == "A100-80GB")
TRACKED = (
    "fms-base-gpt_bigcode-santacoder-none-1x4-full",
    "fms-base-gpt_bigcode-santacoder-none-1x8-full",
    "fms-granite-PowerLM-3b-none-1x4-full",
    "fms-base-Mistral-7B-v0.1-none-1x4-full",
)
# LLMem rounds each tensor up to a multiple of this.
LLMEM_BLOCK = 2 * 2**20


# --- the estimators, each of bytes


@cache
def whole_model(name: str) -> nn.Module:
    """Return a model of the table on the meta device."""
    kind, config = published.MODELS[name]()
    with torch.device("meta"):
        return kind(config)


def accelerate_bytes(row: published.Published, dtype: str) -> int:
    """``accelerate estimate-memory`` without its look at the hub: "Training using Adam"."""
    _, config = published.MODELS[row.model]()
    with init_empty_weights():
        model = AutoModel.from_config(config, dtype=torch.float32)
    total_bytes, _ = calculate_maximum_sizes(model)
    return int(max(estimate_training_usage(total_bytes, dtype).values()))


@cache
def deepspeed_function(file: str, name: str) -> Callable[..., Any]:
    """Return a function of DeepSpeed's, run from its source, as the package needs CUDA's compiler
    to be imported.
    """
    path = deepspeed_folder() / "deepspeed" / "runtime" / "zero" / file
    (function,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    return names[name]


def zero_2_bytes(row: published.Published) -> int:
    """DeepSpeed's of ZeRO 2 on one GPU, without offloading."""
    num_parameters = sum(parameter.numel() for parameter in whole_model(row.model).parameters())
    estimate = deepspeed_function("stage_1_and_2.py", "estimate_zero2_model_states_mem_needs")
    return estimate(num_parameters, cpu_offload=False)[1]


def zero_3_bytes(row: published.Published) -> int:
    """DeepSpeed's of ZeRO 3 on one GPU, without offloading."""
    model = whole_model(row.model)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    largest_layer = max(
        sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for module in model.modules()
    )
    estimate = deepspeed_function("stage3.py", "estimate_zero3_model_states_mem_needs")
    return estimate(num_parameters, largest_layer, cpu_offload=False, cpu_offload_params=False)[1]


def in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // LLMEM_BLOCK) * LLMEM_BLOCK


def llmem_bytes(row: published.Published) -> int:
    """LLMem's formula for one GPU, after
    https://github.com/taehokim20/LLMem/blob/13605835c1ce9f2c72f74f2071a33e5162372751/size_estimator.py

    It is for layers that are checkpointed, in mixed precision. What it measures on a GPU before,
    the chunks of weights, is taken to be 2 bytes and 4 for each; the context, which no published
    figure here includes, to be nothing.
    """
    model = whole_model(row.model)
    config = model.config
    num_rows = int(row.rows)
    length = int(row.length)
    chunk_bytes = 6 * sum(parameter.numel() for parameter in model.parameters())
    sizes = [
        parameter.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.Linear)
        for parameter in module.parameters()
    ]
    # Two states of the optimizer in float32; the output layer counts as its weights in half.
    state_bytes = sum(2 * in_blocks(4 * size) for size in sizes[:-1]) + in_blocks(2 * sizes[-1])
    layer_bytes = in_blocks(2 * num_rows * length * config.hidden_size)
    # Both embeddings, the input of each layer but the first, and the last layer's output.
    layers_bytes = (config.num_hidden_layers + 2) * layer_bytes
    logit_bytes = 2 if isinstance(config, GPTBigCodeConfig) else 4
    last_bytes = in_blocks(num_rows * length * config.vocab_size * logit_bytes)
    last_bytes += 2 * in_blocks(num_rows * (length - 1) * config.vocab_size * logit_bytes)
    return chunk_bytes + state_bytes + layers_bytes + last_bytes + in_blocks(8 * num_rows * length)


def give_fake_weights(model: nn.Module) -> None:
    """Replace tensors on the meta device by those of the fake mode that is active; shared ones stay
    shared.
    """
    weights: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in weights:
                weights[weight] = nn.Parameter(
                    torch.empty(weight.shape, dtype=weight.dtype), weight.requires_grad
                )
            setattr(module, name, weights[weight])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def tracked_bytes(row: published.Published) -> int:
    """Estimate with PyTorch's MemTracker in the second step, when optimizer state exists."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def place(model: nn.Module) -> None:
        with fake:
            give_fake_weights(model)

    step = published.TrainerStep.of(
        row.model,
        is_lora=row.is_lora,
        keeps_logits=row.keeps_logits,
        length=int(row.length),
        place=place,
    )
    with fake:
        batch = {
            name: torch.ones(int(row.rows), int(row.length), dtype=torch.int64)
            for name in step.batch
        }
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer)
        with tracker:
            for _ in range(2):
                step.mean_loss(batch).backward()
                nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
                step.optimizer.step()
                step.optimizer.zero_grad()
                tracker.reset_mod_stats()
        peaks = tracker.get_tracker_snapshot("peak")
    return max(peak["Total"] for peak in peaks.values())


# --- the table


def judged(
    estimator: str,
    estimate: Callable[[published.Published], int],
    with_bytes: list[published.Published],
    ran_out: list[published.Published],
) -> dict[str, Any]:
    """Return an estimator's errors relative to the published peaks, negative if it is too low, and
    the number of runs with an OOM that fit according to it.
    """
    start = time.perf_counter()
    estimates = {row.id: estimate(row) for row in (*with_bytes, *ran_out)}
    errors = [estimates[row.id] / row.peak_bytes - 1 for row in with_bytes]
    said_fits = sum(estimates[row.id] <= A100.total_bytes for row in ran_out)
    return row_of(estimator, errors, len(ran_out), said_fits) | {
        "seconds": round(time.perf_counter() - start, 1),
        "bytes": estimates,
    }


def row_of(estimator: str, errors: list[float], ran_out: int, said_fits: int) -> dict[str, Any]:
    return {
        "estimator": estimator,
        "rows": len(errors),
        "median": median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "ran_out": ran_out,
        "said_fits": said_fits,
    }


def ours(
    with_bytes: list[published.Published], ran_out: list[published.Published]
) -> dict[str, Any]:
    """Read our estimates of these rows from the newest record of published.py."""
    path = max(harness.RESULTS.glob("published-20*.json"))
    record = json.loads(path.read_text(encoding="utf-8"))
    recorded = {row["id"]: row for row in record["rows"]}
    errors = [recorded[row.id]["error"] for row in with_bytes]
    said_fits = sum(recorded[row.id]["fits"] for row in ran_out)
    return row_of(f"ours, of {path.name}", errors, len(ran_out), said_fits) | {
        # The time of all rows of published.py.
        "seconds": record["seconds"],
        "bytes": {row.id: recorded[row.id]["estimated_bytes"] for row in with_bytes},
    }


def main() -> None:
    parser = harness.parser(__doc__)
    arguments = parser.parse_args()
    start = time.perf_counter()
    rows = [
        row
        for row in published.rows_of_table()
        if row.is_fms and int(row.gpus) == 1 and not row.is_lora
    ]
    with_bytes = [row for row in rows if row.bytes and row.loss == "CE" and not row.ran_out]
    ran_out = [row for row in rows if row.ran_out]
    tracked = [row for row in with_bytes if row.id in TRACKED]
    assert len(tracked) == len(TRACKED)
    estimators = {
        "accelerate estimate-memory, float32": partial(accelerate_bytes, dtype="float32"),
        "accelerate estimate-memory, float16": partial(accelerate_bytes, dtype="float16"),
        "DeepSpeed, ZeRO 2": zero_2_bytes,
        "DeepSpeed, ZeRO 3": zero_3_bytes,
        "LLMem's formula": llmem_bytes,
    }
    results = [judged(name, each, with_bytes, ran_out) for name, each in estimators.items()]
    results.append(judged("PyTorch's MemTracker", tracked_bytes, tracked, []))
    results.append(ours(with_bytes, ran_out))
    table = harness.Table(
        "estimator:<40 rows:>4 median:>8.3% worst:>9.3% said_fits:>9 ran_out:>7 seconds:>8.1f"
    )
    for result in results:
        table.print(result)
    harness.write(
        "compare_estimators",
        arguments.output,
        deepspeed=deepspeed_version(),
        device=A100.name,
        results=results,
        seconds=round(time.perf_counter() - start, 1),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
