"""Validation during training logs its loss and does not change training."""

import re

from support.cli import LOG, OURS, records, same_weights

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
