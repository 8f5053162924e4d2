"""What is alive at an operation is attributed to the module and the operation that made it, in
forward and in backward.
"""

from __future__ import annotations

import pytest
import torch
from support.fake_steps import LENGTH, WIDTH, WORDS, Decoder, fake_step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from adaptive_batch.estimate import CompiledParts, FakeDevice
from adaptive_batch.estimate.tracker import AttributedTracker, ModuleNames, OpSite
from adaptive_batch.memory import MemoryTracker

ROWS = 4


def peak_of(trace):
    live = list(trace.trace.live_bytes)
    return max(live), live.index(max(live))


def explained(**options):
    """The step, the number of its highest operation, and what was alive there."""
    step = fake_step(**options)
    _, operation = peak_of(step.trace(ROWS))
    trace = step.trace(ROWS, explain=(operation,))
    return step, trace, operation, trace.explained[operation]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
def test_places_add_up_to_the_peak(checkpointing, accumulates):
    step, trace, operation, held = explained(checkpointing=checkpointing, accumulates=accumulates)
    assert (
        sum(size for _, size in held.by_site) + step.resident.total
        == trace.trace.live_bytes[operation]
    )
    sizes = [size for _, size in held.by_site]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) > 0


def test_places_add_up_at_every_operation():
    step = fake_step(checkpointing=True)
    every = range(len(step.trace(ROWS).trace.live_bytes))
    trace = step.trace(ROWS, explain=every)
    assert list(trace.explained) == list(every)
    for operation, held in trace.explained.items():
        assert (
            sum(size for _, size in held.by_site) + step.resident.total
            == trace.trace.live_bytes[operation]
        )


def test_explaining_changes_no_byte():
    step = fake_step(checkpointing=True)
    assert step.trace(ROWS).trace == step.trace(ROWS, explain=(0, 7)).trace


def test_the_logits_belong_to_no_layer_and_the_layers_to_themselves():
    _, _, _, held = explained()
    made = dict(held.by_site)
    logits = ROWS * LENGTH * WORDS * 4
    assert max(made.values()) == made[held.by_site[0][0]] == logits
    assert (
        held.by_site[0][0].module == ""
    )  # the embedding's weights are multiplied by no module of theirs
    mlp = {where.module for where in made if ".mlp" in where.module}
    assert {"layers.0.mlp.0", "layers.1.mlp.0", "layers.2.mlp.0"} <= mlp
    widened = [where for where, size in held.by_site if size == ROWS * LENGTH * 3 * WIDTH * 4]
    assert {where.module for where in widened} >= {
        "layers.0.mlp.0",
        "layers.2.mlp.1",
        "layers.1.qkv",
    }
    assert not any(where.backward for where in widened)


def test_checkpointing_leaves_what_layers_are_given_and_what_one_of_them_recomputes():
    step = fake_step(checkpointing=True)
    number = len(step.trace(ROWS).trace.live_bytes)
    trace = step.trace(ROWS, explain=range(number))
    recomputed, ahead = set(), set()
    for held in trace.explained.values():
        widened = [
            where
            for where, _ in held.by_site
            if ".mlp.0" in where.module and where.operation == "addmm"
        ]
        layers = frozenset(where.module.split(".")[1] for where in widened)
        (recomputed if held.site.backward else ahead).add(layers)
    one_at_a_time = {frozenset(), frozenset("0"), frozenset("1"), frozenset("2")}
    assert ahead == recomputed == one_at_a_time


def test_forward_is_before_backward_and_each_operation_has_its_module():
    step = fake_step()
    number = len(step.trace(ROWS).trace.live_bytes)
    wheres = [held.site for held in step.trace(ROWS, explain=range(number)).explained.values()]
    flags = [where.backward for where in wheres]
    assert flags == sorted(flags)
    assert any(flags)
    order = [
        where.module.split(".")[1]
        for where in wheres
        if where.module.startswith("layers.") and where.backward
    ]
    assert sorted(order, reverse=True) == order  # the last layer's backward is first
    attention = {where.module for where in wheres if "flash_attention" in where.operation}
    assert attention == {"layers.0", "layers.1", "layers.2"}


