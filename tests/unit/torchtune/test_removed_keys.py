"""A removed key is refused with the sentence that names its replacement."""

import pytest
from omegaconf import OmegaConf

from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import Settings
from adaptive_batch.torchtune.keys import keys_of
from adaptive_batch.torchtune.removed_keys import REMOVED, REMOVED_FUNCTIONS

PLAIN = {"batch_size": 2, "epochs": 1, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("key", REMOVED)
@pytest.mark.parametrize("value", ["1", "False", "null"])
def test_a_removed_key_is_refused_with_its_replacement(key, value):
    config = OmegaConf.merge(PLAIN, OmegaConf.from_dotlist([f"{key}={value}"]))
    with pytest.raises(SettingError) as refused:
        Settings.from_config(config)
    assert refused.value.key == key
    assert REMOVED[key] in str(refused.value)


@pytest.mark.parametrize("path", REMOVED_FUNCTIONS)
@pytest.mark.parametrize("is_block", [True, False])
def test_a_removed_function_is_refused_with_its_replacement(path, is_block):
    rule = {"_component_": path, "start": 1} if is_block else path
    with pytest.raises(SettingError) as refused:
        Settings.from_config(PLAIN | {"batch_size_schedule": rule})
    assert refused.value.key.startswith("batch_size_schedule")
    assert REMOVED_FUNCTIONS[path] in str(refused.value)


def test_no_key_that_is_read_is_in_the_table():
    assert not {*keys_of(Settings)} & {*REMOVED}
