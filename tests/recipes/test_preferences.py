"""Preference pairs through the real command line: what adapts the batch works as for other rows."""

from __future__ import annotations

import json

import pytest
from support.cli import FINDS, figures, records, same_weights
from support.preferences import LORA, METRICS, OURS, PAIRS, reference_of, write_pairs
from support.stops import stopped_after

from adaptive_batch.errors import SettingError

# AdamW would turn rounding into steps.
SGD = ("optimizer=torch.optim.SGD", "optimizer.lr=0.05", "epochs=1")
SPLITS = {
    "rows": ("micro_batch_size=3",),
    "tokens": ("micro_batch_tokens=300",),
    "tokens, packed": ("micro_batch_tokens=300", "micro_batch_layout=packed"),
    "as much as fits": ("micro_batch_size=auto", "probe.device_memory=8MiB"),
    "as many tokens as fit": ("micro_batch_tokens=auto", "probe.device_memory=8MiB"),
}


@pytest.fixture(scope="module")
def lora(small):
    return (*LORA, *write_pairs(small))


@pytest.fixture(scope="module")
def full(small):
    return (*PAIRS, *reference_of(small), *write_pairs(small))


@pytest.fixture(scope="module", params=["lora", "full"])
def kind(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def whole(small, kind):
    return small.run_in_process(OURS, *kind, *SGD, "batch_size=16")


def of_each(cases, alone):
    """Each case with adapters, and `alone` with every weight: how it divides rows is the same."""
    slow = {"as many tokens as fit": pytest.mark.slow}
    pairs = [("full", alone)]
    pairs += [pytest.param("lora", case, marks=slow.get(case, ())) for case in cases]
    return pytest.mark.parametrize(("kind", "case"), pairs, indirect=["kind"])


@of_each(SPLITS, "rows")
def test_losses_and_metrics_do_not_depend_on_the_split(small, kind, whole, case):
    divided = small.run_in_process(OURS, *kind, *SGD, "batch_size=16", *SPLITS[case])
    assert min(figures(divided, "micro_batches")) > 1
    assert "packed" not in case or not any(figures(divided, "padding_fraction"))
    assert figures(divided, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-5)
    for name in METRICS:
        # Means of logits cover padding, of which a split has less.
        if not name.startswith("logits/"):
            expected = pytest.approx(figures(whole, name), rel=1e-3, abs=1e-5)
            assert figures(divided, name) == expected, name


# A reference that runs apart from the micro-batches of training.
APART = {
    "a number": ("reference_micro_batch_size=5",),
    "as many as fit": ("reference_micro_batch_size=auto", "probe.device_memory=24MiB"),
    "as many as fit in both": (
        "reference_micro_batch_size=auto",
        "micro_batch_size=auto",
        "probe.device_memory=24MiB",
    ),
}


OF_THREE = (
    *SGD, "batch_size=16", "probe.cache=False", "epochs=2", "lr_scheduler.num_warmup_steps=0",
    "micro_batch_size=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def within(small, kind):
    """A run whose reference runs within the micro-batches of training."""
    return small.run_in_process(OURS, *kind, *OF_THREE)


@of_each(APART, "a number")
def test_losses_and_metrics_do_not_depend_on_where_the_reference_runs(small, kind, within, case):
    finished = small.run_in_process(OURS, *kind, *OF_THREE, *APART[case])
    assert figures(finished, "loss") == pytest.approx(figures(within, "loss"), rel=1e-5)
    assert min(map(abs, figures(within, "rewards/margins")[1:])) > 1e-3
    for name in METRICS:
        if name.startswith("logits/"):
            continue
        # In the first step both models are one, and rounding decides which reward is larger.
        first = 1 if name == "rewards/accuracies" else 0
        expected = pytest.approx(figures(within, name)[first:], rel=1e-3, abs=1e-5)
        assert figures(finished, name)[first:] == expected, name
    bounds = records(finished, "reference_bound")
    assert len(bounds) == ("auto" in str(APART[case]))
    for bound in bounds:
        assert 3 < bound["max_batch_size"] <= 16
        assert bound["peak_bytes"] <= 24 * 2**20


@pytest.mark.parametrize(
    "keys",
    [
        ("optimizer_in_bwd=True",),
        ("gradient_accumulation_steps=2", "batch_size=4", "clip_grad_norm=1.0"),
    ],
)
def test_a_reference_apart_goes_with_what_changes_a_step(small, full, keys):
    own = (*full, *SGD, "batch_size=8", *keys)
    alone = ("reference_micro_batch_size=auto", "probe.device_memory=24MiB", "probe.cache=False")
    within, apart = (small.run_in_process(OURS, *own, *more) for more in ((), alone))
    assert len(records(apart, "reference_bound")) == 1
    for name in ("loss", "rewards/margins", "micro_batches"):
        assert figures(apart, name) == pytest.approx(figures(within, name), rel=1e-4, abs=1e-5)


def resumed_after_step_three(small, begun, *own):
    """A copy of a run that was ended after step 3, trained to its end."""
    folder = stopped_after(begun, small, 3)
    return small.run_in_process(OURS, *own, f"output_dir={folder}", "resume_from_checkpoint=True")


def test_more_pairs_fit_in_training_where_the_reference_runs_apart(small, kind):
    own = (*kind, *FINDS, "probe.cache=False")
    within, apart = (
        records(small.run_in_process(OURS, *own, *keys), "bound")[0]["max_batch_size"]
        for keys in ((), ("reference_micro_batch_size=auto",))
    )
    assert apart > within


def test_what_a_search_found_for_the_reference_is_tried_once_more(small, lora, capsys):
    folder = small.fresh_folder()
    own = (*lora, *FINDS, "reference_micro_batch_size=auto", f"output_dir={folder}")
    small.run_in_process(OURS, *own, "overwrite_output_dir=True")
    capsys.readouterr()
    small.run_in_process(OURS, *own, "preview=True")
    assert "a search found that before" in capsys.readouterr().out
    again = small.run_in_process(OURS, *own, "overwrite_output_dir=True")
    first, second = records(again, "reference_bound")
    assert [first["from_cache"], second["from_cache"]] == [False, True]
    assert second["max_batch_size"] == first["max_batch_size"]


def test_a_preview_reads_no_weights_and_names_what_the_reference_runs_at_once(small, lora, capsys):
    for size, says in (("7", "reference: 7 rows at once"), ("auto", "a search finds")):
        small.run_in_process(
            OURS,
            *lora,
            "preview=True",
            f"reference_micro_batch_size={size}",
            "epochs=1",
            "checkpointer.checkpoint_dir=nowhere",
        )
        assert says in capsys.readouterr().out


def test_a_run_whose_reference_runs_apart_resumes_with_the_same_bits(small, lora):
    own = (
        *lora, "epochs=1", "save_every_n_steps=3", "optimizer.lr=1e-3",
        "reference_micro_batch_size=auto", "probe.device_memory=24MiB",
    )  # fmt: skip
    begun = small.run_in_process(OURS, *own)
    resumed = resumed_after_step_three(small, begun, *own)
    assert figures(resumed, "loss")[-5:] == figures(begun, "loss")[-5:]
    bounds = {record["max_batch_size"] for record in records(resumed, "reference_bound")}
    assert len(bounds) == 1


def test_a_run_resumes_with_its_reference_elsewhere(small, lora):
    """What is saved of the reference's limit is of no use, or is not there, and that is logged."""
    within = (*lora, "epochs=1", "save_every_n_steps=3", "optimizer.lr=1e-3")
    for first, second, sizes in (
        ((), ("reference_micro_batch_size=4",), (None, 4)),
        (("reference_micro_batch_size=4",), (), (4, None)),
    ):
        begun = small.run_in_process(OURS, *within, *first)
        resumed = resumed_after_step_three(small, begun, *within, *second)
        expected = pytest.approx(figures(begun, "loss")[-5:], rel=1e-5)
        assert figures(resumed, "loss")[-5:] == expected
        (change,) = records(resumed, "reference_micro_batch_size")
        assert (change["before"], change["after"]) == sizes


def test_the_probe_shows_what_fits_in_the_reference(small, lora, capsys):
    own = ("probe.device_memory=24MiB", "probe.cache=False", "reference_micro_batch_size=auto")
    small.run_in_process("adaptive_probe", *lora, *own)
    assert "the reference alone, without gradients:" in capsys.readouterr().out


def test_more_pairs_than_fit_in_the_reference_are_refused(small, lora):
    own = ("micro_batch_size=auto", "probe.device_memory=16MiB", "probe.cache=False")
    with pytest.raises(SettingError, match=r"rows fit; give \d+ or less, or auto") as refused:
        small.run_in_process(OURS, *lora, *own, "reference_micro_batch_size=30")
    assert refused.value.key == "reference_micro_batch_size"


def test_a_second_model_takes_its_memory_from_the_rows(small, lora, full):
    """What is held beside the rows: a base once under adapters, and twice with every weight."""
    estimated = {}
    for kind, own in (("lora", lora), ("full", full)):
        finished = small.run_in_process(
            "adaptive_estimate", *own, "estimate.devices=[32MiB]", "estimate.context=0",
            "estimate.sequence_lengths=[64]", "estimate.changes=False",
        )  # fmt: skip
        path = finished.output_dir / "adaptive_batch" / "estimate.json"
        estimated[kind] = json.loads(path.read_text())["devices"][0]["lengths"][0]
    assert estimated["lora"]["max_batch_size"] > estimated["full"]["max_batch_size"] > 0


def test_an_estimate_has_the_pairs_that_fit_in_the_reference_alone(small, full):
    estimated = {}
    for size in ("null", "auto"):
        finished = small.run_in_process(
            "adaptive_estimate", *full, "estimate.devices=[20MiB]", "estimate.context=0",
            "estimate.headroom=0", "estimate.sequence_lengths=[64]", "estimate.changes=False",
            f"reference_micro_batch_size={size}",
        )  # fmt: skip
        path = finished.output_dir / "adaptive_batch" / "estimate.json"
        (estimated[size],) = json.loads(path.read_text())["devices"]
    within, apart = (estimated[size]["lengths"][0]["max_batch_size"] for size in ("null", "auto"))
    assert apart > within
    assert estimated["null"]["reference_rows"] == []
    assert estimated["auto"]["reference_rows"][0] > apart
    # What a trial counts is what is estimated.
    finished = small.run_in_process(
        OURS, *full, "reference_micro_batch_size=auto", "probe.device_memory=20MiB", "epochs=1",
        "probe.headroom=0.0", "probe.sequence_length=64", "probe.cache=False", "batch_size=32",
    )  # fmt: skip
    (bound,) = records(finished, "reference_bound")
    assert bound["max_batch_size"] == estimated["auto"]["reference_rows"][0] < 32


def test_a_run_resumes_from_a_point_within_an_epoch_with_the_same_bits(small, full):
    own = (*full, "epochs=1", "save_every_n_steps=3", "optimizer.lr=1e-3")
    begun = small.run_in_process(OURS, *own)
    resumed = resumed_after_step_three(small, begun, *own)
    assert figures(resumed, "loss")[-5:] == figures(begun, "loss")[-5:]
    assert same_weights(resumed.weights(0), begun.weights(0))


def test_the_batch_grows_with_its_rate(small, lora):
    finished = small.run_in_process(
        OURS, *lora, "epochs=2", "batch_increase_function=support.components.four_more",
        "grow_beyond_maximum=True", "probe.device_memory=24MiB",
        "lr_scaling=sqrt", "log_gradient_noise_scale=True",
    )  # fmt: skip
    sizes = figures(finished, "batch_size")
    assert sizes[-1] == sizes[0] + 4
    assert all(loss > 0 for loss in figures(finished, "loss"))


def test_pairs_are_validated_on(small, lora):
    """The loss of validation is the mean over its pairs, here those of the first step."""
    held_out = (
        "dataset_val._component_=torchtune.datasets.preference_dataset",
        "dataset_val.source=json",
        f"dataset_val.data_files={small.folder}/pairs.jsonl",
        "dataset_val.split=train",
        "run_val_every_n_steps=1",
    )
    own = (*lora, *SGD, "max_steps_per_epoch=1", "batch_size=32", "optimizer.lr=0")
    losses = [
        small.run_in_process(OURS, *own, *held_out, f"batch_size_val={size}") for size in (32, 5)
    ]
    for finished in losses:
        (loss,) = map(float, finished.figures("val_loss"))
        assert loss == pytest.approx(float(finished.losses[0]), rel=1e-6)


def test_the_probe_finds_the_bound_of_pairs(small, lora):
    own = (*lora, "probe.device_memory=24MiB", "probe.cache=False")
    trained = small.run_in_process(OURS, *own, *FINDS)
    probed = small.run_in_process("adaptive_probe", *own, "probe.round_to_power_of_two=False")
    (bound,) = (record["max_batch_size"] for record in records(trained, "bound"))
    saved = json.loads((probed.output_dir / "adaptive_batch" / "probe.json").read_text())
    assert saved["max_batch_size"] == bound


@pytest.mark.parametrize(
    ("recipe", "key", "overrides"),
    [
        (OURS, "dataset", ("dataset.packed=True",)),
        (OURS, "micro_batch_layout", ("micro_batch_layout=packed", "pad_to_multiple_of=8")),
        (OURS, "loss", ("loss=torch.nn.CrossEntropyLoss",)),
        (OURS, "loss", ("loss.beta=abc",)),
        ("adaptive_lora_finetune", "loss", ()),
    ],
)
def test_what_is_of_another_recipe_is_refused_before_weights_load(
    small, lora, recipe, key, overrides
):
    with pytest.raises(SettingError) as refused:
        small.run_in_process(recipe, *lora, *overrides, "checkpointer.checkpoint_dir=nowhere")
    assert refused.value.key == key


def test_full_fine_tuning_without_a_reference_is_refused(small, full):
    without = [override for override in full if not override.startswith("ref_checkpointer")]
    with pytest.raises(SettingError, match="the reference is a model of its own") as refused:
        small.run_in_process(OURS, *without, "checkpointer.checkpoint_dir=nowhere")
    assert refused.value.key == "ref_checkpointer"
    missing = "ref_checkpointer.checkpoint_dir=nowhere"
    with pytest.raises(SettingError, match="nowhere") as refused:
        small.run_in_process(OURS, *full, missing)
    assert refused.value.key == "ref_checkpointer"
