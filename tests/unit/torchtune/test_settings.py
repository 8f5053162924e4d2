"""Settings are frozen, default to torchtune's behaviour, and read every stock config."""

from pathlib import Path

import pytest

from adaptive_batch.__main__ import main
from adaptive_batch.errors import SettingError
from adaptive_batch.memory import budget_bytes
from adaptive_batch.torchtune import Settings, without_effect
from adaptive_batch.torchtune.keys import (
    TORCHTUNE_KEYS,
    documented,
    fields_of,
    keys_of,
    load_function,
    values_of,
)
from adaptive_batch.torchtune.settings import OURS, EstimateSettings, ProbeSettings
from adaptive_batch.training import ConfiguredSize

GIB = 1024**3
PLAIN = {"batch_size": 2, "epochs": 1, "gradient_accumulation_steps": 1}


def _refusal(key, value):
    try:
        return str(key.read("it", value))
    except SettingError as error:
        return error.remedy


def test_absent_means_torchtunes_behaviour():
    settings = Settings.from_config(PLAIN)
    assert not settings.adaptive
    assert settings.drop_last
    assert settings.batch_increase_function is None
    assert settings.probe == ProbeSettings()


def test_a_key_that_is_in_a_group_is_read_and_listed_as_any_other():
    given = {"save_every_n_steps": 5, "sample_order": "random"}
    values = values_of(Settings.from_config(PLAIN | given))
    assert values.keys() == keys_of(Settings).keys()
    assert given.items() <= values.items()
    with pytest.raises(SettingError, match=r"^save_every_n_steps=0: "):
        Settings.from_config(PLAIN | {"save_every_n_steps": 0})


def test_null_is_absent():
    assert Settings.from_config(PLAIN | dict.fromkeys(OURS)) == Settings.from_config(PLAIN)


def test_any_adaptive_key_trains_the_last_short_step_unless_told_otherwise():
    adaptive = PLAIN | {"use_maximum_batch_size": True}
    assert not Settings.from_config(adaptive).drop_last
    assert Settings.from_config(adaptive | {"drop_last": True}).drop_last
    assert not Settings.from_config(PLAIN | {"drop_last": False}).drop_last


NOT_WHOLE = (0, -3, 2.5, True, "some")
NOT_WORDS = ("best", 1, -0.5, True, ["rows"])
REFUSED = {
    **dict.fromkeys(
        (
            *("batch_size", "epochs", "gradient_accumulation_steps", "micro_batch_size"),
            *("micro_batch_tokens", "batch_tokens", "batch_size_val", "sample_window"),
            *("min_rows_per_batch", "max_rows_per_batch", "pad_to_multiple_of"),
            *("run_val_every_n_steps", "max_validation_batches", "save_every_n_steps"),
            *("keep_last_n_checkpoints", "reference_micro_batch_size"),
        ),
        NOT_WHOLE,
    ),
    "max_steps_per_epoch": (0,),
    **dict.fromkeys(
        (
            *("sample_order", "long_rows", "uniform_micro_batches", "lr_scaling"),
            "on_out_of_memory",
        ),
        NOT_WORDS,
    ),
    **dict.fromkeys(
        (
            *("use_maximum_batch_size", "drop_last", "optimizer_in_bwd", "preview"),
            "sync_gradients_every_micro_batch",
        ),
        ("maybe", 3),
    ),
    "reference_batch_size": (*NOT_WHOLE, "tok", "0tok", "-5tok", "nantok"),
    "resume_allow_changes": (3, True, [3], {"dataset": True}),
    "lr_clock": (
        *("epochs", 3, ["steps"], {"warmup": "steps", "decay": "rows"}),
        {"warmup": "steps", "cooldown": "steps"},
    ),
    "activation_memory_budget": (-0.1, 1.5, True, "half"),
    "probe": ("binary",),
    "probe.search": ("fast",),
    "probe.device_memory": ("12XiB", -1),
    "probe.headroom": (1, -0.1, "nan"),
    "probe.maximum": (0,),
    "probe.assumed_maximum": (0,),
    "probe.serach": ("binary",),
    "probe.sequence_length": ("shortest",),
    "probe.sequence_lengths": ([], [64, 32, 64]),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values], ids=str
)
def test_a_value_that_a_key_cannot_have_is_refused(key, value):
    name, dot, inner = key.partition(".")
    given = {inner: value} if dot else value
    with pytest.raises(SettingError) as refused:
        Settings.from_config(PLAIN | {name: given})
    assert refused.value.key == key


PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_tables_of_the_documentation_are_those_of_the_settings(tmp_path):
    copy = tmp_path / "configuration.md"
    copy.write_text(PAGE.read_text())
    assert main(["keys", str(copy)]) == 0
    assert copy.read_text() == PAGE.read_text(), "run: adaptive-batch keys docs/configuration.md"


def test_every_key_of_ours_is_documented_and_every_default_can_be_read():
    for keys in (ProbeSettings, EstimateSettings, Settings):
        texts = documented(keys)
        for name, key_field in fields_of(keys).items():
            assert name in texts or name in TORCHTUNE_KEYS
            if isinstance(key_field.default, (bool, int, float, str)):
                read = key_field.metadata["option"].read(name, key_field.default)
                assert read in (None, key_field.default)


def test_a_budget_of_activations_is_of_compiled_parts_alone():
    given = {"activation_memory_budget": 0.5}
    with pytest.raises(
        SettingError, match=r"^activation_memory_budget=0\.5: .*set compile to True"
    ):
        Settings.from_config(PLAIN | given)
    settings = Settings.from_config(PLAIN | given | {"compile": True})
    assert settings.activation_memory_budget == 0.5


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
def test_the_budget_is_what_is_asked_for_and_can_be_had_less_headroom(
    device_memory, available, headroom, budget
):
    given = {"headroom": headroom, "total_bytes": 16 * GIB, "available_bytes": available}
    assert budget_bytes(device_memory, **given) == budget


def test_a_function_may_lie_in_a_class_or_a_submodule():
    assert load_function("os.path.join", key="k")("a", "b") == "a/b"
    assert load_function("collections.OrderedDict.fromkeys", key="k")


def test_a_module_that_fails_on_import_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "half_written.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        SettingError,
        match=r"No module named 'a_package_that_is_not_there'",
    ):
        load_function("half_written.f", key="batch_increase_function")


def test_a_ready_made_function_comes_from_a_block():
    block = {"_component_": "adaptive_batch.schedules.at_epochs", "additions": {1: 8}}
    function = Settings.from_config(
        PLAIN | {"batch_increase_function": block}
    ).batch_increase_function
    assert [function(epoch, 4) for epoch in range(3)] == [0, 8, 0]


# --- what follows from the keys

RAMP = {"_component_": "adaptive_batch.schedules.ramp_by_doubling", "end": 8, "over": "1ep"}
VALIDATED = {"dataset_val": {"_component_": "a.b"}, "run_val_every_n_steps": 10}


def test_with_the_optimizer_in_backward_running_out_of_memory_is_raised():
    in_backward = PLAIN | {"optimizer_in_bwd": True}
    assert Settings.from_config(in_backward).on_out_of_memory == "raise"
    with pytest.raises(
        SettingError, match=r"^on_out_of_memory='shrink'.*cannot be run again; give raise, or set"
    ):
        Settings.from_config(in_backward | {"on_out_of_memory": "shrink"})


AUTO = {"micro_batch_tokens": "auto"}
LARGEST = {"probe": {"objective": "largest"}}
TWICE = {"gradient_accumulation_steps": 2}
GROWING = {
    "batch_increase_function": {"_component_": "adaptive_batch.schedules.geometric", "factor": 2}
}


@pytest.mark.parametrize(
    ("config", "chooses_fastest", "whole_step_rows", "has_several"),
    [
        ({}, False, None, False),
        (TWICE, False, None, True),
        ({"micro_batch_size": 1}, False, None, True),
        (AUTO, True, 2, True),
        (AUTO | LARGEST, False, 2, False),
        # The whole step is tried as one micro-batch first.
        (AUTO | LARGEST | TWICE, False, 4, False),
        (AUTO | LARGEST | GROWING, False, None, False),
        (AUTO | LARGEST | GROWING | TWICE, False, None, True),
        (AUTO | LARGEST | GROWING | {"grow_beyond_maximum": True}, False, None, True),
        (AUTO | LARGEST | {"micro_batch_layout": "grouped"}, False, 2, True),
        ({"batch_tokens": 100} | LARGEST, False, None, True),
    ],
    ids=str,
)
def test_what_a_search_has_to_try(config, chooses_fastest, whole_step_rows, has_several):
    settings = Settings.from_config(PLAIN | config)
    plan = settings.search_plan
    assert (plan.chooses_fastest, plan.whole_step_rows, plan.has_several) == (
        chooses_fastest,
        whole_step_rows,
        has_several,
    )


def test_what_fits_is_asked_where_tokens_are_a_steps_and_nothing_says_what_is_run_at_once():
    by_tokens = PLAIN | {"batch_tokens": 1000}
    assert Settings.from_config(by_tokens).micro_batch.needs_search
    given = Settings.from_config(by_tokens | {"micro_batch_tokens": 500})
    assert given.micro_batch == ConfiguredSize(micro_batch_tokens=500)
    by_rows = Settings.from_config(by_tokens | {"micro_batch_size": 2})
    assert by_rows.micro_batch == ConfiguredSize(micro_batch_size=2)
    assert not by_rows.search_plan.is_needed


