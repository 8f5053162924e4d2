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
    interrupted,
    resume,
    same_weights,
    weights,
    write_vision_base,
)

# Each feature at least once, and such together as could spoil one another.
COMBINATIONS = (
    (),
    ("accumulation",),
    ("accumulation", "dropout", "activation checkpointing"),
    ("plain cross-entropy", "dropout", "max_steps_per_epoch"),
    ("packed", "accumulation", "clipping"),
    ("cosine", "clipping", "concatenated"),
    ("SGD with momentum", "cosine", "accumulation"),
    ("bf16", "accumulation", "plain cross-entropy"),
    ("bf16", "activation checkpointing", "clipping", "dropout"),
)
# What `make test` compares.
QUICK = (COMBINATIONS[4], COMBINATIONS[8])


def overrides_of(features):
    return [override for feature in features for override in FEATURES[feature]]


def floats(finished):
    return [float(loss) for loss in finished.losses]


def largest_relative_difference(one, other):
    assert one.keys() == other.keys()
    return max(
        ((one[name] - other[name]).norm() / other[name].norm().clamp_min(1e-12)).item()
        for name in one
    )


def gradients(small, recipe, *overrides):
    """The gradients of one step, as what plain SGD with rate 1 takes off the weights."""
    before = weights(small.base)
    plain = (
        "optimizer=torch.optim.SGD",
        "optimizer.lr=1.0",
        "optimizer.fused=False",
        "epochs=1",
        "max_steps_per_epoch=1",
    )
    after = small.run_in_process(recipe, *plain, *overrides).weights(0)
    return {name: before[name] - after[name] for name in before}


# --- the same, to the bit


@pytest.mark.parametrize(
    "features",
    [
        pytest.param(features, marks=[pytest.mark.slow] * (features not in QUICK))
        for features in COMBINATIONS
    ],
    ids=lambda features: " + ".join(features) or "defaults",
)
def test_losses_and_final_weights_equal_those_of_the_stock_recipe(small, features):
    overrides = overrides_of(features)
    stock, ours = (small.run_in_process(recipe, *overrides) for recipe in (STOCK, OURS))
    assert len(stock.losses) >= 4
    assert ours.losses == stock.losses
    assert ours.figures("grad_norm") == stock.figures("grad_norm")
    assert same_weights(ours.weights(1), stock.weights(1))


def test_every_feature_is_in_some_combination():
    assert {feature for features in COMBINATIONS for feature in features} == FEATURES.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("features", [("accumulation",), ("cosine", "dropout")], ids=" + ".join)
def test_a_resumed_second_epoch_is_that_of_the_stock_recipe(small, features):
    overrides = overrides_of(features)
    stock, ours = (small.run_in_process(recipe, *overrides) for recipe in (STOCK, OURS))
    expected = resume(small, STOCK, interrupted(stock, small), *overrides)
    assert 2 * len(expected.losses) == len(stock.losses)
    resumed = resume(small, OURS, interrupted(ours, small), *overrides)
    assert resumed.losses == expected.losses
    assert same_weights(resumed.weights(1), expected.weights(1))
    if "dropout" not in features:  # the stock recipe starts its random numbers anew
        assert expected.losses == stock.losses[len(expected.losses) :]


# --- where the stock recipe has a defect


def test_splitting_a_step_leaves_gradients_as_they_are_even_where_the_first_label_counts(small):
    def of_both_splits(recipe):
        split = ("batch_size=2", "gradient_accumulation_steps=4")
        return [
            gradients(small, recipe, "dataset.train_on_input=True", *sizes)
            for sizes in (("batch_size=8",), split)
        ]

    whole, split = of_both_splits(OURS)
    stock_whole, stock_split = of_both_splits(STOCK)
    assert largest_relative_difference(split, whole) < 1e-5
    assert (
        largest_relative_difference(whole, stock_whole) < 1e-5
    )  # in one piece the stock weights cancel
    assert (
        largest_relative_difference(stock_split, stock_whole) > 1e-3
    )  # its labels are counted before the shift


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


def test_in_backward_the_optimizer_sees_the_mean_and_not_its_multiple(small):
    plain = ("optimizer=torch.optim.SGD", "optimizer.lr=0.05")
    apart = small.run_in_process(OURS, *plain)
    in_backward = small.run_in_process(OURS, *plain, "optimizer_in_bwd=True")
    stock = small.run_in_process(STOCK, *plain, "optimizer_in_bwd=True")
    assert floats(in_backward) == pytest.approx(floats(apart), rel=1e-4)
    assert floats(stock)[0] == floats(apart)[0]
    assert floats(stock)[1:] != pytest.approx(floats(apart)[1:], rel=1e-2, nan_ok=True)


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
        "model=support.cli.vision_model",
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
