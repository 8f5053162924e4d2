"""A small language model trained on the standard library's docstrings with Lightning, by manual
optimization.

python examples/lightning_module.py                     with adaptive_batch
python examples/lightning_module.py --plain 8 16 27    without, at the sizes that the former printed
"""

import argparse
import inspect
import json
import random
import statistics
import tempfile
import textwrap

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

# --- adaptive_batch
from adaptive_batch import AdaptiveLoop

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


def grow(epoch: int, batch_size: int) -> int:
    """Return the rows to add to the batch when an epoch starts; the bound caps the result."""
    return 0 if epoch == 0 else batch_size


class Model(lightning.LightningModule):
    """A recurrent model over bytes.

    Args:
        plain: the batch size of each epoch, to train without adaptive_batch; None for with.
    """

    def __init__(self, plain: list[int] | None, width: int = 64) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.plain = plain
        self.embed, self.layer, self.head = (
            nn.Embedding(256, width),
            nn.GRU(width, width),
            nn.Linear(width, 256),
        )
        self.sizes: list[int] = []
        self.loop = None

    def mean_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden, _ = self.layer(self.embed(batch["tokens"].T))
        return cross_entropy(self.head(hidden)[:-1].flatten(0, 1), batch["labels"].T[1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)

    def train_dataloader(self):
        if self.plain is not None:
            sampler = DistributedSampler(ROWS, 1, 0, seed=0)
            sampler.set_epoch(self.current_epoch)
            return DataLoader(
                ROWS, self.plain[self.current_epoch], sampler=sampler, collate_fn=list
            )
        # --- adaptive_batch
        if self.loop is None:
            self.loop = AdaptiveLoop(
                self,
                self.optimizers().optimizer,
                ROWS,
                collate=collate,
                mean_loss=self.mean_loss,
                lr_scaling="linear",
                batch_size=BATCH_SIZE,
                batch_increase_function=grow,
            )
            self.found = self.loop.find_bound(
                device_memory="10MiB" if self.device.type == "cpu" else None
            )
        return self.loop
        # ---

    def transfer_batch_to_device(
        self, batch: list[dict], device: torch.device, dataloader_idx: int
    ) -> list[dict]:
        return batch  # rows stay on the host until they are collated

    def training_step(self, rows: list[dict], batch_idx: int) -> None:
        optimizer = self.optimizers()
        if self.plain is None:
            # --- adaptive_batch
            loss = self.loop.run(rows).loss
            # ---
        else:
            optimizer.param_groups[0]["lr"] = RATE * len(rows) / BATCH_SIZE
            loss = self.mean_loss(
                {name: tensor.to(self.device) for name, tensor in collate(rows).items()}
            )
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss, prog_bar=True, batch_size=len(rows))

    def on_train_epoch_end(self) -> None:
        self.sizes.append(
            self.loop.batch_size if self.plain is None else self.plain[self.current_epoch]
        )


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    tokens = [torch.tensor(row["tokens"]) for row in rows]
    return {"tokens": pad_sequence(tokens, True, 0), "labels": pad_sequence(tokens, True, -100)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", type=int, nargs=EPOCHS, help="batch size of each epoch")
    lightning.seed_everything(0)
    model = Model(parser.parse_args().plain)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        reload_dataloaders_every_n_epochs=1,
        devices=1,
        default_root_dir=tempfile.mkdtemp(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    if model.plain is None:
        print(model.found.table())
    print("batch sizes:", *model.sizes)
    print("optimizer steps:", trainer.global_step)
    with torch.no_grad():
        print("final loss:", model.mean_loss(collate(ROWS[:32])).item())


if __name__ == "__main__":
    main()
