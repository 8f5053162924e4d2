"""Without adaptive features, each recipe has the bits of torchtune's recipe, except for defects of
the latter.

The full sweeps are benchmarks/parity.py, parity_adapters.py, parity_tasks.py and
parity_on_ranks.py. Distillation is compared with tests/support/corrected_distillation.py. On a CPU,
torchtune's adapter recipe merges adapters into the model in training at each save, so its runs of
two epochs save the adapters alone.
"""

from __future__ import annotations

import math

import pytest
from support.cli import (
    FEATURES,
    LOG,
    MODEL,
    OURS,
    STOCK,
    STOCK_ON_RANKS,
    block,
    write_vision_base,
)
from support.tasks import KINDS, PAIRS, PLAIN_KD, RECIPES, make_wide_setup, same_epoch

ALONE = "save_adapter_weights_only=True"
ACCUMULATED = ("batch_size=3", "gradient_accumulation_steps=3")
ONCE = "epochs=1"


def of(*features: str) -> tuple[str, ...]:
    return tuple(override for feature in features for override in FEATURES[feature])


# `make test` runs the first two of each recipe. Features that may interact are combined.
CASES = [
    ("full", of("packed", "accumulation", "clipping")),
    ("full", of("bf16", "activation checkpointing", "clipping", "dropout")),
    ("full", of("plain cross-entropy", "dropout", "max_steps_per_epoch")),
    ("full", of("SGD with momentum", "cosine", "accumulation", "concatenated")),
    ("adapters", (*of("accumulation", "clipping", "bf16"), "model.lora_dropout=0.1", ONCE)),
    ("adapters", (*KINDS["DoRA"], *of("plain cross-entropy"), ONCE)),
    ("adapters", (*of("activation checkpointing", "packed"), ALONE)),
    ("adapters", (*KINDS["QLoRA"], ONCE, "max_steps_per_epoch=3")),
    ("pairs", (ONCE,)),
    ("pairs", (ONCE, "loss.label_smoothing=0.1", "model.lora_dropout=0.1", "batch_size=3")),
    ("pairs", ("dtype=bf16", ALONE)),
    ("pairs", (*KINDS["QLoRA"], ONCE)),
    # The chunks of two rows are not contiguous.
    (
        "distillation",
        (*of("activation checkpointing"), "batch_size=2", "model.use_dora=True", ONCE),
    ),
    ("distillation", (*PLAIN_KD, "model.lora_dropout=0.1", ONCE)),
    ("distillation", (*ACCUMULATED, *of("clipping"), "model.use_dora=True", ONCE)),
]
SLOW = [
    number
    for number, (name, _) in enumerate(CASES)
    if [other for other, _ in CASES[:number]].count(name) > 1
]
# For DPO on ranks, torchtune logs the sum of the losses, and the difference of two rounded means.
ON_RANKS = {
    "full": [
        (),
        of("accumulation"),
        of("clipping", "activation checkpointing"),
        ("optimizer_in_bwd=True",),
    ],
    "adapters": [
        (ONCE, "max_steps_per_epoch=3", *of("clipping")),
        (ONCE, "max_steps_per_epoch=3", *KINDS["DoRA"], *of("accumulation")),
        (ONCE, "max_steps_per_epoch=3", *KINDS["QLoRA"], ALONE),
    ],
    "pairs": [(ONCE,), (ONCE, *ACCUMULATED, "dtype=bf16")],
    "pairs, full": [
        (ONCE, "optimizer.lr=1e-3", *of("clipping")),
        (ONCE, "optimizer.lr=1e-3", *ACCUMULATED, *of("activation checkpointing")),
    ],
    "distillation": [
        (ONCE, *of("activation checkpointing")),
        (ONCE, "batch_size=2", *of("accumulation", "bf16")),
    ],
}


def assert_alike(name, ours, stock, *, logs=True):
    """Assert that the figures of each step and all saved files are equal."""
    assert ours.losses
    for figure in ("loss", "grad_norm", *RECIPES[name].metrics) if logs else ():
        found = ours.figures(figure)
        assert found == stock.figures(figure), figure
        # Without clipping, no recipe measures the norm.
        assert found or figure == "grad_norm", figure
    epochs = [int(path.name[6:]) for path in stock.output_dir.glob("epoch_*")]
    assert epochs
    for epoch in epochs:
        assert same_epoch(ours, stock, epoch)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return make_wide_setup(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (number in SLOW), id=f"{case[0]}-{number}")
        for number, case in enumerate(CASES)
    ],
)
def test_each_recipe_trains_as_the_stock_recipe(small, wide, name, overrides):
    setup = wide if "model.quantize_base=True" in overrides else small
    recipe = RECIPES[name]
    keys = (*recipe.overrides(setup), *overrides)
    ours, stock = (setup.run_in_process(one, *keys) for one in (recipe.ours, recipe.stock))
    assert_alike(name, ours, stock)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name == "adapters")) for name in ON_RANKS],
)
def test_two_ranks_train_as_the_stock_recipe(small, wide, name):
    setup = wide if name == "adapters" else small
    recipe = RECIPES[name]
    keys = recipe.overrides(setup)
    for overrides in ON_RANKS[name]:
        ours, stock = (
            setup.run(one, *keys, *overrides, ranks=2)
            for one in (recipe.ours, recipe.stock_on_ranks)
        )
        assert_alike(name, ours, stock, logs=not name.startswith("pairs"))
        assert name != "full" or ours.figures("lr") == stock.figures("lr")