@pytest.mark.parametrize(
    ("config", "adaptive", "is_needed", "needs_search"),
    [
        ({"use_maximum_batch_size": True}, True, True, False),
        (
            {
                "batch_increase_function": {
                    "_component_": "adaptive_batch.schedules.geometric",
                    "factor": 2,
                }
            },
            True,
            True,
            False,
        ),
        ({"micro_batch_size": 1}, True, False, False),
        ({"micro_batch_size": "auto"}, True, True, True),
        ({"micro_batch_tokens": 100}, True, False, False),
        ({"micro_batch_tokens": "auto"}, True, True, True),
        ({"batch_tokens": 100}, True, True, True),
        ({"sample_order": "dataloader"}, False, False, False),
        ({"sample_order": "random"}, True, False, False),
        ({"sample_order": "seqlen"}, True, False, False),
        ({"uniform_micro_batches": "rows"}, True, False, False),
        ({"pad_to_multiple_of": 8}, True, False, False),
        ({"pad_to_multiple_of": 1}, False, False, False),
        # what leaves batches, and how they are run, as they are
        ({"lr_scaling": "linear"}, False, False, False),
        ({"on_out_of_memory": "raise"}, False, False, False),
        (VALIDATED, False, False, False),
        (VALIDATED | {"batch_size_val": "auto"}, False, False, False),
    ],
    ids=str,
)
def test_what_each_key_asks_for(config, adaptive, is_needed, needs_search):
    settings = Settings.from_config(PLAIN | config)
    found = (settings.adaptive, settings.search_plan.is_needed, settings.micro_batch.needs_search)
    assert found == (adaptive, is_needed, needs_search)
    assert settings.drop_last is not adaptive


def test_validation_takes_the_configured_batch_where_it_has_none_of_its_own():
    def validation(**keys):
        return Settings.from_config(PLAIN | VALIDATED | keys).validation

    assert validation().is_on
    assert validation().rows_at_once(2) == 2
    assert not validation().fits_itself
    assert validation(batch_size_val=5).rows_at_once(2) == 5
    by_what_fits = validation(batch_size_val="auto")
    assert by_what_fits.fits_itself
    assert by_what_fits.rows_at_once(2) == 2
    # torchtune's later recipes write all so
    assert validation(max_validation_batches=-1).rows_of(100, batch_size=2) == 100
    assert validation(max_validation_batches=3).rows_of(100, batch_size=2, ranks=4) == 24
    assert validation(max_validation_batches=3).rows_of(20, batch_size=2, ranks=4) == 20
    assert not Settings.from_config(PLAIN | {"batch_size_val": "auto"}).validation.fits_itself


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, []),
        (dict.fromkeys(OURS), []),
        (
            {"min_rows_per_batch": 2, "max_rows_per_batch": 3, "long_rows": "drop"},
            ["min_rows_per_batch", "max_rows_per_batch", "long_rows"],
        ),
        (
            {
                "batch_tokens": 100,
                "min_rows_per_batch": 2,
                "max_rows_per_batch": 3,
                "long_rows": "drop",
            },
            [],
        ),
        ({"batch_tokens": 100, "gradient_accumulation_steps": 2}, ["gradient_accumulation_steps"]),
        # it is part of the batch that the rate belongs to, unless that is given
        ({"batch_tokens": 100, "gradient_accumulation_steps": 2, "lr_scaling": "sqrt"}, []),
        (
            {
                "batch_tokens": 100,
                "gradient_accumulation_steps": 2,
                "lr_scaling": "sqrt",
                "reference_batch_size": 8,
            },
            ["gradient_accumulation_steps"],
        ),
        ({"shuffle": False}, []),
        ({"shuffle": False, "sample_order": "random"}, ["shuffle"]),
        ({"shuffle": True, "sample_order": "random"}, []),
        ({"sample_window": 8}, ["sample_window"]),
        ({"sample_window": 8, "sample_order": "random"}, ["sample_window"]),
        ({"sample_window": 8, "sample_order": "seqlen"}, []),
        ({"grow_beyond_maximum": True}, ["grow_beyond_maximum"]),
        ({"grow_beyond_maximum": True, "batch_size_schedule": RAMP}, []),
        ({"batch_size_schedule": RAMP, "use_maximum_batch_size": True}, ["use_maximum_batch_size"]),
        (
            {"keep_last_n_checkpoints": 2, "enable_async_checkpointing": True},
            ["keep_last_n_checkpoints", "enable_async_checkpointing"],
        ),
        (
            {
                "save_every_n_steps": 5,
                "keep_last_n_checkpoints": 2,
                "enable_async_checkpointing": True,
            },
            [],
        ),
        ({"resume_allow_changes": ["dataset"]}, ["resume_allow_changes"]),
        ({"resume_allow_changes": ["dataset"], "resume_from_checkpoint": True}, []),
        ({"lr_clock": "tokens"}, ["lr_clock"]),
        ({"lr_clock": "tokens", "lr_scheduler": {"_component_": "a.b"}}, []),
        ({"log_gradient_noise_scale": True, "micro_batch_size": 1}, []),
        ({"log_gradient_noise_scale": True, "gradient_accumulation_steps": 2}, []),
        (
            {"log_gradient_noise_scale": True, "micro_batch_size": 2, "batch_size_schedule": RAMP},
            [],
        ),
        ({"reference_batch_size": 8}, ["reference_batch_size"]),
        ({"reference_batch_size": 8, "lr_scaling": "linear"}, []),
        (
            {
                "dataset_val": {"_component_": "a.b"},
                "batch_size_val": 2,
                "max_validation_batches": 1,
            },
            ["dataset_val", "batch_size_val", "max_validation_batches"],
        ),
        (VALIDATED | {"batch_size_val": 2, "max_validation_batches": 1}, []),
    ],
    ids=str,
)
def test_keys_that_are_set_and_do_nothing_are_named(config, named):
    config = PLAIN | config
    assert list(without_effect(Settings.from_config(config), config)) == named


