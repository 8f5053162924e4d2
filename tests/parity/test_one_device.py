"""With everything adaptive off the recipe is torchtune's stock recipe to the bit, but for the stock
recipe's defects.

The full sweep is benchmarks/parity.py; this is one run or two for each feature.
"""

import pytest
from support.cli import (
    FEATURES,
    LOG,
    MODEL,
    OURS,
    STOCK,
    same_weights,
    write_vision_base,
)

# Each feature at least once, and such together as could spoil one another; the first two in
# `make test`.
COMBINATIONS = (
    ("packed", "accumulation", "clipping"),
    ("bf16", "activation checkpointing", "clipping", "dropout"),
    ("plain cross-entropy", "dropout", "max_steps_per_epoch"),
    ("SGD with momentum", "cosine", "accumulation", "concatenated"),
)


# --- the same, to the bit


@pytest.mark.parametrize(
    "features",
    [
        pytest.param(features, marks=[pytest.mark.slow] * (features not in COMBINATIONS[:2]))
        for features in COMBINATIONS
    ],
    ids=lambda features: " + ".join(features),
)
def test_losses_and_final_weights_equal_those_of_the_stock_recipe(small, features):
    overrides = [override for feature in features for override in FEATURES[feature]]
    stock, ours = (small.run_in_process(recipe, *overrides) for recipe in (STOCK, OURS))
    assert len(stock.losses) >= 4
    assert ours.losses == stock.losses
    assert ours.figures("grad_norm") == stock.figures("grad_norm")
    assert same_weights(ours.weights(1), stock.weights(1))


# --- where the stock recipe has a defect


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


# --- every stock configuration, by its name


def test_a_stock_configuration_trains_by_its_name_as_in_the_stock_recipe(small):
    overrides = [
        "model=torchtune.models.qwen2.qwen2",
        *(f"model.{key}={value}" for key, value in MODEL.items()),
        "tokenizer=torchtune.models.qwen2.qwen2_tokenizer",
        f"tokenizer.path={small.base / 'vocab.json'}",
        f"tokenizer.merges_file={small.base / 'merges.txt'}",
        f"tokenizer.special_tokens_path={small.base / 'tokenizer.json'}",
        f"tokenizer.max_seq_len={MODEL['max_seq_len']}",
        f"checkpointer.checkpoint_dir={small.base}",
        "dataset=torchtune.datasets.instruct_dataset",
        "dataset.source=json",
        f"dataset.data_files={small.folder / 'train.jsonl'}",
        f"dataset.cache_dir={small.folder / 'cache'}",
        "dataset.split=train",
        "dataset.column_map={input: signature, output: docstring}",
    ]
    assert_trains_as_stock(small, "qwen2_5/0.5B_full_single_device", overrides, steps=2)


def test_the_stock_vision_configuration_trains_by_its_name_as_in_the_stock_recipe(small):
    write_vision_base(small.folder / "vision")
    overrides = [
        "model=support.cli.VisionModel",
        "tokenizer=support.cli.vision_tokenizer",
        f"tokenizer.path={small.base}",
        "checkpointer=torchtune.training.FullModelTorchTuneCheckpointer",
        f"checkpointer.checkpoint_dir={small.folder / 'vision'}",
        "~checkpointer.checkpoint_files",
        "checkpointer.checkpoint_files=[model.pt]",
        "dataset=support.cli.pictures",
        "optimizer=torch.optim.AdamW",
        "gradient_accumulation_steps=2",
    ]
    assert_trains_as_stock(small, "llama3_2_vision/11B_full_single_device", overrides, steps=2)


def assert_trains_as_stock(small, name, overrides, *, steps):
    here = ["device=cpu", "seed=7", f"metric_logger.filename={LOG}"]
    stock, ours = (
        small.run_in_process(recipe, *overrides, *here, config=name) for recipe in (STOCK, OURS)
    )
    assert len(stock.losses) == steps
    assert ours.losses == stock.losses
