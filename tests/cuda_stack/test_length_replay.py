"""Replayed steps of rows of real lengths reserve what PyTorch's own caching allocator does."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from adaptive_batch import AdaptiveStep
from adaptive_batch._torch import disable_current_modes
from adaptive_batch.data import MicroBatchLayout, MicroBatchLimit, micro_batches
from adaptive_batch.estimate import (
    AllocatorSettings,
    CudaKernels,
    FakeDevice,
    FakeStep,
    PlannedSteps,
    StepReplay,
    TracedShapes,
    batches_in_order,
    length_replay,
    packed_row_lengths,
    step_logs,
)
from adaptive_batch.estimate.length_replay import MOST_TRACED_WHOLE
from adaptive_batch.memory import AllocatorCache, device_memory
from adaptive_batch.training import pack_rows, rows_apart

pytestmark = pytest.mark.cuda_stack

CUDA, VOCABULARY, WIDTH, BATCH = torch.device("cuda", 0), 32000, 1024, 8
STEPS = 20
# Micro-batches in the order of their rows fragment the cache; those by tokens come largest first.
IN_ORDER = MicroBatchLimit(2)
LARGEST_FIRST = MicroBatchLimit(4096, "tokens")
PACKED = MicroBatchLayout(kind="packed")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 16, 64)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.down(F.gelu(self.up(x)))


def made() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block() for _ in range(4)),
        nn.Linear(WIDTH, VOCABULARY),
    ).to(torch.bfloat16)


def batches(*, grows: bool = False) -> list[list[int]]:
    """The lengths of the rows of each step."""
    draw = random.Random(0)
    lengths = [draw.randint(30, 2000) for _ in range(BATCH * STEPS)]
    if grows:
        lengths.sort()
    return [*batches_in_order(lengths, BATCH, num_steps=STEPS)]


def planned(
    limit: MicroBatchLimit, *, grows: bool = False, layout: MicroBatchLayout | None = None
) -> PlannedSteps:
    return PlannedSteps.of(
        batches(grows=grows), limit, lambda batch: micro_batches(batch, limit, layout)
    )


def batch_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.ones(rows, length, dtype=torch.long) for name in ("tokens", "labels")}


def packed_batch_of(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    rows = [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]
    return pack_rows(rows, ignore_index=-100)


def forward_backward(net: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten()).backward()


@pytest.fixture(autouse=True)
def whole_device():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def on_cuda(
    steps: PlannedSteps, *, cache: AllocatorCache | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the peak that each step allocates, and what is reserved after it."""
    net = made().to(CUDA)
    optimizer = torch.optim.AdamW(net.parameters())
    for micro, size in zip(steps.steps, steps.largest, strict=True):
        if cache:
            cache.begin_step([size])
        torch.cuda.reset_peak_memory_stats()
        for rows, length in micro:
            batch = batch_of(rows, length)
            forward_backward(net, batch["tokens"].to(CUDA), batch["labels"].to(CUDA))
        if cache:
            cache.end_step()
        optimizer.step()
        optimizer.zero_grad()
        yield torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()


def packed_on_cuda(limit: MicroBatchLimit) -> Iterator[tuple[int, int]]:
    """Yield the same of packed rows, each of its own length."""
    net = made().to(CUDA)
    optimizer = torch.optim.AdamW(net.parameters())
    for lengths in batches():
        torch.cuda.reset_peak_memory_stats()
        for piece in micro_batches(lengths, limit, PACKED):
            batch = packed_batch_of(piece.own_lengths)
            with rows_apart(piece.own_lengths):
                forward_backward(net, batch["tokens"].to(CUDA), batch["labels"].to(CUDA))
        optimizer.step()
        optimizer.zero_grad()
        yield torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()


def logs_of(steps: PlannedSteps, *, most_traced: int) -> list[Sequence[int]]:
    device = FakeDevice(CudaKernels.of_this_device())
    with torch.device("meta"):
        net = made()
    device.move(net)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)

    def run(rows: int, length: int) -> None:
        batch = batch_of(rows, length)
        device.batch(batch)
        forward_backward(net, batch["tokens"], batch["labels"])

    def run_packed(rows: int, tokens: int) -> None:
        lengths = packed_row_lengths(rows, tokens)
        with disable_current_modes():
            whole = packed_batch_of(lengths)
        batch = {name: whole[name] for name in ("tokens", "labels")}
        device.batch(batch)
        with rows_apart(lengths):
            forward_backward(net, batch["tokens"], batch["labels"])

    step = FakeStep(
        model=net,
        optimizer=optimizer,
        forward_backward=lambda rows: run(rows, 512),
        step=optimizer.step,
        accumulates=True,
        device=device,
    )
    all_shapes = [shape for some in steps.steps for shape in some]
    shapes = TracedShapes(
        step,
        run_packed if steps.is_packed else run,
        all_shapes,
        most_traced=most_traced,
        is_packed=steps.is_packed,
    )
    return list(step_logs(step, shapes, steps.steps))


