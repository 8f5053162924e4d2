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
ROWS = [
    {"number": number, "x": x}
    for number, x in enumerate(torch.randn(NUM_ROWS, 4, generator=torch.Generator().manual_seed(0)))
]


def train(num_workers, *, resumes_from=None, stops_after=None, saves_to=None):
    """Train with dropout in batches that grow; return the rows of each step, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = AdaptiveBatches(ROWS, 3, batch_increase_function=geometric(1.5))
    loader = DataLoader(
        ROWS, batch_sampler=batches, num_workers=num_workers, generator=torch.Generator()
    )
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(batches)

    def forward_backward(part):
        accelerator.backward(model(part.batch["x"]).square().mean() * part.share)

    step = AdaptiveStep(model, forward_backward, micro_batch_size=2)
    if resumes_from is not None:
        accelerator.load_state(str(resumes_from))
    order = []
    for epoch in range(batches.progress.epoch, NUM_EPOCHS):
        for batch in loader:
            step(batch)
            optimizer.step()
            optimizer.zero_grad()
            batches.step()
            order.append((epoch, batch["number"].tolist()))
            if batches.progress.steps == stops_after:
                accelerator.save_state(str(saves_to))
                return order, None
    return order, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loop_that_stops_in_epoch_1_reads_the_remaining_rows_in_order(tmp_path, num_workers):
    order, weights = train(num_workers)
    steps = [sum(epoch == number for epoch, _ in order) for number in range(NUM_EPOCHS)]
    # Within epoch 1, and at its end.
    for stops_after in (steps[0] + 2, steps[0] + steps[1]):
        folder = tmp_path / str(stops_after)
        begun, _ = train(num_workers, stops_after=stops_after, saves_to=folder)
        rest, resumed = train(num_workers, resumes_from=folder)
        assert begun + rest == order
        assert torch.equal(resumed, weights)
    # Each epoch has each row once, in a different order.
    orders = [[row for epoch, rows in order if epoch == e for row in rows] for e in range(3)]
    assert all(sorted(rows) == list(range(NUM_ROWS)) for rows in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
