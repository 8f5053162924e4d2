"""What several ranks check before they begin, and how they are described; what runs of several ranks do is in recipes/."""

from pathlib import Path

import pytest
import torchtune
from omegaconf import OmegaConf
from torchtune._recipe_registry import get_all_recipes

from adaptive_batch import distributed
from adaptive_batch.errors import GrowthFunctionError, SettingError
from adaptive_batch.torchtune import Settings, check_fewer_ranks
from adaptive_batch.torchtune.keys import TORCHTUNE_KEYS
from adaptive_batch.torchtune.ranks import check_parallel, describe_ranks
from adaptive_batch.training import differences, same_answers

FOLDER = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
DISTRIBUTED = {
    found.name: FOLDER / found.file_path
    for recipe in get_all_recipes()
    if recipe.name == "full_finetune_distributed"
    for found in recipe.configs
}
OPTIMIZER = {"optimizer": {"_component_": "torch.optim.AdamW"}, "device": "cuda"}


@pytest.fixture
def eight_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")


def test_there_are_stock_configurations_for_many_devices():
    assert len(DISTRIBUTED) >= 20


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_stock_configuration_for_many_devices_is_taken_as_it_is(name, eight_ranks):
    cfg = OmegaConf.load(DISTRIBUTED[name])
    settings = Settings.from_config(OmegaConf.to_container(cfg, resolve=True))
    assert not settings.adaptive
    assert settings.drop_last
    assert check_parallel(cfg) == cfg.get("tensor_parallel_dim", 1)
    assert settings.sync_gradients_every_micro_batch


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_every_key_of_a_stock_configuration_is_known_to_be_torchtunes(name):
    known = {*TORCHTUNE_KEYS, "save_adapter_weights_only", "model_type", "tensor_parallel_dim", "model_dir"}
    assert {str(key) for key in OmegaConf.load(DISTRIBUTED[name])} - known == set()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"tensor_parallel_dim": 3}, "tensor_parallel_dim=3: it must divide the 8 ranks; give one of 1, 2, 4, 8"),
        ({"tensor_parallel_dim": 0}, "tensor_parallel_dim=0: give a whole number"),
        ({"tensor_parallel_dim": 2}, "tensor_parallel_plan=None"),
        ({"fsdp_cpu_offload": True, "device": "cpu"}, "fsdp_cpu_offload=True: device is cpu"),
        ({"fsdp_cpu_offload": "yes"}, "fsdp_cpu_offload='yes': give True or False"),
    ],
)
def test_what_is_configured_for_ranks_is_checked(keys, says, eight_ranks):
    with pytest.raises(SettingError) as refused:
        check_parallel(OmegaConf.create(OPTIMIZER | keys))
    assert says in str(refused.value)


def test_an_optimizer_that_needs_the_device_is_refused_with_offloading(eight_ranks):
    cfg = {
        "device": "cuda",
        "fsdp_cpu_offload": True,
        "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"},
    }
    with pytest.raises(
        SettingError, match=r"bitsandbytes\.optim\.PagedAdamW8bit cannot step parameters that lie on the host"
    ):
        check_parallel(OmegaConf.create(cfg))


def test_a_fused_optimizer_is_refused_with_tensor_parallelism(eight_ranks):
    cfg = OPTIMIZER | {"tensor_parallel_dim": 2, "tensor_parallel_plan": {"_component_": "a.b"}}
    cfg["optimizer"] = {"_component_": "torch.optim.AdamW", "fused": True}
    with pytest.raises(SettingError, match=r"optimizer\.fused=True"):
        check_parallel(OmegaConf.create(cfg))


def test_one_process_ignores_what_is_for_many():
    assert check_parallel(OmegaConf.create(OPTIMIZER | {"tensor_parallel_dim": 1, "fsdp_cpu_offload": True})) == 1


def test_what_differs_is_named_with_both_values():
    mine, first = {"batch_size": "3", "seed": "1"}, {"seed": "1", "batch_size": "4", "epochs": "2"}
    assert list(differences(mine, first)) == [("batch_size", "3", "4"), ("epochs", "nothing", "2")]


def test_a_function_that_answers_differently_is_refused_with_the_rank(monkeypatch):
    monkeypatch.setattr(distributed, "all_gather", lambda mine: [mine, {"f in epoch 1": "9"}])
    with pytest.raises(GrowthFunctionError, match="f in epoch 1 answers 9 on rank 1 and 8 on rank 0"):
        same_answers({"f in epoch 1": 8})


@pytest.mark.parametrize(
    ("ranks", "step_rows", "says"),
    [
        (
            4,
            16,
            "4 ranks, and 2 began the run: batches, their order and the learning rate go on as they were; each holds 4 rows",
        ),
        (1, 16, "1 rank, and 2 began the run"),
        (3, 8, "2 of them hold 3 rows of the 8 of a step, and 1 holds 2 rows"),
        (4, 0, "the rows of each step are dealt to them by their tokens"),
    ],
)
def test_another_number_of_ranks_is_described(monkeypatch, ranks, step_rows, says):
    monkeypatch.setattr(distributed, "data_parallel_size", lambda: ranks)
    assert says in describe_ranks(began_on=2, step_rows=step_rows)


def test_fewer_ranks_are_refused_where_a_step_cannot_be_split(monkeypatch):
    config = {"batch_size": 2, "gradient_accumulation_steps": 1, "epochs": 1, "optimizer_in_bwd": True}
    settings = Settings.from_config(config)
    monkeypatch.setattr(distributed, "data_parallel_size", lambda: 1)
    with pytest.raises(SettingError, match="start 2 or more"):
        check_fewer_ranks(settings, began_on=2)
    monkeypatch.setattr(distributed, "data_parallel_size", lambda: 4)
    check_fewer_ranks(settings, began_on=2)
