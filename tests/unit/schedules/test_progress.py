"""Progress counts what was consumed, in the epoch and in all."""

from adaptive_batch.schedules import Progress


def test_progress_goes_through_its_state():
    progress = (
        Progress(rows_per_epoch=8)
        .after_step(rows=8, tokens=100)
        .after_epoch()
        .after_step(rows=4, tokens=50)
    )
    assert Progress(**progress.state_dict()) == progress
    assert progress == Progress(
        epoch=1,
        epoch_rows=4,
        steps=2,
        samples=12,
        tokens=150,
        epoch_steps=1,
        epoch_tokens=50,
        rows_per_epoch=8,
    )


def test_the_part_of_an_epoch_counts_in_rows():
    progress = (
        Progress(rows_per_epoch=8)
        .after_step(rows=8, tokens=1)
        .after_epoch()
        .after_step(rows=2, tokens=1)
    )
    assert progress.epochs == 1.25
    assert Progress(epoch=3, epoch_rows=5).epochs == 3.0  # how many rows an epoch has is not known


def test_where_an_epoch_began_is_known_within_it():
    begin = Progress(rows_per_epoch=8).after_step(rows=8, tokens=100).after_epoch()
    within = begin.after_step(rows=3, tokens=20).after_step(rows=3, tokens=30)
    assert within.at_epoch_start() == begin
    assert begin.at_epoch_start() == begin
