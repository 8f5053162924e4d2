"""A classifier of Lightning and its training on a CPU."""

import lightning
import torch
from support.sharded_model import run_out_of_memory
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from adaptive_batch import distributed

NUM_ROWS = 30


class Module(lightning.LightningModule):
    """A classifier that runs out of memory above `limit` rows, on one rank or on all."""

    def __init__(self, *, dropout=0.0, limit=None, rank=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 4)
        )
        self.limit, self.rank = limit, rank
        self.losses = []
        self.num_batches_logged = 0

    def forward(self, inputs):
        is_here = self.rank in (None, distributed.rank())
        if self.limit and is_here and len(inputs) > self.limit:
            run_out_of_memory()
        return self.layers(inputs)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = cross_entropy(self(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(inputs))
        self.log("rows", float(len(inputs)), reduce_fx="sum", on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(num_rows=NUM_ROWS):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_rows, 8, generator=generator)
    targets = torch.randint(0, 4, (num_rows,), generator=generator)
    return list(zip(inputs, targets, strict=True))


def trainer_in(folder, callbacks, **arguments):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    device = {"accelerator": "cpu", "devices": 1}
    usual = {**device, **dict.fromkeys(quiet, False), "default_root_dir": folder}
    return lightning.Trainer(callbacks=list(callbacks), **usual | arguments)


def trained(module, folder, callbacks=(), **arguments):
    torch.manual_seed(1)
    trainer = trainer_in(folder, callbacks, max_epochs=2, **arguments)
    trainer.fit(module, DataLoader(rows(), batch_size=8, shuffle=True))
    weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    return trainer, weights
