"""Validation during training has the loss of other rows and leaves no trace in training."""

import math
import re

import pytest
from support import components
from support.cli import LOG, OURS, losses, records, same_weights

from adaptive_batch.errors import DoesNotFitError

LENGTHS = [30 - 2 * row for row in range(10)]
VALIDATED = (
    "dataset_val._component_=support.components.OfLengths",
    f"dataset_val.lengths={LENGTHS}",
    "run_val_every_n_steps=2",
)
WATCHED = (
    "model._component_=support.components.watched",
    "metric_logger._component_=support.components.Watching",
)
STEPS = ("batch_size=8", "epochs=1")  # four of them
DROPOUT = "model.attn_dropout=0.2"


def evaluated():
    return [seen for seen in components.SEEN if not seen.trained]


def test_validation_is_logged_and_changes_no_bit_of_training(small):
    validated = small.run_in_process(OURS, *STEPS, *VALIDATED, DROPOUT, "epochs=2")
    log = (validated.output_dir / "logs" / LOG).read_text()
    logged = re.findall(r"^Step (\d+) \| val_loss:(\S+)", log, re.M)
    expected = [
        (record["steps"], record["val_loss"]) for record in records(validated, "validation")
    ]
    assert [(int(step), float(value)) for step, value in logged] == expected
    assert [step for step, _ in expected] == [2, 4, 6, 8]
    without = small.run_in_process(OURS, *STEPS, DROPOUT, "epochs=2")
    assert validated.losses == without.losses
    assert same_weights(validated.weights(1), without.weights(1))


@pytest.mark.slow
def test_auto_tries_its_own_longest_rows_and_runs_as_many_as_fit(small):
    memory = ("probe.device_memory=7MiB", "batch_size_val=auto", "run_val_every_n_steps=4")
    longer = f"dataset_val.lengths={[60] + [20] * 29}"
    finished = small.run_in_process(OURS, *WATCHED, *STEPS, *VALIDATED, *memory, longer)
    (record,) = records(finished, "validation")
    trials = [len(seen.rows) for seen in evaluated() if seen.length == 60][
        :-1
    ]  # the last one is validation's own
    tried = max(trials)
    assert 1 < tried < 30
    run = evaluated()[len(trials) :]
    assert sorted(row for seen in run for row in seen.rows) == list(range(30))
    assert all(len(seen.rows) * seen.length <= tried * 60 for seen in run)
    assert max(len(seen.rows) for seen in run) > tried  # short rows: more of them
    assert math.isfinite(record["val_loss"])


@pytest.mark.parametrize(
    ("trained", "validated", "said"),
    [
        (10, 500, "one row of 500 tokens of dataset_val, even without gradients, does not fit in"),
        (500, 10, "one row of 500 tokens needs"),
    ],
)
def test_one_row_that_does_not_fit_is_refused_with_its_dataset(small, trained, validated, said):
    output = small.fresh_folder()
    rows = (
        f"dataset_val.lengths=[{validated}]",
        "dataset._component_=support.components.OfLengths",
    )
    memory = (
        "probe.device_memory=3500KiB",
        "model.max_seq_len=512",
        "batch_size_val=auto",
        "batch_size=2",
    )
    with pytest.raises(DoesNotFitError, match=said):
        small.run_in_process(
            OURS,
            *STEPS,
            *VALIDATED,
            *rows,
            f"dataset.lengths=[{trained},{trained}]",
            *memory,
            f"output_dir={output}",
        )
    assert not losses(output)