def replayed(steps: PlannedSteps, *, most_traced: int) -> list[tuple[int, int]]:
    replay = StepReplay(
        logs_of(steps, most_traced=most_traced),
        budget_bytes=2**50,
        settings=AllocatorSettings.from_environment(),
    )
    return [tuple(memory) for memory in replay.steps]


def check_replay(steps, expected):
    """Traced shapes are those of the device to the byte, and interpolated ones nearly."""
    assert replayed(steps, most_traced=10_000) == expected
    interpolated = replayed(steps, most_traced=MOST_TRACED_WHOLE)
    for memory, real in zip(interpolated, expected, strict=True):
        assert memory == pytest.approx(real, rel=1e-3)


@pytest.mark.parametrize(
    ("limit", "grows"),
    [
        pytest.param(IN_ORDER, False, id="in order"),
        pytest.param(IN_ORDER, True, id="in order, growing", marks=pytest.mark.slow),
        pytest.param(LARGEST_FIRST, False, id="largest first", marks=pytest.mark.slow),
        pytest.param(LARGEST_FIRST, True, id="largest first, growing"),
    ],
)
def test_each_step_allocates_and_reserves_what_it_does_on_cuda(limit, grows):
    steps = planned(limit, grows=grows)
    check_replay(steps, list(on_cuda(steps)))


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(IN_ORDER, id="in order"),
        pytest.param(LARGEST_FIRST, id="largest first", marks=pytest.mark.slow),
    ],
)
def test_each_step_of_packed_rows_allocates_and_reserves_what_it_does_on_cuda(limit):
    steps = planned(limit, layout=PACKED)
    check_replay(steps, list(packed_on_cuda(limit)))


def test_steps_whose_cache_is_kept_whole_reserve_and_end_as_they_do_on_cuda():
    steps = planned(LARGEST_FIRST, grows=False)
    logs = logs_of(steps, most_traced=MOST_TRACED_WHOLE)
    settings = AllocatorSettings.from_environment()
    sizes = steps.largest
    expected = list(on_cuda(steps, cache=AllocatorCache(device_memory(CUDA))))
    replay = StepReplay(logs, budget_bytes=2**50, settings=settings, largest=sizes)
    for memory, real in zip(replay.steps, expected, strict=True):
        assert memory == pytest.approx(real, rel=1e-3)
    peak = replay.memory.allocated_bytes
    _, total = torch.cuda.mem_get_info()
    ends = []
    for share in (0.98, 1.04, 1.1, 1.3):
        budget = int(share * peak)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(budget / total)
        done = 0
        try:
            for _ in on_cuda(steps, cache=AllocatorCache(device_memory(CUDA))):
                done += 1
        except torch.OutOfMemoryError:
            ends.append(done + 1)
        else:
            ends.append(None)
        replay = StepReplay(logs, budget_bytes=budget, settings=settings, largest=sizes)
        assert replay.failed_step == ends[-1]
    assert ends[0] is not None
    assert ends[-1] is None


def test_steps_of_a_script_are_replayed_with_the_checks_of_their_splits(monkeypatch):
    replays = []

    class KeptReplay(StepReplay):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            replays.append(self)

    monkeypatch.setattr(length_replay, "StepReplay", KeptReplay)
    net = made().to(CUDA)
    optimizer = torch.optim.AdamW(net.parameters())

    def forward_backward_of(part):
        tokens = part.batch["tokens"].to(CUDA)
        labels = part.batch["labels"].cuda()
        loss = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten()) * part.share
        loss.backward()
        return loss.detach()

    step = AdaptiveStep(
        net,
        forward_backward_of,
        micro_batch_tokens=LARGEST_FIRST.amount,
        num_labels=lambda batch: (batch["labels"] != -100).sum(),
    )
    draw = random.Random(1)
    lengths = [draw.randint(30, 2000) for _ in range(BATCH * 5)]
    name = torch.cuda.get_device_name()
    estimate = step.estimate(
        optimizer, lambda rows: batch_of(rows, 2000), name, lengths=lengths, batch_size=BATCH
    )
    reserved_bytes = []
    for batch in batches_in_order(lengths, BATCH, num_steps=10):
        tokens = torch.ones(BATCH, max(batch), dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for row, length in enumerate(batch):
            labels[row, :length] = 1
        step({"tokens": tokens, "labels": labels})
        optimizer.step()
        optimizer.zero_grad()
        reserved_bytes.append(torch.cuda.memory_reserved())
    replay = replays[0]
    assert [step.reserved_bytes for step in replay.steps[:10]] == reserved_bytes
    memory = estimate.devices[0].replay.memory
    assert memory.allocated_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=2e-3)
    assert memory.num_retries == 0
