"""Each stock configuration of torchtune is taken as it is, or refused by the key that says why."""

from pathlib import Path

import pytest
import torchtune
from omegaconf import OmegaConf
from torchtune._recipe_registry import get_all_recipes

from adaptive_batch.errors import SettingError
from adaptive_batch.torchtune import Settings

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


def settings_of(path):
    return Settings.from_config(OmegaConf.to_container(OmegaConf.load(FOLDER / path), resolve=True))


def test_every_stock_configuration_is_looked_at_here():
    recipes = [recipe for recipe, _ in CONFIGS]
    assert set(recipes) == {*TAKEN, *REFUSED}
    assert {recipe: recipes.count(recipe) for recipe in TAKEN} == TAKEN


@pytest.mark.parametrize("path", [path for recipe, path in CONFIGS if recipe in TAKEN])
def test_a_stock_configuration_is_taken_as_it_is(path):
    settings = settings_of(path)
    assert not settings.adaptive
    assert settings.drop_last


@pytest.mark.parametrize(("recipe", "path"), [one for one in CONFIGS if one[0] in REFUSED])
def test_a_stock_configuration_of_another_task_is_refused_by_its_key(recipe, path):
    with pytest.raises(SettingError) as refused:
        settings_of(path)
    assert refused.value.key == REFUSED[recipe]
