"""Each stock configuration of torchtune is taken as it is, or refused by the key that says why."""

from pathlib import Path

import pytest
import torchtune
from omegaconf import OmegaConf
from torchtune._recipe_registry import get_all_recipes

from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import (
    AdapterModel,
    Distillation,
    FullModel,
    Job,
    NextTokens,
    PreferencePairs,
    Settings,
    builder_of,
    without_effect,
)
from adaptive_batch.torchtune.checks import check_parallel

FOLDER = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
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
    # Of a recipe in development the package has no file.
    if (FOLDER / found.file_path).exists()
]


def test_every_stock_configuration_is_looked_at_here():
    recipes = [recipe for recipe, _ in CONFIGS]
    assert set(recipes) == {*TAKEN, *REFUSED}
    assert {recipe: recipes.count(recipe) for recipe in TAKEN} == TAKEN


# Keys that torchtune's own recipes do not read either.
UNREAD = {
    "dev/8B_full_experimental.yaml": ["memory_efficient_fsdp_wrap"],
    "llama2/7B_qlora.yaml": ["fsdp"],
}
TASKS = {"dpo": PreferencePairs, "distillation": Distillation}


@pytest.mark.parametrize(
    ("recipe", "path"), [(recipe, path) for recipe, path in CONFIGS if recipe in TAKEN]
)
def test_a_stock_configuration_is_taken_as_it_is(recipe, path):
    cfg = OmegaConf.load(FOLDER / path)
    settings = Settings.from_config(cfg)
    assert not settings.adaptive
    assert settings.drop_last
    assert settings.sync_gradients_every_micro_batch
    assert list(without_effect(settings, cfg)) == UNREAD.get(path, [])
    if "distributed" in recipe:
        assert check_parallel(cfg, world_size=8) == cfg.get("tensor_parallel_dim", 1)
    # Builders of vision models need torchvision.
    if "vision" not in cfg.model._component_:
        cfg.update({"device": "cpu", "dtype": "fp32", "enable_activation_offloading": False})
        job = Job(cfg, Settings.from_config(cfg), builder_of(cfg))
        assert type(job.builder) is (
            AdapterModel if "lora_" in cfg.model._component_ else FullModel
        )
        (task,) = [TASKS[word] for word in TASKS if word in recipe] or [NextTokens]
        assert type(job.task) is task
        job.check_model()


@pytest.mark.parametrize(("recipe", "path"), [one for one in CONFIGS if one[0] in REFUSED])
def test_a_stock_configuration_of_another_task_is_refused_by_its_key(recipe, path):
    with pytest.raises(SettingError) as refused:
        Settings.from_config(OmegaConf.load(FOLDER / path))
    assert refused.value.key == REFUSED[recipe]
