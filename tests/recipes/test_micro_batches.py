"""Micro-batches, layouts and out-of-memory errors do not change the rows and losses of steps."""

import pytest
from support.cli import OURS, block, figures, records, resume_run, same_weights
from support.stops import stopped_after
from support.trajectories import SGD, run_differences

from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.report import audit

LENGTHS = [5 + (11 * row) % 50 for row in range(32)]
ROWS = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={LENGTHS}")
# SGD, since AdamW would amplify rounding differences.
SLOW = (*SGD, "optimizer.lr=0.05")
BASE = (*ROWS, *SLOW, "epochs=1", "batch_size=16", "model.max_seq_len=64")
LARGEST = (*BASE, "probe.objective=largest")
SMALL_MEMORY, MUCH_MEMORY = "probe.device_memory=10MiB", "probe.device_memory=1GiB"
LAYOUTS = ("padded", "grouped", "packed")
AUTO = ("micro_batch_tokens=auto", MUCH_MEMORY)
UNITS = {"rows": "micro_batch_size=5", "tokens": "micro_batch_tokens=150"}


def where_steps_stood(folder):
    """Return the position of each step in the data; fail if the audit finds problems."""
    names = ("step", "epoch", "position", "batch_size", "samples_seen", "tokens_seen", "rows")
    assert audit(folder).holds
    return [tuple(step[name] for name in names) for step in records(folder, "step")]


@pytest.fixture(scope="module")
def whole(small):
    return small.run_in_process(OURS, *BASE, "drop_last=False").output_dir


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


def chosen(folder):
    """Return the fastest layout, amount and unit of each start."""
    said = records(folder, "throughput")
    return [tuple(record[key] for key in ("layout", "amount", "unit")) for record in said]


@pytest.fixture(scope="module")
def automatic(small):
    keys = (*BASE, *AUTO, "batch_size=8", "save_every_n_steps=1")
    return keys, small.run_in_process(OURS, *keys)


@pytest.mark.slow
def test_auto_logs_its_timings_and_does_not_change_losses(small, automatic):
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


def test_a_resumed_run_without_probe_json_keeps_the_chosen_layout_and_its_bits(small, automatic):
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
def test_only_allowed_layouts_are_timed(small, keys, kinds):
    folder = small.run_in_process(OURS, *BASE, *AUTO, *keys).output_dir
    (said,) = records(folder, "throughput")
    assert {trial["kind"] for trial in said["timed"]} == kinds


def test_a_first_row_without_labels_does_not_prevent_packing(small):
    """The packing check runs the first row."""
    lengths = f"dataset.lengths={[1, 1, *LENGTHS[2:]]}"
    padded, packed = (
        small.run_in_process(OURS, *BASE, lengths, f"micro_batch_layout={layout}").output_dir
        for layout in ("padded", "packed")
    )
    assert figures(packed, "loss") == pytest.approx(figures(padded, "loss"), rel=1e-5)


def test_texts_and_numbers_in_rows_do_not_change_losses_with_torchtunes_collate(small):
    ids = (*BASE, "dataset.columns=[tokens,labels,id,source]", "micro_batch_tokens=100")
    packed = "micro_batch_layout=packed"
    without = small.run_in_process(OURS, *BASE, "micro_batch_tokens=100", packed)
    assert small.run_in_process(OURS, *ids, packed).losses == without.losses != []
    with pytest.raises(SettingError, match=r"^micro_batch_tokens=100: the memory of id, source "):
        small.run_in_process(
            OURS, *ids, "collate_fn=torchtune.data.padded_collate_sft", "preview=True"
        )


@pytest.mark.slow
def test_two_ranks_choose_one_layout_and_have_the_losses_of_one_device(small, whole):
    keys = (*BASE, "batch_size=8", "drop_last=False", *AUTO)
    folder = small.run(OURS, *keys, ranks=2).output_dir
    assert [sorted(step["rows"]) for step in records(folder, "step")] == [
        sorted(step["rows"]) for step in records(whole, "step")
    ]
    assert figures(folder, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-5)
    assert audit(folder).holds
    assert len(chosen(folder)) == 1


def test_a_micro_batch_above_a_known_bound_is_refused(small):
    found = ("use_maximum_batch_size=True", SMALL_MEMORY)
    for setting in ("micro_batch_size=30", "micro_batch_tokens=1600"):
        key, _, value = setting.partition("=")
        with pytest.raises(
            SettingError, match=rf"^{key}={value}: .* \d+ rows fit; give \d+ or less(, or auto)?$"
        ):
            small.run_in_process(OURS, *LARGEST, setting, *found)


@pytest.mark.slow
def test_a_run_survives_real_out_of_memory_errors(small):
    lengths = [1000 - 7 * row for row in range(32)]
    large = (
        "model.max_seq_len=1024",
        "epochs=1",
        "batch_size=16",
        "micro_batch_size=16",
        *SLOW,
        ROWS[0],
        f"dataset.lengths={lengths}",
    )
    limit = {"after_step": 1, "bytes_left": 200 * 1024**2}
    confined = block("metric_logger", "support.stops.TakingMemory", **limit)
    survived = small.run(OURS, *large, *confined)
    undisturbed = small.run_in_process(OURS, *large)
    changes = records(survived, "limit")
    assert changes
    assert all(change["out_of_memory"] for change in changes)
    counted = figures(survived, "oom_count")
    assert counted[0] == 0
    assert counted[-1] == len(changes)
    assert where_steps_stood(survived.output_dir) == where_steps_stood(undisturbed.output_dir)
    assert figures(survived, "tokens_seen")[-1] == sum(lengths)
    assert figures(survived, "loss") == pytest.approx(figures(undisturbed, "loss"), rel=1e-4)
    assert len(survived.weights(0))


def test_an_oom_of_the_optimizer_step_is_not_retried_and_the_run_resumes(small):
    keys = (*ROWS, "optimizer=support.components.FailingAdamW", "batch_size=16")
    undisturbed = small.run_in_process(OURS, *keys, "optimizer.fails_at=-1")
    output = small.fresh_folder()
    fails = ("optimizer.fails_at=4", f"output_dir={output}")  # in the second epoch
    with pytest.raises(
        DoesNotFitError,
        match=r"the optimizer step ran out of memory on cpu: .*resume_from_checkpoint",
    ):
        small.run_in_process(OURS, *keys, *fails)
    assert [path.name for path in output.glob("epoch_*")] == ["epoch_0"]
    assert len(figures(output, "loss")) == 3
    rest = resume_run(small, output, *keys, "optimizer.fails_at=-1")
    assert same_weights(rest.weights(1), undisturbed.weights(1))


def test_with_the_optimizer_in_backward_a_step_that_does_not_fit_is_refused(small):
    in_backward = (*LARGEST, "optimizer_in_bwd=True", "micro_batch_size=auto")
    says = r"optimizer_in_bwd=True: a step may have 16 rows, of which \d+ fit here"
    with pytest.raises(SettingError, match=says):
        small.run_in_process(OURS, *in_backward, SMALL_MEMORY)
    whole_steps = small.run_in_process(OURS, *in_backward, MUCH_MEMORY)
    assert set(figures(whole_steps, "micro_batches")) == {1}
