"""Unread keys: a probable misspelling is refused, and another key is reported without effect."""

import pytest
from omegaconf import OmegaConf

from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import Settings, without_effect
from adaptive_batch.torchtune.configuration import REMOVED, keys_of, unread

PLAIN = {
    "batch_size": 2,
    "epochs": 1,
    "gradient_accumulation_steps": 1,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    "tokenizer": {"_component_": "a.b", "path": "/x"},
}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("use_max_batch_size", "use_maximum_batch_size"),
        ("batch_increase_fn", "batch_increase_function"),
        ("droplast", "drop_last"),
        ("batch-tokens", "batch_tokens"),
        ("accumulation_steps", "gradient_accumulation_steps"),
        ("Epochs", "epochs"),
        ("optimizer_lr", "optimizer"),
        # Hydra's prefix.
        ("++batch_size", "batch_size"),
    ],
)
def test_a_misspelled_key_is_refused_with_the_key_that_is_probably_meant(key, meant):
    with pytest.raises(SettingError) as refused:
        Settings.from_config(PLAIN | {key: 1})
    assert str(refused.value) == f"{key}=1: there is no such key; {meant} is probably meant"


@pytest.mark.parametrize("key", ["my_note", "data_dir", "learning_rate", "my notes", "ключ"])
def test_an_unread_key_is_reported_without_effect(key):
    config = PLAIN | {key: 1}
    said = without_effect(Settings.from_config(config), config)
    assert said == {key: f"{key} has no effect: nothing reads it"}


REFERRED = {"resume": {"inner": "1"}, "my-output_dir": "here"}


@pytest.mark.parametrize(
    ("reference", "unused"),
    [
        *((reference, "my-output_dir") for reference in ("${resume}", "a/${resume}/b")),
        *((reference, "my-output_dir") for reference in ("${.resume}", "${resume.inner}")),
        ("${oc.select:resume,1}", "my-output_dir"),
        ("${oc.decode:${resume}}", "my-output_dir"),
        ("${my-output_dir}", "resume"),
        ("${oc.select:my-output_dir,1}", "resume"),
    ],
)
def test_a_referenced_key_counts_as_read(reference, unused):
    tokenizer = {"path": ["x", {"y": reference}]}
    assert unread(Settings, OmegaConf.create(PLAIN | REFERRED | {"tokenizer": tokenizer})) == [
        unused
    ]


FUNCTION = "adaptive_batch.schedules.by_critical_batch"


@pytest.mark.parametrize("key", [key for key in REMOVED if key != FUNCTION])
@pytest.mark.parametrize("value", ["1", "False", "null"])
def test_a_removed_key_is_refused_with_its_replacement(key, value):
    config = OmegaConf.merge(PLAIN, OmegaConf.from_dotlist([f"{key}={value}"]))
    with pytest.raises(SettingError) as refused:
        Settings.from_config(config)
    assert refused.value.key == key
    assert REMOVED[key] in str(refused.value)


@pytest.mark.parametrize("is_block", [True, False])
def test_a_removed_function_is_refused_with_its_replacement(is_block):
    rule = {"_component_": FUNCTION, "start": 1} if is_block else FUNCTION
    with pytest.raises(SettingError) as refused:
        Settings.from_config(PLAIN | {"batch_size_schedule": rule})
    assert refused.value.key.startswith("batch_size_schedule")
    assert REMOVED[FUNCTION] in str(refused.value)


def test_removed_keys_are_not_settings():
    assert not {*keys_of(Settings)} & {*REMOVED}
