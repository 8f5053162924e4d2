"""Axolotl's plugin adopts a trainer with the keys of the configuration."""

import pytest
from torch import nn
from transformers import Trainer, TrainingArguments

from adaptive_batch import SettingError
from adaptive_batch.integrations.axolotl import AdaptiveConfig, AdaptivePlugin
from adaptive_batch.integrations.transformers import AdaptiveArguments, AdaptiveTrainer


def trainer_in(folder):
    return Trainer(nn.Linear(2, 1), TrainingArguments(str(folder), report_to="none", use_cpu=True))


def test_a_trainer_is_adopted_with_the_configured_keys(tmp_path):
    plugin = AdaptivePlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    assert (module, name) == (AdaptiveConfig.__module__, "AdaptiveConfig")
    trainer = trainer_in(tmp_path)
    given = {
        "micro_batch_tokens": "auto",
        "device_memory": "12GiB",
        "headroom": 0.1,
        "loss_reduction": "sum",
    }
    config = AdaptiveConfig(**{f"adaptive_{key}": value for key, value in given.items()})
    plugin.post_trainer_create(config.model_dump(), trainer)
    assert isinstance(trainer, AdaptiveTrainer)
    assert trainer.adaptive == AdaptiveArguments(**given)
    with pytest.raises(SettingError, match="micro_batch_size=0"):
        plugin.post_trainer_create({"adaptive_micro_batch_size": 0}, trainer_in(tmp_path))


def test_other_hooks_do_nothing():
    plugin = AdaptivePlugin()
    assert plugin.add_callbacks_pre_trainer({}, None) is None
    assert plugin.get_adapter_capabilities() == []
    assert not hasattr(plugin, "__len__")
