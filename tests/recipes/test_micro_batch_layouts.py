"""Rows that are padded, grouped or packed, and what `auto` chooses, through the real command line:
what is trained stays the same.
"""

import pytest
from support.cli import OURS, figures, records, resume_run
from support.stops import stopped_after
from support.trajectories import run_differences

from adaptive_batch.errors import SettingError
from adaptive_batch.report import audit

LENGTHS = [5 + (11 * row) % 50 for row in range(32)]
ROWS = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={LENGTHS}")
SGD = (
    "optimizer=torch.optim.SGD",
    "optimizer.lr=0.05",
    "optimizer.fused=False",
)  # AdamW would turn rounding into steps
BASE = (*ROWS, *SGD, "epochs=1", "batch_size=16", "model.max_seq_len=64")
LAYOUTS = ("padded", "grouped", "packed")
AUTO = ("micro_batch_tokens=auto", "probe.device_memory=1GiB")
UNITS = {"rows": "micro_batch_size=5", "tokens": "micro_batch_tokens=150"}


def where_steps_stood(folder):
    """Return the position of each step in the data; the audit must hold."""
    names = ("step", "epoch", "position", "batch_size", "samples_seen", "tokens_seen", "rows")
    assert audit(folder).holds
    return [tuple(step[name] for name in names) for step in records(folder, "step")]


@pytest.fixture(scope="module")
def whole(small):
    return small.run_in_process(OURS, *BASE, "drop_last=False").output_dir


# --- what is trained


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_losses_and_audit_are_the_same_in_each_layout(small, whole, layout, unit):
    folder = small.run_in_process(
        OURS, *BASE, UNITS[unit], f"micro_batch_layout={layout}"
    ).output_dir
    assert where_steps_stood(folder) == where_steps_stood(whole)
    assert figures(folder, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-5)
    assert min(figures(folder, "micro_batches")) > 1
    padding = figures(folder, "padding_fraction")
    assert padding == [0, 0] if layout == "packed" else min(padding) > 0


# --- the fastest


def chosen(folder):
    """Return the fastest layout, amount and unit of each start."""
    said = records(folder, "throughput")
    return [tuple(record[key] for key in ("layout", "amount", "unit")) for record in said]


@pytest.fixture(scope="module")
def automatic(small):
    keys = (*BASE, *AUTO, "batch_size=8", "save_every_n_steps=1")
    return keys, small.run_in_process(OURS, *keys)


@pytest.mark.slow
def test_auto_logs_its_timings_and_trains_the_same(small, automatic):
    _, finished = automatic
    (said,) = records(finished.output_dir, "throughput")
    assert said["layout"] in ("grouped", "packed")
    assert len(said["timed"]) == said["trials"] >= 1
    assert (said["layout"], {"amount": said["amount"], "unit": said["unit"]}) in [
        (trial["kind"], trial["limit"]) for trial in said["timed"]
    ]
    assert all(
        trial["tokens_per_second"] > 0 and 0 <= trial["padding"] < 1 for trial in said["timed"]
    )
    (plan,) = records(finished.output_dir, "plan")
    assert (plan["limit"], plan["unit"]) == (said["amount"], said["unit"])
    padded = small.run_in_process(OURS, *BASE, "batch_size=8", "drop_last=False").output_dir
    assert where_steps_stood(finished.output_dir) == where_steps_stood(padded)
    assert figures(finished.output_dir, "loss") == pytest.approx(figures(padded, "loss"), rel=1e-5)


def test_a_resumed_run_keeps_the_chosen_layout_and_its_bits_without_probe_json(small, automatic):
    keys, finished = automatic
    folder = stopped_after(finished, small, 2)
    (folder / "adaptive_batch" / "probe.json").unlink()
    resume_run(small, folder, *keys)
    assert len(set(chosen(folder))) == 1
    assert run_differences(folder, finished.output_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "kinds"),
    [
        (("uniform_micro_batches=rows",), {"padded"}),
        (("pad_to_multiple_of=8",), {"grouped"}),
        (("micro_batch_layout=packed",), {"packed"}),
        (("collate_fn=torchtune.data.padded_collate_sft",), {"grouped"}),
    ],
    ids=str,
)
def test_only_layouts_that_are_allowed_are_timed(small, keys, kinds):
    folder = small.run_in_process(OURS, *BASE, *AUTO, *keys).output_dir
    (said,) = records(folder, "throughput")
    assert {trial["kind"] for trial in said["timed"]} == kinds


def test_a_first_row_without_labels_does_not_prevent_packing(small):
    """The first row is what packing is tried with."""
    lengths = f"dataset.lengths={[1, 1, *LENGTHS[2:]]}"
    padded, packed = (
        small.run_in_process(OURS, *BASE, lengths, f"micro_batch_layout={layout}").output_dir
        for layout in ("padded", "packed")
    )
    assert figures(packed, "loss") == pytest.approx(figures(padded, "loss"), rel=1e-5)


# --- planned


def test_a_text_or_a_number_in_a_row_changes_nothing_under_torchtunes_collate(small):
    ids = (*BASE, "dataset._component_=support.components.WithIds", "micro_batch_tokens=100")
    packed = "micro_batch_layout=packed"
    without = small.run_in_process(OURS, *BASE, "micro_batch_tokens=100", packed)
    assert small.run_in_process(OURS, *ids, packed).losses == without.losses != []
    with pytest.raises(SettingError, match=r"^micro_batch_tokens=100: the memory of id, source "):
        small.run_in_process(
            OURS, *ids, "collate_fn=torchtune.data.padded_collate_sft", "preview=True"
        )


@pytest.mark.slow
def test_two_ranks_choose_the_same_layout_and_train_what_one_device_trains(small, whole):
    keys = (*BASE, "batch_size=8", "drop_last=False", *AUTO)
    folder = small.run(OURS, *keys, ranks=2).output_dir
    assert [sorted(step["rows"]) for step in records(folder, "step")] == [
        sorted(step["rows"]) for step in records(whole, "step")
    ]
    assert figures(folder, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-5)
    assert audit(folder).holds
    assert len(chosen(folder)) == 1
