"""Runs under accelerate that stop within epoch 1 resume with the bits of an uninterrupted run."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from adaptive_batch import AdaptiveBatches, AdaptiveStep, geometric

NUM_ROWS = 20
NUM_EPOCHS = 3


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.values = torch.randn(NUM_ROWS, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, number):
        return {"number": number, "x": self.values[number]}


class Run:
    """A loop of three epochs with dropout under accelerate, in batches that grow."""

    def __init__(self, *, num_workers):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.batches = AdaptiveBatches(Rows(), 3, batch_increase_function=geometric(1.5))
        loader = DataLoader(
            Rows(),
            batch_sampler=self.batches,
            num_workers=num_workers,
            generator=torch.Generator(),
        )
        self.accelerator = Accelerator(cpu=True)
        model, optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        self.accelerator.register_for_checkpointing(self.batches)
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self.step = AdaptiveStep(model, self.forward_backward, micro_batch_size=2)
        self.order = []

    def forward_backward(self, part):
        loss = self.model(part.batch["x"]).square().mean() * part.share
        self.accelerator.backward(loss)

    def train(self, *, stops_after=None):
        for epoch in range(self.batches.progress.epoch, NUM_EPOCHS):
            for batch in self.loader:
                self.step(batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.batches.step()
                self.order.append((epoch, batch["number"].tolist()))
                if self.batches.progress.steps == stops_after:
                    return

    def weights(self):
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loop_that_stops_in_epoch_1_reads_the_rows_that_are_left_in_their_order(
    tmp_path, num_workers
):
    whole = Run(num_workers=num_workers)
    whole.train()
    steps = [sum(epoch == number for epoch, _ in whole.order) for number in range(NUM_EPOCHS)]
    # In the midst of epoch 1, and at its end.
    for stops_after in (steps[0] + 2, steps[0] + steps[1]):
        folder = tmp_path / str(stops_after)
        stopped = Run(num_workers=num_workers)
        stopped.train(stops_after=stops_after)
        stopped.accelerator.save_state(str(folder))
        resumed = Run(num_workers=num_workers)
        resumed.accelerator.load_state(str(folder))
        resumed.train()
        assert stopped.order + resumed.order == whole.order
        assert torch.equal(resumed.weights(), whole.weights())
    # Each epoch has each row once, in a different order.
    orders = []
    for number in range(NUM_EPOCHS):
        rows = [row for epoch, batch in whole.order for row in batch if epoch == number]
        assert sorted(rows) == list(range(NUM_ROWS))
        orders.append(rows)
    assert orders[0] != orders[1] != orders[2] != orders[0]
