"""Settings: defaults, refused values, and the searches that they require."""

from pathlib import Path

import pytest

from adaptive_batch.__main__ import main
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import at_epochs
from adaptive_batch.torchtune import Settings, without_effect
from adaptive_batch.torchtune.configuration import (
    TORCHTUNE_KEYS,
    documented,
    fields_of,
    load_function,
)
from adaptive_batch.torchtune.settings import OURS, EstimateSettings, ProbeSettings

PLAIN = {"batch_size": 2, "epochs": 1, "gradient_accumulation_steps": 1}
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
RAMP = {"_component_": "adaptive_batch.schedules.ramp_by_doubling", "end": 8, "over": "1ep"}
VALIDATED = {"dataset_val": {"_component_": "a.b"}, "run_val_every_n_steps": 10}
GROWING = {
    "batch_increase_function": {"_component_": "adaptive_batch.schedules.geometric", "factor": 2}
}
BY_NOISE = {
    "batch_size_schedule": {"_component_": "adaptive_batch.schedules.by_noise_scale", "start": 4},
    "shuffle": True,
}
LOGS_NOISE = {"log_gradient_noise_scale": True, "batch_size": 4, "shuffle": True}


def settings(*blocks):
    config = dict(PLAIN)
    for block in blocks:
        config |= block
    return Settings.from_config(config)


def test_null_and_absent_keys_keep_torchtunes_behaviour():
    plain = settings()
    assert plain == settings(dict.fromkeys(OURS))
    assert plain.drop_last
    assert not plain.adaptive
    assert not settings({"shuffle": None}).shuffle
    assert plain.probe == ProbeSettings()


def test_the_documentation_has_the_current_tables_of_keys(capsys):
    assert main(["keys"]) == 0
    page = PAGE.read_text()
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in page, "run: python docs/tools/keys.py"


def test_every_key_is_documented_and_every_default_is_valid():
    for keys in (ProbeSettings, EstimateSettings, Settings):
        texts = documented(keys)
        for name, key_field in fields_of(keys).items():
            assert name in texts or name in TORCHTUNE_KEYS
            if isinstance(key_field.default, (bool, int, float, str)):
                read = key_field.metadata["option"].read(name, key_field.default)
                assert read in (None, key_field.default)


def test_functions_are_imported_by_path_or_built_from_a_block():
    assert load_function("os.path.join", key="k")("a", "b") == "a/b"
    assert load_function("collections.OrderedDict.fromkeys", key="k")
    block = {"_component_": "adaptive_batch.schedules.at_epochs", "additions": {1: 8}}
    function = settings({"batch_increase_function": block}).batch_increase_function
    assert [function(epoch, 4) for epoch in range(3)] == [0, 8, 0]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (
            "adaptive_batch.schedules.geometrik",
            "there is no geometrik in adaptive_batch.schedules; near it: geometric",
        ),
        ("os.paht.join", "there is no paht in os; near it: path, .*"),
        ("nowhere.rule", "it cannot be imported: .*No module named 'nowhere'.* PYTHONPATH"),
        ("imports_missing.rule", "it cannot be imported: .*No module named 'os.missing'.*"),
    ],
)
def test_an_unknown_function_is_refused_with_near_names_or_the_reason(
    tmp_path, monkeypatch, path, problem
):
    (tmp_path / "imports_missing.py").write_text("import os.missing")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingError, match=f"^k='{path}': {problem}$"):
        load_function(path, key="k")


@pytest.mark.parametrize("arguments", [{}, {"factr": 2}])
def test_a_rule_of_this_package_with_wrong_arguments_is_refused_with_its_arguments(arguments):
    block = {"_component_": "adaptive_batch.schedules.geometric", **arguments}
    with pytest.raises(SettingError, match=r"; its arguments are \(factor, every=1\)$"):
        settings({"batch_increase_function": block})


def test_a_rule_of_this_package_is_built_only_from_a_block(monkeypatch):
    monkeypatch.setattr("support.components.rule", at_epochs({1: 8}), raising=False)
    for path in ("adaptive_batch.schedules.at_epochs", "support.components.rule"):
        with pytest.raises(SettingError, match=f"^batch_increase_function='{path}': give a block"):
            settings({"batch_increase_function": path})


