"""A recipe resumes bit for bit, or is refused with the reason."""

import json
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.cli import FEATURES, OURS, block, records, resume_run, same_weights, weights
from support.stops import asks_at_step, asks_in_epoch, stopped_after
from support.trajectories import SCHEDULE, STEPS, run_differences

from adaptive_batch.checkpoint import checkpoints_in
from adaptive_batch.distributed import EXIT_STATUS
from adaptive_batch.errors import CheckpointError, SettingError
from adaptive_batch.report import audit

SAVES = "save_every_n_steps=3"
DROPOUT = FEATURES["dropout"]


def last_start(folder):
    return records(folder, "start")[-1]


def went_on_from(folder):
    """Return the name of the checkpoint that the last start resumed."""
    start = last_start(folder)
    assert start["resumed"]
    return Path(start["message"].split("resuming from ")[1].split(" ")[0]).name


def resume_from(small, folder, path, *overrides):
    return small.run_in_process(
        OURS, *overrides, f"output_dir={folder}", f"resume_from_checkpoint={path}"
    )


def assert_the_same(folder, whole):
    """Assert that the logged figures, the exported weights and the audit are those of `whole`."""
    assert run_differences(folder, whole.output_dir) == []


@pytest.fixture(scope="module")
def whole(small):
    return small.run_in_process(OURS, SAVES, *DROPOUT)


