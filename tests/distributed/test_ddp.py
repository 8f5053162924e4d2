"""Under DDP, a batch in parts trains the same as DDP alone, also after an OOM of one rank."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.loops import ROWS as ROWS_OF_LOOP
from support.loops import train as train_loop
from support.loops import training
from support.processes import run, run_on_ranks
from support.sharded_model import Decoder, relative_error, run_out_of_memory
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from adaptive_batch import distributed, find_max_batch_size
from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.training import AdaptiveStep, Part, StepOptions

STEPS = 4
# Rows of a rank's batch.
ROWS = (9, 6)
OVERLAPS = StepOptions(overlap_reduction=True)


class Net(nn.Module):
    """Layers with running statistics, a layer that only rank 0 uses, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 2)
        self.of_rank_zero = nn.Parameter(torch.zeros(2))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(torch.tanh(self.norm(self.first(inputs))))
        if distributed.rank() == 0:
            outputs = outputs + self.of_rank_zero
        return outputs


def replicated(*, statistics: bool = False, **options: Any) -> DDP:
    net = Net().double()
    if not statistics:
        net.norm = nn.LayerNorm(16).double()
    return DDP(net, find_unused_parameters=True, **options)


def batch_of(step: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + distributed.rank())
    inputs = torch.randn(num_rows, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(num_rows, 2, generator=generator, dtype=torch.float64)


class Script:
    """A `forward_backward` function with a maximum number of rows on each rank."""

    def __init__(self, model: DDP) -> None:
        self.model = model
        self.most_rows = [10**9, 10**9]
        self.parts: list[int] = []

    def __call__(self, part: Part) -> float:
        if not part.is_trial:
            self.parts.append(part.num_rows)
        inputs, targets = part.batch
        loss = mse_loss(self.model(inputs), targets) * part.share
        if part.num_rows > self.most_rows[distributed.rank()]:
            run_out_of_memory()
        loss.backward()
        return loss.item()


def state_of(model: DDP) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}