BY_NOISE = {
    "batch_size_schedule": {"_component_": "adaptive_batch.schedules.by_noise_scale", "start": 4}
}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {},
            "a step is one micro-batch, and it takes two; set micro_batch_size to fewer rows than a"
            " step has",
        ),
        ({"micro_batch_size": 4}, "a step is one micro-batch"),
        ({"micro_batch_tokens": 100}, "micro_batch_tokens cuts micro-batches by length"),
        ({"micro_batch_tokens": "auto"}, "micro_batch_tokens cuts micro-batches by length"),
        ({"batch_tokens": 100}, "batch_tokens begins a step with the row"),
        ({"batch_tokens": 100, "micro_batch_size": 1}, "batch_tokens begins a step with the row"),
        (
            {"micro_batch_size": 2, "micro_batch_layout": "grouped"},
            "micro_batch_layout=grouped sorts rows by length; use padded or packed",
        ),
        (
            {"micro_batch_size": 2, "uniform_micro_batches": "lengths"},
            "uniform_micro_batches=lengths sorts rows; use rows",
        ),
        ({"micro_batch_size": 2, "sample_order": "seqlen"}, "sample_order=seqlen sorts rows"),
        ({"micro_batch_size": 2, "tensor_parallel_dim": 2}, "tensor parallelism keeps no gradient"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "asks", [BY_NOISE, {"log_gradient_noise_scale": True, "batch_size": 4}], ids=["rule", "log"]
)
def test_a_noise_scale_that_cannot_be_measured_is_refused(asks, keys, why):
    with pytest.raises(SettingError, match=f"gradient noise scale cannot be measured: {why}"):
        Settings.from_config(PLAIN | asks | keys)


@pytest.mark.parametrize(
    "keys",
    [
        {"micro_batch_size": 2},
        {"micro_batch_size": "auto"},
        {"grow_beyond_maximum": True},
        {"micro_batch_size": 2, "micro_batch_layout": "packed"},
        {"micro_batch_size": 2, "uniform_micro_batches": "rows"},
    ],
)
def test_a_noise_scale_that_may_be_measured_is_taken(keys):
    config = PLAIN | BY_NOISE | keys
    assert without_effect(Settings.from_config(config), config) == {}


WHOLE = [name for name, key in keys_of(Settings).items() if "whole number" in _refusal(key, 0)]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_beyond_what_can_be_trained_is_refused(name):
    assert len(WHOLE) > 15
    with pytest.raises(SettingError, match=rf"^{name}=1{'0' * 20}: "):
        keys_of(Settings)[name].read(name, 10**20)


@pytest.mark.parametrize(
    "dataset", ["my_dataset", {}, {"source": "json"}, [], [{"source": "json"}]], ids=str
)
def test_what_is_validated_on_is_a_block_or_a_list_of_them(dataset):
    with pytest.raises(SettingError, match=r"^dataset_val=.*_component_"):
        Settings.from_config(PLAIN | VALIDATED | {"dataset_val": dataset})
