"""What torch has compiled is counted, with its cause."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.loops import train, training
from support.sharded_model import Decoder, collate, make_rows, runner_of, token_losses

from adaptive_batch import AdaptiveStep, StepOptions
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.training import MicroBatchSizer
from adaptive_batch.training.compilations import (
    CompilationLog,
    Compilations,
    any_number_of_variants,
    describe_all,
)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def doubled(tensor):
    return (2 * tensor).sum()


def run(function, *sizes):
    for size in sizes:
        function(torch.ones(size, requires_grad=True)).backward()


def compiled(**how):
    return torch.compile(doubled, backend="aot_eager", **how)


def compiled_decoder():
    """A model that is compiled for each shape anew."""
    model = Decoder()
    model.compile(backend="aot_eager", dynamic=False)
    return model


def test_what_was_compiled_since_the_last_call_is_told_with_its_cause():
    function = compiled()
    compilations = Compilations()
    run(function, 3)
    first = compilations.new()
    assert [graph.function for graph in first if graph.function] == ["doubled"]
    assert not any(graph.reason for graph in first)
    assert sum(graph.seconds for graph in first) > 0
    run(function, 3)
    assert compilations.new() == []
    run(function, 5, 7)
    again = [graph for graph in compilations.new() if graph.function]
    assert [bool(graph.reason) for graph in again] == [True]
    assert again[0].reason == "tensor 'tensor' size mismatch at index 0. expected 3, actual 5"


@pytest.mark.parametrize(("sizes", "count"), [(range(3, 6), 2), (range(3, 14), 7)])
def test_each_compilation_again_is_one_line_and_counted_and_the_last_says_that_it_is(sizes, count):
    events = []

    def event(kind, message, **facts):
        events.append((kind, message, facts))

    log = CompilationLog(compiled_decoder())
    run(compiled(dynamic=False), *sizes)
    log.log_new(event)
    log.log_new(event)
    gives_up = count == 7
    # The first variant is none that was compiled again.
    assert log.num_again == count
    assert {kind for kind, _, _ in events} == {"recompiled"}
    _, message, facts = events[-1]
    assert facts["gives_up"] == gives_up
    if gives_up:
        assert message.startswith("doubled runs without the compiler from now on")
    else:
        assert message.startswith("doubled was compiled again in ")
        assert message.endswith("expected 4, actual 5 (2 in this run)")
        assert "\n" not in message
        assert (len(events), facts["function"], facts["count"]) == (2, "doubled", 2)


def test_trials_may_have_any_number_of_variants():
    compilations = Compilations()
    with any_number_of_variants():
        run(compiled(dynamic=False), *range(3, 14))
    graphs = compilations.new()
    assert not any(graph.gives_up for graph in graphs)
    assert describe_all(graphs).startswith("11 graphs compiled in ")


# --- in a script's own loop

ROWS = make_rows([5, 5, 7, 7, 9, 9, 5, 5])


class Events(list):
    """Takes events, and keeps what is said of compilations."""

    def __call__(self, kind, message, **facts):
        if kind == "recompiled":
            self.append(facts)


def decoder_step(model, events):
    """A bare step of a decoder."""

    def forward_backward(part):
        (token_losses(model, part.batch, "mean") * part.share).backward()

    return AdaptiveStep(model, forward_backward, options=StepOptions(event=events))


@pytest.mark.parametrize("owner", ["loop", "step"])
def test_scripts_log_each_compilation_again_with_its_cause(caplog, owner):
    model = compiled_decoder()
    events = Events()
    if owner == "loop":
        made = training(model=model, rows=ROWS, batch_size=2, event=events, shuffle=False)
        train(made, epochs=1)
    else:
        step = decoder_step(model, events)
        for place in range(0, len(ROWS), 2):
            step(collate(ROWS[place : place + 2]))
    # Of three lengths the first is no reason, and the fourth step is of the first again.
    assert [facts["count"] for facts in events] == [1, 2]
    assert all("size mismatch at index 1" in facts["reason"] for facts in events)
    lines = [record.getMessage() for record in caplog.records if "again in" in record.getMessage()]
    assert [line.rpartition(" (")[2] for line in lines] == ["1 in this run)", "2 in this run)"]


def test_what_a_search_compiles_is_not_logged():
    events = Events()
    made = training(
        model=compiled_decoder(), rows=ROWS, batch_size=2, event=events, micro_batch_tokens="auto"
    )
    compilations = Compilations()
    made.loop.find_bound(device_memory="1GiB", maximum=4)
    assert any(graph.reason for graph in compilations.new())
    # Not by a step: what is fastest may have several shapes, which are compiled in training.
    made.loop._step.compilations.log_new(events)
    assert not events


@pytest.mark.parametrize("owner", ["loop", pytest.param("step", marks=pytest.mark.nightly)])
def test_what_an_estimate_compiles_is_not_logged(owner):
    model = Decoder()
    # An estimate is of what Inductor compiles.
    model.compile(dynamic=False)
    events = Events()
    made = training(model=model, rows=ROWS, batch_size=2)
    step = made.loop._step
    compilations = Compilations()
    if owner == "loop":
        made.loop.estimate("1GiB", maximum=4)
    else:
        step = decoder_step(model, events)
        step.estimate(made.optimizer, lambda rows: collate(ROWS[:rows]), "1GiB", maximum=4)
    assert any(graph.reason for graph in compilations.new())
    step.compilations.log_new(events)
    assert not events


def test_a_model_that_is_not_compiled_is_not_looked_at(monkeypatch):
    made = training(rows=ROWS, batch_size=2)
    monkeypatch.setattr(Compilations, "new", lambda self: pytest.fail("looked at"))
    train(made, epochs=1)


class Left:
    def __init__(self):
        self.itself = self


def left_behind():
    """Return a reference to what only a collection of the oldest generation frees; torch itself
    collects the younger ones after it has compiled.
    """
    left = Left()
    gc.collect(1)
    return weakref.ref(left)


@pytest.fixture
def _no_automatic_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_automatic_collection")
def test_what_compiling_leaves_in_cycles_is_freed_before_backward_and_else_nothing_is():
    model, is_freed = compiled_decoder(), []

    def forward_backward(part):
        left = left_behind()
        loss = token_losses(model, part.batch, "mean") * part.share
        is_freed.append(left() is None)
        loss.backward()

    step = AdaptiveStep(model, forward_backward)
    for place in range(0, len(ROWS), 2):
        step(collate(ROWS[place : place + 2]))
    # The last is of the first one's length.
    assert is_freed == [True, True, True, False]


@pytest.mark.usefixtures("_no_automatic_collection")
def test_what_compiling_leaves_in_cycles_is_freed_in_trials_and_not_outside_of_steps():
    runner = decoder_step(compiled_decoder(), Events())
    left = left_behind()
    run(compiled(dynamic=False), 3)
    assert left() is not None
    with runner.trial():
        run(compiled(dynamic=False), 4)
        assert left() is None
        torch.compiler.reset()


@pytest.mark.usefixtures("_no_automatic_collection")
def test_what_compiling_leaves_in_cycles_is_freed_in_passes_without_gradients():
    runner = runner_of(compiled_decoder(), MicroBatchLimit(4))
    is_freed = []

    def forward(rows, length):
        left = left_behind()
        compiled(dynamic=False)(torch.ones(length))
        is_freed.append(left() is None)

    runner.evaluate_rows(
        make_rows([3]),
        forward,
        retry=runner.retry.with_sizer(MicroBatchSizer()),
        loss=runner.loss,
        kind="padded",
        doing="in a test",
    )
    assert is_freed == [True]
