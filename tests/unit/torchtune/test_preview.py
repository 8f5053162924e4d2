"""The plan before training: stages by hand values, and for all steps."""

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.data import StepAhead
from adaptive_batch.data.batches import EpochAhead
from adaptive_batch.schedules import Progress, ramp_by_doubling, request_batch, steps
from adaptive_batch.torchtune.preview import Stage, merged, table

FINAL = 64


def staged(step, micro_batches):
    return Stage(step, step, (micro_batches, micro_batches))


def planned(rule, *, rows, epochs, tokens_per_row=10, micro_batch_size=16):
    """The steps of training by a rule, the short last one of an epoch trained."""
    progress, ahead = Progress(rows_per_epoch=rows), []
    for epoch in range(epochs):
        while progress.epoch_rows < rows:
            batch = request_batch(rule, progress, maximum=None).after
            size = min(batch, rows - progress.epoch_rows)
            begin = replace(progress, batch=batch)
            progress = begin.after_step(rows=size, tokens=size * tokens_per_row)
            step = StepAhead(begin, progress, EpochAhead(epoch, None))
            ahead.append(staged(step, -(-size // micro_batch_size)))
        progress = progress.after_epoch()
    return ahead


def of_batches(batches):
    """Steps that are asked for these batches, each of so many rows."""
    progress, ahead = Progress(rows_per_epoch=10**6), []
    for batch in batches:
        begin = replace(progress, batch=batch)
        progress = begin.after_step(rows=batch, tokens=0)
        ahead.append(staged(StepAhead(begin, progress, EpochAhead(batch, None)), 1))
    return ahead


def table_of(stages, **options):
    rates = [({"lr": 0.1}, {"lr": 0.2})] * len(stages)
    return table(stages, rates, **options)


BERT24 = ramp_by_doubling(FINAL, "1ep", start=16)


def test_the_ramp_of_bert24_by_hand():
    """640 rows: half an epoch is 20 steps of 16, the other half 10 of 32, and the second epoch 10
    of 64.
    """
    first, second, third = merged(planned(BERT24, rows=640, epochs=2))
    assert [stage.steps for stage in (first, second, third)] == [20, 10, 10]
    for stage, begins, ends, batch, micro_batches in (
        (first, (0, 0.0), (320, 0.5), 16, 1),
        (second, (20, 0.5), (640, 1.0), 32, 2),
        (third, (30, 1.0), (1280, 2.0), 64, 4),
    ):
        assert (stage.first.progress.steps, stage.first.progress.epochs) == begins
        assert (stage.last.after.samples, stage.last.after.epochs) == ends
        assert stage.first.batch == batch
        assert stage.micro_batches == (micro_batches, micro_batches)
    assert third.last.after.tokens == 12_800


def test_a_short_last_step_belongs_to_its_stage_and_an_epoch_ends_none():
    (only,) = merged(planned(steps([16], []), rows=100, epochs=3))
    assert (only.steps, only.last.after.samples, only.first.batch) == (21, 300, 16)
    assert only.last.after.epochs == 3.0


def test_a_plan_without_tokens_or_without_steps_says_so():
    text = table_of(merged(of_batches([8, 8])), unit="rows", ranks=1)
    assert "tokens not known in advance" in text
    assert table_of([], unit="rows", ranks=1, notes=["why"]) == "no step is left\nwhy"
    assert merged([]) == []


def test_a_stage_is_a_line_with_the_batches_of_one_device_and_of_all():
    head, first, second, _ = table_of(
        merged(of_batches([8, 8, 1000])), unit="tokens", ranks=2
    ).splitlines()
    assert "batch (tokens)" in head
    assert first.split()[6:9] == ["8", "1", "16"]
    assert second.split()[6:9] == ["1,000", "1", "2,000"]


@given(st.lists(st.integers(1, 6), max_size=150))
def test_stages_hold_all_steps_in_order(batches):
    stages = merged(of_batches(batches))
    assert sum(stage.steps for stage in stages) == len(batches)
    assert all(
        before.last.after.steps == after.first.progress.steps
        for before, after in itertools.pairwise(stages)
    )
    runs = [batch for batch, _ in itertools.groupby(batches)]
    assert [stage.first.batch for stage in stages] == runs
