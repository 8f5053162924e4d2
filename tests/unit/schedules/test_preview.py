"""The plan before training: stages by hand values, and for all steps."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.schedules import (
    PlannedStep,
    Progress,
    as_record,
    at_epochs,
    batch_sizes_ahead,
    check_increments,
    check_stages,
    geometric,
    ramp_by_doubling,
    request_batch,
    stages_of,
    steps,
    table,
)
from adaptive_batch.schedules.preview import SHOWN

FINAL = 64


def planned(rule, *, rows, epochs, ranks=1, tokens_per_row=10, maximum=None, micro_batch_size=16):
    """The steps of training by a rule, the short last one of an epoch trained; the rate falls from
    step to step.
    """
    progress, ahead = Progress(rows_per_epoch=rows), []
    for _ in range(epochs):
        while progress.epoch_rows < rows:
            batch = request_batch(rule, progress, maximum=maximum).after
            size = min(batch * ranks, rows - progress.epoch_rows)
            micro = -(-size // (ranks * micro_batch_size))
            rate = 1e-3 / (1 + progress.steps)
            progress = replace(progress, batch=batch)
            ahead.append(PlannedStep(progress, size, micro, {"lr": rate}, size * tokens_per_row))
            progress = progress.after_step(rows=size, tokens=size * tokens_per_row)
        progress = progress.after_epoch()
    return ahead


def of_batches(batches):
    """Steps that are asked for these batches, each of so many rows."""
    progress, ahead = Progress(rows_per_epoch=10**6), []
    for batch in batches:
        progress = replace(progress, batch=batch)
        ahead.append(PlannedStep(progress, batch, 1, {"lr": 0.1}))
        progress = progress.after_step(rows=batch, tokens=0)
    return ahead


BERT24 = ramp_by_doubling(FINAL, "1ep", start=16)


def test_the_ramp_of_bert24_by_hand():
    """640 rows: half an epoch is 20 steps of 16, the other half 10 of 32, and the second epoch 10
    of 64.
    """
    first, second, third = stages_of(planned(BERT24, rows=640, epochs=2))
    assert [stage.steps for stage in (first, second, third)] == [20, 10, 10]
    assert [stage.batch_least for stage in (first, second, third)] == [16, 32, 64]
    assert [stage.first.steps for stage in (first, second, third)] == [0, 20, 30]
    assert [stage.last.samples for stage in (first, second, third)] == [320, 640, 1280]
    assert [stage.first.epochs for stage in (first, second, third)] == [0.0, 0.5, 1.0]
    assert [stage.last.epochs for stage in (first, second, third)] == [0.5, 1.0, 2.0]
    assert [
        (stage.micro_batches_least, stage.micro_batches_most) for stage in (first, second, third)
    ] == [
        (1, 1),
        (2, 2),
        (4, 4),
    ]
    assert (second.rates_first, second.rates_last) == ({"lr": 1e-3 / 21}, {"lr": 1e-3 / 30})
    assert third.last.tokens == 12_800


def test_a_short_last_step_belongs_to_its_stage_and_an_epoch_ends_none():
    (only,) = stages_of(planned(steps([16], []), rows=100, epochs=3))
    assert (only.steps, only.last.samples, only.batch_least, only.batch_most) == (21, 300, 16, 16)
    assert only.last.epochs == 3.0


def test_a_plan_without_tokens_or_without_steps_says_so():
    assert "a number not known before of tokens" in table(
        stages_of(of_batches([8, 8])), unit="rows", ranks=1
    )
    assert table([], unit="rows", ranks=1, notes=["why"]) == "no step is left\nwhy"
    assert stages_of([]) == []


def test_of_many_stages_the_middle_ones_are_merged():
    stages = stages_of(of_batches(range(100, 1100)))
    assert [stage.batch_least for stage in stages[:10]] == list(range(100, 110))
    assert [stage.batch_least for stage in stages[11:]] == list(range(1090, 1100))
    assert (stages[10].batch_least, stages[10].batch_most, stages[10].steps) == (110, 1089, 980)
    lines = table(stages, unit="tokens", ranks=2).splitlines()
    assert "batch (tokens)" in lines[0]
    assert "110 to 1,089" in lines[11]
    assert "220 to 2,178" in lines[11]
    assert lines[-1] == "one line merges 980 stages of other batches"
    falling = table(stages_of(of_batches(range(1100, 100, -1))), unit="tokens", ranks=2)
    assert "1,090 to 111" in falling


@given(st.lists(st.integers(1, 6), max_size=150))
def test_stages_hold_all_steps_in_order_in_no_more_than_the_lines(batches):
    stages = stages_of(of_batches(batches))
    assert len(stages) <= 2 * SHOWN + 1
    assert sum(stage.steps for stage in stages) == len(batches)
    assert all(
        before.last.steps == after.first.steps for before, after in itertools.pairwise(stages)
    )
    for stage in stages:
        of_stage = batches[stage.first.steps : stage.last.steps]
        assert (stage.batch_least, stage.batch_most) == (min(of_stage), max(of_stage))
        assert stage.changes == sum(a != b for a, b in itertools.pairwise(of_stage))
    runs = [batch for batch, _ in itertools.groupby(batches)]
    if len(runs) <= 2 * SHOWN + 1:
        assert [stage.batch_least for stage in stages] == runs


def test_the_record_is_plain_and_whole():
    stages = stages_of(planned(BERT24, rows=640, epochs=2))
    record = json.loads(json.dumps(as_record(stages)))
    assert [line["batch_least"] for line in record] == [16, 32, 64]
    assert Progress(**record[1]["first"]) == stages[1].first
    assert set(record[0]) == {*vars(stages[0]), "batch_first", "batch_last"}


def progress_of(steps):
    return [step.progress for step in steps]


# check_stages

DATA = {"ranks": 1, "rows_per_epoch": 640, "drop_last": False}


def test_a_schedule_whose_stages_all_have_steps_has_no_notes():
    assert check_stages(BERT24, progress_of(planned(BERT24, rows=640, epochs=2)), **DATA) == []
    assert (
        check_stages(
            lambda progress: 8, progress_of(planned(lambda progress: 8, rows=64, epochs=1)), **DATA
        )
        == []
    )


def test_a_stage_that_training_ends_before_is_named():
    early = steps([16, 32, 64], ["1ep", "5ep"])
    (late,) = check_stages(early, progress_of(planned(early, rows=640, epochs=2)), **DATA)
    assert late == "no step has batch 64, asked for from 5ep on: training ends before it"


def test_a_stage_that_is_too_short_for_a_step_is_refused():
    short = steps([128, 16, 64], ["100sp", "120sp"])
    with pytest.raises(
        SettingError, match="no step has batch 16, asked for from 100sp on: that is over before"
    ):
        check_stages(short, progress_of(planned(short, rows=640, epochs=1)), **DATA)


def test_equal_batches_are_stages_of_their_own_and_a_cut_is_no_absence():
    back = steps([16, 32, 16], ["1ep", "5ep"])
    assert len(check_stages(back, progress_of(planned(back, rows=640, epochs=2)), **DATA)) == 1
    cut = progress_of(planned(BERT24, rows=640, epochs=2, maximum=24))
    assert check_stages(BERT24, cut, **DATA, maximum=24) == []


def test_what_lies_behind_is_not_looked_for():
    assert check_stages(BERT24, progress_of(planned(BERT24, rows=640, epochs=2)[25:]), **DATA) == []
    assert check_stages(BERT24, [], **DATA) == []


def test_a_stage_that_drop_last_drops_whole_is_refused():
    ahead = progress_of(planned(BERT24, rows=100, epochs=2, ranks=2))
    with pytest.raises(
        SettingError,
        match=r"^batch_size_schedule=64: 64 rows on each of 2 devices .*ask for 50 or fewer",
    ):
        check_stages(BERT24, ahead, ranks=2, rows_per_epoch=100, drop_last=True)
    for others in (
        {"drop_last": False},
        {"drop_last": True, "maximum": 50},
        {"drop_last": True, "unit": "tokens"},
    ):
        check_stages(BERT24, ahead, ranks=2, rows_per_epoch=100, **others)


# batch_sizes_ahead


def ahead(increment, *, first_epoch=0, epochs=4, batch_size=16, maximum=None):
    return batch_sizes_ahead(
        increment, first_epoch=first_epoch, epochs=epochs, batch_size=batch_size, maximum=maximum
    )


def test_a_pure_growth_function_is_known_to_the_end():
    assert ahead(geometric(2)) == ([16, 32, 64, 128], "")
    assert ahead(at_epochs({1: 8, 2: 100}), maximum=48) == ([16, 24, 48, 48], "")
    assert ahead(geometric(2), first_epoch=2) == ([32, 64], "")
    assert ahead(geometric(2), first_epoch=4) == ([], "")


def test_answers_that_change_are_unknown_after_the_last_epoch_that_did_not():
    calls = []

    def increment(epoch, batch_size):
        calls.append(epoch)
        return 8 if epoch < 2 else 12 - len(calls) % 2 * 4

    assert ahead(increment) == ([24, 32], "the growth function answered 8, then 12")
    assert calls == [0, 0, 1, 1, 2, 2]
    assert ahead(lambda epoch, batch_size: len(calls.append(0) or calls))[0] == []


def test_a_function_that_counts_its_calls_does_not_count_these():
    class Counting:
        calls = 0

        def __call__(self, epoch, batch_size):
            self.calls += 1
            return self.calls

    counting = Counting()
    assert ahead(counting) == ([], "the growth function answered 1, then 2")
    assert counting.calls == 0


def test_an_answer_that_cannot_be_used_is_refused_ahead():
    with pytest.raises(GrowthFunctionError, match=r"\(epoch=2, batch_size=24\) raised IndexError"):
        ahead(lambda epoch, batch_size: [0, 8][epoch])


@pytest.mark.parametrize("answer", [-1, 4.0, None, True, 10**12], ids=repr)
def test_before_it_is_known_what_fits_a_later_answer_is_refused_too(answer):
    with pytest.raises(GrowthFunctionError, match=r"\(epoch=3, batch_size=16\) returned"):
        check_increments(
            lambda epoch, batch_size: answer if epoch == 3 else 8,
            first_epoch=0,
            epochs=5,
            batch_size=16,
        )


def test_before_it_is_known_what_fits_an_answer_that_a_cut_may_make_good_is_not_refused():
    check_increments(geometric(2), first_epoch=0, epochs=100, batch_size=16)
    check_increments(
        lambda epoch, batch_size: 32 - 2 * batch_size, first_epoch=0, epochs=5, batch_size=4
    )


def test_answers_are_asked_of_a_copy_for_the_epochs_that_are_ahead_alone():
    asked = []
    check_increments(
        lambda epoch, batch_size: asked.append(epoch) or 1, first_epoch=2, epochs=4, batch_size=16
    )
    assert asked == [2, 3]
