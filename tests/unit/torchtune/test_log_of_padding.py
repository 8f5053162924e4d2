"""Much padding is said at the end of an epoch, with the key that would remove it."""

import json

import pytest
from support.cli import OURS

from adaptive_batch.torchtune import Settings
from adaptive_batch.torchtune.log import keys_against_padding

PLAIN = {"batch_size": 4, "epochs": 1, "gradient_accumulation_steps": 1}
OF_LENGTHS = ("dataset._component_=support.components.OfLengths", "batch_size=4", "epochs=1")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "micro_batch_tokens=auto groups the rows of a step by length"),
        ({"micro_batch_size": 2}, "micro_batch_tokens=auto, without micro_batch_size,"),
        ({"micro_batch_size": 2, "uniform_micro_batches": "rows"}, "sample_order=seqlen"),
        ({"micro_batch_tokens": 100}, "sample_order=seqlen with a sample_window"),
        ({"micro_batch_tokens": "auto"}, "sample_order=seqlen"),
        ({"optimizer_in_bwd": True}, "sample_order=seqlen"),
        (
            {"micro_batch_tokens": 100, "uniform_micro_batches": "lengths"},
            "uniform_micro_batches=lengths pads",
        ),
        ({"sample_order": "seqlen", "pad_to_multiple_of": 64}, "micro_batch_tokens=auto"),
        (
            {"micro_batch_tokens": 100, "sample_order": "seqlen", "pad_to_multiple_of": 64},
            "a lower pad_to_multiple_of",
        ),
        ({"micro_batch_tokens": 100, "sample_order": "seqlen"}, ""),
    ],
    ids=str,
)
def test_the_key_that_would_remove_padding_is_one_that_is_not_on(keys, said):
    found = keys_against_padding(Settings.from_config(PLAIN | keys))
    assert found.startswith(said)
    assert bool(found) is bool(said)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (
            "[5,5,5,60,5,5,5,60]",
            "; 69% of the processed tokens were padding: micro_batch_tokens=auto",
        ),
        ("[50,55,55,60]", ""),
    ],
)
def test_it_is_said_where_it_is_much(small, lengths, said):
    run = small.run_in_process(
        OURS, *OF_LENGTHS, f"dataset.lengths={lengths}", "shuffle=False", "drop_last=False"
    )
    records = (run.output_dir / "adaptive_batch" / "run.jsonl").read_text().splitlines()
    (message,) = [
        record["message"] for record in map(json.loads, records) if record["kind"] == "epoch"
    ]
    rows = lengths.count(",") + 1
    assert message.startswith(f"epoch 0: {rows} rows trained{said}")
    assert ("padding" in message) is bool(said)