NOT_WHOLE = (0, -3, 2.5, True, "some", 10**20)
NOT_WORDS = ("best", 1, True, ["rows"])
VALUES = {
    **dict.fromkeys(
        (
            *("batch_size", "epochs", "gradient_accumulation_steps", "micro_batch_size"),
            *("micro_batch_tokens", "batch_tokens", "batch_size_val", "sample_window"),
            *("min_rows_per_batch", "max_rows_per_batch", "pad_to_multiple_of"),
            *("run_val_every_n_steps", "max_validation_batches", "save_every_n_steps"),
            *("keep_last_n_checkpoints", "reference_micro_batch_size", "max_steps_per_epoch"),
        ),
        NOT_WHOLE,
    ),
    **dict.fromkeys(
        (
            *("sample_order", "long_rows", "uniform_micro_batches", "lr_scaling"),
            *("on_out_of_memory", "micro_batch_layout", "on_nonfinite_loss"),
        ),
        NOT_WORDS,
    ),
    **dict.fromkeys(
        (
            *("use_maximum_batch_size", "drop_last", "optimizer_in_bwd", "preview"),
            *("sync_gradients_every_micro_batch", "grow_beyond_maximum"),
        ),
        ("maybe", 3),
    ),
    "reference_batch_size": (*NOT_WHOLE[:-1], "tok", "0tok", "-5tok", "nantok"),
    "resume_allow_changes": (3, True, [3], {"dataset": True}),
    "lr_clock": ("epochs", 3, ["steps"], {"warmup": "steps", "decay": "tokens"}),
    "activation_memory_budget": (-0.1, 1.5, True, "half", 0.5),
    "probe": ("binary",),
    "probe.search": ("fast",),
    "probe.objective": ("fast",),
    "probe.device_memory": ("12XiB", -1),
    "probe.headroom": (1, -0.1, "nan"),
    "probe.maximum": (0,),
    "probe.assumed_maximum": (0,),
    "probe.serach": ("binary",),
    "probe.trial_seconds": (None,),
    "probe.sequence_length": ("shortest",),
    "probe.sequence_lengths": ([], [64, "all"]),
}
UNMEASURED = (
    {},
    {"micro_batch_size": 4},
    {"micro_batch_tokens": 100},
    {"micro_batch_tokens": "auto"},
    {"batch_tokens": 100},
    {"batch_tokens": 100, "micro_batch_size": 1},
    {"micro_batch_size": 2, "micro_batch_layout": "grouped"},
    {"micro_batch_size": 2, "uniform_micro_batches": "lengths"},
    {"micro_batch_size": 2, "sample_order": "seqlen"},
    {"micro_batch_size": 2, "shuffle": False},
    {"micro_batch_size": 2, "tensor_parallel_dim": 2},
)
TOGETHER = [
    ("on_out_of_memory", {"optimizer_in_bwd": True, "on_out_of_memory": "shrink"}),
    (
        "uniform_micro_batches",
        {"uniform_micro_batches": "rows", "micro_batch_size": 4, "batch_size": 7},
    ),
    *(
        ("dataset_val", VALIDATED | {"dataset_val": dataset})
        for dataset in ("my_dataset", {}, {"source": "json"}, [], [{"source": "json"}])
    ),
    *(("batch_size_schedule", BY_NOISE | keys) for keys in UNMEASURED),
    *(("log_gradient_noise_scale", LOGS_NOISE | keys) for keys in UNMEASURED),
]
REFUSED = [
    (key, {key.partition(".")[0]: {key.partition(".")[2]: value} if "." in key else value})
    for key, values in VALUES.items()
    for value in values
]


@pytest.mark.parametrize(("key", "keys"), [*REFUSED, *TOGETHER], ids=str)
def test_an_invalid_value_is_refused_by_its_key(key, keys):
    with pytest.raises(SettingError) as refused:
        settings(keys)
    assert refused.value.key == key


def test_some_defaults_depend_on_other_keys():
    assert settings({"optimizer_in_bwd": True}).on_out_of_memory == "raise"
    compiled = {"activation_memory_budget": 0.5, "compile": True}
    assert settings(compiled).activation_memory_budget == 0.5
    by_tokens = {"batch_tokens": 1000}
    assert settings(by_tokens).micro_batch_tokens == "auto"
    for size in ({"micro_batch_tokens": 500}, {"micro_batch_size": 2}):
        read = settings(by_tokens, size)
        sizes = {"micro_batch_size": None, "micro_batch_tokens": None} | size
        assert {key: getattr(read, key) for key in sizes} == sizes
        assert not read.searches_training


AUTO = {"micro_batch_tokens": "auto"}
LARGEST = {"probe": {"objective": "largest"}}
TWICE = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("config", "chooses_fastest", "whole_step_rows", "splits_steps"),
    [
        ({}, False, None, False),
        (TWICE, False, None, True),
        (AUTO, True, 2, True),
        (AUTO | LARGEST, False, 2, False),
        # The first trial has the whole step as one micro-batch.
        (AUTO | LARGEST | TWICE, False, 4, False),
        (AUTO | LARGEST | GROWING, False, None, False),
        (AUTO | LARGEST | GROWING | {"grow_beyond_maximum": True}, False, None, True),
        (AUTO | LARGEST | {"micro_batch_layout": "grouped"}, False, 2, True),
        ({"batch_tokens": 100} | LARGEST, False, None, True),
    ],
    ids=str,
)
def test_keys_decide_which_sizes_a_search_tries(
    config, chooses_fastest, whole_step_rows, splits_steps
):
    read = settings(config)
    assert (read.chooses_fastest, read.whole_step_rows, read.splits_steps) == (
        chooses_fastest,
        whole_step_rows,
        splits_steps,
    )


