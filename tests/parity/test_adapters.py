"""With everything adaptive off, adapters are trained as torchtune's recipes train them, to the bit.
The long form: benchmarks/parity_adapters.py.

On a CPU torchtune's recipe merges the adapters into the model that goes on training wherever it
saves an epoch, so runs of two epochs save the adapters alone.
"""

from __future__ import annotations

import pytest
from support.adapters import KINDS, LORA, OURS, STOCK, STOCK_ON_RANKS, make_wide_setup, same_epoch
from support.cli import FEATURES, SmallSetup
from support.stock import Task, run_tasks

ALONE = "save_adapter_weights_only=True"
SHORT = (  # without which torchtune's recipe begins its schedule again where it resumes
    "max_steps_per_epoch=3"
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> SmallSetup:
    return make_wide_setup(tmp_path_factory.mktemp("wide"))


def assert_alike(ours, stock, epoch):
    assert ours.losses == stock.losses != []
    assert ours.figures("grad_norm") == stock.figures("grad_norm")
    assert same_epoch(ours, stock, epoch)


@pytest.mark.parametrize(
    ("kind", "features", "overrides"),
    [
        ("LoRA", ("accumulation", "clipping", "bf16"), ("model.lora_dropout=0.1", "epochs=1")),
        ("DoRA", ("plain cross-entropy",), ("epochs=1",)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("LoRA", (), ("epochs=1",)),
                ("LoRA", ("activation checkpointing", "packed"), (ALONE,)),
                ("DoRA", ("bf16", "accumulation"), (ALONE,)),
            )
        ),
    ],
)
def test_losses_norms_and_adapters_are_the_stock_recipes(small, kind, features, overrides):
    own = (*LORA, *KINDS[kind], *(one for name in features for one in FEATURES[name]), *overrides)
    ours, stock = (small.run_in_process(recipe, *own) for recipe in (OURS, STOCK))
    assert_alike(ours, stock, 0 if "epochs=1" in overrides else 1)


@pytest.mark.slow
def test_a_quantized_base_trains_as_in_the_stock_recipe(wide):
    own = (*LORA, *KINDS["QLoRA"], "epochs=1", SHORT)
    ours, stock = (wide.run_in_process(recipe, *own) for recipe in (OURS, STOCK))
    assert_alike(ours, stock, 0)


@pytest.mark.nightly
def test_two_ranks_equal_the_stock_recipe(wide):
    asked = [
        ("LoRA", "clip_grad_norm=0.5"),
        ("DoRA", "gradient_accumulation_steps=2"),
        ("QLoRA", ALONE),
    ]
    each = [(*LORA, *KINDS[kind], "epochs=1", SHORT, own) for kind, own in asked]
    tasks = [
        Task(recipe, wide.fresh_folder(), own) for own in each for recipe in (OURS, STOCK_ON_RANKS)
    ]
    finished = run_tasks(wide, tasks, ranks=2)
    for ours, stock in zip(finished[::2], finished[1::2], strict=True):
        assert_alike(ours, stock, 0)
