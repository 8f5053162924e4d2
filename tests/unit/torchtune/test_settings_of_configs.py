"""Each of torchtune's configurations is accepted unchanged, or refused by the key of its task."""

from pathlib import Path

import pytest
import torchtune
from omegaconf import OmegaConf
from torchtune import config
from torchtune._recipe_registry import get_all_recipes

from adaptive_batch.config_files import config_files, shipped_configs
from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import (
    AdapterModel,
    Distillation,
    FullModel,
    Job,
    NextTokens,
    PreferencePairs,
    Settings,
    without_effect,
)
from adaptive_batch.torchtune.checks import check_parallel
from adaptive_batch.torchtune.configuration import TORCHTUNE_KEYS, block, keys_of
from adaptive_batch.torchtune.settings import OURS, ProbeSettings

STOCK = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
TAKEN = {
    "full_finetune_single_device": 17,
    "full_finetune_distributed": 27,
    "lora_finetune_single_device": 41,
    "lora_finetune_distributed": 36,
    "lora_dpo_single_device": 2,
    "lora_dpo_distributed": 2,
    "full_dpo_distributed": 1,
    "knowledge_distillation_single_device": 2,
    "knowledge_distillation_distributed": 2,
}
REFUSED = {
    "ppo_full_finetune_single_device": "policy_model",
    "qat_distributed": "quantizer",
    "qat_lora_finetune_distributed": "quantizer",
    "dev/lora_finetune_distributed_multi_dataset": "datasets",
    "generate": "max_new_tokens",
    "dev/generate_v2": "max_new_tokens",
    "dev/generate_v2_distributed": "max_new_tokens",
    "eleuther_eval": "tasks",
    "quantize": "quantizer",
}
CONFIGS = [
    (recipe.name, found.file_path)
    for recipe in get_all_recipes()
    for found in recipe.configs
    # torchtune's package lacks the files of a recipe in development.
    if (STOCK / found.file_path).exists()
]


def test_the_tables_list_every_configuration():
    assert set(NAMES) == {*MODELS, "demo_cpu"}
    recipes = [recipe for recipe, _ in CONFIGS]
    assert set(recipes) == {*TAKEN, *REFUSED}
    assert {recipe: recipes.count(recipe) for recipe in TAKEN} == TAKEN


# Keys that torchtune's recipes ignore too.
UNREAD = {
    "dev/8B_full_experimental.yaml": ("memory_efficient_fsdp_wrap",),
    **dict.fromkeys(
        ("llama2/7B_qlora.yaml", "llama2/70B_qlora.yaml", "llama3_1/405B_qlora.yaml"), ("fsdp",)
    ),
}
KINDS = {"dpo": PreferencePairs, "distillation": Distillation}


@pytest.mark.parametrize(
    ("recipe", "path"), [(recipe, path) for recipe, path in CONFIGS if recipe in TAKEN]
)
def test_a_configuration_of_torchtune_is_accepted_unchanged(recipe, path):
    cfg = OmegaConf.load(STOCK / path)
    settings = Settings.from_config(cfg)
    assert not settings.adaptive
    assert settings.drop_last
    assert settings.sync_gradients_every_micro_batch
    assert tuple(without_effect(settings, cfg)) == UNREAD.get(path, ())
    if "distributed" in recipe:
        assert check_parallel(cfg, world_size=8) == cfg.get("tensor_parallel_dim", 1)
    # Builders of vision models require torchvision.
    if "vision" not in cfg.model._component_:
        cfg.update({"device": "cpu", "dtype": "fp32", "enable_activation_offloading": False})
        job = Job(cfg, Settings.from_config(cfg))
        assert type(job.builder) is (
            AdapterModel if "lora_" in cfg.model._component_ else FullModel
        )
        (task,) = [KINDS[word] for word in KINDS if word in recipe] or [NextTokens]
        assert type(job.task) is task
        job.check_model()


@pytest.mark.parametrize(("recipe", "path"), [one for one in CONFIGS if one[0] in REFUSED])
def test_a_configuration_of_another_task_is_refused_by_its_key(recipe, path):
    with pytest.raises(SettingError) as refused:
        Settings.from_config(OmegaConf.load(STOCK / path))
    assert refused.value.key == REFUSED[recipe]


NAMES = [name for name, _ in shipped_configs()]
# torchtune's config of the same model.
MODELS = {
    "gemma2_2B": "gemma2/2B_full",
    "llama3_1_70B_8gpu": "llama3_1/70B_full",
    "llama3_1_8B": "llama3_1/8B_full_single_device",
    "llama3_1_8B_8gpu": "llama3_1/8B_full",
    "llama3_2_1B": "llama3_2/1B_full_single_device",
    "llama3_2_3B": "llama3_2/3B_full_single_device",
    "phi4_14B": "phi4/14B_full_low_memory",
    "qwen2_5_0_5B": "qwen2_5/0.5B_full_single_device",
    "qwen2_5_1_5B": "qwen2_5/1.5B_full_single_device",
    "qwen2_5_7B": "qwen2_5/7B_full_single_device",
    "llama3_1_8B_lora": "llama3_1/8B_lora_single_device",
    "llama3_1_8B_qlora": "llama3_1/8B_qlora_single_device",
    "llama3_2_1B_lora": "llama3_2/1B_lora_single_device",
    "qwen2_5_7B_lora": "qwen2_5/7B_lora_single_device",
    "llama3_1_8B_dpo_8gpu": "llama3_1/8B_full_dpo",
    "llama3_1_8B_lora_dpo": "llama3_1/8B_lora_dpo_single_device",
    "llama3_2_3B_lora_dpo": "llama3_2/3B_lora_single_device",
    "qwen2_5_7B_lora_dpo": "qwen2_5/7B_lora_single_device",
    "llama3_2_1B_lora_distill": "llama3_2/8B_to_1B_KD_lora_single_device",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_is_valid_and_shows_our_keys_with_their_defaults(name):
    cfg = OmegaConf.load(config_files()[name])
    config.validate(cfg)
    if name in MODELS:
        assert cfg.model == OmegaConf.load(STOCK / f"{MODELS[name]}.yaml").model
    own = {"model_dir", "teacher_dir", "demo_dir"}
    assert set(cfg) - set(TORCHTUNE_KEYS) - set(OURS) - own == set()
    assert cfg.use_maximum_batch_size is False
    assert cfg.batch_increase_function is None
    settings = Settings.from_config(OmegaConf.to_container(cfg, resolve=True))
    assert not settings.adaptive
    shown = dict(cfg.probe)
    if name == "demo_cpu":
        assert shown.pop("device_memory") == "256MiB"
        del cfg.probe["device_memory"]
        shown["device_memory"] = None
    assert block(ProbeSettings)("probe", dict(cfg.probe)) == ProbeSettings()
    assert set(shown) == set(keys_of(ProbeSettings)) - {"sequence_lengths"}
