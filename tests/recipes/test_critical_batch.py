"""Through the real command line: the critical batch by branches from a checkpoint, which leave no
trace.
"""

import hashlib
import json
import math
import shutil

import pytest
from support.adapters import LORA
from support.adapters import OURS as ADAPTERS
from support.cli import OURS, same_weights

from adaptive_batch.errors import CheckpointError, NonfiniteLossError, SettingError
from adaptive_batch.report import read_records

PROBE = "adaptive_probe"
MEASURES = ("probe.critical_batch=True", "probe.critical_batch_rows=16")
COSINE = (
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
VALIDATED = (
    "dataset_val._component_=support.components.OfLengths",
    f"dataset_val.lengths={[30 - 2 * row for row in range(10)]}",
    "run_val_every_n_steps=1",
)
RUN = (*COSINE, "save_every_n_steps=3")


def files(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def measured(folder):
    return json.loads((folder / "adaptive_batch" / "critical_batch.json").read_text())


def copied(small, finished, *, until="step_6"):
    """The folder of a run as it was at a resume point."""
    folder = small.fresh_folder()
    shutil.copytree(finished.output_dir, folder, dirs_exist_ok=True)
    for path in [
        *folder.glob("epoch_*"),
        *folder.glob("step_*"),
        folder / "recipe_state",
        folder / "logs",
    ]:
        if path.name != until and path.exists():
            shutil.rmtree(path)
    return folder


@pytest.fixture(scope="module")
def trained(small):
    return small.run_in_process(OURS, *RUN, "model.attn_dropout=0.2")


@pytest.mark.slow
def test_it_prints_the_branches_and_leaves_one_record_and_no_trace(small, trained, capsys):
    folder = copied(small, trained)
    before = files(folder)
    capsys.readouterr()
    small.run_in_process(PROBE, *RUN, *MEASURES, "model.attn_dropout=0.2", f"output_dir={folder}")
    shown = capsys.readouterr().out.strip().splitlines()
    after = files(folder)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {
        "adaptive_batch/critical_batch.json"
    }
    record = measured(folder)
    assert record["from"] == str(folder / "step_6")
    assert (record["steps"], record["samples"], record["rows"]) == (6, 24, 16)
    assert record["held_out_rows"] == 16
    branches = record["branches"]
    assert [(one["batch"], one["steps"]) for one in branches] == [(1, 16), (2, 8), (4, 4)]
    assert record["rows_trained"] == 48
    assert record["share_of_run"] == 48 / 64
    best = min(branches, key=lambda one: one["loss"])
    assert best["above"] == best["standard_error"] == 0
    for one in (
        branches
    ):  # the rate of the cosine in the sixth of 16 steps, held, by the root of the batch
        peak = 0.01 * 0.5 * (1 + math.cos(math.pi * (5 - 2) / (16 - 2)))
        assert one["lr"] == pytest.approx(peak * math.sqrt(one["batch"] / 4), rel=1e-9)
        assert one["above"] == pytest.approx(one["loss"] / best["loss"] - 1)
    table = [line for line in shown if line.split()[:1] in (["1"], ["2"], ["4"])]
    assert [line.split()[:2] for line in table] == [["1", "16"], ["2", "8"], ["4", "4"]]
    (found,) = [line for line in shown if line.startswith("critical batch: ")]
    assert found.startswith(f"critical batch: {record['critical_batch']} row")
    assert f"{record['tokens']}tok: {record['critical_batch']}" in "".join(shown)
    assert [line for line in shown if line.startswith("cost: 48 rows trained, 75% of the run's; ")]

    rest = small.run_in_process(
        OURS, *RUN, "model.attn_dropout=0.2", f"output_dir={folder}", "resume_from_checkpoint=True"
    )
    assert same_weights(rest.weights(1), trained.weights(1))
    assert rest.losses == trained.losses[6:]


@pytest.mark.slow
def test_the_branch_of_the_configured_batch_is_the_training_that_would_follow(small):
    """Without a schedule the four steps of the branch are those that a run takes, and so is the
    loss after them.
    """
    run = small.run_in_process(OURS, "save_every_n_steps=3", *VALIDATED)
    folder = copied(small, run, until="step_3")
    small.run_in_process(PROBE, *MEASURES, *VALIDATED, f"output_dir={folder}")
    record = measured(folder)
    said = {
        one["steps"]: one["val_loss"]
        for one in read_records(run.output_dir / "adaptive_batch" / "run.jsonl")
        if one["kind"] == "validation"
    }
    assert record["held_out_rows"] == 10
    assert record["loss_before"] == pytest.approx(said[3], rel=1e-5)
    assert record["branches"][-1]["batch"] == 4
    assert record["branches"][-1]["loss"] == pytest.approx(said[7], rel=1e-4)

    # each branch begins at the checkpoint, whatever was branched before: alone the last is the same
    again = copied(small, run, until="step_3")
    small.run_in_process(PROBE, *MEASURES, *VALIDATED, f"output_dir={again}", "micro_batch_size=1")
    for one, other in zip(measured(again)["branches"], record["branches"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


def test_held_out_rows_are_never_trained(small):
    from support import components

    keys = (
        "dataset._component_=support.components.OfLengths",
        f"dataset.lengths={[12] * 40}",
        "batch_size=4",
    )
    watched = ("model._component_=support.components.watched",)
    components.SEEN.clear()
    small.run_in_process(
        PROBE, *keys, *watched, "probe.critical_batch=True", "probe.critical_batch_rows=18"
    )
    assert components.SEEN
    rows = {True: set(), False: set()}
    for seen in components.SEEN:
        rows[seen.trained].update(seen.rows)
    assert len(rows[True]) == 16
    assert len(rows[False]) == 24
    assert not rows[True] & rows[False]


@pytest.mark.slow
def test_it_branches_from_the_base_where_nothing_is_saved_and_from_what_is_named(small, trained):
    fresh = small.fresh_folder()
    small.run_in_process(PROBE, *MEASURES, f"output_dir={fresh}")
    assert (measured(fresh)["from"], measured(fresh)["steps"]) == ("the base checkpoint", 0)
    other = small.fresh_folder()
    named = f"probe.critical_batch_from={trained.output_dir / 'step_9'}"
    small.run_in_process(
        PROBE, *RUN, *MEASURES, "model.attn_dropout=0.2", f"output_dir={other}", named
    )
    assert (measured(other)["from"], measured(other)["steps"]) == (
        str(trained.output_dir / "step_9"),
        9,
    )
    # Where the other key names none, the path that training would resume from does.
    epoch = f"resume_from_checkpoint={trained.output_dir / 'epoch_0'}"
    small.run_in_process(
        PROBE, *RUN, *MEASURES, "model.attn_dropout=0.2", f"output_dir={other}", epoch
    )
    assert measured(other)["steps"] == 8
    assert {path.name for path in other.iterdir()} == {"adaptive_batch"}


def test_micro_batches_shrink_where_they_run_out_of_memory_and_nothing_else_changes(small):
    found = []
    for rows_fit in (4, 1):
        folder = small.fresh_folder()
        keys = (
            "model._component_=support.components.watched",
            f"model.rows_fit={rows_fit}",
            "model.rows_fit_evaluated=1",
        )
        small.run_in_process(PROBE, *MEASURES, f"output_dir={folder}", *keys)
        found.append([one["loss"] for one in measured(folder)["branches"]])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_the_rule_and_the_batch_that_the_rate_belongs_to_are_those_configured(small):
    for keys, rates in (
        (("lr_scaling=linear",), [0.0025, 0.005, 0.01]),
        (("lr_scaling=sqrt", "reference_batch_size=16"), [0.0025, 0.01 / math.sqrt(8), 0.005]),
        (
            (
                "reference_batch_size=24tok",
                "dataset._component_=support.components.OfLengths",
                f"dataset.lengths={[12] * 32}",
            ),
            [0.01 / math.sqrt(2), 0.01, 0.01 * math.sqrt(2)],
        ),
    ):
        folder = small.fresh_folder()
        small.run_in_process(PROBE, *MEASURES, f"output_dir={folder}", *keys)
        assert [one["lr"] for one in measured(folder)["branches"]] == pytest.approx(rates)


@pytest.mark.slow
def test_the_noise_scale_that_a_checkpoint_has_measured_stands_beside_it(small, capsys):
    keys = (
        "log_gradient_noise_scale=True",
        "micro_batch_size=1",
        "save_every_n_steps=54",
        "epochs=7",
    )
    run = small.run_in_process(OURS, *keys)
    small.run_in_process(PROBE, *keys, *MEASURES, f"output_dir={run.output_dir}")
    noise = measured(run.output_dir)["gradient_noise_scale"]
    assert noise is not None
    assert f"gradient noise scale in the checkpoint: {noise:.1f} rows" in capsys.readouterr().out


def test_adapters_branch_as_whole_models_do(small):
    run = small.run_in_process(ADAPTERS, *LORA, "save_every_n_steps=3", "epochs=1")
    before = files(run.output_dir)
    small.run_in_process(
        PROBE, *LORA, *MEASURES, "save_every_n_steps=3", "epochs=1", f"output_dir={run.output_dir}"
    )
    assert {
        name for name, content in files(run.output_dir).items() if before.get(name) != content
    } == {"adaptive_batch/critical_batch.json"}
    assert measured(run.output_dir)["steps"] == 6
    assert (
        measured(run.output_dir)["branches"][0]["loss"] != measured(run.output_dir)["loss_before"]
    )


@pytest.mark.nightly
def test_two_ranks_measure_what_one_does(small, trained):
    of_ranks = []
    for ranks in (None, 2):
        folder = copied(small, trained)
        small.run(
            PROBE,
            *RUN,
            *MEASURES,
            f"output_dir={folder}",
            "resume_allow_changes=[model]",
            ranks=ranks,
        )
        of_ranks.append(measured(folder))
    one, two = of_ranks
    assert [(b["batch"], b["lr"]) for b in two["branches"]] == [
        (b["batch"], b["lr"]) for b in one["branches"]
    ]
    assert [b["loss"] for b in two["branches"]] == pytest.approx(
        [b["loss"] for b in one["branches"]], rel=1e-3
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ("probe.critical_batch_from=/none/step_1",),
            r"probe\.critical_batch_from='/none/step_1': it is no resume point",
        ),
        (
            ("probe.critical_batch_from=BASE",),
            r"probe\.critical_batch_from=.*it is no resume point",
        ),
        (
            ("probe.critical_batch_rows=7",),
            r"probe\.critical_batch_rows=7: two branches of 4 steps take 8 rows",
        ),
        (
            ("probe.critical_batch_rows=17",),
            r"critical_batch_rows=17: two .* the dataset has 32, and holds out 16; give 16 or less",
        ),
        (
            ("batch_size=16", "probe.critical_batch_rows=16"),
            r"critical_batch_rows=16: two branches of 4 steps take 32 rows",
        ),
        (
            ("optimizer_in_bwd=True",),
            r"optimizer_in_bwd=True: a step of a branch has several micro-batches; set it",
        ),
        (("batch_tokens=100",), r"batch_tokens=100: probe\.critical_batch counts rows"),
        (("preview=True",), r"preview=True: it is for the recipes that train; remove it"),
        (
            (
                "optimizer=torch.optim.SGD",
                "~optimizer.fused",
                "scale_with_batch={beta2: half_life}",
            ),
            r"scale_with_batch\.beta2='half_life': the parameter groups of SGD have no betas",
        ),
        (
            ("probe.critical_batch_tolerance=1",),
            r"probe\.critical_batch_tolerance=1: give a share of at least 0",
        ),
        (("probe.critical_batch=3",), r"probe\.critical_batch=3: "),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_load(small, keys, message):
    keys = [key.replace("BASE", str(small.base)) for key in keys]
    unreadable = small.fresh_folder()
    shutil.copytree(small.base, unreadable, dirs_exist_ok=True)
    (unreadable / "model.safetensors").write_bytes(b"")
    with pytest.raises(SettingError, match=message):
        small.run_in_process(PROBE, *MEASURES, f"checkpointer.checkpoint_dir={unreadable}", *keys)


@pytest.mark.slow
def test_a_branch_neither_grows_nor_decays_whatever_rules_the_run_has(small, trained, capsys):
    """Resuming would refuse another growth function, schedule or clock than the checkpoint's; the
    base has the configured rate.
    """
    others = (
        "batch_increase_function=support.components.four_more",
        "lr_scheduler=null",
        "lr_clock=tokens",
    )
    found = []
    for rules in (COSINE, others):
        folder = copied(small, trained)
        small.run_in_process(
            PROBE, *MEASURES, "model.attn_dropout=0.2", *rules, f"output_dir={folder}"
        )
        found.append([(one["lr"], one["loss"]) for one in measured(folder)["branches"]])
    assert found[0] == found[1]
    base = small.fresh_folder()
    capsys.readouterr()
    small.run_in_process(PROBE, *MEASURES, *COSINE, f"output_dir={base}")
    assert "has no effect" not in capsys.readouterr().out
    assert [one["lr"] for one in measured(base)["branches"]] == pytest.approx(
        [0.005, 0.01 / math.sqrt(2), 0.01]
    )


def test_what_the_checkpoint_keeps_is_said_and_its_share_is_of_the_rows_that_the_run_takes(
    small, trained, capsys
):
    folder = copied(small, trained)
    kept = (
        "optimizer.weight_decay=0.5",
        "optimizer.betas=[0.5,0.6]",
        "clip_grad_norm=0.5",
        "batch_increase_function=support.components.four_more",
    )
    capsys.readouterr()
    small.run_in_process(
        PROBE, *RUN, *MEASURES, "model.attn_dropout=0.2", *kept, f"output_dir={folder}"
    )
    shown = capsys.readouterr().out
    assert (
        "optimizer={'weight_decay': 0.5, 'betas': [0.5, 0.6]} has no effect: the checkpoint's"
        " {'weight_decay': 0.01, 'betas': (0.9, 0.999)} is kept\n" in shown
    )
    assert "clip_grad_norm None -> 0.5: not what the checkpoint was trained with\n" in shown
    assert "batch_increase_function" not in shown
    base = small.fresh_folder()
    small.run_in_process(
        PROBE, *MEASURES, "epochs=1", "max_steps_per_epoch=2", f"output_dir={base}"
    )
    assert measured(base)["share_of_run"] == 48 / (2 * 4)


def test_a_checkpoint_whose_rate_is_0_is_refused(small):
    run = small.run_in_process(
        OURS, *COSINE, "save_every_n_steps=1", "max_steps_per_epoch=1", "epochs=1"
    )
    with pytest.raises(
        SettingError,
        match=r"critical_batch_from=None: the rate of .*step_1 is 0, as in the first step",
    ):
        small.run_in_process(PROBE, *COSINE, *MEASURES, f"output_dir={run.output_dir}")


def test_a_branch_that_diverges_is_worse_than_all_and_written_as_json_can_hold(small, capsys):
    folder, before_the_last = (
        small.fresh_folder(),
        16 + (16 + 16) + (8 + 16),
    )  # a micro-batch of one held-out row each
    spoiled = (
        "loss._component_=support.components.SpoiledLoss",
        f"loss.at=[{before_the_last + 1}]",
    )
    small.run_in_process(PROBE, *MEASURES, *spoiled, f"output_dir={folder}")
    text = (folder / "adaptive_batch" / "critical_batch.json").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["branches"][-1]["loss"] == "nan"
    assert record["critical_batch"] <= 2
    assert " nan " in capsys.readouterr().out


def test_a_damaged_checkpoint_or_a_loss_that_is_no_number_ends_with_the_remedy(small, trained):
    folder = copied(small, trained)
    next((folder / "step_6").glob("*.distcp")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="step_6 is skipped"):
        small.run_in_process(PROBE, *RUN, *MEASURES, f"output_dir={folder}")
    with pytest.raises(
        NonfiniteLossError, match=r"after steps of 1 is (nan|inf); lower optimizer\.lr"
    ):
        small.run_in_process(PROBE, *MEASURES, "optimizer.lr=1e38")
    unlabelled = (
        "dataset._component_=support.components.Masked",
        "dataset.rows=40",
        "dataset.labelled=39",
    )
    with pytest.raises(
        NonfiniteLossError, match=r"before any branch is nan; .* the labels of these rows"
    ):
        small.run_in_process(PROBE, *MEASURES, *unlabelled)


def test_a_tolerance_above_what_the_first_branch_gained_is_pointed_out(small, capsys):
    small.run_in_process(PROBE, *MEASURES, "optimizer.lr=1e-7")
    shown = capsys.readouterr().out
    assert (
        "critical batch: 4 rows at a tolerance of 1.00%; within 2 standard errors 4 to more than"
        " 4, the largest tried" in shown
    )
    assert (
        "less than the tolerance: a branch that learns nothing may pass; give more"
        " probe.critical_batch_rows" in shown
    )
    assert "the branches took 4 to 16 steps: with fewer than 64 the loss tells how many" in shown
    small.run_in_process(PROBE, *MEASURES)
    assert "may pass" not in capsys.readouterr().out
