"""The search and the OOM policy on PyTorch's caching allocator."""

from __future__ import annotations

import ctypes

import pytest
import torch
from support.cuda_stack.squeezing import library
from torch import nn
from torch.nn import functional as F

from adaptive_batch import AdaptiveLoop, Sampling

pytestmark = pytest.mark.cuda_stack

CUDA, VOCABULARY, WIDTH, CONTEXT = torch.device("cuda", 0), 32000, 1024, 500 * 2**20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 16, WIDTH // 16)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.down(F.gelu(self.up(x)))


def skewed(rows: int = 3000) -> list[dict[str, list[int]]]:
    drawn = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    lengths = ((0.8 * drawn).exp() * 350).clamp(16, 2048).long().tolist()
    return [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]


def collate(rows):
    longest = max(len(row["tokens"]) for row in rows)
    return {
        k: torch.tensor([row[k] + [0] * (longest - len(row[k])) for row in rows])
        for k in ("tokens", "labels")
    }


class Run:
    def __init__(self, **options) -> None:
        torch.cuda.empty_cache()
        net = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            *(Layer() for _ in range(8)),
            nn.Linear(WIDTH, VOCABULARY),
        )
        net = net.to(CUDA, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(net.parameters())
        self.loop = AdaptiveLoop(
            net,
            self.optimizer,
            skewed(),
            collate=collate,
            mean_loss=lambda b: F.cross_entropy(
                net(b["tokens"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten()
            ),
            batch_size=1,
            **options,
        )

    def steps(self, number: int) -> list[int]:
        """Run `number` steps and return the micro-batch limit of each."""
        amounts: list[int] = []
        while True:
            for rows in self.loop:
                self.loop.run(rows)
                self.optimizer.step()
                self.optimizer.zero_grad()
                amounts.append(self.loop.limit.amount)
                if len(amounts) == number:
                    return amounts


def retries() -> int:
    return torch.cuda.memory_stats(CUDA)["num_alloc_retries"]


@pytest.mark.parametrize(
    "tokens", [None, pytest.param("auto", marks=pytest.mark.slow)], ids=["by rows", "by tokens"]
)
def test_training_at_the_bound_causes_no_retries(tokens):
    run = Run(sampling=Sampling(grow_beyond_maximum=True), micro_batch_tokens=tokens)
    found = run.loop.find_bound(headroom=0.0)
    assert sum(trial.retried or not trial.fits for trial in found.trials) <= 2
    assert found.num_out_of_memory <= 1
    run.loop.batch_size = 2 * found.max_batch_size
    before = retries()
    run.steps(100)
    assert (retries() - before, run.loop.num_out_of_memory) == (0, 0)


@pytest.mark.parametrize(
    "share",
    [pytest.param(0.1, marks=pytest.mark.slow), 0.35, pytest.param(0.6, marks=pytest.mark.slow)],
)
def test_the_limit_recovers_with_the_available_memory(share):
    run = Run(sampling=Sampling(grow_beyond_maximum=True))
    bound = run.loop.find_bound(headroom=0.0).max_batch_size
    run.loop.batch_size = 2 * bound
    stub, total = library(), torch.cuda.mem_get_info(CUDA)[1]
    run.steps(5)
    torch.cuda.empty_cache()
    stub.cudastub_set_reserved(ctypes.c_ulonglong(CONTEXT + int(share * total)))
    try:
        during = run.steps(30)
    finally:
        stub.cudastub_set_reserved(ctypes.c_ulonglong(CONTEXT))
    assert 0.5 * (1 - share) * bound < min(during[-10:]) <= max(during[-10:]) <= bound
    assert (
        share == 0.1 or max(during[-10:]) < bound
    )  # with 10% less memory, steps without the longest rows still fit
    assert max(run.steps(50)) >= 0.9 * bound