WAYS = {
    "optimizer in backward, rows that use random numbers": (
        "optimizer_in_bwd=True",
        *FEATURES["cosine"],
        "dataset._component_=support.components.Augmented",
        "batch_size=2",
    ),
    "packed rows, accumulation, asynchronous saves": (
        *FEATURES["SGD with momentum"],
        *FEATURES["accumulation"],
        "dataset.packed=True",
        "batch_size=1",
        "save_every_n_steps=2",
        "enable_async_checkpointing=True",
    ),
    "a dropped last step": ("batch_size=5", "drop_last=True", "max_steps_per_epoch=5"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_resumes_within_an_epoch_equals_the_uninterrupted_run(small, way):
    overrides = (SAVES, *DROPOUT, *WAYS[way])
    whole = small.run_in_process(OURS, *overrides)
    at = records(whole.output_dir, "resume_point")[0]["step"]
    folder = stopped_after(whole, small, at, taken_back=1)
    resume_run(small, folder, *overrides)
    assert went_on_from(folder) == f"step_{at}"
    assert last_start(folder)["progress"]["epoch_steps"] > 0
    assert_the_same(folder, whole)


def test_saving_checkpoints_changes_no_bit_of_training(small, whole):
    plain = small.run_in_process(OURS, *DROPOUT)
    assert plain.losses == whole.losses
    assert same_weights(plain.weights(1), whole.weights(1))


def test_a_moved_run_resumes_with_moved_data_and_reordered_model_keys(small, whole):
    moved = small.fresh_folder() / "elsewhere"
    shutil.move(stopped_after(whole, small, 9), moved)
    data = small.fresh_folder() / "rows.jsonl"
    shutil.copy(small.folder / "train.jsonl", data)
    config = OmegaConf.load(small.config)
    config.model = dict(reversed(list(config.model.items())))
    reordered = small.fresh_folder() / "reordered.yaml"
    OmegaConf.save(config, reordered)
    keys = (SAVES, *DROPOUT, f"output_dir={moved}", "resume_from_checkpoint=auto")
    small.run_in_process(OURS, *keys, f"dataset.data_files={data}", config=str(reordered))
    assert went_on_from(moved) == "step_9"
    assert not records(moved, "model")
    assert_the_same(moved, whole)


def test_a_finished_run_resumes_with_more_epochs(small):
    keys = ("keep_final_state=True", "optimizer_in_bwd=True")
    longer = small.run_in_process(OURS, *keys, "epochs=3")
    done = small.run_in_process(OURS, *keys, "epochs=1")
    for epochs in (2, 3):
        resume_run(small, done.output_dir, *keys, f"epochs={epochs}")
        assert went_on_from(done.output_dir) == f"step_{8 * (epochs - 1)}"
    assert_the_same(done.output_dir, longer)


def test_the_last_epoch_is_saved_without_state_if_the_disk_is_full(small, unlimited, capfd):
    keys = ("keep_final_state=True", "epochs=1", "max_steps_per_epoch=2")
    whole = small.run_in_process(OURS, *keys)
    weights_file, state_file = (
        whole.output_dir / name
        for name in ("epoch_0/model-00001-of-00001.safetensors", "step_2/__0_0.distcp")
    )
    between = (weights_file.stat().st_size + state_file.stat().st_size) // 2
    done = small.run_in_process(OURS, *keys, *full_disk(2, 3, num_bytes=between))
    said = "".join(capfd.readouterr())
    assert "the last epoch is saved without a checkpoint: saving" in said
    assert same_weights(done.weights(0), whole.weights(0))
    assert not list(done.output_dir.glob("step_*"))


def ends_early(small, folder, *overrides):
    with pytest.raises(AssertionError, match=f"exit status {EXIT_STATUS}"):
        small.run_in_process(OURS, *overrides, f"output_dir={folder}")
    return records(folder, "preempted")[-1]["step"]


AGAIN = "this run has no checkpoint yet, so it cannot resume; start it again"


def test_a_run_stopped_before_its_first_save_reports_that_nothing_is_saved(small, capfd):
    with pytest.raises(AssertionError, match=f"exit status {EXIT_STATUS}"):
        small.run_in_process(OURS, *asks_in_epoch(-1))
    assert f"stop requested: {AGAIN}" in capfd.readouterr().err


def test_a_signal_during_an_epochs_save_ends_the_run_after_it(small, whole):
    folder = small.fresh_folder()
    assert ends_early(small, folder, *DROPOUT, *asks_in_epoch(0)) == 8
    resume_run(small, folder, *DROPOUT)
    assert went_on_from(folder) == "step_8"
    assert_the_same(folder, whole)


def two_runs(small, whole):
    """Return a folder with a finished and a killed run, and their names."""
    folder = small.fresh_folder()
    ends_early(small, folder, "seed=8", *DROPOUT, *asks_at_step(4))
    for path in (*whole.output_dir.glob("step_*"), *whole.output_dir.glob("epoch_*")):
        shutil.copytree(path, folder / path.name)
    first, second = (last_start(path)["run"] for path in (whole.output_dir, folder))
    return folder, first, second


def test_two_runs_in_a_folder_resume_only_by_path(small, whole):
    folder, first, second = two_runs(small, whole)
    saves = (rf"run {first} \(.*step_15, epoch_0, epoch_1\)", rf"run {second} \(step_4\)")
    for asked in (True, "auto"):
        with pytest.raises(CheckpointError, match=r"holds saves of 2 runs: .*; name the") as error:
            resume_from(small, folder, asked, "seed=8", *DROPOUT)
        assert all(re.search(run, str(error.value)) for run in saves)
    with pytest.raises(SettingError, match=r"output_dir=.*: it holds the saves of .*step_4"):
        resume_from(small, folder, False, "seed=9", *DROPOUT)
    resume_from(small, folder, folder / "step_4", "seed=8", *DROPOUT)
    assert went_on_from(folder) == "step_4"
    assert last_start(folder)["run"] == second


def test_a_damaged_checkpoint_is_refused_by_name_and_otherwise_passed_over(small, whole):
    folder = stopped_after(whole, small, 9)
    path = folder / "step_9" / "state.pt"
    path.write_bytes(path.read_bytes()[:-1])
    problem = r"step_9 is skipped: state\.pt has .* bytes"
    refusal = rf"^resume_from_checkpoint=.*step_9 finds no complete checkpoint .*{problem}"
    with pytest.raises(CheckpointError, match=refusal):
        resume_from(small, folder, folder / "step_9", SAVES, *DROPOUT)
    resume_run(small, folder, SAVES, *DROPOUT)
    assert went_on_from(folder) == "step_8"
    (passed_over,) = records(folder, "passed_over")
    assert re.search(problem, passed_over["message"])
    assert_the_same(folder, whole)


def test_an_earlier_run_does_not_resume_in_place_of_a_damaged_later_run(small, whole):
    folder, first, _ = two_runs(small, whole)
    (folder / "step_4" / "resume.json").write_text("")
    message = r"step_4 is skipped: resume.json is .*step_15 belongs to an earlier run: .* remove"
    with pytest.raises(CheckpointError, match=message):
        resume_run(small, folder, *DROPOUT)
    shutil.rmtree(folder / "step_4")
    resume_run(small, folder, *DROPOUT)
    assert went_on_from(folder) == "step_15"
    assert last_start(folder)["run"] == first


@pytest.mark.parametrize(("steps", "removed"), [(9, "epoch_*"), (16, "step_*")])
def test_a_new_run_is_refused_in_a_folder_with_saves_of_another(small, whole, steps, removed):
    """The other run is finished or not, and has only checkpoints or only exports."""
    folder = stopped_after(whole, small, steps)
    for path in folder.glob(removed):
        shutil.rmtree(path)
    before = saves_in(folder)
    other = ("seed=8", "epochs=1", *DROPOUT, f"output_dir={folder}")
    refusal = rf"output_dir='.*': it holds the saves of run \w+ \(.*{before[-1]}.*\);"
    lost = folder / "adaptive_batch" / "lost.json"
    lost.write_text("{}")
    with pytest.raises(SettingError, match=f"^{refusal}"):
        small.run_in_process(OURS, *other)
    assert lost.exists()
    assert saves_in(folder) == before
    assert len(records(folder, "start")) == 1
    small.run_in_process(OURS, *other, "overwrite_output_dir=True")
    assert saves_in(folder) == ["epoch_0"]


@pytest.mark.parametrize("step", [8, 16])
def test_a_resumed_run_writes_an_export_that_a_kill_prevented(small, step):
    keys = (SAVES, *DROPOUT, "keep_final_state=True")
    whole = small.run_in_process(OURS, *keys)
    folder = stopped_after(whole, small, step)
    epoch = folder / f"epoch_{step // 8 - 1}"
    # The state after a kill during an export that replaces another.
    epoch.rename(folder / f".replaced-{epoch.name}")
    (folder / ".saving" / epoch.name).mkdir(parents=True)
    if step == 8:
        shutil.rmtree(folder / f".replaced-{epoch.name}")
    resume_run(small, folder, *keys)
    assert went_on_from(folder) == f"step_{step}"
    assert_the_same(folder, whole)


def test_a_resumed_run_replaces_the_export_of_another_run(small, whole):
    folder = small.fresh_folder()
    ends_early(small, folder, "seed=8", *DROPOUT, *asks_in_epoch(0))
    exported = weights(folder / "epoch_0")
    shutil.rmtree(folder / "epoch_0")
    shutil.copytree(whole.output_dir / "epoch_0", folder / "epoch_0")
    resume_from(small, folder, folder / "step_8", "seed=8", *DROPOUT)
    assert same_weights(weights(folder / "epoch_0"), exported)


def test_a_resumed_run_replaces_an_earlier_export_of_the_same_epoch(small, whole):
    folder = stopped_after(whole, small, 16)
    shutil.rmtree(folder / "step_16", ignore_errors=True)
    other = ("resume_allow_changes=[optimizer.lr]", "optimizer.lr=1e-3", "keep_final_state=True")
    again = small.fresh_folder()
    shutil.copytree(folder, again, dirs_exist_ok=True)
    resume_from(small, again, again / "step_9", SAVES, *DROPOUT, *other)
    # The state after a kill before the export, with an export of the first attempt.
    shutil.copytree(again / "step_16", folder / "step_16")
    resume_run(small, folder, SAVES, *DROPOUT, *other)
    assert same_weights(weights(folder / "epoch_1"), weights(again / "epoch_1"))
    assert not same_weights(weights(folder / "epoch_1"), whole.weights(1))


def test_checkpoints_of_another_version_are_refused_and_kept(small, whole):
    folder = stopped_after(whole, small, 6)
    for path in folder.glob("step_*/resume.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    before = saves_in(folder)
    with pytest.raises(CheckpointError, match="format 1, written by"):
        resume_from(small, folder, "auto", SAVES, *DROPOUT)
    with pytest.raises(SettingError, match=r"an unknown run \(step_3, step_6\)"):
        resume_from(small, folder, False, SAVES, *DROPOUT)
    assert saves_in(folder) == before


def test_torchtunes_recipe_state_is_refused(small):
    folder = small.fresh_folder()
    (folder / "epoch_0").mkdir()
    (folder / "recipe_state").mkdir()
    (folder / "recipe_state" / "recipe_state.pt").write_bytes(b"of torchtune")
    for asked in (True, "auto"):
        with pytest.raises(
            CheckpointError, match=r"whose recipe_state\.pt cannot be resumed, give"
        ):
            resume_from(small, folder, asked)
    with pytest.raises(SettingError, match=r"holds the saves of an unknown run \(epoch_0\);"):
        resume_from(small, folder, False)


def test_a_replaced_run_is_removed_after_the_first_complete_save(small, whole, unlimited):
    folder = stopped_after(whole, small, 9)
    replaces = ("overwrite_output_dir=True", "seed=8", "save_every_n_steps=2", *DROPOUT)
    before = saves_in(folder)
    assert before == ["epoch_0", "step_3", "step_6", "step_8", "step_9"]
    asking = asks_at_step(1)
    with pytest.raises(CheckpointError):
        small.run_in_process(OURS, *replaces, *full_disk(1, 99), f"output_dir={folder}")
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert saves_in(folder) == before
    ends_early(small, folder, *replaces, *asking)
    assert saves_in(folder) == ["step_1"]
    resume_run(small, folder, "seed=8", "save_every_n_steps=2", *DROPOUT)
    assert went_on_from(folder) == "step_1"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpointer.checkpoint_dir", "{}"),
        ("checkpointer.checkpoint_files", "[{}/model-00001-of-00001.safetensors]"),
        ("tokenizer.path", "{}/vocab.json"),
    ],
)
def test_files_that_a_new_run_reads_are_not_removed_with_the_replaced_run(small, whole, key, value):
    folder = stopped_after(whole, small, 9)
    keys = [f"{key}={value.format(folder / 'epoch_0')}", f"output_dir={folder}"]
    if key == "checkpointer.checkpoint_dir":
        keys.append("checkpointer.checkpoint_files=[model-00001-of-00001.safetensors]")
    with pytest.raises(SettingError, match=rf"^{key}='.*epoch_0.*': overwrite_output_dir=True"):
        small.run_in_process(OURS, *DROPOUT, *keys, "overwrite_output_dir=True")
    assert saves_in(folder) == ["epoch_0", "step_3", "step_6", "step_8", "step_9"]


def saves_in(folder):
    return sorted(path.name for path in (*folder.glob("epoch_*"), *folder.glob("step_*")))


def test_auto_starts_an_empty_folder_and_keeps_a_finished_run(small, whole):
    folder = small.fresh_folder()
    resume_from(small, folder, "auto", SAVES, *DROPOUT)
    assert not last_start(folder)["resumed"]
    assert_the_same(folder, whole)
    resume_from(small, folder, "auto", SAVES, *DROPOUT)
    assert_the_same(folder, whole)
    resume_from(small, folder, "auto", SAVES, *DROPOUT, "epochs=3")
    assert saves_in(folder)[:3] == ["epoch_0", "epoch_1", "epoch_2"]


def test_a_checkpoint_of_another_folder_resumes_by_path(small, whole):
    origin = stopped_after(whole, small, 9)
    folder = small.fresh_folder()
    resumed = resume_from(small, folder, origin / "step_6", SAVES, *DROPOUT)
    assert last_start(folder)["progress"]["steps"] == 6
    assert audit(folder).problems == ()
    assert same_weights(resumed.weights(1), whole.weights(1))


@pytest.mark.parametrize(
    "asked", ["ture", "3", "[6]", "{folder}/step_4", "{folder}/adaptive_batch"]
)
def test_an_invalid_path_of_a_checkpoint_is_refused(small, whole, asked):
    folder = stopped_after(whole, small, 6)
    remedy = "give True, False, auto, or a checkpoint's folder"
    with pytest.raises(SettingError, match=f"^resume_from_checkpoint='.*': {remedy}"):
        resume_from(small, folder, asked.format(folder=folder), SAVES, *DROPOUT)


def test_a_folder_without_saves_is_refused_with_the_fix(small):
    with pytest.raises(
        CheckpointError,
        match=r"^resume_from_checkpoint=True finds no complete checkpoint \(step_N\): check"
        r" output_dir=.*resume_from_checkpoint=False to start",
    ):
        resume_run(small, small.fresh_folder())


@pytest.mark.parametrize("points", [(), ("save_every_n_steps=2",)])
def test_a_finished_run_without_state_is_left_as_it_is_by_auto(small, points):
    keys = ("epochs=1", "max_steps_per_epoch=3", "keep_final_state=False", *points)
    done = small.run_in_process(OURS, *keys)
    saves = saves_in(done.output_dir)
    resume_from(small, done.output_dir, "auto", *keys)
    assert len(records(done.output_dir, "start")) == 1
    assert saves_in(done.output_dir) == saves


def test_a_run_that_torchrun_may_restart_has_to_resume(small, whole, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    replaces = ("overwrite_output_dir=True", f"output_dir={small.fresh_folder()}")
    for asked in (False, whole.output_dir / "step_3"):
        refusal = f"^resume_from_checkpoint='?{asked}'?: .*; give auto, and"
        with pytest.raises(SettingError, match=refusal):
            small.run_in_process(OURS, *replaces, f"resume_from_checkpoint={asked}")
    resume_from(small, small.fresh_folder(), "auto", "epochs=1", "max_steps_per_epoch=1")


def test_a_finished_run_without_state_cannot_be_resumed(small):
    keys = ("epochs=1", "max_steps_per_epoch=1", "keep_final_state=False")
    done = small.run_in_process(OURS, *keys)
    with pytest.raises(
        CheckpointError, match=r"from the weights of a finished run, .*another output_dir"
    ):
        resume_run(small, done.output_dir, "epochs=2")


@pytest.fixture
def unlimited():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield before
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(first, last, num_bytes=100_000):
    limits = {"from_step": first, "num_bytes": num_bytes, "until_step": last}
    return block("metric_logger", "support.stops.FillingDisk", **limits)


@pytest.mark.parametrize(
    ("step", "failed", "missed", "newest"),
    [(4, "step_8", [6], "step_3"), (16, "epoch_1", [], "step_15")],
)
def test_a_full_disk_skips_a_checkpoint_within_an_epoch_and_ends_the_run_at_its_end(
    small, whole, unlimited, step, failed, missed, newest
):
    folder = small.fresh_folder()
    hint = f"resume_from_checkpoint=True resumes from .*{newest}$"
    with pytest.raises(CheckpointError, match=rf"{failed} failed \(.*; {hint}"):
        small.run_in_process(OURS, SAVES, *DROPOUT, *full_disk(step, 99), f"output_dir={folder}")
    assert [record["step"] for record in records(folder, "checkpoint_failed")] == missed
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    resume_run(small, folder, SAVES, *DROPOUT)
    assert went_on_from(folder) == newest
    assert_the_same(folder, whole)


def test_a_failed_asynchronous_save_after_the_last_step_does_not_fail_the_run(small):
    folder = small.fresh_folder()
    # A folder of the user, which no save replaces.
    (folder / "step_2").mkdir()
    keys = ("epochs=1", "max_steps_per_epoch=2", "keep_final_state=False", "save_every_n_steps=2")
    asynchronous = "enable_async_checkpointing=True"
    small.run_in_process(OURS, *keys, asynchronous, f"output_dir={folder}")
    (said,) = records(folder, "checkpoint_failed")
    assert "step_2 failed" in said["message"]
    assert records(folder, "end")


RAMP = (
    *block(SCHEDULE, "adaptive_batch.schedules.linear_ramp", start=2, end=8, over="1ep"),
    "probe.device_memory=64MiB",
)
CHANGES = {
    "dataset": (
        ("dataset.split=train[:16]",),
        r"'16 rows, \w+': .* with '32 rows, \w+';",
    ),
    "model": (
        ("model.attn_dropout=0.1",),
        r"'attn_dropout': 0\.1.*: .* with \{.*'attn_dropout': 0\.2.*\};",
    ),
    "lr_scheduler": (FEATURES["cosine"], r"get_cosine_schedule_with_warmup.*: .* with None;"),
    "batch_size_schedule": (RAMP, r"linear_ramp.*: .* with None;"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_within_an_epoch_unless_allowed(small, whole, name):
    overrides, shown = CHANGES[name]
    folder = stopped_after(whole, small, 6, taken_back=1)
    with pytest.raises(
        SettingError,
        match=rf"{name}=.*{shown} resume with that, or set resume_allow_changes=\[{name}\]",
    ):
        resume_run(small, folder, SAVES, *DROPOUT, *overrides)
    assert last_start(folder)["resumed"] is False  # the refused start is not logged
    resume_run(small, folder, SAVES, *DROPOUT, *overrides, f"resume_allow_changes=[{name}]")
    (said,) = records(folder, name)
    assert said["before"] != said["after"]
    found = audit(folder)
    assert found.holds, found.problems
    anew = records(folder, "epoch_restarted")
    assert bool(anew) == (name == "dataset")
    assert any("restarted after step" in line for line in found.lines) == bool(anew)
    # The restarted epoch does not export the weights of its first attempt.
    assert sorted(path.name for path in folder.glob("epoch_*")) == ["epoch_0", "epoch_1"]


RULES_OF_USER = """
from functools import partial
from adaptive_batch import steps

def build():
    return steps([{0}, 300], ["9ep"])

def constant(tokens, progress):
    return tokens

rule = partial(constant, {0})
"""


@pytest.mark.parametrize("path", ["=rule_of_user.rule", "._component_=rule_of_user.build"])
def test_a_changed_file_of_a_schedule_is_refused_or_restarts_an_epoch_of_token_steps(
    small, tmp_path, monkeypatch, path
):
    monkeypatch.syspath_prepend(tmp_path)
    # monkeypatch removes the module that the recipe imports.
    monkeypatch.setitem(sys.modules, "rule_of_user", None)
    del sys.modules["rule_of_user"]
    file = tmp_path / "rule_of_user.py"
    file.write_text(RULES_OF_USER.format(150))
    keys = (*BY_TOKENS, f"batch_size_schedule{path}", "grow_beyond_maximum=True")
    folder = stopped_after(small.run_in_process(OURS, *keys), small, 3)
    file.write_text(RULES_OF_USER.format(99))
    sys.modules.pop("rule_of_user")
    allowed = "resume_allow_changes=[batch_size_schedule]"
    with pytest.raises(SettingError, match=r"^batch_size_schedule='rule_of_user\..*: the check"):
        resume_run(small, folder, *keys)
    resume_run(small, folder, *keys, allowed)
    (said,) = records(folder, "batch_size_schedule.file")
    assert said["before"] != said["after"]
    assert len(records(folder, "epoch_restarted")) == 1
    found = audit(folder)
    assert found.holds, found.problems


def test_rate_and_decay_change_if_allowed_by_name(small):
    overrides = (SAVES, *DROPOUT, *FEATURES["cosine"])
    whole = small.run_in_process(OURS, *overrides)
    folder = stopped_after(whole, small, 9)
    # The batch is the reference batch, so linear scaling does not change the rates.
    changes = ("optimizer.lr=0.001", "optimizer.weight_decay=0.3", "lr_scaling=linear")
    allowed = "resume_allow_changes=[optimizer.lr,optimizer.weight_decay]"
    resumed = resume_run(small, folder, *overrides, *changes, allowed)
    before = [float(rate) for rate in whole.figures("lr")]
    after = [float(rate) for rate in resumed.figures("lr")][-7:]
    # The first run had lr=0.01, and the schedule is kept.
    assert after == pytest.approx([rate / 10 for rate in before[9:]])
    assert [
        (change["before"], change["after"])
        for change in records(folder, "optimizer.lr", "optimizer.weight_decay", "lr_scaling")
    ] == [("none", "linear"), (0.01, 0.001), (None, 0.3)]
    assert audit(folder).problems == ()
    saved = max(checkpoints_in(folder), key=lambda point: point.step)
    (group,) = saved.load()[0]["optimizer"]["param_groups"]
    assert group["weight_decay"] == 0.3


def test_max_steps_per_epoch_changes_if_allowed_but_not_below_the_checkpoint(small, whole):
    allowed = "resume_allow_changes=[max_steps_per_epoch]"
    folder = stopped_after(whole, small, 12)
    with pytest.raises(SettingError, match=r"=3: the checkpoint has done 4 steps .*; give 4 or"):
        resume_run(small, folder, SAVES, *DROPOUT, allowed, "max_steps_per_epoch=3")
    resume_run(small, folder, SAVES, *DROPOUT, allowed, "max_steps_per_epoch=6")
    assert records(folder, "step")[-1]["step"] == 14
    assert audit(folder).problems == ()
    kept = stopped_after(whole, small, 12)
    resume_run(small, kept, SAVES, *DROPOUT, "max_steps_per_epoch=6")
    assert_the_same(kept, whole)


def test_other_changes_are_logged_and_listed_by_the_audit(small, whole):
    folder = stopped_after(whole, small, 6, taken_back=1)
    resume_run(
        small,
        folder,
        SAVES,
        *DROPOUT,
        "dtype=bf16",
        "clip_grad_norm=0.5",
        "optimizer.fused=False",
        "optimizer.weight_decay=0.3",
        "scale_with_batch.beta2=half_life",
    )
    for kind, before, after in (
        ("dtype", "fp32", "bf16"),
        ("clip_grad_norm", None, 0.5),
        ("optimizer.fused", True, False),
        ("scale_with_batch", None, {"beta2": "half_life"}),
    ):
        (said,) = records(folder, kind)
        assert (said["before"], said["after"]) == (before, after)
    (said,) = records(folder, "no_effect")
    assert said["message"] == (
        "optimizer.weight_decay=0.3 has no effect: the checkpoint's default is kept;"
        " resume_allow_changes=[optimizer.weight_decay] changes it"
    )
    found = audit(folder)
    assert found.holds, found.problems
    assert any("differs from its rolled-back attempt in loss" in line for line in found.lines)


def test_an_optimizer_setting_is_kept_as_a_whole_and_an_unknown_setting_is_refused(small):
    keys = (SAVES, "optimizer._component_=support.components.sgd_with_options", "~optimizer.fused")
    whole = small.run_in_process(OURS, *keys, "optimizer.options={momentum: 0.9, dampening: 0.1}")
    folder = stopped_after(whole, small, 6)
    resume_run(small, folder, *keys, "optimizer.options={momentum: 0.9, dampening: 0}")
    assert_the_same(folder, whole)
    with pytest.raises(SettingError, match="unexpected keyword argument 'foo'"):
        resume_run(small, folder, *keys, "optimizer.foo=1", "epochs=3")


def test_changed_rows_or_labels_and_an_optimizer_in_backward_are_refused(small, whole):
    folder = stopped_after(whole, small, 6)
    first, *rows = (small.folder / "train.jsonl").read_text().splitlines(keepends=True)
    changed = small.fresh_folder() / "last_row_changed.jsonl"
    changed.write_text("".join([first, *rows[:-1], first]))
    with pytest.raises(SettingError, match=r"^dataset='32 rows, \w+'"):
        resume_run(small, folder, SAVES, *DROPOUT, f"dataset.data_files={changed}")
    with pytest.raises(SettingError, match="the checkpoint's optimizer state was saved with False"):
        resume_run(small, folder, SAVES, *DROPOUT, "optimizer_in_bwd=True")
    with pytest.raises(SettingError, match=r"^dataset='32 rows, \w+'"):
        resume_run(small, folder, SAVES, *DROPOUT, "dataset.train_on_input=True")


def test_a_schedule_keeps_the_configured_batch_of_the_checkpoint(small):
    keys = (
        "batch_size_schedule._component_=adaptive_batch.schedules.seesaw",
        *("batch_size_schedule.factor=2", *FEATURES["cosine"], SAVES),
        *("grow_beyond_maximum=True", "micro_batch_size=2"),
    )
    whole = small.run_in_process(OURS, *keys)
    folder = stopped_after(whole, small, 3)
    once = resume_run(small, folder, *keys, "batch_size=8")
    (said,) = records(folder, "no_effect")
    assert said["message"].startswith("batch_size=8 has no effect: the checkpoint's 4 is kept")
    assert_the_same(folder, whole)
    again = stopped_after(once, small, 6)
    resume_run(small, again, *keys, "batch_size=8")
    assert_the_same(again, whole)


BY_TOKENS = ("batch_tokens=300", "micro_batch_tokens=200", SAVES, "epochs=1", "drop_last=False")


def of_tokens(tokens):
    return (
        *block(SCHEDULE, STEPS, batch_sizes=[tokens], thresholds=[]),
        "grow_beyond_maximum=True",
    )


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("batch_size_schedule", of_tokens(150), of_tokens(400)),
        ("uniform_micro_batches", ("uniform_micro_batches=rows",), ()),
    ],
)
def test_the_epoch_restarts_if_token_steps_would_contain_other_rows(small, key, before, after):
    whole = small.run_in_process(OURS, *BY_TOKENS, *before)
    folder = stopped_after(whole, small, 3)
    with pytest.raises(SettingError, match=rf"resume_allow_changes=\[{key}\]"):
        resume_run(small, folder, *BY_TOKENS, *after)
    assert last_start(folder)["resumed"] is False
    resume_run(small, folder, *BY_TOKENS, *after, f"resume_allow_changes=[{key}]")
    (said,) = records(folder, "epoch_restarted")
    found = records(folder, "start", "step")
    begin = max(number for number, record in enumerate(found) if record["kind"] == "start")
    steps = [step for step in found[begin + 1 :] if step["epoch"] == said["epoch"]]
    rows = [row for step in steps for row in step["rows"]]
    assert sorted(rows) == list(range(32))
    found = audit(folder)
    assert found.holds, found.problems


def test_a_run_with_a_separate_export_folder_is_replaced_only_on_request(small):
    exports = f"checkpointer.output_dir={small.fresh_folder()}"
    small.run_in_process(OURS, *DROPOUT, exports)
    with pytest.raises(SettingError, match=r"holds the saves of run \w+ \(epoch_0, epoch_1\);"):
        small.run_in_process(OURS, *DROPOUT, exports)
    again = small.run_in_process(OURS, *DROPOUT, exports, "overwrite_output_dir=True")
    assert len(records(again.output_dir, "replaces")) == 1
