"""With everything adaptive off, a student is distilled as torchtune's recipes do, to the bit, but
for what is wrong in these: tests/support/corrected_distillation.py.
"""

from __future__ import annotations

import pytest
from support.adapters import same_epoch
from support.cli import SmallSetup
from support.distillation import (
    CORRECTED,
    LORA,
    METRICS,
    OURS,
    PLAIN,
    STOCK_ON_RANKS,
    write_teacher,
)
from support.stock import Task, run_tasks

ALONE = "save_adapter_weights_only=True"
ACCUMULATED = ("batch_size=3", "gradient_accumulation_steps=3")


@pytest.fixture(scope="module")
def lora(small) -> tuple[str, ...]:
    return (*LORA, *write_teacher(small))


def same_figures(ours, stock) -> bool:
    return all(
        ours.figures(name) == stock.figures(name) != [] for name in ("loss", *METRICS)
    ) and ours.figures("grad_norm") == stock.figures("grad_norm")


@pytest.mark.parametrize(
    "overrides",
    [
        # The chunks of two rows do not lie in one piece.
        (
            "epochs=1",
            "enable_activation_checkpointing=True",
            "model.use_dora=True",
            "batch_size=2",
        ),
        *(
            pytest.param(overrides, marks=pytest.mark.slow)
            for overrides in (
                ("epochs=2", "dtype=bf16", ALONE),
                ("epochs=1", *ACCUMULATED, "clip_grad_norm=0.5", "model.use_dora=True"),
                ("epochs=1", *PLAIN, "model.lora_dropout=0.1"),
            )
        ),
    ],
)
def test_losses_metrics_and_adapters_are_those_of_the_corrected_stock_recipe(
    small, lora, overrides
):
    ours, stock = (small.run_in_process(name, *lora, *overrides) for name in (OURS, CORRECTED))
    assert same_figures(ours, stock)
    assert len(set(ours.figures("kd_loss"))) > 1
    assert same_epoch(ours, stock, 1 if "epochs=2" in overrides else 0)


@pytest.mark.slow
def test_two_ranks_equal_the_corrected_stock_recipe(small: SmallSetup, lora):
    cases = [
        ("epochs=1", "enable_activation_checkpointing=True"),
        ("epochs=1", "batch_size=2", "gradient_accumulation_steps=2", "dtype=bf16"),
        ("epochs=1", *PLAIN),
    ]
    tasks = [
        Task(name, small.fresh_folder(), (*lora, *own))
        for own in cases
        for name in (OURS, CORRECTED)
    ]
    as_it_is = Task(STOCK_ON_RANKS, small.fresh_folder(), (*lora, *cases[0]))
    *finished, stock_as_it_is = run_tasks(small, [*tasks, as_it_is], ranks=2)
    for ours, stock in zip(finished[::2], finished[1::2], strict=True):
        assert same_figures(ours, stock)
        assert same_epoch(ours, stock, 0)
    # It logs the loss of rank zero alone.
    assert stock_as_it_is.losses[0] != finished[0].losses[0]
