"""Compare the simulated caching allocator with the real one, on PyTorch's CUDA stack without a
device.

    python tests/support/allocator_on_stack.py SEED...

The caller sets `PYTORCH_CUDA_ALLOC_CONF`. Both allocators get the same calls. Each seed prints a
line of JSON with the reserved bytes and the differences.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch

from adaptive_batch.estimate import AllocatorSettings, CachingAllocator

NUM_OPERATIONS, COMPARED_EVERY = 3000, 250


def real_segments() -> list[Any]:
    """List PyTorch's segments and their blocks by descending address."""
    segments = sorted(
        torch.cuda.memory_snapshot(), key=lambda segment: segment["address"], reverse=True
    )
    return [
        [
            # Expandable segments have no comparable addresses.
            0 if segment["is_expandable"] else segment["address"] - segments[0]["address"],
            segment["total_size"],
            segment["stream"],
            segment["segment_type"],
            segment["is_expandable"],
            [
                (block["size"], block["state"], block["requested_size"])
                if block["state"] == "active_allocated"
                else (block["size"], block["state"], 0)
                for block in segment["blocks"]
            ],
        ]
        for segment in segments
    ]


def simulated_segments(allocator: CachingAllocator) -> list[Any]:
    """List the segments of a simulated allocator in the same form."""
    heads = sorted(allocator.segments, key=lambda head: head.address, reverse=True)
    return [
        [
            0 if allocator._is_expandable else head.address - heads[0].address,
            sum(block.size for block in blocks_from(head)),
            head.pool.stream,
            "small" if head.pool.is_small else "large",
            allocator._is_expandable,
            [
                (block.size, "active_allocated", block.requested)
                if block.is_allocated
                else (block.size, "inactive", 0)
                for block in blocks_from(head)
            ],
        ]
        for head in heads
    ]


def blocks_from(block: Any) -> Iterator[Any]:
    """Yield a block and the following blocks of its segment."""
    while block is not None:
        yield block
        block = block.next


def difference(allocator: CachingAllocator) -> dict[str, Any]:
    """Return the pairs of real and simulated values that differ, by name; of segments, the first
    pair.
    """
    stats = torch.cuda.memory_stats()
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in ("allocated", "requested", "reserved"):
        of_name = f"{name}_bytes.all"
        pairs[name] = (stats[f"{of_name}.current"], getattr(allocator, f"{name}_bytes"))
        peak = getattr(allocator, f"peak_{name}_bytes", allocator.reserved_bytes)
        pairs[f"peak_{name}"] = (stats[f"{of_name}.peak"], peak)
    both = zip_longest(real_segments(), simulated_segments(allocator))
    pairs["segments"] = next((pair for pair in both if pair[0] != pair[1]), (None, None))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def random_sequence(seed: int) -> dict[str, Any]:
    """Allocate and free at random until the allocators differ; the seed chooses the sizes."""
    draw = random.Random(seed)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    allocator = CachingAllocator(AllocatorSettings.from_environment())
    held: list[tuple[torch.Tensor, Any]] = []
    largest = draw.choice([18, 21, 23, 25, 27, 29, 30])
    few = [int(2 ** draw.uniform(0, largest)) for _ in range(draw.choice([3, 8, 30]))]
    full = draw.uniform(1, 4) * 2**30  # above this, frees are more frequent than allocations
    found: dict[str, Any] = {}
    for number in range(1, NUM_OPERATIONS + 1):
        if held and draw.random() < (0.35 if allocator.allocated_bytes < full else 0.7):
            tensor, block = held.pop(draw.randrange(len(held)))
            del tensor
            allocator.free(block)
        else:
            size = draw.choice(few) if draw.random() < 0.7 else int(2 ** draw.uniform(0, largest))
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            held.append((tensor, allocator.malloc(size)))
            del tensor
        # PyTorch 2.13 leaks references with each snapshot, so compare rarely.
        if number % COMPARED_EVERY == 0:
            found = difference(allocator)
        if found:
            break
    return {"seed": seed, "reserved": allocator.reserved_bytes, "difference": found}


if __name__ == "__main__":
    for seed in sys.argv[1:]:
        print(json.dumps(random_sequence(int(seed))), flush=True)