@pytest.mark.parametrize(
    ("config", "adaptive", "searches", "is_auto"),
    [
        ({"use_maximum_batch_size": True}, True, True, False),
        (GROWING, True, True, False),
        ({"micro_batch_size": "auto"}, True, True, True),
        ({"micro_batch_tokens": 100}, True, False, False),
        (AUTO, True, True, True),
        ({"batch_tokens": 100}, True, True, True),
        ({"sample_order": "random"}, True, False, False),
        ({"pad_to_multiple_of": 8}, True, False, False),
        # These keys change neither batches nor micro-batches.
        ({"pad_to_multiple_of": 1, "sample_order": "dataloader"}, False, False, False),
        ({"lr_scaling": "linear", "on_out_of_memory": "raise"}, False, False, False),
        (VALIDATED | {"batch_size_val": 4}, False, False, False),
    ],
    ids=str,
)
def test_keys_decide_whether_training_is_adaptive_and_needs_a_search(
    config, adaptive, searches, is_auto
):
    read = settings(config)
    found = (read.adaptive, read.searches_training, read.micro_batch_limit == "auto")
    assert found == (adaptive, searches, is_auto)
    assert read.drop_last is not adaptive


def test_validation_uses_batch_size_unless_batch_size_val_is_set():
    def validation(**keys):
        return settings(VALIDATED, keys)

    assert validation().validation_batch_size == 2
    assert validation(batch_size_val=5).validation_batch_size == 5
    # Later recipes of torchtune use -1 for all batches.
    assert validation(max_validation_batches=-1).validated_rows(100, ranks=1) == 100
    assert validation(max_validation_batches=3).validated_rows(100, ranks=4) == 24
    assert validation(max_validation_batches=3).validated_rows(20, ranks=4) == 20


BY_TOKENS = {"batch_tokens": 100, "gradient_accumulation_steps": 2}
ROWS_OF_TOKENS = {"min_rows_per_batch": 2, "max_rows_per_batch": 3, "long_rows": "drop"}
SAVING = {"keep_last_n_checkpoints": 2, "enable_async_checkpointing": True}
VALIDATION = {"batch_size_val": 2, "max_validation_batches": 1}
NAMED = [
    ({"dataset_val": {"_component_": "a.b"}} | VALIDATION, ["dataset_val", *VALIDATION]),
    (ROWS_OF_TOKENS, [*ROWS_OF_TOKENS]),
    (BY_TOKENS, ["gradient_accumulation_steps"]),
    (
        BY_TOKENS | {"lr_scaling": "sqrt", "reference_batch_size": 8},
        ["gradient_accumulation_steps"],
    ),
    ({"shuffle": False, "sample_order": "random"}, ["shuffle"]),
    ({"sample_window": 8, "sample_order": "random"}, ["sample_window"]),
    ({"grow_beyond_maximum": True}, ["grow_beyond_maximum"]),
    ({"batch_size_schedule": RAMP, "use_maximum_batch_size": True}, ["use_maximum_batch_size"]),
    (SAVING, [*SAVING]),
    ({"resume_allow_changes": ["dataset"]}, ["resume_allow_changes"]),
    ({"lr_clock": "tokens"}, ["lr_clock"]),
    ({"reference_batch_size": 8}, ["reference_batch_size"]),
]
SILENT = [
    dict.fromkeys(OURS),
    ROWS_OF_TOKENS | {"batch_tokens": 100},
    # The learning rate depends on gradient_accumulation_steps.
    BY_TOKENS | {"lr_scaling": "sqrt"},
    {"shuffle": True, "sample_order": "random"},
    {"sample_window": 8, "sample_order": "seqlen"},
    {"grow_beyond_maximum": True, "batch_size_schedule": RAMP},
    SAVING | {"save_every_n_steps": 5},
    {"resume_allow_changes": ["dataset"], "resume_from_checkpoint": True},
    {"lr_clock": "tokens", "lr_scheduler": {"_component_": "a.b"}},
    {"reference_batch_size": 8, "lr_scaling": "linear"},
    LOGS_NOISE | {"micro_batch_size": 2, "batch_size_schedule": RAMP},
    VALIDATED | VALIDATION,
]


@pytest.mark.parametrize(
    ("config", "named"), [*NAMED, *((config, []) for config in SILENT)], ids=str
)
def test_ignored_keys_are_reported_without_effect(config, named):
    assert sorted(without_effect(settings(config), PLAIN | config)) == sorted(named)
