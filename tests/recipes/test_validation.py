"""Validation during training logs its loss and does not change training."""

import re

import pytest
from support.cli import LOG, OURS, block, records, same_weights

LENGTHS = [30 - 2 * row for row in range(10)]
VALIDATED = (
    "dataset_val._component_=support.components.OfLengths",
    f"dataset_val.lengths={LENGTHS}",
    "run_val_every_n_steps=2",
)
STEPS = ("batch_size=8", "epochs=1")  # four per epoch
DROPOUT = "model.attn_dropout=0.2"


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


def test_the_loss_is_the_mean_over_the_label_tokens_of_the_first_rows(small):
    once = ("optimizer.lr=0", "epochs=1", "max_steps_per_epoch=1")
    batches = ("run_val_every_n_steps=1", "batch_size_val=3", "max_validation_batches=2")
    validated = small.run_in_process(OURS, *once, *VALIDATED, *batches)
    rows = block("dataset", "support.components.OfLengths", lengths=LENGTHS[:6])
    trained = small.run_in_process(OURS, *once, *rows, "batch_size=6")
    (record,) = records(validated, "validation")
    assert record["val_loss"] == pytest.approx(float(trained.losses[0]), rel=1e-6)
