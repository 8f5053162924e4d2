"""Reserved and allocated memory of steps of varying lengths, on PyTorch's caching allocator."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adaptive_batch import AdaptiveStep
from adaptive_batch.data import MicroBatchLimit, micro_batches

pytestmark = pytest.mark.cuda_stack

CUDA, VOCABULARY, WIDTH, TOKENS = torch.device("cuda", 0), 32000, 1024, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Trained:
    """A model and its optimizer, with reset memory statistics."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.net = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            *(Block() for _ in range(6)),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.net.to(CUDA, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    def forward_backward(self, tokens: torch.Tensor, labels: torch.Tensor, share: float) -> None:
        logits = self.net(tokens.to(CUDA))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.to(CUDA).flatten())
        (loss * share).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def drawn_steps() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randint(30, 2000) for _ in range(12)] for _ in range(60)]


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = 1
    return {"tokens": tokens, "labels": labels}


def reserved_over_peak() -> float:
    return torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()


def as_sampled() -> float:
    """Return reserved / allocated peak of micro-batches in a random order."""
    trained = Trained()
    draw = random.Random(1)
    for lengths in drawn_steps():
        pieces = micro_batches(lengths, MicroBatchLimit(TOKENS, "tokens"))
        draw.shuffle(pieces)
        for piece in pieces:
            batch = batch_of([lengths[row] for row in piece.rows])
            trained.forward_backward(batch["tokens"], batch["labels"], 1 / len(pieces))
        trained.step()
    return reserved_over_peak()


def by_adaptive_step() -> float:
    trained = Trained()
    step = AdaptiveStep(
        trained.net,
        lambda part: trained.forward_backward(
            part.batch["tokens"], part.batch["labels"], part.share
        ),
        micro_batch_tokens=TOKENS,
    )
    for lengths in drawn_steps():
        step(batch_of(lengths))
        trained.step()
    return reserved_over_peak()


@pytest.fixture(autouse=True)
def _segments_do_not_expand_by_default(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")


@pytest.fixture
def _segments_expand():
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_segments_expand")
def test_expandable_segments_have_little_fragmentation():
    assert by_adaptive_step() < 1.1


def test_a_step_reserves_less_than_micro_batches_in_a_random_order():
    assert by_adaptive_step() < as_sampled()
