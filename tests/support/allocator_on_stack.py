"""The real caching allocator beside the simulated one, in a process of its own on PyTorch's CUDA
stack without a device.

    python tests/support/allocator_on_stack.py SEED...

`PYTORCH_CUDA_ALLOC_CONF` is the caller's. Makes the same calls of both, and prints a line of JSON
for each seed: what was counted, and what differs.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch

from adaptive_batch.estimate import AllocatorSettings, CachingAllocator

SEGMENT = (
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "stream",
    "segment_type",
    "is_expandable",
)


def simulated() -> CachingAllocator:
    """Return an allocator with the settings of the environment."""
    return CachingAllocator(AllocatorSettings.from_environment())


def segments_of(allocator: CachingAllocator) -> list[dict[str, Any]]:
    """Return what a simulated allocator has reserved as ``torch.cuda.memory_snapshot()`` does.

    Segments are ordered by address.
    """
    segments: list[dict[str, Any]] = []
    for head in reversed(allocator.segments):
        segments.append(_empty_segment(head, allocator._is_expandable))
        block: Any = head
        while block is not None:
            _add_to_segment(segments[-1], block)
            block = block.next
    return segments


def _empty_segment(first: Any, is_expandable: bool) -> dict[str, Any]:
    """Return the entry of a segment before its blocks are added."""
    return {
        "address": first.address,
        "stream": first.pool.stream,
        "segment_type": "small" if first.pool.is_small else "large",
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "is_expandable": is_expandable,
        "blocks": [],
    }


def _add_to_segment(segment: dict[str, Any], block: Any) -> None:
    state = "inactive"
    requested = 0
    segment["total_size"] += block.size
    if block.is_allocated:
        state = "active_allocated"
        requested = block.requested
        segment["allocated_size"] += block.size
        segment["active_size"] += block.size
        segment["requested_size"] += requested
    segment["blocks"].append(
        {
            "address": block.address,
            "size": block.size,
            "requested_size": requested,
            "state": state,
        }
    )


def described(segments: Iterable[dict[str, Any]]) -> list[Any]:
    """List segments with their blocks; addresses by the distance from the highest segment's, which
    differ for expandable ones: each reserves more than its device has.
    """
    ordered = sorted(segments, key=lambda segment: segment["address"], reverse=True)
    return [
        [
            0 if segment["is_expandable"] else segment["address"] - ordered[0]["address"],
            *(segment[key] for key in SEGMENT),
            [
                [
                    block["size"],
                    block["state"],
                    block["requested_size"] * (block["state"] == "active_allocated"),
                ]
                for block in segment["blocks"]
            ],
        ]
        for segment in ordered
    ]


def difference(allocator: CachingAllocator) -> dict[str, Any]:
    """Return what differs, by name: the real one's value first; of segments the first
    that differ.
    """
    stats = torch.cuda.memory_stats()
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in ("allocated", "requested", "reserved"):
        of_name = f"{name}_bytes.all"
        pairs[name] = (stats[f"{of_name}.current"], getattr(allocator, f"{name}_bytes"))
        peak = getattr(allocator, f"peak_{name}_bytes", allocator.reserved_bytes)
        pairs[f"peak_{name}"] = (stats[f"{of_name}.peak"], peak)
    here, there = described(torch.cuda.memory_snapshot()), described(segments_of(allocator))
    pairs["segments"] = next(
        (pair for pair in zip_longest(here, there) if pair[0] != pair[1]), (None, None)
    )
    return {
        name: (real, simulation) for name, (real, simulation) in pairs.items() if real != simulation
    }


def counted(allocator: CachingAllocator) -> dict[str, int]:
    return {
        "reserved": allocator.reserved_bytes,
        "segments": len(segments_of(allocator)),
    }


def random_sequence(seed: int, num_operations: int = 3000) -> dict[str, Any]:
    """Allocate and free at random until something differs; the mix of sizes is the seed's."""
    draw = random.Random(seed)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    allocator = simulated()
    held: list[tuple[torch.Tensor, Any]] = []
    largest = draw.choice([18, 21, 23, 25, 27, 29, 30])
    few = [int(2 ** draw.uniform(0, largest)) for _ in range(draw.choice([3, 8, 30]))]
    full = draw.uniform(1, 4) * 2**30  # from where on more is freed than allocated
    found: dict[str, Any] = {}
    for number in range(1, num_operations + 1):
        if held and draw.random() < (0.35 if allocator.allocated_bytes < full else 0.7):
            tensor, block = held.pop(draw.randrange(len(held)))
            del tensor
            allocator.free(block)
        else:
            size = draw.choice(few) if draw.random() < 0.7 else int(2 ** draw.uniform(0, largest))
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            held.append((tensor, allocator.malloc(size)))
            del tensor
        if (
            number % 250 == 0 or number == num_operations
        ):  # PyTorch 2.13 loses references with each snapshot
            found = difference(allocator)
        if found:
            break
    return {"case": f"seed {seed}", "operations": number, **counted(allocator), "difference": found}


def main() -> None:
    for seed in sys.argv[1:]:
        print(json.dumps(random_sequence(int(seed))), flush=True)


if __name__ == "__main__":
    main()
