"""A Lightning module with automatic optimization: clipping, accumulation, a schedule, dropout."""

import json
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Bytes(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 256)
        )

    def training_step(self, batch):
        loss = cross_entropy(self.layers(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


lightning.seed_everything(0)
lines = Path("texts.jsonl").read_text().splitlines()
texts = [json.loads(line)["text"].encode()[:32] for line in lines]
rows = [torch.tensor(list(text.ljust(32))) for text in texts]
trainer = lightning.Trainer(
    max_steps=6,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Bytes(), DataLoader(rows, batch_size=6, shuffle=True))
