"""Invalid rows, and rows whose lengths have changed since lengths were counted."""

import re
from itertools import accumulate

import pytest
from support import components
from support.cli import MODEL, OURS, block, cosine_after, records
from support.stops import stopped_after
from support.trajectories import SCHEDULE, STEPS, run_differences

from adaptive_batch.errors import SettingError
from adaptive_batch.report import audit

ODD = ("dataset._component_=support.components.WithOddRow", "batch_size=2", "epochs=1")
PLAIN = (*ODD, "batch_size=4", "dataset.row=plain")
WHY = {
    "raises": r"cannot be read \(ValueError: no text\)",
    "long": "has 65 tokens, and the model takes 64 at most",
    "foreign": (
        f"has the token or label {MODEL['vocab_size']}, and the model's vocabulary has 0 to"
        f" {MODEL['vocab_size'] - 1}"
    ),
    "empty": "has no tokens",
    "unlabelled": "has no labels; give each token its label, or -100 for none",
}


@pytest.mark.parametrize("row", WHY)
def test_the_error_names_an_invalid_row(small, row):
    with pytest.raises(SettingError, match=f"dataset='json': row 9 {WHY[row]}"):
        small.run_in_process(OURS, *ODD, "dataset.at=9", f"dataset.row={row}")


def test_the_error_names_an_invalid_row_of_validation(small):
    own = ("dataset_val._component_=support.components.WithOddRow", "dataset_val.row=long")
    with pytest.raises(
        SettingError, match=rf"dataset_val='support\.components\.WithOddRow': row 5 {WHY['long']}"
    ):
        small.run_in_process(OURS, *PLAIN, *own, "run_val_every_n_steps=2")


def test_tokens_may_be_a_list_an_array_or_a_tensor(small):
    rows = (
        "dataset._component_=support.components.OfLengths",
        f"dataset.lengths={COUNTED}",
        "epochs=1",
        "batch_tokens=60",
        "micro_batch_tokens=120",
        "micro_batch_layout=packed",
    )
    kinds = ("list", "tuple", "array", "tensor", "list of numpy")
    first, *others = (
        small.run_in_process(OURS, *rows, f"dataset.kind={kind}").losses for kind in kinds
    )
    assert len(first) > 1
    assert others == [first] * 4


def test_a_collate_function_that_drops_rows_is_refused(small):
    leaving_out = "support.components.leaving_out"
    with pytest.raises(
        SettingError, match=f"collate_fn='{leaving_out}': it made 3 rows of 4; return all of them"
    ):
        small.run_in_process(OURS, *PLAIN, f"collate_fn={leaving_out}")


def test_a_collate_function_may_create_labels_unless_rows_are_padded_first(small):
    rows = block("dataset", "support.components.OfLengths", lengths=COUNTED)
    keys = (*rows, "epochs=1", "dataset_val=${dataset}", "run_val_every_n_steps=2")
    labelled = small.run_in_process(OURS, *keys)
    making = "support.components.labelling"
    made = ("dataset.columns=[tokens]", f"collate_fn={making}", *keys)
    assert small.run_in_process(OURS, *made).losses == labelled.losses
    with pytest.raises(
        SettingError, match=f"collate_fn='{making}': rows are padded to one length before it makes"
    ):
        small.run_in_process(OURS, *made, "pad_to_multiple_of=16")


COUNTED = [8 + row % 9 for row in range(32)]
CHANGED = [
    45 if row in (3, 7, 22) else 5 if row in (11, 30) else length
    for row, length in enumerate(COUNTED)
]
NOW_LENGTHS = (
    "dataset._component_=support.components.OfLengthsNow",
    "optimizer=torch.optim.SGD",
    "optimizer.lr=0.05",
)
SCHEDULED = cosine_after(2)
STALE = {
    "in file order": ("batch_tokens=60", "micro_batch_tokens=4096"),
    "a rule": (
        "batch_tokens=60",
        "micro_batch_tokens=500",
        "grow_beyond_maximum=True",
        *block(SCHEDULE, STEPS, batch_sizes="[60,90]", thresholds="[150tok]"),
    ),
    "noticed by trials": ("batch_tokens=60", "probe.objective=largest"),
}


@pytest.fixture
def stale(small, monkeypatch, tmp_path):
    """Return a function that runs with the cached lengths of rows that have changed."""
    cached = tmp_path / "cache"

    def run(*overrides, lengths=CHANGED):
        monkeypatch.setattr(
            type(small),
            "_environment",
            lambda _: {**environment, "ADAPTIVE_BATCH_CACHE": str(cached)},
        )
        monkeypatch.setitem(components.NOW, "lengths", lengths)
        return small.run_in_process(OURS, *NOW_LENGTHS, "epochs=2", *overrides)

    environment = small._environment()
    return run


def contradictions(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "keeps its steps" in line]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", STALE.values(), ids=STALE)
def test_changed_lengths_keep_the_epoch_and_the_next_epoch_is_planned_again(
    stale, overrides, capsys
):
    before = stale(*overrides, lengths=COUNTED)
    capsys.readouterr()
    finished = stale(*overrides)
    (warning,) = contradictions(capsys)
    assert re.match(
        r"dataset: row \d+ has \d+ tokens, and had \d+ when it was counted; this epoch keeps its"
        r" steps, and all rows are counted again before the next$",
        warning,
    )
    (said,) = records(finished, "recounted")
    noticed_in_trials = overrides == STALE["noticed by trials"]
    assert said["epoch"] == (0 if noticed_in_trials else 1)
    assert audit(finished.output_dir).problems == ()
    steps = {run: records(run, "step") for run in (before, finished)}
    planned = [[step["rows"] for step in steps[run] if step["epoch"] == 0] for run in steps]
    assert noticed_in_trials or planned[0] == planned[1]
    tokens = [sum(CHANGED[row] for row in step["rows"]) for step in steps[finished]]
    assert [step["tokens_seen"] for step in steps[finished]] == [*accumulate(tokens)]
    again = stale(*overrides)
    assert contradictions(capsys) == []  # the cache has the new lengths
    assert [step["rows"] for step in records(again, "step") if step["epoch"] == 1] == [
        step["rows"] for step in steps[finished] if step["epoch"] == 1
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [("batch_tokens=60",), ("batch_size=4", "lr_clock=tokens")],
    ids=["tokens", "rows with lr_clock=tokens"],
)
def test_a_run_with_changed_lengths_resumes_bit_for_bit(stale, small, overrides):
    overrides = (*overrides, "micro_batch_tokens=4096", "save_every_n_steps=1", *SCHEDULED)
    stale(*overrides, lengths=COUNTED)
    whole = stale(*overrides)
    (said,) = records(whole, "recounted")
    steps = records(whole, "step")
    assert said["epoch"] == 1
    in_epoch_0 = sum(step["epoch"] == 0 for step in steps)
    for step in (1, in_epoch_0 - 1, in_epoch_0 + 1):
        folder = stopped_after(whole, small, step)
        stale(*overrides, f"output_dir={folder}", "resume_from_checkpoint=True")
        assert audit(folder).problems == ()
        assert run_differences(folder, whole.output_dir) == [], step
