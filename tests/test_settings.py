"""Settings are frozen, default to torchtune's behaviour, and read every stock config."""

import dataclasses

import pytest

from adaptive_batch.components import load_function
from adaptive_batch.errors import SettingError
from adaptive_batch.keys import NOT_SUPPORTED_YET, OURS
from adaptive_batch.probe_settings import ProbeSettings
from adaptive_batch.settings import Settings

GIB = 1024**3
PLAIN = {"batch_size": 2, "epochs": 1, "gradient_accumulation_steps": 1}


def test_absent_means_torchtunes_behaviour():
    settings = Settings.from_config(PLAIN)
    assert not settings.adaptive
    assert settings.drop_last
    assert settings.batch_increase_function is None
    assert settings.probe == ProbeSettings()


def test_null_is_absent():
    assert Settings.from_config(PLAIN | dict.fromkeys(OURS)) == Settings.from_config(PLAIN)


def test_any_adaptive_key_trains_the_last_short_step_unless_told_otherwise():
    adaptive = PLAIN | {"use_maximum_batch_size": True}
    assert not Settings.from_config(adaptive).drop_last
    assert Settings.from_config(adaptive | {"drop_last": True}).drop_last
    assert not Settings.from_config(PLAIN | {"drop_last": False}).drop_last


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings.from_config(PLAIN).batch_size = 3


@pytest.mark.parametrize("key", NOT_SUPPORTED_YET)
def test_a_key_for_later_is_refused_unless_it_says_what_happens_anyway(key):
    with pytest.raises(SettingError, match=f"^{key}=.*not supported yet"):
        Settings.from_config(PLAIN | {key: "something"})
    for harmless in NOT_SUPPORTED_YET[key]:
        Settings.from_config(PLAIN | {key: harmless})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("use_max_batch_size", "use_maximum_batch_size"),
        ("use_maximum_batchsize", "use_maximum_batch_size"),
        ("batch_increase_fn", "batch_increase_function"),
        ("batch_increase_func", "batch_increase_function"),
        ("droplast", "drop_last"),
        ("probes", "probe"),
        ("micro_batchsize", "micro_batch_size"),
    ],
)
def test_a_key_that_is_nearly_ours_is_refused_with_the_right_one(key, meant):
    with pytest.raises(SettingError, match=f"{meant} is probably meant"):
        Settings.from_config(PLAIN | {key: 1})


@pytest.mark.parametrize(
    "key", ["my_note", "data_dir", "demo_dir", "compile_mode", "batch", "wandb_project", "num_workers"]
)
def test_a_users_own_key_is_left_alone(key):
    Settings.from_config(PLAIN | {key: 1})


@pytest.mark.parametrize(
    ("device_memory", "available", "headroom", "budget"),
    [
        (None, 8 * GIB, 0.0, 8 * GIB),
        (None, 8 * GIB, 0.25, 6 * GIB),
        ("4GiB", 8 * GIB, 0.5, 2 * GIB),
        ("9GiB", 8 * GIB, 0.0, 8 * GIB),  # no more than can be had
        (0.5, 9 * GIB, 0.0, 8 * GIB),  # a share of what the device has
        (1024, 8 * GIB, 0.0, 1024),
    ],
)
def test_the_budget_is_what_is_asked_for_and_can_be_had_less_headroom(device_memory, available, headroom, budget):
    probe = ProbeSettings(device_memory=device_memory, headroom=headroom)
    assert probe.budget_bytes(total_bytes=16 * GIB, available_bytes=available) == budget


def test_a_function_may_lie_in_a_class_or_a_submodule():
    assert load_function("os.path.join", key="k")("a", "b") == "a/b"
    assert load_function("collections.OrderedDict.fromkeys", key="k")


def test_a_module_that_fails_on_import_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        SettingError, match=r"importing half_written failed: No module named 'a_package_that_is_not_there'"
    ):
        load_function("half_written.f", key="batch_increase_function")


def test_a_ready_made_function_comes_from_a_block():
    block = {"_component_": "adaptive_batch.growth.at_epochs", "additions": {1: 8}}
    function = Settings.from_config(PLAIN | {"batch_increase_function": block}).batch_increase_function
    assert [function(epoch, 4) for epoch in range(3)] == [0, 8, 0]
