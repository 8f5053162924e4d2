"""examples/one_file.py trains as the package does, bit for bit."""

from __future__ import annotations

import ast
import inspect

import one_file
import pytest
import torch
from torch.utils.data import DataLoader

from adaptive_batch import AdaptiveBatches, AdaptiveRate, AdaptiveStep

MOST_STATEMENTS = 150


class FullDevice(one_file.Model):
    """A model whose device runs out of memory with more rows than `most_rows`."""

    most_rows = 10**9

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) > self.most_rows:
            raise torch.OutOfMemoryError(f"more than {self.most_rows} rows")
        return super().forward(tokens)


@pytest.fixture
def new_model():
    if torch.cuda.is_available():
        pytest.fail("this test counts memory on a CPU: set CUDA_VISIBLE_DEVICES=")

    def make() -> FullDevice:
        torch.manual_seed(0)
        return FullDevice()

    return make


def train_with_the_package(model, memory_bytes, most_rows):
    """Yield the same values as the example's `train`, from the package's objects."""
    rows = one_file.ROWS
    optimizer = torch.optim.AdamW(model.parameters(), lr=one_file.LEARNING_RATE)

    def forward_backward(part):
        loss = one_file.mean_loss(model, part.batch) * part.share
        loss.backward()
        return loss.detach()

    step = AdaptiveStep(model, forward_backward, micro_batch_size="auto")
    longest = max(rows, key=len)
    step.find_bound(
        optimizer,
        lambda number: one_file.collate([longest] * number),
        device_memory=memory_bytes,
        headroom=0.0,
        maximum=len(rows),
    )
    batches = AdaptiveBatches(
        rows, one_file.BATCH_SIZE, batch_increase_function=one_file.rows_to_add, maximum=step.sizer
    )
    loader = DataLoader(
        rows,
        batch_sampler=batches,
        collate_fn=one_file.collate,
        # A loader draws a seed in each epoch, by default from the generator of dropout.
        generator=torch.Generator(),
    )
    rate = AdaptiveRate(optimizer, lr_scaling="sqrt", reference_batch_size=one_file.BATCH_SIZE)
    for epoch in range(one_file.EPOCHS):
        model.most_rows = most_rows.get(epoch, model.most_rows)
        steps = []
        for batch in loader:
            number = len(batch["tokens"])
            applied = rate.set(rows=number)
            steps.append((number, applied["lr"], float(sum(step(batch)))))
            optimizer.step()
            optimizer.zero_grad()
            batches.step()
        yield steps


def train_with_one_file(model, memory_bytes, most_rows):
    with one_file.LimitedMemory(memory_bytes, model) as memory:
        for epoch, steps in enumerate(one_file.train(model)):
            # The package does not limit a CPU's memory in training.
            memory.limit_bytes = 10**12
            yield steps
            model.most_rows = most_rows.get(epoch + 1, model.most_rows)


@pytest.mark.parametrize(
    ("memory", "most_rows"),
    [
        pytest.param("7MiB", {}, id="each batch is split"),
        pytest.param("32MiB", {2: 9, 3: 10**9}, id="the batch grows, and steps are repeated"),
    ],
)
def test_losses_and_weights_equal_those_of_the_package_bit_for_bit(new_model, memory, most_rows):
    memory_bytes = int(memory.removesuffix("MiB")) * 2**20
    ours = new_model()
    steps = list(train_with_one_file(ours, memory_bytes, most_rows))
    packages = new_model()
    assert steps == list(train_with_the_package(packages, memory_bytes, most_rows))
    assert len(steps) == one_file.EPOCHS
    assert steps[-1][-1][-1] < 0.7 * steps[0][0][-1]
    for (name, weight), other in zip(ours.named_parameters(), packages.parameters(), strict=True):
        assert torch.equal(weight, other), name


def test_the_file_is_short_and_does_not_import_the_package():
    tree = ast.parse(inspect.getsource(one_file))
    docstrings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    assert len(statements) - len(docstrings) <= MOST_STATEMENTS
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [line for line in map(ast.unparse, imports) if "adaptive_batch" in line]