def test_what_forward_made_grows_to_the_loss_and_is_gone_at_the_end():
    step = fake_step()
    trace = step.trace(ROWS)
    forward = list(trace.forward_bytes)
    assert len(forward) == len(trace.trace.live_bytes)
    assert max(forward) > ROWS * LENGTH * WORDS * 4
    assert forward.index(max(forward)) > 0
    logits, batch, scalars = ROWS * LENGTH * WORDS * 4, ROWS * LENGTH * 8, 64
    assert logits + batch <= forward[-1] <= logits + batch + scalars  # which the caller still holds
    for made, live in zip(forward, trace.trace.live_bytes, strict=True):
        assert made <= live - step.resident.total


def test_gradients_are_counted_from_where_they_are_made():
    step = fake_step()
    with_grad = sum(p.numel() * 4 for p in Decoder().parameters() if p.requires_grad)
    trace = step.trace(ROWS)
    last = len(trace.trace.live_bytes) - 1
    assert trace.gradient_bytes(last) == with_grad
    assert trace.gradient_bytes(0) == 0
    amounts = [trace.gradient_bytes(operation) for operation in range(last + 1)]
    assert amounts == sorted(amounts)
    accumulating = fake_step(accumulates=True)
    assert accumulating.trace(ROWS).gradient_bytes(last) == 0  # they were there before
    assert accumulating.resident.gradients == with_grad


def test_counting_without_explaining_counts_what_live_bytes_counts():
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    traces = []
    for counter in (MemoryTracker(2**40), AttributedTracker()):
        counter.add(model.parameters())
        with counter:
            model(torch.ones(5, 32)).sum().backward()
        traces.append((list(counter.trace().live_bytes), counter.peak_bytes))
        model.zero_grad(set_to_none=True)
    assert traces[0] == traces[1]


class Outer(nn.Module):
    """One layer twice, the second time under another module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Tanh(), self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.block(self.first(x)))


def test_a_shared_module_has_the_name_of_where_it_runs():
    model = Outer()
    names = ModuleNames(model)
    seen: list[str] = []
    model.first.register_forward_pre_hook(lambda *_: seen.append(names.current()))
    with names.following():
        assert names.current() == ""
        model(torch.ones(2, 8))
    assert seen[0] == "first"
    assert seen[1].startswith("block")
    assert names.current() == ""


def test_names_are_followed_through_checkpoint_wrappers_and_after_an_error():
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError

    model = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Sequential(Failing())})
    names = ModuleNames(model)
    with names.following(), pytest.raises(ArithmeticError):
        model["_checkpoint_wrapped_module"](torch.ones(1))
    assert names.current() == ""
    with names.following():
        assert names.current() == ""


def test_a_layer_that_is_wrapped_to_be_recomputed_has_one_name_in_forward_and_backward():
    """Else what it holds is split over two names, and neither is the model's."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)
    )
    known = {name for name, _ in model.named_modules()}
    model[1] = checkpoint_wrapper(model[1])
    model[2] = checkpoint_wrapper(model[2])
    names = ModuleNames(model)
    counter = AttributedTracker(explain=range(1000), names=names)
    counter.add(model.parameters())
    with names.following(), counter:
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
    wheres = {held.site for held in counter.step_trace(model).explained.values()}
    assert {where.module for where in wheres} <= known
    for module in ("1.0", "1.1", "2"):
        assert {where.backward for where in wheres if where.module == module} == {False, True}


def test_modules_within_a_compiled_one_have_no_hooks_and_others_none_afterwards():
    """What is compiled would have a graph for each module otherwise."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)))
    model[1].forward = CompiledParts(FakeDevice()).compiled(model[1].forward, "Sequential")
    with ModuleNames(model).following():
        hooked = [bool(module._forward_pre_hooks) for module in model.modules()]
    assert hooked == [True, True, True, False]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_place_reads_as_a_sentence():
    assert str(OpSite("layers.1.mlp", "mm", True)) == "backward of layers.1.mlp (mm)"
    assert str(OpSite("", "nll_loss_forward", False)) == "forward of the loss (nll_loss_forward)"
