"""Rows that cannot be used, and rows that are not what they were when they were counted, through the real command line."""

import re

import pytest
from support.cli import MODEL, OURS

from adaptive_batch.errors import SettingError
from adaptive_batch.report import read_records

ODD = ("dataset._component_=support.components.WithOddRow", "batch_size=2", "epochs=1")
PLAIN = ("dataset._component_=support.components.WithOddRow", "batch_size=4", "epochs=1", "dataset.row=plain")
WHY = {
    "raises": r"cannot be read \(ValueError: no text\)",
    "long": "has 65 tokens, and the model takes 64 at most",
    "foreign": f"has the token id {MODEL['vocab_size']}, and the model's vocabulary has 0 to {MODEL['vocab_size'] - 1}",
    "empty": "has no tokens",
}


@pytest.mark.parametrize("row", WHY)
def test_the_step_that_meets_a_row_that_cannot_be_used_ends_the_run_and_names_it(small, row):
    output = small.fresh_folder()
    with pytest.raises(SettingError, match=f"dataset='json': row 9 {WHY[row]}"):
        small.run_in_process(OURS, *ODD, "dataset.at=9", f"dataset.row={row}", f"output_dir={output}")
    assert [r for r in read_records(output / "adaptive_batch" / "run.jsonl") if r["kind"] == "step"]


@pytest.mark.parametrize("row", WHY)
def test_so_does_validation(small, row):
    own = ("dataset_val._component_=support.components.WithOddRow", f"dataset_val.row={row}")
    with pytest.raises(SettingError, match=rf"dataset_val='support\.components\.WithOddRow': row 5 {WHY[row]}"):
        small.run_in_process(OURS, *PLAIN, *own, "run_val_every_n_steps=2")


def test_on_the_terminal_it_is_one_line_and_the_exit_status_is_not_zero(small):
    finished = small.run(OURS, *ODD, "dataset.at=9", "dataset.row=raises", expect=1)
    last = finished.output.strip().splitlines()[-1]
    said = "row 9 cannot be read (ValueError: no text); correct it, or filter it out"
    assert last == f"SettingError: dataset='json': {said}"
    assert "Traceback" not in finished.output


def test_lengths_that_were_counted_beside_another_model_are_compared_with_this_one(small):
    by_tokens = (*PLAIN, "batch_tokens=60")
    small.run_in_process(OURS, *by_tokens)
    with pytest.raises(
        SettingError, match=re.escape("row 0 has the token id 12, and the model's vocabulary has 0 to 9")
    ):
        small.run_in_process(OURS, *by_tokens, "model.vocab_size=10")
