"""A recipe logs a NaN loss, skips its step, or ends before the step changes the weights."""

import math

import pytest
import torch
from support.cli import OURS, records, resume_run
from torch.utils._pytree import tree_leaves

from adaptive_batch.checkpoint import checkpoints_in
from adaptive_batch.errors import NonfiniteLossError, SettingError

KEY = "on_nonfinite_loss"
SPOILED = (
    "loss=support.components.SpoiledLoss", "epochs=1", "max_steps_per_epoch=6", "lr_scaling=linear",
    "reference_batch_size=2", "batch_size=4",
)  # fmt: skip


def same(tensors, others):
    return all(map(torch.equal, tensors, others))


@pytest.mark.parametrize("gradients_alone", [False, True])
def test_a_skipped_step_changes_neither_weights_nor_optimizer(small, gradients_alone):
    """A skipped step consumes its rows."""
    settings = (
        *SPOILED,
        f"loss.gradients_alone={gradients_alone}",
        f"{KEY}=skip",
        "save_every_n_steps=1",
    )
    finished = small.run_in_process(OURS, *settings, "loss.at=[3,4]")
    assert [(event["step"], event["skipped"]) for event in records(finished, "nonfinite_loss")] == [
        (3, True),
        (4, True),
    ]
    steps = records(finished, "step")
    assert [step["samples_seen"] for step in steps] == [4, 8, 12, 16, 20, 24]
    is_finite = [math.isfinite(float(step["grad_norm"])) for step in steps]
    assert is_finite == [True, True, False, False, True, True]
    assert len({step["lr"] for step in steps}) == 1

    def saved(step):
        """Return the tensors of the model and the optimizer in a checkpoint."""
        points = checkpoints_in(finished.output_dir)
        (point,) = (point for point in points if point.step == step)
        tensors, _ = point.load()
        leaves = tree_leaves((tensors["model"], tensors["optimizer"]["state"]))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    assert same(saved(2), saved(4))
    assert not same(saved(4), saved(5))
    assert all(tensor.isfinite().all() for tensor in finished.weights(0).values())


def test_an_epoch_of_skipped_steps_is_an_error(small):
    folder = small.fresh_folder()
    with pytest.raises(
        NonfiniteLossError,
        match=r"^epoch 0: the loss or the gradients of all 6 steps are not finite, so nothing",
    ):
        small.run_in_process(
            OURS, *SPOILED, "loss.at=[1,2,3,4,5,6]", f"{KEY}=skip", f"output_dir={folder}"
        )
    assert not list(folder.glob("epoch_*"))


STOPS = (*SPOILED, "loss.at=[4]", f"{KEY}=stop", "save_every_n_steps=2")


def test_stop_ends_the_run_before_the_step_and_the_error_names_the_last_checkpoint(small):
    folder = small.fresh_folder()
    with pytest.raises(NonfiniteLossError) as error:
        small.run_in_process(OURS, *STOPS, f"output_dir={folder}")
    assert str(error.value).startswith("step 4: the loss is nan, lr 0.02; step 3 had loss ")
    assert str(error.value).endswith("/step_2")
    assert [path.name for kind in ("step_*", "epoch_*") for path in folder.glob(kind)] == ["step_2"]
    rest = resume_run(small, folder, *SPOILED, "loss.at=[]")
    assert [step["step"] for step in records(rest, "step")] == [1, 2, 3, 3, 4, 5, 6]
    assert [event["step"] for event in records(rest, "nonfinite_loss")] == [4]


def test_with_the_optimizer_in_backward_a_step_cannot_be_skipped(small):
    in_backward = ("optimizer_in_bwd=True", "gradient_accumulation_steps=1", "clip_grad_norm=null")
    with pytest.raises(SettingError, match=f"^{KEY}='skip': with the optimizer in backward"):
        small.run_in_process(OURS, *SPOILED, "loss.at=[3]", *in_backward, f"{KEY}=skip")
    with pytest.raises(
        NonfiniteLossError, match=r"step 3: the loss is nan, .*the weights have been stepped by it"
    ):
        small.run_in_process(OURS, *SPOILED, "loss.at=[3]", *in_backward, f"{KEY}=stop")


@pytest.mark.parametrize("lr", ["1e-3", "1e38"])
def test_nonfinite_weights_after_the_last_step_are_reported(small, lr):
    done = small.run_in_process(OURS, "epochs=1", "max_steps_per_epoch=1", f"optimizer.lr={lr}")
    assert len(records(done, "nonfinite_weights")) == (lr == "1e38")
