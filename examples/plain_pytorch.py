"""A small language model trained on the standard library's docstrings, in a plain PyTorch loop.

python examples/plain_pytorch.py                     with adaptive_batch
python examples/plain_pytorch.py --plain 16 32 64    without, at the sizes that the former printed
"""

import argparse
import inspect
import json
import random
import statistics
import textwrap

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

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
EPOCHS, BATCH_SIZE, RATE = 3, 16, 3e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(64, width)
        self.layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embed(tokens) + self.position(torch.arange(length, device=tokens.device))
        return self.head(self.layer(hidden, src_mask=mask, is_causal=True))


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    tokens = [torch.tensor(row["tokens"]) for row in rows]
    return {"tokens": pad_sequence(tokens, True, 0), "labels": pad_sequence(tokens, True, -100)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", type=int, nargs=EPOCHS, help="batch size of each epoch")
    plain = parser.parse_args().plain
    torch.manual_seed(0)
    model = Model().to(DEVICE)
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
        found = loop.find_bound(device_memory="24MiB" if DEVICE.type == "cpu" else None)
        for _ in range(EPOCHS):
            for rows in loop:
                result = loop.run(rows)
                # ---
                optimizer.step()
                optimizer.zero_grad()
                micro_batches.append(result.micro_batches)
            sizes.append(loop.batch_size)
        print(found.table())
        print("batch sizes:", *sizes)
        print("most micro-batches of a step:", max(micro_batches))
    else:
        for epoch, batch_size in enumerate(plain):
            sampler = DistributedSampler(ROWS, 1, 0, seed=0)
            sampler.set_epoch(epoch)
            for rows in DataLoader(ROWS, batch_size, sampler=sampler, collate_fn=list):
                optimizer.param_groups[0]["lr"] = RATE * (len(rows) / BATCH_SIZE) ** 0.5
                mean_loss(
                    {name: tensor.to(DEVICE) for name, tensor in collate(rows).items()}
                ).backward()
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        print(
            "final loss:",
            mean_loss(
                {name: tensor.to(DEVICE) for name, tensor in collate(ROWS[:32]).items()}
            ).item(),
        )


if __name__ == "__main__":
    main()
