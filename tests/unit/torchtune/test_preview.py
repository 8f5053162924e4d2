"""The table of the plan before training."""

from dataclasses import replace

from adaptive_batch.data import StepAhead
from adaptive_batch.schedules import Progress
from adaptive_batch.torchtune.preview import Stage, table


def of_batches(batches):
    """Stages of one step that are asked for these batches, each of so many rows."""
    progress, stages = Progress(rows_per_epoch=10**6), []
    for batch in batches:
        begin = replace(progress, batch=batch)
        step = StepAhead(begin, batch, 0)
        progress = step.after
        stages.append(Stage(step, step, 1))
    return stages


def table_of(stages, **options):
    rates = [({"lr": 0.1}, {"lr": 0.2})] * len(stages)
    return table(stages, rates, **options)


def test_a_plan_without_tokens_or_without_steps_says_so():
    text = table_of(of_batches([8, 16]), unit="rows", ranks=1)
    assert "tokens not known in advance" in text
    assert table_of([], unit="rows", ranks=1, notes=["why"]) == "no step is left\nwhy"


def test_a_stage_is_a_line_with_the_batches_of_one_device_and_of_all():
    head, first, second, _ = table_of(of_batches([8, 1000]), unit="tokens", ranks=2).splitlines()
    assert "batch (tokens)" in head
    assert first.split()[6:9] == ["8", "1", "16"]
    assert second.split()[6:9] == ["1,000", "1", "2,000"]