def train(
    model: DDP,
    script: Script | None = None,
    *,
    room: tuple[list[int], ...] = (),
    accumulation: int = 1,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train a few steps with AdaptiveStep, or with DDP alone without a script; return the weights.

    Args:
        model: trained model.
        script: function of a part; None for DDP alone.
        room: rows that fit on each rank in each step.
        accumulation: batches of a step.
        options: options of the adaptive step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_of = None if script is None else AdaptiveStep(model, script, **options)
    for step in range(STEPS):
        if script is not None and room:
            script.most_rows = room[step % len(room)]
        for number in range(accumulation):
            inputs, targets = batch_of(step * accumulation + number, ROWS[distributed.rank()])
            if step_of is None:
                mse_loss(model(inputs), targets).backward()
            else:
                step_of((inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of weights from those of DDP and of the other rank."""
    pairs = [(ours[name], theirs[name]) for name in theirs]
    # Like DDP, the next step copies the running statistics of rank 0.
    learned = {name: ours[name].tolist() for name in ours if "running" not in name}
    first, second = distributed.all_gather(learned)
    assert first == second
    return max((one.double() - other.double()).abs().max().item() for one, other in pairs)


PLENTY = [10**9, 10**9]


def compared(
    room: tuple[list[int], ...], accumulation: int, options: dict[str, Any]
) -> tuple[float, list[int]]:
    expected = train(replicated(**options), accumulation=accumulation)
    model = replicated(**options)
    script = Script(model)
    weights = train(model, script, room=room, accumulation=accumulation)
    return largest_difference(weights, expected), script.parts


@pytest.mark.parametrize(
    ("room", "accumulation", "options"),
    [
        ((PLENTY,), 1, {}),
        ((PLENTY,), 1, {"statistics": True}),
        ((PLENTY, [2, 10**9]), 2, {"gradient_as_bucket_view": True}),
    ],
)
def test_a_batch_in_parts_trains_as_ddp_alone(room, accumulation, options):
    for difference, parts in run_on_ranks(compared, 2, room, accumulation, options):
        assert difference < 1e-12
        assert (len(parts) == STEPS) == (room == (PLENTY,))


class FailingOnce(Script):
    """A script that runs out of memory once on rank 1."""

    fails_at = 0

    def __call__(self, part: Part) -> float:
        is_due = not part.is_trial and len(self.parts) == self.fails_at
        if is_due and distributed.rank() == 1:
            self.parts.append(0)
            run_out_of_memory()
        return super().__call__(part)


def overlapped(fails_at: int) -> tuple[float, list[int]]:
    expected = train(replicated())
    model = replicated()
    script = FailingOnce(model)
    script.fails_at = fails_at
    weights = train(model, script, micro_batch_size=2, options=OVERLAPS)
    return largest_difference(weights, expected), script.parts


@pytest.mark.parametrize("fails_at", [10**9, 0, 4])
def test_the_last_part_may_overlap_with_its_reduction(fails_at):
    for error, parts in run_on_ranks(overlapped, 2, fails_at):
        assert error < 1e-12
        # Rank 1 has three parts and a dummy.
        assert len(parts) >= 4 * STEPS


def test_a_rank_that_runs_out_of_memory_in_an_overlapped_last_part_is_lost():
    _, second = run(overlapped, 3, ranks=2, joins_group=True)
    assert second.error is not None
    assert "RankLostError" in second.error


def many_failures(num_runs: int) -> float:
    """Run out of memory in random parts on random ranks, in several runs."""
    # Each recovery collects garbage; frozen imported objects are not traversed.
    gc.freeze()
    expected = train(replicated())
    differences = []
    for seed in range(num_runs):
        chance = random.Random(seed)
        room = tuple([chance.choice([1, 2, 3, 5, 99]) for _ in range(2)] for _ in range(STEPS))
        model = replicated()
        differences.append(largest_difference(train(model, Script(model), room=room), expected))
    return max(differences)


@pytest.mark.parametrize("num_runs", [25, pytest.param(100, marks=pytest.mark.nightly)])
def test_no_rank_waits_for_one_that_ran_out_of_memory(num_runs):
    assert max(run_on_ranks(many_failures, 2, num_runs)) < 1e-12


def refusals_of(*acts: Callable[[], object]) -> list[str]:
    """Return the message of each refusal."""
    messages = []
    for act in acts:
        with pytest.raises((SettingError, DoesNotFitError)) as refusal:
            act()
        messages.append(str(refusal.value))
    return messages


def refused() -> list[str]:
    net = Net().double()
    model = nn.ModuleDict({"ddp": DDP(net), "head": nn.Linear(2, 2)})
    script = Script(replicated())
    script.most_rows = [10**9, 0]
    return refusals_of(
        lambda: AdaptiveStep(model, print),
        lambda: AdaptiveStep(net, print),
        lambda: AdaptiveStep(script.model, script)(batch_of(0, 4)),
    )


def test_parameters_outside_of_ddp_are_refused():
    first, second = run_on_ranks(refused, 2)
    assert first == second
    assert "DDP leaves out 2 parameters (head.weight, head.bias), so each rank would" in first[0]
    assert "several ranks need a DDP module" in first[1]
    assert "ran out of memory on rank 1, alone in its micro-batch" in first[2]


class Words(nn.Module):
    """Embeddings of which both ranks use one, rank 0 another, and rank 1 all rows of a third."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(12, 2, sparse=sparse)
        self.of_rank_zero = nn.Embedding(12, 2, sparse=sparse)
        self.mixed = nn.Embedding(12, 2, sparse=sparse)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = inputs.abs().argmax(dim=1)
        outputs: torch.Tensor = self.words(words)
        if distributed.rank() == 0:
            return outputs + self.of_rank_zero(words) + self.mixed(words)
        return outputs + self.mixed.weight.sum(dim=0)


def replicated_words(*, sparse: bool) -> DDP:
    return DDP(Words(sparse=sparse).double(), find_unused_parameters=True)


def sparse_and_dense(most_rows: int) -> float:
    expected = train(replicated_words(sparse=False), accumulation=2)
    model = replicated_words(sparse=True)
    weights = train(model, Script(model), room=([10**9, most_rows],), accumulation=2)
    return largest_difference(weights, expected)


@pytest.mark.parametrize("most_rows", [10**9, 2])
def test_sparse_gradients_are_reduced_as_dense_ones(most_rows):
    assert max(run_on_ranks(sparse_and_dense, 2, most_rows)) < 1e-12


def refusals_of_hooks() -> list[str]:
    hooked = replicated()
    hooked.register_comm_hook(None, fp16_compress_hook)
    later = replicated()
    step_of = AdaptiveStep(later, Script(later))
    later.register_comm_hook(None, fp16_compress_hook)
    half = DDP(nn.Linear(6, 2))
    # DDP(mixed_precision=...) sets this attribute, but its constructor needs a GPU.
    half.mixed_precision = _MixedPrecision(param_dtype=torch.float16)
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.1)

    return refusals_of(
        lambda: AdaptiveStep(hooked, Script(hooked)),
        lambda: training(model=hooked),
        lambda: find_max_batch_size(hooked, optimizer, Script(hooked), lambda n: batch_of(0, n)),
        lambda: step_of(batch_of(0, 4)),
        lambda: AdaptiveStep(half, Script(half), options=OVERLAPS),
    )


def test_communication_hooks_and_mixed_precision_of_ddp_are_refused():
    for *hooks, half in run_on_ranks(refusals_of_hooks, 2):
        for message in hooks:
            assert message.startswith("register_comm_hook='fp16_compress_hook': ")
            assert "give options=StepOptions(overlap_reduction=True)" in message
        assert "use torch.autocast instead" in half


def trained_with_hook() -> float:
    """Return the largest difference from the weights of DDP with the same hook."""
    plain, whole, split = replicated(), replicated(), replicated()
    for model in (whole, split):
        model.register_comm_hook(None, fp16_compress_hook)
    exact, expected = train(plain), train(whole)
    found = train(split, Script(split), micro_batch_size=2, options=OVERLAPS)
    rounding = max((expected[name] - exact[name]).abs().max().item() for name in exact)
    assert rounding > 1e-6, "the hook ran"
    return max((expected[name] - found[name]).abs().max().item() for name in exact)


def test_a_communication_hook_runs_where_the_reduction_overlaps():
    assert max(run_on_ranks(trained_with_hook, 2)) < 1e-6


def searched() -> tuple[int, int, bool]:
    model = replicated()
    optimizer = torch.optim.AdamW(model.parameters())
    script = Script(model)
    script.most_rows = [13, 7]
    before = state_of(model)

    def forward_backward(batch: Any) -> None:
        script(Part(batch, len(batch[0])))

    found = find_max_batch_size(
        model, optimizer, forward_backward, lambda n: batch_of(0, n), maximum=32
    )
    of_step = AdaptiveStep(model, script).find_bound(
        optimizer, lambda n: batch_of(0, n), maximum=32
    )
    after = state_of(model)
    untouched = all(torch.equal(before[name], after[name]) for name in before)
    return found.max_batch_size, of_step.max_batch_size, untouched


def test_the_bound_is_that_of_the_smallest_rank_and_training_is_untouched():
    assert run_on_ranks(searched, 2) == [(7, 7, True)] * 2


def looped(batch_size: int, num_epochs: int, state: Any = None) -> tuple[Any, list[float]]:
    """Train a loop from a state; return its last state, and the loss of each step."""
    net = Decoder()
    model = DDP(net) if distributed.world_size() > 1 else net
    sgd = {"rows": ROWS_OF_LOOP[:26], "optimizer": torch.optim.SGD}
    one = training(model=model, batch_size=batch_size, micro_batch_size=2, **sgd)
    if state is not None:
        net.load_state_dict(state["model"])
        one.loop.load_state_dict(state["loop"])
    losses = [step.loss for step in train_loop(one, epochs=num_epochs)]
    return {"model": net.state_dict(), "loop": one.loop.state_dict()}, losses


def test_a_loop_trains_the_same_on_one_and_two_ranks_and_resumes_on_either():
    state, losses = looped(8, 2)
    for of_ranks, losses_of_ranks in run_on_ranks(looped, 2, 4, 2):
        assert relative_error(of_ranks["model"], state["model"]) < 1e-10
        assert losses_of_ranks == pytest.approx(losses)
    longer, _ = looped(8, 3)
    for of_ranks, _ in run_on_ranks(looped, 2, 8, 3, state):
        assert relative_error(of_ranks["model"], longer["model"]) < 1e-10


def split_wrong_loss() -> None:
    """Split a batch whose loss draws numbers and has class weights; rank 1 has no labels."""
    net = DDP(nn.Linear(6, 3))
    weight = torch.tensor([1.0, 5.0, 20.0])

    def forward_backward(part: Part) -> None:
        noise = torch.randn_like(part.batch["x"])
        losses = cross_entropy(net(part.batch["x"] + noise), part.batch["labels"], weight=weight)
        (losses * part.share).backward()

    labels = torch.arange(8) % 3 if distributed.rank() == 0 else torch.full((8,), -100)
    step = AdaptiveStep(net, forward_backward, micro_batch_size=2)
    with pytest.raises(SettingError, match=r"have the shares .* would fit;.* give num_labels="):
        step({"x": torch.randn(8, 6), "labels": labels})


def test_a_wrong_loss_that_draws_numbers_is_refused_if_a_rank_has_no_labels():
    run_on_ranks(split_wrong_loss, 2)
