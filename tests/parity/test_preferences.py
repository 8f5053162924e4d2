"""With everything adaptive off, preference pairs are trained on as torchtune's recipes do, to the
bit.

Where torchtune's recipes differ: that for one device logs the metrics of a step's last micro-batch,
and does not initialize DoRA's magnitudes, so that its loss is not a number; that of LoRA on ranks
logs the sum of their losses.
"""

from __future__ import annotations

import pytest
from support.adapters import KINDS, make_wide_setup, same_epoch
from support.cli import SmallSetup, same_weights
from support.preferences import (
    LORA,
    METRICS,
    OURS,
    PAIRS,
    STOCK,
    STOCK_FULL,
    STOCK_ON_RANKS,
    reference_of,
    write_pairs,
)
from support.stock import Task, run_tasks

ALONE = "save_adapter_weights_only=True"
ACCUMULATED = ("batch_size=3", "gradient_accumulation_steps=3")


@pytest.fixture(scope="module")
def pairs(small) -> tuple[str, ...]:
    return write_pairs(small)


@pytest.mark.parametrize(
    "overrides",
    [
        ("epochs=1",),
        *(
            pytest.param(overrides, marks=pytest.mark.slow)
            for overrides in (
                ("epochs=2", "dtype=bf16", ALONE),
                ("epochs=1", "loss.label_smoothing=0.1", "model.lora_dropout=0.1", "batch_size=3"),
            )
        ),
    ],
)
def test_losses_metrics_and_adapters_are_those_of_the_stock_recipe(small, pairs, overrides):
    ours, stock = (small.run_in_process(name, *LORA, *pairs, *overrides) for name in (OURS, STOCK))
    assert ours.losses == stock.losses != []
    assert len(set(ours.losses)) > 2
    for name in METRICS:
        assert ours.figures(name) == stock.figures(name) != []
    assert same_epoch(ours, stock, 1 if "epochs=2" in overrides else 0)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_accumulated_losses_and_adapters_are_those_of_the_stock_recipe(small, pairs, dtype):
    own = (*LORA, *pairs, *ACCUMULATED, "epochs=1", f"dtype={dtype}")
    ours, stock = (small.run_in_process(name, *own) for name in (OURS, STOCK))
    # The stock recipe adds up losses in the model's dtype, and ours in float32.
    rounding = 0 if dtype == "fp32" else 2**-8
    expected = [pytest.approx(float(loss), rel=rounding) for loss in stock.losses]
    assert [float(loss) for loss in ours.losses] == expected != []
    assert same_epoch(ours, stock, 0)


@pytest.mark.slow
def test_a_quantized_base_trains_as_in_the_stock_recipe(tmp_path):
    wide = make_wide_setup(tmp_path)
    own = (*LORA, *write_pairs(wide), *KINDS["QLoRA"], "epochs=1")
    ours, stock = (wide.run_in_process(name, *own) for name in (OURS, STOCK))
    assert ours.losses == stock.losses != []
    assert same_epoch(ours, stock, 0)


@pytest.mark.slow
def test_two_ranks_equal_the_stock_recipes(small: SmallSetup, pairs):
    full = (*PAIRS, *reference_of(small), "optimizer.lr=1e-3", "epochs=1")
    cases = [
        (STOCK_ON_RANKS, (*LORA, "epochs=1")),
        (STOCK_ON_RANKS, (*LORA, "epochs=1", "model.use_dora=True")),
        (STOCK_ON_RANKS, (*LORA, *ACCUMULATED, "epochs=1", "dtype=bf16")),
        (STOCK_FULL, (*full, "clip_grad_norm=0.5")),
        (STOCK_FULL, (*full, *ACCUMULATED, "enable_activation_checkpointing=True")),
        (STOCK_FULL, (*full, "dtype=bf16", "gradient_accumulation_steps=2")),
    ]
    tasks = [
        Task(name, small.fresh_folder(), (*own, *pairs))
        for stock, own in cases
        for name in (OURS, stock)
    ]
    finished = run_tasks(small, tasks, ranks=2)
    for (recipe, own), ours, stock in zip(cases, finished[::2], finished[1::2], strict=True):
        summed = 2 if recipe == STOCK_ON_RANKS else 1
        rounding = 2**-8 if "dtype=bf16" in own else 0
        expected = [pytest.approx(float(loss) / summed, rel=rounding) for loss in stock.losses]
        assert [float(loss) for loss in ours.losses] == expected != []
        for name in METRICS:
            # Of margins the stock recipes on ranks log the difference of two rounded means.
            rounding = 1e-6 if name == "rewards/margins" else 0
            if "dtype=bf16" in own:
                rounding = 2**-7
            expected = [pytest.approx(float(one), rel=rounding) for one in stock.figures(name)]
            assert [float(one) for one in ours.figures(name)] == expected
        if recipe == STOCK_FULL:
            assert same_weights(ours.weights(0), stock.weights(0))
        else:
            assert same_epoch(ours, stock, 0)
