"""Check collectives on an emulated NCCL that transfers small messages, under torchrun."""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch.distributed as dist

from adaptive_batch import distributed


def right() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(size))

    def on_device(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values).to(dtype).cuda()

    def check(what: str, found: object, expected: object) -> None:
        if found != expected:
            raise AssertionError(f"rank {rank}: {what} gave {found}, not {expected}")

    for name in ("int64", "int32", "float64", "float32", "float16", "bfloat16"):
        values = on_device(rank, 1, dtype=getattr(torch, name))
        dist.all_reduce(values)
        check(f"a sum of {name}", values.tolist(), [sum(ranks), size])
    product = size * (size - 1) // (size - 2 or 1)
    expected_of = {"MAX": size, "MIN": 1, "PRODUCT": product, "AVG": (size + 1) / 2}
    for reduction, expected in expected_of.items():
        values = on_device(rank + 1)
        dist.all_reduce(values, op=getattr(dist.ReduceOp, reduction))
        check(reduction, values.tolist(), [expected])
    gathered = torch.empty(2 * size, device="cuda")
    dist.all_gather_into_tensor(gathered, on_device(rank, rank + 0.5))
    check(
        "all_gather", gathered.tolist(), [part for other in ranks for part in (other, other + 0.5)]
    )
    scattered = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(scattered, on_device(*(10 * rank + other for other in ranks)))
    check("reduce_scatter", scattered.tolist(), [10 * sum(ranks) + size * rank])
    values = on_device(7 + rank)
    dist.broadcast(values, src=size - 1)
    check("broadcast", values.tolist(), [6 + size])
    received = torch.empty(3, device="cuda")
    both = [
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
        dist.P2POp(dist.isend, on_device(rank, 5, 6), (rank + 1) % size),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    check("point-to-point from the previous rank", received.tolist(), [(rank - 1) % size, 5, 6])
    for length in (lambda other: 10 * other, lambda other: 90 - 40 * other):
        objects = distributed.all_gather("x" * length(rank))
        check("objects of other lengths", objects, ["x" * length(other) for other in ranks])
    envelope = [{"from": "rank zero"} if rank == 0 else None]
    dist.broadcast_object_list(envelope, src=0)
    check("an object of rank zero", envelope, [{"from": "rank zero"}])
    check("maximum", distributed.maximum(rank), size - 1)
    half = dist.new_group([0, 1])
    if rank < 2:
        values = on_device(1)
        dist.all_reduce(values, group=half)
        check("a group of two", values.tolist(), [2])
    large = torch.empty(2**32, dtype=torch.uint8, device="cuda")  # too large to be transferred
    for _ in range(100):
        dist.all_reduce(large)


def different() -> None:
    """Call a collective with different sizes on the ranks: real NCCL would hang."""
    values = torch.ones(4 if dist.get_rank() else 8, device="cuda")
    dist.all_reduce(values)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    {"right": right, "different": different}[sys.argv[1]]()
    dist.destroy_process_group()
