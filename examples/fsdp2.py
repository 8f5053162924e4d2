"""A small language model trained on the standard library's docstrings on several ranks, in a loop
like torchtitan's.

With adaptive_batch, and without it at the batch sizes that the former printed:

    torchrun --nproc_per_node 2 examples/fsdp2.py
    torchrun --nproc_per_node 2 examples/fsdp2.py --plain 8 16 32
"""

import argparse
import inspect
import json
import os
import random
import statistics
import textwrap

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DistributedSampler

# --- adaptive_batch
from adaptive_batch import AdaptiveLoop, Sampling, geometric

# ---

MODULES = (argparse, inspect, json, random, statistics, textwrap)
DOCSTRINGS = {
    text
    for module in MODULES
    for one in vars(module).values()
    if (text := getattr(one, "__doc__", None))
}
ROWS = [{"tokens": list(text.encode()[:64])} for text in sorted(DOCSTRINGS)[:128]]
EPOCHS, BATCH_SIZE, RATE = 3, 8, 3e-3
DEVICE = (
    torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if torch.cuda.is_available()
    else torch.device("cpu")
)


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    tokens = [torch.tensor(row["tokens"]) for row in rows]
    return {"tokens": pad_sequence(tokens, True, 0), "labels": pad_sequence(tokens, True, -100)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--plain", type=int, nargs=EPOCHS, help="batch size of each epoch on one device"
    )
    plain = parser.parse_args().plain
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def mean_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits, labels = model(batch["tokens"]), batch["labels"]
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    sizes = []
    micro_batches = []
    if plain is None:
        # --- adaptive_batch
        loop = AdaptiveLoop(
            model,
            optimizer,
            ROWS,
            collate=collate,
            mean_loss=mean_loss,
            batch_size=BATCH_SIZE,
            lr_scaling="sqrt",
            batch_increase_function=geometric(2.0),
            sampling=Sampling(grow_beyond_maximum=True),
        )
        found = loop.find_bound(device_memory="12MiB" if DEVICE.type == "cpu" else None)
        for _ in range(EPOCHS):
            for rows in loop:
                result = loop.run(rows)
                # ---
                optimizer.step()
                optimizer.zero_grad()
                micro_batches.append(result.micro_batches)
            sizes.append(loop.batch_size)
        if rank == 0:
            print(found.table())
            print("batch sizes:", *sizes)
            print("most micro-batches of a step:", max(micro_batches))
    else:
        for epoch, batch_size in enumerate(plain):
            sampler = DistributedSampler(ROWS, 1, 0, seed=0)
            sampler.set_epoch(epoch)
            for step_rows in torch.tensor(list(sampler)).split(batch_size * ranks):
                optimizer.param_groups[0]["lr"] = (
                    RATE * (len(step_rows) / (BATCH_SIZE * ranks)) ** 0.5
                )
                batch = collate([ROWS[number] for number in step_rows[rank::ranks].tolist()])
                batch = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
                labels = (batch["labels"][:, 1:] != -100).sum()
                labels_of_all = labels.clone()
                dist.all_reduce(labels_of_all)
                (mean_loss(batch) * labels * ranks / labels_of_all).backward()
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        loss = mean_loss({name: tensor.to(DEVICE) for name, tensor in collate(ROWS[:32]).items()})
    if rank == 0:
        print("final loss:", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