# --- defects of the stock recipe


def test_an_unfinished_accumulation_does_not_leak_into_the_next_epoch(small):
    five_batches_in_twos = ("batch_size=6", "gradient_accumulation_steps=2")
    ours = small.run_in_process(OURS, *five_batches_in_twos).losses
    stock_without_the_rest = small.run_in_process(
        STOCK, *five_batches_in_twos, "max_steps_per_epoch=2"
    ).losses
    stock = small.run_in_process(STOCK, *five_batches_in_twos).losses
    assert ours == stock_without_the_rest
    assert ours[:2] == stock[:2]
    assert ours[2] != stock[2]


def test_accumulated_losses_of_pairs_are_those_of_the_stock_recipe(small):
    """The stock recipe logs the metrics of the last micro-batch."""
    keys = (*PAIRS.overrides(small), *ACCUMULATED, ONCE)
    ours, stock = (small.run_in_process(one, *keys) for one in (PAIRS.ours, PAIRS.stock))
    assert ours.losses == stock.losses != []
    assert same_epoch(ours, stock, 0)


@pytest.mark.slow
def test_a_rank_whose_rows_have_no_label_does_not_make_the_loss_nan(small):
    # Rows of rank 1's second batch.
    rows = {"lengths": [8 + row % 5 for row in range(32)], "unlabelled": [9, 11, 13, 15]}
    unlabelled = (ONCE, "shuffle=False", *block("dataset", "support.components.OfLengths", **rows))
    runs = [small.run(recipe, *unlabelled, ranks=2) for recipe in (STOCK_ON_RANKS, OURS)]
    stock, ours = ([float(loss) for loss in run.losses] for run in runs)
    assert len(stock) == len(ours) == 4
    assert ours[0] == stock[0]
    assert math.isnan(stock[1])
    assert all(map(math.isfinite, ours))


# --- stock configurations by name


def test_a_stock_configuration_trains_by_its_name_as_in_the_stock_recipe(small):
    overrides = [
        "model=torchtune.models.qwen2.qwen2",
        *(f"model.{key}={value}" for key, value in MODEL.items()),
        f"checkpointer.checkpoint_dir={small.base}",
        "dataset=torchtune.datasets.instruct_dataset",
        "dataset.source=json",
        f"dataset.data_files={small.folder / 'train.jsonl'}",
        f"dataset.cache_dir={small.folder / 'cache'}",
        "dataset.split=train",
        "dataset.column_map={input: signature, output: docstring}",
    ]
    assert_trains_as_stock(small, "qwen2_5/0.5B_full_single_device", overrides)


def test_the_stock_vision_configuration_trains_by_its_name_as_in_the_stock_recipe(small):
    write_vision_base(small.folder / "vision")
    overrides = [
        "model=support.cli.VisionModel",
        "~tokenizer.image_size",
        "checkpointer=torchtune.training.FullModelTorchTuneCheckpointer",
        f"checkpointer.checkpoint_dir={small.folder / 'vision'}",
        "~checkpointer.checkpoint_files",
        "checkpointer.checkpoint_files=[model.pt]",
        "dataset=support.cli.pictures",
        "optimizer=torch.optim.AdamW",
        "gradient_accumulation_steps=2",
    ]
    assert_trains_as_stock(small, "llama3_2_vision/11B_full_single_device", overrides)


def assert_trains_as_stock(small, name, overrides):
    here = [
        *("device=cpu", "seed=7", f"metric_logger.filename={LOG}"),
        "tokenizer=torchtune.models.qwen2.qwen2_tokenizer",
        f"tokenizer.path={small.base / 'vocab.json'}",
        f"tokenizer.merges_file={small.base / 'merges.txt'}",
        f"tokenizer.special_tokens_path={small.base / 'tokenizer.json'}",
        f"tokenizer.max_seq_len={MODEL['max_seq_len']}",
    ]
    stock, ours = (
        small.run_in_process(recipe, *overrides, *here, config=name) for recipe in (STOCK, OURS)
    )
    assert len(stock.losses) == 2
    assert ours.losses == stock.losses
