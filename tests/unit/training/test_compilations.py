"""What torch has compiled is counted, with its cause."""

from __future__ import annotations

import pytest
import torch

from adaptive_batch.training import CompilationLog
from adaptive_batch.training.compilations import (
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


def test_what_was_compiled_since_the_last_call_is_told_with_its_cause():
    function = compiled()
    compilations = Compilations()
    run(function, 3)
    first = compilations.new()
    assert [graph.function for graph in first if graph.function] == ["doubled"]
    assert not any(graph.is_again for graph in first)
    assert sum(graph.seconds for graph in first) > 0
    run(function, 3)
    assert compilations.new() == []
    run(function, 5, 7)
    again = [graph for graph in compilations.new() if graph.function]
    assert [graph.is_again for graph in again] == [True]
    assert again[0].reason == "tensor 'tensor' size mismatch at index 0. expected 3, actual 5"


def test_each_compilation_again_is_one_line_and_counted():
    events = []
    log = CompilationLog(lambda kind, message, **facts: events.append((kind, message, facts)))
    run(compiled(dynamic=False), 3, 4, 5)
    log.log_new()
    log.log_new()
    assert [kind for kind, _, _ in events] == ["recompiled"] * 2
    assert log.num_again == 2
    _, message, facts = events[-1]
    assert message.startswith("doubled was compiled again in ")
    assert message.endswith("expected 4, actual 5 (2 in this run)")
    assert "\n" not in message
    assert (facts["function"], facts["count"], facts["gives_up"]) == ("doubled", 2, False)


def test_a_function_that_is_not_compiled_any_more_is_told():
    events = []
    log = CompilationLog(lambda kind, message, **facts: events.append((message, facts)))
    run(compiled(dynamic=False), *range(3, 14))
    log.log_new()
    message, facts = events[-1]
    assert message.startswith("doubled runs without the compiler from now on")
    assert facts["gives_up"]
    # The first variant is none that was compiled again.
    assert log.num_again == 7


def test_trials_may_have_any_number_of_variants():
    compilations = Compilations()
    with any_number_of_variants():
        run(compiled(dynamic=False), *range(3, 14))
    graphs = compilations.new()
    assert not any(graph.gives_up for graph in graphs)
    assert describe_all(graphs).startswith("11 graphs compiled in ")
